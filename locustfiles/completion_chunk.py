"""What one event of a completion stream says: chat and completions, vLLM's shape and its relatives'."""

from __future__ import annotations

from typing import Any

import msgspec


class Delta(msgspec.Struct):
    """``choices[].delta``. vLLM calls reasoning text ``reasoning``, others ``reasoning_content``."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class Choice(msgspec.Struct):
    """``choices[]``: ``delta`` in chat, ``text`` in completions."""

    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class PromptDetails(msgspec.Struct):
    """``usage.prompt_tokens_details``."""

    cached_tokens: int | None = None


class CompletionDetails(msgspec.Struct):
    """``usage.completion_tokens_details``."""

    reasoning_tokens: int | None = None


class Usage(msgspec.Struct):
    """``usage``: final, continuous, or null."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None


class Chunk(msgspec.Struct):
    """One event. ``error`` is whatever the server put there."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(Chunk)


def decode_chunk(data: bytes) -> Chunk:
    """Decode the data of one event.

    Raises:
        ValueError: if it is not JSON, or not of a completion's shape.
    """
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a completion chunk ({error}): {data[:120]!r}") from None


def error_text(error: Any) -> str:
    """One line of what an ``error`` member says: ``{"message": …}``, a string, or anything else."""
    if isinstance(error, dict) and "message" in error:
        code = error.get("code") or error.get("type")
        return f"{error['message']}" + (f" ({code})" if code else "")
    return str(error)


def body_error_text(body: bytes) -> str:
    """One line of what the body of a refused request says."""
    try:
        decoded = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return body.decode("utf-8", errors="replace")
    if isinstance(decoded, dict):
        for key in ("error", "detail", "message"):
            if decoded.get(key):
                return error_text(decoded[key])
    return str(decoded)
