"""Ask a server how many tokens a prompt has.

``POST /tokenize`` in its chat form where the server has it (as vLLM does); else the ``usage`` of chat
requests for a single token, which costs a prefill each.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

import msgspec
import requests

from locustfiles.arms import ca_bundle
from locustfiles.body import Message, chat_body

#: Seconds. The tokens of a long prompt take a moment; a server busy with other work takes longer.
CONNECT_TIMEOUT = 10.0
READ_TIMEOUT = 120.0
#: Bytes of an answer that are read before giving up: ids of a million tokens fit.
MAX_ANSWER = 32 * 1024 * 1024
#: Answers to /tokenize that mean "not here" or "not in this form".
NOT_HERE = frozenset({400, 404, 405, 422, 501})
BUSY = frozenset({429, 503})
ATTEMPTS = 4
#: Requests in flight in ``count_each``.
AT_ONCE = 8

#: Anything a prompt may hold, and more: a larger count is a broken answer.
_MAX_COUNT = 1 << 31


class TokenCountError(RuntimeError):
    """A count could not be had; the message says what happened, where and what to do.

    ``status`` is the HTTP status of a refusal, None where the server gave no answer or an unusable one.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class TokenCounter:
    """Counts tokens with a server's own tokenizer and chat template.

    ``source`` says how: "tokenize", or "usage" once the server turned out to have no usable ``/tokenize``.
    ``requests`` counts the requests sent. Header values (API keys) appear in no message.
    """

    def __init__(
        self, url: str, model: str, headers: Mapping[str, str] | None = None, dropped: Collection[str] = ()
    ) -> None:
        self.model = model
        self.source: Literal["tokenize", "usage"] = "tokenize"
        self.requests = 0
        self._url = url.rstrip("/")
        self._dropped = frozenset(dropped)
        self._headers = dict(headers or {})
        self._lock = threading.Lock()
        self._idle: list[requests.Session] = []
        self._base: int | None = None
        self._proven = (
            False  # /tokenize has worked: from then on a refusal is an error, not a reason to fall back
        )

    def close(self) -> None:
        """Close all connections. Counting again opens new ones."""
        while self._idle:
            self._idle.pop().close()

    def count_each(self, prompts: Sequence[Sequence[Message]]) -> list[int]:
        """``count_messages`` of many prompts, several at a time: what counts is the way to the server.

        Raises:
            TokenCountError: if one of them cannot be counted.
        """
        first = [self.count_messages(prompt) for prompt in prompts[:1]]  # settles the source
        if len(prompts) < 2:
            return first
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return first + list(pool.map(self.count_messages, prompts[1:]))

    def count_messages(self, messages: Sequence[Message]) -> int:
        """Prompt tokens of a chat request, template and generation prompt included.

        Raises:
            TokenCountError: if the server cannot be asked or gives no usable answer.
        """
        if self.source == "tokenize":
            answer = self._tokenize(self._chat_form(messages))
            if answer is not None:
                return self._count_of(answer)
            self.source = "usage"
        return self._usage(messages)

    def count_ids(self, messages: Sequence[Message]) -> list[int] | None:
        """Token ids of a chat request's prompt, or None where the server gives none.

        Raises:
            TokenCountError: if the server cannot be asked.
        """
        if self.source != "tokenize":
            return None
        answer = self._tokenize(self._chat_form(messages))
        ids = answer.get("tokens") if answer is not None else None
        if not isinstance(ids, list) or not ids or not all(type(item) is int for item in ids):
            return None
        return ids

    def count_text(self, text: str) -> int:
        """Tokens of bare text, without special tokens. With ``source`` "usage": the tokens that the text adds
        to a user message.

        Raises:
            TokenCountError: if the server cannot be asked or gives no usable answer.
        """
        if self.source == "tokenize":
            answer = self._tokenize({"model": self.model, "prompt": text, "add_special_tokens": False})
            if answer is not None:
                return self._count_of(answer)
            self.source = "usage"
        if not text:
            return 0
        if self._base is None:
            self._base = self._usage([{"role": "user", "content": "Text:"}])
        return self._usage([{"role": "user", "content": "Text: " + text}]) - self._base

    def _chat_form(self, messages: Sequence[Message]) -> dict[str, Any]:
        body = chat_body(self.model, messages, 1, stream=False, dropped=self._dropped)
        form = {"model": self.model, "messages": body["messages"], "add_generation_prompt": True}
        if "chat_template_kwargs" in body:
            form["chat_template_kwargs"] = body["chat_template_kwargs"]
        return form

    def _tokenize(self, form: dict[str, Any]) -> dict[str, Any] | None:
        """The answer of /tokenize, or None if the server has no /tokenize that takes this form."""
        status, answer = self._post("/tokenize", form)
        usable = status == 200 and answer is not None and "count" in answer
        if not usable and not self._proven and (status == 200 or status in NOT_HERE):
            return None
        if not usable:
            raise TokenCountError(self._refusal("/tokenize", status, answer), status)
        self._proven = True
        return answer

    def _count_of(self, answer: dict[str, Any]) -> int:
        count = answer.get("count")
        if type(count) is not int or not 0 <= count < _MAX_COUNT:
            raise TokenCountError(
                f"{self._place('/tokenize')} answered with an impossible count: {_short(count)}"
            )
        return count

    def _usage(self, messages: Sequence[Message]) -> int:
        # A fresh salt each time: counting must not warm any cache.
        salt = secrets.token_hex(8)
        body = chat_body(self.model, messages, 1, stream=False, cache_salt=salt, dropped=self._dropped)
        path = "/v1/chat/completions"
        status, answer = self._post(path, body)
        if status != 200:
            raise TokenCountError(self._refusal(path, status, answer), status)
        usage = (answer or {}).get("usage")
        count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        if type(count) is not int or not 0 < count < _MAX_COUNT:
            raise TokenCountError(
                f"{self._place(path)} reports no usable usage.prompt_tokens ({_short(count)}), and the "
                "server has no /tokenize: name a direct arm to count tokens with, or pass --token-table"
            )
        return count

    def _post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any] | None]:
        """Status and JSON object (None if the answer is something else). Retries what is worth a retry."""
        data = msgspec.json.encode(body)
        for attempt in range(1, ATTEMPTS + 1):
            with self._lock:
                self.requests += 1
            try:
                status, raw, wait = self._exchange(path, data)
            except requests.ConnectionError as error:
                # A keep-alive connection that the server closed meanwhile looks like this, once.
                if attempt == 1:
                    continue
                raise TokenCountError(
                    f"{self._place(path)} cannot be reached ({_cause(error)}): is it up?"
                ) from None
            except requests.Timeout:
                raise TokenCountError(
                    f"{self._place(path)} did not answer within {READ_TIMEOUT:.0f} s: is the server stuck?"
                ) from None
            except (requests.RequestException, ValueError) as error:
                raise TokenCountError(f"{self._place(path)} failed: {_cause(error)}") from None
            if status in BUSY and attempt < ATTEMPTS:
                time.sleep(wait)
                continue
            break
        try:
            answer = msgspec.json.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            answer = None
        return status, answer if isinstance(answer, dict) else None

    @contextmanager
    def _session(self) -> Iterator[requests.Session]:
        """A session for one exchange: an idle one with its open connection, else a new one."""
        try:
            session = self._idle.pop()
        except IndexError:
            session = requests.Session()
            # Neither proxies nor .netrc of the environment: the load itself uses none of them.
            session.trust_env = False
            session.verify = ca_bundle()
            session.headers.update(self._headers)
        try:
            yield session
        finally:
            self._idle.append(session)

    def _exchange(self, path: str, data: bytes) -> tuple[int, bytes, float]:
        """Status, body, and seconds to wait before trying again if the server was busy."""
        deadline = time.monotonic() + READ_TIMEOUT
        with (
            self._session() as session,
            session.post(
                self._url + path,
                data=data,
                headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
                timeout=(CONNECT_TIMEOUT, READ_TIMEOUT),
                allow_redirects=False,
                stream=True,
            ) as response,
        ):
            parts: list[bytes] = []
            size = 0
            for part in response.iter_content(65536):
                parts.append(part)
                size += len(part)
                if size > MAX_ANSWER:
                    raise ValueError(f"its answer is longer than {MAX_ANSWER >> 20} MiB")
                if time.monotonic() > deadline:
                    raise ValueError(f"its answer did not end within {READ_TIMEOUT:.0f} s")
            try:
                wait = float(response.headers.get("Retry-After", "0.5"))
            except ValueError:
                wait = 0.5
            return response.status_code, b"".join(parts), wait if 0 <= wait <= 5 else 5.0

    def _place(self, path: str) -> str:
        """The URL without credentials or query."""
        parts = urlsplit(self._url)
        host = parts.netloc.rpartition("@")[2]
        return "POST " + urlunsplit((parts.scheme, host, parts.path + path, "", ""))

    def _refusal(self, path: str, status: int, answer: dict[str, Any] | None) -> str:
        error = (answer or {}).get("error", (answer or {}).get("message", (answer or {}).get("detail")))
        if isinstance(error, dict):
            error = error.get("message")
        said = f": {_short(error)}" if isinstance(error, str) and error else ""
        hint = {
            401: " (set FACEOFF_API_KEY)",
            403: " (is FACEOFF_API_KEY the right one?)",
            404: f" (does the server list the model {self.model!r} at /v1/models?)",
        }.get(status, "")
        return f"{self._place(path)} answered HTTP {status}{said}{hint}"


def _short(value: object) -> str:
    """At most 200 printable characters of something a server said."""
    text = value if isinstance(value, str) else repr(value)
    return "".join(c if c.isprintable() else " " for c in text[:200])


def _cause(error: BaseException) -> str:
    """The innermost reason of an exception from requests, which wraps several layers (and quotes the URL)."""
    seen: BaseException = error
    while True:
        inner = seen.__cause__ or seen.__context__
        reason = getattr(seen, "reason", None)
        if isinstance(reason, BaseException):
            inner = reason
        elif seen.args and isinstance(seen.args[0], BaseException):
            inner = seen.args[0]
        if inner is None:
            break
        seen = inner
    text = seen.strerror if isinstance(seen, OSError) and seen.strerror else str(seen)
    return _short(text or type(seen).__name__)
