"""The swap control as a user runs it: two arms alike, one of the two devices at half the speed."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from locustfiles.records import Manifest, read_json
from reports.devices import device_ratios
from reports.read import read_run

ROOT = Path(__file__).parents[1]
PLAN = """
repeats = 2
users = [2]
sessions = 2
[[workloads]]
workload = "single_turn"
points = ["prompt=512,output=64"]
"""
LAUNCH = """
exec "$FACEOFF_PYTHON" -m servers.sim --host "$HOST" --port "$PORT" --served-model-name tiny \\
    --calibration "$FOLDER/$DEVICE.toml" --clock-scale 10
"""


def launched(script, *arguments):
    """Run one of servers/*.sh to its end."""
    command = ["bash", f"servers/{script}", *arguments]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("FACEOFF_")}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False
    )


def slower(calibration):
    """The same machine with decoding steps of twice the length."""
    decode = calibration[calibration.index("[decode]") : calibration.index("[draft]")]
    doubled = re.sub(r"= ([0-9.e-]+)", lambda number: f"= {2 * float(number[1]):g}", decode)
    assert doubled != decode
    return calibration.replace(decode, doubled)


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """Arms a and b, alike, on devices quick and slow."""
    folder = tmp_path_factory.mktemp("swap") / "mine"
    folder.mkdir()
    shipped = (ROOT / "servers/calibrations/h100-qwen3.8-27b.toml").read_text()
    (folder / "quick.toml").write_text(shipped)
    (folder / "slow.toml").write_text(slower(shipped))
    (folder / "launch.sh").write_text(LAUNCH)
    for arm, port, device in (("a", 8711, "quick"), ("b", 8712, "slow")):
        (folder / f"{arm}.env").write_text(
            f"PORT={port}\nDEVICE={device}\nEXCLUSIVE_DEVICE=yes\nFOLDER={folder}\n"
        )
    yield folder
    launched("down.sh", str(folder))


def test_arms_that_are_alike_come_out_so_though_one_device_is_slow(profile, tmp_path):
    plan, out = tmp_path / "plan.toml", tmp_path / "run"
    plan.write_text(PLAN)
    sweep = [".venv/bin/python", "-m", "locustfiles.sweep", "--plan", str(plan), "--out", str(out), "--swap"]
    swept = launched("with_arms.sh", str(profile), "a b", "--", *sweep)
    assert swept.returncode == 0, swept.stderr
    assert "swapping devices: a on slow, b on quick" in swept.stderr
    cells = read_json(out / "manifest.json", Manifest).cells
    assert {(cell.repeat, cell.arm, cell.device) for cell in cells} == {
        (1, "a", "quick"),
        (1, "b", "slow"),
        (2, "a", "slow"),
        (2, "b", "quick"),
    }
    # Devices in order of their names: quick is the first.
    (ratios,) = device_ratios(read_run(out)).values()
    assert ratios["slow"] == pytest.approx(2.0, rel=0.1)

    judged = subprocess.run(
        [".venv/bin/python", "-m", "reports", "build", str(out)], cwd=ROOT, capture_output=True, text=True
    )
    assert judged.returncode == 0, judged.stderr
    verdict = json.loads((out / "verdict.json").read_text())
    (cell,) = [cell for cell in verdict["cells"] if cell["primary"]]
    assert cell["against_base"]["b"]["ratio"] == pytest.approx(1.0, rel=0.05)
    (line,) = [line for line in verdict["certificate"] if line["check"] == "same device"]
    assert line["ok"] is True
    assert line["value"].startswith("each arm on each device; slow ÷ quick: ")
    assert launched("status.sh", str(profile)).stdout.count(" down") == 2


def test_arms_that_were_up_before_are_not_moved(profile, tmp_path):
    up = launched("up.sh", str(profile), "a", "b")
    assert up.returncode == 0, up.stderr
    sweep = [".venv/bin/python", "-m", "locustfiles.sweep", "--out", str(tmp_path / "run"), "--swap"]
    swept = launched("with_arms.sh", str(profile), "a b", "--", *sweep)
    assert swept.returncode == 2
    assert "arm a was up before" in swept.stderr
    assert launched("status.sh", str(profile)).stdout.count(" up") == 2
