"""The swap control: a slow device is told from a slow arm."""

import msgspec
import pytest
from run_builder import CACHE, MTP, RunBuilder, flat

from locustfiles.records import Manifest, read_json, write_json
from reports.certificate import certify
from reports.devices import device_ratios, swapped
from reports.judge import Options, judge
from reports.page import to_html
from reports.read import read_run

replace = msgspec.structs.replace
LEVEL = ("multi_turn", "context=8192", 2)


def swap(cell):
    """cache on gpu0 and mtp on gpu1 in the first two repeats, the other way round in the last two."""
    return "gpu0" if (cell.arm == "cache") == (cell.repeat <= 2) else "gpu1"


def built(tmp_path, place=swap, **changes):
    """cache takes 1 s, mtp 3 s; gpu1 makes everything 2 times slower."""

    def times(base):
        return lambda cell, *_: (base * (2 if place(cell) == "gpu1" else 1), 0.02)

    times_of = {"cache": times(1.0), "mtp": times(3.0)}
    folder = RunBuilder(tmp_path / "run", **{"repeats": 4, "times": times_of, **changes}).write()
    manifest = read_json(folder / "manifest.json", Manifest)
    for cell in manifest.cells:
        cell.device = place(cell)
    write_json(folder / "manifest.json", manifest)
    return read_run(folder)


def same_device(run):
    return [check for check in certify(run) if check.check == "same device"]


def test_a_slow_device_is_told_from_a_slow_arm(tmp_path):
    run = built(tmp_path)
    assert swapped(run)
    assert device_ratios(run) == {LEVEL: pytest.approx({"gpu0": 1.0, "gpu1": 2.0})}
    (check,) = same_device(run)
    assert check.ok is True
    assert check.value == "each arm on each device; gpu1 ÷ gpu0: 2 in the primary metrics"
    # The arms differ by 3 and by nothing else: ln d is ln 6 twice and ln 1.5 twice.
    cell = judge(run, Options()).primary[0]
    found = cell.against_base["mtp"]
    assert found.ratio == pytest.approx(3.0)
    assert found.low < 3.0 < found.high


def test_a_swap_that_was_cut_short_is_said(tmp_path):
    run = built(tmp_path, skip=lambda cell: cell.repeat == 4)
    (check,) = same_device(run)
    assert check.ok is False
    assert not check.withholds
    assert "not every arm was on every device equally often" in check.value
    assert device_ratios(run) == {}


def test_without_a_swap_devices_and_arms_cannot_be_told_apart(tmp_path):
    run = built(tmp_path, place=lambda cell: "gpu0" if cell.arm == "cache" else "gpu1")
    assert not swapped(run)
    assert device_ratios(run) == {}
    assert same_device(run) == []  # a simulated run: its devices are names


def test_devices_that_nobody_named(tmp_path):
    run = built(tmp_path, place=lambda cell: None, times={"cache": flat(1.0), "mtp": flat(2.0)})
    assert not swapped(run)
    assert device_ratios(run) == {}


def test_three_arms_on_three_devices(tmp_path):
    order = ["cache", "mtp", "both"]

    def place(cell):
        return f"gpu{(order.index(cell.arm) + cell.repeat - 1) % 3}"

    slow = {"gpu0": 1.0, "gpu1": 1.1, "gpu2": 1.5}

    def times(base):
        return lambda cell, *_: (base * slow[place(cell)], 0.02)

    arms = [CACHE, MTP, replace(CACHE, name="both")]
    names = {"cache": times(1.0), "mtp": times(2.0), "both": times(0.7)}
    run = built(tmp_path, place, arms=arms, repeats=3, times=names)
    assert device_ratios(run)[LEVEL] == pytest.approx(slow)


@pytest.mark.parametrize(("parallel", "streams", "ok"), [(False, 2, True), (True, 3, False), (True, 4, True)])
def test_generators_that_ran_side_by_side_share_what_the_self_test_carried(tmp_path, parallel, streams, ok):
    """Two users on either arm: four streams at once where the arms were loaded at the same time."""
    proof = {"safe_streams": streams, "safe_events_per_s": 1e6, "host": {"id": "a"}}
    changes = {"certificate": proof, "host": {"id": "a"}, "parallel_arms": parallel}
    run = built(tmp_path, manifest_changes=changes)
    (found,) = [c for c in certify(run) if (c.check, c.arm) == ("within the self-test", "cache")]
    assert found.ok is ok
    assert found.value.startswith(f"{4 if parallel else 2} streams, ")
    page = to_html(judge(run, Options()))
    assert ("at the same time as a block, each arm on a device of its own" in page) is parallel
    assert ("one after another as a block, in alternating order" in page) is not parallel
