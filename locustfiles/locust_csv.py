"""Locust's own CSV files, complete to the last request.

Locust rewrites them once a second and not at the end, so what happened in the last second is missing. Its
file handles still hold unflushed text when the ``quitting`` and ``quit`` events fire; only after Locust has
closed them can the files be written without being overwritten again. Hence: rows are taken when Locust has
stopped every user, and written at interpreter exit.
"""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from locust.env import Environment
from locust.stats import PERCENTILES_TO_REPORT, StatsCSV, StatsCSVFileWriter


class FinalCsv:
    """The last state of Locust's statistics, to be written once Locust has let go of its files."""

    def __init__(self, environment: Environment, prefix: str, full_history: bool) -> None:
        stats = StatsCSV(environment, PERCENTILES_TO_REPORT)
        self._files = {
            f"{prefix}_stats.csv": _text(stats.requests_csv),
            f"{prefix}_failures.csv": _text(stats.failures_csv),
            f"{prefix}_exceptions.csv": _text(stats.exceptions_csv),
        }
        self._history = Path(f"{prefix}_stats_history.csv")
        # The history rows are made by the file-writing subclass, whose constructor would truncate the files.
        rows: Any = StatsCSVFileWriter._stats_history_data_rows
        source: Any = stats
        source.full_history = full_history
        now = time.time()
        self._history_rows = _text(lambda writer: rows(source, writer, now))

    def write(self) -> None:
        """Replace the files, append the last rows to the history.

        Raises:
            OSError: naming the file.
        """
        for name, text in self._files.items():
            part = Path(name + ".part")
            part.write_text(text, encoding="utf-8", newline="")
            part.replace(name)
        with self._history.open("a", encoding="utf-8", newline="") as file:
            file.write(self._history_rows)


def _text(write: Callable[[Any], None]) -> str:
    buffer = io.StringIO()
    write(csv.writer(buffer))
    return buffer.getvalue()
