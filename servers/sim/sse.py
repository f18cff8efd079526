"""Responses as vLLM shapes them: event streams from prebuilt JSON fragments, and whole bodies."""

from __future__ import annotations

import time
from typing import Protocol

import msgspec

from .protocol import Exchange
from .request import Request
from .text import Answer


class Sink(Protocol):
    """Where a request's tokens go."""

    @property
    def limit(self) -> int:
        """Tokens that the request might have had: what it asked for, or the rest of the context."""

    def push(self, tokens: int, finished: bool) -> None:
        """``tokens`` more tokens exist; ``finished`` with the last ones."""


def running_usage(request: Request, generated: int) -> bytes:
    """The ``usage`` object of an event that is not the last: no details."""
    prompt = request.prompt_tokens
    return b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}' % (
        prompt,
        prompt + generated,
        generated,
    )


def usage_json(request: Request) -> bytes:
    """The ``usage`` object of a whole response."""
    counts = running_usage(request, request.generated)
    return counts[:-1] + b',"prompt_tokens_details":{"cached_tokens":%d}}' % request.cached_tokens


class Reply:
    """What all responses to one request share: identity, shape and text."""

    def __init__(
        self, exchange: Exchange, request: Request, answer: Answer, model: str, chat: bool, limit: int
    ) -> None:
        self.exchange = exchange
        self.limit = limit
        self.request = request
        self.answer = answer
        self.chat = chat
        self.key = request.key
        self.model_json = msgspec.json.encode(model)
        self.created = int(time.time())

    def text(self, start: int, stop: int) -> bytes:
        """Answer text of tokens ``start`` to ``stop``; a chat answer starts without the space."""
        text = self.answer.text(start, stop)
        return text[1:] if self.chat and start == 0 else text

    def head(self, kind: bytes) -> bytes:
        """The opening of every JSON object of this response."""
        return b'{"id":"%b","object":"%b","created":%d,"model":%b,"choices":[' % (
            self.key.encode(),
            kind,
            self.created,
            self.model_json,
        )


class StreamReply:
    """A streamed response. A client that reads slowly gets merged deltas, as from vLLM."""

    def __init__(self, reply: Reply, include_usage: bool = False, continuous_usage: bool = False) -> None:
        self.reply = reply
        self.exchange, self.request, self.chat = reply.exchange, reply.request, reply.chat
        self.include_usage = include_usage
        self.continuous_usage = continuous_usage
        self.produced = self.sent = 0
        self.head_sent = self.started = False
        self.opening = b"data: " + reply.head(b"chat.completion.chunk" if self.chat else b"text_completion")
        if self.chat:
            self._before = self.opening + b'{"index":0,"delta":{"content":"'
            self._after = b'"},"logprobs":null,"finish_reason":null}]'
        else:
            self._before = self.opening + b'{"index":0,"text":"'
            self._after = b'","logprobs":null,"finish_reason":null,"stop_reason":null}]'
        self.exchange.on_room = self.flush

    @property
    def limit(self) -> int:
        """See Sink."""
        return self.reply.limit

    def closing(self, sent: int) -> bytes:
        """The end of an event that is not the last, with ``sent`` tokens sent up to its own."""
        if self.continuous_usage:
            return b',"usage":' + running_usage(self.request, sent) + b"}\n\n"
        return b"}\n\n"

    def role_event(self) -> bytes:
        """The first event of a chat stream: the role, no text."""
        delta = b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        return self.opening + delta + self.closing(0)

    def take(self, stop: int) -> bytes:
        """The text up to token ``stop`` that was not sent yet; it counts as sent now."""
        text = self.reply.text(self.sent, stop)
        self.sent = stop
        return text

    def text_event(self, text: bytes) -> bytes:
        """An event that carries text."""
        return self._before + text + self._after + self.closing(self.sent)

    def last_event(self, text: bytes) -> bytes:
        """The event with the last text and the finish reason."""
        reason = self.request.finish_reason.encode()
        if self.chat:
            after = b'"},"logprobs":null,"finish_reason":"%b","stop_reason":null}]' % reason
        else:
            after = b'","logprobs":null,"finish_reason":"%b","stop_reason":null}]' % reason
        return self._before + text + after + self.closing(self.sent)

    def usage_event(self) -> bytes:
        """The event behind the last choice."""
        return self.opening + b'],"usage":' + usage_json(self.request) + b"}\n\n"

    def push(self, tokens: int, finished: bool) -> None:
        """See Sink."""
        self.produced += tokens
        if finished:
            self.finish()
        elif not self.exchange.congested:
            self.flush()

    def start(self) -> bytes:
        """Status, headers and role, the first time; then nothing."""
        if self.started:
            return b""
        self.started = True
        head = self.start_head()
        return head + self.exchange.frame(self.role_event()) if self.chat else head

    def start_head(self) -> bytes:
        """Status and headers, the first time; then nothing."""
        if self.head_sent:
            return b""
        self.head_sent = True
        return self.exchange.stream_head()

    def flush(self) -> None:
        """Send what exists."""
        if self.sent == self.produced:
            return
        data = self.exchange.frame(self.text_event(self.take(self.produced)))
        self.exchange.write(data if self.started else self.start() + data)

    def finish(self) -> None:
        """Send the rest, usage and the end."""
        frame = self.exchange.frame
        data = self.start() + frame(self.last_event(self.take(self.produced)))
        if self.include_usage:
            data += frame(self.usage_event())
        self.exchange.end(data + frame(b"data: [DONE]\n\n"))


class WholeReply:
    """A response in one piece."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply

    @property
    def limit(self) -> int:
        """See Sink."""
        return self.reply.limit

    def push(self, tokens: int, finished: bool) -> None:
        """See Sink."""
        if not finished:
            return
        reply, request = self.reply, self.reply.request
        text = msgspec.json.encode(reply.text(0, request.generated).decode())
        reason = request.finish_reason.encode()
        if reply.chat:
            body = reply.head(b"chat.completion") + (
                b'{"index":0,"message":{"role":"assistant","content":%b,"refusal":null,"tool_calls":[]},'
                b'"logprobs":null,"finish_reason":"%b","stop_reason":null}]' % (text, reason)
            )
        else:
            body = reply.head(b"text_completion") + (
                b'{"index":0,"text":%b,"logprobs":null,"finish_reason":"%b","stop_reason":null}]'
                % (text, reason)
            )
        reply.exchange.respond(200, body + b',"usage":' + usage_json(request) + b"}")
