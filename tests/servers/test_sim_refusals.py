"""What is refused, and in which words: each message below was taken from a running vLLM 0.32.

Where vLLM prints the offending input as well, the simulator does not.
"""

import json

import pytest
import requests

from tests.servers.sim_process import MODEL, SimProcess, chat, events

LONGEST = 2000


@pytest.fixture(scope="module")
def sim():
    with SimProcess("--max-model-len", str(LONGEST)) as server:
        yield server


def post(sim, path, body, kind="application/json"):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return requests.post(
        sim.url + path, data=data, headers={"content-type": kind} if kind else {}, timeout=10
    )


def shape(name, place, text):
    return f"1 validation error:\n  {{'type': '{name}', 'loc': '{place}', 'msg': '{text}'}}"


TOO_LONG = (
    "This model's maximum context length is 2000 tokens. However, your prompt contains {} input tokens, "
    "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. "
    "(parameter=input_tokens, value={})"
)
SALT = (
    "Parameter 'cache_salt' must be at most 128 characters and must not contain '@', '/', '\\\\', or NUL. "
    "(parameter=cache_salt)"
)
INTEGER = "Input should be a valid integer"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"cache_salt": ""}, "cache_salt", "Parameter 'cache_salt' must be a non-empty string if provided. "
         "(parameter=cache_salt)"),
        ({"cache_salt": "x" * 129}, "cache_salt", SALT),
        *(({"cache_salt": f"a{letter}b"}, "cache_salt", SALT) for letter in "@/\\\0"),
        ({"stream": False}, "stream_options", "Stream options can only be defined when `stream=True`. "
         "(parameter=stream_options)"),
        ({"max_tokens": 2001}, "max_tokens", "max_tokens=2001 cannot be greater than max_model_len=2000. "
         "Please request fewer output tokens. (parameter=max_tokens, value=2001)"),
        ({"max_completion_tokens": 2001}, "max_completion_tokens", "max_completion_tokens=2001 cannot be "
         "greater than max_model_len=2000. Please request fewer output tokens. "
         "(parameter=max_completion_tokens, value=2001)"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, got 0. "
         "(parameter=max_tokens, value=0)"),
        ({"max_tokens": 5, "max_completion_tokens": 0}, "max_tokens", "max_tokens must be at least 1, got 0. "
         "(parameter=max_tokens, value=0)"),
        ({"max_tokens": -4}, "max_tokens", "max_tokens must be at least 1, got -4. "
         "(parameter=max_tokens, value=-4)"),
        ({"temperature": -1}, "temperature", "temperature must be non-negative, got -1.0. "
         "(parameter=temperature, value=-1.0)"),
        ({"temperature": 3}, "temperature", "temperature must be in [0, 2], got 3.0. "
         "(parameter=temperature, value=3.0)"),
        ({"min_tokens": -1}, None, "min_tokens must be greater than or equal to 0, got -1."),
        ({"min_tokens": 11, "max_tokens": 10}, None, "min_tokens must be less than or equal to "
         "max_tokens=10, got 11."),
        ({"n": 0}, None, "n must be at least 1, got 0."),
        ({"messages": []}, None, "Cannot apply chat template to an empty conversation. Provide at least one "
         "message."),
        ({"messages": [{"role": "user", "content": "word " * 2500}]}, "input_tokens",
         TOO_LONG.format("at least 2001", 2001)),
        # The prompt alone fills the context: nothing is left for an answer.
        ({"messages": [{"role": "user", "content": "word " * 1992}]}, "max_tokens",
         "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"),
    ],
)  # fmt: skip
def test_values(sim, fields, param, message):
    reply = post(sim, "/v1/chat/completions", chat("x", **fields))
    assert reply.status_code == 400
    assert reply.json()["error"] == {
        "message": message,
        "type": "BadRequestError",
        "param": param,
        "code": 400,
    }


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/chat/completions", b'{"model": ', "body.10", "1 validation error:\n  {'type': 'json_invalid', "
         "'loc': 'body.10', 'msg': 'JSON decode error', 'ctx': {'error': 'Expecting value'}}"),
        ("/v1/chat/completions", b"", "body", shape("missing", "body", "Field required")),
        ("/v1/chat/completions", b"[1, 2]", "body", shape("model_attributes_type", "body",
         "Input should be a valid dictionary or object to extract fields from")),
        ("/v1/chat/completions", {}, "body.messages", shape("missing", "body.messages", "Field required")),
        ("/v1/chat/completions", {"messages": "x"}, "body.messages",
         shape("list_type", "body.messages", "Input should be a valid list")),
        ("/v1/chat/completions", chat("x", max_tokens="many"), "body.max_tokens",
         shape("int_parsing", "body.max_tokens", INTEGER + ", unable to parse string as an integer")),
        ("/v1/chat/completions", chat("x", max_tokens=1.5), "body.max_tokens",
         shape("int_from_float", "body.max_tokens", INTEGER + ", got a number with a fractional part")),
        ("/v1/chat/completions", chat("x", min_tokens=None), "body.min_tokens",
         shape("int_type", "body.min_tokens", INTEGER)),
        ("/v1/chat/completions", chat("x", temperature="hot"), "body.temperature",
         shape("float_parsing", "body.temperature",
               "Input should be a valid number, unable to parse string as a number")),
        ("/tokenize", {}, "body.prompt", "2 validation errors:\n  {'type': 'missing', 'loc': 'body.prompt', "
         "'msg': 'Field required'}\n  {'type': 'missing', 'loc': 'body.messages', "
         "'msg': 'Field required'}"),
        ("/detokenize", {}, "body.tokens", shape("missing", "body.tokens", "Field required")),
    ],
)  # fmt: skip
def test_shapes(sim, path, body, param, message):
    reply = post(sim, path, body)
    assert reply.status_code == 400
    assert reply.json()["error"] == {"message": message, "type": "Bad Request", "param": param, "code": 400}


def test_what_is_no_text_is_refused_by_the_framework(sim):
    reply = post(sim, "/v1/chat/completions", b'{"model":"\xff"}')
    assert (reply.status_code, reply.json()) == (400, {"detail": "There was an error parsing the body"})


PATHS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", [None, "text/plain"])
def test_a_body_must_say_that_it_is_json(sim, path, kind):
    reply = post(sim, path, b"{}", kind)
    assert reply.status_code == 400
    assert reply.json()["error"] == {
        "message": "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed",
        "type": "Bad Request",
        "param": None,
        "code": 400,
    }


def test_json_with_a_charset_is_json(sim):
    reply = post(sim, "/tokenize", {"prompt": "a b"}, "application/json; charset=utf-8")
    assert reply.json()["count"] == 2


@pytest.mark.parametrize("path", PATHS)
def test_a_model_that_is_not_served_is_not_found_anywhere(sim, path):
    body = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "tokens": [1], "model": "nobody"}
    if path == "/tokenize":
        del body["messages"]
    reply = post(sim, path, body)
    assert reply.status_code == 404
    assert reply.json()["error"] == {
        "message": f"The model `nobody` does not exist. Valid aliases: {MODEL}.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }


def test_what_does_not_fit_behind_the_prompt_is_cut_not_refused(sim):
    found, _ = events(sim, chat("x", max_tokens=LONGEST))
    usage = found[-1]["usage"]
    assert usage["total_tokens"] == LONGEST
    assert found[-2]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("prompt", "known"),
    [
        ("word " * 2500, ("at least 2001", 2001)),
        ([1] * 2500, ("2500", 2500)),
        ([1] * 2001, ("at least 2001", 2001)),
    ],
)
def test_how_long_a_prompt_was_is_known_for_token_numbers_only(sim, prompt, known):
    reply = post(sim, "/v1/completions", {"prompt": prompt})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == TOO_LONG.format(*known)
