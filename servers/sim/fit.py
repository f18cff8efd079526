"""``python -m servers.sim.fit``: calibrations from published or measured numbers.

``article``  fits the shipped constants to the reference case, shows every residual; ``--write`` saves them.
``table``    shows the residuals of a calibration as it stands.
``points``   fits a calibration to a few measured points of your own server (see docs/simulator.md).

One set of constants for all numbers. The objective (``targets.objective``) sums squared relative errors in
units of their tolerance (7 % for one session, 40 % under concurrency), with a steeper rise near the
tolerance, plus a weak pull (one unit for a factor of e^4) to the starting values, which keeps constants that
no number speaks of where they were.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from .calibration import Calibration, CalibrationError, load
from .options import CALIBRATION, OptionError
from .points import PointsError, point_targets, read_points
from .search import pattern_search
from .targets import Results, Target, article_targets, objective

#: What the article's numbers speak of, and rough values to start from and to be pulled to. Not among them:
#: the cost of a decoding request and of its context (no absolute rate under concurrency was published), and
#: the cost of attention in prefill (the published numbers contradict each other about it), which follows from
#: the shape of the model: about 0.39 MFLOP per pair of positions beside 54 GFLOP per token.
ARTICLE_CONSTANTS: dict[str, float] = {
    "request.fixed_s": 0.25,
    "request.caching_s": 0.5,
    "prefill.token_s": 1.1e-4,
    "prefill.chunk_s": 0.01,
    "decode.step_s": 0.02,
    "draft.step_s": 0.003,
    "draft.seq_s": 2e-4,
}
_PULL = 1 / 4


def get_constant(calibration: Calibration, name: str) -> float:
    """Value of ``section.key``."""
    section, key = name.split(".")
    return float(getattr(getattr(calibration, section), key))


def with_constants(calibration: Calibration, names: Sequence[str], values: Sequence[float]) -> Calibration:
    """A copy with these constants."""
    copy = msgspec.convert(msgspec.to_builtins(calibration), Calibration)
    for name, value in zip(names, values, strict=True):
        section, key = name.split(".")
        setattr(getattr(copy, section), key, value)
    return copy


def fit(
    calibration: Calibration, names: Sequence[str], targets: Sequence[Target], *, smallest: float = 0.01
) -> tuple[Calibration, float]:
    """The calibration whose constants ``names`` fit ``targets`` best, and its objective."""
    # A constant that is 0 could not move on a logarithmic axis.
    start = [math.log(max(get_constant(calibration, name), 1e-12)) for name in names]

    def cost(point: Sequence[float]) -> float:
        pull = sum(((now - then) * _PULL) ** 2 for now, then in zip(point, start, strict=True))
        return objective(with_constants(calibration, names, [math.exp(x) for x in point]), targets) + pull

    def progress(step: float, best: float) -> None:
        print(f"  step {step:.3f}: objective {best:.3f}", file=sys.stderr, flush=True)

    point, best = pattern_search(cost, start, smallest=smallest, progress=progress)
    return with_constants(calibration, names, [float(f"{math.exp(x):.4g}") for x in point]), best


def residuals(calibration: Calibration, targets: Sequence[Target]) -> list[str]:
    """A markdown table: given, simulated, difference, tolerance."""
    results = Results(calibration)
    lines = ["| what | given | simulated | difference | allowed |", "|---|---:|---:|---:|---:|"]
    for target in targets:
        value = target.simulate(results)
        given = f"{target.low:g}" if target.low == target.high else f"{target.low:g}–{target.high:g}"
        off = math.expm1(target.error(value))
        allowed = f"{target.tolerance:.0%}" if target.fitted else "not fitted"
        unit = f" {target.unit}" if target.unit else ""
        lines.append(f"| {target.name} | {given}{unit} | {value:.3g}{unit} | {off:+.0%} | {allowed} |")
    return lines


def to_toml(calibration: Calibration) -> str:
    """A calibration as the text of a file."""
    lines = [f"source = {msgspec.json.encode(calibration.source).decode()}"]
    for section, values in msgspec.to_builtins(calibration).items():
        if not isinstance(values, dict):
            continue
        lines += ["", f"[{section}]"]
        for key, value in values.items():
            if value is not None:
                lines.append(f"{key} = {msgspec.json.encode(value).decode()}")
    return "\n".join(lines) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m servers.sim.fit", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("article", "fit to the reference case"), ("table", "residuals of a calibration")):
        command = commands.add_parser(name, help=text)
        command.add_argument("--calibration", type=Path, default=CALIBRATION, help="where to start")
        if name == "article":
            command.add_argument("--write", type=Path, help="save the result to this file")
    command = commands.add_parser("points", help="fit to points measured on your own server")
    command.add_argument("points", type=Path)
    command.add_argument(
        "--calibration", type=Path, default=CALIBRATION, help="base: model and starting values"
    )
    command.add_argument("--write", type=Path, help="save the result to this file")
    for command in commands.choices.values():
        command.add_argument(
            "--precision", type=float, default=0.01, help="last relative step of the search (default 0.01)"
        )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 for files that cannot be used."""
    arguments = _parser().parse_args(argv)
    try:
        calibration = load(arguments.calibration)
        targets, names = article_targets(), tuple(ARTICLE_CONSTANTS)
        if arguments.command == "article":
            calibration = with_constants(calibration, names, list(ARTICLE_CONSTANTS.values()))
        elif arguments.command == "points":
            measured = read_points(arguments.points)
            calibration, targets, found = point_targets(measured, calibration)
            names = tuple(found)
        if arguments.command != "table":
            calibration, best = fit(calibration, names, targets, smallest=arguments.precision)
            print(f"objective: {best:.3f}\n")
        print("\n".join(residuals(calibration, targets)))
        if arguments.command != "table":
            text = to_toml(calibration)
            if arguments.write is None:
                print("\n" + text)
            else:
                arguments.write.write_text(text)
                print(f"\nwrote {arguments.write}")
    except (CalibrationError, OptionError, PointsError) as error:
        print(f"servers.sim.fit: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"servers.sim.fit: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
