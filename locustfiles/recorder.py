"""Appends records to a CSV file as they come, flushed at least every second."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import gevent
import msgspec

from locustfiles.records import csv_row

_FLUSH_S = 0.5


class Recorder:
    """One CSV file of one record type. A kill loses at most what the last half second appended.

    ``on_error`` is told, once, when rows cannot be written any more (a full disk): the load must then end.
    """

    def __init__(
        self, path: Path, columns: tuple[str, ...], on_error: Callable[[OSError], None] | None = None
    ) -> None:
        self.path = path
        self.rows = 0
        self._on_error = on_error
        self._failed = False
        self._file = path.open("w", encoding="utf-8", newline="")
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._writer.writerow(columns)
        self._file.flush()
        self._flusher = gevent.spawn(self._flush_forever)

    def append(self, record: msgspec.Struct) -> None:
        """Append one row; no-op on a closed recorder (a straggler after the end of the cell)."""
        if self._file.closed or self._failed:
            return
        try:
            self._writer.writerow(csv_row(record))
        except OSError as error:
            self._fail(error)
        else:
            self.rows += 1

    def close(self) -> None:
        """Flush and close; safe to call twice.

        Raises:
            OSError: if the last rows cannot be written (a full disk).
        """
        self._flusher.kill(block=False)
        self._file.close()

    def _flush_forever(self) -> None:
        while not self._failed:
            gevent.sleep(_FLUSH_S)
            try:
                self._file.flush()
            except OSError as error:
                self._fail(error)

    def _fail(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            if self._on_error is not None:
                self._on_error(error)
