from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from locustfiles import sweep
from locustfiles.records import Done, Manifest, read_json
from locustfiles.run import locust_command
from tests.locustfiles.sweep_standin import StandIn, fake_command, fake_tables, serving

PLAN = """
repeats = 2
users = [2]
sessions = 1
[[workloads]]
workload = "single_turn"
points = ["prompt=64,output=8"]
[[workloads]]
workload = "multi_turn"
points = ["context=64,growth=32,output=8"]
"""


def run(*argv: str, mode: str = "ok") -> int:
    return sweep.main(["--plan", "plan.toml", *argv], command=fake_command(mode), measure=fake_tables)


def specs(one: StandIn, two: StandIn) -> str:
    return f"cache={one.url};caching=on;drafts=0 mtp={two.url};caching=off;drafts=3"


def test_a_whole_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(StandIn()) as one, serving(StandIn(caching=False, drafts=3)) as two:
        assert run("--arms", specs(one, two), "--seed", "7", "--profile", "mine") == 0
    out, err = capsys.readouterr()
    folder = Path(out.strip())
    assert folder.is_dir()
    assert folder.parent == Path("results")
    assert (place / "results" / "latest").resolve() == (place / folder).resolve()
    manifest = read_json(folder / "manifest.json", Manifest)
    assert manifest.run == folder.name
    assert folder.name.endswith("-plan")
    assert (manifest.base, manifest.seed, manifest.profile, manifest.simulated) == ("cache", 7, "mine", False)
    assert [arm.probe.prefix_caching for arm in manifest.arms] == [True, False]
    assert manifest.notes == []
    assert manifest.sampling["temperature"] == 0
    assert len(manifest.cells) == 8
    # AB, BA from block to block, and from repeat to repeat.
    assert " ".join(cell.arm for cell in manifest.cells) == "cache mtp mtp cache mtp cache cache mtp"
    assert all((folder / "cells" / cell.id / "done.json").exists() for cell in manifest.cells)
    assert manifest.plan_toml["workloads"][0]["points"] == ["prompt=64,output=8"]
    assert manifest.host["cores"] == os.cpu_count()
    assert "locust" in manifest.versions
    assert "[1/8] single_turn prompt=64,output=8 u2 r1 cache … " in err
    assert "ok 2/2" in err
    assert "ok 6/6" in err
    assert " left" in err
    assert "8 of 8 cells finished" in err


def test_latest_is_the_newest_run_in_results_however_it_was_named(place: Path) -> None:
    latest = place / "results" / "latest"
    with serving(StandIn()) as one, serving(StandIn()) as two:
        for out, newest in (("results/one", "one"), ("results/two", "two"), ("elsewhere", "two")):
            assert run("--arms", specs(one, two), "--out", out, "--repeats", "1") == 0
            assert latest.readlink() == Path(newest)


def test_starts_are_the_same_for_every_arm_and_spread_only_where_users_go_on_by_themselves(
    place: Path,
) -> None:
    plan = PLAN.replace(
        'growth=32,output=8"', 'growth=32,output=8", "context=64,growth=32,output=8,pace=lockstep"'
    )
    (place / "plan.toml").write_text(plan, encoding="utf-8")
    with serving(StandIn(prefill_s=0.2)) as one, serving(StandIn()) as two:
        assert run("--arms", specs(one, two), "--out", "here") == 0
        assert run("--arms", specs(one, two), "--out", "alone", "--users", "1") == 0
    cells = read_json(Path("here/manifest.json"), Manifest).cells
    for block in {cell.block for cell in cells}:
        spreads = {cell.start_spread_s for cell in cells if cell.block == block}
        assert len(spreads) == 1
        lockstep = any("lockstep" in cell.point for cell in cells if cell.block == block)
        assert (spreads == {0.0}) == lockstep
    assert {cell.start_spread_s for cell in read_json(Path("alone/manifest.json"), Manifest).cells} == {0.0}


def test_the_cells_command_line(place: Path) -> None:
    """The real command, recorded but with a stand-in run in its place."""
    commands: list[list[str]] = []

    def command(run: Any, cell: Any) -> list[str]:
        commands.append(locust_command(run, cell))
        result: list[str] = fake_command("ok")(run, cell)
        return result

    os.environ["FACEOFF_API_KEY"] = "s3cret"
    try:
        with (
            serving(StandIn(key="s3cret", refused=frozenset({"ignore_eos"}))) as one,
            serving(StandIn()) as two,
        ):
            argv = ["--plan", "plan.toml", "--arms", specs(one, two), "--out", "run", "--seed", "3"]
            assert sweep.main(argv, command=command, measure=fake_tables) == 0
    finally:
        del os.environ["FACEOFF_API_KEY"]
    text = (place / "run" / "manifest.json").read_text(encoding="utf-8")
    assert "s3cret" not in text + json.dumps(commands)
    first = commands[0]
    pairs = dict(itertools.pairwise(first))
    assert pairs["-u"] == pairs["-r"] == "2"
    assert pairs["--host"] == one.url
    assert pairs["--arm"] == "cache"
    assert pairs["--point"] == "prompt=64,output=8"
    assert pairs["--sessions"] == "1"
    assert pairs["--seed"] == "3"
    assert "--model=m" in first
    assert pairs["--drop-fields"] == "ignore_eos"
    assert pairs["--exit-code-on-error"] == "0"
    assert pairs["--metrics-url"] == one.url + "/metrics"
    assert pairs["--cell-dir"] == "run/cells/single_turn.prompt=64,output=8.u2.r1.cache"
    assert pairs["--csv"] == pairs["--cell-dir"] + "/locust"
    assert "--nonce" not in first
    salts = [dict(itertools.pairwise(command))["--cache-salt"] for command in commands]
    assert len(set(salts)) == len(commands) == 8


def test_a_salt_that_one_arm_ignores_is_replaced_by_a_nonce_on_all(place: Path) -> None:
    commands: list[list[str]] = []

    def command(run: Any, cell: Any) -> list[str]:
        commands.append(locust_command(run, cell))
        result: list[str] = fake_command("ok")(run, cell)
        return result

    with serving(StandIn(salted=False)) as one, serving(StandIn()) as two:
        argv = ["--plan", "plan.toml", "--arms", specs(one, two), "--out", "run"]
        assert sweep.main(argv, command=command, measure=fake_tables) == 0
    assert all("--nonce" in command and "cache_salt" in command for command in commands)


def test_an_arm_that_is_not_what_it_says_is_told_loudly(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(StandIn()) as one, serving(StandIn(caching=True, drafts=3)) as two:
        assert run("--arms", specs(one, two), "--out", "run") == 0
    assert (
        "NOTE ARM mtp IS NOT WHAT IT SAYS: declared prefix caching off, observed on"
        in capsys.readouterr().err
    )
    notes = read_json(Path("run/manifest.json"), Manifest).notes
    assert any("ARM mtp IS NOT WHAT IT SAYS" in note for note in notes)


def test_simulated_arms_get_one_clock_scale_per_block(place: Path) -> None:
    version = {"version": "0.32.0+sim", "simulated": True, "clock_scale": 10.0}
    with serving(StandIn(version=version)) as one, serving(StandIn(version=version, busy=2)) as two:
        assert run("--arms", specs(one, two), "--out", "run") == 0
        assert len(one.scales) == len(two.scales) == 4
        assert run("--arms", specs(one, two), "--out", "run2", "--clock-scale", "2.5") == 0
        assert set(one.scales[4:]) == {2.5}
    manifest = read_json(Path("run/manifest.json"), Manifest)
    assert manifest.simulated
    for block in {cell.block for cell in manifest.cells}:
        assert len({cell.clock_scale for cell in manifest.cells if cell.block == block}) == 1
    assert all(1 <= cell.clock_scale <= 20 for cell in manifest.cells)


@pytest.mark.parametrize(
    ("mode", "code", "says"),
    [
        ("failing", 1, "in 8 of 8 cells no attempt succeeded, first error: stream_error boom"),
        ("incomplete", 1, "8 of 8 cells did not finish: a conversation broke off"),
        ("crash", 1, "8 of 8 cells did not finish: exit code 3; RuntimeError: the cell fell over"),
        ("multi_turn:crash", 1, "4 of 8 cells did not finish: exit code 3"),
    ],
)
def test_cells_that_go_wrong(
    place: Path, capsys: pytest.CaptureFixture[str], mode: str, code: int, says: str
) -> None:
    with serving(StandIn()) as one, serving(StandIn(caching=False, drafts=3)) as two:
        assert run("--arms", specs(one, two), "--out", "run", mode=mode) == code
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith(f"faceoff: {says}")


def test_a_dead_arm_is_skipped_and_the_other_goes_on(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("locustfiles.run.time.sleep", lambda _: None)
    log = place / "mtp.log"
    log.write_text("INFO fine\nValueError: out of blocks\nINFO bye\n", encoding="utf-8")
    with serving(StandIn()) as one, serving(StandIn(caching=False, drafts=3)) as two:

        def command(run: Any, cell: Any) -> list[str]:
            two.health = 503  # dies after the probe, before the first cell
            result: list[str] = fake_command("ok")(run, cell)
            return result

        argv = ["--plan", "plan.toml", "--arms", specs(one, two) + f";log={log}", "--out", "run"]
        assert sweep.main(argv, command=command, measure=fake_tables) == 1
    manifest = read_json(place / "run" / "manifest.json", Manifest)
    for cell in manifest.cells:
        assert (place / "run" / "cells" / cell.id / "done.json").exists() == (cell.arm == "cache")
    assert len([note for note in manifest.notes if "skipped" in note]) == 4
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("faceoff: 4 of 8 cells did not finish: arm mtp is gone: /health answers HTTP 503")
    assert "ValueError: out of blocks" in last


def test_a_cell_in_which_the_arm_died_ends_as_failed_for_its_readers_too(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process went on to the end and wrote a done.json: nothing may be concluded from it all the same."""
    monkeypatch.setattr("locustfiles.run.time.sleep", lambda _: None)
    monkeypatch.setenv("FACEOFF_RESTART", "true")
    with serving(StandIn()) as one, serving(StandIn(caching=False, drafts=3)) as two:
        # Well when probed and before its first cell, gone after it, well again once started anew.
        looks = iter([200, 200, 503, 503, 503])
        monkeypatch.setattr(StandIn, "ill", lambda it: next(looks, 200) if it is two else 200)
        first = {"cache": "ok", "mtp": "failing"}

        def command(run: Any, cell: Any) -> list[str]:
            result: list[str] = fake_command(first.pop(cell.arm, "ok"))(run, cell)
            return result

        argv = ["--plan", "plan.toml", "--arms", specs(one, two), "--out", "run"]
        assert sweep.main(argv, command=command, measure=fake_tables) == 1
    manifest = read_json(Path("run/manifest.json"), Manifest)
    done = {cell.id: read_json(Path("run/cells", cell.id, "done.json"), Done) for cell in manifest.cells}
    (failed,) = [cell for cell in manifest.cells if done[cell.id].failed]
    assert failed.arm == "mtp"
    assert done[failed.id].complete
    assert str(done[failed.id].failed).startswith("arm mtp is gone: /health answers HTTP 503")


def test_a_dead_arm_is_started_anew_once_where_the_launcher_says_how(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("locustfiles.run.time.sleep", lambda _: None)
    started = place / "started"
    monkeypatch.setenv("FACEOFF_RESTART", f"sh -c 'echo $0 >> {started}'")
    with serving(StandIn()) as one, serving(StandIn(caching=False, drafts=3)) as two:
        # The second arm fails every cell; it is well when probed, and again for a while after the restart.
        looks = iter([200, 503, 503, 503, 200, 200] + [503] * 100)
        monkeypatch.setattr(StandIn, "ill", lambda it: next(looks) if it is two else 200)

        def command(run: Any, cell: Any) -> list[str]:
            result: list[str] = fake_command("failing" if cell.arm == "mtp" else "ok")(run, cell)
            return result

        argv = ["--plan", "plan.toml", "--arms", specs(one, two), "--out", "run"]
        assert sweep.main(argv, command=command, measure=fake_tables) == 1
    assert started.read_text(encoding="utf-8") == "mtp\n"
    notes = read_json(Path("run/manifest.json"), Manifest).notes
    assert len([note for note in notes if note.endswith("it was started anew")]) == 1
    assert "starting arm mtp anew" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--users", "0"], "'0' is not a whole number of at least 1"),
        (["--users", "many"], "'many' is not a whole number of at least 1"),
        (["--users", "-3"], "--users"),
        (["--repeats", "1.5"], "'1.5' is not a whole number"),
        (["--seed", "x"], "'x' is not a whole number of at least 0"),
        (["--clock-scale", "99"], "'99' is not a number from 0.1 to 20"),
        (["--plan", "laod"], "unknown plan 'laod'"),
        (["--workloads", "nope"], "unknown workload 'nope'"),
        (["--frobnicate"], "--frobnicate"),
        ([], "no arms: pass --arms"),
        (["--arms", "cache"], "arm cache: no URL"),
        (["--arms", "cache=http://127.0.0.1:9"], "arm cache: cannot reach"),
        (["--arms", "cache=http://u:p@127.0.0.1:9"], "holds credentials"),
    ],
)
def test_mistakes_end_in_one_line(
    place: Path, capsys: pytest.CaptureFixture[str], argv: list[str], says: str
) -> None:
    try:
        code: Any = run(*argv)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    err = capsys.readouterr().err.strip().splitlines()
    assert len([line for line in err if line.startswith("faceoff: ")]) == 1
    assert says in err[-1]
    assert "Traceback" not in "".join(err)
    assert not list(place.glob("results/*/manifest.json"))
    assert not list(place.glob("results/2*")), "no empty run folder stays behind"


def test_a_results_folder_that_cannot_be_written(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "results").write_text("a file is in the way", encoding="utf-8")
    with serving(StandIn()) as one, serving(StandIn()) as two:
        assert run("--arms", specs(one, two)) == 2
    assert "faceoff: cannot write results" in capsys.readouterr().err


def test_a_full_disk_ends_in_one_line(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, _: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("locustfiles.prepare.write_json", full)
    with serving(StandIn()) as one, serving(StandIn()) as two:
        assert run("--arms", specs(one, two), "--out", "run") == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("faceoff: cannot write run/manifest.json: No space left on device")
    assert not (place / "run").exists(), "without a manifest it is no run"


def test_no_cell_is_started_on_a_disk_that_is_full(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("locustfiles.run.LEAST_FREE_BYTES", 10**18)
    with serving(StandIn()) as one, serving(StandIn()) as two:
        assert run("--arms", specs(one, two), "--out", "run") == 2
    assert "faceoff: cannot write run: No space left on device" in capsys.readouterr().err
    assert not list(place.glob("run/cells/*"))


def test_a_folder_that_holds_a_run_is_not_overwritten(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "run").mkdir()
    (place / "run" / "manifest.json").write_text("{}", encoding="utf-8")
    with serving(StandIn()) as one, serving(StandIn()) as two:
        assert run("--arms", specs(one, two), "--out", "run") == 2
    assert "holds a run already" in capsys.readouterr().err
    assert (place / "run" / "manifest.json").read_text(encoding="utf-8") == "{}"


def test_bare_names_are_looked_up_among_the_running_arms(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(StandIn()) as one, serving(StandIn()) as two:
        monkeypatch.setenv("FACEOFF_ARMS", specs(one, two))
        assert run("--arms", "mtp", "--out", "run") == 0
        assert run("--out", "both") == 0
    assert [arm.name for arm in read_json(Path("run/manifest.json"), Manifest).arms] == ["mtp"]
    assert [arm.name for arm in read_json(Path("both/manifest.json"), Manifest).arms] == ["cache", "mtp"]


def test_points_that_do_not_fit_the_model_are_refused_before_the_load(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # turn 3 of context=64, growth 32: 128 tokens of prompt and 8 of answer
    with serving(StandIn(max_model_len=135)) as one, serving(StandIn(max_model_len=200)) as two:
        assert run("--arms", specs(one, two)) == 2
    assert "needs 136 tokens of context, arm cache serves 135" in capsys.readouterr().err


def test_a_self_test_of_this_machine_goes_into_the_manifest(place: Path) -> None:
    from locustfiles.host import host_facts

    (place / "results").mkdir()
    path = place / "results" / "selftest.json"
    with serving(StandIn()) as one, serving(StandIn()) as two:
        path.write_text(json.dumps({"host": {"id": host_facts()["id"]}, "streams": 64}), encoding="utf-8")
        assert run("--arms", specs(one, two), "--out", "mine") == 0
        path.write_text(json.dumps({"host": {"id": "other"}}), encoding="utf-8")
        assert run("--arms", specs(one, two), "--out", "other") == 0
    mine = read_json(Path("mine/manifest.json"), Manifest)
    assert mine.certificate is not None
    assert mine.certificate["streams"] == 64
    other = read_json(Path("other/manifest.json"), Manifest)
    assert other.certificate is None
    assert any("made on another machine" in note for note in other.notes)


def test_a_dry_run_lists_cells_and_time_and_loads_nothing(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(StandIn()) as one, serving(StandIn()) as two:
        assert run("--arms", specs(one, two), "--dry-run") == 0
    out = capsys.readouterr().out.splitlines()
    assert len([line for line in out if ".r" in line]) == 8
    assert out[-1].startswith("8 cells, about ")
    assert "speeds as probed" in out[-1]
    assert not (place / "results").exists()
    assert run("--dry-run") == 0
    assert "nominal speeds" in capsys.readouterr().out
