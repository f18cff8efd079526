"""``report.html``: one self-contained file. Everything that came from servers or files is escaped."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jinja2
from markupsafe import Markup

from reports import metrics, words
from reports.article import beside
from reports.checks_arms import features_text, observed
from reports.classes import advantage_text, mean_over, roll_up
from reports.compare import PRIMARY
from reports.figures import draw_all
from reports.judge import JudgedCell, Judgement
from reports.metrics import QUANTILES
from reports.proxies import pool_text, serving
from reports.read import Cell
from reports.verdict import find_capacity, find_crossovers, to_verdict

#: Control characters (but tab and line end) and the marks that turn the direction of text around them.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(value: object) -> object:
    """Text without characters that act on a terminal or on the order of the text around them."""
    if isinstance(value, str):
        clean = _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", value)
        return Markup(clean) if isinstance(value, Markup) else clean
    return value


def environment() -> jinja2.Environment:
    """Templates with autoescape always on; an undefined name is an error, not an empty string."""
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("reports"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["value"] = words.value_text
    found.filters["tokens"] = words.tokens_text
    found.filters["percent"] = lambda share: "–" if share is None else f"{share:.0%}".replace("%", " %")
    return found


@dataclass(frozen=True)
class Explanation:
    """What the servers say about one arm at one level."""

    level: str
    arm: str
    hit_rate: float | None
    prefill: float | None
    acceptance: float | None
    kv_use: float | None
    preemptions: float | None
    pressure: str


@dataclass(frozen=True)
class Tally:
    """Where every attempt of one arm at one level went."""

    level: str
    arm: str
    measured: int
    ok: int
    failed: str
    warmup: int
    drain: int
    censored: int
    retried: int
    errors: list[str]


def level_name(level: tuple[str, str, int]) -> str:
    """``multi-turn conversations, 8K context, 16 users``."""
    workload, point, users = level
    return f"{words.workload_text(workload)}, {words.point_text(point)}, {words.users_text(users)}"


def explain(judgement: Judgement) -> list[Explanation]:
    """One row per level and arm."""
    run = judgement.run
    found: list[Explanation] = []
    for level in dict.fromkeys(cell.level for cell in run.finished):
        turn = PRIMARY.get(level[0], ("", None))[1]

        def prefill(cell: Cell, turn: int | None = turn) -> float | None:
            return metrics.uncached_prefill(metrics.of_turn(cell.measured, turn))

        def hits(cell: Cell, turn: int | None = turn) -> float | None:
            return metrics.hit_rate(cell, turn)

        for arm in run.arms:
            if (level, arm) not in judgement.pressures:
                continue
            found.append(
                Explanation(
                    level=level_name(level),
                    arm=arm,
                    hit_rate=mean_over(run, {level}, arm, hits),
                    prefill=mean_over(run, {level}, arm, prefill),
                    acceptance=mean_over(run, {level}, arm, metrics.acceptance_length),
                    kv_use=mean_over(run, {level}, arm, metrics.kv_use_max),
                    preemptions=mean_over(run, {level}, arm, metrics.preemptions),
                    pressure=judgement.pressures[(level, arm)].text,
                )
            )
    return found


def tally(judgement: Judgement) -> list[Tally]:
    """One row per level and arm."""
    run = judgement.run
    found: list[Tally] = []
    for level in dict.fromkeys(cell.level for cell in run.finished):
        for arm in run.arms:
            rows = [
                row
                for cell in run.finished
                if cell.level == level and cell.record.arm == arm
                for row in cell.attempts
            ]
            if not rows:
                continue
            measured = [row for row in rows if row.phase == "measure"]
            kinds = Counter(row.status for row in measured if row.status != "ok")
            errors = Counter(row.error for row in measured if row.error)
            found.append(
                Tally(
                    level=level_name(level),
                    arm=arm,
                    measured=len(measured),
                    ok=len(metrics.ok(measured)),
                    failed=", ".join(f"{count} {kind}" for kind, count in kinds.most_common()) or "0",
                    warmup=sum(row.phase == "warmup" for row in rows),
                    drain=sum(row.phase == "drain" for row in rows),
                    censored=sum(row.status == "censored" for row in rows),
                    retried=sum(row.retries > 0 for row in rows),
                    errors=[f"{count} × {error[:300]}" for error, count in errors.most_common(3)],
                )
            )
    return found


@dataclass(frozen=True)
class ArmLine:
    """Declared beside observed."""

    name: str
    url: str
    declared: str
    observed: str
    mismatch: bool
    facts: list[tuple[str, str]]


def arm_lines(judgement: Judgement) -> list[ArmLine]:
    """Every arm of the run, as declared and as observed."""
    run = judgement.run
    lines: list[ArmLine] = []
    for arm in run.manifest.arms:
        said, seen = arm.claims, observed(run, arm)
        pool = pool_text(run, arm) if arm.is_proxy else None
        probe = arm.probe
        facts = {
            "model": probe.model,
            "loaded from": probe.root if probe.root != probe.model else None,
            "version": probe.version,
            "device": arm.declared.get("device"),
            "context limit": probe.max_model_len,
            "block size": probe.block_size,
            "cached, sent three times": ", ".join(
                "unknown" if n is None else str(n) for n in probe.cached_tokens_probe
            ),
            "acceptance length": probe.acceptance_length and f"{probe.acceptance_length:.2f}",
            "fields it refused": ", ".join(probe.dropped_fields),
            "isolation": "cache_salt" if probe.cache_salt else "nonce line",
            "tokens counted by": "/tokenize" if probe.tokenize else "usage",
            "arguments": ", ".join(f"{name}={value}" for name, value in sorted(probe.server_args.items())),
        }
        lines.append(
            ArmLine(
                name=arm.name,
                url=arm.url,
                declared=features_text(said, "not said"),
                observed=pool or features_text(seen, "unknown"),
                mismatch=not pool
                and any(s is not None and o is not None and s != o for s, o in zip(said, seen, strict=True)),
                facts=[(name, str(value)) for name, value in facts.items() if value not in (None, "")],
            )
        )
    return lines


def ratio_text(cell: JudgedCell, arm: str) -> str:
    """``13.6 (11.9–15.2)``; a dash where there is none."""
    found = cell.against_base.get(arm)
    if found is None:
        return "–"
    if found.low is None or found.high is None:
        return f"{found.ratio:.3g} (no interval)"
    return f"{found.ratio:.3g} ({found.low:.3g}–{found.high:.3g})"


def to_html(judgement: Judgement) -> str:
    """The page's text."""
    run = judgement.run
    manifest = run.manifest
    verdict = to_verdict(judgement)
    scales = sorted({cell.done.clock_scale for cell in run.finished if cell.done})
    context: dict[str, Any] = {
        "run": run,
        "manifest": manifest,
        "arms": run.arms,
        "others": run.arms[1:],
        "simulated": run.simulated,
        "classes": roll_up(judgement),
        "range_text": words.range_text,
        "advice": verdict.recommendation,
        "mix_text": ", ".join(
            f"{words.workload_text(name)} {weight:.0%}" for name, weight in verdict.recommendation.mix.items()
        ),
        "crossovers": find_crossovers(judgement),
        "capacity": find_capacity(judgement),
        "checks": judgement.checks,
        "failed": [check for check in judgement.checks if check.failed and check.withholds],
        "doubts": [check for check in judgement.checks if check.failed and not check.withholds],
        "unchecked": [check for check in judgement.checks if check.ok is None],
        "primary": judgement.primary,
        "secondary": [cell for cell in judgement.cells if not cell.primary],
        "level_name": level_name,
        "metric_text": words.metric_text,
        "advantage_text": advantage_text,
        "ratio_text": ratio_text,
        "beside": beside(run),
        "served": serving(run),
        "explanations": explain(judgement),
        "tallies": tally(judgement),
        "arm_lines": arm_lines(judgement),
        # The only markup that is not escaped: drawn by matplotlib, which escapes its own texts.
        "drawings": [(drawing, Markup(drawing.svg)) for drawing in draw_all(judgement)],
        "alpha": judgement.alpha,
        "margin": judgement.options.margin,
        "slo": judgement.options.slo,
        "scales": ", ".join(f"{scale:g}" for scale in scales),
        "sampling": json.dumps(manifest.sampling, sort_keys=True),
        "plan_text": json.dumps(manifest.plan_toml, indent=1, sort_keys=True) if manifest.plan_toml else "",
        "quantiles": ", ".join(QUANTILES),
    }
    return environment().get_template("report.html.j2").render(context)
