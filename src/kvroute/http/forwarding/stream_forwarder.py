"""A thread that forwards the chunks of streams without the event loop and without the GIL.

The event loop hands a stream over between two chunks and stops reading from its engine. The stream comes back when the
thread receives anything but whole chunks, when the client does not take them at once, or when the event loop takes it
back. Only the side that owns a stream uses its row and its sockets. The sockets are duplicates, so that the thread
never uses a descriptor that was closed and given to another connection.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvroute.http.forwarding.loop import (
    COLUMNS,
    COMMANDS,
    DATA_BYTES,
    DATA_LINES,
    DONE,
    EVENT_BYTES,
    EVENT_DATA,
    EVENTS_MAX,
    FORMAT,
    LAST_NS,
    OWNER,
    READ_BYTES,
    RECEIVED,
    ROW_BITS,
    SENT,
    SINK,
    SOURCE,
    STOP,
    TOKEN_LINE_BYTES_MAX,
    TOKEN_LINES,
    WHOLE,
    epoll_ctl,
    forward,
)

STREAMS_MAX = 4096
"""Maximum streams that the thread owns; the event loop forwards any others."""
_FORMATS_MAX = 16
_ADD, _READABLE = 1, 1
"""EPOLL_CTL_ADD and EPOLLIN."""
_AVAILABLE = hasattr(select, "epoll") and sys.byteorder == "little"


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What the thread did with a stream, and the bytes that it left."""

    data_bytes: int
    """Bytes of data in the chunks that were read, without their framing."""
    data_lines: int
    """Lines of events that begin with `data:`."""
    token_lines: int
    """Lines that are the token line of the stream's format."""
    done: int
    """Chunks that end with the event `data: [DONE]`."""
    unsent: bytes
    """Counted chunks that the client has not received, from any byte on."""
    unparsed: bytes
    """Bytes after them that were read and are not counted."""


class ForwardedStream:
    """One stream that the thread owns, or has owned."""

    def __init__(
        self, forwarder: StreamForwarder, key: int, sockets: tuple[int, int], returned: Callable[[Forwarded], None]
    ) -> None:
        self.key = key
        self.sockets = sockets
        """The duplicates of the engine's and of the client's socket."""
        self.returned = returned
        self.result: Forwarded | None = None
        """None: the thread owns the stream."""
        self.taken = False
        """The event loop took the stream back, so that `returned` is not called."""
        self._forwarder = forwarder

    @property
    def last_s(self) -> float:
        """Time at which data last arrived, on the clock of `time.monotonic`."""
        return self._forwarder.last_s(self.key)

    def take_back(self) -> Forwarded:
        """Return the stream to the event loop. `returned` is not called."""
        return self._forwarder.take_back(self)


class StreamForwarder:
    """Starts the thread, and exchanges streams with it. All methods belong to the event loop."""

    def __init__(self, mark: bytes = b"") -> None:
        """Args: `mark`: the event loop handles chunks with these bytes; empty: the thread forwards all."""
        self._mark = np.array(list(mark), np.uint8)
        self.streams_max = STREAMS_MAX
        """Maximum streams that the thread owns; each needs two more file descriptors."""
        self._thread: threading.Thread | None = None
        self._active: dict[int, ForwardedStream] = {}
        self._returned: list[ForwardedStream] = []
        """Streams whose callback is still to run."""

    def __len__(self) -> int:
        return len(self._active)

    def start(self) -> None:
        """Start the thread, from within the event loop. The first start on a machine compiles its loop for some
        seconds; later ones read it from the cache. Without epoll (only Linux has it) nothing is started.

        Raises:
            OSError: no file descriptor is left.
        """
        if not _AVAILABLE:
            return
        self._free = list(range(STREAMS_MAX - 1, -1, -1))
        self._next = 0
        self._rows = np.zeros((STREAMS_MAX, COLUMNS), np.int64)
        self._kept = np.empty((STREAMS_MAX, READ_BYTES), np.uint8)  # pages that are never written take no memory
        self._token_lines = np.zeros((_FORMATS_MAX, TOKEN_LINE_BYTES_MAX + 1), np.uint8)
        self._formats: dict[bytes, int] = {}
        self._epoll = select.epoll()
        commands, self._commands = os.pipe()
        self._results, results = os.pipe()
        os.set_blocking(self._results, False)
        if not self._watch(commands, COMMANDS):
            raise OSError("the kernel does not watch a pipe")
        self._command(STOP)
        self._forward(commands, results)  # compiles, and ends at once
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._results, self._readable)
        self._thread = threading.Thread(
            target=self._run, args=(commands, results), name="stream-forwarder", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Return all streams and end the thread."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        for stream in list(self._active.values()):
            self.take_back(stream)
            stream.taken = False  # its callback is still to run
            self._loop.call_soon(_deliver, stream)
        self._command(STOP)
        thread.join()
        self._loop.remove_reader(self._results)
        for descriptor in (self._commands, self._results):
            os.close(descriptor)
        self._epoll.close()

    def begin(
        self, source: int, sink: int, token_line: bytes, returned: Callable[[Forwarded], None]
    ) -> ForwardedStream | None:
        """Hand a stream over between two of its chunks, or return None if the thread takes no more streams.

        Args:
            source: the engine's socket, from which the event loop does not read any more.
            sink: the client's socket; everything that was written before must have been sent.
            token_line: end of the first line of each event with a token, without its line end; empty: there is none.
            returned: receives the result when the thread returns the stream by itself.
        """
        if self._thread is None or len(self._active) >= min(self.streams_max, STREAMS_MAX):
            return None
        sockets = _duplicates(source, sink)
        if sockets is None:
            return None
        number = self._free.pop()
        self._next += 1
        key = self._next << ROW_BITS | number
        row = self._rows[number]
        row[:] = 0
        row[SOURCE], row[SINK] = sockets
        row[FORMAT], row[LAST_NS] = self._format(token_line), time.monotonic_ns()
        row[OWNER] = key
        if not self._watch(sockets[0], key):
            row[OWNER] = 0
            self._release(number, sockets)
            return None
        stream = self._active[key] = ForwardedStream(self, key, sockets, returned)
        return stream

    def last_s(self, key: int) -> float:
        """See `ForwardedStream`."""
        return int(self._rows[_row(key), LAST_NS]) / 1e9

    def take_back(self, stream: ForwardedStream) -> Forwarded:
        """See `ForwardedStream`. It waits for the thread, which answers between two reads."""
        stream.taken = True
        if stream.result is None:
            self._command(stream.key)
            poll = select.poll()
            poll.register(self._results, select.POLLIN)
            while stream.result is None:
                poll.poll()
                self._collect()
            if self._returned:
                self._loop.call_soon(self._deliver)
        return stream.result

    def _run(self, commands: int, results: int) -> None:
        """The thread's function."""
        try:
            self._forward(commands, results)
        finally:
            os.close(commands)
            os.close(results)

    def _forward(self, commands: int, results: int) -> None:
        """Run the loop until the command STOP."""
        events, buffer = np.zeros(EVENTS_MAX * EVENT_BYTES, np.uint8), np.zeros(READ_BYTES, np.uint8)
        rows, kept, lines = self._rows, self._kept, self._token_lines
        words = np.zeros(4, np.int64)
        forward(self._epoll.fileno(), commands, results, rows, kept, lines, self._mark, events, buffer, words)

    def _command(self, command: int) -> None:
        os.write(self._commands, struct.pack("=q", command))

    def _format(self, token_line: bytes) -> int:
        number = self._formats.get(token_line)
        if number is None:
            number = self._formats[token_line] = len(self._formats)
            self._token_lines[number, : len(token_line)] = np.frombuffer(token_line, np.uint8)
            self._token_lines[number, TOKEN_LINE_BYTES_MAX] = len(token_line)
        return number

    def _watch(self, descriptor: int, key: int) -> bool:
        """Add a descriptor to the thread's epoll instance; return whether the kernel did."""
        event = bytearray(EVENT_BYTES)
        struct.pack_into("=I", event, 0, _READABLE)
        struct.pack_into("=Q", event, EVENT_DATA, key)
        memory = (ctypes.c_char * EVENT_BYTES).from_buffer(event)
        return epoll_ctl(self._epoll.fileno(), _ADD, descriptor, ctypes.addressof(memory)) == 0

    def _readable(self) -> None:
        self._collect()
        self._deliver()

    def _collect(self) -> None:
        """Read which streams have come back."""
        try:
            data = os.read(self._results, 8 * STREAMS_MAX)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._results)
            raise RuntimeError("the thread that forwards streams has ended")
        for (key,) in struct.iter_unpack("=q", data):
            stream = self._active.pop(key)
            stream.result = self._result(_row(key))
            self._release(_row(key), stream.sockets)
            if not stream.taken:
                self._returned.append(stream)

    def _release(self, number: int, sockets: tuple[int, int]) -> None:
        self._free.append(number)
        for descriptor in sockets:
            os.close(descriptor)

    def _deliver(self) -> None:
        returned = self._returned.copy()
        self._returned.clear()
        for stream in returned:
            self._loop.call_soon(_deliver, stream)

    def _result(self, number: int) -> Forwarded:
        row, kept = self._rows[number].tolist(), self._kept[number]
        sent, whole, received = row[SENT], row[WHOLE], row[RECEIVED]
        return Forwarded(
            row[DATA_BYTES],
            row[DATA_LINES],
            row[TOKEN_LINES],
            row[DONE],
            kept[sent:whole].tobytes(),
            kept[whole:received].tobytes(),
        )


def _row(key: int) -> int:
    return key & ((1 << ROW_BITS) - 1)


def _deliver(stream: ForwardedStream) -> None:
    if not stream.taken:
        assert stream.result is not None
        stream.returned(stream.result)


def _duplicates(source: int, sink: int) -> tuple[int, int] | None:
    """Duplicate two sockets; None if no file descriptor is left."""
    try:
        first = os.dup(source)
    except OSError:
        return None
    try:
        return first, os.dup(sink)
    except OSError:
        os.close(first)
        return None
