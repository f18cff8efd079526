"""The verdict as a table in the terminal. Text from files is never read as markup."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from reports.check import Check
from reports.classes import WorkloadClass, roll_up
from reports.judge import Judgement
from reports.proxies import counts_text
from reports.recommend import recommend
from reports.words import range_text

SIMULATED = "SIMULATED: these servers are a model, not hardware. Plan with it; decide on real servers."


def clean(text: str) -> str:
    """Without control characters: a server's text must not drive the terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def winner_text(winner: str | None) -> str:
    """The winner, or what stands in its place."""
    return "no verdict" if winner is None else winner


def show(judgement: Judgement, console: Console) -> None:
    """Print simulated mark, failed checks, verdict table, recommendation and unfinished cells."""
    run = judgement.run
    if run.simulated:
        console.print(Text(SIMULATED, style="bold magenta"))
    for note in run.manifest.notes:
        console.print(Text(f"note: {clean(note)}", style="yellow"))
    for check in judgement.checks:
        if check.failed:
            console.print(failed_text(check))
    console.print(verdict_table(roll_up(judgement)))
    for line in counts_text(run):
        console.print(Text(clean(line)))
    advice = recommend(judgement)
    console.print(Text(clean(f"recommendation: {advice.arm or 'none'}. {advice.why}"), style="bold"))
    unchecked = [check for check in judgement.checks if check.ok is None]
    passed = sum(check.ok is True for check in judgement.checks)
    bad = sum(check.failed for check in judgement.checks)
    console.print(
        f"certificate: {passed} checks passed, {bad} failed, {len(unchecked)} not checked "
        f"({', '.join(sorted({check.check for check in unchecked})) or 'none'})",
        markup=False,
    )
    if run.unfinished:
        total = len(run.cells)
        console.print(Text(f"{len(run.unfinished)} of {total} cells did not finish:", style="yellow"))
        for cell in run.unfinished[:10]:
            console.print(Text(clean(f"  {cell.record.id}: {cell.problem}"), style="yellow"))
        if len(run.unfinished) > 10:
            console.print(
                Text(f"  and {len(run.unfinished) - 10} more (report.html lists all)", style="yellow")
            )


def failed_text(check: Check) -> Text:
    """``CHECK FAILED …`` or ``doubt …``."""
    word, style = ("CHECK FAILED", "bold red") if check.withholds else ("doubt", "yellow")
    return Text(
        clean(f"{word} {check.check} [{check.arm}]: {check.value} (limit: {check.limit})"), style=style
    )


def verdict_table(classes: list[WorkloadClass]) -> Table:
    """Class, winner, factor, why."""
    table = Table(title="Verdict", title_justify="left", show_lines=True)
    table.add_column("class", ratio=3)
    table.add_column("workload")
    table.add_column("winner")
    table.add_column("factor", justify="right")
    table.add_column("why", ratio=4)
    for found in classes:
        style = "bold green" if found.factor else "bold red" if found.winner is None else "yellow"
        table.add_row(
            Text(clean(found.name)),
            Text(clean(found.workload)),
            Text(clean(winner_text(found.winner)), style=style),
            Text(range_text(found.factor)),
            Text(clean(found.why)),
        )
    return table
