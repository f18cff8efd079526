"""Samples an arm's ``/metrics`` through a cell."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

import gevent
import requests
from prometheus_client.parser import text_string_to_metric_families

from locustfiles.arms import ca_bundle
from locustfiles.attempt import CellClock
from locustfiles.recorder import Recorder
from locustfiles.records import ServerSample

_PERIOD_S = 0.5
_TIMEOUT_S = 5.0
_MAX_BYTES = 16 * 1024 * 1024
_PREFIXES = ("vllm:", "faceoff_sim:")
#: Labels that say the same on every series of one server.
_DULL_LABELS = frozenset({"model_name", "engine"})

logger = logging.getLogger(__name__)


def select_lines(text: str, everything: bool) -> Iterator[str]:
    """The lines worth parsing: parsing every bucket at every sample would cost the load generator dearly."""
    for line in text.splitlines():
        if line.startswith(_PREFIXES):
            name = line.partition("{")[0].partition(" ")[0]
            if name.endswith("_created") or (name.endswith("_bucket") and not everything):
                continue
            yield line


def parse_samples(text: str, *, t_ms: float, server_id: int, everything: bool) -> list[ServerSample]:
    """Samples of one ``/metrics`` page.

    Args:
        text: the page.
        t_ms: model ms since the cell's start.
        server_id: number of the metrics URL.
        everything: keep histogram buckets too.

    Raises:
        ValueError: if it is not Prometheus text.
    """
    lines = "\n".join(select_lines(text, everything)) + "\n"
    return [
        ServerSample(
            t_ms=t_ms,
            server_id=server_id,
            name=sample.name,
            labels=";".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k not in _DULL_LABELS),
            value=float(sample.value),
        )
        for family in text_string_to_metric_families(lines)
        for sample in family.samples
    ]


class MetricsSampler:
    """Polls the metrics URLs of one arm from ``start`` to ``stop``; a server without them is let be."""

    def __init__(
        self, urls: Sequence[str], clock: CellClock, recorder: Recorder, headers: Mapping[str, str]
    ) -> None:
        self._urls = list(urls)
        self._clock = clock
        self._recorder = recorder
        self._http = requests.Session()
        self._http.headers.update(headers)
        self._http.trust_env = False  # no proxies: the load itself uses none
        self._http.verify = ca_bundle()
        self._mute: set[str] = set()
        self._greenlet: gevent.Greenlet[[], None] | None = None

    def start(self) -> None:
        """Take the first, full sample (the state at time 0, before any load) and go on in the background."""
        self._sample(everything=True, t_ms=0.0)
        self._greenlet = gevent.spawn(self._poll)

    def stop(self) -> None:
        """Take the last, full sample; safe to call twice."""
        if self._greenlet is not None:
            self._greenlet.kill()
            self._greenlet = None
            self._sample(everything=True)
            self._http.close()

    def _poll(self) -> None:
        while True:
            gevent.sleep(_PERIOD_S)
            self._sample(everything=False)

    def _sample(self, *, everything: bool, t_ms: float | None = None) -> None:
        for server_id, url in enumerate(self._urls):
            if url in self._mute:
                continue
            for sample in self._fetch(url, server_id, everything, t_ms):
                self._recorder.append(sample)

    def _fetch(
        self, url: str, server_id: int, everything: bool, t_ms: float | None
    ) -> Iterable[ServerSample]:
        try:
            with self._http.get(url, timeout=_TIMEOUT_S, stream=True) as answer:
                if answer.status_code in (401, 403, 404, 405, 501):
                    self._mute.add(url)
                    logger.warning("%s answers HTTP %d: no server metrics", url, answer.status_code)
                    return ()
                answer.raise_for_status()
                text = answer.raw.read(_MAX_BYTES, decode_content=True).decode("utf-8", "replace")
            if t_ms is None:
                t_ms = self._clock.now_ms()
            return parse_samples(text, t_ms=t_ms, server_id=server_id, everything=everything)
        except (requests.RequestException, OSError) as error:
            logger.warning("no sample from %s: %s", url, error)
        except ValueError as error:
            self._mute.add(url)
            logger.warning("%s is not Prometheus text (%s): no server metrics", url, error)
        return ()
