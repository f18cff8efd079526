"""A real LiteLLM proxy over two simulated servers: who serves what, and what it must not do."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from tests.real.conftest import ROOT, launcher

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

# Runs while the proxies are up: 3 sessions of 8 requests through each, then what the servers counted.
COMMAND = """
import json, os, requests, sys
from pathlib import Path
arms = dict(spec.split("=", 1) for spec in os.environ["FACEOFF_ARMS"].split())
url = {name: spec.split(";")[0] for name, spec in arms.items()}
result = {"arms": arms, "served": {}, "cmdlines": ""}
model = requests.get(url["cache"] + "/v1/models").json()["data"][0]["id"]
for proxy in ("proxy", "affinity"):
    key = os.environ["FACEOFF_API_KEY_" + proxy.upper()]
    for session in "abc":
        for turn in range(8):
            answer = requests.post(
                url[proxy] + "/v1/chat/completions",
                headers={"Authorization": "Bearer " + key, "x-litellm-session-id": session},
                json={
                    "model": model, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True,
                    "stream_options": {"include_usage": True}, "cache_salt": "one",
                    "chat_template_kwargs": {"enable_thinking": False},
                    "messages": [{"role": "user", "content": "one two three"}],
                },
            )
            answer.raise_for_status()
            events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith(b"data: {")]
            usage = [event["usage"] for event in events if event.get("usage")]
            assert usage[0]["completion_tokens"] == 4, usage
            result["served"].setdefault(proxy, {}).setdefault(session, []).append(
                answer.headers["x-litellm-model-id"])
result["refused"] = requests.post(url["proxy"] + "/v1/chat/completions", json={"model": model}).status_code
for arm in ("cache", "mtp"):
    lines = requests.get(url[arm] + "/metrics").text.splitlines()
    result[arm] = sum(float(line.split()[-1]) for line in lines
                      if line.startswith("vllm:request_success_total{"))
for path in Path("/proc").glob("[0-9]*/cmdline"):
    try:
        result["cmdlines"] += path.read_text()
    except OSError:
        pass
result["key"] = os.environ["FACEOFF_API_KEY_PROXY"]
print(json.dumps(result))
"""


LAUNCH = """
exec "$FACEOFF_PYTHON" -m servers.sim --host "$HOST" --port "$PORT" --served-model-name tiny \\
    --calibration servers/calibrations/h100-qwen3.8-27b.toml --clock-scale 10
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    profile = tmp_path_factory.mktemp("profile")
    (profile / "launch.sh").write_text(LAUNCH)
    for arm in ("cache", "mtp"):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            (profile / f"{arm}.env").write_text(f"PORT={probe.getsockname()[1]}\n")
    command = [".venv/bin/python", "-c", COMMAND]
    done = launcher("proxy.sh", str(profile), "cache mtp", "--", *command, FACEOFF_PROXIES="proxy affinity")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_the_proxies_are_arms_whose_metrics_are_at_the_backends(seen: dict[str, Any]) -> None:
    assert list(seen["arms"]) == ["cache", "mtp", "proxy", "affinity"]
    parts = seen["arms"]["proxy"].split(";")
    assert parts[0] == "http://127.0.0.1:4000"
    urls = [seen["arms"][arm].split(";")[0] for arm in ("cache", "mtp")]
    assert f"metrics={','.join(urls)}" in parts


def test_without_affinity_a_session_is_spread(seen: dict[str, Any]) -> None:
    served = seen["served"]["proxy"]
    everywhere = [arm for session in served.values() for arm in session]
    assert set(everywhere) == {"cache", "mtp"}  # by chance all on one side: 2 in 16 million
    assert any(len(set(session)) == 2 for session in served.values())


def test_with_affinity_a_session_stays(seen: dict[str, Any]) -> None:
    for session, arms in seen["served"]["affinity"].items():
        assert len(set(arms)) == 1, session


def test_the_backends_saw_our_requests_and_no_others(seen: dict[str, Any]) -> None:
    served = [arm for proxy in seen["served"].values() for session in proxy.values() for arm in session]
    assert seen["cache"] == served.count("cache")
    assert seen["mtp"] == served.count("mtp")


def test_the_key_is_asked_for_and_shown_nowhere(seen: dict[str, Any]) -> None:
    assert seen["refused"] >= 400
    assert seen["key"].startswith("sk-")
    assert len(seen["key"]) > 40
    assert seen["key"] not in seen["cmdlines"]
    folder = ROOT / "results/servers/proxy"
    for path in [*folder.glob("*.log"), *folder.glob("*.yaml")]:
        assert seen["key"] not in path.read_text(), path
    assert (folder / "master-key").stat().st_mode & 0o077 == 0


def test_nothing_is_left(seen: dict[str, Any]) -> None:
    assert not list((ROOT / "results/servers/proxy").glob("*.pid"))
    for spec in seen["arms"].values():
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", int(spec.split(";")[0].rpartition(":")[2]))) != 0
