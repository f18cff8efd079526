"""A real LiteLLM proxy in a sweep, without and with session affinity, over two simulated servers."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections import defaultdict
from pathlib import Path

import pytest

from locustfiles.records import Attempt, Manifest, read_csv, read_json
from reports.proxies import serving
from reports.read import read_run
from tests.real.conftest import ROOT, launcher

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PLAN = """
about = "a proxy, small"
repeats = 1
sessions = 3
seed = 11

[[workloads]]
workload = "single_turn"
points = ["prompt=256,output=32"]
users = [1]

[[workloads]]
workload = "multi_turn"
points = ["context=4096,growth=256,output=16"]
users = [4]
"""


RESTART_PLAN = """
about = "long enough to be interrupted, twice"
repeats = 2
sessions = 12
users = [1]

[[workloads]]
workload = "single_turn"
points = ["prompt=256,output=64"]
"""


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sim profile on ports of its own."""
    folder = tmp_path_factory.mktemp("profile") / "mysim"
    folder.mkdir()
    for path in (ROOT / "servers/profiles/sim").iterdir():
        text = path.read_text()
        if path.suffix == ".env":
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                text = re.sub(r"(?m)^PORT=.*$", f"PORT={probe.getsockname()[1]}", text)
        (folder / path.name).write_text(text)
    return folder


def sweep_command(profile: Path, plan: str, out: Path) -> list[str]:
    """In real time these runs would take minutes; what the proxy costs is not looked at here."""
    out.with_name("tiny.toml").write_text(plan)
    sweep = [".venv/bin/python", "-m", "locustfiles.sweep", "--plan", str(out.with_name("tiny.toml"))]
    return [str(profile), "cache mtp", "--", *sweep, "--out", str(out), "--clock-scale", "5"]


@pytest.fixture(scope="module")
def run(profile: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cache and mtp, and both proxies over them; judged."""
    out = tmp_path_factory.mktemp("proxy") / "run"
    done = launcher("proxy.sh", *sweep_command(profile, PLAN, out), FACEOFF_PROXIES="proxy affinity")
    assert done.returncode == 0, done.stderr
    judged = subprocess.run(
        [".venv/bin/python", "-m", "reports", "build", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert judged.returncode == 0, judged.stderr
    assert "proxy: served by cache" in judged.stdout
    return out


def attempts(run: Path, arm: str, workload: str) -> list[Attempt]:
    manifest = read_json(run / "manifest.json", Manifest)
    return [
        row
        for cell in manifest.cells
        if (cell.arm, cell.workload) == (arm, workload)
        for row in read_csv(run / "cells" / cell.id / "requests.csv", Attempt)
        if row.status != "censored"
    ]


def servers_of_sessions(rows: list[Attempt]) -> dict[tuple[int, int], set[str | None]]:
    """(user, session) → who served its turns."""
    found: dict[tuple[int, int], set[str | None]] = defaultdict(set)
    for row in rows:
        found[row.user, row.session].add(row.server_id)
    return found


def test_every_row_of_a_proxy_says_who_served_it(run: Path) -> None:
    for arm in ("proxy", "affinity"):
        rows = attempts(run, arm, "multi_turn")
        assert {row.status for row in rows} == {"ok"}
        assert {row.server_id for row in rows} == {"cache", "mtp"}
    for arm in ("cache", "mtp"):
        assert {row.server_id for row in attempts(run, arm, "multi_turn")} == {None}


def test_prompts_are_as_long_as_asked_though_a_proxy_cannot_count(run: Path) -> None:
    manifest = read_json(run / "manifest.json", Manifest)
    assert [arm.probe.tokenize for arm in manifest.arms] == [True, True, False, False]
    for arm in ("proxy", "affinity"):
        rows = attempts(run, arm, "single_turn") + attempts(run, arm, "multi_turn")
        assert all(row.prompt_tokens == row.prompt_tokens_asked for row in rows if row.turn == 1)
        assert all(row.output_tokens == row.output_tokens_asked for row in rows)


def test_affinity_keeps_a_conversation_on_one_server_and_chance_does_not(run: Path) -> None:
    kept = servers_of_sessions(attempts(run, "affinity", "multi_turn"))
    assert all(len(servers) == 1 for servers in kept.values())
    spread = servers_of_sessions(attempts(run, "proxy", "multi_turn"))
    assert any(len(servers) == 2 for servers in spread.values())  # all on one side: once in 4 ** 12


def test_follow_ups_hit_where_the_conversation_has_been(run: Path) -> None:
    block = next(arm.probe.block_size for arm in read_json(run / "manifest.json", Manifest).arms)
    assert block is not None
    for arm in ("proxy", "affinity"):
        rows = {(row.user, row.session, row.turn): row for row in attempts(run, arm, "multi_turn")}
        for (user, session, turn), row in rows.items():
            # What the cache arm has seen of this conversation, if anything.
            seen = [
                earlier.prompt_tokens or 0
                for number in range(1, turn)
                if (earlier := rows[user, session, number]).server_id == "cache"
            ]
            if row.server_id == "mtp" or not seen:
                assert not row.cached_tokens
            else:
                assert max(seen) - 2 * block <= (row.cached_tokens or 0) <= (row.prompt_tokens or 0)


def test_the_report_tells_who_served_and_holds_nothing_against_a_proxy(run: Path) -> None:
    lines = serving(read_run(run))
    assert {(line.proxy, line.server) for line in lines if line.level[0] == "multi_turn"} == {
        (proxy, server) for proxy in ("proxy", "affinity") for server in ("cache", "mtp")
    }
    assert any(line.ttft and line.tpot for line in lines)
    assert all(line.hit_rate == 0 for line in lines if line.server == "mtp" and line.level[0] == "multi_turn")
    verdict = json.loads((run / "verdict.json").read_text())
    of_proxies = {
        (line["check"], line["arm"]): line["ok"]
        for line in verdict["certificate"]
        if line["arm"] in ("proxy", "affinity")
    }
    for proxy in ("proxy", "affinity"):
        assert of_proxies["declared features on, and only those", proxy] is None
        assert of_proxies["follow-ups hit", proxy] is None
        assert of_proxies["arms alike", proxy] is True
        assert of_proxies["cold prompts cold", proxy] is True
        assert of_proxies["prompt lengths as asked", proxy] is True
    assert "Behind the proxy" in (run / "report.html").read_text()


def kill_during(process: subprocess.Popen[str], out: Path, cell: str, pid_file: Path) -> None:
    """Kill a server as soon as a cell has its first rows."""
    deadline = time.monotonic() + 150
    while not [path for path in out.glob(f"cells/*.{cell}/requests.csv") if path.stat().st_size > 900]:
        assert time.monotonic() < deadline, f"no rows in {cell}"
        assert process.poll() is None
        time.sleep(0.02)
    os.kill(int(pid_file.read_text().split()[0]), signal.SIGKILL)


def test_a_proxy_and_a_server_behind_it_are_started_anew_each_by_its_own_launcher(
    profile: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    command = ["bash", "servers/proxy.sh", *sweep_command(profile, RESTART_PLAN, out)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        kill_during(process, out, "r1.proxy", ROOT / "results/servers/proxy/proxy.pid")
        state = max((ROOT / "results/servers").glob("mysim-*/mtp.pid"), key=lambda path: path.stat().st_mtime)
        kill_during(process, out, "r2.proxy", state)
        _, stderr = process.communicate(timeout=200)
    assert process.returncode == 1, stderr
    assert "starting arm proxy anew" in stderr
    assert "starting arm mtp anew" in stderr
    manifest = read_json(out / "manifest.json", Manifest)
    assert len([note for note in manifest.notes if note.endswith("it was started anew")]) == 2
    for cell in manifest.cells:
        rows = [
            row
            for row in read_csv(out / "cells" / cell.id / "requests.csv", Attempt)
            if row.phase == "measure"
        ]
        bad = [row for row in rows if row.status != "ok"]
        assert len(rows) == 12
        if cell.arm != "proxy":
            assert not bad, cell.id
        elif cell.repeat == 2:  # the proxy that was started anew served some of these
            assert 0 < len(bad) < 12
            assert "cache" in {row.server_id for row in rows}
