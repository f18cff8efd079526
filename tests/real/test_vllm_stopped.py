"""The last of this lane: the arms that every test here shared are stopped, and nothing of them is left."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.real.conftest import ARMS, ROOT, Arm, launcher, states

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def live_pids_with(token_prefix: str) -> list[int]:
    """Processes that carry this in their environment (only the launchers put it there)."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = (folder / "environ").read_bytes()
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if token_prefix.encode() in environ and state not in "ZX":
            found.append(int(folder.name))
    return found


def test_down_leaves_nothing(arms: dict[str, Arm]) -> None:
    tokens = [
        (ROOT / f"results/servers/cpu/{name}.pid").read_text().split()[2]
        for name in ARMS
        if states()[name] == "up"
    ]
    assert len(tokens) == 4
    down = launcher("down.sh", "cpu")
    assert down.returncode == 0
    assert set(states().values()) == {"down"}
    for token in tokens:
        assert live_pids_with(f"FACEOFF_TOKEN={token}") == []
    for arm in arms.values():
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", int(arm.url.rpartition(":")[2]))) != 0
