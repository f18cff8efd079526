"""The simulator over HTTP: shapes, words and effects that clients of vLLM rely on."""

import contextlib
import socket
import time

import pytest
import requests

from tests.servers.sim_process import MODEL, SimProcess, cached_tokens, chat, events, metric, raw_post


@pytest.fixture(scope="module")
def sim():
    with SimProcess("--spec-tokens", "3") as server:
        yield server


def deltas(found):
    return [event["choices"][0]["delta"] for event in found if event["choices"]]


def test_stream_is_shaped_like_vllm(sim):
    found, done = events(sim, chat("hello there", max_tokens=40))
    assert done
    assert deltas(found)[0] == {"role": "assistant", "content": ""}
    assert all(set(delta) == {"content"} and delta["content"] for delta in deltas(found)[1:])
    reasons = [event["choices"][0]["finish_reason"] for event in found if event["choices"]]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert found[-1]["choices"] == []
    usage = found[-1]["usage"]
    assert usage["completion_tokens"] == 40
    assert usage["prompt_tokens"] == 2 + 5 + 3
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert len({event["id"] for event in found}) == 1
    assert all(event["object"] == "chat.completion.chunk" for event in found)


def test_drafts_put_one_to_four_tokens_into_a_delta(sim):
    found, _ = events(sim, chat("count the tokens", max_tokens=200))
    sizes = [len(delta["content"].split()) for delta in deltas(found)[1:]]
    assert sum(sizes) == 200
    assert set(sizes) == {1, 2, 3, 4}


def test_an_answer_sent_back_hits_what_was_cached(sim):
    first = chat(" ".join(f"w{i}" for i in range(6000)), max_tokens=300, cache_salt="follow")
    found, _ = events(sim, first)
    answer = "".join(delta["content"] for delta in deltas(found))
    assert cached_tokens(found) == 0
    count = requests.post(sim.url + "/tokenize", json={"messages": first["messages"]}, timeout=10).json()[
        "count"
    ]
    assert count == 6008
    messages = [*first["messages"], {"role": "assistant", "content": answer}]
    messages.append({"role": "user", "content": " ".join(f"u{i}" for i in range(1500))})
    found, _ = events(sim, {**first, "messages": messages})
    # Three drafts, 0.32: floor(6008 / 1600) blocks, one given up.
    assert cached_tokens(found) == 2 * 1600
    assert found[-1]["usage"]["prompt_tokens"] == 6008 + 300 + 2 + 5 + 1500 + 3
    found, _ = events(sim, {**first, "messages": messages, "cache_salt": "other"})
    assert cached_tokens(found) == 0


def test_answers_depend_on_the_prompt_alone(sim):
    def answer(flags):
        with SimProcess(*flags) as other:
            found, _ = events(other, chat("same words", max_tokens=60, cache_salt="x"))
            return "".join(delta["content"] for delta in deltas(found))

    found, _ = events(sim, chat("same words", max_tokens=60, cache_salt="y"))
    here = "".join(delta["content"] for delta in deltas(found))
    assert here == answer(["--no-enable-prefix-caching", "--seed", "7"])
    found, _ = events(sim, chat("other words", max_tokens=60))
    assert here != "".join(delta["content"] for delta in deltas(found))


def test_unstreamed_and_streamed_answers_agree(sim):
    body = chat("agree", max_tokens=30)
    found, _ = events(sim, body)
    whole = {**body, "stream": False}
    del whole["stream_options"]
    reply = requests.post(sim.url + "/v1/chat/completions", json=whole, timeout=30).json()
    assert reply["choices"][0]["message"]["content"] == "".join(d["content"] for d in deltas(found))
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 30


def test_without_ignore_eos_an_answer_stops_by_itself(sim):
    body = chat("stop by yourself", max_tokens=2000, ignore_eos=False)
    found, _ = events(sim, body)
    usage, reason = found[-1]["usage"], found[-2]["choices"][0]["finish_reason"]
    assert reason == "stop"
    assert 32 <= usage["completion_tokens"] <= 1055
    text = "".join(delta["content"] for delta in deltas(found))
    # The end marker is a token and no text.
    assert len(text.split()) == usage["completion_tokens"] - 1


def test_plain_completions_stream(sim):
    body = {
        "prompt": "one two three",
        "max_tokens": 8,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    found, done = events(sim, body, path="/v1/completions")
    assert done
    text = "".join(event["choices"][0]["text"] for event in found if event["choices"])
    assert len(text.split()) == 8
    assert found[-1]["usage"]["prompt_tokens"] == 3


def test_wrong_path_method_and_protocol(sim):
    nowhere = requests.get(sim.url + "/nowhere", timeout=10)
    # These come from vLLM's web framework, not from vLLM: no error object.
    assert (nowhere.status_code, nowhere.json()) == (404, {"detail": "Not Found"})
    wrong = requests.get(sim.url + "/v1/completions", timeout=10)
    assert (wrong.status_code, wrong.json()) == (405, {"detail": "Method Not Allowed"})
    with socket.create_connection(("127.0.0.1", sim.port), timeout=10) as raw:
        raw.sendall(b"this is not http\r\n\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 400")
    with socket.create_connection(("127.0.0.1", sim.port), timeout=10) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nlong: " + b"x" * 70_000 + b"\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert raw.recv(100).startswith(b"HTTP/1.1 431")
    assert requests.get(sim.url + "/health", timeout=10).status_code == 200


def test_models_version_tokenize(sim):
    card = requests.get(sim.url + "/v1/models", timeout=10).json()["data"][0]
    assert (card["id"], card["max_model_len"]) == (MODEL, 262_144)
    version = requests.get(sim.url + "/version", timeout=10).json()
    assert version == {"version": "0.32.0+sim", "simulated": True, "clock_scale": 20.0}
    text = "the same  pieces\nas split makes"
    found = requests.post(sim.url + "/tokenize", json={"prompt": text, "return_token_strs": True}, timeout=10)
    assert found.json()["count"] == 6
    assert found.json()["token_strs"] == text.split()
    back = requests.post(sim.url + "/detokenize", json={"tokens": found.json()["tokens"]}, timeout=10)
    assert back.json()["prompt"] == " ".join(text.split())
    messages = [{"role": "user", "content": "a b"}]
    for opens, count in ((True, 10), (False, 7)):
        body = {
            "messages": messages,
            "add_generation_prompt": opens,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        assert requests.post(sim.url + "/tokenize", json=body, timeout=10).json()["count"] == count


def test_a_client_that_hangs_up_frees_its_blocks_at_once():
    with SimProcess("--clock-scale", "1") as sim:
        with socket.create_connection(("127.0.0.1", sim.port), timeout=10) as raw:
            raw.sendall(raw_post(" ".join(["long"] * 20_000), max_tokens=4000))
            sim.wait_for(lambda: metric(sim, "vllm:kv_cache_usage_perc") > 0)
            assert metric(sim, "vllm:num_requests_running") == 1
        sim.wait_for(lambda: metric(sim, "vllm:num_requests_running") == 0)
        assert metric(sim, "vllm:kv_cache_usage_perc") == 0
        # As in vLLM, which forgets such requests before it counts what ended: not even "abort" goes up.
        for reason in ("abort", "stop", "length", "error"):
            assert metric(sim, "vllm:request_success_total", finished_reason=reason) == 0
        assert metric(sim, "vllm:e2e_request_latency_seconds_count") == 0


def test_clock_scale_changes_only_while_idle():
    with SimProcess("--clock-scale", "1") as sim:
        change = {"clock_scale": 15}
        reply = requests.post(sim.url + "/clock_scale", json=change, timeout=10)
        assert reply.json()["clock_scale"] == 15
        assert (
            requests.post(sim.url + "/clock_scale", json={"clock_scale": 50}, timeout=10).status_code == 400
        )
        with requests.post(
            sim.url + "/v1/chat/completions", json=chat("busy", max_tokens=5000), stream=True, timeout=10
        ):
            assert requests.post(sim.url + "/clock_scale", json=change, timeout=10).status_code == 409
        sim.wait_for(lambda: metric(sim, "vllm:num_requests_running") == 0)
        assert requests.post(sim.url + "/clock_scale", json=change, timeout=10).status_code == 200


def test_reset_forgets_what_is_cached(sim):
    body = chat(" ".join(["again"] * 5000), max_tokens=2, cache_salt="reset")
    events(sim, body)
    assert cached_tokens(events(sim, body)[0]) == 3200 - 0
    assert requests.post(sim.url + "/reset_prefix_cache", timeout=10).json() == {"success": True}
    assert cached_tokens(events(sim, body)[0]) == 0


def test_reset_fails_and_forgets_nothing_while_blocks_are_held():
    with SimProcess("--clock-scale", "1") as sim:
        reset = sim.url + "/reset_prefix_cache"
        body = chat(" ".join(["again"] * 5000), max_tokens=2)
        events(sim, body)
        with requests.post(
            sim.url + "/v1/chat/completions", json=chat("busy", max_tokens=5000), stream=True, timeout=10
        ):
            assert requests.post(reset, timeout=10).json() == {"success": False}
            assert cached_tokens(events(sim, body)[0]) > 0
        sim.wait_for(lambda: metric(sim, "vllm:num_requests_running") == 0)
        assert requests.post(reset, timeout=10).json() == {"success": True}
        assert cached_tokens(events(sim, body)[0]) == 0


def test_what_reset_cannot_do_here_is_refused(sim):
    reset = sim.url + "/reset_prefix_cache?reset_running_requests="
    assert requests.post(reset + "true", timeout=10).status_code == 501
    assert requests.post(reset + "maybe", timeout=10).status_code == 400
    assert requests.post(reset + "false", timeout=10).json() == {"success": True}


def test_metrics_have_vllms_names_types_and_labels(sim):
    events(sim, chat("for the metrics", max_tokens=20))
    page = requests.get(sim.url + "/metrics", timeout=10).text
    types = dict(line.split()[2:4] for line in page.splitlines() if line.startswith("# TYPE"))
    assert {types[f"vllm:{name}"] for name in ("num_requests_running", "kv_cache_usage_perc")} == {"gauge"}
    for name in ("prefix_cache_queries", "prompt_tokens", "num_preemptions", "spec_decode_num_drafts"):
        assert types[f"vllm:{name}_total"] == "counter"
    for name in ("time_to_first_token_seconds", "request_time_per_output_token_seconds"):
        assert types[f"vllm:{name}"] == "histogram"
    assert 'vllm:num_requests_running{engine="0",model_name="qwen3.8-27b"} 0.0' in page
    config = next(line for line in page.splitlines() if line.startswith("vllm:cache_config_info"))
    assert 'block_size="1600"' in config
    assert 'enable_prefix_caching="True"' in config
    accepted = metric(sim, "vllm:spec_decode_num_accepted_tokens_total")
    by_position = [
        metric(sim, "vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(i)) for i in range(3)
    ]
    assert sum(by_position) == accepted
    assert by_position == sorted(by_position, reverse=True)


def test_metrics_count_what_vllm_counts():
    """The counting rules of vLLM's loggers, on two requests: one of 5,000 + 3 words, then its repetition."""
    with SimProcess("--num-gpu-blocks-override", "800", "--max-num-batched-tokens", "2048") as sim:
        body = chat(" ".join(["again"] * 5000), max_tokens=3)
        prompt = 5000 + 5 + 3
        cached = [cached_tokens(events(sim, body)[0]) for _ in range(2)]
        assert cached[0] == 0
        assert cached[1] > 0
        # A step that gives no token is not counted, however many tokens of a prompt it computes; the first
        # token of a request brings its whole uncached prompt with it.
        assert metric(sim, "vllm:iteration_tokens_total_sum") == 2 * prompt - cached[1] + 6
        assert metric(sim, "vllm:iteration_tokens_total_count") == 6
        assert metric(sim, "vllm:prompt_tokens_cached_by_source_total", source="device") == cached[1]
        assert metric(sim, "vllm:request_params_max_tokens_sum") == 6
        assert metric(sim, "vllm:request_max_num_generation_tokens_sum") == 6
        assert metric(sim, "vllm:request_params_n_sum") == 2
        # Never preempted: in the first bucket, whose bound is 1.
        assert metric(sim, "vllm:request_num_preemptions_bucket", le="1.0") == 2
        name = "vllm:request_time_per_output_token_seconds"
        before = [metric(sim, f"{name}_{what}") for what in ("count", "sum")]
        events(sim, chat("one token", max_tokens=1))
        assert [metric(sim, f"{name}_{what}") for what in ("count", "sum")] == [before[0] + 1, before[1]]
        assert metric(sim, "vllm:cache_config_info", num_gpu_blocks_override="800") == 1
        # An answer that ended by itself: what it was allowed, not what it took.
        events(sim, chat("stop", max_tokens=2000, ignore_eos=False))
        assert metric(sim, "vllm:request_params_max_tokens_sum") == 6 + 1 + 2000


def test_no_speculative_metrics_without_drafts():
    with SimProcess() as sim:
        assert "spec_decode" not in requests.get(sim.url + "/metrics", timeout=10).text


def test_sigterm_ends_it_cleanly_and_a_taken_port_is_said():
    with SimProcess() as sim:
        with SimProcess("--port", str(sim.port), wait=False) as second:
            assert second.process.wait(10) == 1
            assert f"cannot listen on 127.0.0.1:{sim.port}" in second.errors()
        started = time.monotonic()
        sim.process.terminate()
        assert sim.process.wait(10) == 0
        assert time.monotonic() - started < 5
        assert sim.errors() == ""


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--calibration", "/nowhere.toml"], "/nowhere.toml: cannot be read"),
        (["--clock-scale", "100"], "--clock-scale is 100.0"),
        (["--speculative-config", "{"], "--speculative-config"),
        (["--spec-tokens", "0"], "num_speculative_tokens is 0; give 1 to 16"),
        (["--max-num-batched-tokens", "1000"], "raise the budget"),
        (["--max-model-len", "2000000"], "lower --max-model-len"),
        (["--prefix-match-unit", "100"], "must divide the block size 1568"),
        (["--faults", "explode=1"], "unknown fault 'explode'"),
    ],
)
def test_flags_that_cannot_work_end_in_one_line(flags, words):
    with SimProcess(*flags, wait=False) as sim:
        assert sim.process.wait(20) == 2
        assert words in sim.errors()
        assert "Traceback" not in sim.errors()
