"""Servers for the client's tests: real sockets on loopback, scripted byte by byte."""

import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.locustfiles.cells import simulator

Script = Callable[[socket.socket, bytes], None]


class ScriptedServer:
    """Answers each request on each connection by calling a script with the socket and the request's bytes."""

    def __init__(self, script: Script):
        self._script = script
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self.requests: list[bytes] = []
        self.failures: list[BaseException] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock):
        with sock:
            while True:
                try:
                    request = read_request(sock)
                    if not request:
                        return
                    self.requests.append(request)
                    self._script(sock, request)
                except OSError:
                    return  # the client hung up, or the script closed the socket
                except BaseException as error:
                    self.failures.append(error)
                    raise

    def close(self):
        self._listener.close()


def read_request(sock: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        piece = sock.recv(65536)
        if not piece:
            return b""
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        (int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0
    )
    while len(body) < length:
        piece = sock.recv(65536)
        if not piece:
            return b""
        body += piece
    return head + b"\r\n\r\n" + body


def reset(sock: socket.socket) -> None:
    """Close with RST instead of FIN."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.fixture
def scripted() -> Iterator[Callable[[Script], ScriptedServer]]:
    servers: list[ScriptedServer] = []

    def make(script: Script) -> ScriptedServer:
        servers.append(ScriptedServer(script))
        return servers[-1]

    yield make
    for server in servers:
        server.close()
        assert not server.failures


@pytest.fixture(scope="module")
def metronome() -> Iterator[str]:
    """URL of a metronome: first token 300 ms after the request, then a chunk every 20 ms."""
    with subprocess.Popen(
        [sys.executable, "-m", "servers.metronome"], stdout=subprocess.PIPE, text=True
    ) as process:
        yield process.stdout.readline().split()[1]
        process.terminate()


@pytest.fixture(scope="session")
def cached() -> Iterator[str]:
    """URL of a simulator with prefix caching."""
    with simulator("--enable-prefix-caching") as (url, _):
        yield url


@pytest.fixture(scope="session")
def plain() -> Iterator[str]:
    """URL of a simulator without prefix caching."""
    with simulator("--no-enable-prefix-caching") as (url, _):
        yield url


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A folder to work in with the test file's PLAN as plan.toml, and no knobs in the environment."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("FACEOFF_")]:
        monkeypatch.delenv(name)
    (tmp_path / "plan.toml").write_text(request.module.PLAN, encoding="utf-8")
    return tmp_path
