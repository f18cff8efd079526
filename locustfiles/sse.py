"""Server-sent events, pushed in as bytes and handed out as events.

Follows the event-stream grammar of the WHATWG HTML standard (section 9.2): lines end in CR, LF or CRLF,
wherever the reads happen to split them; a leading BOM is dropped; comments, ``id`` and ``retry`` are
ignored; several ``data`` lines of one event are joined by LF. Works on bytes, so a UTF-8 character split
between two reads needs no care here: an event is only decoded when it is whole.
"""

from __future__ import annotations

from typing import NamedTuple

#: Larger events than any server sends on purpose; a bound on memory against one that never ends its line.
MAX_EVENT_BYTES = 16 * 1024 * 1024

_BOM = b"\xef\xbb\xbf"


class Event(NamedTuple):
    """One event: its type (``b""`` unless an ``event:`` line named it) and its data."""

    kind: bytes
    data: bytes


class EventTooLarge(ValueError):
    """One event passed ``MAX_EVENT_BYTES``."""


class SseReader:
    """Incremental reader of one event stream. Any split of the same bytes yields the same events."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max = max_event_bytes
        self._parts: list[bytes] = []  # pieces of the line that has not ended yet
        self._partial_bytes = 0  # length of those pieces
        self._after_cr = False  # the last byte was a CR: an LF that follows belongs to it
        self._first_line = True
        self._kind = b""
        self._data: list[bytes] = []  # data lines of the event that has not ended yet
        self._data_bytes = 0

    def feed(self, data: bytes) -> list[Event]:
        """The events that ``data`` completes.

        Raises:
            EventTooLarge: when an event that is still open passes the limit.
        """
        if self._after_cr and data:
            self._after_cr = False
            if data[:1] == b"\n":
                data = data[1:]
        if b"\r" in data:
            self._after_cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = data.split(b"\n")
        rest = lines.pop()
        events: list[Event] = []
        if lines:
            if self._parts:
                self._parts.append(lines[0])
                lines[0] = b"".join(self._parts)
                self._parts = []
                self._partial_bytes = 0
            if self._first_line:
                self._first_line = False
                lines[0] = lines[0].removeprefix(_BOM)
            for line in lines:
                self._take(line, events)
        if rest:
            self._parts.append(rest)
            self._partial_bytes += len(rest)
        if self._partial_bytes + self._data_bytes > self._max:
            raise EventTooLarge(f"an event of more than {self._max} bytes")
        return events

    def finish(self) -> list[Event]:
        """The event that the end of the stream cut short of its blank line, if any.

        The standard discards it; servers that close right behind their last event exist, and losing the
        last event would lose its finish reason. The caller must treat data that does not parse as cut off.
        """
        events: list[Event] = []
        if self._parts:
            line = b"".join(self._parts)
            self._parts = []
            self._take(line.removeprefix(_BOM) if self._first_line else line, events)
        self._take(b"", events)
        return events

    def _take(self, line: bytes, events: list[Event]) -> None:
        if not line:
            if self._data:
                data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
                events.append(Event(self._kind, data))
                self._data = []
                self._data_bytes = 0
            self._kind = b""
            return
        if line.startswith(b"data:"):
            value = line[6:] if line[5:6] == b" " else line[5:]
        else:
            name, _, value = line.partition(b":")
            if name == b"event":
                self._kind = value.removeprefix(b" ")
                return
            if name != b"data":  # a comment (empty name), id, retry, or a field that nobody defined
                return
            value = b""  # "data" without a colon: an empty line of data
        self._data.append(value)
        self._data_bytes += len(value) + 1
