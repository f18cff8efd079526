"""What LiteLLM is told: one deployment per arm, nothing that moves or adds load, and no keys."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from servers.proxy_config import backends, proxy_config
from tests.servers.launching import SERVERS


@contextmanager
def backend(model: str, key: str | None = None) -> Iterator[str]:
    """A server that lists one model, to those who bring the key."""

    class Models(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = key is None or self.headers["Authorization"] == f"Bearer {key}"
            self.send_response(200 if allowed and self.path == "/v1/models" else 401)
            self.end_headers()
            self.wfile.write(json.dumps({"data": [{"id": model}]}).encode())

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Models)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def configure(specs: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SERVERS / "proxy_config.py"), *args],
        env={**os.environ, "FACEOFF_BACKENDS": specs, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_arm_specs_become_urls() -> None:
    specs = "cache=http://h:1;caching=on;log=a=b mtp=https://h:2/"
    assert backends(specs) == {"cache": "http://h:1", "mtp": "https://h:2"}


@pytest.mark.parametrize("specs", ["", "cache", "cache=here"])
def test_anything_else_is_refused(specs: str) -> None:
    with pytest.raises(ValueError, match=r"FACEOFF_BACKENDS names no servers|is not of the form"):
        backends(specs)


def test_nothing_retries_cools_down_or_checks() -> None:
    config = proxy_config({"a": "http://h:1", "b": "http://h:2"}, {"a": "m", "b": "m"}, "off")
    assert [entry["model_info"]["id"] for entry in config["model_list"]] == ["a", "b"]
    assert {entry["model_name"] for entry in config["model_list"]} == {"m"}
    assert config["router_settings"]["num_retries"] == 0
    assert config["router_settings"]["disable_cooldowns"] is True
    assert config["general_settings"]["background_health_checks"] is False
    assert "optional_pre_call_checks" not in config["router_settings"]


def test_affinity_is_by_session() -> None:
    config = proxy_config({"a": "http://h:1"}, {"a": "m"}, "session")
    assert config["router_settings"]["optional_pre_call_checks"] == ["session_affinity"]


def test_keys_stay_in_the_environment() -> None:
    with backend("m", key="sk-one-secret") as first, backend("m") as second:
        done = configure(f"my-arm={first} other={second}", FACEOFF_API_KEY_MY_ARM="sk-one-secret")
    assert done.returncode == 0, done.stderr
    assert "sk-one-secret" not in done.stdout + done.stderr
    keys = [entry["litellm_params"]["api_key"] for entry in json.loads(done.stdout)["model_list"]]
    assert keys == ["os.environ/FACEOFF_API_KEY_MY_ARM", "none"]


def test_two_models_cannot_share_a_proxy() -> None:
    with backend("small") as first, backend("large") as second:
        done = configure(f"a={first} b={second}")
    assert done.returncode == 1
    assert done.stderr == "error: a proxy needs one model behind it, but a serves small, b serves large\n"


def test_a_backend_that_does_not_answer_is_named() -> None:
    done = configure("a=http://127.0.0.1:9")
    assert done.returncode == 1
    assert done.stderr.startswith("error: backend a at http://127.0.0.1:9 does not list its model:")
