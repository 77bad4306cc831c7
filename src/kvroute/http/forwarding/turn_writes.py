"""Small writes of one turn of the event loop, sent together at its end.

A write to a process of the same machine wakes it up. If other events of the turn are handled before the next write, the
process has finished and sleeps again, and each write costs an interrupt of another processor. Writes that follow each
other directly cost one, and the code of the kernel and of the interpreter stays in the caches (decision 0007).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import cast
from weakref import WeakKeyDictionary

_LARGE_BYTES = 16 * 1024
"""A longer write is sent at once, so that a transport with much unsent data pauses its writer as usual."""
_WAITING_MAX = 32
"""Number of writes that wait at most: in a long turn, none waits for more than this many events."""


class TurnWrites:
    """The writes that wait for the end of the current turn of one event loop."""

    def __init__(self) -> None:
        self.waiting: list[tuple[asyncio.Transport, bytes]] = []

    def schedule(self) -> None:
        """Send what waits at the end of this turn; call it for the first write that waits."""
        asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Send what waits, except to transports that are being closed."""
        waiting = self.waiting.copy()
        self.waiting.clear()  # first: a write may pause its writer, which may write or close
        for transport, data in waiting:
            if transport.is_closing():
                continue
            try:
                transport.write(data)
            except Exception as error:
                report = asyncio.get_running_loop().call_exception_handler
                report({"message": "a write failed with an internal error", "exception": error})


_OF_LOOPS: WeakKeyDictionary[asyncio.AbstractEventLoop, TurnWrites] = WeakKeyDictionary()
"""By loop. An entry that waits for nothing does not reference its loop, so it goes with the loop."""


def _of_running_loop() -> TurnWrites:
    loop = asyncio.get_running_loop()
    writes = _OF_LOOPS.get(loop)
    if writes is None:
        writes = _OF_LOOPS[loop] = TurnWrites()
    return writes


class TurnTransport:
    """A transport of the running loop whose small writes wait for the end of the turn. The order of writes, and of
    writes and a close, is kept."""

    __slots__ = (
        "_own",
        "_waiting",
        "_writes",
        "can_write_eof",
        "get_extra_info",
        "is_closing",
        "pause_reading",
        "resume_reading",
    )

    def __init__(self, own: asyncio.BaseTransport) -> None:
        own = cast(asyncio.Transport, own)  # uvloop's class does not inherit from it
        self._own, self._writes = own, _of_running_loop()
        self._waiting = self._writes.waiting
        self.can_write_eof, self.get_extra_info, self.is_closing = own.can_write_eof, own.get_extra_info, own.is_closing
        self.pause_reading, self.resume_reading = own.pause_reading, own.resume_reading

    def write(self, data: bytes) -> None:
        """Send bytes."""
        if len(data) > _LARGE_BYTES:
            self._flushed().write(data)
            return
        waiting = self._waiting
        waiting.append((self._own, data))
        if len(waiting) == 1:
            self._writes.schedule()
        elif len(waiting) == _WAITING_MAX:
            self._writes.flush()

    def write_now(self, data: bytes) -> None:
        """Send bytes of a stream at once: its chunks are spread over time, so that waiting would only delay them."""
        self._flushed().write(data)

    def writelines(self, parts: Iterable[bytes]) -> None:
        """Send long parts at once, without joining them."""
        self._flushed().writelines(parts)

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that are not in the kernel yet."""
        return self._flushed().get_write_buffer_size()

    def write_eof(self) -> None:
        """End the own side of the connection after all writes."""
        self._flushed().write_eof()

    def close(self) -> None:
        """Close after all writes."""
        self._flushed().close()

    def abort(self) -> None:
        """Close now; what the kernel does not take at once is lost."""
        self._flushed().abort()

    def _flushed(self) -> asyncio.Transport:
        if self._waiting:
            self._writes.flush()
        return self._own
