"""Checks of the arms: each is what it claims to be, its cache hits where it should and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence

from locustfiles.records import ArmRecord, Attempt, parse_point
from reports import metrics
from reports.capacity import KV_FULL
from reports.check import DOUBT, Check, Finding, by_level, roll_up
from reports.devices import balanced, swap_text, swapped
from reports.proxies import pool_text
from reports.read import Cell, Run

HIT_SHARE = 0.95
"""Share of follow-ups that must hit."""
LOST_BLOCKS = 2
"""Blocks that a hit may fall short of the shared text: the last, partial one, and one that speculative
decoding gives up."""
POOL_SHARE = 0.9
"""Live contexts above this share of the KV pool explain missing hits by eviction."""

FEATURES = "declared features on, and only those"


def observed(run: Run, arm: ArmRecord) -> tuple[bool | None, bool | None]:
    """(prefix caching, speculative decoding) as the probe and the cells' counters show."""
    speculative = arm.probe.speculative
    drafted = [
        cell.server.increase("vllm:spec_decode_num_drafts")
        for cell in run.finished
        if cell.record.arm == arm.name
    ]
    if any(drafted):
        speculative = True
    caching = arm.probe.prefix_caching
    return hits_seen(run, arm) if caching is None else caching, speculative


def hits_seen(run: Run, arm: ArmRecord) -> bool | None:
    """Whether follow-ups hit, where the probe could not tell about caching.

    None unless at least one had more than two blocks to hit: short prompts miss with caching as well.
    """
    block = arm.probe.block_size
    told = [
        row.cached_tokens
        for cell in run.finished
        if cell.record.arm == arm.name and cell.record.workload != "single_turn"
        for row, shared in shared_tokens(cell)
        if row.cached_tokens is not None and block is not None and shared > LOST_BLOCKS * block
    ]
    return any(cached > 0 for cached in told) if told else None


def features_text(features: tuple[bool | None, bool | None], unknown: str) -> str:
    """``"prefix caching on, speculative decoding off"``."""
    words = {True: "on", False: "off", None: unknown}
    return f"prefix caching {words[features[0]]}, speculative decoding {words[features[1]]}"


def features_as_declared(run: Run) -> list[Check]:
    """Declared features are really on, and only those."""
    checks: list[Check] = []
    for arm in run.manifest.arms:
        if arm.is_proxy:
            value = f"not checked: {pool_text(run, arm)}; features are theirs"
            checks.append(Check(FEATURES, arm.name, None, value, "observed as declared"))
            continue
        said, seen = arm.claims, observed(run, arm)
        pairs = [(s, o) for s, o in zip(said, seen, strict=True) if s is not None]
        wrong = any(o is not None and s != o for s, o in pairs)
        blind = any(o is None for _, o in pairs)
        if said == (None, None):
            value = f"nothing declared; observed {features_text(seen, 'unknown')}"
        else:
            value = f"declared {features_text(said, 'unsaid')}; observed {features_text(seen, 'unknown')}"
        ok = False if wrong else None if blind else True
        if ok is None:
            value = f"not checked: {value}"
        checks.append(Check(FEATURES, arm.name, ok, value, "observed as declared"))
    return checks


def arms_alike(run: Run) -> list[Check]:
    """Arms differ from the base in nothing but what they declare."""
    base = run.arm(run.arms[0])
    checks: list[Check] = []
    for name in run.arms[1:]:
        arm = run.arm(name)
        if base is None or arm is None:
            continue
        ours, theirs = fingerprint(arm), fingerprint(base)
        known = [key for key in ours if ours[key] is not None and theirs.get(key) is not None]
        factors = {
            key for key in ours if arm.declared.get(key) != base.declared.get(key)
        }  # fmt: skip
        off = [key for key in known if ours[key] != theirs[key] and key not in factors]
        text = "; ".join(f"{key} {ours[key]}, {base.name} has {theirs[key]}" for key in off)
        limit = f"as {base.name} in model, version, context length and KV type, unless declared"
        if not known:
            checks.append(Check("arms alike", name, None, "not checked: the probe tells nothing", limit))
            continue
        checks.append(Check("arms alike", name, not off, text or f"same {', '.join(known)}", limit))
    return checks


def fingerprint(arm: ArmRecord) -> dict[str, str | None]:
    """What must not differ between arms unless it is what is compared; None = unknown."""
    probe = arm.probe
    return {
        "model": probe.model,
        "version": probe.version,
        "max_model_len": None if probe.max_model_len is None else str(probe.max_model_len),
        "cache_dtype": probe.cache_config.get("cache_dtype"),
        "simulated": str(probe.simulated).lower(),
    }


def same_device(run: Run) -> list[Check]:
    """Arms on different devices: a slower device would look like a slower configuration."""
    if swapped(run):
        limit = "each arm on each device equally often"
        return [Check("same device", "all", balanced(run), swap_text(run), limit + DOUBT, withholds=False)]
    devices = {arm.name: arm.declared.get("device") for arm in run.manifest.arms}
    told = sorted({device for device in devices.values() if device})
    if run.simulated or len(told) < 2:
        return []
    text = ", ".join(f"{name} on {device}" for name, device in devices.items() if device)
    limit = f"one device, or a swap control{DOUBT}"
    return [Check("same device", "all", False, text, limit, withholds=False)]


def cold_prompts(run: Run) -> list[Check]:
    """Prompts that nobody had sent before came back with no cached tokens (less than one block)."""
    checks: list[Check] = []
    for name in run.arms:
        arm = run.arm(name)
        block = arm.probe.block_size if arm else None
        limit = f"< {block} cached tokens (one block)" if block else "0 cached tokens"
        findings = {level: judge_cold(cells, block) for level, cells in by_level(run, name).items()}
        checks.append(roll_up("cold prompts cold", name, limit, findings))
    return checks


def judge_cold(cells: Sequence[Cell], block: int | None) -> Finding:
    """Cached tokens beyond what the cell itself shares on purpose."""
    workload = cells[0].record.workload
    rows = [row for cell in cells for row in metrics.of_turn(metrics.ok(cell.measured), 1)]
    shared = prefix_tokens(cells[0]) if workload == "shared_prefix" else 0
    told = [row.cached_tokens - shared for row in rows if row.cached_tokens is not None]
    if not told:
        counted = [cell.server.increase("vllm:prefix_cache_hits") for cell in cells]
        hits = [value for value in counted if value is not None]
        if workload != "single_turn" or not hits:
            return Finding(None, "the server tells no cached tokens")
        return Finding(max(hits) == 0, f"{max(hits):.0f} hits by the server's counter", max(hits))
    bad = sum(cached >= (block or 1) for cached in told)
    most = max(0, *told)
    return Finding(bad == 0, f"{bad} of {len(told)} cold prompts hit, at most {most} tokens", bad)


def prefix_tokens(cell: Cell) -> int:
    """Length of the prefix that a ``shared_prefix`` cell shares; 0 if the point does not say."""
    try:
        return int(parse_point(cell.record.point).get("prefix", "0"))
    except ValueError:
        return 0


def follow_ups(run: Run) -> list[Check]:
    """With caching, follow-ups hit what the block size allows; without it, nothing hits."""
    checks: list[Check] = []
    for name in run.arms:
        arm = run.arm(name)
        if arm is None:
            continue
        if arm.is_proxy:
            value = f"not checked: {pool_text(run, arm)}; which one a follow-up meets is up to the balancing"
            checks.append(Check("follow-ups hit", name, None, value, "what the balancing allows"))
            continue
        caching = observed(run, arm)[0]
        findings = {
            level: found
            for level, cells in by_level(run, name).items()
            if (found := judge_follow_ups(cells, arm, caching)) is not None
        }
        limit = (
            f"hits within {LOST_BLOCKS} blocks of what was shared, in >= {HIT_SHARE:.0%}"
            if caching
            else "no hits (caching off)"
        )
        checks.append(roll_up("follow-ups hit", name, limit, findings))
    return checks


def judge_follow_ups(cells: Sequence[Cell], arm: ArmRecord, caching: bool | None) -> Finding | None:
    """One level; None for workloads without anything to hit."""
    if cells[0].record.workload == "single_turn":
        return None
    pairs = [pair for cell in cells for pair in shared_tokens(cell)]
    told = [(row.cached_tokens, shared) for row, shared in pairs if row.cached_tokens is not None]
    if caching is None:
        return Finding(None, "the probe could not tell whether caching is on")
    if not told:
        return Finding(None, "the server tells no cached tokens")
    if not caching:
        bad = sum(cached > 0 for cached, _ in told)
        return Finding(bad == 0, f"{bad} of {len(told)} hit although caching is off", bad)
    block = arm.probe.block_size
    if block is None:
        return Finding(None, "the block size is unknown")
    hits = sum(cached >= shared - LOST_BLOCKS * block for cached, shared in told)
    share = hits / len(told)
    text = f"{share:.0%} of {len(told)} hit"
    if share < HIT_SHARE and (why := eviction(cells, arm, block)):
        return Finding(True, f"{text}, the rest evicted ({why})", 1 - share)
    return Finding(share >= HIT_SHARE, text, 1 - share)


def shared_tokens(cell: Cell) -> list[tuple[Attempt, int]]:
    """Measured attempts with the number of their prompt's tokens that the server had seen before."""
    if cell.record.workload == "shared_prefix":
        return [(row, prefix_tokens(cell)) for row in metrics.ok(cell.measured)]
    good = metrics.ok(cell.attempts)
    prompts = {(row.user, row.session, row.turn): row.prompt_tokens for row in good}
    found: list[tuple[Attempt, int]] = []
    for row in metrics.ok(cell.measured):
        before = prompts.get((row.user, row.session, row.turn - 1))
        if before is not None:
            found.append((row, before))
    return found


def eviction(cells: Sequence[Cell], arm: ArmRecord, block: int) -> str | None:
    """Why blocks may have been evicted, if they may: a pool that is full or too small for live contexts."""
    blocks = arm.probe.cache_config.get("num_gpu_blocks", "")
    lengths = [(row.prompt_tokens or 0) + (row.output_tokens or 0) for cell in cells for row in cell.measured]
    live = cells[0].record.users * max(lengths, default=0)
    if blocks.isdigit() and live > POOL_SHARE * int(blocks) * block:
        return f"{live} tokens of live context, pool of {int(blocks) * block}"
    use = max((metrics.kv_use_max(cell) or 0 for cell in cells), default=0)
    return f"KV use {use:.0%}" if use >= KV_FULL else None
