"""``python -m servers.sim.bench``: chunks per second, lateness and memory of one simulator process.

Starts a simulator whose steps are timed for the asked rate, opens the asked number of streams from a client
that only counts bytes, and reads CPU time, memory and the lateness that the simulator itself exports.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

_SCALE = 20.0
_CALIBRATION = """
source = "benchmark: steps of {step} s, nothing else costs anything"
[model]
name = "bench"
max_model_len = 100000
kv_cache_tokens = 4000000
[prefill]
token_s = 1e-9
[decode]
step_s = {step}
"""


class Result(msgspec.Struct):
    """One measurement. Times are wall seconds."""

    streams: int
    chunks: int
    seconds: float
    chunks_per_s: float
    asked_chunks_per_s: float
    cpu_s: float
    cpu_us_per_chunk: float
    late_p50_ms: float
    late_p99_ms: float
    memory_mb: float
    errors: int


class _Client(asyncio.Protocol):
    """Sends one request, counts the bytes of its stream."""

    def __init__(self, body: bytes, done: asyncio.Future[bool]) -> None:
        self._body = body
        self._done = done
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio callback."""
        assert isinstance(transport, asyncio.Transport)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n"
        head += b"content-type: application/json\r\n"
        transport.write(head + b"content-length: %d\r\n\r\n" % len(self._body) + self._body)

    def data_received(self, data: bytes) -> None:
        """asyncio callback."""
        self._tail = (self._tail + data)[-64:]

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio callback."""
        if not self._done.done():
            self._done.set_result(self._tail.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"))


async def _load(port: int, streams: int, tokens: int) -> int:
    """Run the streams; number of those that did not end properly."""
    loop = asyncio.get_running_loop()
    waits = []
    for index in range(streams):
        done = loop.create_future()
        body = json.dumps(
            {
                "messages": [{"role": "user", "content": f"stream {index}"}],
                "max_tokens": tokens,
                "stream": True,
                "ignore_eos": True,
            }
        ).encode()
        await loop.create_connection(lambda body=body, done=done: _Client(body, done), "127.0.0.1", port)  # type: ignore[misc]
        waits.append(done)
    return sum(not ok for ok in await asyncio.gather(*waits))


async def _get(port: int, path: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n".encode())
    page = (await reader.read()).decode()
    writer.close()
    return page


def late_quantile(page: str, share: float) -> float:
    """Upper bound (s) of the bucket that holds this quantile of the exported lateness."""
    buckets: list[tuple[float, float]] = []
    for line in page.splitlines():
        if line.startswith("faceoff_sim:lateness_seconds_bucket"):
            bound = line.split('le="')[1].split('"')[0]
            buckets.append((float(bound), float(line.rsplit(" ", 1)[1])))
    total = buckets[-1][1] if buckets else 0.0
    return next((bound for bound, count in buckets if count >= share * total), float("inf"))


def _process(pid: int) -> tuple[float, float]:
    """CPU seconds and resident megabytes of a process (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return cpu, int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / 1e6


@contextmanager
def _server(step: float, streams: int) -> Iterator[tuple[int, int]]:
    """Port and process id of a simulator whose steps take ``step`` model seconds."""
    with tempfile.TemporaryDirectory() as folder:
        calibration = Path(folder) / "bench.toml"
        calibration.write_text(_CALIBRATION.format(step=step))
        command = [sys.executable, "-m", "servers.sim", "--port", "0", "--calibration", str(calibration)]
        command += ["--clock-scale", str(_SCALE), "--max-num-seqs", str(max(256, streams))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                yield int(process.stdout.readline().rsplit(":", 1)[1]), process.pid
            finally:
                process.terminate()


def soak(requests: int, batch: int = 500) -> tuple[float, float, int]:
    """Megabytes after a tenth of ``requests`` and after all of them, and the number that failed."""
    with _server(0.001, batch) as (port, pid):
        errors = done = 0
        early = memory = 0.0
        while done < requests:
            errors += asyncio.run(_load(port, batch, 2))
            done += batch
            _, memory = _process(pid)
            if done <= max(batch, requests // 10):
                early = memory
    return early, memory, errors


def measure(streams: int, rate: float, seconds: float) -> Result:
    """Offer ``rate`` chunks/s over ``streams`` streams for about ``seconds`` of wall time."""
    step = streams / rate * _SCALE
    tokens = max(2, round(rate * seconds / streams))
    with _server(step, streams) as (port, pid):
        before, _ = _process(pid)
        start = time.monotonic()
        errors = asyncio.run(_load(port, streams, tokens))
        took = time.monotonic() - start
        after, memory = _process(pid)
        page = asyncio.run(_get(port, "/metrics"))
    chunks = streams * tokens
    return Result(
        streams=streams,
        chunks=chunks,
        seconds=round(took, 2),
        chunks_per_s=round(chunks / took),
        asked_chunks_per_s=rate,
        cpu_s=round(after - before, 2),
        cpu_us_per_chunk=round((after - before) / chunks * 1e6, 1),
        late_p50_ms=late_quantile(page, 0.5) * 1e3,
        late_p99_ms=late_quantile(page, 0.99) * 1e3,
        memory_mb=round(memory, 1),
        errors=errors,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line per measurement; 1 when streams failed."""
    parser = argparse.ArgumentParser(prog="python -m servers.sim.bench", description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[256, 1000])
    parser.add_argument("--rate", type=float, default=30_000, help="chunks per second offered")
    parser.add_argument("--seconds", type=float, default=8, help="wall time of one measurement")
    parser.add_argument("--soak", type=int, default=0, help="then this many short requests, for their memory")
    arguments = parser.parse_args(argv)
    failed = 0
    for streams in arguments.streams:
        result = measure(streams, arguments.rate, arguments.seconds)
        failed += result.errors
        print(
            f"{result.streams} streams: {result.chunks_per_s:,.0f} chunks/s "
            f"(asked {result.asked_chunks_per_s:,.0f}), "
            f"{result.cpu_us_per_chunk} us CPU per chunk, late p50 <= {result.late_p50_ms:g} ms, "
            f"p99 <= {result.late_p99_ms:g} ms, {result.memory_mb} MB, {result.errors} errors",
            flush=True,
        )
    if arguments.soak:
        early, late, errors = soak(arguments.soak)
        failed += errors
        print(
            f"{arguments.soak} requests: {early:.1f} MB after a tenth, {late:.1f} MB at the end, "
            f"{errors} errors"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
