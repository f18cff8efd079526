"""Prints the configuration of a LiteLLM proxy over the servers in FACEOFF_BACKENDS.

One model group, one deployment per server, named like the arm: the response header `x-litellm-model-id` then
says which arm served a request. Retries, cooldowns and health checks are off or explicit, since each of them
moves load or adds it. Keys are never written down, only the names of the variables that hold them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from typing import Any


def backends(specs: str) -> dict[str, str]:
    """Arm → URL of `name=url[;key=value…]`, space separated. Raises ValueError for anything else."""
    found = {}
    for spec in specs.split():
        name, equals, rest = spec.partition("=")
        url = rest.partition(";")[0].rstrip("/")
        if not equals or "://" not in url:
            raise ValueError(f"{spec!r} is not of the form name=http://host:port")
        found[name] = url
    if not found:
        raise ValueError("FACEOFF_BACKENDS names no servers")
    return found


def key_variable(arm: str) -> str | None:
    """The environment variable that holds a backend's API key, if there is one."""
    for name in (f"FACEOFF_API_KEY_{arm.upper().replace('-', '_')}", "FACEOFF_API_KEY"):
        if os.environ.get(name):
            return name
    return None


def served_model(arm: str, url: str) -> str:
    """The model that a backend lists first. Raises ValueError when it does not answer."""
    variable = key_variable(arm)
    headers = {"Authorization": f"Bearer {os.environ[variable]}"} if variable else {}
    try:
        request = urllib.request.Request(f"{url}/v1/models", headers=headers)
        with urllib.request.urlopen(request, timeout=10) as response:
            return str(json.load(response)["data"][0]["id"])
    except (OSError, ValueError, KeyError, IndexError) as problem:
        raise ValueError(f"backend {arm} at {url} does not list its model: {problem}") from problem


def proxy_config(urls: dict[str, str], models: dict[str, str], affinity: str) -> dict[str, Any]:
    """The configuration as LiteLLM reads it; `affinity` is off or session."""
    group = next(iter(models.values()))
    router: dict[str, Any] = {
        # Random choice per request: the default, said so. No strategy of LiteLLM knows about prefixes.
        "routing_strategy": "simple-shuffle",
        # A retry would hide a failure and load a server twice.
        "num_retries": 0,
        # After a failure LiteLLM would leave a server alone for a while and load the others.
        "disable_cooldowns": True,
        "timeout": 3600,
    }
    if affinity == "session":
        router["optional_pre_call_checks"] = ["session_affinity"]
        router["deployment_affinity_ttl_seconds"] = 3600
    return {
        "model_list": [
            {
                "model_name": group,
                "litellm_params": {
                    "model": f"hosted_vllm/{models[arm]}",
                    "api_base": f"{url}/v1",
                    "api_key": f"os.environ/{key_variable(arm)}" if key_variable(arm) else "none",
                },
                "model_info": {"id": arm},
            }
            for arm, url in urls.items()
        ],
        "router_settings": router,
        "litellm_settings": {
            "num_retries": 0,
            "request_timeout": 3600,
            "telemetry": False,
            "turn_off_message_logging": True,
        },
        "general_settings": {
            "master_key": "os.environ/LITELLM_MASTER_KEY",
            # Background checks send real completions to the servers under measurement.
            "background_health_checks": False,
        },
    }


def main() -> None:
    """Prints the configuration (JSON, which is YAML)."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--affinity", choices=("off", "session"), default="off")
    arguments = parser.parse_args()
    try:
        urls = backends(os.environ.get("FACEOFF_BACKENDS", ""))
        models = {arm: served_model(arm, url) for arm, url in urls.items()}
    except ValueError as problem:
        sys.exit(f"error: {problem}")
    if len(set(models.values())) > 1:
        listing = ", ".join(f"{arm} serves {model}" for arm, model in models.items())
        sys.exit(f"error: a proxy needs one model behind it, but {listing}")
    print(json.dumps(proxy_config(urls, models, arguments.affinity), indent=1))


if __name__ == "__main__":
    main()
