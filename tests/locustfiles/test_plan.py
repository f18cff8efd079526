from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from locustfiles.plan import (
    PlanError,
    arm_order,
    default_sessions,
    expand,
    fewest_sessions,
    load_plan,
    plan_names,
    turn_knobs,
)


def write(folder: Path, text: str) -> str:
    path = folder / "own.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


GOOD = '[[workloads]]\nworkload = "single_turn"\npoints = ["prompt=64"]\nusers = [1]\n'


def test_load_is_three_workloads_three_repeats_in_alternating_order() -> None:
    cells = expand(load_plan("load"), ["cache", "mtp"])
    assert len(cells) == 18
    assert [cell.order for cell in cells] == list(range(18))
    assert {(cell.workload, cell.point, cell.users) for cell in cells} == {
        ("single_turn", "prompt=1024", 16),
        ("shared_prefix", "prefix=8192", 16),
        ("multi_turn", "context=8192", 16),
    }
    # The order of arms alternates from block to block, and over the repeats of each point.
    assert [cell.arm for cell in cells] == ["cache", "mtp", "mtp", "cache"] * 4 + ["cache", "mtp"]
    assert [cell.repeat for cell in cells] == [1] * 6 + [2] * 6 + [3] * 6
    for workload, first in (("single_turn", "cache"), ("shared_prefix", "mtp"), ("multi_turn", "cache")):
        mine = [cell.arm for cell in cells if cell.workload == workload]
        other = "mtp" if first == "cache" else "cache"
        assert mine == [first, other, other, first, first, other]
    assert cells[0].id == "single_turn.prompt=1024.u16.r1.cache"
    assert [cell.turns for cell in cells[:6]] == [1, 1, 1, 1, 3, 3]


def test_repeats_are_outermost_and_a_block_is_contiguous() -> None:
    cells = expand(load_plan("nightly"), ["a", "b", "c"])
    assert [cell.repeat for cell in cells] == sorted(cell.repeat for cell in cells)
    assert [cell.block for cell in cells] == [order // 3 for order in range(len(cells))]
    for block in range(len(cells) // 3):
        mine = cells[3 * block : 3 * block + 3]
        assert len({(cell.workload, cell.point, cell.users, cell.repeat) for cell in mine}) == 1
        assert {cell.arm for cell in mine} == {"a", "b", "c"}


def test_the_seed_plan_is_the_grid_of_the_reference_case() -> None:
    cells = expand(load_plan("seed"), ["cache", "mtp"])
    assert Counter(cell.repeat for cell in cells) == {1: 86, 2: 86}
    first = [cell for cell in cells if cell.repeat == 1]
    # 6 decode levels, 2 prefixes x 6 levels, 5 contexts x 5 levels, two arms
    assert Counter(cell.workload for cell in first) == {
        "single_turn": 12,
        "shared_prefix": 24,
        "multi_turn": 50,
    }
    assert all(("pace=lockstep" in cell.point) == (cell.workload != "single_turn") for cell in cells)


@pytest.mark.parametrize("name", plan_names())
def test_every_plan_that_comes_along_reads(name: str) -> None:
    plan = load_plan(name)
    assert plan.name == name
    assert expand(plan, ["a", "b"])


def test_every_arm_comes_first_equally_often() -> None:
    assert [arm_order("AB", 0, repeat) for repeat in (1, 2, 3)] == [["A", "B"], ["B", "A"], ["A", "B"]]
    for block in range(3):
        for place in range(4):
            assert {arm_order("ABCD", block, repeat)[place] for repeat in (1, 2, 3, 4)} == set("ABCD")


def test_a_point_may_stand_in_two_grids_at_other_levels_and_the_users_knob_keeps_it_once() -> None:
    plan = turn_knobs(load_plan("seed"), users=[8])
    cells = expand(plan, ["cache", "mtp"])
    assert len({cell.id for cell in cells}) == len(cells) == 2 * 2 * 8


def test_knobs_override() -> None:
    plan = turn_knobs(load_plan("seed"), users=[3], workloads=["multi_turn"], repeats=1, sessions=5, seed=7)
    cells = expand(plan, ["a", "b"])
    assert len(cells) == 10
    assert {(cell.workload, cell.users, cell.sessions, cell.repeat) for cell in cells} == {
        ("multi_turn", 3, 5, 1)
    }
    assert plan.seed == 7
    assert cells[0].measured_planned == 3 * 5 * 3
    assert load_plan("seed").repeats == 2, "the plan itself is untouched"


@pytest.mark.parametrize(
    ("users", "single", "multi", "fewest_single", "fewest_multi"),
    [(1, 12, 12, 2, 2), (2, 6, 6, 1, 3), (5, 3, 3, 1, 2), (6, 2, 3, 1, 1), (32, 2, 3, 1, 1)],
)
def test_default_sessions(users: int, single: int, multi: int, fewest_single: int, fewest_multi: int) -> None:
    assert (default_sessions(users, 1), default_sessions(users, 3)) == (single, multi)
    assert (fewest_sessions(users, 1), fewest_sessions(users, 3)) == (fewest_single, fewest_multi)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GOOD + "speed = 1\n", r"unknown field `speed` - at `\$.workloads\[0\]`|unknown field `speed`"),
        ("repeets = 3\n" + GOOD, "unknown field `repeets`"),
        ('repeats = "3"\n' + GOOD, r"Expected `int`, got `str` - at `\$.repeats`"),
        ("repeats = 0\n" + GOOD, "repeats: 0 is not a whole number of at least 1"),
        (GOOD.replace("[1]", "[0]"), r"workloads\[0\].users: 0 is not"),
        (GOOD.replace("[1]", "[4, 4]"), "names a level twice"),
        (GOOD.replace("users = [1]\n", ""), r"workloads\[0\].users: no levels"),
        (GOOD.replace("single_turn", "double_turn"), "unknown 'double_turn': there are single_turn"),
        (GOOD.replace("prompt=64", "prompt=many"), "prompt must be a whole number"),
        (GOOD.replace("prompt=64", "context=64"), "needs prompt="),
        (GOOD + GOOD, "is named twice"),
        ("repeats = 3\n", "missing required field `workloads`"),
        ("repeats = [\n", "own.toml"),
        ('name = "../x"\n' + GOOD, "use letters"),
    ],
)
def test_bad_plans_name_file_and_key(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(PlanError, match=says) as caught:
        load_plan(path)
    assert path in str(caught.value)


def test_an_unknown_plan_lists_those_there_are() -> None:
    with pytest.raises(
        PlanError, match=r"unknown plan 'laod': there are load, nightly, seed, small_pool, smoke"
    ):
        load_plan("laod")


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="No such file"):
        load_plan(str(tmp_path / "none.toml"))


def test_an_unknown_workload_lists_the_plans() -> None:
    with pytest.raises(PlanError, match=r"unknown workload 'multi': plan load has single_turn"):
        turn_knobs(load_plan("load"), workloads=["multi"])


def test_a_plan_with_its_own_name_and_path(tmp_path: Path) -> None:
    plan = load_plan(write(tmp_path, GOOD))
    assert plan.name == "own"
    assert plan.repeats == 3
