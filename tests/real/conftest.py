"""The cpu profile's four arms, brought up once for every test here by the launchers themselves."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

ROOT = Path(__file__).resolve().parents[2]
ARMS = ("plain", "cache", "mtp", "both")


def launcher(script: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs one of servers/*.sh to its end; `env` is added to the environment."""
    return subprocess.run(
        ["env", *(f"{key}={value}" for key, value in env.items()), "bash", f"servers/{script}", *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=590,
    )


def states(profile: str = "cpu") -> dict[str, str]:
    """Arm → up, starting, down or dead, as status.sh says."""
    lines = launcher("status.sh", profile).stdout.splitlines()
    return {line.split()[0]: line.split()[2] for line in lines}


@dataclass(frozen=True)
class Answer:
    """What one streamed chat request brought: text, usage, and when (seconds)."""

    text: str
    chunks: int
    finish_reason: str | None
    usage: dict[str, Any]
    first_s: float
    last_s: float

    @property
    def cached(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def decode_rate(self) -> float:
        return float(self.usage["completion_tokens"] - 1) / (self.last_s - self.first_s)


class Arm:
    """A running server of the cpu profile."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url

    def chat(self, messages: list[dict[str, str]], tokens: int, salt: str) -> Answer:
        """One greedy streamed request of exactly `tokens` output tokens."""
        body = {
            "model": "tiny-mimo",
            "messages": messages,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": salt,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        text, chunks, reason, usage = "", 0, None, {}
        first = last = 0.0
        start = time.perf_counter()
        with requests.post(
            f"{self.url}/v1/chat/completions", json=body, stream=True, timeout=120
        ) as response:
            assert response.status_code == 200, response.text
            for line in response.iter_lines():
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                assert "error" not in event, event
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    reason = choice["finish_reason"] or reason
                    if choice["delta"].get("content"):
                        last = time.perf_counter() - start
                        first = first or last
                        chunks += 1
                        text += choice["delta"]["content"]
        return Answer(text, chunks, reason, usage, first, last)

    def count(self, **what: Any) -> int:
        """Tokens of `messages=` or of `prompt=`, as the server counts them."""
        body = {"model": "tiny-mimo", "add_special_tokens": False, **what}
        return int(requests.post(f"{self.url}/tokenize", json=body, timeout=30).json()["count"])

    def metric(self, name: str) -> float | None:
        """The sum of a metric's samples, None when the server has no such metric."""
        lines = requests.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        values = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{")]
        return sum(values) if values else None


@pytest.fixture(scope="session")
def arms() -> Iterator[dict[str, Arm]]:
    """All four arms, up; those that were not up before are stopped at the end."""
    before = states()
    ours = [name for name in ARMS if before[name] != "up"]
    up = launcher("up.sh", "cpu", *ARMS)
    assert up.returncode == 0, up.stderr
    found = {}
    for line in up.stdout.splitlines():
        name, url, state = line.split()
        assert state == "up"
        found[name] = Arm(name, url)
    yield found
    if ours:
        launcher("down.sh", "cpu", *ours)


@pytest.fixture(scope="session")
def design() -> dict[str, Any]:
    """What the checkpoint was built to do."""
    result: dict[str, Any] = json.loads((ROOT / "results/models/tiny-mimo/design.json").read_text())
    return result
