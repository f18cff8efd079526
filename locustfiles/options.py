"""Command-line options that a cell adds to Locust's own. Imported once, by ``users``."""

from __future__ import annotations

import argparse
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from locust import events

from locustfiles.records import ARM_NAME


@dataclass(frozen=True)
class CellOptions:
    """The options of one Locust process, read and checked."""

    host: str
    arm: str = "adhoc"
    point: str | None = None
    repeat: int = 1
    sessions: int = 0
    """Measured sessions per user; 0 = until stopped."""
    seed: int = 0
    cell_dir: Path | None = None
    model: str | None = None
    token_table: Path | None = None
    start_spread_s: float = 0.0
    pause_s: float = 0.0
    """Mean pause before a follow-up, model seconds, where the point names none."""
    clock_scale: float | None = None
    drop_fields: frozenset[str] = frozenset()
    nonce: bool = False
    cache_salt: str = ""
    metrics_urls: tuple[str, ...] = ()
    request_timeout_s: float = 1800.0
    """Model seconds."""
    headers: dict[str, str] = field(default_factory=dict, repr=False)


class OptionError(ValueError):
    """An option does not make sense; the message says which and what to do."""


@events.init_command_line_parser.add_listener
def add_options(parser: argparse.ArgumentParser, **_: object) -> None:
    """Declare the options; those that only the sweep sets stay out of the web UI."""

    def add(flag: str, *, ui: bool = True, **rest: Any) -> None:
        parser.add_argument(flag, include_in_web_ui=ui, **rest)

    add("--arm", default="adhoc", metavar="NAME", help="name of the server configuration under load")
    add(
        "--point",
        default="",
        metavar="POINT",
        help="e.g. context=8192,pace=lockstep (default: the workload's)",
    )
    add("--sessions", type=int, default=0, metavar="N", help="measured sessions per user; 0 = until stopped")
    add("--seed", type=int, default=None, metavar="N", help="seed of the prompts (default: fresh)")
    add("--model", default="", metavar="NAME", help="default: the one that /v1/models lists")
    add("--request-timeout", type=float, default=1800.0, metavar="S", help="seconds for a whole request")
    add("--repeat", ui=False, type=int, default=1, metavar="N", help="number of this repeat, from 1")
    add("--cell-dir", ui=False, default="", metavar="DIR", help="default: a new run folder below results/")
    add("--token-table", ui=False, default="", metavar="FILE", help="default: measured at the start")
    add("--start-spread", ui=False, type=float, default=0.0, metavar="S", help="spread of the users' starts")
    add("--pause", ui=False, type=float, default=0.0, metavar="S", help="mean pause before a follow-up")
    add("--clock-scale", ui=False, type=float, default=None, metavar="X", help="default: what /version says")
    add("--drop-fields", ui=False, default="", metavar="A,B", help="request fields that the server refuses")
    add("--nonce", ui=False, action="store_true", help="a nonce line at the prompt's head, not cache_salt")
    add("--cache-salt", ui=False, default="", metavar="SALT", help="default: fresh")
    add("--metrics-url", ui=False, default="", metavar="URLS", help="default: the host's own /metrics")


def api_key_headers(arm: str) -> dict[str, str]:
    """Authorization from ``FACEOFF_API_KEY_<ARM>`` or ``FACEOFF_API_KEY``; nothing where neither is set."""
    name = "FACEOFF_API_KEY_" + arm.upper().replace("-", "_")
    key = os.environ.get(name) or os.environ.get("FACEOFF_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def read_options(parsed: argparse.Namespace, host: str | None) -> CellOptions:
    """Check what the command line, or the form of the web UI, says.

    Raises:
        OptionError: naming the option.
    """
    if not host:
        raise OptionError("no server named: pass --host http://127.0.0.1:PORT")
    if not ARM_NAME.fullmatch(parsed.arm):
        raise OptionError(f"--arm {parsed.arm!r}: use lower-case letters, digits, - and _")
    if parsed.sessions < 0:
        raise OptionError("--sessions must be 0 or more")
    if parsed.request_timeout <= 0:
        raise OptionError("--request-timeout must be above 0")
    if parsed.clock_scale is not None and parsed.clock_scale <= 0:
        raise OptionError("--clock-scale must be above 0")
    split = [item.strip() for item in parsed.drop_fields.split(",") if item.strip()]
    urls = tuple(url.strip() for url in parsed.metrics_url.split(",") if url.strip())
    return CellOptions(
        host=host.rstrip("/"),
        arm=parsed.arm,
        point=parsed.point or None,
        repeat=parsed.repeat,
        sessions=parsed.sessions,
        seed=secrets.randbelow(2**31) if parsed.seed is None else parsed.seed,
        cell_dir=Path(parsed.cell_dir) if parsed.cell_dir else None,
        model=parsed.model or None,
        token_table=Path(parsed.token_table) if parsed.token_table else None,
        start_spread_s=parsed.start_spread,
        pause_s=parsed.pause,
        clock_scale=parsed.clock_scale,
        drop_fields=frozenset(split),
        nonce=parsed.nonce,
        cache_salt=parsed.cache_salt or secrets.token_hex(8),
        metrics_urls=urls or (host.rstrip("/") + "/metrics",),
        request_timeout_s=parsed.request_timeout,
        headers=api_key_headers(parsed.arm),
    )
