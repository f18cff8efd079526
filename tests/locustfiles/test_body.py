"""The request body: everything that shapes the work is pinned and on record."""

from locustfiles.body import OPTIONAL_FIELDS, chat_body, pinned_sampling

MESSAGES = [{"role": "user", "content": "hi"}]


def test_sampling_is_pinned():  # vllm PR#32723: an implicit temperature
    assert chat_body("m", MESSAGES, 7, cache_salt="s") == {
        "model": "m",
        "messages": MESSAGES,
        "max_tokens": 7,
        "stream": True,
        "temperature": 0,
        "ignore_eos": True,
        "chat_template_kwargs": {"enable_thinking": False},
        "stream_options": {"include_usage": True},
        "cache_salt": "s",
    }


def test_dropped_fields_are_left_out_and_the_rest_stays():
    for name in OPTIONAL_FIELDS:
        body = chat_body("m", MESSAGES, 7, cache_salt="s", dropped=[name])
        assert set(OPTIONAL_FIELDS) - set(body) == {name}
    assert "temperature" not in pinned_sampling(["temperature"])


def test_no_stream_options_without_a_stream_and_no_empty_salt():
    body = chat_body("m", MESSAGES, 7, stream=False)
    assert "stream_options" not in body
    assert "cache_salt" not in body
