"""The swap control in a sweep: who is where in which repeat, and when arms are started anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from locustfiles import sweep
from locustfiles.arms import ArmError, parse_arms
from locustfiles.devices import placements, whole_parts
from locustfiles.records import Manifest, read_json
from tests.locustfiles.sweep_standin import StandIn, fake_command, fake_tables, serving

PLAN = """
repeats = 3
users = [1]
sessions = 1
[[workloads]]
workload = "single_turn"
points = ["prompt=64,output=8", "prompt=96,output=8"]
"""
MOVE = "sh -c 'echo $0 $1 $FACEOFF_DEVICE_CACHE $FACEOFF_DEVICE_MTP >> moves'"


@pytest.fixture
def place(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With what a launcher that started both arms leaves in the environment."""
    monkeypatch.setenv("FACEOFF_RESTART", MOVE)
    monkeypatch.setenv("FACEOFF_STARTED", "cache mtp")
    return place


def run(*argv: str, devices: tuple[str, str] = ("gpu0", "gpu1")) -> int:
    with serving(StandIn()) as one, serving(StandIn(drafts=3)) as two:
        arms = f"cache={one.url};device={devices[0]} mtp={two.url};device={devices[1]}"
        given = ["--plan", "plan.toml", "--arms", arms, "--out", "run", *argv]
        return sweep.main(given, command=fake_command("ok"), measure=fake_tables)


def test_each_arm_is_on_each_device_in_half_of_the_repeats(place: Path) -> None:
    assert run("--swap") == 0
    cells = read_json(Path("run/manifest.json"), Manifest).cells
    where = {(cell.repeat, cell.arm): cell.device for cell in cells}
    # Three repeats do not go into two halves: four.
    assert [where[repeat, "cache"] for repeat in (1, 2, 3, 4)] == ["gpu0", "gpu0", "gpu1", "gpu1"]
    assert [where[repeat, "mtp"] for repeat in (1, 2, 3, 4)] == ["gpu1", "gpu1", "gpu0", "gpu0"]
    # Both are started anew at once, once.
    assert Path("moves").read_text().split("\n") == ["cache mtp gpu1 gpu0", ""]


def test_without_a_swap_nothing_moves_and_devices_are_on_record(place: Path) -> None:
    assert run() == 0
    cells = read_json(Path("run/manifest.json"), Manifest).cells
    assert {(cell.arm, cell.device) for cell in cells} == {("cache", "gpu0"), ("mtp", "gpu1")}
    assert max(cell.repeat for cell in cells) == 3
    assert not Path("moves").exists()


def test_a_swap_that_fails_skips_what_was_to_come(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FACEOFF_RESTART", "false")
    assert run("--swap") == 1
    notes = read_json(Path("run/manifest.json"), Manifest).notes
    skipped = [note for note in notes if " skipped: could not be started again for the swap" in note]
    assert len(skipped) == 8  # two points, two repeats, two arms
    assert "swapping devices: cache on gpu1, mtp on gpu0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("FACEOFF_RESTART", "", "it needs a profile's arms, not URLs"),
        ("FACEOFF_STARTED", "cache", "arm mtp was up before"),
    ],
)
def test_arms_that_are_not_this_runs_to_move_are_left_alone(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    value: str,
    says: str,
) -> None:
    monkeypatch.setenv(name, value)
    assert run("--swap") == 2
    assert says in capsys.readouterr().err
    assert not Path("run").exists()


def test_one_device_cannot_be_swapped(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--swap", devices=("cpu0", "cpu0")) == 2
    assert "each on a device of its own; these are on cpu0 (cache), cpu0 (mtp)" in capsys.readouterr().err


def test_an_arm_without_a_device_cannot_be_swapped() -> None:
    with pytest.raises(ArmError, match="arm b has no device"):
        placements(parse_arms("a=http://h:1;device=gpu0 b=http://h:2"))


def test_three_arms_take_three_turns() -> None:
    arms = parse_arms("a=http://h:1;device=x b=http://h:2;device=y c=http://h:3;device=z")
    found = placements(arms)
    assert found == [
        {"a": "x", "b": "y", "c": "z"},
        {"a": "y", "b": "z", "c": "x"},
        {"a": "z", "b": "x", "c": "y"},
    ]
    assert [whole_parts(repeats, 3) for repeats in (1, 3, 4)] == [3, 3, 6]
