"""The request body: one place that pins sampling, for the load and for the probe before it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

Message = dict[str, str]

#: Fields beyond ``model``, ``messages``, ``max_tokens`` and ``stream`` that a server may refuse. One that an
#: arm refuses (HTTP 400 that names it) is dropped on every arm, so that all arms still get the same request.
OPTIONAL_FIELDS: tuple[str, ...] = (
    "temperature",
    "ignore_eos",
    "chat_template_kwargs",
    "cache_salt",
    "stream_options",
)


def pinned_sampling(dropped: Collection[str] = ()) -> dict[str, Any]:
    """The sampling fields sent with every request, without those in ``dropped``.

    Greedy decoding to a fixed length with thinking off: every arm then does the same work, and outputs can
    be compared across arms.
    """
    fields: dict[str, Any] = {
        "temperature": 0,
        "ignore_eos": True,
        "chat_template_kwargs": {"enable_thinking": False},
        "stream_options": {"include_usage": True},
    }
    return {name: value for name, value in fields.items() if name not in dropped}


def chat_body(
    model: str,
    messages: Sequence[Message],
    max_tokens: int,
    *,
    cache_salt: str | None = None,
    stream: bool = True,
    dropped: Collection[str] = (),
) -> dict[str, Any]:
    """Body of ``POST /v1/chat/completions``.

    ``cache_salt`` separates prefix-cache entries (vLLM); None leaves the field out. Not streaming also leaves
    out ``stream_options``, which servers refuse there.
    """
    body: dict[str, Any] = {
        "model": model,
        "messages": list(messages),
        "max_tokens": max_tokens,
        "stream": stream,
        **pinned_sampling(dropped),
    }
    if not stream:
        body.pop("stream_options", None)
    if cache_salt is not None and "cache_salt" not in dropped:
        body["cache_salt"] = cache_salt
    return body
