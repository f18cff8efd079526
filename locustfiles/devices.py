"""Devices: whether arms may be loaded at the same time, and the swap control.

The swap control puts every arm on every device, so that a slower device is no slower configuration.

The devices that the arms declare are handed round between them: in the first part of the repeats each arm is
where it says, in the next one every arm is on its neighbour's device, and so on, one part per arm. The
launcher starts the arms anew in between. Every arm meets every device equally often, so that what a device
does to an arm cancels in the mean over the repeats.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence

from locustfiles.arms import Arm, ArmError
from locustfiles.records import CellRecord

Placement = dict[str, str]
"""Arm -> device."""


def devices_apart(arms: Sequence[Arm], what: str) -> list[str]:
    """The device of each arm. ``what`` asks for it, as the message says.

    Raises:
        ArmError: fewer than two arms, an arm without a device, or two arms on one.
    """
    devices = [arm.declared.get("device", "") for arm in arms]
    for arm, device in zip(arms, devices, strict=True):
        if not device:
            raise ArmError(
                f"arm {arm.name} has no device (DEVICE in its .env, ;device= after a URL): {what} needs one "
                "for each arm"
            )
    if len(set(devices)) < len(devices) or len(devices) < 2:
        raise ArmError(
            f"{what} needs two or more arms, each on a device of its own; these are on "
            + ", ".join(f"{device} ({arm.name})" for arm, device in zip(arms, devices, strict=True))
        )
    return devices


def placements(arms: Sequence[Arm]) -> list[Placement]:
    """One placement per arm, the declared one first.

    Raises:
        ArmError: fewer than two arms, an arm without a device, or two arms on one.
    """
    devices = devices_apart(arms, "a swap")
    names = [arm.name for arm in arms]
    return [
        dict(zip(names, [*devices[shift:], *devices[:shift]], strict=True)) for shift in range(len(devices))
    ]


def check_parallel(arms: Sequence[Arm]) -> None:
    """Make sure that arms may be loaded at the same time: each on a device of its own.

    Raises:
        ArmError: saying what to do.
    """
    for arm in arms:
        if arm.behind_proxy:
            raise ArmError(
                f"arm {arm.name} is a proxy: what it loads are other arms; leave out --parallel-arms"
            )
    devices_apart(arms, "--parallel-arms")
    urls = [arm.url for arm in arms]
    for arm in arms:
        if urls.count(arm.url) > 1:
            raise ArmError(
                f"--parallel-arms: more than one arm is at {arm.url}; each needs a server of its own"
            )


def check_carried(
    arms: int, users: int, certificate: Mapping[str, object] | None, remarks: Sequence[str] = ()
) -> None:
    """Make sure that the load generator can load so many arms with so many users each at the same time.

    ``remarks``: why there is no certificate, where that is known.

    Raises:
        ArmError: saying what to do.
    """
    streams = (certificate or {}).get("safe_streams")
    if not isinstance(streams, int | float):
        why = f" ({remarks[0]})" if remarks else ""
        raise ArmError(
            f"--parallel-arms needs to know what this load generator carries: make selftest first{why}"
        )
    if users * arms > streams:
        raise ArmError(
            f"--parallel-arms: {arms} arms of {users} users are {users * arms} streams, the self-test of "
            f"this machine carried {streams:g}; leave it out, or lower the users"
        )


def check_restartable(arms: Sequence[Arm], environ: Mapping[str, str] = os.environ) -> None:
    """Make sure that the arms may be moved: started for this run, by a launcher that can start them anew.

    Raises:
        ArmError: saying what to do.
    """
    if not environ.get("FACEOFF_RESTART"):
        raise ArmError("a swap starts arms anew on other devices: it needs a profile's arms, not URLs")
    ours = environ.get("FACEOFF_STARTED", "").split()
    for arm in arms:
        if arm.name not in ours:
            raise ArmError(
                f"arm {arm.name} was up before, and a swap would leave it on another device: make stop first"
            )


def whole_parts(repeats: int, parts: int) -> int:
    """Repeats, rounded up so that each part has as many."""
    return math.ceil(repeats / parts) * parts


def place(cells: Sequence[CellRecord], arms: Sequence[Arm], swap: bool) -> None:
    """Write into each cell the device that its arm is to be on; as declared without a swap.

    Parts hold consecutive repeats: each then has every order of the arms where there are enough of them, so
    that order and device stay apart.

    Raises:
        ArmError: as ``placements``.
    """
    if not swap:
        declared = {arm.name: arm.declared.get("device") for arm in arms}
        for cell in cells:
            cell.device = declared[cell.arm]
        return
    parts = placements(arms)
    length = max(cell.repeat for cell in cells) // len(parts)
    for cell in cells:
        cell.device = parts[(cell.repeat - 1) // length][cell.arm]


def placement_of(cells: Sequence[CellRecord], repeat: int) -> Placement:
    """Where the arms are in a repeat, as its cells say."""
    found = {cell.arm: cell.device for cell in cells if cell.repeat == repeat and cell.device is not None}
    return dict(sorted(found.items()))


def device_variables(placement: Placement) -> dict[str, str]:
    """What tells a launcher: ``FACEOFF_DEVICE_<ARM>``."""
    return {
        "FACEOFF_DEVICE_" + arm.upper().replace("-", "_"): device for arm, device in placement.items()
    }  # fmt: skip
