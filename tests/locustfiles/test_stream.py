"""What a stream is made of: every public report of a wrong TTFT, token count or status that touches one.

Each test is named after what went wrong somewhere; stamps are in ns, 1 ms = 1_000_000.
"""

import json

import pytest

from locustfiles.attempt import CellClock, CellKey, Try, attempt_row, tpot_ms
from locustfiles.records import Attempt
from locustfiles.stream import StreamWatch
from locustfiles.wire import WireError

MS = 1_000_000
START = 5_000 * MS  # the request was written 5 s after the process's clock began
KEY = CellKey("cache", "single_turn", "prompt=1024", 4, 1)


def delta(finish=None, **members):
    return {"choices": [{"index": 0, "delta": members, "finish_reason": finish}]}


ROLE = delta(role="assistant", content="")
STOP = delta(finish="length")


def usage(completion, prompt=1024, cached=None, **more):
    found = {"prompt_tokens": prompt, "completion_tokens": completion, **more}
    if cached is not None:
        found["prompt_tokens_details"] = {"cached_tokens": cached}
    return {"choices": [], "usage": found}


def row_of(
    *events: tuple[float, object],
    status: int = 200,
    failure: WireError | None = None,
    scale: float = 1.0,
    done: bool = True,
) -> Attempt:
    """The row of a stream whose events arrive at the given ms after the request; strings go in raw."""
    watch = StreamWatch()
    watch.sent_ns = START
    watch.on_headers(status, {}, START + MS)
    for at, event in (*events, *([(10_000, "data: [DONE]\n\n")] if done else [])):
        text = event if isinstance(event, str) else f"data: {json.dumps(event)}\n\n"
        watch.on_body(text.encode(), START + round(at * MS), True)
    watch.finish(START + 10_000 * MS)
    attempt = Try(0, 1, 1, "measure", 1024, 4, "d", connect_ms=0.0, watch=watch, failure=failure)
    attempt.end_ns = START + 10_000 * MS
    return attempt_row(KEY, CellClock(0, scale), attempt)


def test_hand_computed_row():
    row = row_of(
        (200, ROLE),
        (300, delta(content="a")),
        (320, delta(content="b")),
        (360, delta(content="c")),
        (400, delta(content="d")),
        (400, STOP),
        (410, usage(5, cached=512)),
    )
    assert row.status == "ok"
    assert row.start_ms == 5000
    assert row.headers_ms == 5001
    assert row.first_token_ms == 5300
    assert row.ttft_ms == 300
    assert row.ttfa_ms == 300
    assert row.e2e_ms == 400
    assert row.tpot_ms == 25  # 100 ms / (5 - 1) tokens, though only 4 chunks came
    assert row.chunks == 4
    assert row.icl_p50_ms == 40  # gaps 20, 40, 40
    assert row.icl_max_ms == 40
    assert (row.prompt_tokens, row.cached_tokens, row.output_tokens) == (1024, 512, 5)
    assert row.token_source == "usage"
    assert row.finish_reason == "length"
    assert row.stamp == "kernel"


def test_durations_are_model_time():
    row = row_of((30, delta(content="a")), (40, delta(content="b")), (40, STOP), (41, usage(3)), scale=10.0)
    assert row.ttft_ms == 300
    assert row.tpot_ms == 50
    assert row.start_ms == 50_000


def test_role_chunk_is_no_first_token():  # vllm#3759
    assert row_of((5, ROLE), (214, delta(content="a")), (214, STOP)).ttft_ms == 214


def test_role_chunk_before_prefill_ends_does_not_move_the_rest_into_gaps():  # vllm#15106
    row = row_of(
        (5, ROLE), (500, delta(content="a")), (520, delta(content="b")), (520, STOP), (521, usage(2))
    )
    assert row.icl_max_ms == 20


def test_reasoning_is_a_first_token_but_no_first_answer():  # guidellm#737
    for name in ("reasoning", "reasoning_content"):
        row = row_of((100, ROLE), (200, delta(**{name: "hm"})), (900, delta(content="a")), (900, STOP))
        assert (row.ttft_ms, row.ttfa_ms) == (200, 900)


def test_tool_call_is_a_first_token_and_an_answer():
    call = {"index": 0, "function": {"name": "f", "arguments": ""}}
    row = row_of((100, ROLE), (250, delta(tool_calls=[call])), (300, delta(finish="tool_calls")))
    assert (row.ttft_ms, row.ttfa_ms, row.chunks) == (250, 250, 1)


def test_null_and_empty_members_bear_no_token():
    row = row_of(
        (100, delta(content=None, reasoning=None, tool_calls=[])),
        (150, delta(content="", reasoning="")),
        (200, delta(content="a")),
        (210, STOP),
    )
    assert (row.ttft_ms, row.chunks) == (200, 1)


def test_multi_token_chunks_do_not_change_tpot():  # vllm PR#48892: MTP, TPOT -26 %, chunk gap +612 %
    steps = [(300 + 60 * i, delta(content="abc" if i else "a")) for i in range(5)]
    row = row_of(*steps, (540, STOP), (541, usage(13)))
    assert row.icl_p50_ms == 60
    assert row.tpot_ms == 20  # 240 ms / 12


def test_tpot_and_decode_rate_agree():  # sglang PR#12064
    row = row_of((100, delta(content="a")), (1100, delta(content="b")), (1100, STOP), (1101, usage(101)))
    assert row.tpot_ms == 10
    assert 1000 / row.tpot_ms == 100


def test_a_stall_stays_visible():  # guidellm#1145
    times = [100, 120, 140, 1140, 1160]
    row = row_of(*((t, delta(content="a")) for t in times), (1160, STOP), (1161, usage(5)))
    assert row.icl_max_ms == 1000


def test_tokens_bundled_in_one_chunk_have_no_tpot():  # aiperf PR#1279
    row = row_of((300, delta(content="all of it")), (300, STOP), (301, usage(40)))
    assert row.status == "ok"
    assert row.tpot_ms is None


def test_totals_on_the_last_content_chunk_do_not_make_it_a_usage_chunk():  # aiperf PR#1279
    last = {**delta(content="c", finish="length"), "usage": {"prompt_tokens": 8, "completion_tokens": 3}}
    row = row_of((300, delta(content="a")), (320, delta(content="b")), (360, last))
    assert (row.chunks, row.e2e_ms, row.tpot_ms, row.icl_max_ms) == (3, 360, 30, 40)


def test_ttft_is_in_neither_gaps_nor_tpot():  # vllm#7242, llmperf PR#99
    row = row_of((5000, delta(content="a")), (5020, delta(content="b")), (5020, STOP), (5021, usage(2)))
    assert (row.icl_p50_ms, row.icl_max_ms, row.tpot_ms) == (20, 20, 20)


def test_text_is_not_counted_again():  # inference-perf#564: tokens come from usage
    row = row_of(
        (300, delta(content="un")),
        (320, delta(content="believ")),
        (340, delta(content="able")),
        (340, STOP),
        (341, usage(2)),
    )
    assert (row.output_tokens, row.tpot_ms) == (2, 40)


def test_reasoning_is_not_echoed_in_the_answer():  # sglang PR#39866
    watch = StreamWatch()
    watch.on_headers(200, {}, START)
    for members in ({"reasoning": "hm "}, {"content": "a"}, {"content": "b"}):
        watch.on_body(f"data: {json.dumps(delta(**members))}\n\n".encode(), START, True)
    assert watch.answer == "ab"


def test_chunks_that_all_came_in_one_read_have_no_tpot():
    row = row_of((300, delta(content="a")), (300, delta(content="b")), (300, STOP), (301, usage(2)))
    assert (row.chunks, row.tpot_ms) == (2, None)


def test_missing_usage_means_unknown_tokens_not_chunks_nor_max_tokens():  # sglang PR#24266, pegainfer#78
    row = row_of((300, delta(content="a")), (320, delta(content="b")), (320, STOP))
    assert row.output_tokens is None
    assert row.token_source == "none"
    assert row.tpot_ms is None
    assert row.ttft_ms == 300


def test_token_ids_are_counted_where_usage_is_missing():
    def with_ids(text, ids):
        return {
            "choices": [{"index": 0, "delta": {"content": text}, "token_ids": ids, "finish_reason": None}]
        }

    row = row_of((300, with_ids("a", [1])), (360, with_ids("bcd", [2, 3, 4])), (360, STOP))
    assert (row.output_tokens, row.token_source, row.tpot_ms) == (4, "counted", 20)


def test_unmeasurable_tpot_is_empty_not_zero():  # vllm-omni PR#6696
    assert row_of((300, delta(content="a")), (300, STOP), (301, usage(1))).tpot_ms is None
    assert row_of((300, STOP), (301, usage(0))).tpot_ms is None
    assert tpot_ms(1.0, 2.0, None, 5) is None


def test_error_inside_a_200_stream_is_a_failure_even_behind_done():  # vllm PR#57519
    error = {"error": {"message": "EngineCore died", "type": "InternalServerError", "code": 500}}
    row = row_of((300, delta(content="a")), (310, error))
    assert row.status == "stream_error"
    assert row.error == "EngineCore died (500)"
    assert row.http_status == 200


def test_error_after_the_finish_reason_is_a_failure_too():
    assert row_of((300, delta(content="a")), (310, STOP), (311, {"error": "late"})).status == "stream_error"


def test_error_event_type_is_a_failure():
    assert row_of((300, 'event: error\ndata: {"x": 1}\n\n')).status == "stream_error"


def test_clean_end_without_finish_reason_is_truncated():  # vllm PR#54628
    row = row_of((300, delta(content="a")), (320, delta(content="b")), done=False)
    assert row.status == "truncated"
    assert row.ttft_ms == 300  # what happened stays on record


def test_done_alone_proves_nothing():
    assert row_of((300, delta(content="a")), done=True).status == "truncated"


def test_no_done_is_fine_with_a_finish_reason():
    assert row_of((300, delta(content="a")), (310, STOP), done=False).status == "ok"


def test_keep_alive_comments_are_skipped():  # sglang PR#37986
    row = row_of((50, ": keep-alive\n\n"), (300, delta(content="a")), (310, ": x\n\n"), (320, STOP))
    assert (row.status, row.ttft_ms, row.chunks) == ("ok", 300, 1)


def test_usage_chunk_does_not_end_latency():  # evalscope: latency ended at the usage chunk
    row = row_of((300, delta(content="a")), (400, delta(content="b")), (400, STOP), (900, usage(2)))
    assert row.e2e_ms == 400


def test_continuous_usage_keeps_the_last_count():
    def both(text, n):
        return {**delta(content=text), "usage": {"prompt_tokens": 10, "completion_tokens": n}}

    row = row_of((300, both("a", 1)), (320, both("b", 3)), (320, STOP), (321, usage(3)))
    assert (row.output_tokens, row.tpot_ms) == (3, 10)


def test_null_usage_is_unknown():
    row = row_of((300, {**delta(content="a"), "usage": None}), (310, STOP))
    assert row.output_tokens is None


@pytest.mark.parametrize("count", [-5, 2**62])
def test_impossible_token_counts_are_unknown(count):
    row = row_of(
        (300, delta(content="a")), (310, delta(content="b")), (310, STOP), (311, usage(count, prompt=count))
    )
    assert (row.output_tokens, row.token_source, row.prompt_tokens, row.tpot_ms) == (None, "none", None, None)
    assert row.status == "ok"


def test_cached_tokens_missing_is_unknown_zero_is_zero():
    assert row_of((1, delta(content="a")), (1, STOP), (2, usage(1))).cached_tokens is None
    assert row_of((1, delta(content="a")), (1, STOP), (2, usage(1, cached=0))).cached_tokens == 0


def test_completions_api_text():
    def text(t, finish=None):
        return {"choices": [{"index": 0, "text": t, "finish_reason": finish}]}

    row = row_of((300, text("")), (310, text("a")), (330, text("b", "length")), (331, usage(2)))
    assert (row.status, row.ttft_ms, row.tpot_ms) == ("ok", 310, 20)


def test_refused_request_is_an_http_error_with_its_reason():  # InferenceX#357
    watch = StreamWatch()
    watch.sent_ns = START
    watch.on_headers(503, {"retry-after": "1"}, START + MS)
    watch.on_body(b'{"error": {"message": "queue full", "code": 503}}', START + MS, True)
    attempt = Try(0, 1, 1, "measure", 8, 4, "d", watch=watch, end_ns=START + 2 * MS)
    row = attempt_row(KEY, CellClock(0), attempt)
    assert (row.status, row.http_status, row.error) == ("http_error", 503, "HTTP 503: queue full (503)")
    assert row.ttft_ms is None


def test_html_with_200_is_no_stream():
    row = row_of((10, "<html><body>Bad gateway</body></html>\n"), done=False)
    assert row.status == "stream_error"
    assert row.error.startswith("no event stream: <html>")


def test_a_reset_after_tokens_is_a_stream_error_a_close_is_truncated():
    reset = WireError(WireError.RESET, "the connection broke: reset")
    closed = WireError(WireError.CLOSED, "the server closed the connection in the middle of its answer")
    assert row_of((300, delta(content="a")), failure=reset, done=False).status == "stream_error"
    assert row_of((300, delta(content="a")), failure=closed, done=False).status == "truncated"


def test_timeout_is_a_timeout():
    assert row_of(failure=WireError(WireError.TIMEOUT, "no end after 5 s"), done=False).status == "timeout"


def test_no_answer_at_all_is_a_connect_error():
    watch = StreamWatch()
    watch.sent_ns = START
    failure = WireError(
        WireError.CLOSED, "the server closed the connection without an answer", unanswered=True
    )
    attempt = Try(0, 1, 1, "measure", 8, 4, "d", watch=watch, failure=failure, end_ns=START)
    assert attempt_row(KEY, CellClock(0), attempt).status == "connect_error"


def test_censored_keeps_what_happened():  # guidellm#77, #444
    watch = StreamWatch()
    watch.sent_ns = START
    watch.on_headers(200, {}, START)
    watch.on_body(f"data: {json.dumps(delta(content='a'))}\n\n".encode(), START + 300 * MS, True)
    attempt = Try(0, 3, 1, "drain", 8, 4, "d", watch=watch, censored="cut short", end_ns=START + 400 * MS)
    row = attempt_row(KEY, CellClock(0), attempt)
    assert (row.status, row.ttft_ms, row.finish_reason) == ("censored", 300, None)


def test_reads_that_hold_several_tokens_are_counted():
    watch = StreamWatch()
    watch.sent_ns = START
    watch.on_headers(200, {}, START)
    one = f"data: {json.dumps(delta(content='a'))}\n\n".encode()
    watch.on_body(one + one, START + 300 * MS, True)  # one read, two tokens
    watch.on_body(one, START + 320 * MS, True)
    watch.on_body(one, START + 340 * MS, True)  # two bodies (HTTP chunks) of one read
    watch.on_body(one, START + 340 * MS, True)
    watch.on_body(one, START + 340 * MS, True)
    assert (watch.token_reads, watch.coalesced_reads, watch.first_token_coalesced) == (3, 2, True)


def test_output_digest_tells_reasoning_from_answer():
    a = row_of((1, delta(content="x")), (2, STOP)).output_digest
    b = row_of((1, delta(reasoning="x")), (2, STOP)).output_digest
    c = row_of((1, delta(content="x")), (2, STOP)).output_digest
    assert a == c
    assert a != b


def test_errors_fit_one_field():
    row = row_of((1, {"error": {"message": "a\nb\r\t\x00" + "é" * 5000}}))
    assert row.error.startswith("a b éé")
    assert len(row.error) == 300
