import msgspec
import pytest
from run_builder import CACHE, MTP, RunBuilder, flat

from reports import words
from reports.article import PUBLISHED, beside, same_point
from reports.classes import describe, roll_up
from reports.judge import Options, judge
from reports.read import read_run
from reports.recommend import recommend

CONTEXT = "context=8192"


def judged(folder, options=None, **changes):
    return judge(read_run(RunBuilder(folder, **changes).write()), options or Options())


def test_a_full_grid_is_a_span():
    levels = [("multi_turn", f"context={c}", u) for c in (4096, 8192, 65536) for u in (1, 2, 4)]
    assert describe(levels, levels) == "4K to 64K context, 1–4 users"


def test_a_span_never_runs_over_a_level_that_came_out_otherwise():
    ran = [("multi_turn", CONTEXT, users) for users in (1, 2, 4)]
    assert describe([ran[0], ran[2]], ran) == "8K context, 1 and 4 users"
    assert describe(ran[:2], ran) == "8K context, 1–2 users"


def test_a_ragged_set_is_told_point_by_point():
    levels = [
        ("multi_turn", "context=8192", 1),
        ("multi_turn", "context=65536", 1),
        ("multi_turn", "context=65536", 2),
    ]
    assert describe(levels, levels) == "8K context at 1 user; 64K context at 1–2 users"


def test_classes_split_by_winner(tmp_path):
    times = {"cache": flat(2.0), "mtp": lambda cell, u, s, t: (cell.users / 2.0, 0.02)}
    levels = [("multi_turn", CONTEXT, users) for users in (1, 2, 8, 16)]
    found = roll_up(judged(tmp_path / "r", levels=levels, times=times))
    assert [(c.winner, c.factor and tuple(round(f, 2) for f in c.factor)) for c in found] == [
        ("mtp", (2.0, 4.0)),
        ("cache", (2.0, 4.0)),
    ]
    assert found[0].name == "multi-turn conversations: 8K context, 1–2 users"
    # mtp wins although it prefilled more: the sentence must not pretend to explain it.
    assert found[0].why.startswith(
        "Not explained by prefill: mtp prefilled 9K tokens per follow-up, cache 1K"
    )
    assert found[1].why == (
        "cache prefilled 1K tokens per follow-up, mtp 9K; "
        "89% of its prompt tokens came from the prefix cache."
    )


def test_decode_winner_is_explained_by_acceptance(tmp_path):
    def samples(cell):
        if cell.arm == "mtp":
            for t in (0.0, 9.0):
                yield t, "vllm:spec_decode_num_drafts_total", "", 100 * t
                yield t, "vllm:spec_decode_num_accepted_tokens_total", "", 190 * t

    (found,) = roll_up(
        judged(
            tmp_path / "r",
            levels=[("single_turn", "prompt=1024", 2)],
            times={"mtp": flat(1.0, 0.01)},
            samples=samples,
        )
    )
    assert found.why == (
        "mtp gets 2.9 tokens out of a decode step (cache 1.0); "
        "tokens per second and session: mtp 100.0, cache 50.0."
    )


def test_drafting_that_does_not_pay(tmp_path):
    def samples(cell):
        if cell.arm == "mtp":
            yield 0.0, "vllm:spec_decode_num_drafts_total", "", 0
            yield 9.0, "vllm:spec_decode_num_drafts_total", "", 100
            yield 0.0, "vllm:spec_decode_num_accepted_tokens_total", "", 0
            yield 9.0, "vllm:spec_decode_num_accepted_tokens_total", "", 10

    levels = [("single_turn", "prompt=1024", 2)]
    (found,) = roll_up(judged(tmp_path / "r", levels=levels, times={"mtp": flat(1.0, 0.03)}, samples=samples))
    assert found.winner == "cache"
    assert found.why.startswith("Drafting does not pay on mtp here")


BOTH = [("single_turn", "prompt=1024", 2), ("multi_turn", CONTEXT, 2)]


def test_recommendation_says_what_it_costs(tmp_path):
    # single_turn: mtp 2 times better; multi_turn: cache 4 times. Equal mix: cache leads by sqrt(4 / 2).
    advice = recommend(
        judged(tmp_path / "r", levels=BOTH, times={"cache": flat(1.0, 0.02), "mtp": flat(4.0, 0.01)})
    )
    assert advice.arm == "cache"
    assert advice.mix == {"single_turn": 0.5, "multi_turn": 0.5}
    assert advice.why.startswith(
        "Over this mix mtp is 1.41× slower; cache wins multi-turn conversations (4.00×) "
        "and loses single prompts, cold (2.00×)."
    )


def test_recommendation_says_when_end_to_end_time_disagrees(tmp_path):
    # cache: 1 + 255 * 0.02 = 6.1 s; mtp: 4 + 255 * 0.002 = 4.51 s. Ratio 1.35.
    times = {"cache": flat(1.0, 0.02), "mtp": flat(4.0, 0.002)}
    advice = recommend(judged(tmp_path / "r", times=times))
    assert advice.arm == "cache"
    assert "By end-to-end time mtp would lead (1.35×)" in advice.why


@pytest.mark.parametrize(
    ("mix", "times", "why"),
    [
        ({"shared_prefix": 1.0}, {}, "which this run did not measure"),
        ({}, {}, "no cell of the mix has a clear winner"),
        ({"multi_turn": 1.0}, {"mtp": flat(1.02)}, "no cell of the mix has a clear winner"),
    ],
)
def test_no_recommendation_without_grounds(tmp_path, mix, times, why):
    advice = recommend(judged(tmp_path / "r", Options(mix=mix), levels=BOTH, times=times))
    assert advice.arm is None
    assert why in advice.why


def test_a_workload_without_verdict_blocks_the_mix(tmp_path):
    def change(cell, row):
        spoiled = cell.workload == "single_turn" and cell.arm == "mtp"
        return msgspec.structs.replace(row, prompt_digest="x") if spoiled else row

    advice = recommend(judged(tmp_path / "r", levels=BOTH, times={"mtp": flat(4.0)}, change=change))
    assert advice.arm is None
    assert advice.why == "no verdict: single_turn in the mix has no cell with a verdict"


def test_published_numbers_beside_ours(tmp_path):
    times = {"cache": flat(1.02, 1 / 49.9), "mtp": flat(1.7, 1 / 94.9)}
    levels = [("single_turn", "prompt=1024", 1), ("shared_prefix", "prefix=4096,pace=lockstep", 1)]
    found = {
        (row.what, row.arm): row for row in beside(judged(tmp_path / "r", levels=levels, times=times).run)
    }
    assert {row.arm for row in found.values()} == {"cache", "mtp", "mtp ÷ cache"}
    decode = found[("single prompts, cold, 1K prompt, 1 user: decode rate", "mtp")]
    assert (decode.published, decode.here, round(decode.ratio, 3)) == ("94.9 tok/s", "94.9 tok/s", 1.0)
    prefix = found[("shared prefix, unique suffixes, 4K prefix, lockstep, 1 user: TTFT p50", "mtp")]
    assert (prefix.published, prefix.here, prefix.ratio) == ("850 ms", "1.70 s", pytest.approx(2.0))


def test_independent_users_are_not_set_beside_lockstep(tmp_path):
    times = {"mtp": flat(28.6)}
    free = judged(tmp_path / "a", levels=[("multi_turn", "context=32768", 8)], times=times)
    assert beside(free.run) == []
    step = judged(tmp_path / "b", levels=[("multi_turn", "context=32768,pace=lockstep", 8)], times=times)
    rows = beside(step.run)
    assert [row.arm for row in rows] == ["cache", "mtp", "cache"]  # the last one is the hit rate
    assert rows[0].ratio == pytest.approx(1.0 / 1.4)  # 1 s, below the range's 1.4
    assert rows[1].ratio == pytest.approx(1.0)


def test_points_match_whatever_their_order():
    assert same_point("pace=lockstep,context=1", "context=1,pace=lockstep")
    assert not same_point("context=1", "context=1,pace=lockstep")
    assert not same_point("nonsense", "context=1")
    assert {number.arm for number in PUBLISHED} == {CACHE.name, MTP.name}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (words.tokens_text(8192), "8K"),
        (words.tokens_text(1126), "1.1K"),
        (words.tokens_text(96), "96"),
        (words.value_text(0.0123, "s"), "12.3 ms"),
        (words.value_text(132.4, "s"), "132 s"),
        (words.value_text(1.018, "s"), "1.02 s"),
        (words.value_text(0.654, "1"), "65 %"),
        (words.value_text(None, "s"), "unknown"),
        (words.range_text((1.8, 16.84)), "1.80–16.8×"),
        (words.range_text((2.0, 2.0)), "2.00×"),
        (words.range_text(None), "–"),
        (words.point_text("context=8192,pace=lockstep"), "8K context, lockstep"),
        (words.point_text("nonsense"), "nonsense"),
        (words.list_text(["a", "b", "c"]), "a, b and c"),
    ],
)
def test_words(text, expected):
    assert text == expected
