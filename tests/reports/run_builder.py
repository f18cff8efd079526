"""Synthetic run folders: written through the record format alone, with numbers a test can compute by hand."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from locustfiles.records import (
    REQUEST_COLUMNS,
    SERVER_COLUMNS,
    ArmProbe,
    ArmRecord,
    Attempt,
    CellRecord,
    Done,
    GeneratorHealth,
    Manifest,
    ServerSample,
    cell_id,
    csv_row,
    write_json,
)

BLOCK = 16
Level = tuple[str, str, int]


def probe(caching: bool, drafts: int, **changes: Any) -> ArmProbe:
    """A simulated arm's probe that agrees with its flags."""
    return msgspec.structs.replace(
        ArmProbe(
            models=["m"],
            model="m",
            version="0.32.0+sim",
            simulated=True,
            clock_scale=10.0,
            max_model_len=262144,
            tokenize=True,
            prefix_caching=caching,
            cached_tokens_probe=[0, 32, 32] if caching else [0, 0, 0],
            block_size=BLOCK,
            speculative=drafts > 0,
            acceptance_length=2.9 if drafts else None,
        ),
        **changes,
    )


def arm(name: str, caching: bool = False, drafts: int = 0, **changes: Any) -> ArmRecord:
    """An arm that declares what it is."""
    return ArmRecord(
        name=name,
        url="http://127.0.0.1:8101",
        metrics_urls=["http://127.0.0.1:8101/metrics"],
        declared={"caching": "on" if caching else "off", "drafts": str(drafts)},
        probe=probe(caching, drafts, **changes),
    )


CACHE = arm("cache", caching=True)
MTP = arm("mtp", drafts=3)

Times = Callable[[CellRecord, int, int, int], tuple[float, float]]
"""(cell, user, session, turn) -> (TTFT in s, TPOT in s)"""


def flat(ttft: float = 1.0, tpot: float = 0.02) -> Times:
    """The same times for every attempt."""
    return lambda cell, user, session, turn: (ttft, tpot)


@dataclass
class RunBuilder:
    """Builds one run folder; hooks change rows before they are written."""

    folder: Path
    arms: list[ArmRecord] = field(default_factory=lambda: [CACHE, MTP])
    levels: list[Level] = field(default_factory=lambda: [("multi_turn", "context=8192", 2)])
    repeats: int = 3
    sessions: int = 2
    times: dict[str, Times] = field(default_factory=dict)
    change: Callable[[CellRecord, Attempt], Attempt | None] = lambda cell, row: row
    samples: Callable[[CellRecord], Iterable[tuple[float, str, str, float]]] = lambda cell: ()
    health: GeneratorHealth = field(
        default_factory=lambda: GeneratorHealth(loop_lag_p99_ms=2.0, cpu_share=0.3, kernel_stamps=10)
    )
    manifest_changes: dict[str, Any] = field(default_factory=dict)
    skip: Callable[[CellRecord], bool] = lambda cell: False
    """Cells to leave without done.json."""

    def cells(self) -> list[CellRecord]:
        """The plan: blocks of all arms, order alternating."""
        found: list[CellRecord] = []
        block = 0
        for repeat in range(1, self.repeats + 1):
            for workload, point, users in self.levels:
                names = [a.name for a in self.arms]
                for name in names if block % 2 == 0 else names[::-1]:
                    found.append(
                        CellRecord(
                            id=cell_id(workload, point, users, repeat, name),
                            arm=name,
                            workload=workload,
                            point=point,
                            users=users,
                            repeat=repeat,
                            sessions=self.sessions,
                            turns=3 if workload == "multi_turn" else 1,
                            order=len(found),
                            block=block,
                            clock_scale=10.0,
                        )
                    )
                block += 1
        return found

    def write(self) -> Path:
        """Write the folder and return it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        cells = self.cells()
        manifest = Manifest(
            run=self.folder.name,
            plan="test",
            seed=1,
            base=self.arms[0].name,
            simulated=True,
            arms=self.arms,
            cells=cells,
            started_utc="2026-11-30T00:00:00Z",
            sampling={"temperature": 0, "ignore_eos": True},
        )
        write_json(self.folder / "manifest.json", msgspec.structs.replace(manifest, **self.manifest_changes))
        for cell in cells:
            self.write_cell(cell)
        return self.folder

    def write_cell(self, cell: CellRecord) -> None:
        """Write one cell's folder."""
        place = self.folder / "cells" / cell.id
        place.mkdir(parents=True, exist_ok=True)
        rows = [row for raw in self.rows(cell) if (row := self.change(cell, raw)) is not None]
        write_rows(place / "requests.csv", REQUEST_COLUMNS, rows)
        samples = [
            ServerSample(t_ms=t, server_id=0, name=name, labels=labels, value=value)
            for t, name, labels, value in self.samples(cell)
        ]
        write_rows(place / "server.csv", SERVER_COLUMNS, samples)
        if self.skip(cell):
            return
        measured = sum(row.phase == "measure" for row in rows)
        done = Done(
            complete=measured == cell.measured_planned,
            started_utc="2026-11-30T00:00:00Z",
            wall_seconds=10.0,
            clock_scale=10.0,
            rows=len(rows),
            measured=measured,
            measured_planned=cell.measured_planned,
            generator=self.health,
        )
        write_json(place / "done.json", done)

    def rows(self, cell: CellRecord) -> Iterable[Attempt]:
        """Warm-up session 0, then the measured ones; users one after another in time."""
        record = next(a for a in self.arms if a.name == cell.arm)
        times = self.times.get(cell.arm, flat())
        clock = 0.0
        for session in range(self.sessions + 1):
            for user in range(cell.users):
                for turn in range(1, cell.turns + 1):
                    ttft, tpot = times(cell, user, session, turn)
                    yield attempt(record, cell, user, session, turn, clock, ttft, tpot)
                    clock += (ttft + tpot * 255) * 1000


def attempt(
    record: ArmRecord,
    cell: CellRecord,
    user: int,
    session: int,
    turn: int,
    start_ms: float,
    ttft: float,
    tpot: float,
) -> Attempt:
    """One attempt that worked: 256 tokens out, prompt growing by 1024 a turn, hits by the arm's probe."""
    value = int(cell.point.split("=")[1].split(",")[0])
    prompt = value + 1024 * (turn - 1)
    cached = 0
    if any(record.probe.cached_tokens_probe):
        if turn > 1:
            cached = (prompt - 1024) // BLOCK * BLOCK
        elif cell.workload == "shared_prefix":
            cached = value // BLOCK * BLOCK
    if cell.workload == "shared_prefix":
        prompt += 512
    first = start_ms + ttft * 1000
    last = first + tpot * 255 * 1000
    return Attempt(
        arm=cell.arm,
        workload=cell.workload,
        point=cell.point,
        users=cell.users,
        repeat=cell.repeat,
        user=user,
        session=session,
        turn=turn,
        phase="warmup" if session == 0 else "measure",
        start_ms=start_ms,
        first_token_ms=first,
        first_answer_ms=first,
        last_token_ms=last,
        end_ms=last,
        ttft_ms=ttft * 1000,
        ttfa_ms=ttft * 1000,
        tpot_ms=tpot * 1000,
        e2e_ms=last - start_ms,
        prompt_tokens_asked=prompt,
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens_asked=256,
        output_tokens=256,
        token_source="usage",
        chunks=100,
        finish_reason="length",
        status="ok",
        http_status=200,
        stamp="kernel",
        prompt_digest=f"{cell.workload}{cell.repeat}{user}{session}{turn}",
        output_digest=f"out{cell.repeat}{user}{session}{turn}",
    )


def write_rows(path: Path, columns: Iterable[str], rows: Iterable[msgspec.Struct]) -> None:
    """A CSV of the record format."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(csv_row(row) for row in rows)
