"""Run a plan: probe the arms, write the manifest, then one Locust process per cell, one arm at a time.

``python -m locustfiles.sweep --plan load --arms "cache=http://127.0.0.1:8101 mtp=http://127.0.0.1:8102"``

Progress goes to stderr; the last line of stdout is the run's folder. Exit code: 0 all cells finished, 1 some
did not, 2 the run could not be started or carried on, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from locustfiles import devices, estimate
from locustfiles.arm_http import one_line
from locustfiles.arms import Arm, ArmError, parse_arms
from locustfiles.host import host_facts
from locustfiles.plan import Plan, PlanError, expand, load_plan, plan_names, turn_knobs
from locustfiles.prepare import Setup, lay_out, prepare, probe_all
from locustfiles.records import ArmRecord
from locustfiles.run import Run, clock, finish, run_all, say
from locustfiles.run_folder import certificate, complete_cells, drop_unstarted, link_latest, make_run_folder


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One clear line instead of the usage."""
        say(f"faceoff: {message} (--help lists the options)")
        raise SystemExit(2)


def whole(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def wholes(text: str) -> list[int]:
    """``"16"`` or ``"1,4,16"``."""
    return [whole(part.strip()) for part in text.split(",")]


def natural(text: str) -> int:
    """A whole number of at least 0, for argparse."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def scale(text: str) -> float:
    """A clock scale, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= estimate.SCALE_LIMIT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0.1 to {estimate.SCALE_LIMIT:g}")
    return value


def names(text: str) -> list[str]:
    """Comma- or space-separated names."""
    return text.replace(",", " ").split()


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; empty knobs (as make passes them) count as not given."""
    parser = _Parser(prog="python -m locustfiles.sweep", description="Run a plan against running arms.")
    add = parser.add_argument
    add(
        "--plan", default="load", help=f"a plan by name ({', '.join(plan_names())}) or a path to a .toml file"
    )
    add("--arms", help='"name=url[;key=value…] …" (default: FACEOFF_ARMS)')
    add("--users", type=wholes, help="levels instead of the plan's: 16 or 1,4,16")
    add("--workloads", type=names, help="only these of the plan's workloads")
    add("--repeats", type=whole)
    add("--sessions", type=whole, help="measured sessions per user (default: the plan's, else chosen)")
    add("--seed", type=natural, help="default: fresh, recorded in the manifest")
    add("--model", help="default: the one that each arm lists")
    add("--out", type=Path, help="folder of the run (default: results/<UTC stamp>-<plan>)")
    add("--profile", help="where the arms run, for the record")
    add("--clock-scale", type=scale, help="model seconds per wall second of simulated arms (default: chosen)")
    add("--corpus", type=Path, help="text file to build prompts from (default: the one built in)")
    add("--swap", action="store_true", help="every arm on every device: the arms are started anew in between")
    add("--parallel-arms", action="store_true", help="load arms on devices of their own at the same time")
    add("--check", action="store_true", help="check plan and options, ask no server, and end")
    add("--dry-run", action="store_true", help="list the cells and the time they take, load nothing")
    given: list[str] = []
    values = list(argv)
    while values:
        if len(values) > 1 and values[0].startswith("--") and values[1] == "":
            del values[:2]
        else:
            given.append(values.pop(0))
    args = parser.parse_args(given)
    args.argv = given
    args.arms = args.arms or os.environ.get("FACEOFF_ARMS", "")
    args.profile = args.profile or os.environ.get("FACEOFF_PROFILE") or None
    args.model = args.model or None
    return args


def choose_arms(text: str) -> list[Arm]:
    """Arms of the specs; bare names are looked up in ``FACEOFF_ARMS``.

    Raises:
        ArmError: if there are none, or one is wrong.
    """
    running = {arm.split("=", 1)[0]: arm for arm in os.environ.get("FACEOFF_ARMS", "").split()}
    arms = parse_arms(" ".join(running.get(spec, spec) for spec in text.split()))
    if not arms:
        raise ArmError(
            'no arms: pass --arms "a=http://host:8001 b=http://host:8002", or start a profile\'s with make'
        )
    return arms


def dry_run(args: argparse.Namespace, plan: Plan) -> int:
    """Print the cells with their expected times; arms are probed where they answer."""
    records: list[ArmRecord] = []
    arms: list[Arm] = []
    try:
        arms = choose_arms(args.arms)
        order = [arm.name for arm in arms]
        records = probe_all(arms, args.model)[0]
        basis = "speeds as probed"
    except ArmError as error:
        order = [arm.name for arm in parse_arms(args.arms)] or ["cache", "mtp"]
        basis = f"nominal speeds, real time ({one_line(error, 160)})"
    if args.parallel_arms and arms:
        devices.check_parallel(arms)
    together = len(order) if args.parallel_arms else 1
    cells, speeds, notes = lay_out(plan, order, records, args.clock_scale, together=together)
    seconds = {cell.id: estimate.cell_seconds(cell, speeds[cell.arm]) for cell in cells}
    for cell in cells:
        scaled = f"  x{cell.clock_scale:g}" if cell.clock_scale != 1 else ""
        print(f"{cell.order + 1:>4}  {cell.id}  sessions {cell.sessions}{scaled}  {clock(seconds[cell.id])}")
    for note in notes:
        print(note)
    total = estimate.run_seconds(cells, seconds, args.parallel_arms)
    print(f"{len(cells)} cells, about {clock(total)}; {basis}")
    return 0


def sweep(args: argparse.Namespace, **stand_ins: Any) -> int:
    """Carry out the run; see the module's exit codes. Tests pass stand-ins for fields of ``Setup``."""
    plan = turn_knobs(
        load_plan(args.plan),
        users=args.users,
        workloads=args.workloads,
        repeats=args.repeats,
        sessions=args.sessions,
        seed=args.seed,
    )
    if args.parallel_arms and not args.dry_run:
        # Before servers start; how many arms there will be is known when they have started.
        most = max(cell.users for cell in expand(plan, ["any"]))
        devices.check_carried(max(2, len(args.arms.split())), most, *certificate(host_facts()["id"]))
    if args.check:
        return 0
    if args.swap:
        arms = choose_arms(args.arms)
        if not args.dry_run:
            devices.check_restartable(arms)
        plan.repeats = devices.whole_parts(plan.repeats, len(devices.placements(arms)))
    if args.dry_run:
        return dry_run(args, plan)
    arms = choose_arms(args.arms)
    if args.parallel_arms:
        devices.check_parallel(arms)
    folder = make_run_folder(plan.name, args.out)
    started = time.monotonic()
    run: Run | None = None
    try:
        setup = Setup(
            argv=args.argv,
            model=args.model,
            corpus=args.corpus,
            profile=args.profile,
            clock_scale=args.clock_scale,
            swap=args.swap,
            parallel_arms=args.parallel_arms,
            **stand_ins,
        )
        run = prepare(setup, plan, arms, folder)
        for note in run.manifest.notes:
            say(f"NOTE {one_line(note, 600)}")
        link_latest(folder)
        expected = estimate.run_seconds(run.manifest.cells, run.estimates, run.manifest.parallel_arms)
        total = len(run.manifest.cells)
        say(f"{total} cells, about {clock(expected)}, into {folder}; seed {run.manifest.seed}")
        results = run_all(run)
        return finish(run, results, time.monotonic() - started)
    except KeyboardInterrupt:
        if run is None:
            say("\nfaceoff: interrupted before the load")
        else:
            done, total = complete_cells(folder), len(run.manifest.cells)
            say(
                f"\nfaceoff: interrupted: {done} of {total} cells complete; finished attempts are in {folder}"
            )
        return 130
    finally:
        drop_unstarted(folder)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None, **stand_ins: Any) -> int:
    """Run the command line; user mistakes end in one line."""
    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _interrupt)
    try:
        return sweep(parse(sys.argv[1:] if argv is None else argv), **stand_ins)
    except (PlanError, ArmError) as error:
        say(f"faceoff: {error}")
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        say(f"faceoff: cannot write{where}: {error.strerror or error}; free space there or pass --out")
    except KeyboardInterrupt:
        say("\nfaceoff: interrupted before the load")
        return 130
    return 2


if __name__ == "__main__":
    sys.exit(main())
