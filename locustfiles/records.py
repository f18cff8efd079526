"""The record format: the one thing that the load generator and the reports share.

A run is a folder (see ``docs/method.md``); every file in it that Faceoff writes itself is defined here and
nowhere else. This module imports neither gevent nor Locust, so that a run can be re-judged years later on
a machine that has neither.

Times in ``requests.csv`` are milliseconds since the cell's start on the monotonic clock, in *model time*:
wall time multiplied by the server's clock scale (1 for every real server). ``None`` (an empty CSV field)
means "unknown"; it is never written as 0.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

import msgspec

SCHEMA = 1

T = TypeVar("T", bound=msgspec.Struct)

Workload = Literal["single_turn", "shared_prefix", "multi_turn"]
Phase = Literal["warmup", "measure", "drain"]
Status = Literal["ok", "http_error", "stream_error", "truncated", "timeout", "connect_error", "censored"]
TokenSource = Literal["usage", "counted", "none"]
Stamp = Literal["kernel", "user"]

ARM_NAME = re.compile(r"[a-z0-9_-]+")


class Attempt(msgspec.Struct, kw_only=True):
    """One attempt of one request: one row of ``requests.csv``. Field order is column order.

    ``*_ms`` instants count from the cell's start; ``connect_ms``, ``ttft_ms``, ``ttfa_ms``, ``tpot_ms``,
    ``e2e_ms`` and ``icl_*_ms`` are durations.
    """

    schema: int = SCHEMA
    arm: str
    workload: str
    point: str
    users: int
    repeat: int
    user: int
    session: int
    turn: int
    phase: Phase
    intended_ms: float | None = None
    start_ms: float | None = None
    connect_ms: float | None = None
    headers_ms: float | None = None
    first_token_ms: float | None = None
    first_answer_ms: float | None = None
    last_token_ms: float | None = None
    end_ms: float | None = None
    ttft_ms: float | None = None
    ttfa_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    prompt_tokens_asked: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens_asked: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None
    token_source: TokenSource = "none"
    chunks: int = 0
    icl_p50_ms: float | None = None
    icl_max_ms: float | None = None
    finish_reason: str | None = None
    status: Status
    retries: int = 0
    error: str | None = None
    http_status: int | None = None
    stamp: Stamp | None = None
    server_id: str | None = None
    prompt_digest: str | None = None
    output_digest: str | None = None


REQUEST_COLUMNS: tuple[str, ...] = Attempt.__struct_fields__


class ServerSample(msgspec.Struct, kw_only=True):
    """One value of one ``/metrics`` sample: one row of ``server.csv`` (long format, the server's own names).

    ``server_id`` numbers the metrics URLs of an arm from 0 (a proxy has one per backend). ``labels`` is the
    label set as sorted ``key=value`` pairs joined by ``;``, without ``model_name`` and ``engine``. The first
    and the last sample of a cell hold every ``vllm:`` series, those between only gauges and counters.
    """

    schema: int = SCHEMA
    t_ms: float
    server_id: int
    name: str
    labels: str = ""
    value: float


SERVER_COLUMNS: tuple[str, ...] = ServerSample.__struct_fields__


class GeneratorHealth(msgspec.Struct, kw_only=True):
    """How the load generator itself fared in one cell. Wall time, not model time."""

    loop_lag_p50_ms: float | None = None
    loop_lag_p99_ms: float | None = None
    loop_lag_max_ms: float | None = None
    cpu_share: float | None = None
    """CPU time of the process / wall time of the loaded period; 1.0 = one core full."""
    lateness_p99_ms: float | None = None
    """Actual start - intended start, where an attempt had an intended start."""
    reads: int = 0
    coalesced_reads: int = 0
    """Reads that held more than one token-bearing event: each stamped with its last segment's arrival."""
    first_token_coalesced: int = 0
    """Attempts whose first token arrived in such a read."""
    kernel_stamps: int = 0
    user_stamps: int = 0


class Done(msgspec.Struct, kw_only=True):
    """``done.json``: written last and atomically; a cell without it did not finish."""

    schema: int = SCHEMA
    complete: bool
    """True if every planned measured attempt has a row (whatever its status)."""
    reason: str | None = None
    """Why not, in one line, where ``complete`` is false."""
    failed: str | None = None
    """Why nothing may be concluded from the cell although it ran to its end: its arm died in it."""
    exit_code: int = 0
    started_utc: str
    wall_seconds: float
    clock_scale: float = 1.0
    rows: int
    """Rows in requests.csv."""
    measured: int
    """Rows of phase ``measure``."""
    measured_planned: int | None
    """What the plan implies; None in ad-hoc runs, which have no plan."""
    generator: GeneratorHealth


class ArmProbe(msgspec.Struct, kw_only=True):
    """What an arm was seen to be before the load started. None = could not be told."""

    models: list[str] = []
    model: str | None = None
    root: str | None = None
    """What the server says it loaded under that name: a checkpoint's name or folder."""
    version: str | None = None
    simulated: bool = False
    clock_scale: float = 1.0
    max_model_len: int | None = None
    tokenize: bool = False
    """The server answers /tokenize."""
    prefix_caching: bool | None = None
    cached_tokens_probe: list[int | None] = []
    """cached_tokens of one prompt of more than two cache blocks, sent three times."""
    block_size: int | None = None
    speculative: bool | None = None
    drafts: float | None = None
    """Draft tokens per decode step, by the server's counters."""
    acceptance_length: float | None = None
    cache_config: dict[str, str] = {}
    """Labels of ``vllm:cache_config_info``."""
    server_args: dict[str, str] = {}
    """Arguments that are not the default ones, from vLLM's log where it is known; without secrets."""
    dropped_fields: list[str] = []
    """Request fields that this server refused (then dropped on every arm)."""
    cache_salt: bool = True
    """The server takes ``cache_salt``; else a nonce line heads every prompt."""
    prefill_seconds: float | None = None
    """TTFT of the probe's cold prompt (model time), and its length:"""
    prefill_tokens: int | None = None
    decode_tokens_per_second: float | None = None


NAMED_ARMS: dict[str, tuple[bool, bool]] = {
    "plain": (False, False),
    "cache": (True, False),
    "mtp": (False, True),
    "both": (True, True),
}
"""What these names say about (prefix caching, speculative decoding), where nothing is declared."""


class ArmRecord(msgspec.Struct, kw_only=True):
    """One arm as the run saw it."""

    name: str
    url: str
    """Without credentials; keys are never recorded."""
    metrics_urls: list[str] = []
    declared: dict[str, str] = {}
    """What the profile or the user says it is: ``caching`` on|off, ``drafts`` "0".., ``device``."""
    probe: ArmProbe

    @property
    def claims(self) -> tuple[bool | None, bool | None]:
        """(prefix caching, speculative decoding) as declared, else as its name says; None = no claim."""
        caching, drafts = NAMED_ARMS.get(self.name, (None, None))
        said = self.declared.get("caching")
        if said in ("on", "off"):
            caching = said == "on"
        count = self.declared.get("drafts", "")
        if count.isdigit():
            drafts = int(count) > 0
        return caching, drafts

    @property
    def is_proxy(self) -> bool:
        """Its metrics are elsewhere: it hands requests on to the servers there."""
        return bool(self.metrics_urls) and not all(
            url.startswith(self.url + "/") for url in self.metrics_urls
        )


class CellRecord(msgspec.Struct, kw_only=True):
    """One planned cell. ``order`` is its place in the run, from 0; ``block`` groups the arms' cells."""

    id: str
    """Folder name below ``cells/``: ``<workload>.<point>.u<users>.r<repeat>.<arm>``."""
    arm: str
    workload: str
    point: str
    users: int
    repeat: int
    """From 1."""
    sessions: int
    """Measured sessions per user."""
    turns: int
    order: int
    block: int
    clock_scale: float = 1.0
    start_spread_s: float = 0.0
    pause_s: float = 0.0
    """Mean pause of a user before a follow-up (model time); the same seeded pauses for every arm."""
    device: str | None = None
    """Device that the arm was on, where it is known: with a swap control not the same in every repeat."""
    command: list[str] = []
    """The Locust command line of the cell (no secrets: keys travel in the environment)."""

    @property
    def measured_planned(self) -> int:
        """Rows of phase ``measure`` that this cell must yield."""
        return self.users * self.sessions * self.turns


class Manifest(msgspec.Struct, kw_only=True):
    """``manifest.json``: everything about a run that its cells share."""

    schema: int = SCHEMA
    run: str
    plan: str
    plan_toml: dict[str, Any] = {}
    """The plan as it was carried out (after knobs)."""
    profile: str | None = None
    seed: int
    base: str
    """The arm that ratios are taken against: the first one named."""
    simulated: bool = False
    arms: list[ArmRecord]
    cells: list[CellRecord]
    parallel_arms: bool = False
    """The cells of a block, one per arm, ran side by side, each arm on a device of its own."""
    started_utc: str
    argv: list[str] = []
    git_commit: str | None = None
    host: dict[str, Any] = {}
    versions: dict[str, str] = {}
    sampling: dict[str, Any] = {}
    """The pinned request fields, after dropping what a server refused."""
    certificate: dict[str, Any] | None = None
    """The load generator's self-test for this machine, if one was made."""
    notes: list[str] = []
    """Loud remarks made before the load: declared and observed differ, fields dropped, …"""


def cell_id(workload: str, point: str, users: int, repeat: int, arm: str) -> str:
    """Folder name of a cell."""
    return f"{workload}.{point}.u{users}.r{repeat}.{arm}"


def parse_point(point: str) -> dict[str, str]:
    """``"context=8192,pace=lockstep"`` -> ``{"context": "8192", "pace": "lockstep"}``.

    Raises:
        ValueError: if an item is not ``name=value``.
    """
    items: dict[str, str] = {}
    for item in point.split(","):
        name, sep, value = item.partition("=")
        if not sep or not name or not value:
            raise ValueError(f"point {point!r}: {item!r} is not of the form name=value")
        items[name] = value
    return items


def csv_row(record: msgspec.Struct) -> list[object]:
    """Field values in column order; None becomes an empty field, floats keep microseconds (3 decimals)."""
    return [
        "" if value is None else f"{value:.3f}" if isinstance(value, float) else value
        for value in msgspec.structs.astuple(record)
    ]


_CASTS: dict[type, dict[str, Any]] = {}


def _casts(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Column -> int, float or str, from the type hints of a record."""
    if kind not in _CASTS:
        found: dict[str, Any] = {}
        for name, hint in get_type_hints(kind).items():
            text = str(hint)
            found[name] = float if "float" in text else int if "int" in text else str
        _CASTS[kind] = found
    return _CASTS[kind]


def read_csv(path: Path, kind: type[T]) -> Iterator[T]:
    """Rows of a CSV file of ``kind`` (``Attempt`` or ``ServerSample``).

    A last line without its line end was cut off by a kill; it is left out. Columns are found by name, so
    files of a later version with more columns can still be read.

    Raises:
        ValueError: naming file and line, if a complete line does not fit.
    """
    text = path.read_bytes().decode("utf-8", errors="replace")
    lines = text.split("\n")
    lines.pop()  # "" after a complete last line, else the half-written one
    if not lines:
        return
    reader = csv.reader(lines)
    header = next(reader)
    casts = _casts(kind)
    for row in reader:
        if len(row) != len(header):
            raise ValueError(f"{path}:{reader.line_num}: {len(row)} fields, the header has {len(header)}")
        try:
            fields = {
                name: casts[name](value)
                for name, value in zip(header, row, strict=True)
                if value != "" and name in casts
            }
            yield msgspec.convert(fields, kind)
        except (ValueError, msgspec.ValidationError) as error:
            raise ValueError(f"{path}:{reader.line_num}: {error}") from None


def read_json(path: Path, kind: type[T]) -> T:
    """Read ``done.json`` or ``manifest.json``.

    Raises:
        ValueError: naming the file, if it is not what ``kind`` says.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}: {error}") from None


def write_json(path: Path, record: object) -> None:
    """Write atomically: a reader sees the old file or the whole new one."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    part.replace(path)
