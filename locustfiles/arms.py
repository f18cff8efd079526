"""Arms: the server configurations under test, as named on the command line or by the launchers.

An arm is written ``name=url[;key=value…]``, several are separated by spaces::

    cache=http://127.0.0.1:8101;caching=on;drafts=0;device=sim0;log=results/servers/sim/cache.log
    proxy=http://host:4000;metrics=http://host:8001,http://host:8002

Keys never appear in it: an API key comes from ``FACEOFF_API_KEY_<ARM>`` or ``FACEOFF_API_KEY``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from locustfiles.records import ARM_NAME

OPTIONS = ("metrics", "caching", "drafts", "device", "log")


class ArmError(ValueError):
    """An arm that cannot be used; the message says which, why and what to do."""


@dataclass(frozen=True)
class Arm:
    """One arm as it was named."""

    name: str
    url: str
    """Base URL without a trailing slash and without ``/v1``."""
    metrics_urls: tuple[str, ...]
    declared: dict[str, str] = field(default_factory=dict)
    """What it is said to be: ``caching`` on|off, ``drafts`` "0"…, ``device``."""
    log: Path | None = None

    @property
    def behind_proxy(self) -> bool:
        """Its metrics are somewhere else: the URL is a proxy's, not a server's."""
        return any(not url.startswith(self.url + "/") for url in self.metrics_urls)

    @property
    def servers(self) -> list[str]:
        """Base URLs of the servers that do the work: the arm itself, or those behind a proxy."""
        if not self.behind_proxy:
            return [self.url]
        return [url.removesuffix("/metrics") for url in self.metrics_urls]


def parse_arms(text: str) -> list[Arm]:
    """Arms of a space-separated list of specs, in the order given (the first is the base of all ratios).

    Raises:
        ArmError: naming the spec that is wrong.
    """
    arms = [parse_arm(spec) for spec in text.split()]
    names = [arm.name for arm in arms]
    for name in names:
        if names.count(name) > 1:
            raise ArmError(f"arm {name!r} is named twice: give each arm a name of its own")
    return arms


def parse_arm(spec: str) -> Arm:
    """One arm of its spec.

    Raises:
        ArmError: if the name, the URL or an option does not fit. The message never repeats a URL that holds
            credentials.
    """
    head, *options = spec.split(";")
    name, equals, url = head.partition("=")
    if not ARM_NAME.fullmatch(name):
        raise ArmError(
            f"arm name {name[:40]!r}: use only a-z, 0-9, _ and -, as in cache=http://127.0.0.1:8001"
        )
    if not equals or not url:
        raise ArmError(
            f"arm {name}: no URL; write {name}=http://host:port, or start the arms of a profile with make"
        )
    base = _check_url(name, url)
    base = base.removesuffix("/v1").rstrip("/")
    metrics: tuple[str, ...] = (base + "/metrics",)
    declared: dict[str, str] = {}
    log: Path | None = None
    for option in options:
        key, equals, value = option.partition("=")
        if key not in OPTIONS:
            raise ArmError(
                f"arm {name}: unknown option {key[:40]!r}: there are {', '.join(OPTIONS)}"
                " (API keys come from the environment)"
            )
        if not equals or not value:
            raise ArmError(f"arm {name}: option {key} has no value")
        if key == "metrics":
            metrics = tuple(_metrics_url(name, part) for part in value.split(","))
        elif key == "log":
            log = Path(value)
        else:
            declared[key] = _check_declared(name, key, value)
    return Arm(name=name, url=base, metrics_urls=metrics, declared=declared, log=log)


def _check_declared(name: str, key: str, value: str) -> str:
    if key == "caching" and value not in ("on", "off"):
        raise ArmError(f"arm {name}: caching is on or off, not {value!r}")
    if key == "drafts" and not (value.isascii() and value.isdigit()):
        raise ArmError(f"arm {name}: drafts is a number of draft tokens (0 = none), not {value!r}")
    return value


def _metrics_url(name: str, url: str) -> str:
    url = _check_url(name, url)
    return url if urlsplit(url).path.rstrip("/") else url + "/metrics"


def _check_url(name: str, url: str) -> str:
    """The URL without a trailing slash, if it is a plain http(s) one."""
    try:
        parts = urlsplit(url)
        port_fits = parts.port is None or parts.port > 0
    except ValueError:
        raise ArmError(f"arm {name}: the URL cannot be read (port or host); write http://host:port") from None
    if parts.username is not None or parts.password is not None or "@" in parts.netloc:
        raise ArmError(
            f"arm {name}: the URL holds credentials; leave them out and set {key_variable(name)}"
            " in the environment"
        )
    if parts.query or parts.fragment:
        raise ArmError(
            f"arm {name}: the URL has a query; write http://host:port, keys go into the environment"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_fits:
        raise ArmError(f"arm {name}: {url!r} is no http:// or https:// URL; write http://host:port")
    return url.rstrip("/")


def key_variable(arm: str) -> str:
    """Environment variable of the arm's own API key."""
    return "FACEOFF_API_KEY_" + arm.upper().replace("-", "_")


def api_key(arm: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """The arm's API key, its own before the common one; an empty variable counts as unset."""
    return environ.get(key_variable(arm)) or environ.get("FACEOFF_API_KEY") or None


def ca_bundle(environ: Mapping[str, str] = os.environ) -> str | bool:
    """File of a private CA, named as for curl and Python; True for the CAs that everybody trusts.

    ``SSL_CERT_FILE`` first: it is the one that the load's own connections go by.
    """
    return environ.get("SSL_CERT_FILE") or environ.get("REQUESTS_CA_BUNDLE") or True


def auth_headers(arm: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Request headers that carry the arm's API key, if there is one."""
    key = api_key(arm, environ)
    return {} if key is None else {"Authorization": f"Bearer {key}"}
