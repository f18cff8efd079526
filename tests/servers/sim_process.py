"""A simulator process for tests: started on a free port, stopped whatever happens."""

import json
import subprocess
import sys
import tempfile
import time

import requests

MODEL = "qwen3.8-27b"


class SimProcess:
    """``with SimProcess(*flags) as sim``: ``sim.url``, ``sim.port``, ``sim.process``, ``sim.errors()``."""

    def __init__(self, *flags, wait=True):
        self._wait = wait
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        # Later flags win, so a test may say another scale or port.
        command = [sys.executable, "-m", "servers.sim", "--port", "0", "--clock-scale", "20", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._stderr, text=True)

    def __enter__(self):
        if self._wait:
            line = self.process.stdout.readline()
            assert line.startswith("listening on "), self.errors()
            self.url = line.split()[-1]
            self.port = int(self.url.rsplit(":", 1)[1])
        return self

    def __exit__(self, *exc):
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self._stderr.close()

    def errors(self):
        """What it wrote to stderr so far."""
        self._stderr.seek(0)
        return self._stderr.read().decode()

    def wait_for(self, condition, seconds=20):
        """Poll until the condition holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "the condition never held"
            time.sleep(0.01)


def chat(text, **fields):
    """A streamed chat body of one user message."""
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0,
        **fields,
    }


def raw_post(text, **fields):
    """The bytes of an HTTP request with such a body, for tests that hold the socket themselves."""
    body = json.dumps(chat(text, **fields)).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    return head + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def events(sim, body, path="/v1/chat/completions", headers=None):
    """The JSON events of a stream, and whether it ended with [DONE]."""
    with requests.post(sim.url + path, json=body, headers=headers, stream=True, timeout=30) as reply:
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in reply.iter_lines() if line]
    data = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]
    done = bool(data) and data[-1] == b"[DONE]"
    return [json.loads(item) for item in data if item != b"[DONE]"], done


def cached_tokens(found):
    """Cached prompt tokens of a stream with usage."""
    return found[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]


def metric(sim, name, **labels):
    """One sample of the metrics page."""
    page = requests.get(sim.url + "/metrics", timeout=10).text
    for line in page.splitlines():
        if line.startswith(name + "{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no {name} {labels}")
