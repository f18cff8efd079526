"""The command as a user runs it: a process, its exit code, its files."""

import csv
import json
import os
import subprocess
import sys
from dataclasses import dataclass

import msgspec
import pytest
from run_builder import CACHE, MTP, RunBuilder, arm, flat

from reports.__main__ import main

LEVELS = [
    ("single_turn", "prompt=1024", 4),
    ("shared_prefix", "prefix=4096", 4),
    ("multi_turn", "context=8192", 4),
]


def clear_run(folder, **changes):
    times = {"cache": flat(1.0, 0.02), "mtp": flat(4.0, 0.01)}
    return RunBuilder(folder, **{"levels": LEVELS, "times": times, **changes}).write()


@dataclass
class Outcome:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def reports(capsys, monkeypatch):
    """The command in this process: a new one for every test would spend its time on imports."""
    monkeypatch.setenv("COLUMNS", "160")

    def run(*args, cwd=None):
        if cwd is not None:
            monkeypatch.chdir(cwd)
        code = main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


def process(*args, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "reports", *map(str, args)],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
        timeout=60,
        env={**os.environ, "COLUMNS": "160"},
    )


def test_build(tmp_path):
    folder = clear_run(tmp_path / "results" / "one")
    (tmp_path / "results" / "latest").symlink_to("one")
    done = process("build", "latest", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-3:] == [f"results/one/{name}" for name in ("summary.csv", "verdict.json", "report.html")]
    assert lines[0].startswith("SIMULATED")
    assert all((folder / name).is_file() for name in ("summary.csv", "verdict.json", "report.html"))
    verdict = json.loads((folder / "verdict.json").read_text())
    assert list(verdict) == [
        "schema", "run", "simulated", "arms", "base", "cells", "classes", "crossovers", "capacity",
        "certificate", "recommendation",
    ]  # fmt: skip
    winners = {cell["workload"]: cell["winner"] for cell in verdict["cells"] if cell["primary"]}
    assert winners == {"single_turn": "mtp", "shared_prefix": "cache", "multi_turn": "cache"}
    multi = next(cell for cell in verdict["cells"] if cell["primary"] and cell["workload"] == "multi_turn")
    assert multi == {
        "workload": "multi_turn", "point": "context=8192", "users": 4, "turn": 2, "metric": "ttft_p50",
        "unit": "s", "primary": True, "values": {"cache": 1.0, "mtp": 4.0}, "n": {"cache": 24, "mtp": 24},
        "repeats": 3, "against_base": {"mtp": {"ratio": 4.0, "low": 4.0, "high": 4.0}}, "winner": "cache",
        "reasons": [],
    }  # fmt: skip
    assert list(verdict["classes"][0]) == ["class", "workload", "winner", "factor", "why"]
    assert verdict["classes"][0]["factor"] == [2.0, 2.0]
    assert {cell["metric"] for cell in verdict["cells"]}.isdisjoint({"goodput"})
    # 96 measured attempts: too few for a p95.
    p95 = next(cell for cell in verdict["cells"] if cell["metric"] == "ttft_p95")
    assert p95["against_base"] == {}
    assert p95["reasons"][0].startswith("no verdict: p95 needs 200 measured attempts per arm")


def test_p95_from_two_hundred_attempts_on(reports, tmp_path):
    folder = clear_run(tmp_path / "run", levels=LEVELS[:1], sessions=17)  # 4 x 17 x 3 = 204
    assert reports(folder).returncode == 0
    verdict = json.loads((folder / "verdict.json").read_text())
    p95 = next(cell for cell in verdict["cells"] if cell["metric"] == "ttft_p95")
    assert p95["against_base"]["mtp"]["ratio"] == 4.0


def test_summary_csv(reports, tmp_path):
    folder = clear_run(tmp_path / "run")
    assert reports(folder).returncode == 0  # build is the default
    with (folder / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == (
        "arm workload point users turn metric unit attempts failed n mean p50 p90 p95 p99 max".split()
    )
    key = {"arm": "mtp", "workload": "multi_turn", "turn": "2", "metric": "ttft"}
    (row,) = [row for row in rows if key.items() <= row.items()]
    assert (row["attempts"], row["failed"], row["n"], row["p50"], row["max"]) == ("24", "0", "24", "4", "4")
    assert {row["turn"] for row in rows if row["workload"] == "single_turn"} == {""}
    assert {row["turn"] for row in rows if row["workload"] == "multi_turn"} == {"", "1", "2", "3"}
    (rate,) = [
        row
        for row in rows
        if (row["arm"], row["workload"], row["metric"]) == ("mtp", "single_turn", "decode_rate")
    ]
    assert (rate["mean"], rate["p50"], rate["unit"]) == ("100", "", "tok/s")


def test_open_loop_reports_ttft_from_the_intended_start(reports, tmp_path):
    """No row says so, but a request that could not be sent for 3 s made its user wait 3 s longer."""

    def change(cell, row):
        return msgspec.structs.replace(row, intended_ms=row.start_ms - 3000.0)

    folder = RunBuilder(
        tmp_path / "run",
        levels=[("single_turn", "prompt=1024,rate=2", 4)],
        times={"cache": flat(1.0), "mtp": flat(2.0)},
        change=change,
    ).write()
    assert reports(folder).returncode == 0
    with (folder / "summary.csv").open() as file:
        p50 = {(row["arm"], row["metric"]): row["p50"] for row in csv.DictReader(file)}
    assert (p50["cache", "ttft"], p50["cache", "ttft_intended"]) == ("1", "4")
    assert (p50["mtp", "ttft"], p50["mtp", "ttft_intended"]) == ("2", "5")
    closed = clear_run(tmp_path / "closed")
    assert reports(closed).returncode == 0
    assert "ttft_intended" not in (closed / "summary.csv").read_text()


def test_rebuilding_gives_the_same_bytes(reports, tmp_path):
    folder = clear_run(tmp_path / "run")
    reports(folder)
    names = ("summary.csv", "verdict.json", "report.html")
    first = [(folder / name).read_bytes() for name in names]
    reports(folder)
    assert [(folder / name).read_bytes() for name in names] == first


def test_slo_mix_and_margin(reports, tmp_path):
    folder = clear_run(tmp_path / "run")
    done = reports(
        folder, "--slo", "ttft=2,tpot=0.05", "--mix", "multi_turn=3,single_turn=1", "--margin", "0.1"
    )
    assert done.returncode == 0, done.stderr
    verdict = json.loads((folder / "verdict.json").read_text())
    assert verdict["recommendation"]["mix"] == {"multi_turn": 0.75, "single_turn": 0.25}
    assert verdict["recommendation"]["slo"] == {"ttft": 2.0, "tpot": 0.05}
    assert verdict["recommendation"]["arm"] == "cache"
    good = next(cell for cell in verdict["cells"] if cell["metric"] == "goodput")
    assert good["values"] == {"cache": 1.0, "mtp": 0.0}


def test_mix_decides_the_recommendation(reports, tmp_path):
    folder = clear_run(tmp_path / "run")
    for mix, best in (
        ("multi_turn=1", "cache"),
        ("single_turn=1", "mtp"),
        ("single_turn=0.9,multi_turn=0.1", "mtp"),
    ):
        reports(folder, "--mix", mix)
        assert json.loads((folder / "verdict.json").read_text())["recommendation"]["arm"] == best, mix


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere"], "no such run: nowhere"),
        (["run", "--slo", "ttft"], "--slo: 'ttft' is not name=number"),
        (["run", "--slo", "itl=1"], "--slo: 'itl' is not one of"),
        (["run", "--slo", "ttft=nan"], "is not name=number"),
        (["run", "--mix", "chat=1"], "--mix: 'chat' is not one of"),
        (["run", "--mix", "multi_turn=0"], "add up to 0"),
        (["run", "--margin", "5"], "--margin: '5' is not a number from 0"),
        (["empty"], "holds no manifest.json"),
        (["unfinished"], "no finished cell yet (18 planned; did not finish"),
        (["broken"], "cannot read the manifest"),
        (["blocked"], "cannot write the report"),
    ],
)
def test_mistakes_end_in_one_line(reports, tmp_path, arguments, complaint):
    (tmp_path / "empty").mkdir()
    if arguments[0] in ("run", "unfinished", "broken", "blocked"):
        folder = clear_run(tmp_path / arguments[0], skip=lambda cell: arguments[0] == "unfinished")
    if arguments[0] == "broken":
        (folder / "manifest.json").write_text("{")
    if arguments[0] == "blocked":
        (folder / "summary.csv.part").mkdir()
    done = reports(*arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert complaint in line


def test_a_mistake_in_a_process_of_its_own(tmp_path):
    done = process("nowhere", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "reports: no such run: nowhere is neither a folder nor a name below results/ "
        "(results/ holds no run yet)\n"
    )


def test_failed_checks_are_loud_in_the_terminal(reports, tmp_path):
    odd = arm("mtp", caching=True, drafts=3)
    odd.declared = MTP.declared
    done = reports(clear_run(tmp_path / "run", arms=[CACHE, odd]))
    assert done.returncode == 0
    assert "CHECK FAILED declared features on, and only those [mtp]" in done.stdout
    assert "no verdict" in done.stdout
    assert "recommendation: none" in done.stdout


def test_terminal_takes_no_orders_from_files(reports, tmp_path):
    notes = ["\x1b[2J[bold red]gone[/]"]
    done = reports(clear_run(tmp_path / "run", manifest_changes={"notes": notes}))
    assert "\x1b" not in done.stdout
    assert "[bold red]gone[/]" in done.stdout


STATS = (
    '"Type","Name","Request Count","Failure Count","Median Response Time","Average Response Time",'
    '"Min Response Time","Max Response Time","95%"\n'
    '"POST","<script>chat",10,1,100,123.4567,50,900,800\n"","Aggregated",10,1,100,123.4567,50,900,800\n'
)


def test_plain_locust_csvs_are_coarse_and_without_verdict(reports, tmp_path):
    folder = tmp_path / "plain"
    folder.mkdir()
    (folder / "run_stats.csv").write_text(STATS)
    done = reports(folder)
    assert done.returncode == 0, done.stderr
    html = (folder / "report.html").read_text()
    assert "Coarse, and no verdict" in html
    assert "<script" not in html
    verdict = json.loads((folder / "verdict.json").read_text())
    assert verdict["cells"] == []
    assert verdict["recommendation"]["arm"] is None
    assert verdict["recommendation"]["why"].startswith("no verdict")
    assert (folder / "summary.csv").read_text().count("\n") == 1


def test_a_foreign_stats_file(reports, tmp_path):
    folder = tmp_path / "plain"
    folder.mkdir()
    (folder / "x_stats.csv").write_text("a,b\n1,2\n")
    done = reports(folder)
    assert done.returncode == 1
    assert "is not a statistics file of Locust's" in done.stderr


def test_four_arms(reports, tmp_path):
    arms = [arm("plain"), CACHE, MTP, arm("both", caching=True, drafts=3)]
    times = {"plain": flat(4.0), "cache": flat(1.0), "mtp": flat(4.2, 0.01), "both": flat(1.1, 0.011)}
    folder = clear_run(tmp_path / "run", arms=arms, times=times)
    assert reports(folder).returncode == 0
    verdict = json.loads((folder / "verdict.json").read_text())
    winners = {cell["workload"]: cell["winner"] for cell in verdict["cells"] if cell["primary"]}
    assert winners == {"single_turn": "mtp", "shared_prefix": "cache", "multi_turn": "cache"}
    assert verdict["base"] == "plain"
    assert set(verdict["cells"][0]["against_base"]) == {"cache", "mtp", "both"}
    assert verdict["recommendation"]["arm"] == "both"  # second everywhere, far behind nowhere


@pytest.mark.parametrize("arms", [[CACHE], [arm("other")]])
def test_odd_sets_of_arms_still_give_a_report(reports, tmp_path, arms):
    """One arm alone, and cells of arms that the manifest does not name."""
    folder = clear_run(tmp_path / "run", manifest_changes={"arms": arms, "base": arms[0].name})
    assert reports(folder).returncode == 0
    verdict = json.loads((folder / "verdict.json").read_text())
    assert {cell["winner"] for cell in verdict["cells"]} <= {"inconclusive", None}
    assert verdict["recommendation"]["arm"] is None
