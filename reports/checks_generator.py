"""Checks of the instruments: the load generator, both ends' clocks, the simulator's clock."""

from __future__ import annotations

from collections.abc import Sequence

from reports import metrics
from reports.check import Check, Finding, per_arm
from reports.read import Cell, Run
from reports.summary import is_open_loop

CPU_LIMIT = 0.9
"""A process above this share of a core queues its own work."""
LAG_LIMIT_MS = {"kernel": 50.0, "user": 5.0}
"""p99 of event-loop lag, wall time. With kernel stamps a late loop delays what is sent next, not what is
measured, so only a stall that distorts the load counts; without them the lag is an error of TTFT itself."""
COALESCED_LIMIT = 0.05
"""Share of first tokens that arrived in a read with further tokens, hence stamped late. A median moves by at
most the distance between p50 and p55."""
GAP_LIMIT = 0.02
"""Above that share: a coalesced stamp is late by about one chunk gap (a read rarely holds three events).
Where that is small beside TTFT it does no harm. Fast simulated clocks coalesce more and are judged alike."""
TTFT_RELATIVE = 0.10
TTFT_ABSOLUTE_S = 0.020
"""Client and server TTFT may differ by the larger of 10 % and 20 ms of wall time (network, parsing)."""
LATENESS_LIMIT = 0.05
"""Mean lateness of the simulator, as a share of the TTFT p50 that it distorts."""

ARRIVAL_LIMIT_MS = 50.0
"""p99 of actual - intended start in an open loop, wall time. Beyond it, less was offered than said."""

TTFT_ONLY = frozenset({"ttft", "ttfa"})


def generator_healthy(run: Run) -> list[Check]:
    """The load generator was not the bottleneck."""
    limit = (
        f"CPU <= {CPU_LIMIT:.0%} of a core, loop lag p99 <= {LAG_LIMIT_MS['kernel']:g} ms "
        f"({LAG_LIMIT_MS['user']:g} ms without kernel stamps)"
    )
    return per_arm(run, "generator healthy", limit, judge_generator)


def judge_generator(cells: Sequence[Cell]) -> Finding:
    """The worst of the cells of a level."""
    badness, parts, unknown = 0.0, dict[str, tuple[float, str]](), False
    for cell in cells:
        if cell.done is None:
            continue
        health = cell.done.generator
        stamp = "user" if health.user_stamps > 0.01 * health.kernel_stamps else "kernel"
        shown: list[tuple[str, float, str]] = []
        if health.cpu_share is None or health.loop_lag_p99_ms is None:
            unknown = True
        if health.cpu_share is not None:
            shown.append(("cpu", health.cpu_share / CPU_LIMIT, f"CPU {health.cpu_share:.0%}"))
        if health.loop_lag_p99_ms is not None:
            lag = health.loop_lag_p99_ms
            shown.append(("lag", lag / LAG_LIMIT_MS[stamp], f"loop lag p99 {lag:.1f} ms ({stamp} stamps)"))
        for name, ratio, text in shown:
            parts[name] = max(parts.get(name, (0.0, text)), (ratio, text))
            badness = max(badness, ratio)
    text = ", ".join(text for _, text in parts.values())
    if badness <= 1 and unknown:
        return Finding(None, f"CPU or loop lag not recorded ({text})", badness)
    return Finding(badness <= 1, text, badness)


def arrivals_on_time(run: Run) -> list[Check]:
    """Open loop: sessions started when they were to start, so the rate that the point names was offered."""

    def judge(cells: Sequence[Cell]) -> Finding | None:
        if not is_open_loop(cells[0].record.point):
            return None
        late = [
            delay / (cell.done.clock_scale if cell.done else 1.0)
            for cell in cells
            for delay in metrics.start_delays_ms(metrics.of_turn(cell.measured, 1))
        ]
        if not late:
            return Finding(None, "no attempt has an intended start")
        p99 = metrics.quantile(late, 0.99)
        return Finding(p99 <= ARRIVAL_LIMIT_MS, f"starts late by {p99:.0f} ms (p99, wall time)", p99)

    if not any(is_open_loop(cell.record.point) for cell in run.finished):
        return []
    limit = f"p99 <= {ARRIVAL_LIMIT_MS:g} ms; raise the users where all of them were busy"
    return per_arm(run, "arrivals on time", limit, judge)


def within_self_test(run: Run) -> list[Check]:
    """Cells stayed within the streams and events per second that the self-test of this machine carried.

    A doubt only: what a cell did to its own generator is measured in the cell itself. Where arms were loaded
    at the same time, the generators' streams and events add up.
    """
    proof = run.manifest.certificate or {}
    streams, events = proof.get("safe_streams"), proof.get("safe_events_per_s")
    host = proof.get("host")
    known = isinstance(streams, (int, float)) and isinstance(events, (int, float))
    here = run.manifest.host.get("id")
    moved = isinstance(host, dict) and here is not None and host.get("id") not in (None, here)

    def judge(cells: Sequence[Cell]) -> Finding:
        if not known or moved:
            return Finding(None, "the self-test is another machine's" if moved else "no self-test was made")
        sides = [[cell, *beside(run, cell)] for cell in cells]
        users = max(sum(cell.record.users for cell in side) for side in sides)
        rate = max(sum(event_rate(cell) for cell in side) for side in sides)
        badness = max(users / (streams or 1), rate / (events or 1))
        return Finding(badness <= 1, f"{users} streams, {rate:.0f} events per second", badness)

    limit = (
        f"<= {streams:g} streams, {events:.0f} events per second" if known else "what the self-test carried"
    )
    return per_arm(run, "within the self-test", limit, judge, withholds=False)


def beside(run: Run, cell: Cell) -> list[Cell]:
    """The other arms' cells that ran at the same time."""
    if not run.manifest.parallel_arms:
        return []
    same = (cell.level, cell.record.repeat)
    return [
        other
        for other in run.finished
        if (other.level, other.record.repeat) == same and other.record.arm != cell.record.arm
    ]


def event_rate(cell: Cell) -> float:
    """Token-bearing chunks per second of wall time while attempts ran."""
    busy = metrics.busy_seconds(cell.attempts)
    scale = cell.done.clock_scale if cell.done else 1.0
    return sum(row.chunks for row in cell.attempts) * scale / busy if busy else 0.0


def first_tokens_alone(run: Run) -> list[Check]:
    """First tokens were not stamped with the arrival of a later one."""
    limit = (
        f"<= {COALESCED_LIMIT:.0%} of first tokens (or one) share a read with later ones, "
        f"or the chunk gap that each is then late by is <= {GAP_LIMIT:.0%} of TTFT p50"
    )
    return per_arm(run, "first tokens stamped alone", limit, judge_first_tokens, metrics=TTFT_ONLY)


def judge_first_tokens(cells: Sequence[Cell]) -> Finding:
    """Coalesced share over the cells of a level, and what it can do to TTFT."""
    rows = [row for cell in cells for row in cell.attempts if row.first_token_ms is not None]
    late = sum(cell.done.generator.first_token_coalesced for cell in cells if cell.done)
    if not rows:
        return Finding(None, "no attempt got a token")
    share = late / len(rows)
    if late == 1:
        return Finding(True, f"1 of {len(rows)} first tokens coalesced", share)
    text = f"{share:.1%} of {len(rows)} first tokens coalesced"
    if share <= COALESCED_LIMIT:
        return Finding(True, text, share)
    gaps = [row.icl_p50_ms for row in rows if row.icl_p50_ms]
    waits = [row.ttft_ms for row in rows if row.ttft_ms]
    if not gaps or not waits:
        return Finding(False, text, share)
    effect = metrics.quantile(gaps, 0.5) / metrics.quantile(waits, 0.5)
    return Finding(effect <= GAP_LIMIT, f"{text}, each late by about {effect:.1%} of TTFT p50", share)


def ttft_agrees(run: Run) -> list[Check]:
    """The client's mean TTFT is the server's own (its histogram over the same attempts)."""
    limit = f"means within the larger of {TTFT_RELATIVE:.0%} and {TTFT_ABSOLUTE_S * 1000:g} ms of wall time"

    def judge(cells: Sequence[Cell]) -> Finding | None:
        findings = [judge_ttft(run, cell) for cell in cells]
        judged = [found for found in findings if found.ok is not None]
        return max(judged, key=lambda found: found.badness) if judged else findings[0]

    return per_arm(run, "client and server TTFT agree", limit, judge, metrics=TTFT_ONLY)


def judge_ttft(run: Run, cell: Cell) -> Finding:
    """One cell: every attempt that got a first token, warm-up and drain included, on both ends."""
    arm = run.arm(cell.record.arm)
    if arm and arm.metrics_urls and not any(url.startswith(arm.url) for url in arm.metrics_urls):
        return Finding(None, "the metrics are those of servers behind this arm")
    total = cell.server.increase("vllm:time_to_first_token_seconds_sum")
    count = cell.server.increase("vllm:time_to_first_token_seconds_count")
    client = [row.ttft_ms / 1000 for row in cell.attempts if row.ttft_ms is not None]
    if total is None or not count or not client:
        return Finding(None, "the server exports no TTFT histogram")
    if abs(count - len(client)) > 0.1 * count:
        return Finding(None, f"the server counted {count:.0f} first tokens, the client {len(client)}")
    server, seen = total / count, sum(client) / len(client)
    scale = cell.done.clock_scale if cell.done else 1.0
    allowed = max(TTFT_RELATIVE * server, TTFT_ABSOLUTE_S * scale)
    badness = abs(seen - server) / allowed
    return Finding(badness <= 1, f"client {seen:.3f} s, server {server:.3f} s", badness)


def simulator_on_time(run: Run) -> list[Check]:
    """A simulated server kept to its own schedule."""
    if not run.simulated:
        return []
    limit = f"clock as set, mean lateness <= {LATENESS_LIMIT:.0%} of TTFT p50 (model time)"
    return per_arm(run, "simulator on time", limit, judge_lateness)


def other_clocks(cell: Cell) -> list[float]:
    """Clock scales that the simulator was seen at besides the cell's: all its durations are then wrong."""
    mine = cell.done.clock_scale if cell.done else 1.0
    seen = {
        value
        for (_, name, _), values in cell.server.series.items()
        if name == "faceoff_sim:clock_scale"
        for _, value in values
    }
    return sorted(value for value in seen if abs(value - mine) > 1e-6 * mine)


def judge_lateness(cells: Sequence[Cell]) -> Finding:
    """Worst repeat of a level."""
    worst = Finding(None, "the server exports no lateness")
    for cell in cells:
        others = other_clocks(cell)
        if others:
            return Finding(
                False, f"its clock ran at {others[0]:g} times wall time: something else set it", 1e9
            )
        total = cell.server.increase("faceoff_sim:lateness_seconds_sum")
        count = cell.server.increase("faceoff_sim:lateness_seconds_count")
        ttft = metrics.statistic(cell, "ttft_p50", None, {})
        if total is None or not count or not ttft or cell.done is None:
            continue
        late = total / count * cell.done.clock_scale
        share = late / ttft
        text = f"mean lateness {late * 1000:.2f} ms of model time, {share:.1%} of TTFT p50"
        found = Finding(share <= LATENESS_LIMIT, text, share)
        worst = found if worst.ok is None or found.badness > worst.badness else worst
    return worst
