"""The real 2×2 through the whole suite: launchers, sweep, reports; and an engine that dies in between."""

from __future__ import annotations

import csv
import json
import os
import signal
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from locustfiles.records import Attempt, Done, Manifest, read_csv, read_json
from tests.real.conftest import ARMS, ROOT, Arm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BLOCK = 128  # vLLM's on a CPU
GENERATOR_CHECKS = {"generator healthy", "first tokens stamped alone", "client and server TTFT agree"}
LOST_BLOCKS = 2  # the last, partial one, and the one that speculation gives up

PLAN = """
about = "the real 2x2, small"
repeats = 1
users = [1]
sessions = 2
seed = 5

[[workloads]]
workload = "single_turn"
points = ["prompt=512,output=128"]

[[workloads]]
workload = "multi_turn"
points = ["context=2048,growth=256,output=64"]
"""

ENGINE_PLAN = """
about = "long enough to be interrupted, then one more cell per arm"
repeats = 2
users = [1]
sessions = 3

[[workloads]]
workload = "single_turn"
points = ["prompt=256,output=512"]
"""


def sweep_command(arms: str, plan: Path, out: Path) -> list[str]:
    """The arms are up already, so the launcher leaves them so."""
    sweep = [".venv/bin/python", "-m", "locustfiles.sweep", "--plan", str(plan), "--out", str(out)]
    return ["bash", "servers/with_arms.sh", "cpu", arms, "--", *sweep]


@dataclass
class Judged:
    """A run and what was concluded from it."""

    folder: Path
    manifest: Manifest
    verdict: dict[str, Any]
    summary: list[dict[str, str]]

    def rows(self, arm: str, workload: str) -> list[Attempt]:
        """Measured attempts."""
        return [
            row
            for cell in self.manifest.cells
            if (cell.arm, cell.workload) == (arm, workload)
            for row in read_csv(self.folder / "cells" / cell.id / "requests.csv", Attempt)
            if row.phase == "measure"
        ]

    def mean(self, arm: str, workload: str, metric: str) -> float:
        """A metric of the summary, over all turns."""
        (line,) = [
            line
            for line in self.summary
            if (line["arm"], line["workload"], line["metric"], line["turn"]) == (arm, workload, metric, "")
        ]
        return float(line["mean"])


@pytest.fixture(scope="module")
def judged(arms: dict[str, Arm], tmp_path_factory: pytest.TempPathFactory) -> Judged:
    """One run over all four arms."""
    folder = tmp_path_factory.mktemp("results")
    (folder / "four.toml").write_text(PLAN)
    out = folder / "run"
    swept = subprocess.run(
        sweep_command(" ".join(arms), folder / "four.toml", out),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert swept.returncode == 0, swept.stderr
    report = [".venv/bin/python", "-m", "reports", "build", str(out)]
    done = subprocess.run(report, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    with (out / "summary.csv").open() as file:
        summary = list(csv.DictReader(file))
    verdict = json.loads((out / "verdict.json").read_text())
    return Judged(out, read_json(out / "manifest.json", Manifest), verdict, summary)


def test_every_cell_is_complete_and_every_attempt_worked(judged: Judged) -> None:
    assert len(judged.manifest.cells) == 8
    for cell in judged.manifest.cells:
        assert read_json(judged.folder / "cells" / cell.id / "done.json", Done).complete, cell.id
    for arm in ARMS:
        rows = judged.rows(arm, "single_turn") + judged.rows(arm, "multi_turn")
        assert [row.status for row in rows] == ["ok"] * (2 + 2 * 3)
        assert {row.stamp for row in rows} == {"kernel"}


def test_the_probe_finds_what_each_env_file_declares(judged: Judged) -> None:
    found = {arm.name: (arm.probe.prefix_caching, arm.probe.speculative) for arm in judged.manifest.arms}
    assert found == {
        "plain": (False, False),
        "cache": (True, False),
        "mtp": (False, True),
        "both": (True, True),
    }
    assert not [note for note in judged.manifest.notes if "IS NOT WHAT IT SAYS" in note]
    assert not [note for note in judged.manifest.notes if "differ beyond" in note]
    assert {arm.name: arm.probe.drafts for arm in judged.manifest.arms} == {
        "plain": None,
        "cache": None,
        "mtp": pytest.approx(3, abs=0.2),
        "both": pytest.approx(3, abs=0.2),
    }
    for arm in judged.manifest.arms:
        assert arm.probe.server_args["max_num_seqs"] == "32"
        assert (arm.probe.root or "").endswith("tiny-mimo")


def test_acceptance_is_the_checkpoints_design(judged: Judged, design: dict[str, Any]) -> None:
    for arm in ("mtp", "both"):
        length = judged.mean(arm, "single_turn", "acceptance_length")
        assert length == pytest.approx(design["acceptance"]["3"]["mean_length"], rel=0.1)
    assert not [
        line
        for line in judged.summary
        if line["metric"] == "acceptance_length" and line["arm"] in ("plain", "cache")
    ]


def test_prompts_are_as_long_as_asked(judged: Judged) -> None:
    """To the token where nothing was answered yet; an answer may come back as one token more."""
    for arm in ARMS:
        assert [row.prompt_tokens for row in judged.rows(arm, "single_turn")] == [512, 512]
        for row in judged.rows(arm, "multi_turn"):
            assert row.prompt_tokens_asked == 2048 + 256 * (row.turn - 1)
            assert 0 <= (row.prompt_tokens or 0) - row.prompt_tokens_asked < row.turn
        for row in judged.rows(arm, "single_turn") + judged.rows(arm, "multi_turn"):
            assert row.output_tokens == row.output_tokens_asked


def test_follow_ups_hit_where_there_is_a_cache_and_nowhere_else(judged: Judged) -> None:
    for arm in ARMS:
        prompts: dict[tuple[int, int], int] = {}
        for row in judged.rows(arm, "multi_turn"):
            assert row.prompt_tokens is not None
            prompts[row.session, row.turn] = row.prompt_tokens
            if row.turn == 1 or arm in ("plain", "mtp"):
                assert not row.cached_tokens, "a prompt that nobody has sent is cold, and so is no cache"
            else:
                before = prompts[row.session, row.turn - 1]
                assert before - LOST_BLOCKS * BLOCK <= (row.cached_tokens or 0) <= row.prompt_tokens


def test_a_cache_answers_follow_ups_sooner(judged: Judged) -> None:
    """Less than a fifth as much to compute; the margin is for what else this machine does."""
    ttft = {
        arm: statistics.median(row.ttft_ms or 0.0 for row in judged.rows(arm, "multi_turn") if row.turn > 1)
        for arm in ("plain", "cache")
    }
    assert 0 < ttft["cache"] < 0.6 * ttft["plain"]


def test_the_verdict_knows_that_this_is_real_and_that_one_repeat_is_none(judged: Judged) -> None:
    assert judged.verdict["simulated"] is False
    assert judged.verdict["arms"] == list(ARMS)
    primary = [cell for cell in judged.verdict["cells"] if cell["primary"]]
    assert len(primary) == 2
    for cell in primary:
        assert cell["winner"] in ("inconclusive", None)
        assert set(cell["values"]) == set(ARMS)
    failed = [line for line in judged.verdict["certificate"] if line["ok"] is False]
    hard = [line for line in failed if "a doubt" not in line["limit"]]
    # vLLM computes on all cores here, and may keep the load generator waiting: that is said instead, then.
    assert {line["check"] for line in hard} <= GENERATOR_CHECKS, hard
    for cell in primary:
        reasons = [reason for reason in cell["reasons"] if not reason.startswith("no verdict: ")]
        assert cell["winner"] is None or "inconclusive: needs 3 repeats" in reasons
    if not hard:
        assert {cell["winner"] for cell in primary} == {"inconclusive"}


def engine_of(arm: str) -> int:
    """The process that computes, behind the arm's front end."""
    leader = (ROOT / f"results/servers/cpu/{arm}.pid").read_text().split()[0]
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        if name.startswith("VLLM::Eng") and rest.split()[2] == leader:
            return int(path.parent.name)
    raise AssertionError(f"no engine of {arm}")


def test_an_engine_that_dies_in_a_cell_costs_that_cell_alone(arms: dict[str, Arm], tmp_path: Path) -> None:
    plan, out = tmp_path / "engine.toml", tmp_path / "run"
    plan.write_text(ENGINE_PLAN)
    process = subprocess.Popen(
        sweep_command("plain mtp", plan, out),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        deadline = time.monotonic() + 200
        while not [path for path in out.glob("cells/*.r1.mtp/requests.csv") if path.stat().st_size > 900]:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        os.kill(engine_of("mtp"), signal.SIGKILL)
        _, stderr = process.communicate(timeout=300)
    assert process.returncode == 1, stderr
    assert "starting arm mtp anew" in stderr
    manifest = read_json(out / "manifest.json", Manifest)
    killed, *others = sorted(manifest.cells, key=lambda cell: (cell.repeat, cell.arm))
    assert (killed.arm, killed.repeat) == ("mtp", 1)
    notes = "\n".join(manifest.notes)
    assert f"cell {killed.id} failed: arm mtp is gone" in notes
    assert "it was started anew" in notes
    for cell in others:
        assert read_json(out / "cells" / cell.id / "done.json", Done).complete, cell.id
        rows = list(read_csv(out / "cells" / cell.id / "requests.csv", Attempt))
        assert all(row.status == "ok" for row in rows if row.phase == "measure")
