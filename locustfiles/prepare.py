"""Everything before the first cell: probe the arms, lay out the cells, measure tokens, write the manifest."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from locustfiles import devices, estimate
from locustfiles.arm_http import one_line
from locustfiles.arms import Arm, ArmError, auth_headers
from locustfiles.body import pinned_sampling
from locustfiles.fingerprint import declared_notes, difference_notes
from locustfiles.host import git_commit, host_facts, versions
from locustfiles.plan import Plan, PlanError, expand, plan_record
from locustfiles.point import read_point
from locustfiles.probe import probe_arm
from locustfiles.prompts import TokenCounter, measure_table
from locustfiles.records import ArmRecord, CellRecord, Manifest, write_json
from locustfiles.run import CellCommand, Run, locust_command, say
from locustfiles.run_folder import certificate

#: (run folder, arms as probed, arms, dropped fields, corpus) -> (token table of each arm, remarks)
MeasureTables = Callable[
    [Path, Sequence[ArmRecord], Mapping[str, Arm], Sequence[str], Path | None],
    tuple[dict[str, Path], list[str]],
]


def probe_all(arms: Sequence[Arm], model: str | None) -> tuple[list[ArmRecord], list[str], list[str]]:
    """Probe every arm: (records, request fields dropped on every arm, remarks).

    Raises:
        ArmError: if one cannot be used.
    """
    records: list[ArmRecord] = []
    dropped: list[str] = []
    notes: list[str] = []
    for arm in arms:
        probe, remarks = probe_arm(arm, model=model, dropped=dropped, say=say)
        dropped += [name for name in probe.dropped_fields if name not in dropped]
        notes += remarks
        records.append(
            ArmRecord(
                name=arm.name,
                url=arm.url,
                metrics_urls=list(arm.metrics_urls),
                declared=dict(arm.declared),
                probe=probe,
            )
        )
    for record in records:
        notes += declared_notes(record)
    notes += difference_notes(records)
    return records, dropped, notes


def measure_tables(
    folder: Path,
    records: Sequence[ArmRecord],
    arms: Mapping[str, Arm],
    dropped: Sequence[str],
    corpus: Path | None,
) -> tuple[dict[str, Path], list[str]]:
    """One token table per model, measured on an arm that has /tokenize where there is one.

    Raises:
        ArmError: if the tokens cannot be counted, or the corpus does not do.
    """
    by_model: dict[str, Path] = {}
    for record in sorted(records, key=lambda record: not record.probe.tokenize):
        model = record.probe.model or ""
        if model in by_model:
            continue
        path = folder / ("tokens.json" if not by_model else f"tokens.{len(by_model) + 1}.json")
        say(f"measuring how {one_line(model, 80)} counts tokens, on {record.name}")
        counter = TokenCounter(arms[record.name].url, model, auth_headers(record.name), dropped)
        try:
            table = measure_table(counter, corpus, progress=lambda line: say(f"  {one_line(line)}"))
        except (RuntimeError, ValueError) as error:
            raise ArmError(f"arm {record.name}: {one_line(error)}") from None
        write_json(path, table)
        by_model[model] = path
    notes = []
    if len(by_model) > 1:
        notes = [
            "arms serve models of different names: prompts are built for each on its own, texts may differ"
        ]
    return {record.name: by_model[record.probe.model or ""] for record in records}, notes


def lay_out(
    plan: Plan,
    names: Sequence[str],
    records: Sequence[ArmRecord],
    forced_scale: float | None,
    certified_per_s: float | None = None,
    together: int = 1,
) -> tuple[list[CellRecord], dict[str, estimate.Speed], list[str]]:
    """The cells in run order with scales, sessions and start spreads, the arms' speeds, and remarks.

    ``together``: arms that are loaded at the same time.
    """
    speeds = {record.name: estimate.speed_of(record.probe) for record in records}
    speeds |= {name: estimate.Speed() for name in names if name not in speeds}
    all_simulated = bool(records) and all(record.probe.simulated for record in records)
    proxies = [record.name for record in records if record.is_proxy]
    notes: list[str] = []
    if all_simulated and proxies and forced_scale is None:
        forced_scale = 1.0
        notes.append(
            f"{' and '.join(proxies)}: a real proxy, whose time is wall time: the simulated servers run in "
            "real time too (--clock-scale says otherwise, and multiplies what the proxy costs)"
        )
    cells = expand(plan, names)
    for cell in cells:
        if all_simulated:
            point = read_point(cell.workload, cell.point)
            cell.clock_scale = forced_scale or estimate.clock_scale(
                point, list(speeds.values()), cell.users, certified_per_s, together
            )
    for cell in cells:
        point = read_point(cell.workload, cell.point)
        cell.start_spread_s = estimate.start_spread(point, list(speeds.values()), cell.users)
        cell.pause_s = estimate.reading_pause(point, list(speeds.values()), cell.users)
    cells, remarks = estimate.fit_sessions(
        cells, speeds, estimate.minutes_of(plan, all_simulated and forced_scale != 1.0), together > 1
    )
    notes += remarks
    for record in records:
        longest = max(cells, key=_longest_prompt)
        limit = record.probe.max_model_len
        if limit is not None and _longest_prompt(longest) > limit:
            raise PlanError(
                f"{longest.workload} {longest.point} needs {_longest_prompt(longest)} tokens of context, "
                f"arm {record.name} serves {limit}: choose smaller points or raise --max-model-len"
            )
    return cells, speeds, notes


def _longest_prompt(cell: CellRecord) -> int:
    point = read_point(cell.workload, cell.point)
    return point.prompt_tokens(point.turns) + point.output


@dataclass(frozen=True)
class Setup:
    """What the command line says besides the plan and the arms."""

    argv: list[str]
    model: str | None = None
    corpus: Path | None = None
    profile: str | None = None
    clock_scale: float | None = None
    swap: bool = False
    """Every arm on every device, see ``devices``."""
    parallel_arms: bool = False
    """The arms' cells of a block side by side."""
    measure: MeasureTables = measure_tables
    command: CellCommand = locust_command


def prepare(setup: Setup, plan: Plan, arms: Sequence[Arm], folder: Path) -> Run:
    """Everything before the first cell, up to the manifest on disk.

    Raises:
        ArmError, PlanError: the arms or the plan cannot be used.
        OSError: the folder cannot be written.
    """
    records, dropped, notes = probe_all(arms, setup.model)
    by_name = {arm.name: arm for arm in arms}
    host = host_facts()
    found, missing = certificate(host["id"])
    notes += missing
    carried = found.get("safe_events_per_s") if found else None
    certified = float(carried) if isinstance(carried, int | float) and carried > 0 else None
    together = len(arms) if setup.parallel_arms else 1
    cells, speeds, remarks = lay_out(plan, list(by_name), records, setup.clock_scale, certified, together)
    notes += remarks
    if setup.parallel_arms:
        devices.check_carried(len(arms), max(cell.users for cell in cells), found, missing)
    devices.place(cells, arms, setup.swap)
    if len(arms) == 1:
        notes.append("only one arm: there is nothing to compare it with")
    nonce = any(not record.probe.cache_salt for record in records)
    if nonce and "cache_salt" not in dropped:
        dropped.append("cache_salt")
    tables, remarks = setup.measure(folder, records, by_name, dropped, setup.corpus)
    notes += remarks
    manifest = Manifest(
        run=folder.resolve().name,
        plan=plan.name,
        plan_toml=plan_record(plan),
        profile=setup.profile,
        seed=secrets.randbelow(2**31) if plan.seed is None else plan.seed,
        base=arms[0].name,
        simulated=any(record.probe.simulated for record in records),
        arms=records,
        cells=cells,
        parallel_arms=setup.parallel_arms,
        started_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        argv=["python", "-m", "locustfiles.sweep", *setup.argv],
        git_commit=git_commit(),
        host=host,
        versions=versions(),
        sampling=pinned_sampling(dropped),
        certificate=found,
        notes=notes,
    )
    run = Run(folder, manifest, by_name, tables, dropped, nonce)
    for cell in cells:
        run.estimates[cell.id] = estimate.cell_seconds(cell, speeds[cell.arm])
        cell.command = setup.command(run, cell)
    write_json(folder / "manifest.json", manifest)
    return run
