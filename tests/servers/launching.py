"""A profile folder of one's own with a server that answers /health, and the launchers run on it for real."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

SERVERS = Path(__file__).resolve().parents[2] / "servers"

SERVER = """
import http.server, os, signal, subprocess, sys, pathlib
notes = pathlib.Path(os.environ["NOTES"])
mode = os.environ.get("MODE", "")
if mode == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode == "worker":
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (notes / "worker").write_text(str(worker.pid))
(notes / os.environ["ARM"]).write_text(str(os.getpid()))
if mode == "never":
    signal.pause()

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if (notes / "sick").exists() else 200)
        self.end_headers()
    def log_message(self, *args):
        pass

http.server.ThreadingHTTPServer((os.environ["HOST"], int(os.environ["PORT"])), Health).serve_forever()
"""

LAUNCH = """
if [ "${MODE-}" = broken ]; then
    echo "loading"
    echo "ValueError: no such model $FLAGS" >&2
    exit 3
fi
exec "$FACEOFF_PYTHON" "$(dirname "${BASH_SOURCE[0]}")/server.py"
"""


def free_port() -> int:
    """A port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def await_that(what: Callable[[], bool], message: str, limit: float = 30) -> None:
    """Polls until `what` holds; fails with `message` after `limit` seconds."""
    deadline = time.monotonic() + limit
    while not what():
        assert time.monotonic() < deadline, message
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


class OwnProfile:
    """A profile folder with arms as asked for, a state folder of its own, and the scripts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "mine"
        self.notes = folder / "notes"
        self.state = folder / "state"
        self.folder.mkdir()
        self.notes.mkdir()
        (self.folder / "server.py").write_text(SERVER)
        (self.folder / "launch.sh").write_text(LAUNCH)
        self.ports: dict[str, int] = {}
        self.env = {
            **os.environ,
            "FACEOFF_STATE": str(self.state),
            "NOTES": str(self.notes),
            "FACEOFF_STOP_LIMIT": "2",
            "PORT": "1",  # of the caller's own environment: must not move a server
        }

    def arm(self, name: str, **values: str) -> int:
        """Writes `<name>.env` with a free port; returns the port."""
        port = self.ports[name] = free_port()
        lines = [f"PORT={port}", *(f'{key}="{value}"' for key, value in values.items())]
        (self.folder / f"{name}.env").write_text("\n".join(lines) + "\n")
        return port

    def command(self, script: str, *args: str) -> list[str]:
        return ["bash", str(SERVERS / script), str(self.folder), *args]

    def run(self, script: str, *args: str) -> subprocess.CompletedProcess[str]:
        """Runs a launcher on this profile to its end."""
        return subprocess.run(
            self.command(script, *args),
            env=self.env,
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )

    def start(self, script: str, *args: str) -> subprocess.Popen[str]:
        """Starts a launcher in a process group of its own, as a terminal would."""
        return subprocess.Popen(
            self.command(script, *args),
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            process_group=0,
        )

    def pid(self, name: str) -> int:
        """The pid that a server (or its worker) wrote down; waits for it."""
        note = self.notes / name
        await_that(lambda: note.exists() and note.read_text() != "", f"{name} never started")
        return int(note.read_text())

    def state_folder(self) -> Path:
        (folder,) = self.state.glob("mine-*")
        return folder

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"


def own_profile(folder: Path) -> Iterator[OwnProfile]:
    """For a fixture: the profile, and afterwards nothing of it left running whatever the test did."""
    profile = OwnProfile(folder)
    yield profile
    profile.run("down.sh")
    for note in profile.notes.iterdir():
        if note.name != "sick" and is_alive(int(note.read_text() or 0)):
            os.kill(int(note.read_text()), signal.SIGKILL)
