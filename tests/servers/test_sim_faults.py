"""Fault modes: each is seen by a client as what it is called."""

import http.client
import json
import time

import pytest
import requests

from servers.sim.faults import KINDS, Fault, Faults
from tests.servers.sim_process import SimProcess, chat, events, metric


@pytest.fixture(scope="module")
def sim():
    with SimProcess() as server:
        yield server


def fault(kind):
    return {"X-Faceoff-Fault": kind}


def contents(found):
    return [e["choices"][0]["delta"].get("content") for e in found if e.get("choices")]


def test_die_breaks_the_connection_in_the_middle(sim):
    connection = http.client.HTTPConnection("127.0.0.1", sim.port, timeout=10)
    headers = {**fault("die:5"), "Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(chat("x", max_tokens=50)), headers)
    reply = connection.getresponse()
    received = []
    with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
        received.extend(iter(reply.read1, b"the stream ended properly"))
    received = b"".join(received)
    assert b"[DONE]" not in received
    # The role and at most five deltas.
    assert 1 <= received.count(b"data: ") <= 6
    sim.wait_for(lambda: metric(sim, "vllm:kv_cache_usage_perc") == 0)


def test_error_comes_in_band_after_deltas_and_ends_with_done(sim):
    found, done = events(sim, chat("x", max_tokens=50), headers=fault("error:4"))
    assert done
    assert found[-1]["error"]["code"] == 500
    assert len(contents(found)) == 1 + 4
    assert all(e["choices"][0]["finish_reason"] is None for e in found[:-1])
    assert metric(sim, "vllm:num_requests_running") == 0


def test_stall_stops_and_goes_on_after_its_time(sim):
    # 4 model seconds at scale 20.
    started = time.monotonic()
    found, done = events(sim, chat("x", max_tokens=30), headers=fault("stall:4"))
    assert time.monotonic() - started > 0.2
    assert done
    assert len(" ".join(filter(None, contents(found))).split()) == 30
    # What piled up came in one delta.
    assert max(len(text.split()) for text in contents(found)) > 5


def test_a_stall_without_end_leaves_the_client_waiting(sim):
    with pytest.raises(requests.exceptions.ConnectionError):
        requests.post(
            sim.url + "/v1/chat/completions",
            json=chat("x", max_tokens=20),
            headers=fault("stall"),
            timeout=(5, 1),
        )


def test_truncated_ends_without_finish_reason_and_done(sim):
    found, done = events(sim, chat("x", max_tokens=12), headers=fault("truncated"))
    assert not done
    assert all(e["choices"][0]["finish_reason"] is None for e in found)
    assert len("".join(contents(found)).split()) == 12


def test_usage_can_be_missing(sim):
    found, done = events(sim, chat("x", max_tokens=5), headers=fault("no_usage"))
    assert done
    assert not any("usage" in event for event in found)
    assert found[-1]["choices"][0]["finish_reason"] == "length"


def timed_lines(sim, kind, max_tokens=5):
    """(seconds since the request, line) of a raw stream, and when its headers came."""
    started = time.monotonic()
    with requests.post(
        sim.url + "/v1/chat/completions",
        json=chat("x", max_tokens=max_tokens),
        headers=fault(kind),
        stream=True,
        timeout=10,
    ) as reply:
        headers = time.monotonic() - started
        return headers, [(time.monotonic() - started, line) for line in reply.iter_lines(1) if line]


def test_slow_headers_hold_everything_back(sim):
    headers, lines = timed_lines(sim, "slow_headers:10")
    assert headers > 0.5
    assert lines[-1][1] == b"data: [DONE]"


def test_keep_alives_come_before_the_role(sim):
    _, lines = timed_lines(sim, "keep_alive:0.1")
    comments = [line for _, line in lines if line.startswith(b":")]
    assert len(comments) >= 2
    assert lines.index(next(one for one in lines if b'"role"' in one[1])) == len(comments)
    assert lines[-1][1] == b"data: [DONE]"


def test_role_early_comes_long_before_the_first_token():
    with SimProcess("--clock-scale", "1") as slow:
        headers, lines = timed_lines(slow, "role_early")
        assert b'"role"' in lines[0][1]
        # The fixed latency of the shipped calibration alone is several tenths of a second.
        assert lines[1][0] - headers > 0.2


def test_reasoning_comes_first_and_counts(sim):
    found, _ = events(sim, chat("x", max_tokens=20), headers=fault("reasoning:6"))
    reasoning = [e["choices"][0]["delta"].get("reasoning") for e in found if e["choices"]]
    assert len("".join(filter(None, reasoning)).split()) == 6
    assert len("".join(filter(None, contents(found))).split()) == 14
    assert found[-1]["usage"]["completion_tokens"] == 20


@pytest.mark.parametrize("status", [429, 503])
def test_refusals(sim, status):
    reply = requests.post(
        sim.url + "/v1/chat/completions", json=chat("x"), headers=fault(str(status)), timeout=10
    )
    assert reply.status_code == status
    assert reply.json()["error"]["code"] == status


def test_an_unknown_fault_is_said(sim):
    reply = requests.post(sim.url + "/v1/chat/completions", json=chat("x"), headers=fault("nap"), timeout=10)
    assert reply.status_code == 400
    assert "known are die, error" in reply.json()["error"]["message"]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_unstreamed_requests_survive_every_fault(sim, kind):
    body = {**chat("x", max_tokens=3), "stream": False}
    del body["stream_options"]
    try:
        reply = requests.post(
            sim.url + "/v1/chat/completions", json=body, headers=fault(kind), timeout=(5, 1)
        )
        assert reply.status_code in (200, 429, 500, 503)
    except requests.exceptions.RequestException:
        assert kind in ("die", "stall", "truncated")
    assert requests.get(sim.url + "/health", timeout=10).status_code == 200


def test_rates_hold_and_depend_on_content_and_seed_only():
    faults = Faults.parse("die:5=0.1,429=0.2", seed=3)
    prompts = [str(index).encode() for index in range(20_000)]
    chosen = [faults.choose({}, prompt) for prompt in prompts]
    for kind, share in (("die", 0.1), ("429", 0.2)):
        count = sum(one is not None and one.kind == kind for one in chosen)
        assert count / len(prompts) == pytest.approx(share, abs=0.012)
    assert [faults.choose({}, prompt) for prompt in prompts[:500]] == chosen[:500]
    other = Faults.parse("die:5=0.1,429=0.2", seed=4)
    assert [other.choose({}, prompt) for prompt in prompts[:500]] != chosen[:500]
    assert faults.choose({"x-faceoff-fault": "none"}, b"0") is None
    assert faults.choose({"x-faceoff-fault": "stall:2"}, b"0") == Fault("stall", 2.0)


@pytest.mark.parametrize("text", ["die", "die=2", "die=x", "nap=0.1", "die:x=0.1", "die=0.6,error=0.6"])
def test_rates_that_make_no_sense_are_refused(text):
    with pytest.raises(ValueError, match=r"die|nap|rate"):
        Faults.parse(text, 0)


def test_by_rate_every_stream_gets_it():
    with SimProcess("--faults", "truncated=1") as sim:
        assert not events(sim, chat("x", max_tokens=4))[1]
        assert events(sim, chat("x", max_tokens=4), headers=fault("none"))[1]
