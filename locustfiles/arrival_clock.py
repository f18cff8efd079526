"""When did these bytes arrive? Kernel receive stamps, moved onto the monotonic clock.

With ``SO_TIMESTAMPNS`` the kernel stamps incoming segments with CLOCK_REALTIME and hands the stamp out with
``recvmsg``. A busy event loop then reads late, but the stamp still says when the data came. The kernel gives
the stamp of the last segment of a read that coalesced several: an upper bound for the events in it.
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from collections.abc import Sequence

SO_TIMESTAMPNS = 35
"""Linux ``SO_TIMESTAMPNS_OLD`` (asm-generic/socket.h); CPython's ``socket`` has no name for it."""

ANCILLARY_BYTES = 64
"""Room for one control message with a 16-byte timespec."""

_TIMESPEC = struct.Struct("qq")
_MAX_BRACKET_NS = 20_000
_MAX_AGE_NS = 600 * 10**9
_STEP_NS = 1_000_000

Ancillary = Sequence[tuple[int, int, bytes]]


def enable_kernel_stamps(sock: socket.socket) -> bool:
    """Ask the kernel to stamp what arrives on ``sock``; False where it cannot."""
    if not sys.platform.startswith("linux") or struct.calcsize("P") != 8:
        return False
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    except OSError:
        return False
    return True


class ArrivalClock:
    """Relates kernel stamps (CLOCK_REALTIME) to the monotonic clock, read by read.

    The relation is taken anew at each read, so slewing of the wall clock cannot add up; only the *age* of a
    stamp, milliseconds as a rule, is measured on it. A step of the wall clock (more than 1 ms between two
    reads) makes the stamps of that read unusable: ``stamp`` then falls back to the time of the read.
    """

    def __init__(self) -> None:
        self._offset_ns: int | None = None
        self.steps = 0

    def stamp(self, ancillary: Ancillary) -> tuple[int, bool]:
        """(arrival in monotonic ns, whether it is the kernel's). Call right after ``recvmsg``."""
        before = time.monotonic_ns()
        real = time.time_ns()
        now = time.monotonic_ns()
        tries = 0
        while now - before > _MAX_BRACKET_NS and tries < 5:
            # Preempted between the two clocks: the pair would date the arrival wrongly by that much.
            before = time.monotonic_ns()
            real = time.time_ns()
            now = time.monotonic_ns()
            tries += 1
        offset = real - now
        previous, self._offset_ns = self._offset_ns, offset
        if previous is not None and abs(offset - previous) > _STEP_NS:
            self.steps += 1
            return now, False
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS and len(data) >= _TIMESPEC.size:
                seconds, nanoseconds = _TIMESPEC.unpack_from(data)
                age = real - (seconds * 10**9 + nanoseconds)
                if 0 <= age < _MAX_AGE_NS:
                    return now - age, True
        return now, False


def kernel_stamps_work(tries: int = 20) -> bool:
    """Self-check on a loopback pair: the stamp must lie between sending and reading.

    The kernel turns stamping on in the background when the first socket asks for it, so that the first bytes
    may still come without; hence a few tries, a few milliseconds apart. Uses plain blocking calls.
    """
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
            with socket.create_connection(listener.getsockname(), timeout=5) as sender:
                receiver, _ = listener.accept()
                with receiver:
                    receiver.settimeout(5)
                    if not enable_kernel_stamps(receiver):
                        return False
                    return any(_stamp_is_sound(sender, receiver) for _ in range(tries))
    except OSError:
        return False


def _stamp_is_sound(sender: socket.socket, receiver: socket.socket) -> bool:
    clock = ArrivalClock()
    sent = time.monotonic_ns()
    sender.sendall(b"x")
    _, ancillary, _, _ = receiver.recvmsg(16, ANCILLARY_BYTES)
    arrived, by_kernel = clock.stamp(ancillary)
    # 50 us of slack below: the pair of clock reads has that much play.
    sound = by_kernel and sent - 50_000 <= arrived <= time.monotonic_ns()
    if not sound:
        time.sleep(0.005)
    return sound
