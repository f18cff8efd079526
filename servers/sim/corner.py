"""``python -m servers.sim.corner``: what the KV pool's size does to 16 sessions of 64K, the article's corner.

Turn-2 TTFT p50 and hit rate in lockstep, for pools of different sizes and the four combinations of flags.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .calibration import Calibration, CalibrationError, load
from .fit import with_constants
from .options import CALIBRATION, OptionError
from .replay import replay
from .targets import FLAGS, configuration, turns_load

POOLS = (1_600_000, 1_320_000, 1_280_000, 1_240_000, 1_200_000, 1_160_000, 1_000_000, 800_000)


def corner(
    calibration: Calibration, pools: Sequence[int], users: int = 16, context: int = 65_536
) -> list[str]:
    """A markdown table, one row per pool size in tokens."""
    lines = ["| KV pool, tokens | " + " | ".join(FLAGS) + " |", "|---:|" + "---:|" * len(FLAGS)]
    for tokens in pools:
        cells = []
        sized = with_constants(calibration, ["model.kv_cache_tokens"], [tokens])
        for flags in FLAGS.values():
            found = replay(configuration(flags, sized), sized, turns_load(context, users))
            preempted = found.counters.preemptions
            cells.append(
                f"{found.ttft_p50(2):.1f} s, hits {found.hit_rate:.0%}, KV {found.kv_use_max:.0%}"
                + (f", {preempted} preempted" if preempted else "")
            )
        lines.append(f"| {tokens:,} | " + " | ".join(cells) + " |")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 2 for a calibration that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m servers.sim.corner", description=__doc__)
    parser.add_argument("--calibration", type=Path, default=CALIBRATION)
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--context", type=int, default=65_536)
    arguments = parser.parse_args(argv)
    try:
        lines = corner(load(arguments.calibration), POOLS, arguments.users, arguments.context)
    except (CalibrationError, OptionError) as error:
        print(f"servers.sim.corner: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
