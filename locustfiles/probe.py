"""Know the arm: what each server is seen to be before the load starts.

What an arm is, is what the probe found; where that differs from what its name or its env file declares, the
run says so in ``manifest.notes``, in the terminal and in the report.
"""

from __future__ import annotations

import math
import random
import re
import secrets
from collections.abc import Callable, Collection, Sequence
from typing import Any

from locustfiles.arm_http import ArmHttp, Metrics, Reply, one_line
from locustfiles.arms import Arm, ArmError
from locustfiles.body import OPTIONAL_FIELDS, chat_body
from locustfiles.fingerprint import server_arguments
from locustfiles.records import ArmProbe

DEFAULT_BLOCK = 16
#: Tokens; a server that claims more does not know what it says.
LARGEST_BLOCK = 65_536
#: Longer than two of the largest blocks known (hybrid models, 1600 tokens), where the size is not told; and
#: long enough for a prefill rate that is not all overhead.
SHORTEST_PROMPT = 8192
COLD_OUTPUT = 96
#: Words of the first, short request; it also tells roughly how many tokens a word has.
SHORT_WORDS = 240

_WORDS: list[str] = (
    "river table morning window garden letter market bridge winter summer doctor kitchen paper music "
    "yellow quiet simple narrow early heavy bright clear small large open close carry follow answer begin "
    "under over near after before often never always people house street water number light story school"
).split()

Say = Callable[[str], None]


def words(count: int) -> str:
    """Random everyday words, new at every call: text that no cache has seen."""
    pick = random.Random(secrets.randbits(64))
    return " ".join(pick.choice(_WORDS) for _ in range(count))


def choose_model(arm: str, listed: Sequence[str], wanted: str | None) -> str:
    """The model to ask for.

    Raises:
        ArmError: if the wanted one is not listed, or none is wanted and the choice is not clear.
    """
    shown = ", ".join(one_line(name, 80) for name in listed[:8]) or "none"
    if wanted is not None:
        if wanted not in listed:
            raise ArmError(f"arm {arm}: no model {wanted!r}; it lists {shown}: set MODEL to one of these")
        return wanted
    if len(listed) != 1:
        raise ArmError(f"arm {arm}: lists {len(listed)} models ({shown}): set MODEL to one of these")
    return listed[0]


def refused_fields(http: ArmHttp, model: str, dropped: Collection[str] = ()) -> tuple[list[str], Reply]:
    """Optional request fields that the server refuses, and its reply to the request without them.

    A refusal is HTTP 400 or 422 that names the field. Fields are dropped one by one until the request goes
    through; each is then tried again alone, since a server may name innocent ones beside the culprit.

    Raises:
        ArmError: if the server refuses for another reason.
    """
    text = words(SHORT_WORDS)

    def attempt(without: Collection[str]) -> Reply:
        salt = secrets.token_hex(16)
        messages = [{"role": "user", "content": text}]
        return http.chat(chat_body(model, messages, 2, cache_salt=salt, dropped=without))

    found: list[str] = []
    reply = attempt(dropped)
    while not reply.ok:
        named = _named_field(reply, [name for name in OPTIONAL_FIELDS if name not in {*dropped, *found}])
        if named is None:
            raise ArmError(
                f"arm {http.arm.name}: a plain chat request was refused, HTTP {reply.status}: "
                f"{one_line(reply.message)}"
            )
        found.append(named)
        reply = attempt([*dropped, *found])
    for name in found[:-1]:
        rest = [other for other in found if other != name]
        again = attempt([*dropped, *rest])
        if again.ok:
            found, reply = rest, again
    return found, reply


def _named_field(reply: Reply, candidates: Sequence[str]) -> str | None:
    """The candidate that a refusal names: its ``param``, pydantic's ``loc``, else the first in its words."""
    if reply.status not in (400, 422):
        return None
    error = reply.body.get("error")
    places: list[Any] = [error.get("param") if isinstance(error, dict) else None]
    detail = reply.body.get("detail")
    for item in detail if isinstance(detail, list) else []:
        if isinstance(item, dict) and isinstance(item.get("loc"), list):
            places.extend(item["loc"])
    for place in places:
        for name in candidates:
            if isinstance(place, str) and re.search(rf"\b{name}\b", place):
                return name
    spots = [
        (match.start(), name) for name in candidates if (match := re.search(rf"\b{name}\b", reply.message))
    ]
    return min(spots)[1] if spots else None


def probe_arm(
    arm: Arm, *, model: str | None = None, dropped: Collection[str] = (), say: Say = lambda line: None
) -> tuple[ArmProbe, list[str]]:
    """Probe one arm: about six short requests. Returns what was seen and remarks.

    ``dropped`` holds fields that other arms refused already. Durations are model time.

    Raises:
        ArmError: unreachable, no such model, or it refuses plain requests.
    """
    http = ArmHttp(arm)
    try:
        return _probe(http, model, dropped, say)
    finally:
        http.close()


def _probe(
    http: ArmHttp, wanted: str | None, dropped: Collection[str], say: Say
) -> tuple[ArmProbe, list[str]]:
    arm = http.arm
    say(f"probing {arm.name} at {arm.url}")
    why = http.health()
    if why is not None:
        raise ArmError(why if why.startswith("arm ") else f"arm {arm.name}: not healthy at {arm.url}: {why}")
    entries = http.models()
    listed = [entry["id"] for entry in entries]
    model = choose_model(arm.name, listed, wanted)
    version = http.version()
    simulated = version.get("simulated") is True
    probe = ArmProbe(
        models=listed,
        model=model,
        version=one_line(version["version"], 80) if isinstance(version.get("version"), str) else None,
        simulated=simulated,
        clock_scale=_scale(version.get("clock_scale")) if simulated else 1.0,
        tokenize=http.tokenizes(model),
        server_args=server_arguments(arm.log),
    )
    for entry in entries:
        if entry["id"] == model and type(entry.get("max_model_len")) is int:
            probe.max_model_len = entry["max_model_len"]
        if entry["id"] == model and isinstance(entry.get("root"), str):
            probe.root = one_line(entry["root"], 200)
    before = http.metrics()
    probe.cache_config = _cache_config(before)
    probe.block_size = _block_size(before)
    probe.dropped_fields, first = refused_fields(http, model, dropped)
    dropped = [*dropped, *probe.dropped_fields]
    probe.cache_salt = "cache_salt" not in dropped
    notes = [f"arm {arm.name}: refuses {name}; it is dropped on every arm" for name in probe.dropped_fields]
    notes += _probe_cache(
        http, probe, dropped, tokens_per_word=(first.prompt_tokens or 1.5 * SHORT_WORDS) / SHORT_WORDS
    )
    notes += _read_counters(arm.name, probe, before, http.metrics())
    if len(arm.servers) > 1:
        # Three requests to a pool met whichever of its servers; a follow-up may meet another one.
        probe.prefix_caching = None
    return probe, notes


def _scale(value: object) -> float:
    """A simulator's clock scale, 1 where it is nothing that a clock could have."""
    return float(value) if isinstance(value, int | float) and 0 < value <= 1000 else 1.0


def _cache_config(readings: Sequence[Metrics | None]) -> dict[str, str]:
    for reading in readings:
        if reading is not None and (labels := reading.labels("vllm:cache_config_info")):
            return {one_line(name, 60): one_line(value, 200) for name, value in labels.items()}
    return {}


def _block_size(readings: Sequence[Metrics | None]) -> int | None:
    """The largest block size of the arm's servers, as they give it."""
    sizes = [
        int(size)
        for reading in readings
        if reading is not None
        and (size := reading.labels("vllm:cache_config_info").get("block_size", "")).isdecimal()
        and 0 < int(size[:8]) <= LARGEST_BLOCK
    ]
    return max(sizes, default=None)


def _probe_cache(
    http: ArmHttp, probe: ArmProbe, dropped: Collection[str], tokens_per_word: float
) -> list[str]:
    """One cold prompt of more than two blocks, sent three times; then once more under another salt."""
    notes: list[str] = []
    assert probe.model is not None
    block = probe.block_size or DEFAULT_BLOCK
    wanted = max(math.ceil(2.25 * block) + 64, SHORTEST_PROMPT)
    if probe.max_model_len is not None:
        wanted = min(wanted, probe.max_model_len - COLD_OUTPUT - 32)
    messages = [{"role": "user", "content": ""}]

    def send(salt: str, output: int) -> Reply:
        reply = http.chat(chat_body(probe.model or "", messages, output, cache_salt=salt, dropped=dropped))
        if not reply.ok:
            raise ArmError(
                f"arm {http.arm.name}: the probe's prompt of about {wanted} tokens was refused, "
                f"HTTP {reply.status}: {one_line(reply.message)}"
            )
        return reply

    for _ in range(2):  # once more where words turn out to have fewer tokens than the short request had
        messages[0]["content"] = words(max(8, int(wanted / tokens_per_word)))
        salt = secrets.token_hex(16)
        cold = send(salt, COLD_OUTPUT)
        if cold.prompt_tokens is None or cold.prompt_tokens > 2 * block or wanted <= 2 * block:
            break
        tokens_per_word *= cold.prompt_tokens / wanted
    replies = [cold, send(salt, 2), send(salt, 2)]
    probe.cached_tokens_probe = [reply.cached_tokens for reply in replies]
    if cold.first_s:
        probe.prefill_seconds = cold.first_s * probe.clock_scale
        probe.prefill_tokens = cold.prompt_tokens
    if cold.first_s is not None and cold.last_s is not None and (cold.output_tokens or 0) > 1:
        decode_s = (cold.last_s - cold.first_s) * probe.clock_scale
        if decode_s > 0:
            probe.decode_tokens_per_second = ((cold.output_tokens or 0) - 1) / decode_s
    if any(reply.cached_tokens for reply in replies[1:]):
        probe.prefix_caching = True
        if probe.cache_salt and send(secrets.token_hex(16), 1).cached_tokens:
            probe.cache_salt = False
            notes.append(
                f"arm {http.arm.name}: takes cache_salt but shares its cache across salts; "
                "a nonce line heads every prompt instead, on every arm"
            )
    elif cold.prompt_tokens is not None and cold.prompt_tokens <= 2 * block:
        notes.append(
            f"arm {http.arm.name}: prefix caching could not be probed: {cold.prompt_tokens} tokens fit its"
            f" limits, more than two blocks of {block} are needed"
        )
    elif any(reply.cached_tokens is not None for reply in replies):
        probe.prefix_caching = False
    if cold.cached_tokens:
        notes.append(
            f"arm {http.arm.name}: a prompt never sent before came back with {cold.cached_tokens} cached"
            " tokens; its figures for cached tokens are not to be trusted"
        )
    return notes


def _read_counters(
    arm: str, probe: ArmProbe, before: Sequence[Metrics | None], after: Sequence[Metrics | None]
) -> list[str]:
    """Prefix caching (where usage did not tell) and speculation from the servers' counters."""
    pairs = [
        (old, new) for old, new in zip(before, after, strict=True) if old is not None and new is not None
    ]
    if not pairs:
        return [f"arm {arm}: no /metrics; speculation and server-side figures stay unknown"]

    def rise(name: str) -> float | None:
        rises = [
            new_total - (old.total(name) or 0.0)
            for old, new in pairs
            if (new_total := new.total(name)) is not None
        ]
        return sum(rises) if rises else None

    hits = rise("vllm:prefix_cache_hits")
    if probe.prefix_caching is None and hits is not None and len(probe.cached_tokens_probe) == 3:
        long_enough = (probe.prefill_tokens or 0) > 2 * (probe.block_size or DEFAULT_BLOCK)
        probe.prefix_caching = True if hits > 0 else False if long_enough else None
    has_counters = [new.total("vllm:spec_decode_num_drafts") is not None for _, new in pairs]
    if any(has_counters) != all(has_counters):
        return [f"arm {arm}: its backends differ, only some of them speculate"]
    probe.speculative = all(has_counters)
    drafts, accepted = rise("vllm:spec_decode_num_drafts"), rise("vllm:spec_decode_num_accepted_tokens")
    proposed = rise("vllm:spec_decode_num_draft_tokens")
    if drafts and proposed is not None:
        probe.drafts = proposed / drafts
    if drafts and accepted is not None:
        probe.acceptance_length = 1 + accepted / drafts
    return []
