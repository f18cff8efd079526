"""Tokens, chains and answers."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servers.sim.text import Answer, Prompt, count_tokens, render_chat
from servers.sim.vocabulary import Vocabulary

TEXTS = st.text(alphabet=st.characters(min_codepoint=9, max_codepoint=400), max_size=60)


@given(TEXTS)
def test_a_token_is_a_piece_between_white_space(text):
    expected = "".join(" " if ord(letter) <= 32 else letter for letter in text).split(" ")
    encoded = text.encode()
    assert count_tokens(encoded) == len([piece for piece in expected if piece])
    numbers, pieces = Vocabulary().encode(encoded)
    assert len(numbers) == len(pieces) == count_tokens(encoded)


@given(
    st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), TEXTS), max_size=4), st.booleans()
)
def test_the_template_adds_five_tokens_a_message_and_three_for_the_answer(messages, opens):
    own = sum(count_tokens(content.encode()) for _, content in messages)
    assert count_tokens(render_chat(messages, opens)) == own + 5 * len(messages) + 3 * opens


@given(st.integers(1, 70), st.integers(0, 120), st.integers(1, 40), st.integers(1, 20))
def test_a_follow_up_has_the_chain_of_prompt_and_answer(words, output, growth, unit):
    first = render_chat([("user", " ".join(f"w{i}" for i in range(words)))])
    prompt = Prompt(first, unit, "salt")
    text = prompt.answer.text(0, output).decode().strip()
    prompt.extend(prompt.tokens + output)
    assert len(prompt.hashes) == (prompt.tokens + output) // unit
    follow_up = render_chat(
        [
            ("user", " ".join(f"w{i}" for i in range(words))),
            ("assistant", text),
            ("user", " ".join(f"g{i}" for i in range(growth))),
        ]
    )
    if output:
        assert Prompt(follow_up, unit, "salt").hashes[: len(prompt.hashes)] == prompt.hashes


def test_an_answer_that_ended_by_itself_is_found_again_with_its_end_marker():
    prompt = Prompt(render_chat([("user", "hello")]), 1, "")
    prompt.answer.end = 9
    prompt.extend(prompt.tokens + 10)
    text = prompt.answer.text(0, 10).decode().strip()
    assert len(text.split()) == 9
    again = Prompt(render_chat([("user", "hello"), ("assistant", text)]), 1, "")
    assert again.hashes[: len(prompt.hashes)] == prompt.hashes


def test_chains_depend_on_salt_and_order_and_digests_do_not_on_salt():
    one, other = Prompt(b"a b c d", 2, "x"), Prompt(b"a b c d", 2, "y")
    assert one.digest == other.digest
    assert not set(one.hashes) & set(other.hashes)
    swapped = Prompt(b"c d a b", 2, "x")
    assert not set(one.hashes) & set(swapped.hashes)
    assert Prompt(b"a b c d", 4, "x").digest == one.digest
    assert Prompt(b"a b c d\n", 4, "x").digest == one.digest


@given(st.binary(min_size=16, max_size=16), st.lists(st.integers(0, 600), min_size=2, max_size=6))
def test_deltas_join_to_the_whole_answer(digest, cuts):
    answer, whole = Answer(digest), Answer(digest)
    cuts = sorted(cuts)
    parts = b"".join(answer.pieces(start, stop) for start, stop in pairwise(cuts))
    assert parts == whole.pieces(cuts[0], cuts[-1])
    assert count_tokens(whole.pieces(0, 300)) == 300


@pytest.mark.parametrize("text", ["", " \n\t "])
def test_nothing_is_no_token(text):
    assert Prompt(text.encode(), 4).tokens == 0
