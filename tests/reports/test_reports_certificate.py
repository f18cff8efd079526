"""Every check: passes on a clean run, fails on its own fault, and withholds exactly what it touches."""

import msgspec
import pytest
from run_builder import CACHE, MTP, RunBuilder, arm, flat, probe

from locustfiles.records import GeneratorHealth, write_json
from reports.certificate import certify
from reports.judge import Options, judge
from reports.read import read_run

replace = msgspec.structs.replace


def judged(tmp_path, **changes):
    times = {"cache": flat(1.0), "mtp": flat(5.0)}
    folder = RunBuilder(tmp_path / "run", **{"times": times, **changes}).write()
    return judge(read_run(folder), Options())


def check(judgement, name, arm_name):
    return next(c for c in judgement.checks if (c.check, c.arm) == (name, arm_name))


def winner(judgement, workload="multi_turn"):
    return next(c for c in judgement.primary if c.level[0] == workload)


def on(arm_name, **changes):
    """Change every measured row of an arm."""

    def change(cell, row):
        if cell.arm != arm_name or row.phase != "measure":
            return row
        return replace(row, **{k: v(row) if callable(v) else v for k, v in changes.items()})

    return change


def withheld(judgement, name, arm_name, workload="multi_turn"):
    assert check(judgement, name, arm_name).ok is False
    cell = winner(judgement, workload)
    return cell.winner is None and any(r.startswith(f"no verdict: {name} ({arm_name}") for r in cell.reasons)


def test_a_clean_run_passes_and_has_a_winner(tmp_path):
    judgement = judged(tmp_path)
    assert [c for c in judgement.checks if c.ok is False] == []
    assert winner(judgement).winner == "cache"
    assert winner(judgement).advantage[1] == pytest.approx(5.0)


def test_what_the_files_cannot_tell_is_not_checked(tmp_path):
    found = check(judged(tmp_path), "client and server TTFT agree", "cache")
    assert found.ok is None
    assert found.value == "not checked: the server exports no TTFT histogram"


def test_declared_mtp_observed_mtp_and_caching(tmp_path):
    odd = arm("mtp", drafts=3)
    odd = replace(odd, probe=probe(True, 3))
    judgement = judged(tmp_path, arms=[CACHE, odd])
    assert withheld(judgement, "declared features on, and only those", "mtp")
    found = check(judgement, "declared features on, and only those", "mtp")
    assert found.value == (
        "declared prefix caching off, speculative decoding on; "
        "observed prefix caching on, speculative decoding on"
    )


def test_an_arm_named_mtp_that_declares_nothing_is_held_to_its_name(tmp_path):
    odd = replace(MTP, declared={}, probe=probe(True, 3))
    assert withheld(judged(tmp_path, arms=[CACHE, odd]), "declared features on, and only those", "mtp")


def test_an_arm_of_the_users_own_may_declare_nothing(tmp_path):
    own = replace(MTP, name="b", declared={})
    judgement = judged(tmp_path, arms=[CACHE, own])
    assert check(judgement, "declared features on, and only those", "b").ok is True


def test_speculation_seen_in_the_counters_though_not_declared(tmp_path):
    def samples(cell):
        if cell.arm == "cache":
            yield 0.0, "vllm:spec_decode_num_drafts_total", "", 0
            yield 9.0, "vllm:spec_decode_num_drafts_total", "", 50

    assert withheld(judged(tmp_path, samples=samples), "declared features on, and only those", "cache")


def test_caching_that_the_probe_could_not_tell_is_told_by_follow_ups(tmp_path):
    blind = replace(CACHE, probe=probe(True, 0, prefix_caching=None))
    judgement = judged(tmp_path, arms=[blind, MTP])
    assert check(judgement, "declared features on, and only those", "cache").ok is True


def test_arms_on_different_versions(tmp_path):
    other = replace(MTP, probe=probe(False, 3, version="0.33.0"))
    assert withheld(judged(tmp_path, arms=[CACHE, other]), "arms alike", "mtp")


def test_a_difference_that_is_declared_is_the_experiment(tmp_path):
    other = replace(
        MTP, declared={**MTP.declared, "version": "0.33.0"}, probe=probe(False, 3, version="0.33.0")
    )
    assert check(judged(tmp_path, arms=[CACHE, other]), "arms alike", "mtp").ok is True


def test_two_devices_are_a_doubt_on_real_servers(tmp_path):
    real = {"simulated": False}
    first = replace(CACHE, declared={**CACHE.declared, "device": "0"}, probe=probe(True, 0, **real))
    second = replace(MTP, declared={**MTP.declared, "device": "1"}, probe=probe(False, 3, **real))
    judgement = judged(tmp_path, arms=[first, second], manifest_changes={"simulated": False})
    assert check(judgement, "same device", "all").ok is False
    assert winner(judgement).winner == "cache"


@pytest.mark.parametrize(
    "health",
    [
        GeneratorHealth(loop_lag_p99_ms=2.0, cpu_share=0.95, kernel_stamps=9),
        GeneratorHealth(loop_lag_p99_ms=60.0, cpu_share=0.2, kernel_stamps=9),
        GeneratorHealth(loop_lag_p99_ms=6.0, cpu_share=0.2, user_stamps=9),
    ],
)
def test_a_generator_that_was_the_bottleneck(tmp_path, health):
    assert withheld(judged(tmp_path, health=health), "generator healthy", "mtp")


def test_lag_that_kernel_stamps_forgive(tmp_path):
    health = GeneratorHealth(loop_lag_p99_ms=6.0, cpu_share=0.2, kernel_stamps=9)
    assert check(judged(tmp_path, health=health), "generator healthy", "mtp").ok is True


@pytest.mark.parametrize(
    ("proof", "ok"),
    [
        (None, None),
        ({"safe_streams": 2, "safe_events_per_s": 1e6, "host": {"id": "a"}}, True),
        ({"safe_streams": 1, "safe_events_per_s": 1e6, "host": {"id": "a"}}, False),
        # 18 attempts of 6.1 s with 100 chunks each, one after another, at ten times wall time: 164 a second.
        ({"safe_streams": 2, "safe_events_per_s": 163, "host": {"id": "a"}}, False),
        ({"safe_streams": 2, "safe_events_per_s": 165, "host": {"id": "a"}}, True),
        ({"safe_streams": 2, "safe_events_per_s": 1e6, "host": {"id": "b"}}, None),
        ({"safe_streams": "many"}, None),
    ],
)
def test_cells_beyond_the_self_test_are_a_doubt(tmp_path, proof, ok):
    judgement = judged(tmp_path, manifest_changes={"certificate": proof, "host": {"id": "a"}})
    assert check(judgement, "within the self-test", "cache").ok is ok
    assert winner(judgement).winner == "cache"


def test_coalesced_first_tokens_matter_where_a_chunk_gap_is_not_small(tmp_path):
    health = GeneratorHealth(loop_lag_p99_ms=1.0, cpu_share=0.1, kernel_stamps=9, first_token_coalesced=9)
    near = judged(tmp_path / "a", health=health, change=lambda cell, row: replace(row, icl_p50_ms=100.0))
    assert check(near, "first tokens stamped alone", "cache").ok is False  # 100 ms of 1 s
    assert check(near, "first tokens stamped alone", "mtp").ok is True  # 100 ms of 5 s
    assert winner(near).winner is None


def test_coalesced_first_tokens_do_not_touch_tpot(tmp_path):
    health = GeneratorHealth(loop_lag_p99_ms=1.0, cpu_share=0.1, kernel_stamps=9, first_token_coalesced=3)
    judgement = judged(
        tmp_path,
        health=health,
        levels=[("single_turn", "prompt=1024", 4)],
        times={"cache": flat(1.0, 0.02), "mtp": flat(1.0, 0.01)},
    )
    assert check(judgement, "first tokens stamped alone", "cache").ok is False
    assert winner(judgement, "single_turn").winner == "mtp"


def test_open_loop_that_started_late_offered_less_than_it_says(tmp_path):
    level = [("single_turn", "prompt=1024,rate=2", 4)]
    times = {"cache": flat(1.0, 0.02), "mtp": flat(1.0, 0.01)}

    def late(by_ms):
        return lambda cell, row: replace(
            row, intended_ms=row.start_ms - (by_ms if cell.arm == "mtp" else 0.0)
        )

    # The clock runs ten times as fast: 500 ms of model time are 50 ms of wall time.
    on_time = judged(tmp_path / "a", levels=level, times=times, change=late(500.0))
    assert check(on_time, "arrivals on time", "mtp").ok is True
    assert winner(on_time, "single_turn").winner == "mtp"
    behind = judged(tmp_path / "b", levels=level, times=times, change=late(510.0))
    assert withheld(behind, "arrivals on time", "mtp", "single_turn")
    closed = judged(tmp_path / "c")
    assert "arrivals on time" not in {line.check for line in closed.checks}


def test_different_user_text(tmp_path):
    assert withheld(judged(tmp_path, change=on("mtp", prompt_digest="other")), "same user text", "mtp")


def test_prompt_lengths(tmp_path):
    longer = on("mtp", prompt_tokens=lambda row: row.prompt_tokens + (1 if row.turn == 1 else 0))
    assert withheld(judged(tmp_path / "a", change=longer), "prompt lengths as asked", "mtp")
    # 9216 tokens asked: max(16, 92) may be off.
    within = on("mtp", prompt_tokens=lambda row: row.prompt_tokens + (92 if row.turn == 2 else 0))
    assert check(judged(tmp_path / "b", change=within), "prompt lengths as asked", "mtp").ok is True
    beyond = on("mtp", prompt_tokens=lambda row: row.prompt_tokens + (93 if row.turn == 2 else 0))
    assert withheld(judged(tmp_path / "c", change=beyond), "prompt lengths as asked", "mtp")


@pytest.mark.parametrize(
    "changes",
    [
        {"output_tokens": 255},
        {"chunks": 257},
        {"reasoning_tokens": 300},
        {"cached_tokens": lambda row: row.prompt_tokens + 1},
    ],
)
def test_tokens_conserved(tmp_path, changes):
    assert withheld(judged(tmp_path, change=on("mtp", **changes)), "tokens conserved", "mtp")


def test_lengths_that_were_not_pinned_may_end_early(tmp_path):
    early = on("mtp", output_tokens=200)
    judgement = judged(tmp_path, change=early, manifest_changes={"sampling": {"temperature": 0}})
    assert check(judgement, "tokens conserved", "mtp").ok is True


def test_cold_prompts_that_hit(tmp_path):
    warm = on("cache", cached_tokens=lambda row: 16 if row.turn == 1 else row.cached_tokens)
    assert withheld(judged(tmp_path / "a", change=warm), "cold prompts cold", "cache")
    header = on("cache", cached_tokens=lambda row: 15 if row.turn == 1 else row.cached_tokens)
    assert check(judged(tmp_path / "b", change=header), "cold prompts cold", "cache").ok is True


def test_a_suffix_that_hits_beyond_the_shared_prefix(tmp_path):
    warm = on("cache", cached_tokens=4096 + 16)
    judgement = judged(tmp_path, levels=[("shared_prefix", "prefix=4096", 2)], change=warm)
    assert withheld(judgement, "cold prompts cold", "cache", "shared_prefix")


def test_cold_prompts_by_the_servers_counter_where_usage_is_silent(tmp_path):
    def samples(cell):
        yield 0.0, "vllm:prefix_cache_hits_total", "", 100
        yield 9.0, "vllm:prefix_cache_hits_total", "", 100 + 64 * (cell.arm == "cache")

    judgement = judged(
        tmp_path,
        levels=[("single_turn", "prompt=1024", 2)],
        samples=samples,
        change=lambda cell, row: replace(row, cached_tokens=None),
    )
    assert check(judgement, "cold prompts cold", "cache").ok is False
    assert check(judgement, "cold prompts cold", "mtp").ok is True


def test_follow_ups_that_miss_without_need(tmp_path):
    missing = on("cache", cached_tokens=0)
    assert withheld(judged(tmp_path, change=missing), "follow-ups hit", "cache")


def test_follow_ups_may_lose_two_blocks(tmp_path):
    less = on("cache", cached_tokens=lambda row: max(0, row.cached_tokens - 32))
    assert check(judged(tmp_path / "a", change=less), "follow-ups hit", "cache").ok is True
    lesser = on("cache", cached_tokens=lambda row: max(0, row.cached_tokens - 48))
    assert check(judged(tmp_path / "b", change=lesser), "follow-ups hit", "cache").ok is False


def test_evictions_of_a_small_pool_are_the_servers_own_affair(tmp_path):
    small = replace(CACHE, probe=probe(True, 0, cache_config={"num_gpu_blocks": "1000"}))  # 16,000 tokens
    judgement = judged(tmp_path, arms=[small, MTP], change=on("cache", cached_tokens=0))
    found = check(judgement, "follow-ups hit", "cache")
    assert found.ok is True
    assert "evicted" in found.value


def test_hits_although_caching_is_off(tmp_path):
    assert withheld(judged(tmp_path, change=on("mtp", cached_tokens=8)), "follow-ups hit", "mtp")


def test_lost_rows(tmp_path):
    def lose(cell, row):
        return None if (cell.arm, row.user, row.session, row.turn) == ("mtp", 0, 1, 3) else row

    judgement = judged(tmp_path, change=lose)
    assert withheld(judgement, "sessions complete", "mtp")
    assert check(judgement, "sessions complete", "cache").ok is True


def test_failures(tmp_path):
    # 1 of 36 measured attempts per arm is 2.8 %: allowed. 2 of 36 is 5.6 %: not.
    def fail(count):
        def change(cell, row):
            bad = cell.arm == "mtp" and row.phase == "measure" and cell.repeat <= count
            if bad and (row.user, row.session, row.turn) == (0, 1, 1):
                return replace(row, status="timeout", error="no answer in 1800 s")
            return row

        return change

    few = judged(tmp_path / "a", change=fail(1))
    assert check(few, "failures", "mtp").value == "1 of 36 measured attempts failed (1 timeout)"
    assert winner(few).winner == "cache"
    assert withheld(judged(tmp_path / "b", change=fail(2)), "failures", "mtp")


def test_a_server_that_refuses_everything_does_not_win(tmp_path):
    refuse = on("mtp", status="http_error", ttft_ms=None, error="503")
    judgement = judged(tmp_path, times={"mtp": flat(0.01)}, change=refuse)
    cell = winner(judgement)
    assert cell.winner is None
    assert "mtp" not in cell.values


def test_different_outputs_are_a_doubt_and_withhold_nothing(tmp_path):
    judgement = judged(tmp_path, change=on("mtp", output_digest="else"))
    found = check(judgement, "same greedy outputs", "mtp")
    assert found.ok is False
    assert "withholds nothing" in found.limit
    assert winner(judgement).winner == "cache"


def ttft_samples(offset):
    """A server histogram whose mean over the 18 attempts of a cell is the client's plus ``offset`` s."""

    def samples(cell):
        mean = {"cache": 1.0, "mtp": 5.0}[cell.arm] + offset
        for t, share in ((0.0, 0), (9.0, 1)):
            yield t, "vllm:time_to_first_token_seconds_sum", "", share * 18 * mean
            yield t, "vllm:time_to_first_token_seconds_count", "", share * 18

    return samples


def test_client_and_server_ttft(tmp_path):
    # Clock scale 10: 20 ms of wall time are 0.2 s of model time.
    close = judged(tmp_path / "a", samples=ttft_samples(-0.15))
    assert check(close, "client and server TTFT agree", "cache").ok is True
    assert withheld(
        judged(tmp_path / "b", samples=ttft_samples(-0.25)), "client and server TTFT agree", "cache"
    )


def test_a_simulator_that_ran_late(tmp_path):
    def samples(late):
        def found(cell):
            for t, share in ((0.0, 0), (9.0, 1)):
                yield t, "faceoff_sim:lateness_seconds_sum", "", share * 100 * late
                yield t, "faceoff_sim:lateness_seconds_count", "", share * 100

        return found

    # 4 ms of wall time are 40 ms of model time: 4 % of cache's 1 s. 6 ms are 6 %.
    good = judged(tmp_path / "a", samples=samples(0.004))
    assert check(good, "simulator on time", "cache").ok is True
    assert withheld(judged(tmp_path / "b", samples=samples(0.006)), "simulator on time", "cache")


def test_a_simulator_whose_clock_somebody_else_set(tmp_path):
    def samples(scale):
        def found(cell):
            for t, value in ((0.0, 10.0), (4.0, scale if cell.arm == "mtp" else 10.0), (9.0, 10.0)):
                yield t, "faceoff_sim:clock_scale", "", value
                yield t, "faceoff_sim:lateness_seconds_sum", "", 0.0
                yield t, "faceoff_sim:lateness_seconds_count", "", 10.0 * t

        return found

    assert check(judged(tmp_path / "a", samples=samples(10.0)), "simulator on time", "mtp").ok is True
    other = judged(tmp_path / "b", samples=samples(11.1))
    assert withheld(other, "simulator on time", "mtp")
    assert "its clock ran at 11.1 times" in check(other, "simulator on time", "mtp").value
    assert check(other, "simulator on time", "cache").ok is True


def test_a_failure_at_one_level_leaves_the_others_alone(tmp_path):
    def change(cell, row):
        return replace(row, prompt_digest="x") if (cell.arm, cell.users) == ("mtp", 4) else row

    levels = [("multi_turn", "context=8192", users) for users in (2, 4)]
    judgement = judged(tmp_path, levels=levels, change=change)
    assert {cell.level[2]: cell.winner for cell in judgement.primary} == {2: "cache", 4: None}
    assert "multi_turn context=8192, 4 users" in check(judgement, "same user text", "mtp").value


def test_one_arm_only_is_not_a_comparison(tmp_path):
    judgement = judged(tmp_path, arms=[CACHE])
    assert winner(judgement).winner == "inconclusive"
    certify(judgement.run)


def test_a_cell_cut_short_says_why(tmp_path):
    folder = RunBuilder(tmp_path / "run").write()
    place = folder / "cells" / "multi_turn.context=8192.u2.r1.mtp" / "done.json"
    run = read_run(folder)
    done = next(c.done for c in run.cells if c.record.id == place.parent.name)
    write_json(place, replace(done, complete=False, reason="the server died"))
    judgement = judge(read_run(folder), Options())
    assert "the server died" in check(judgement, "sessions complete", "mtp").value
    assert withheld(judgement, "sessions complete", "mtp")
