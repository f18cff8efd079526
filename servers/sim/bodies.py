"""Bodies of requests, and what is refused: checks in vLLM's order, worded as vLLM 0.32 words them.

Fields without effect here are accepted and ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_SALT_LIMIT = 128
_SALT_FORBIDDEN = frozenset("@/\\\0")
_ON, _OFF = ("1", "true", "t", "yes", "y", "on"), ("0", "false", "f", "no", "n", "off")
_WRONG_TYPE = re.compile(r"Expected `(?P<want>.+?)`, got `(?P<got>.+?)`(?: - at `\$(?P<path>.*)`)?")
_MISSING = re.compile(r"Object missing required field `(?P<field>.+?)`(?: - at `\$(?P<path>.*)`)?")
#: Wanted type -> name and text of the error in general, and where a string or a fraction came instead.
_TYPE_ERRORS: dict[str, dict[str, tuple[str, str]]] = {
    "int": {
        "": ("int_type", "Input should be a valid integer"),
        "str": ("int_parsing", "Input should be a valid integer, unable to parse string as an integer"),
        "float": (
            "int_from_float",
            "Input should be a valid integer, got a number with a fractional part",
        ),
    },
    "float": {
        "": ("float_type", "Input should be a valid number"),
        "str": ("float_parsing", "Input should be a valid number, unable to parse string as a number"),
    },
    "bool": {
        "": ("bool_type", "Input should be a valid boolean"),
        "str": ("bool_parsing", "Input should be a valid boolean, unable to interpret input"),
    },
    "str": {"": ("string_type", "Input should be a valid string")},
    "array": {"": ("list_type", "Input should be a valid list")},
    "object": {
        "": (
            "model_attributes_type",
            "Input should be a valid dictionary or object to extract fields from",
        ),
    },
}


class ApiError(Exception):
    """A refusal before any output."""

    def __init__(
        self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param

    def body(self) -> bytes:
        """The JSON that vLLM answers with."""
        return error_body(self.status, self.message, self.kind, self.param)


class RoutingError(ApiError):
    """A refusal by vLLM's web framework, before any of vLLM's own code: another shape of body."""

    def body(self) -> bytes:
        """See ApiError."""
        return msgspec.json.encode({"detail": self.message})


def error_body(status: int, message: str, kind: str, param: str | None = None) -> bytes:
    """vLLM's error object, in a response or in a stream."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": status}})


def invalid(message: str, param: str | None = None, value: object = None) -> ApiError:
    """A value that vLLM itself refuses; its messages end with the parameter and the value, where known."""
    extras = [f"{name}={one}" for name, one in (("parameter", param), ("value", value)) if one is not None]
    return ApiError(400, f"{message} ({', '.join(extras)})" if extras else message, param=param)


def validation_error(*entries: Mapping[str, object] | str) -> ApiError:
    """A body or query of the wrong shape. vLLM's entries say ``input`` as well; ours leave it out."""
    label = "error" if len(entries) == 1 else "errors"
    lines = "".join(f"\n  {entry}" for entry in entries)
    first = entries[0]
    param = None if isinstance(first, str) else str(first["loc"])
    return ApiError(400, f"{len(entries)} validation {label}:{lines}", "Bad Request", param)


def missing(*places: str) -> ApiError:
    """Fields that must be there and are not."""
    return validation_error(*({"type": "missing", "loc": place, "msg": "Field required"} for place in places))


class StreamOptions(msgspec.Struct):
    """``stream_options``."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Message(msgspec.Struct):
    """One message of a conversation."""

    role: str
    content: str | list[dict[str, Any]] | None = None

    def text(self) -> str:
        """Text of a plain or multi-part content."""
        if isinstance(self.content, list):
            return "".join(str(part.get("text", "")) for part in self.content)
        return self.content or ""


class GenerationBody(msgspec.Struct):
    """What chat and plain completions have in common."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = False
    cache_salt: str | None = None
    n: int | None = 1
    temperature: float | None = None
    request_id: str | None = None

    def asked(self) -> tuple[str, int | None]:
        """Name and value of the field that limits the answer."""
        return "max_tokens", self.max_tokens


class ChatBody(GenerationBody, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = True
    chat_template_kwargs: dict[str, Any] | None = None

    def asked(self) -> tuple[str, int | None]:
        """See GenerationBody."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


class CompletionBody(GenerationBody):
    """``POST /v1/completions``."""

    prompt: str | list[int | str | list[int]] | None = None

    def asked(self) -> tuple[str, int | None]:
        """See GenerationBody; 16 is OpenAI's default."""
        return "max_tokens", 16 if self.max_tokens is None else self.max_tokens

    def numbers(self) -> bool:
        """Whether the prompt came as token numbers."""
        prompt = self.prompt
        if not isinstance(prompt, list) or not prompt:
            return False
        return not isinstance(prompt[0], str)


class TokenizeBody(msgspec.Struct):
    """``POST /tokenize``, with a prompt or with messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_generation_prompt: bool | None = True
    return_token_strs: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(msgspec.Struct):
    """``POST /detokenize``."""

    tokens: list[int]
    model: str | None = None


class ClockBody(msgspec.Struct):
    """``POST /clock_scale``."""

    clock_scale: float


def require_json(headers: Mapping[str, str]) -> None:
    """Refuse what does not say that it is JSON, as vLLM does where it reads a body. Raises ApiError 400."""
    if headers.get("content-type", "").lower().split(";", 1)[0] != "application/json":
        raise validation_error("Unsupported Media Type: Only 'application/json' is allowed")


def decode(body: bytes, kind: type[T]) -> T:
    """Decode a JSON body. Raises ApiError 400 for malformed JSON and for fields of the wrong type."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong_shape(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _malformed(body, str(error)) from None


def _wrong_shape(text: str) -> ApiError:
    """A decoder's complaint in pydantic's words, where it is of a kind that both know."""
    if found := _MISSING.fullmatch(text):
        return missing(f"{_place(found['path'])}.{found['field']}")
    found = _WRONG_TYPE.fullmatch(text)
    if found is None:
        return validation_error({"type": "value_error", "loc": "body", "msg": text})
    place = _place(found["path"])
    for want in found["want"].split(" | "):
        if errors := _TYPE_ERRORS.get(want):
            name, message = errors.get(found["got"]) or errors[""]
            return validation_error({"type": name, "loc": place, "msg": message})
    return validation_error({"type": "value_error", "loc": place, "msg": text})


def _place(path: str | None) -> str:
    return "body" + (path or "").replace("[...]", "")


def _malformed(body: bytes, text: str) -> ApiError:
    """What is wrong with a body that is no JSON, as Python's own parser says it: vLLM reads with that one."""
    if not body:
        return missing("body")
    place = 0
    try:
        json.loads(body)
    except json.JSONDecodeError as error:
        place, text = error.pos, error.msg
    except (UnicodeDecodeError, RecursionError):
        return RoutingError(400, "There was an error parsing the body")
    except ValueError as error:
        text = str(error)
    return validation_error(
        {
            "type": "json_invalid",
            "loc": f"body.{place}",
            "msg": "JSON decode error",
            "ctx": {"error": text},
        }
    )


def flag(query: Mapping[str, str], name: str) -> bool:
    """A switch in a query, off unless given. Raises ApiError 400 for what is neither on nor off."""
    text = query.get(name, "false").lower()
    if text not in _ON and text not in _OFF:
        raise validation_error(
            {
                "type": "bool_parsing",
                "loc": f"query.{name}",
                "msg": "Input should be a valid boolean, unable to interpret input",
            }
        )
    return text in _ON


def check_model(model: str | None, served: str) -> None:
    """Refuse a model that is not served; none given means the one that is. Raises ApiError 404."""
    if model and model != served:
        message = f"The model `{model}` does not exist. Valid aliases: {served}."
        raise ApiError(404, message, "NotFoundError", "model")


def check_generation(body: GenerationBody, served: str) -> None:
    """Refuse what vLLM refuses before it looks at the prompt. Raises ApiError."""
    salt = body.cache_salt
    if salt == "":
        raise invalid("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    if salt is not None and (len(salt) > _SALT_LIMIT or not _SALT_FORBIDDEN.isdisjoint(salt)):
        raise invalid(
            f"Parameter 'cache_salt' must be at most {_SALT_LIMIT} characters and must not contain "
            "'@', '/', '\\\\', or NUL.",
            "cache_salt",
        )
    if body.stream_options is not None and not body.stream:
        raise invalid("Stream options can only be defined when `stream=True`.", "stream_options")
    check_model(body.model, served)


def output_limit(body: GenerationBody, prompt_tokens: int, max_model_len: int, as_text: bool) -> int:
    """Tokens that a request may generate: what was asked, or less where the context ends before.

    Raises ApiError 400. ``as_text`` says that the prompt came as text, which vLLM stops tokenising one token
    beyond the limit, so that its message cannot tell how long the prompt was.
    """
    name, asked = body.asked()
    if asked is not None and asked > max_model_len:
        raise invalid(
            f"{name}={asked} cannot be greater than max_model_len={max_model_len}. "
            "Please request fewer output tokens.",
            name,
            asked,
        )
    if prompt_tokens > max_model_len:
        known = max_model_len + 1 if as_text else prompt_tokens
        least = "at least " if known == max_model_len + 1 else ""
        raise invalid(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
            f"{least}{known} input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt.",
            "input_tokens",
            known,
        )
    room = max_model_len - prompt_tokens
    limit = room if asked is None else min(asked, room)
    _check_sampling(body, limit)
    return limit


def _check_sampling(body: GenerationBody, limit: int) -> None:
    if body.n is not None and body.n != 1:
        if body.n < 1:
            raise invalid(f"n must be at least 1, got {body.n}.")
        raise invalid(f"This simulator generates one choice per request, n is {body.n}.", "n")
    temperature = body.temperature
    if temperature is not None and temperature < 0:
        raise invalid(f"temperature must be non-negative, got {temperature}.", "temperature", temperature)
    if temperature is not None and temperature > 2:
        raise invalid(f"temperature must be in [0, 2], got {temperature}.", "temperature", temperature)
    if limit < 1:
        raise invalid(f"max_tokens must be at least 1, got {limit}.", "max_tokens", limit)
    if body.min_tokens < 0:
        raise invalid(f"min_tokens must be greater than or equal to 0, got {body.min_tokens}.")
    if body.min_tokens > limit:
        raise invalid(f"min_tokens must be less than or equal to max_tokens={limit}, got {body.min_tokens}.")
