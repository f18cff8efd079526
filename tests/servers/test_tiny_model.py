"""The constructed checkpoint does what its design says, worked out with numpy as the model would."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
import numpy as np
import pytest

from servers import tiny_model
from servers.tiny_words import inflected, training_words

WORDS = range(1000, 2500)


@pytest.fixture(scope="module")
def cycle() -> tiny_model.Cycle:
    return tiny_model.make_cycle(WORDS, np.random.default_rng(1))


@pytest.fixture(scope="module")
def tensors(cycle: tiny_model.Cycle) -> dict[str, tiny_model.Array]:
    return tiny_model.checkpoint(cycle, np.random.default_rng(2))


def as_served(values: tiny_model.Array) -> tiny_model.Array:
    """What a bfloat16 server reads back."""
    return (tiny_model.to_bfloat16(values).astype(np.uint32) << 16).view(np.float32)


def normed(rows: tiny_model.Array) -> tiny_model.Array:
    return rows / np.sqrt(np.mean(rows**2, axis=-1, keepdims=True) + 1e-6)


def test_the_cycle_visits_every_word_once_and_is_entered_from_everywhere(cycle: tiny_model.Cycle) -> None:
    seen = tiny_model.answer_tokens(cycle, last=10, count=len(WORDS))
    assert sorted(seen) == list(WORDS)
    assert set(cycle.follower.tolist()) <= set(WORDS)
    assert not cycle.flagged[:1000].any()
    assert cycle.flagged[list(WORDS)].mean() == pytest.approx(tiny_model.FLAGGED_SHARE, abs=0.04)


def test_too_few_words_are_refused() -> None:
    with pytest.raises(ValueError, match="only 5 word tokens"):
        tiny_model.make_cycle(range(5), np.random.default_rng(1))


def test_the_model_answers_the_cycle_from_every_token(
    cycle: tiny_model.Cycle, tensors: dict[str, tiny_model.Array]
) -> None:
    hidden = normed(as_served(tensors["model.embed_tokens.weight"]))
    logits = hidden @ as_served(tensors["lm_head.weight"]).T
    assert (logits.argmax(axis=1) == cycle.follower).all()
    # No tie that another order of summation could turn: the runner-up is clearly behind.
    best_two = np.partition(logits, -2, axis=1)[:, -2:]
    assert (best_two[:, 1] > 1.2 * best_two[:, 0]).all()


def test_the_draft_layer_is_right_but_for_flagged_tokens(
    cycle: tiny_model.Cycle, tensors: dict[str, tiny_model.Array]
) -> None:
    embedded = normed(as_served(tensors["model.embed_tokens.weight"]))
    unrelated = normed(np.random.default_rng(3).standard_normal(embedded.shape, dtype=np.float32))
    projection = as_served(tensors["model.mtp_layers.0.input_proj.weight"])
    hidden = normed(np.concatenate([unrelated, embedded], axis=1) @ projection.T)
    drafts = (hidden @ as_served(tensors["lm_head.weight"]).T).argmax(axis=1)
    right = drafts == cycle.follower
    assert right[~cycle.flagged].all()
    assert not right[cycle.flagged].any()


def test_layers_add_nothing_to_the_residual_stream(tensors: dict[str, tiny_model.Array]) -> None:
    written = [name for name in tensors if "o_proj" in name or "down_proj" in name]
    assert len(written) == 2 * (tiny_model.LAYERS + 1)
    assert not any(tensors[name].any() for name in written)
    assert sum(values.size for values in tensors.values()) == pytest.approx(67e6, rel=0.01)


def test_acceptance_by_hand() -> None:
    # 0 → 1 → 2 → 3 → 4 → 5 → 0 …, drafts fail after 2. The answer to 0 is 1 2 3 4 5 0 1 2 3 4 …
    follower = np.array([1, 2, 3, 4, 5, 0])
    flagged = np.array([False, False, True, False, False, False])
    cycle = tiny_model.Cycle(follower, flagged, wrong=0)
    # Steps of two drafts, by the token each starts from: 1 (one right, 2's is missed; 2 tokens on),
    # 3 (two right; 3 tokens on), 0 (two right), 3, 0: 14 tokens in 5 steps, 1 + 2 + 2 + 2 + 2 = 9 accepted.
    length, shares = tiny_model.acceptance(cycle, last=0, count=14, drafts=2)
    assert length == pytest.approx(1 + 9 / 5)
    assert shares == [pytest.approx(1.0), pytest.approx(0.8)]


def test_bfloat16_rounds_to_nearest_even() -> None:
    # 7 bits after the point: the step above 1 is 2⁻⁷. Half a step rounds to the even neighbour.
    step = 2.0**-7
    values = np.array([1.0, 1 + step / 2, 1 + 1.5 * step, 1 + 0.51 * step, -2.5, 0.0], dtype=np.float32)
    assert as_served(values).tolist() == [1.0, 1.0, 1 + 2 * step, 1 + step, -2.5, 0.0]


def test_the_file_is_valid_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    first = np.array([[1.0, -2.0], [0.5, 4.0]], dtype=np.float32)
    second = np.array([3.0], dtype=np.float32)
    tiny_model.write_safetensors(path, {"a": first, "b": second})
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert header["a"] == {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}
    assert header["b"] == {"dtype": "BF16", "shape": [1], "data_offsets": [8, 10]}
    # bfloat16: 1.0 = 3f80, −2.0 = c000, 0.5 = 3f00, 4.0 = 4080, 3.0 = 4040; little endian.
    assert raw[8 + length :] == bytes.fromhex("803f 00c0 003f 8040 4040")


def test_a_chat_is_rendered_without_trimming() -> None:
    template = jinja2.Template(tiny_model.CHAT_TEMPLATE)
    messages = [{"role": "user", "content": "hi "}, {"role": "assistant", "content": " there"}]
    assert template.render(messages=messages, add_generation_prompt=True) == (
        "<|im_start|>user\nhi <|im_end|>\n<|im_start|>assistant\n there<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_unfinished_or_older_checkpoint_is_made_anew(tmp_path: Path) -> None:
    assert not tiny_model.is_current(tmp_path / "missing")
    (tmp_path / "design.json").write_text('{"recipe": "older"}')
    assert not tiny_model.is_current(tmp_path)
    (tmp_path / "design.json").write_text(json.dumps({"recipe": tiny_model.recipe()}))
    assert tiny_model.is_current(tmp_path)


def test_training_text_is_the_same_every_time() -> None:
    first = list(training_words())
    assert first == list(training_words())
    assert len(first) > 1000


@pytest.mark.parametrize(
    ("stem", "ending", "word"),
    [
        ("make", "ing", "making"),
        ("carry", "ed", "carried"),
        ("play", "ed", "played"),
        ("hope", "ful", "hopeful"),
    ],
)
def test_inflections(stem: str, ending: str, word: str) -> None:
    assert inflected(stem, ending) == word
