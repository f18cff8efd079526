"""The swap control: what the devices did, where every arm was on every one of them.

Within a block, ln(statistic) = what the block had in common + what the arm does + what its device does.
Where every arm was on every device equally often, the arms' part is the same in the mean of each device's
cells, and the difference of those means is the devices'. The comparison of arms needs no correction: over
all blocks each arm has had every device. Its interval holds the devices' difference as scatter, so that it
is too wide rather than too narrow.
"""

from __future__ import annotations

import math
from collections import Counter

from reports.compare import PRIMARY, Blocks, Level, gather
from reports.read import Run


def swapped(run: Run) -> bool:
    """Whether an arm was on more than one device in the cells that finished."""
    seen: dict[str, set[str | None]] = {}
    for cell in run.finished:
        seen.setdefault(cell.record.arm, set()).add(cell.record.device)
    return any(len(devices - {None}) > 1 for devices in seen.values())


def balanced(run: Run) -> bool:
    """Whether at every level every arm was on every device equally often."""
    devices = {cell.record.device for cell in run.finished}
    for level in {cell.level for cell in run.finished}:
        counts = Counter(
            (cell.record.arm, cell.record.device) for cell in run.finished if cell.level == level
        )
        if len(counts) != len(run.arms) * len(devices) or len(set(counts.values())) != 1:
            return False
    return True


def device_ratios(run: Run) -> dict[Level, dict[str, float]]:
    """Level -> device -> its primary metric ÷ that of the first device, the arms' part taken out.

    Nothing for levels where it cannot be told apart from the arms: in the blocks that have all arms, every
    arm must have been on every device equally often.
    """
    where = {
        (cell.level, cell.record.repeat, cell.record.arm): cell.record.device for cell in run.finished
    }  # fmt: skip
    found: dict[Level, dict[str, float]] = {}
    for workload, (metric, turn) in PRIMARY.items():
        for blocks in gather(run, metric, turn, {}):
            if blocks.level[0] == workload and (ratios := of_level(run, blocks, where)):
                found[blocks.level] = ratios
    return found


def of_level(
    run: Run, blocks: Blocks, where: dict[tuple[Level, int, str], str | None]
) -> dict[str, float] | None:
    """One level; None where the devices cannot be told apart from the arms."""
    residuals: dict[str, list[float]] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for repeat in blocks.complete(run.arms):
        logs = {arm: math.log(blocks.values[repeat][arm]) for arm in run.arms}
        mean = sum(logs.values()) / len(logs)
        for arm, value in logs.items():
            device = where.get((blocks.level, repeat, arm))
            if device is None:
                return None
            residuals.setdefault(device, []).append(value - mean)
            counts[arm, device] += 1
    if len(residuals) < 2 or len(counts) != len(run.arms) * len(residuals) or len(set(counts.values())) != 1:
        return None
    first, *_ = devices = sorted(residuals)
    means = {device: sum(residuals[device]) / len(residuals[device]) for device in devices}
    return {device: math.exp(means[device] - means[first]) for device in devices}


def swap_text(run: Run) -> str:
    """``"each arm on each device; gpu1 ÷ gpu0: 0.99–1.02 in the primary metrics"``."""
    if not balanced(run):
        return "arms were swapped, but not every arm was on every device equally often"
    ranges: dict[str, list[float]] = {}
    first = ""
    for ratios in device_ratios(run).values():
        first, *others = sorted(ratios)
        for device in others:
            ranges.setdefault(device, []).append(ratios[device])
    shown = [
        f"{device} ÷ {first}: {min(values):.3g}" + (f"–{max(values):.3g}" if len(values) > 1 else "")
        for device, values in ranges.items()
    ]
    return "each arm on each device" + (f"; {', '.join(shown)} in the primary metrics" if shown else "")
