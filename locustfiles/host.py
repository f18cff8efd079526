"""Facts for the manifest: the machine that makes the load, and the code that makes it."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("locust", "gevent", "geventhttpclient", "msgspec", "requests")


def host_facts() -> dict[str, Any]:
    """What a reader needs to judge the load generator's machine. Holds no host name, user or path.

    ``id`` tells machines apart (a self-test is valid on the machine that made it) without naming them.
    """
    model = cpu_model()
    cores = os.cpu_count() or 0
    name = f"{platform.node()}|{model}|{cores}"
    return {
        "id": hashlib.sha256(name.encode()).hexdigest()[:16],
        "system": platform.system(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu": model,
        "cores": cores,
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores,
        "memory_bytes": memory_bytes(),
    }


def cpu_model() -> str | None:
    """The processor's name as Linux tells it, else what Python knows."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or None


def memory_bytes() -> int | None:
    """Physical memory, None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that shape the load."""
    found = {"python": platform.python_version()}
    if (own := project_version()) is not None:
        found["faceoff"] = own
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def project_version() -> str | None:
    """Faceoff's own version: as installed, else as its checkout says."""
    try:
        return version("faceoff")
    except PackageNotFoundError:
        pass
    try:
        checkout = Path(__file__).parents[1] / "pyproject.toml"
        return str(tomllib.loads(checkout.read_text(encoding="utf-8"))["project"]["version"])
    except (OSError, KeyError, TypeError, tomllib.TOMLDecodeError):
        return None


def git_commit(folder: Path | None = None) -> str | None:
    """Commit of the code that runs, ``+changes`` added where tracked files differ; None without git."""
    folder = folder or Path(__file__).parent
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", str(folder.parent))
    return f"{commit}+changes" if changed else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
