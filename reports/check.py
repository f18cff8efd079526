"""One check of the certificate: what was found, what was allowed, and which verdicts it touches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reports.compare import Level
from reports.read import Cell, Run

DOUBT = " (a doubt: withholds nothing)"


@dataclass(frozen=True)
class Finding:
    """What a check found for one arm at one level."""

    ok: bool | None
    """None: the files do not tell."""
    text: str
    badness: float = 0.0
    """Orders findings, so that the worst is the one shown."""


@dataclass(frozen=True)
class Check:
    """A line of the certificate."""

    check: str
    arm: str
    ok: bool | None
    """None: not checked, and ``value`` says why."""
    value: str
    limit: str
    levels: frozenset[Level] | None = None
    """Where it failed; None = everywhere."""
    metrics: frozenset[str] | None = None
    """Latencies that it touches (``ttft``); None = every metric."""
    withholds: bool = True

    @property
    def failed(self) -> bool:
        """Whether the limit was broken."""
        return self.ok is False

    @property
    def reason(self) -> str:
        """``"no verdict: <check> (<arm>: <value>)"``; the limit stands in the certificate."""
        return f"no verdict: {self.check} ({self.arm}: {self.value})"

    def touches(self, level: Level, metric: str) -> bool:
        """Whether a failure here withholds the verdict of this metric at this level."""
        if not self.failed or not self.withholds:
            return False
        if self.levels is not None and level not in self.levels:
            return False
        return self.metrics is None or metric.partition("_")[0] in self.metrics


def level_text(level: Level) -> str:
    """``multi_turn context=8192, 16 users``."""
    workload, point, users = level
    return f"{workload} {point}, {users} user{'' if users == 1 else 's'}"


def by_level(run: Run, arm: str) -> dict[Level, list[Cell]]:
    """The finished cells of an arm, repeats together."""
    found: dict[Level, list[Cell]] = {}
    for cell in run.finished:
        if cell.record.arm == arm:
            found.setdefault(cell.level, []).append(cell)
    return found


def roll_up(
    name: str,
    arm: str,
    limit: str,
    findings: dict[Level, Finding],
    *,
    metrics: frozenset[str] | None = None,
    withholds: bool = True,
) -> Check:
    """Many findings of one arm as one line: the worst one, and where it failed."""
    limit = limit if withholds else limit + DOUBT
    judged = {level: found for level, found in findings.items() if found.ok is not None}
    if not judged:
        why = next(iter(findings.values())).text if findings else "no finished cell it applies to"
        return Check(name, arm, None, f"not checked: {why}", limit, None, metrics, withholds)
    bad = frozenset(level for level, found in judged.items() if not found.ok)
    worst = max(judged, key=lambda level: (not judged[level].ok, judged[level].badness))
    value = judged[worst].text
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        value += f" at {level_text(worst)}{more}"
    unknown = len(findings) - len(judged)
    if unknown:
        value += f"; not checked at {unknown} of {len(findings)} levels"
    return Check(name, arm, not bad, value, limit, bad, metrics, withholds)


def per_arm(
    run: Run,
    name: str,
    limit: str,
    judge: Callable[[Sequence[Cell]], Finding | None],
    *,
    metrics: frozenset[str] | None = None,
    withholds: bool = True,
) -> list[Check]:
    """A check that looks at the cells of one arm and level (all repeats) at a time.

    ``judge`` returns None where the check does not apply.
    """
    checks: list[Check] = []
    for arm in run.arms:
        findings = {
            level: found for level, cells in by_level(run, arm).items() if (found := judge(cells)) is not None
        }
        checks.append(roll_up(name, arm, limit, findings, metrics=metrics, withholds=withholds))
    return checks
