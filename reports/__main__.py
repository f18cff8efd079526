"""``python -m reports build RUN``: re-judge a run from its files and write summary, verdict and page."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from locustfiles.records import write_json
from reports import coarse
from reports.compare import DEFAULT_MARGIN, PRIMARY
from reports.judge import Options, judge
from reports.metrics import LATENCIES
from reports.page import to_html
from reports.read import ReportError, find_run, read_run
from reports.summary import COLUMNS, to_csv
from reports.terminal import show
from reports.verdict import to_verdict

COMMANDS = ("build", "check")


def parse_pairs(text: str, option: str, known: Sequence[str]) -> dict[str, float]:
    """``"ttft=2,tpot=0.05"`` -> ``{"ttft": 2.0, "tpot": 0.05}``.

    Raises:
        ReportError: naming what does not fit.
    """
    pairs: dict[str, float] = {}
    for item in text.split(","):
        name, sep, value = (part.strip() for part in item.partition("="))
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not sep or not math.isfinite(number) or number < 0:
            raise ReportError(f"{option}: {item!r} is not name=number")
        if name not in known:
            raise ReportError(f"{option}: {name!r} is not one of {', '.join(known)}")
        pairs[name] = number
    return pairs


def parser() -> argparse.ArgumentParser:
    """The command line."""
    root = argparse.ArgumentParser(prog="python -m reports", description="Judge a run from its files.")
    commands = root.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="check the options of build, before hours of load")
    build = commands.add_parser("build", help="write summary.csv, verdict.json and report.html (the default)")
    build.add_argument("run", help="run folder, a name below results/, or latest")
    for command in (check, build):
        add = command.add_argument
        add("--slo", default="", help="limits in seconds, e.g. ttft=2,tpot=0.05 (adds goodput)")
        add("--mix", default="", help="weights, e.g. multi_turn=0.7,single_turn=0.3")
        add(
            "--margin",
            default=str(DEFAULT_MARGIN),
            help="difference of practical importance, relative (default %(default)s)",
        )
    return root


def options_from(args: argparse.Namespace) -> Options:
    """Checked options.

    Raises:
        ReportError: on values that make no sense.
    """
    try:
        margin = float(args.margin)
    except ValueError:
        margin = math.nan
    if not 0 <= margin < 1:
        raise ReportError(f"--margin: {args.margin!r} is not a number from 0 to below 1 (0.05 = 5 %)")
    mix = parse_pairs(args.mix, "--mix", list(PRIMARY)) if args.mix else {}
    total = sum(mix.values())
    if mix and total <= 0:
        raise ReportError("--mix: the weights add up to 0")
    return Options(
        slo=parse_pairs(args.slo, "--slo", LATENCIES) if args.slo else {},
        mix={name: weight / total for name, weight in mix.items()},
        margin=margin,
    )


def write(path: Path, text: str) -> None:
    """Write atomically: a reader sees the old file or the whole new one."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def shown(path: Path) -> str:
    """Relative to where the user is, if below."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def build(args: argparse.Namespace, console: Console) -> int:
    """Judge one run folder.

    Raises:
        ReportError: no such run, nothing finished, or files that cannot be used.
    """
    options = options_from(args)
    folder = find_run(args.run)
    outputs = [folder / name for name in ("summary.csv", "verdict.json", "report.html")]
    if not (folder / "manifest.json").is_file() and (stats := coarse.find_stats(folder)):
        tables = [coarse.read_stats(path, folder) for path in stats]
        write(outputs[0], ",".join(COLUMNS) + "\n")
        write_json(outputs[1], coarse.coarse_verdict(folder))
        write(outputs[2], coarse.coarse_html(folder, tables))
        console.print(Text(f"coarse: {coarse.WHY}", style="yellow"))
    else:
        run = read_run(folder)
        if not run.finished:
            causes = sorted({cell.problem or "" for cell in run.unfinished})
            planned = f"{len(run.cells)} planned; {'; '.join(causes[:2])}"
            raise ReportError(f"{shown(folder)} has no finished cell yet ({planned})")
        judgement = judge(run, options)
        write(outputs[0], to_csv(judgement.summary))
        write_json(outputs[1], to_verdict(judgement))
        write(outputs[2], to_html(judgement))
        show(judgement, console)
    for path in outputs:
        console.print(shown(path), soft_wrap=True, markup=False, highlight=False)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] not in (*COMMANDS, "-h", "--help"):
        arguments.insert(0, "build")
    args = parser().parse_args(arguments)
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120
    console = Console(width=width)
    try:
        if args.command == "check":
            options_from(args)
            return 0
        return build(args, console)
    except ReportError as error:
        print(f"reports: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"reports: cannot write the report: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("reports: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
