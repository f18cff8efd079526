"""Why a process died, as far as its log tells: the one line to quote."""

from __future__ import annotations

import os
import re
from pathlib import Path

from locustfiles.arm_http import one_line

#: Bytes at the end of a log that are looked at: an engine's own traceback may stand before those of every
#: stream that it broke.
TAIL_BYTES = 1024 * 1024
#: Lines before the notice of a death in which its cause is looked for: a traceback, and the state that vLLM
#: dumps with it.
CAUSE_LINES = 200

_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
#: What loggers put in front: "(EngineCore pid=12) ERROR 11-30 22:21:54 [core.py:90] ".
_PREFIX = re.compile(r"^(\([^)]*pid=\d+\) ?)?([A-Z]+ [\d-]+ [\d:,.]+ (\[[^\]]*\] ?)?)?")
#: An exception's own line: "torch.OutOfMemoryError: …".
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Failure)\b(: |$)")
_DEATH = re.compile(
    r"(exited|died|terminated) unexpectedly|out of memory|\bkilled\b|segmentation fault|core dumped|"
    r"no space left",
    re.IGNORECASE,
)
_TROUBLE = re.compile(r"error|exception|fatal|abort|cannot|failed", re.IGNORECASE)
#: Lines that only point to another one (vLLM's front end says that its engine failed), and source lines.
_POINTER = re.compile(
    r"see (the )?(root cause|stack trace)|EngineDeadError|^Traceback|^ *File \"|^ *(raise|return) |\^\^\^|"
    r"shutting down|^Engine Exception caught|output_handler failed",
    re.IGNORECASE,
)


def log_reason(path: Path) -> str:
    """The line of a log that tells why its process died; "" if there is no log or nothing in it.

    The last exception that is no pointer to another one, where it stands at the end or shortly before the
    notice of a death; else that notice; else the last line near the end that speaks of trouble, one that only
    points to another where there is nothing better; else the last line.
    """
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    lines = [line for raw in text.splitlines() if (line := _PREFIX.sub("", _COLOUR.sub("", raw))).strip()]
    telling = [(index, line) for index, line in enumerate(lines) if not _POINTER.search(line)]
    exceptions = [(index, line) for index, line in telling if _EXCEPTION.match(line)]
    deaths = [(index, line) for index, line in telling if _DEATH.search(line)]
    if deaths and not (exceptions and exceptions[-1][0] >= deaths[-1][0] - CAUSE_LINES):
        found = deaths[-1][1]
    elif exceptions:
        found = exceptions[-1][1]
    else:
        recent = len(lines) - CAUSE_LINES
        trouble = [line for index, line in telling if index >= recent and _TROUBLE.search(line)]
        pointers = [line for line in lines[-CAUSE_LINES:] if _EXCEPTION.match(line)]
        found = (trouble or pointers or lines or [""])[-1]
    return one_line(found.strip(), 240)
