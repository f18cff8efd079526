"""Real clients and many of them."""

import asyncio
import json
import socket

import openai
import pytest

from servers.sim.bench import _get, _load, _process, late_quantile, measure
from tests.servers.sim_process import MODEL, SimProcess, metric, raw_post


@pytest.fixture(scope="module")
def sim():
    with SimProcess("--spec-tokens", "3") as server:
        yield server


@pytest.fixture
def client(sim):
    with openai.OpenAI(base_url=sim.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


MESSAGES = [{"role": "user", "content": "tell me something"}]


def test_openai_streams_chat(client):
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=25,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={
            "ignore_eos": True,
            "cache_salt": "s",
            "chat_template_kwargs": {"enable_thinking": False},
        },
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert len(text.split()) == 25
    assert chunks[-1].usage.completion_tokens == 25
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 0
    assert chunks[-2].choices[0].finish_reason == "length"


def test_openai_reads_whole_answers_models_and_completions(client):
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=25)
    assert len(whole.choices[0].message.content.split()) == 25
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 25
    assert [model.id for model in client.models.list()] == [MODEL]
    plain = client.completions.create(model=MODEL, prompt="once upon a time", max_tokens=7)
    assert len(plain.choices[0].text.split()) == 7
    parts = [{"type": "text", "text": "tell me"}, {"type": "text", "text": " something"}]
    split = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": parts}], max_tokens=25
    )
    assert split.choices[0].message.content == whole.choices[0].message.content


def test_openai_raises_its_own_errors(client):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="nobody", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="cannot be greater than max_model_len=262144"):
        client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=10**6)
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, extra_headers={"X-Faceoff-Fault": "429"}
        )
    with pytest.raises(openai.APIError, match="Internal server error"):
        list(
            client.chat.completions.create(
                model=MODEL,
                messages=MESSAGES,
                max_tokens=50,
                stream=True,
                extra_headers={"X-Faceoff-Fault": "error"},
            )
        )


def test_continuous_usage_counts_what_was_sent_and_only_the_last_has_details(client):
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        extra_body={"ignore_eos": True},
    )
    *chunks, last = list(stream)
    sent = 0
    for chunk in chunks:
        sent += len((chunk.choices[0].delta.content or "").split())
        assert chunk.usage.completion_tokens == sent
        assert chunk.usage.total_tokens == chunk.usage.prompt_tokens + sent
        assert chunk.usage.prompt_tokens_details is None
    # The first one is the role's: no token yet.
    assert chunks[0].usage.completion_tokens == 0
    assert last.choices == []
    assert last.usage.completion_tokens == sent == 20
    assert last.usage.prompt_tokens_details.cached_tokens == 0


def test_a_thousand_streams_end_without_errors():
    # The asked rate is modest: this is about errors, the speed is a benchmark's.
    result = measure(1000, 8000, 3)
    assert result.errors == 0
    assert result.chunks == 24_000
    assert result.memory_mb < 400


def test_many_requests_leave_no_memory_and_no_blocks_behind():
    with SimProcess() as sim:
        memory = []
        for _ in range(30):
            assert asyncio.run(_load(sim.port, 300, 2)) == 0
            memory.append(_process(sim.process.pid)[1])
        # Megabytes. The first half lets the allocator settle; a kilobyte left behind by each of the 4,500
        # requests of the second half would be seen.
        assert memory[-1] - memory[14] < 3
        assert metric(sim, "vllm:kv_cache_usage_perc") == 0
        assert metric(sim, "vllm:request_success_total", finished_reason="length") == 9_000
        page = asyncio.run(_get(sim.port, "/metrics"))
        assert late_quantile(page, 0.5) < float("inf")


FAST = """
[model]
name = "qwen3.8-27b"
max_model_len = 100000
[prefill]
token_s = 1e-7
[decode]
step_s = 0.001
"""


def test_a_client_that_does_not_read_gets_merged_deltas(tmp_path):
    calibration = tmp_path / "fast.toml"
    calibration.write_text(FAST)
    tokens = 40_000
    with SimProcess("--calibration", str(calibration)) as sim, socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.settimeout(30)
        raw.connect(("127.0.0.1", sim.port))
        raw.sendall(raw_post("slow reader", max_tokens=tokens))
        # Generation goes on to its end while nobody reads.
        sim.wait_for(lambda: metric(sim, "vllm:generation_tokens_total") == tokens, 60)
        received = b"".join(iter(lambda: raw.recv(1 << 20), b""))
    data = [line[6:] for line in received.split(b"\r\n") if line.startswith(b"data: {")]
    found = [json.loads(line) for line in data]
    texts = [event["choices"][0]["delta"]["content"] for event in found if event["choices"]]
    assert sum(len(text.split()) for text in texts) == tokens
    assert found[-1]["usage"]["completion_tokens"] == tokens
    assert len(texts) < tokens
    assert max(len(text.split()) for text in texts) > 1000
