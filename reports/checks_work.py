"""Checks of the work: every arm was asked the same, answered in full, and every attempt is accounted for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from locustfiles.records import Attempt
from reports import metrics
from reports.check import Check, Finding, by_level, per_arm, roll_up
from reports.compare import PRIMARY, Level
from reports.read import Cell, Run

FAILURE_LIMIT = 0.05
"""Failed attempts count as slower than any; with 5 % of them a median is at worst the p53 of those that
worked."""
SAMPLES_LIMIT = 2
AGREEMENT_LIMIT = 0.9
FOLLOW_UP_TOKENS = 16
FOLLOW_UP_SHARE = 0.01


def count_of(bad: int, total: int, what: str) -> str:
    """``"3 of 48 answers not of the length asked"``."""
    return f"{bad} of {total} {what}"


def tokens_conserved(run: Run) -> list[Check]:
    """Output tokens are what was asked (where lengths are pinned) and no chunk came without a token."""
    pinned = bool(run.manifest.sampling.get("ignore_eos"))
    limit = "0 answers off" + ("" if pinned else " (lengths not pinned: at most what was asked)")

    def judge(cells: Sequence[Cell]) -> Finding:
        rows = [row for cell in cells for row in metrics.ok(cell.measured)]
        told = [row for row in rows if row.output_tokens is not None and row.token_source == "usage"]
        if not told:
            return Finding(None, "the server tells no token counts")
        bad = sum(not conserved(row, pinned) for row in told)
        missing = len(rows) - len(told)
        text = count_of(bad, len(told), "answers off") + (f", {missing} without usage" if missing else "")
        return Finding(bad == 0 and not missing, text, bad + missing)

    return per_arm(run, "tokens conserved", limit, judge)


def conserved(row: Attempt, pinned: bool) -> bool:
    """Whether one answer's counts fit each other and what was asked."""
    tokens, asked = row.output_tokens or 0, row.output_tokens_asked
    if tokens < 1 or row.chunks > tokens or (row.reasoning_tokens or 0) > tokens:
        return False
    if (row.cached_tokens or 0) > (row.prompt_tokens or row.cached_tokens or 0):
        return False
    return asked is None or (tokens == asked if pinned else tokens <= asked)


def prompt_lengths(run: Run) -> list[Check]:
    """Prompts had the length asked for, by the server's own count."""
    limit = f"first turns exact, follow-ups within max({FOLLOW_UP_TOKENS} tokens, {FOLLOW_UP_SHARE:.0%})"

    def judge(cells: Sequence[Cell]) -> Finding:
        errors = [
            (abs(row.prompt_tokens - row.prompt_tokens_asked), prompt_tolerance(row))
            for cell in cells
            for row in metrics.ok(cell.measured)
            if row.prompt_tokens is not None and row.prompt_tokens_asked is not None
        ]
        if not errors:
            return Finding(None, "the server tells no prompt tokens")
        bad = sum(error > allowed for error, allowed in errors)
        text = (
            f"{count_of(bad, len(errors), 'prompts off')}, largest error {max(e for e, _ in errors)} tokens"
        )
        return Finding(bad == 0, text, bad)

    return per_arm(run, "prompt lengths as asked", limit, judge)


def prompt_tolerance(row: Attempt) -> float:
    """Tokens by which a prompt may miss what was asked."""
    if row.turn == 1:
        return 0
    return max(FOLLOW_UP_TOKENS, FOLLOW_UP_SHARE * (row.prompt_tokens_asked or 0))


Judge = Callable[[Sequence[Cell], Sequence[Cell]], Finding]
"""Of an arm's and the base arm's cells at one level."""
Key = tuple[int, int, int, int]
"""(repeat, user, session, turn)"""


def digests(cells: Sequence[Cell], field: str, turn: int | None = None) -> dict[Key, str]:
    """A digest column of the measured attempts that have it; outputs only of those that worked."""
    return {
        (row.repeat, row.user, row.session, row.turn): value
        for cell in cells
        for row in metrics.of_turn(cell.measured, turn)
        if (value := getattr(row, field)) is not None and (field != "output_digest" or row.status == "ok")
    }


def same_user_text(run: Run) -> list[Check]:
    """Session s of user u sent the same text to every arm."""

    def judge(mine: Sequence[Cell], base: Sequence[Cell]) -> Finding:
        ours, theirs = digests(mine, "prompt_digest"), digests(base, "prompt_digest")
        shared = ours.keys() & theirs.keys()
        if not shared:
            return Finding(None, "no digests in common")
        bad = sum(ours[key] != theirs[key] for key in shared)
        return Finding(bad == 0, count_of(bad, len(shared), "texts differ"), bad)

    return against_base(run, "same user text", "0 texts differ from the base arm's", judge)


def same_outputs(run: Run) -> list[Check]:
    """Greedy answers to the same first prompt mostly agree; else the arms may not do the same work."""

    def judge(mine: Sequence[Cell], base: Sequence[Cell]) -> Finding:
        ours = digests(mine, "output_digest", 1)
        theirs = digests(base, "output_digest", 1)
        worked = ours.keys() & theirs.keys()
        if not worked:
            return Finding(None, "no digests in common")
        share = sum(ours[key] == theirs[key] for key in worked) / len(worked)
        return Finding(share >= AGREEMENT_LIMIT, f"{share:.0%} of {len(worked)} agree", 1 - share)

    limit = f">= {AGREEMENT_LIMIT:.0%} of first answers as the base arm's"
    return against_base(run, "same greedy outputs", limit, judge, withholds=False)


def against_base(
    run: Run,
    name: str,
    limit: str,
    judge: Judge,
    *,
    withholds: bool = True,
) -> list[Check]:
    """A check that compares every other arm with the base arm, level by level."""
    if len(run.arms) < 2:
        return []
    base_cells = by_level(run, run.arms[0])
    checks: list[Check] = []
    for arm in run.arms[1:]:
        findings: dict[Level, Finding] = {
            level: judge(cells, base_cells[level])
            for level, cells in by_level(run, arm).items()
            if level in base_cells
        }
        checks.append(roll_up(name, arm, limit, findings, withholds=withholds))
    return checks


def sessions_complete(run: Run) -> list[Check]:
    """Every planned measured attempt has a row, and the file holds every row that the cell wrote."""

    def judge(cells: Sequence[Cell]) -> Finding:
        missing, reason = 0, ""
        for cell in cells:
            done, planned = cell.done, cell.record.measured_planned
            short = abs(planned - len(cell.measured)) if planned else 0
            lost = 0 if done is None else abs(done.rows - len(cell.attempts))
            missing += short + lost
            if done is not None and not done.complete:
                missing += not (short + lost)
                reason = done.reason or "stopped early"
        text = f"{missing} attempts missing or lost" + (f" ({reason})" if reason else "")
        return Finding(missing == 0, text, missing)

    return per_arm(run, "sessions complete", "0 attempts missing", judge)


def failures(run: Run) -> list[Check]:
    """Few measured attempts failed: latencies of the survivors alone would flatter a server that refuses."""

    def judge(cells: Sequence[Cell]) -> Finding | None:
        rows = [row for cell in cells for row in cell.measured]
        if not rows:
            return None
        kinds: dict[str, int] = {}
        for row in rows:
            if row.status != "ok":
                kinds[row.status] = kinds.get(row.status, 0) + 1
        bad = sum(kinds.values())
        detail = f" ({', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))})" if bad else ""
        text = count_of(bad, len(rows), "measured attempts failed") + detail
        return Finding(bad / len(rows) <= FAILURE_LIMIT, text, bad / len(rows))

    return per_arm(run, "failures", f"<= {FAILURE_LIMIT:.0%} of measured attempts", judge)


def enough_samples(run: Run) -> list[Check]:
    """The primary metric rests on more than one attempt."""

    def judge(cells: Sequence[Cell]) -> Finding | None:
        primary = PRIMARY.get(cells[0].record.workload)
        if primary is None:
            return None
        n = sum(metrics.samples(cell, *primary) for cell in cells)
        return Finding(n >= SAMPLES_LIMIT, f"{n} values of {primary[0]}", -n)

    return per_arm(run, "enough samples", f">= {SAMPLES_LIMIT} values of the primary metric", judge)
