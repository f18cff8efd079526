"""Bodies of requests, and errors as vLLM words them. Fields without effect here are accepted and ignored."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


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


def error_body(status: int, message: str, kind: str, param: str | None = None) -> bytes:
    """vLLM's error object, in a response or in a stream."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": status}})


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
    min_tokens: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = False
    cache_salt: str | None = None
    n: int | None = 1
    temperature: float | None = None
    request_id: str | None = None


class ChatBody(GenerationBody):
    """``POST /v1/chat/completions``."""

    messages: list[Message] = []
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = True
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(GenerationBody):
    """``POST /v1/completions``."""

    prompt: str | list[int | str | list[int]] | None = None


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


def decode(body: bytes, kind: type[T]) -> T:
    """Decode a JSON body. Raises ApiError 400 for malformed JSON and for fields of the wrong type."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"Validation error: {error}", "Bad Request") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"Invalid JSON: {error}", "Bad Request") from None


def check_generation(body: GenerationBody, served: str) -> None:
    """Refuse what vLLM refuses, before looking at lengths. Raises ApiError."""
    if body.model is not None and body.model != served:
        raise ApiError(404, f"The model `{body.model}` does not exist.", "NotFoundError", "model")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "Stream options can only be defined when `stream=True`.", param="stream_options")
    if body.cache_salt is not None and not 1 <= len(body.cache_salt) <= 1024:
        raise ApiError(
            400, "Parameter 'cache_salt' must be a non-empty string if provided.", param="cache_salt"
        )
    if body.n is not None and body.n != 1:
        raise ApiError(400, f"This simulator generates one choice per request, n is {body.n}.", param="n")
    if body.temperature is not None and not 0 <= body.temperature <= 100:
        raise ApiError(400, f"temperature must be non-negative, got {body.temperature}.", param="temperature")


def output_limit(asked: int | None, prompt_tokens: int, max_model_len: int) -> int:
    """Tokens that a request may generate. Raises ApiError 400 for over-long requests, in vLLM's words."""
    if asked is not None and asked < 1:
        raise ApiError(400, f"max_tokens must be at least 1, got {asked}.", param="max_tokens")
    if prompt_tokens >= max_model_len or prompt_tokens + (asked or 1) > max_model_len:
        output = asked or 1
        raise ApiError(
            400,
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{output} output tokens and your prompt contains at least {prompt_tokens} input tokens, for a "
            f"total of at least {prompt_tokens + output} tokens. Please reduce the length of the input "
            "prompt or the number of requested output tokens.",
            param="input_tokens",
        )
    return asked if asked is not None else max_model_len - prompt_tokens
