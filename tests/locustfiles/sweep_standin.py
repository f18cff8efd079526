"""A small OpenAI-like server with knobs, a stand-in for a cell's process, and a driver that joins both.

Run as a program it is the cell (``cell MODE FOLDER USERS SESSIONS TURNS``) or the sweep with that cell
(``sweep MODE -- ARGUMENTS``).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locustfiles.records import REQUEST_COLUMNS, ArmRecord, CellRecord, Done, GeneratorHealth, write_json

if TYPE_CHECKING:
    from locustfiles.arms import Arm
    from locustfiles.run import Run


@dataclass
class StandIn:
    """What the server is like, and what it was asked. One word is one token; the template adds 4."""

    models: list[str] = field(default_factory=lambda: ["m"])
    max_model_len: int | None = 100_000
    version: dict[str, Any] | None = field(default_factory=lambda: {"version": "0.32.0"})
    caching: bool = True
    salted: bool = True
    """Honours cache_salt."""
    details: bool = True
    """usage tells cached_tokens."""
    metrics: bool = True
    drafts: int = 0
    """Draft tokens; every draft is accepted, so a chunk holds drafts + 1 tokens."""
    block: int = 16
    refused: frozenset[str] = frozenset()
    refusal: str = "openai"
    """How it says so: openai (param), pydantic (loc), words (message only), all (names every field)."""
    key: str | None = None
    health: int = 200
    prefill_s: float = 0.0
    config: dict[str, str] = field(default_factory=dict)
    error: str = ""
    """In-band error of every generation."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    busy: int = 0
    """That many clock_scale requests are answered 409."""
    seen: dict[tuple[str, str], bool] = field(default_factory=dict)
    hits: int = 0
    queries: int = 0
    steps: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ill(self) -> int:
        """Status of /health."""
        return self.health

    def cached(self, salt: str, text: str, tokens: int) -> int:
        """Tokens found in the cache; takes the prompt up into it."""
        if not self.caching:
            return 0
        self.queries += tokens
        key = (salt if self.salted else "", text)
        known = key in self.seen
        self.seen[key] = True
        found = (tokens - 1) // self.block * self.block if known else 0
        self.hits += found
        return found

    def page(self) -> str:
        """The /metrics page."""
        labels = {"block_size": str(self.block), "enable_prefix_caching": str(self.caching), **self.config}
        info = ",".join(f'{name}="{value}"' for name, value in labels.items())
        lines = [
            "# TYPE vllm:cache_config_info gauge",
            f"vllm:cache_config_info{{{info}}} 1.0",
            "# TYPE vllm:prefix_cache_queries counter",
            f'vllm:prefix_cache_queries_total{{engine="0"}} {self.queries}.0',
            "# TYPE vllm:prefix_cache_hits counter",
            f'vllm:prefix_cache_hits_total{{engine="0"}} {self.hits}.0',
        ]
        if self.drafts:
            lines += [
                "# TYPE vllm:spec_decode_num_drafts counter",
                f'vllm:spec_decode_num_drafts_total{{engine="0"}} {self.steps}.0',
                "# TYPE vllm:spec_decode_num_accepted_tokens counter",
                f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {self.steps * self.drafts}.0',
            ]
        return "\n".join(lines) + "\n"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: object = None, kind: str = "application/json") -> None:
        raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def allowed(self) -> bool:
        key = self.server.standin.key
        return key is None or self.headers.get("Authorization") == f"Bearer {key}"

    def do_GET(self) -> None:
        it = self.server.standin
        it.paths.append(self.path)
        if self.path == "/health":
            self.answer(it.ill(), "")
        elif self.path == "/v1/models":
            if not self.allowed():
                self.answer(401, {"error": {"message": "no"}})
            else:
                entries = [{"id": name, "max_model_len": it.max_model_len} for name in it.models]
                self.answer(200, {"object": "list", "data": entries})
        elif self.path == "/version" and it.version is not None:
            self.answer(200, it.version)
        elif self.path == "/metrics" and it.metrics:
            self.answer(200, it.page(), "text/plain")
        else:
            self.answer(404, {})

    def do_POST(self) -> None:
        it = self.server.standin
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/clock_scale":
            if it.busy:
                it.busy -= 1
                self.answer(409, {"error": "requests in flight"})
                return
            it.scales.append(body["clock_scale"])
            self.answer(200, {"clock_scale": body["clock_scale"]})
        elif self.path == "/v1/chat/completions":
            self.chat(body)
        else:
            self.answer(404, {})

    def chat(self, body: dict[str, Any]) -> None:
        it = self.server.standin
        it.bodies.append(body)
        if not self.allowed():
            self.answer(401, {"error": {"message": "wrong key"}})
            return
        for name in sorted(it.refused):
            if name in body:
                self.answer(400, self.refusal(name, body))
                return
        text = json.dumps(body["messages"])
        tokens = sum(len(message["content"].split()) for message in body["messages"]) + 4
        cached = it.cached(body.get("cache_salt", ""), text, tokens)
        time.sleep(it.prefill_s)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        if it.error:
            self.event({"error": {"message": it.error}})
            return
        self.event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        left = body["max_tokens"]
        while left > 0:
            size = min(left, 1 + it.drafts)
            it.steps += 1
            left -= size
            self.event({"choices": [{"delta": {"content": "word " * size}, "finish_reason": None}]})
            time.sleep(0.001)
        self.event({"choices": [{"delta": {}, "finish_reason": "length"}]})
        usage: dict[str, Any] = {"prompt_tokens": tokens, "completion_tokens": body["max_tokens"]}
        if it.details:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def refusal(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        kind = self.server.standin.refusal
        if kind == "openai":
            return {"error": {"message": "Unrecognized request argument", "param": name, "code": 400}}
        if kind == "pydantic":
            return {"detail": [{"type": "extra_forbidden", "loc": ["body", name], "input": body}]}
        if kind == "all":
            known = ", ".join(sorted(body))
            return {"error": {"message": f"Bad request with {known}"}}
        return {"error": {"message": f"I do not know '{name}'"}}

    def event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    standin: StandIn


@contextmanager
def serving(standin: StandIn) -> Iterator[StandIn]:
    """The stand-in on a free port of 127.0.0.1."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.standin = standin
    standin.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield standin
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# -- the cell ----------------------------------------------------------------------------------------------


def fake_cell(mode: str, folder: Path, users: int, sessions: int, turns: int) -> int:
    """Write what a cell writes. Modes: ok, failing, incomplete, crash, hang, stubborn."""
    planned = users * sessions * turns
    (folder / "pid").write_text(str(os.getpid()))

    def rows(count: int, status: str = "ok") -> None:
        with (folder / "requests.csv").open("w", encoding="utf-8") as file:
            file.write(",".join(REQUEST_COLUMNS) + "\n")
            for number in range(count):
                values = {
                    "schema": 1, "arm": "a", "workload": "w", "point": "p", "users": users, "repeat": 1,
                    "user": 0, "session": number + 1, "turn": 1, "phase": "measure", "token_source": "usage",
                    "chunks": 1, "status": status, "retries": 0, "error": "" if status == "ok" else "boom",
                }  # fmt: skip
                file.write(",".join(str(values.get(name, "")) for name in REQUEST_COLUMNS) + "\n")

    def done(complete: bool, measured: int, reason: str | None = None) -> None:
        write_json(
            folder / "done.json",
            Done(
                complete=complete, reason=reason, started_utc="2026-01-01T00:00:00", wall_seconds=1.0,
                rows=measured, measured=measured, measured_planned=planned, generator=GeneratorHealth(),
            ),
        )  # fmt: skip

    if mode == "ok":
        rows(planned)
        done(True, planned)
    elif mode == "failing":
        rows(planned, "stream_error")
        done(True, planned)
    elif mode == "incomplete":
        rows(planned - 1)
        done(False, planned - 1, "a conversation broke off")
    elif mode == "crash":
        print("RuntimeError: the cell fell over")
        return 3
    else:
        finished = threading.Event()
        signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "stubborn" else lambda *_: finished.set())
        rows(1)
        (folder / "started").touch()
        finished.wait(60)
        done(False, 1, "stopped")
    return 0


def fake_command(mode: str) -> Any:
    """A ``CellCommand`` that runs the fake; ``mode`` may be ``workload:mode`` pairs, the rest is ok."""
    modes = dict(part.split(":") for part in mode.split(",")) if ":" in mode else {}

    def command(run: Run, cell: CellRecord) -> list[str]:
        chosen = modes.get(cell.workload, "ok") if modes else mode
        folder = str(run.cell_folder(cell))
        numbers = [str(number) for number in (cell.users, cell.sessions, cell.turns)]
        return [sys.executable, __file__, "cell", chosen, folder, *numbers]

    return command


def fake_tables(
    folder: Path,
    records: Sequence[ArmRecord],
    arms: Mapping[str, Arm],
    dropped: Sequence[str],
    corpus: object,
) -> tuple[dict[str, Path], list[str]]:
    """Stands in for measuring token tables."""
    path = folder / "tokens.json"
    path.write_text("{}\n", encoding="utf-8")
    return {record.name: path for record in records}, []


if __name__ == "__main__":
    if sys.argv[1] == "cell":
        sys.exit(fake_cell(sys.argv[2], Path(sys.argv[3]), *(int(value) for value in sys.argv[4:7])))
    from locustfiles import sweep  # not needed by the cell, which should start fast

    sys.exit(sweep.main(sys.argv[4:], command=fake_command(sys.argv[2]), measure=fake_tables))
