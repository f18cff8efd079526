"""Plain HTTP to an arm for everything around the load: health, facts, metrics, single short requests.

Nothing here is on a measured path; timings are coarse (user space, one request at a time).
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import requests
import urllib3
from prometheus_client.parser import text_string_to_metric_families

from locustfiles.arms import Arm, ArmError, auth_headers, ca_bundle, key_variable

CONNECT_S = 5.0
ANSWER_S = 30.0
#: A first request may wait for a server's own warm-up.
GENERATE_S = 300.0
MAX_TEXT = 64 * 1024
#: A large vLLM's /metrics is a few hundred kilobytes.
MAX_BODY = 16 * 1024 * 1024
MAX_LINE = 4 * 1024 * 1024
#: Characters of the longest model name that is taken for one.
LONGEST_NAME = 300


def one_line(text: object, limit: int = 300) -> str:
    """Foreign text made safe to print: one line, no control characters, cut to ``limit``."""
    line = re.sub(r"\s+", " ", str(text)).strip()
    line = "".join(c if c.isprintable() else "?" for c in line)
    return line if len(line) <= limit else line[: limit - 1] + "…"


def usable_name(name: object) -> bool:
    """Whether a server's name for something can be sent, written and shown as it is."""
    return isinstance(name, str) and 0 < len(name) <= LONGEST_NAME and name.isprintable()


@dataclass
class Reply:
    """One streamed chat request. Seconds are wall time since it was sent; None = never."""

    status: int
    message: str = ""
    """The server's words where it refused, or its in-band error."""
    body: dict[str, Any] = field(default_factory=dict)
    """The refusal as JSON, where it was."""
    first_s: float | None = None
    last_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None

    @property
    def ok(self) -> bool:
        """HTTP 200 and no in-band error."""
        return self.status == 200 and not self.message


class Metrics:
    """One reading of a ``/metrics`` page: samples by name, with their labels."""

    def __init__(self, text: str) -> None:
        self.samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self.samples.setdefault(sample.name, []).append((dict(sample.labels), float(sample.value)))

    def total(self, name: str) -> float | None:
        """Sum over labels of a counter or gauge (``_total`` is tried too); None if there is none."""
        found = self.samples.get(name) or self.samples.get(name + "_total")
        return None if found is None else sum(value for _, value in found)

    def labels(self, name: str) -> dict[str, str]:
        """Labels of the first sample of that name."""
        found = self.samples.get(name)
        return found[0][0] if found else {}


class ArmHttp:
    """HTTP client of one arm. Proxies of the environment are not used: the load uses none either."""

    def __init__(self, arm: Arm, environ: Mapping[str, str] = os.environ) -> None:
        self.arm = arm
        self.headers = auth_headers(arm.name, environ)
        self.session = requests.Session()
        self.session.trust_env = False
        self.session.verify = ca_bundle(environ)

    def close(self) -> None:
        """Close the connections."""
        self.session.close()

    def _request(self, method: str, url: str, timeout: float = ANSWER_S, **more: Any) -> requests.Response:
        """One request; the key goes only to the arm's own address, and redirects are not followed."""
        headers = {"Accept-Encoding": "identity"}
        if url.startswith(self.arm.url + "/"):
            headers |= self.headers
        whole = not more.pop("stream", False)
        deadline = time.monotonic() + CONNECT_S + timeout
        try:
            response = self.session.request(
                *(method, url),
                headers=headers,
                timeout=(CONNECT_S, timeout),
                allow_redirects=False,
                stream=True,
                **more,
            )
            if whole:
                # requests would read for as long, and as much, as the server sends.
                response._content = _bounded(response.raw, deadline)
                response.close()
            return response
        except requests.exceptions.SSLError as error:
            raise ArmError(
                f"arm {self.arm.name}: TLS to {url} failed ({one_line(error, 120)}); "
                "a private CA goes into SSL_CERT_FILE"
            ) from None
        except requests.exceptions.Timeout:
            raise ArmError(f"arm {self.arm.name}: no answer from {url} within {timeout:g} s") from None
        except TooMuch as error:
            raise ArmError(f"arm {self.arm.name}: {url} {error}; is it an OpenAI server?") from None
        except (
            requests.exceptions.RequestException,
            urllib3.exceptions.HTTPError,
            OSError,
            ValueError,
        ) as error:
            raise ArmError(
                f"arm {self.arm.name}: cannot reach {url} ({_cause(error)}); is the server up?"
            ) from None

    def health(self, timeout: float = CONNECT_S) -> str | None:
        """None if the arm is alive, else why not.

        A proxy is asked for its models: LiteLLM's ``/health`` sends completions to its backends.
        """
        try:
            if not self.arm.behind_proxy:
                status = self._request("GET", self.arm.url + "/health", timeout).status_code
                if status == 200:
                    return None
                if status not in (401, 403, 404, 405):
                    return f"/health answers HTTP {status}"
            status = self._request("GET", self.arm.url + "/v1/models", timeout).status_code
            return None if status == 200 else f"/v1/models answers HTTP {status}"
        except ArmError as error:
            return str(error)

    def models(self) -> list[dict[str, Any]]:
        """Entries of ``/v1/models`` that have an id.

        Raises:
            ArmError: unreachable, refused, or no such list.
        """
        url = self.arm.url + "/v1/models"
        response = self._request("GET", url)
        if response.status_code in (401, 403):
            raise ArmError(
                f"arm {self.arm.name}: {url} answers HTTP {response.status_code}; "
                f"set {key_variable(self.arm.name)} or FACEOFF_API_KEY"
            )
        if response.status_code != 200:
            raise ArmError(
                f"arm {self.arm.name}: {url} answers HTTP {response.status_code}; is it an OpenAI server?"
            )
        try:
            entries = response.json()["data"]
            return [entry for entry in entries if usable_name(entry["id"])]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ArmError(
                f"arm {self.arm.name}: {url} gives no list of models; is it an OpenAI server?"
            ) from None

    def version(self) -> dict[str, Any]:
        """``/version`` (vLLM and the simulator), {} where there is none.

        Of a proxy: what the servers behind it agree in.
        """
        answers = [self._version(server) for server in self.arm.servers]
        return {
            key: value
            for key, value in answers[0].items()
            if all(key in a and a[key] == value for a in answers)
        }

    def _version(self, server: str) -> dict[str, Any]:
        try:
            response = self._request("GET", server + "/version")
            answer = response.json() if response.status_code == 200 else {}
        except (ArmError, ValueError, RecursionError):
            return {}
        return answer if isinstance(answer, dict) else {}

    def metrics(self) -> list[Metrics | None]:
        """A reading of every metrics URL of the arm; None where there is none."""
        return [self._metrics(url) for url in self.arm.metrics_urls]

    def _metrics(self, url: str) -> Metrics | None:
        try:
            response = self._request("GET", url)
            return Metrics(response.text) if response.status_code == 200 else None
        except (ArmError, ValueError):
            return None

    def tokenizes(self, model: str) -> bool:
        """True if ``/tokenize`` answers with a count."""
        try:
            response = self._request(
                "POST", self.arm.url + "/tokenize", json={"model": model, "prompt": "one two three"}
            )
            return response.status_code == 200 and isinstance(response.json().get("count"), int)
        except (ArmError, ValueError, AttributeError):
            return False

    def set_clock_scale(self, scale: float, patience_s: float = 10.0) -> None:
        """Set a simulator's clock scale (a proxy's: of all simulators behind it).

        It refuses while requests are in flight, so try again for a while.

        Raises:
            ArmError: if it does not take it.
        """
        for server in self.arm.servers:
            self._set_clock_scale(server, scale, time.monotonic() + patience_s)

    def _set_clock_scale(self, server: str, scale: float, deadline: float) -> None:
        while True:
            response = self._request("POST", server + "/clock_scale", json={"clock_scale": scale})
            if response.status_code == 200:
                return
            if response.status_code != 409 or time.monotonic() > deadline:
                raise ArmError(
                    f"arm {self.arm.name}: clock scale {scale:g} refused, HTTP {response.status_code}: "
                    f"{one_line(response.text, 160)}"
                )
            time.sleep(0.2)

    def chat(self, body: dict[str, Any], timeout: float = GENERATE_S) -> Reply:
        """Send one streaming chat request and read it to its end.

        Raises:
            ArmError: if the connection fails or breaks.
        """
        started = time.monotonic()
        response = self._request(
            "POST", self.arm.url + "/v1/chat/completions", timeout, json=body, stream=True
        )
        try:
            reply = Reply(response.status_code)
            if response.status_code != 200:
                raw = response.raw.read(MAX_TEXT, decode_content=True)
                reply.message, reply.body = _refusal(raw)
                return reply
            for line, at in _lines(response.raw):
                if line.startswith(b"data:"):
                    _take(reply, line[5:].strip(), at - started)
            return reply
        except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            raise ArmError(f"arm {self.arm.name}: a short request broke off ({_cause(error)})") from None
        finally:
            response.close()


class TooMuch(Exception):
    """An answer that does not end in the time or size that any sane one takes."""


def _bounded(raw: urllib3.BaseHTTPResponse, deadline: float) -> bytes:
    """A whole body.

    Raises:
        TooMuch: behind the deadline (monotonic seconds), or past ``MAX_BODY`` bytes.
    """
    body = bytearray()
    while data := raw.read1(MAX_TEXT, decode_content=True):
        body += data
        if len(body) > MAX_BODY:
            raise TooMuch(f"answers more than {MAX_BODY >> 20} MB")
        if time.monotonic() > deadline:
            raise TooMuch("answers without an end")
    return bytes(body)


def _lines(raw: urllib3.BaseHTTPResponse) -> Iterator[tuple[bytes, float]]:
    """Lines of a body with the time at which they were read, as soon as they arrive.

    Not ``iter_lines``: it waits for the end of a body that comes without chunked encoding.
    """
    rest = b""
    while data := raw.read1(MAX_TEXT, decode_content=True):
        at = time.monotonic()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line, at
        if len(rest) > MAX_LINE:
            raise OSError(f"a line of more than {MAX_LINE} bytes")


def _cause(error: Exception) -> str:
    """The last cause of a nested connection error, in words."""
    text = str(error)
    for sign in (
        "Connection refused",
        "Name or service not known",
        "No route to host",
        "Network is unreachable",
    ):
        if sign in text:
            return sign.lower()
    return one_line(text, 120)


def _refusal(raw: bytes) -> tuple[str, dict[str, Any]]:
    """(words, JSON) of an error body."""
    text = raw.decode("utf-8", errors="replace")
    try:
        body = json.loads(text)
    except ValueError:
        return text or "no reason given", {}
    if not isinstance(body, dict):
        return text, {}
    error = body.get("error", body)
    message = error.get("message") if isinstance(error, dict) else error
    return (message if isinstance(message, str) and message else text), body


def _take(reply: Reply, data: bytes, at_s: float) -> None:
    """Fold one SSE event into the reply; anything that is not understood is skipped."""
    if data == b"[DONE]":
        return
    try:
        event = json.loads(data)
    except ValueError:
        return
    if not isinstance(event, dict):
        return
    if event.get("error"):
        reply.message = _refusal(data)[0]
        return
    usage = event.get("usage")
    if isinstance(usage, dict):
        reply.prompt_tokens = _whole(usage.get("prompt_tokens"))
        reply.output_tokens = _whole(usage.get("completion_tokens"))
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            reply.cached_tokens = _whole(details.get("cached_tokens"))
    choices = event.get("choices")
    for choice in choices if isinstance(choices, list) else []:
        if not isinstance(choice, dict):
            continue
        delta = choice.get("delta")
        parts = ("content", "reasoning", "reasoning_content", "tool_calls")
        if isinstance(delta, dict) and any(delta.get(part) for part in parts):
            reply.first_s = at_s if reply.first_s is None else reply.first_s
            reply.last_s = at_s
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
