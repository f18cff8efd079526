"""Is the load generator itself in the way? Lag of its event loop and its share of a core."""

from __future__ import annotations

import time

import gevent
import numpy as np

from locustfiles.records import GeneratorHealth
from locustfiles.stream import StreamWatch

_PERIOD_S = 0.02


class LoopHealth:
    """Probes the event loop every 20 ms and adds up what the streams report. Wall time throughout."""

    def __init__(self) -> None:
        self._lags_ms: list[float] = []
        self._lateness_ms: list[float] = []
        self._totals = GeneratorHealth()
        self._wall = time.monotonic()
        self._cpu = time.process_time()
        self._cpu_share: float | None = None
        self._probe = gevent.spawn(self._probe_forever)

    def add(self, watch: StreamWatch, lateness_ms: float | None) -> None:
        """Count one attempt's stamps; ``lateness_ms`` = actual - intended start, where one was intended."""
        totals = self._totals
        totals.reads += watch.token_reads
        totals.coalesced_reads += watch.coalesced_reads
        totals.first_token_coalesced += watch.first_token_coalesced
        totals.kernel_stamps += watch.kernel_stamps
        totals.user_stamps += watch.user_stamps
        if lateness_ms is not None:
            self._lateness_ms.append(lateness_ms)

    def stop(self) -> None:
        """End of the loaded period."""
        if self._cpu_share is None:
            self._probe.kill(block=False)
            self._cpu_share = (time.process_time() - self._cpu) / max(time.monotonic() - self._wall, 1e-9)

    def result(self) -> GeneratorHealth:
        """What was seen up to ``stop``."""
        totals = self._totals
        totals.cpu_share = self._cpu_share
        if self._lags_ms:
            totals.loop_lag_p50_ms, totals.loop_lag_p99_ms = map(
                float, np.quantile(self._lags_ms, (0.5, 0.99))
            )
            totals.loop_lag_max_ms = max(self._lags_ms)
        if self._lateness_ms:
            totals.lateness_p99_ms = float(np.quantile(self._lateness_ms, 0.99))
        return totals

    def _probe_forever(self) -> None:
        while True:
            before = time.monotonic()
            gevent.sleep(_PERIOD_S)
            self._lags_ms.append((time.monotonic() - before - _PERIOD_S) * 1e3)
