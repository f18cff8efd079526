"""What an arm is made of: its claims against what was seen, its settings against those of the other arms.

Settings come from where a server reveals them: ``/v1/models``, ``/version``, the labels of
``vllm:cache_config_info``, and the line of arguments in vLLM's log.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from locustfiles.arm_http import one_line
from locustfiles.records import ArmRecord

#: Draft tokens a step may be off from the declared number: the last step of an answer may have fewer.
DRAFTS_OFF = 0.5
#: Bytes at the start of a log in which the arguments stand, and the longest line of them that is read.
LOG_HEAD = 256 * 1024
LONGEST_LINE = 20_000
_ARGUMENTS = re.compile(r"non-default args: (\{.*\})\s*$", re.MULTILINE)
#: Objects as Python shows them: no literals.
_OBJECT = re.compile(r"<[^<>'\"]*>")
#: Names whose values are never recorded, wherever they stand; values that look like secrets by themselves.
_SECRET_NAME = re.compile(
    r"(^|[_.\- ])(api_?keys?|keys?|token|secrets?|passw(or)?d|auth|authorization|credentials?|headers?)"
    r"($|[_.\- ])",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(r"\b(sk|hf|ghp)[-_]\w{6,}|\bbearer\s+\S+|(?<=://)[^/@\s]+@", re.IGNORECASE)
LEFT_OUT = "(left out)"


def server_arguments(log: Path | None) -> dict[str, str]:
    """vLLM's arguments that are not the default ones, without secrets; {} if its log does not tell."""
    if log is None:
        return {}
    try:
        if not log.is_file():
            return {}
        with log.open("rb") as file:
            text = file.read(LOG_HEAD).decode("utf-8", errors="replace")
        lines = [line for line in _ARGUMENTS.findall(text) if len(line) <= LONGEST_LINE]
        values = _value(ast.parse(_OBJECT.sub("'(object)'", lines[-1]), mode="eval").body) if lines else {}
    except (OSError, ValueError, SyntaxError, MemoryError, RecursionError):
        # No such log, or no Python in it: then nothing is known, which is what {} says.
        return {}
    if not isinstance(values, dict):
        return {}
    return {one_line(name, 60): one_line(value, 200) for name, value in values.items()}


def _value(node: ast.expr) -> object:
    """The value of a literal, secrets and whatever is no literal left out."""
    if isinstance(node, ast.Dict):
        found: dict[str, object] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            name = str(_value(key)) if key is not None else "**"
            found[name] = LEFT_OUT if _SECRET_NAME.search(name) else _value(value)
        return found
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [_value(item) for item in node.elts]
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return "(object)"
    return _SECRET_VALUE.sub(LEFT_OUT, value) if isinstance(value, str) else value


def declared_notes(record: ArmRecord) -> list[str]:
    """Where an arm is not what it is declared to be, or what its name says."""
    notes: list[str] = []
    probe = record.probe
    caching, drafting = record.claims
    shout = f"ARM {record.name} IS NOT WHAT IT SAYS:"
    source = {
        name: "declared" if name in record.declared else "its name says" for name in ("caching", "drafts")
    }
    if caching is not None and probe.prefix_caching is not None and caching != probe.prefix_caching:
        notes.append(
            f"{shout} {source['caching']} prefix caching {_on(caching)}, "
            f"observed {_on(probe.prefix_caching)} (one prompt sent three times, cached tokens "
            f"{_shown(probe.cached_tokens_probe)})"
        )
    count = int(record.declared.get("drafts", "0"))
    said = f"{source['drafts']} {f'{count} draft tokens' if count else 'drafts' if drafting else 'no drafts'}"
    if drafting is not None and probe.speculative is not None and drafting != probe.speculative:
        seen = "speculative decoding on" if probe.speculative else "no speculative decoding"
        notes.append(f"{shout} {said}, observed {seen}")
    elif count and probe.drafts is not None and abs(probe.drafts - count) > DRAFTS_OFF:
        notes.append(f"{shout} {said}, observed {probe.drafts:.1f} a step")
    for feature, name, claimed, observed in (
        ("prefix caching", "caching", caching, probe.prefix_caching),
        ("speculative decoding", "drafts", drafting, probe.speculative),
    ):
        if claimed is not None and observed is None:
            told = f"declared {record.declared[name]}" if name in record.declared else "as its name says"
            notes.append(f"arm {record.name}: could not tell whether {feature} is on ({told})")
    return notes


def _on(value: bool) -> str:
    return "on" if value else "off"


def _shown(values: Sequence[int | None]) -> str:
    return ", ".join("unknown" if value is None else str(value) for value in values)


#: Settings that follow from the size of the machine or only name things.
_ALWAYS_FREE = {
    *("engine", "model_name", "num_gpu_blocks", "num_cpu_blocks"),
    *("host", "port", "model", "model_tag", "served_model_name"),  # the checkpoint is compared as ``root``
}
#: Blocks, and with them the pool, come out differently where states of drafts or caches take their share.
_BLOCKS = {
    "block_size",
    "effective_attention_block_size",
    "hash_block_size",
    "kv_cache_max_concurrency",
    "kv_cache_size_tokens",
    "mamba_block_size",
    "mamba_page_size_padded",
    "prefix_match_unit",
}
#: Settings that differ of necessity where a declared factor differs.
_FREE_WITH = {
    "caching": {"enable_prefix_caching", "mamba_cache_mode"} | _BLOCKS,
    "drafts": {"speculative_config", "per_request_spec_decode_metrics"} | _BLOCKS,
}


def difference_notes(records: Sequence[ArmRecord]) -> list[str]:
    """Where two arms differ beyond their declared factors: the comparison then measures that too."""
    notes: list[str] = []
    # A proxy's settings are its servers'.
    for one, two in combinations([record for record in records if not record.is_proxy], 2):
        free = set(_ALWAYS_FREE)
        for factor, settings in _FREE_WITH.items():
            if one.declared.get(factor) != two.declared.get(factor):
                free |= settings
        found: list[str] = []
        for name in ("model", "root", "version", "max_model_len"):
            a, b = getattr(one.probe, name), getattr(two.probe, name)
            if a != b and a is not None and b is not None:
                found.append(f"{name} {one_line(a, 80)} / {one_line(b, 80)}")
        if one.probe.cache_config and two.probe.cache_config:
            for name in sorted({*one.probe.cache_config, *two.probe.cache_config} - free):
                a, b = one.probe.cache_config.get(name), two.probe.cache_config.get(name)
                if a != b:
                    found.append(f"{one_line(name, 60)} {one_line(a, 60)} / {one_line(b, 60)}")
        if one.probe.server_args and two.probe.server_args:
            for name in sorted({*one.probe.server_args, *two.probe.server_args} - free):
                a, b = (arm.probe.server_args.get(name, "default") for arm in (one, two))
                if a != b:
                    found.append(f"{name} {a} / {b}")
        if found:
            notes.append(f"arms {one.name} / {two.name} differ beyond what is declared: " + "; ".join(found))
    return notes
