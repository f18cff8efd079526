"""Makes the tiny checkpoint that profile `cpu` serves: real vLLM work, answers known in advance.

The architecture is MiMo (plain attention and a multi-token-prediction layer), so that prefix caching and
speculative decoding can both be on. Random projections make the compute real, while zero output projections
leave the residual stream at the embedding of the last token. From there the head reads one fixed cycle of
words, and the MTP layer predicts the same cycle except after a chosen share of *flagged* tokens, where it
drafts a wrong one. That share sets the acceptance of drafts, which `design.json` states beforehand.

    python -m servers.tiny_model results/models/tiny-mimo      # needs numpy and tokenizers, takes seconds
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from servers.tiny_words import training_words

Array = npt.NDArray[np.float32]

VOCABULARY = 4096
HIDDEN = 512
INTERMEDIATE = 4096
LAYERS = 8
HEADS = 4
HEAD_SIZE = HIDDEN // HEADS
MAX_TOKENS = 32768
FLAGGED_SHARE = 0.22  # mean acceptance length 2.9 with three drafts
FLAG = 0  # the hidden dimension that carries the flag
FLAG_SIZE = 0.5  # of a flagged token's unit embedding
SEED = 20

END_OF_TEXT, START_OF_MESSAGE, END_OF_MESSAGE = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, START_OF_MESSAGE, END_OF_MESSAGE)
# Nothing is trimmed: what a server answered must come back as the very same tokens in the next turn.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Cycle:
    """What follows what: `follower[t]` for every token of the vocabulary, `flagged[t]` where drafts fail."""

    follower: npt.NDArray[np.int64]
    flagged: npt.NDArray[np.bool_]
    wrong: int  # what the MTP layer drafts after a flagged token; never right there


def make_cycle(words: Sequence[int], rng: np.random.Generator) -> Cycle:
    """Orders the word tokens into one random cycle; every other token leads into it somewhere.

    Raises ValueError with fewer than 700 words: a 512-token answer should not repeat itself.
    """
    if len(words) < 700:
        raise ValueError(f"only {len(words)} word tokens for the cycle; the training text is too poor")
    order = rng.permutation(np.asarray(words, dtype=np.int64))
    follower = order[rng.integers(0, len(order), VOCABULARY)]
    follower[order] = np.roll(order, -1)
    flagged = np.zeros(VOCABULARY, dtype=np.bool_)
    flagged[order[rng.random(len(order)) < FLAGGED_SHARE]] = True
    never_flagged = order[~flagged[order]]
    return Cycle(follower, flagged, wrong=int(follower[never_flagged[0]]))


def answer_tokens(cycle: Cycle, last: int, count: int) -> list[int]:
    """The greedy answer of `count` tokens to a prompt that ends with token `last`."""
    tokens = []
    for _ in range(count):
        last = int(cycle.follower[last])
        tokens.append(last)
    return tokens


def acceptance(cycle: Cycle, last: int, count: int, drafts: int) -> tuple[float, list[float]]:
    """Mean acceptance length and share accepted per draft position, for a greedy answer of `count` tokens.

    The length counts the token that the main model adds in every step, as vLLM's does:
    1 + accepted / steps. Draft j + 1 is right when drafts 1…j were and the token before it is not flagged.
    """
    tokens = answer_tokens(cycle, last, count + drafts)
    accepted = [0] * drafts
    steps, position = 0, 0
    while position < count:
        right = 0
        while right < drafts and not cycle.flagged[tokens[position + right]]:
            accepted[right] += 1
            right += 1
        steps += 1
        position += right + 1
    return 1 + sum(accepted) / steps, [n / steps for n in accepted]


def embeddings(cycle: Cycle, rng: np.random.Generator) -> Array:
    """Unit vectors, one row per token; the flag dimension is zero but for flagged tokens."""
    table = rng.standard_normal((VOCABULARY, HIDDEN), dtype=np.float32)
    table[:, FLAG] = 0
    table /= np.linalg.norm(table, axis=1, keepdims=True)
    table[cycle.flagged] *= np.float32(np.sqrt(1 - FLAG_SIZE**2))
    table[cycle.flagged, FLAG] = FLAG_SIZE
    return table


def head(cycle: Cycle, table: Array) -> Array:
    """Rows [token, hidden]: each token that follows others carries their embeddings, without the flag."""
    rows = np.zeros((VOCABULARY, HIDDEN), dtype=np.float32)
    np.add.at(rows, cycle.follower, table)
    rows[:, FLAG] = 0
    return rows


def draft_projection(cycle: Cycle, head_rows: Array) -> Array:
    """The MTP layer's input projection [hidden, 2·hidden] over (last hidden state, embedding of the token).

    The hidden state is ignored and the embedding passed on; the flag's column turns it to the wrong token.
    """
    wrong = head_rows[cycle.wrong]
    matrix = np.zeros((HIDDEN, 2 * HIDDEN), dtype=np.float32)
    matrix[:, HIDDEN:] = np.eye(HIDDEN, dtype=np.float32)
    matrix[:, HIDDEN + FLAG] = 8 * wrong / np.linalg.norm(wrong)
    return matrix


def layer_tensors(prefix: str, rng: np.random.Generator) -> Iterator[tuple[str, Array]]:
    """One decoder layer under `prefix`: real work that adds nothing to the residual stream."""

    def noise(rows: int, columns: int) -> Array:
        return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(0.02)

    def zeros(*shape: int) -> Array:
        return np.zeros(shape, dtype=np.float32)

    for name, rows in (("q", HIDDEN), ("k", HEAD_SIZE), ("v", HEAD_SIZE)):
        yield f"{prefix}.self_attn.{name}_proj.weight", noise(rows, HIDDEN)
        yield f"{prefix}.self_attn.{name}_proj.bias", zeros(rows)
    yield f"{prefix}.self_attn.o_proj.weight", zeros(HIDDEN, HIDDEN)
    yield f"{prefix}.mlp.gate_proj.weight", noise(INTERMEDIATE, HIDDEN)
    yield f"{prefix}.mlp.up_proj.weight", noise(INTERMEDIATE, HIDDEN)
    yield f"{prefix}.mlp.down_proj.weight", zeros(HIDDEN, INTERMEDIATE)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}.{name}.weight", np.ones(HIDDEN, dtype=np.float32)


def checkpoint(cycle: Cycle, rng: np.random.Generator) -> dict[str, Array]:
    """Every tensor of the model by its name in the checkpoint."""
    table = embeddings(cycle, rng)
    head_rows = head(cycle, table)
    ones = np.ones(HIDDEN, dtype=np.float32)
    tensors: dict[str, Array] = {
        "model.embed_tokens.weight": table,
        "model.norm.weight": ones,
        "lm_head.weight": head_rows,
        "model.mtp_layers.0.input_proj.weight": draft_projection(cycle, head_rows),
    }
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"model.mtp_layers.0.{name}.weight"] = ones
    for layer in range(LAYERS):
        tensors.update(layer_tensors(f"model.layers.{layer}", rng))
    tensors.update(layer_tensors("model.mtp_layers.0", rng))
    return tensors


def to_bfloat16(values: Array) -> npt.NDArray[np.uint16]:
    """The upper halves of the float32 bit patterns, rounded to nearest even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_safetensors(path: Path, tensors: Mapping[str, Array]) -> None:
    """Writes the tensors as bfloat16: 8 bytes of header length, a JSON header, the raw values."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, values in tensors.items():
        end = offset + 2 * values.size
        header[name] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for values in tensors.values():
            file.write(to_bfloat16(values).tobytes())


def model_config(end_of_message: int) -> dict[str, Any]:
    """config.json. The type is qwen2, which transformers knows; vLLM goes by the architecture."""
    return {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "max_position_embeddings": MAX_TOKENS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "eos_token_id": end_of_message,
        "torch_dtype": "bfloat16",
    }


def train_tokenizer(folder: Path) -> Any:
    """Trains a byte-level BPE of `VOCABULARY` tokens on generated words and saves it; returns it."""
    # Lives in the venv of vLLM only; everything else here needs numpy alone.
    from tokenizers import (  # type: ignore[import-not-found,unused-ignore]
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        trainers,
    )

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_words(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_MESSAGE,
            "pad_token": END_OF_TEXT,
            "model_max_length": MAX_TOKENS,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return tokenizer


def word_tokens(tokenizer: Any) -> list[int]:
    """Tokens that are a space and a lower-case word, and come back as themselves when encoded alone."""
    found = []
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token])
        if re.fullmatch(r" [a-z]{3,}", text) and tokenizer.encode(text).ids == [token]:
            found.append(token)
    return found


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes one JSON object, readable and with an end of line."""
    path.write_text(json.dumps(value, indent=1) + "\n")


def recipe() -> str:
    """Changes whenever this file or the words do: an older checkpoint is then made anew."""
    sources = (Path(__file__), Path(__file__).with_name("tiny_words.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def build(folder: Path) -> dict[str, Any]:
    """Writes model, tokenizer and design.json into `folder`, all or nothing; returns the design.

    Raises OSError when the folder cannot be written.
    """
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    tokenizer = train_tokenizer(unfinished)
    end = tokenizer.token_to_id(END_OF_MESSAGE)
    rng = np.random.default_rng(SEED)
    cycle = make_cycle(word_tokens(tokenizer), rng)
    answer = answer_tokens(cycle, tokenizer.encode("\n").ids[-1], 512)
    if tokenizer.encode(tokenizer.decode(answer)).ids != answer:
        raise ValueError("an answer does not come back as the same tokens; the tokenizer is at fault")
    write_safetensors(unfinished / "model.safetensors", checkpoint(cycle, rng))
    write_json(unfinished / "config.json", model_config(end))
    write_json(unfinished / "generation_config.json", {"eos_token_id": end})
    last = tokenizer.encode("\n").ids[-1]  # a chat prompt ends with "assistant" and a new line
    design: dict[str, Any] = {"recipe": recipe(), "flagged_share": FLAGGED_SHARE, "acceptance": {}}
    for drafts in (1, 2, 3, 4, 5):
        length, shares = acceptance(cycle, last, 512, drafts)
        design["acceptance"][str(drafts)] = {
            "mean_length": round(length, 4),
            "per_position": [round(share, 4) for share in shares],
        }
    write_json(unfinished / "design.json", design)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
    return design


def is_current(folder: Path) -> bool:
    """Whether a complete checkpoint of this very recipe is already there."""
    try:
        return bool(json.loads((folder / "design.json").read_text())["recipe"] == recipe())
    except (OSError, ValueError, KeyError):
        return False


def main() -> None:
    """Makes the checkpoint unless it is there."""
    parser = argparse.ArgumentParser(prog="python -m servers.tiny_model", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("results/models/tiny-mimo"))
    folder: Path = parser.parse_args().folder
    if is_current(folder):
        print(f"tiny model: {folder} is up to date")
        return
    try:
        design = build(folder)
    except ImportError as problem:
        sys.exit(f"error: {problem.name} is missing; run it with the Python of servers/setup_cpu.sh")
    except OSError as problem:
        sys.exit(f"error: cannot write {folder}: {problem.strerror}; free some disk or name another folder")
    length = design["acceptance"]["3"]["mean_length"]
    print(f"tiny model: wrote {folder}; designed acceptance length with 3 drafts: {length:.2f}")


if __name__ == "__main__":
    main()
