"""Arms on devices of their own, loaded at the same time: who runs beside whom, and when that is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from locustfiles import sweep
from locustfiles.arms import ArmError, parse_arms
from locustfiles.devices import check_parallel
from locustfiles.host import host_facts
from locustfiles.records import CellRecord, Done, Manifest, read_json
from locustfiles.run import Run
from tests.locustfiles.sweep_standin import StandIn, fake_command, fake_tables, serving

PLAN = """
repeats = 2
users = [2]
sessions = 1
[[workloads]]
workload = "single_turn"
points = ["prompt=64,output=8", "prompt=96,output=8"]
"""
PROOF = {"safe_streams": 4, "safe_events_per_s": 1000.0}
#: Say that this cell is here; go on when the block's other cell is here too.
MEET = 'touch "$0/$1"; until [ -e "$0/$2" ]; do sleep 0.02; done; shift 2; exec "$@"'


def meeting(run: Run, cell: CellRecord) -> list[str]:
    """A cell that does not go on before the other arm's cell of its block has started."""
    other = cell.id.removesuffix(cell.arm) + {"cache": "mtp", "mtp": "cache"}[cell.arm]
    return ["sh", "-c", MEET, str(run.folder), cell.id, other, *fake_command("ok")(run, cell)]


@pytest.fixture
def place(place: Path) -> Path:
    """With a self-test that carried 4 streams."""
    (place / "results").mkdir()
    proof = PROOF | {"host": {"id": host_facts()["id"]}}
    (place / "results/selftest.json").write_text(json.dumps(proof), encoding="utf-8")
    return place


def run(*argv: str, devices: tuple[str, str] = ("gpu0", "gpu1"), command=meeting) -> int:
    with serving(StandIn()) as one, serving(StandIn(drafts=3)) as two:
        arms = f"cache={one.url};device={devices[0]} mtp={two.url};device={devices[1]}"
        given = ["--plan", "plan.toml", "--arms", arms, "--out", "run", *argv]
        return sweep.main(given, command=command, measure=fake_tables)


def test_the_cells_of_a_block_run_side_by_side(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each cell waits for the other one: one after the other this would not end."""
    assert run("--parallel-arms") == 0
    manifest = read_json(Path("run/manifest.json"), Manifest)
    assert manifest.parallel_arms
    assert len(manifest.cells) == 8
    for cell in manifest.cells:
        assert read_json(Path("run/cells", cell.id, "done.json"), Done).complete
    assert "8 of 8 cells finished" in capsys.readouterr().err


def test_without_the_option_one_runs_after_the_other(place: Path) -> None:
    assert run(command=fake_command("ok")) == 0
    assert not read_json(Path("run/manifest.json"), Manifest).parallel_arms


def test_one_that_fails_does_not_touch_its_neighbour(place: Path) -> None:
    def half(run: Run, cell: CellRecord) -> list[str]:
        return fake_command("crash" if cell.arm == "mtp" else "ok")(run, cell)

    assert run("--parallel-arms", command=half) == 1
    cells = read_json(Path("run/manifest.json"), Manifest).cells
    done = {cell.arm for cell in cells if Path("run/cells", cell.id, "done.json").exists()}
    assert done == {"cache"}


def test_a_shared_device_is_refused_before_anything_is_loaded(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--parallel-arms", devices=("gpu0", "gpu0")) == 2
    assert "each on a device of its own; these are on gpu0 (cache), gpu0 (mtp)" in capsys.readouterr().err


def test_more_streams_than_the_self_test_carried_are_refused(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--parallel-arms", "--users", "3") == 2
    assert (
        "2 arms of 3 users are 6 streams, the self-test of this machine carried 4" in capsys.readouterr().err
    )


def test_without_a_self_test_it_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("results/selftest.json").unlink()
    assert run("--parallel-arms") == 2
    assert "make selftest first" in capsys.readouterr().err


def test_one_server_is_not_two_arms() -> None:
    with pytest.raises(ArmError, match="more than one arm is at http://h:1"):
        check_parallel(parse_arms("a=http://h:1;device=x b=http://h:1/v1;device=y"))


def test_a_proxy_loads_the_others() -> None:
    arms = parse_arms("a=http://h:1;device=x p=http://h:2;device=y;metrics=http://h:1")
    with pytest.raises(ArmError, match="arm p is a proxy"):
        check_parallel(arms)


def test_what_needs_no_server_is_checked_without_one(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """make asks before it starts servers."""
    assert sweep.main(["--plan", "plan.toml", "--parallel-arms", "--check"]) == 0
    assert sweep.main(["--plan", "plan.toml", "--parallel-arms", "--users", "3", "--check"]) == 2
    assert "2 arms of 3 users are 6 streams" in capsys.readouterr().err


def test_a_dry_run_counts_the_longest_of_a_block(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def total() -> float:
        text = capsys.readouterr().out.splitlines()[-1]
        minutes, seconds = re.search(r"about (?:(\d+) min )?(\d+) s", text).groups()
        return 60 * int(minutes or 0) + int(seconds)

    assert run("--dry-run") == 0
    alone = total()
    assert run("--dry-run", "--parallel-arms") == 0
    assert 0.4 * alone < total() < 0.75 * alone
