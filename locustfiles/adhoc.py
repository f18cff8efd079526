"""A run by hand: plain Locust, one server. Its folder reads like any other run's, with one arm."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from locustfiles.body import pinned_sampling
from locustfiles.cell import Cell
from locustfiles.host import git_commit, host_facts, versions
from locustfiles.options import CellOptions
from locustfiles.records import ArmProbe, ArmRecord, CellRecord, Manifest, write_json
from locustfiles.run_folder import link_latest


def new_run_folder() -> Path:
    """``results/<UTC stamp>-adhoc``; not made yet."""
    return Path("results") / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-adhoc"


def write_manifest(run: Path, options: CellOptions, cells: Iterable[Cell], simulated: bool) -> None:
    """Write the manifest of a run by hand and point ``results/latest`` to it.

    The arm was not probed: what it is stays unknown, and the reports say so; ``simulated`` is what it says
    of itself.

    Raises:
        OSError: if it cannot be written.
    """
    listed = list(cells)
    first = listed[0]
    probe = ArmProbe(
        models=[first.model], model=first.model, simulated=simulated, clock_scale=first.clock.scale
    )
    write_json(
        run / "manifest.json",
        Manifest(
            run=run.name,
            plan="adhoc",
            seed=options.seed,
            base=options.arm,
            simulated=simulated,
            arms=[
                ArmRecord(
                    name=options.arm, url=options.host, metrics_urls=list(options.metrics_urls), probe=probe
                )
            ],
            cells=[
                CellRecord(
                    id=cell.folder.name,
                    arm=options.arm,
                    workload=cell.key.workload,
                    point=cell.point.text,
                    users=cell.users,
                    repeat=options.repeat,
                    sessions=options.sessions,
                    turns=cell.point.turns,
                    order=order,
                    block=order,
                    clock_scale=cell.clock.scale,
                )
                for order, cell in enumerate(listed)
            ],
            started_utc=datetime.now(UTC).isoformat(timespec="seconds"),
            git_commit=git_commit(),
            host=host_facts(),
            versions=versions(),
            sampling=pinned_sampling(options.drop_fields),
            notes=["a run by hand: one arm, not probed"],
        ),
    )
    link_latest(run)
