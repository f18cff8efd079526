"""The simulator's engine schedules as vLLM's own scheduler does, on random loads."""

import re
import subprocess

import pytest

from tests.real.conftest import ROOT

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def test_the_simulator_computes_and_holds_what_vllm_does_step_by_step():
    found = subprocess.run(
        [ROOT / ".venv-cpu" / "bin" / "python", "-m", "tests.real.scheduler_beside", "0", "150"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    steps, preemptions = re.search(r"(\d+) steps, (\d+) preemptions, 0 differ", found.stdout).groups()
    assert int(steps) > 10_000
    assert int(preemptions) > 100
