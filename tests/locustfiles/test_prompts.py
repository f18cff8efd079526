import subprocess
import sys
from itertools import product
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from locustfiles.prompts import PromptWriter, measure_table
from tests.locustfiles.token_server import LocalCounter, greedy, words

ROOT = Path(__file__).resolve().parents[2]
TABLE = measure_table(LocalCounter(words))
NO_SYSTEM = measure_table(LocalCounter(words, system=False))
GREEDY = measure_table(LocalCounter(greedy))
USAGE = measure_table(LocalCounter(words, source="usage"))
CELL = {"seed": 7, "workload": "single_turn", "point": "prompt=1024", "users": 4, "repeat": 1}
ANSWER = "Nobody knows for sure."


def writer(table=TABLE, **changes):
    return PromptWriter(table, **{**CELL, **changes})


def text_of(prompt):
    return prompt.messages[-1]["content"]


def count(prompt):
    return len(words(prompt.messages))


# -- exact lengths ------------------------------------------------------------------------------------------


@given(
    tokens=st.integers(5, 3000),
    user=st.integers(0, 2000),
    session=st.integers(0, 500),
    nonce=st.none() | st.text(max_size=9),
    table=st.sampled_from([TABLE, NO_SYSTEM, USAGE]),
)
@settings(deadline=None)
def test_a_single_prompt_has_exactly_the_tokens_asked(tokens, user, session, nonce, table):
    tokens += 0 if nonce is None else table.nonce_tokens
    prompt = writer(table, nonce=nonce).single(user, session, tokens)
    assert count(prompt) == prompt.tokens == tokens


@given(
    prefix=st.integers(15, 2000),
    suffix=st.integers(5, 700),
    user=st.integers(0, 99),
    turn=st.integers(1, 4),
    nonce=st.none() | st.text(max_size=9),
    table=st.sampled_from([TABLE, NO_SYSTEM, USAGE]),
)
@settings(deadline=None)
def test_a_shared_prompt_has_exactly_the_tokens_asked(prefix, suffix, user, turn, nonce, table):
    prompt = writer(table, nonce=nonce).shared(user, 3, turn, prefix, suffix)
    assert count(prompt) == prompt.tokens == prefix + suffix


@given(growth=st.integers(20, 1500), first=st.integers(30, 500), table=st.sampled_from([TABLE, USAGE]))
@settings(deadline=None)
def test_each_turn_adds_exactly_the_answer_and_the_growth(growth, first, table):
    prompts = writer(table)
    prompt = prompts.single(1, 1, first)
    for turn in (2, 3):
        before = count(prompt)
        prompt = prompts.follow_up(prompt, ANSWER, 4, 1, 1, turn, growth)
        assert count(prompt) == prompt.tokens == before + 4 + growth
    assert [message["role"] for message in prompt.messages] == ["user", "assistant"] * 2 + ["user"]
    assert prompt.messages[1]["content"] == ANSWER


@given(
    tokens=st.integers(80, 1500),
    user=st.integers(0, 9),
    session=st.integers(0, 5),
    nonce=st.sampled_from([None, "x"]),
)
@example(tokens=208, user=0, session=0, nonce=None)  # 61 tries when each followed the last one's miss alone
@settings(deadline=None, max_examples=40)
def test_counts_that_do_not_add_up_are_corrected(tokens, user, session, nonce):
    assert not GREEDY.additive
    counter = LocalCounter(greedy)
    prompts = writer(GREEDY, counter=counter, nonce=nonce)
    first = prompts.single(user, session, tokens + GREEDY.minimum)
    assert len(greedy(first.messages)) == first.tokens == tokens + GREEDY.minimum
    shared = prompts.shared(user, session, 1, 300 + tokens, 200)
    assert len(greedy(shared.messages)) == 500 + tokens
    assert counter.requests < 500


def test_a_corrected_prefix_is_what_two_prompts_share():
    prompts = writer(GREEDY, counter=LocalCounter(greedy))
    one, two = (greedy(prompts.shared(user, 0, 1, 600, 200).messages) for user in (0, 1))
    shared = next(index for index, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
    assert 600 <= shared <= 602  # two names may begin with the same piece


def test_a_corrected_turn_adds_its_growth():
    prompts = writer(GREEDY, counter=LocalCounter(greedy))
    first = prompts.single(0, 1, 400)
    second = prompts.follow_up(first, "I see.", GREEDY.answer_tokens, 0, 1, 2, 300)
    assert abs(len(greedy(second.messages)) - second.tokens) <= 2  # greedy merges around the answer as well


def test_counts_that_do_not_add_up_need_a_counter():
    with pytest.raises(ValueError, match="need a TokenCounter"):
        writer(GREEDY)


def test_too_few_tokens_say_the_minimum():
    prompts = writer()
    assert count(prompts.single(0, 0, 5)) == 5
    with pytest.raises(ValueError, match=r"the minimum is 5$"):
        prompts.single(0, 0, 4)
    with pytest.raises(ValueError, match=r"the minimum is 10$"):
        writer(nonce="n").single(0, 0, 9)
    with pytest.raises(ValueError, match=r"suffix of 2 .* the minimum is 3$"):
        prompts.shared(0, 0, 1, 100, 2)
    with pytest.raises(ValueError, match=r"prefix of 9 .* the minimum is 10$"):
        prompts.shared(0, 0, 1, 9, 100)
    prompt = prompts.single(0, 0, 100)
    with pytest.raises(ValueError, match=r"later turn of 6 .* the minimum is 7$"):
        prompts.follow_up(prompt, ANSWER, 4, 0, 0, 2, 6)  # the shortest remark has three words


def test_an_answer_of_unknown_length_is_estimated():
    prompts = writer()
    prompt = prompts.single(0, 0, 100)
    answer = " ".join(["several"] * 100)
    assert 100 + 80 + 200 < prompts.follow_up(prompt, answer, None, 0, 0, 2, 200).tokens < 100 + 250 + 200


# -- what is the same and what differs ----------------------------------------------------------------------


def test_the_same_place_gets_the_same_text_and_every_other_place_another():
    changes = [
        {},
        {"seed": 8},
        {"workload": "multi_turn"},
        {"point": "prompt=2048"},
        {"users": 5},
        {"repeat": 2},
    ]
    texts = [text_of(writer(**change).single(0, 1, 300)) for change in changes]
    assert len(set(texts)) == len(texts)
    assert texts == [text_of(writer(**change).single(0, 1, 300)) for change in changes]


def test_the_order_of_asking_does_not_matter():
    one, two = writer(), writer()
    forward = [one.single(user, 1, 200) for user in range(4)]
    backward = [two.single(user, 1, 200) for user in reversed(range(4))]
    assert forward == backward[::-1]


def test_another_process_writes_the_same(tmp_path):
    table = tmp_path / "table.json"
    table.write_bytes(msgspec.json.encode(TABLE))
    code = (
        "import sys, msgspec\n"
        "from pathlib import Path\n"
        "from locustfiles.prompts import PromptWriter, TokenTable\n"
        "table = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=TokenTable)\n"
        "cell = dict(seed=7, workload='single_turn', point='prompt=1024', users=4, repeat=1)\n"
        "writer = PromptWriter(table, **cell)\n"
        "first = writer.single(2, 1, 900)\n"
        "print(first.digest, writer.shared(2, 1, 1, 500, 300).digest,\n"
        "      writer.follow_up(first, 'x', 1, 2, 1, 2, 300).digest)\n"
    )
    here = writer()
    first = here.single(2, 1, 900)
    expected = [first.digest, here.shared(2, 1, 1, 500, 300).digest]
    expected.append(here.follow_up(first, "x", 1, 2, 1, 2, 300).digest)
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code, str(table)],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == expected


def test_users_part_at_the_first_word_and_sessions_within_the_first_sentence():
    prompts = writer(users=128)
    for session in range(3):
        assert len({text_of(prompts.single(user, session, 120)).split()[0] for user in range(128)}) == 128
    sentences = {
        text_of(prompts.single(user, session, 120)).split(". ")[0]
        for user, session in product(range(128), range(8))
    }
    assert len(sentences) == 128 * 8


@given(st.sets(st.tuples(st.integers(0, 1023), st.integers(0, 2000)), min_size=2, max_size=30))
@settings(deadline=None, max_examples=50)
def test_no_two_sessions_open_alike(places):
    prompts = writer()
    sentences = {text_of(prompts.single(*place, 120)).split(". ")[0] for place in places}
    assert len(sentences) == len(places)


def test_a_shared_prefix_is_shared_to_the_token_and_no_further():
    prompts = writer(users=8)
    places = list(product(range(8), range(2), (1, 2)))
    found = [words(prompts.shared(user, session, turn, 700, 150).messages) for user, session, turn in places]
    assert len({tuple(tokens[:700]) for tokens in found}) == 1
    of_one_session = [tokens[700] for tokens, place in zip(found, places, strict=True) if place[1:] == (1, 1)]
    assert len(set(of_one_session)) == 8
    assert len({tuple(tokens[700:712]) for tokens in found}) == len(places)


def test_without_system_messages_the_prefix_is_shared_all_the_same():
    prompts = writer(NO_SYSTEM)
    one, two = (prompts.shared(user, 1, 1, 700, 150).messages for user in (0, 1))
    assert len(one) == 1
    assert words(one)[:700] == words(two)[:700]
    assert words(one)[700] != words(two)[700]


def test_turns_differ_between_users_sessions_and_turns():
    prompts = writer()
    texts = set()
    for user, session in product(range(4), range(3)):
        prompt = prompts.single(user, session, 200)
        for turn in (2, 3):
            prompt = prompts.follow_up(prompt, ANSWER, 4, user, session, turn, 300)
            texts.add(text_of(prompt))
    assert len(texts) == 4 * 3 * 2


# -- nonce and digest ---------------------------------------------------------------------------------------


def test_a_nonce_line_heads_the_text_and_is_not_part_of_the_digest():
    plain, with_nonce, other = writer(), writer(nonce="run1/cache"), writer(nonce="run1/mtp")
    asked = 400
    one = with_nonce.single(1, 1, asked)
    two = other.single(1, 1, asked)
    line, _, rest = text_of(one).partition("\n")
    assert len(line.split()) == TABLE.nonce_tokens == 5
    assert count(one) == count(two) == asked
    assert line != text_of(two).partition("\n")[0]
    assert rest == text_of(two).partition("\n")[2]
    assert one.digest == two.digest
    assert rest == text_of(plain.single(1, 1, asked - 5))
    assert one.digest == plain.single(1, 1, asked - 5).digest
    assert with_nonce.shared(0, 0, 1, 300, 100).messages[0]["content"].startswith(line)
    assert with_nonce.shared(0, 0, 1, 300, 100).digest == other.shared(0, 0, 1, 300, 100).digest


def test_the_digest_is_of_the_user_side_only():
    prompts = writer()
    first = prompts.single(0, 0, 100)
    answers = [prompts.follow_up(first, answer, 2, 0, 0, 2, 100) for answer in ("Yes indeed.", "Not at all.")]
    assert answers[0].digest == answers[1].digest != first.digest
    assert len(first.digest) == 16
    assert prompts.shared(0, 0, 1, 200, 100).digest != prompts.shared(0, 0, 1, 201, 99).digest


# -- what it reads like -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [64, 256, 1024, 8192])
def test_it_reads_like_what_a_person_sends(tokens):
    prompt = writer().single(3, 2, tokens)
    text = text_of(prompt)
    assert text.endswith("?")
    assert text.split()[0] in {name.text for name in TABLE.names}
    assert "{" not in text
    assert "  " not in text
    paragraphs = text.split("\n\n")
    assert max(len(paragraph) for paragraph in paragraphs) < 1500
    sentences = text.replace("\n\n", " ").split(". ")
    assert len(set(sentences)) > 0.4 * len(sentences)


def test_follow_ups_refer_to_the_answer():
    prompts = writer()
    text = text_of(prompts.follow_up(prompts.single(0, 0, 100), ANSWER, 4, 0, 0, 2, 300))
    assert any(text.startswith(remark.text) for remark in TABLE.follow_ups)
    assert any(text.endswith(question.text) for question in TABLE.follow_up_questions)


def test_an_own_corpus_is_what_prompts_are_made_of(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("The {tide} is high. Boats wait outside. Is it late? Nobody knows!")
    table = measure_table(LocalCounter(words), path)
    prompt = writer(table).single(0, 0, 2000)
    assert count(prompt) == 2000
    assert text_of(prompt).count("The {tide} is high.") > 50


def test_prompts_are_made_one_at_a_time_in_bounded_memory():
    import tracemalloc

    prompts = writer(users=32)
    prompts.single(0, 0, 65536)
    tracemalloc.start()
    for user in range(6):
        prompts.single(user, 1, 65536)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 1024 * 1024
