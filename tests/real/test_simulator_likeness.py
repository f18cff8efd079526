"""The simulator beside a real vLLM: the same metrics page, the same refusals, the same shape of usage."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.real.conftest import ROOT, Arm
from tests.servers.sim_process import SimProcess

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

#: Arm → flags of a simulator that is the same arm.
FLAGS = {
    "plain": ["--no-enable-prefix-caching"],
    "both": ["--enable-prefix-caching", "--spec-tokens", "3"],
}
INFO = "vllm:cache_config_info"
#: Labels whose values are the server's own; those of all others are part of the page's shape.
OWN = {"model_name", "engine"}


@pytest.fixture(scope="module", params=sorted(FLAGS))
def pair(request: pytest.FixtureRequest, arms: dict[str, Arm]) -> Iterator[tuple[str, str]]:
    """The addresses of an arm and of its simulator; context and model are called alike."""
    arm = arms[request.param]
    card = requests.get(f"{arm.url}/v1/models", timeout=30).json()["data"][0]
    flags = ["--served-model-name", card["id"], "--max-model-len", str(card["max_model_len"])]
    with SimProcess(*FLAGS[request.param], *flags) as simulator:
        yield arm.url, simulator.url


def page(url: str) -> dict[str, Metric]:
    """vLLM's families by name, without the times at which series were made: the client library adds those."""
    text = requests.get(f"{url}/metrics", timeout=30).text
    found = text_string_to_metric_families(text)
    return {
        one.name: one for one in found if one.name.startswith("vllm:") and not one.name.endswith("_created")
    }


def shape(family: Metric) -> dict[str, Any]:
    """All of a family but its help text and its values."""
    samples = {sample.name for sample in family.samples if not sample.name.endswith("_created")}
    series = {
        tuple(sorted((name, "" if name in OWN else value) for name, value in sample.labels.items()))
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    return {"type": family.type, "samples": samples, "series": series}


def test_the_metrics_page_has_vllms_families_types_labels_and_buckets(pair: tuple[str, str]) -> None:
    real, simulated = (page(url) for url in pair)
    # Both ways: a family that only the real server has is one that a reader of pages may come to rely on.
    assert sorted(simulated) == sorted(real)
    for name, family in real.items():
        if name != INFO:
            assert shape(simulated[name]) == shape(family), name
    ours, theirs = (set(found[INFO].samples[0].labels) for found in (simulated, real))
    assert ours <= theirs


def test_what_the_load_side_reads_is_on_both_pages(pair: tuple[str, str]) -> None:
    sources = [*(ROOT / "locustfiles").glob("*.py"), *(ROOT / "reports").glob("*.py")]
    read = {name for path in sources for name in re.findall(r'"(vllm:\w+)"', path.read_text())}
    assert len(read) > 5
    for url in pair:
        found = page(url)
        names = {s.name.removesuffix("_total") for family in found.values() for s in family.samples}
        if "vllm:spec_decode_num_drafts" not in names:
            read = {name for name in read if "spec_decode" not in name}
        assert read <= names, url


CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello there"}]
#: Path → bodies: a few of each kind; tests/servers/test_sim_refusals.py has the rest.
REFUSED: list[tuple[str, bytes | dict[str, Any]]] = [
    (CHAT, b'{"model": '),
    (CHAT, b"[1, 2]"),
    (CHAT, b""),
    (CHAT, {}),
    (CHAT, {"messages": MESSAGES, "model": "nobody"}),
    (CHAT, {"messages": MESSAGES, "max_tokens": "many"}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 10**6}),
    (CHAT, {"messages": MESSAGES, "max_completion_tokens": 0, "max_tokens": 5}),
    (CHAT, {"messages": MESSAGES, "min_tokens": 9, "max_tokens": 8}),
    (CHAT, {"messages": MESSAGES, "temperature": 2.5}),
    (CHAT, {"messages": MESSAGES, "cache_salt": "a/b"}),
    (CHAT, {"messages": MESSAGES, "stream_options": {"include_usage": True}}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "user", "content": "word " * 40_000}]}),
    ("/v1/completions", {"prompt": [5] * 40_000}),
    ("/v1/completions", {"prompt": ""}),
    ("/tokenize", {}),
    ("/tokenize", {"prompt": "x", "model": "nobody"}),
    ("/detokenize", {"tokens": [1], "model": "nobody"}),
    ("/nowhere", {}),
    ("/health", {}),
    ("/reset_prefix_cache?reset_running_requests=maybe", b""),
]


def answer(url: str, path: str, body: bytes | dict[str, Any], kind: str) -> tuple[int, Any]:
    """Status and body, without the offending input that vLLM prints."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = requests.post(url + path, data=data, headers={"Content-Type": kind}, timeout=60)
    return reply.status_code, json.loads(re.sub(r", 'input': '[^']*'", "", reply.text))


@pytest.mark.parametrize(("path", "body"), REFUSED)
def test_refusals_agree(pair: tuple[str, str], path: str, body: bytes | dict[str, Any]) -> None:
    real, simulated = (answer(url, path, body, "application/json") for url in pair)
    assert real[0] >= 400
    assert simulated == real


def test_a_body_that_does_not_say_what_it_is_is_refused_by_both(pair: tuple[str, str]) -> None:
    real, simulated = (answer(url, CHAT, {"messages": MESSAGES}, "text/plain") for url in pair)
    assert real[0] == 400
    assert simulated == real


def test_usage_along_a_stream_agrees(pair: tuple[str, str]) -> None:
    body = {
        "messages": MESSAGES,
        "max_tokens": 6,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    for url in pair:
        reply = requests.post(url + CHAT, json=body, timeout=60)
        lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
        *events, last = (json.loads(line) for line in lines)
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts[0] == 0, url
        assert counts == sorted(set(counts)), url
        assert counts[-1] == last["usage"]["completion_tokens"] == 6, url
        assert not any(event["usage"].get("prompt_tokens_details") for event in events), url
        assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, url
        assert last["choices"] == [], url
