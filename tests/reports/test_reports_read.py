import json

import pytest
from run_builder import RunBuilder

from reports.judge import Options, judge
from reports.read import ReportError, find_run, read_run, split_labels


def test_unfinished_cells_are_listed_and_never_judged(tmp_path):
    folder = RunBuilder(tmp_path / "run", skip=lambda cell: cell.repeat == 3 and cell.arm == "mtp").write()
    run = read_run(folder)
    assert [cell.record.id for cell in run.unfinished] == ["multi_turn.context=8192.u2.r3.mtp"]
    assert run.unfinished[0].problem == "did not finish: no done.json, 18 attempts on disk"
    (primary,) = judge(run, Options()).primary
    assert primary.repeats == 2
    assert primary.winner == "inconclusive"
    assert "inconclusive: needs 3 repeats" in primary.reasons


def test_a_cell_in_which_its_arm_died_is_listed_and_not_judged(tmp_path):
    """Its failures are few enough to pass the limit on failures over all repeats."""
    folder = RunBuilder(tmp_path / "run").write()
    path = folder / "cells/multi_turn.context=8192.u2.r3.mtp/done.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"failed": "arm mtp is gone: out of memory"}))
    run = read_run(folder)
    assert [cell.problem for cell in run.unfinished] == ["failed: arm mtp is gone: out of memory"]
    (primary,) = judge(run, Options()).primary
    assert primary.repeats == 2


def test_a_run_that_has_only_begun(tmp_path):
    folder = RunBuilder(tmp_path / "run").write()
    for cell in (folder / "cells").iterdir():
        for file in cell.iterdir():
            file.unlink()
        cell.rmdir()
    run = read_run(folder)
    assert {cell.problem for cell in run.cells} == {"not started"}


def test_a_half_written_last_line_costs_one_row(tmp_path):
    folder = RunBuilder(tmp_path / "run", repeats=1).write()
    path = folder / "cells" / "multi_turn.context=8192.u2.r1.cache" / "requests.csv"
    text = path.read_text()
    path.write_text(text[: text.rindex("ok") + 1])
    cell = next(cell for cell in read_run(folder).cells if cell.record.arm == "cache")
    assert len(cell.attempts) == 17
    assert cell.problem is None  # the check "sessions complete" catches it


def test_a_broken_row_names_file_and_line(tmp_path):
    folder = RunBuilder(tmp_path / "run", repeats=1).write()
    path = folder / "cells" / "multi_turn.context=8192.u2.r1.cache" / "requests.csv"
    lines = path.read_text().splitlines()
    lines[3] = lines[3].replace(",2,1,", ",2,one,", 1)
    path.write_text("\n".join(lines) + "\n")
    cell = next(cell for cell in read_run(folder).cells if cell.record.arm == "cache")
    assert cell.problem.startswith(
        "cannot be read: cells/multi_turn.context=8192.u2.r1.cache/requests.csv:4:"
    )


def test_rows_of_another_cell_are_refused(tmp_path):
    folder = RunBuilder(tmp_path / "run", repeats=1).write()
    cells = folder / "cells"
    source = (cells / "multi_turn.context=8192.u2.r1.mtp" / "requests.csv").read_text()
    (cells / "multi_turn.context=8192.u2.r1.cache" / "requests.csv").write_text(source)
    cell = next(cell for cell in read_run(folder).cells if cell.record.arm == "cache")
    assert "holds a row of another cell (mtp multi_turn" in cell.problem


def test_missing_server_samples_are_unknown_not_fatal(tmp_path):
    folder = RunBuilder(tmp_path / "run", repeats=1).write()
    for path in folder.glob("cells/*/server.csv"):
        path.unlink()
    assert len(read_run(folder).finished) == 2


@pytest.mark.parametrize("path", ["manifest.json", "cells/multi_turn.context=8192.u2.r1.cache/done.json"])
def test_a_newer_schema_is_refused(tmp_path, path):
    folder = RunBuilder(tmp_path / "run", repeats=1).write()
    record = json.loads((folder / path).read_text())
    record["schema"] = 2
    (folder / path).write_text(json.dumps(record))
    with pytest.raises(ReportError, match=r"schema 2, this Faceoff reads up to 1"):
        read_run(folder)


def test_newer_rows_are_refused(tmp_path):
    folder = RunBuilder(tmp_path / "run", repeats=1).write()
    path = next(folder.glob("cells/*/requests.csv"))
    path.write_text(path.read_text().replace("\n1,", "\n2,"))
    with pytest.raises(ReportError, match="schema 2"):
        read_run(folder)


def test_a_cell_cannot_point_out_of_the_run(tmp_path):
    folder = RunBuilder(tmp_path / "run", repeats=1).write()
    record = json.loads((folder / "manifest.json").read_text())
    record["cells"][0]["id"] = "../../elsewhere"
    (folder / "manifest.json").write_text(json.dumps(record))
    assert read_run(folder).cells[0].problem == "its id is not a folder name"


def test_cells_that_the_manifest_does_not_know(tmp_path):
    folder = RunBuilder(tmp_path / "run", repeats=1).write()
    (folder / "cells" / "stray").mkdir()
    assert read_run(folder).remarks == ["cells/stray is not in the manifest and is left out"]


def test_finding_a_run(tmp_path):
    results = tmp_path / "results"
    folder = RunBuilder(results / "20261130-load").write()
    (results / "latest").symlink_to("20261130-load")
    assert find_run("latest", results) == folder
    assert find_run("20261130-load", results) == folder
    assert find_run(str(folder), results) == folder
    with pytest.raises(ReportError, match=r"no such run: nope .*newest in .*: 20261130-load"):
        find_run("nope", results)
    with pytest.raises(ReportError, match="holds no run yet"):
        find_run("nope", tmp_path / "none")


def test_labels():
    assert split_labels("a=1;b=x=y") == {"a": "1", "b": "x=y"}
    assert split_labels("") == {}
