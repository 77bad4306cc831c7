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
import resource
import select
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvroute.gateway.http.forwarding_loop import (
    ACTIVE,
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
    READ_BYTES,
    RECEIVED,
    SENT,
    SINK,
    SOURCE,
    STARTED,
    STOP,
    TOKEN_LINE_BYTES_MAX,
    TOKEN_LINES,
    WHOLE,
    epoll_ctl,
    forward,
)

STREAMS_MAX = 4096
"""Maximum streams in the hands of the thread; the event loop forwards any others."""
_FORMATS_MAX = 16
_DESCRIPTORS_SHARE = 0.5
"""Share of the process's file descriptors above which no more are taken for duplicates: connections need them."""
_ADD, _READABLE = 1, 1
"""EPOLL_CTL_ADD and EPOLLIN."""


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
    """One stream in the hands of the thread."""

    def __init__(
        self, forwarder: StreamForwarder, number: int, sockets: tuple[int, int], returned: Callable[[Forwarded], None]
    ) -> None:
        self.number = number
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
        return self._forwarder.last_s(self.number)

    def take_back(self) -> Forwarded:
        """Return the stream to the event loop. `returned` is not called."""
        return self._forwarder.take_back(self)


class StreamForwarder:
    """Starts the thread, and exchanges streams with it. All methods belong to the event loop."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._ready = False
        self._active: dict[int, ForwardedStream] = {}
        self._returned: list[ForwardedStream] = []
        """Streams whose callback is still to run."""

    @property
    def ready(self) -> bool:
        """Whether the thread runs and its loop is compiled."""
        return self._ready

    def __len__(self) -> int:
        return len(self._active)

    def start(self) -> None:
        """Start the thread, from within the event loop. It takes streams once its loop is compiled, which lasts about a
        second the first time on a machine. Without epoll (only Linux has it), the thread is not started."""
        if not hasattr(select, "epoll"):
            return
        self._free = list(range(STREAMS_MAX - 1, -1, -1))
        self._rows = np.zeros((STREAMS_MAX, COLUMNS), np.int64)
        self._kept = np.empty((STREAMS_MAX, READ_BYTES), np.uint8)  # pages that are never written take no memory
        self._token_lines = np.zeros((_FORMATS_MAX, TOKEN_LINE_BYTES_MAX + 1), np.uint8)
        self._formats: dict[bytes, int] = {}
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._descriptors_max = int(limit * _DESCRIPTORS_SHARE) if limit != resource.RLIM_INFINITY else 1 << 30
        self._epoll = select.epoll()
        commands, self._commands = os.pipe()
        self._results, results = os.pipe()
        os.set_blocking(self._results, False)
        self._watch(commands, COMMANDS)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._results, self._readable)
        self._thread = threading.Thread(
            target=self._run, args=(self._epoll.fileno(), commands, results), name="stream-forwarder", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Take back all streams and end the thread."""
        if self._thread is None:
            return
        for stream in list(self._active.values()):
            stream.returned(stream.take_back())
        self._ready = False
        os.write(self._commands, struct.pack("=q", STOP))
        self._thread.join()
        self._thread = None
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
            token_line: end of the first line of each event with a token, with its line feed; empty: there is none.
            returned: receives the result when the thread returns the stream by itself.
        """
        if not self._ready or not self._free:
            return None
        sockets = self._duplicates(source, sink)
        if sockets is None:
            return None
        number = self._free.pop()
        row = self._rows[number]
        row[:] = 0
        row[SOURCE], row[SINK] = sockets
        row[FORMAT], row[LAST_NS], row[ACTIVE] = self._format(token_line), time.monotonic_ns(), 1
        stream = self._active[number] = ForwardedStream(self, number, sockets, returned)
        self._watch(sockets[0], number)
        return stream

    def last_s(self, number: int) -> float:
        """See `ForwardedStream`."""
        return int(self._rows[number, LAST_NS]) / 1e9

    def take_back(self, stream: ForwardedStream) -> Forwarded:
        """See `ForwardedStream`. It waits for the thread, which answers between two reads."""
        stream.taken = True
        if stream.result is None:
            os.write(self._commands, struct.pack("=q", stream.number))
            poll = select.poll()
            poll.register(self._results, select.POLLIN)
            while stream.result is None:
                poll.poll()
                self._collect()
            if self._returned:
                self._loop.call_soon(self._deliver)
        assert stream.result is not None
        return stream.result

    def _run(self, epoll: int, commands: int, results: int) -> None:
        """Run the loop; the thread's function."""
        events, buffer = np.zeros(EVENTS_MAX * EVENT_BYTES, np.uint8), np.zeros(READ_BYTES, np.uint8)
        words = np.zeros(4, np.int64)
        try:
            forward(epoll, commands, results, self._rows, self._kept, self._token_lines, events, buffer, words)
        finally:
            os.close(results)
            os.close(commands)

    def _duplicates(self, source: int, sink: int) -> tuple[int, int] | None:
        """Duplicate two sockets; None if file descriptors are scarce."""
        made: list[int] = []
        try:
            made.append(os.dup(source))
            made.append(os.dup(sink))
            if max(made) < self._descriptors_max:
                return made[0], made[1]
        except OSError:
            pass
        for descriptor in made:
            os.close(descriptor)
        return None

    def _format(self, token_line: bytes) -> int:
        number = self._formats.get(token_line)
        if number is None:
            number = self._formats[token_line] = len(self._formats)
            self._token_lines[number, : len(token_line)] = np.frombuffer(token_line, np.uint8)
            self._token_lines[number, TOKEN_LINE_BYTES_MAX] = len(token_line)
        return number

    def _watch(self, descriptor: int, number: int) -> None:
        """Add a descriptor to the thread's epoll instance."""
        event = bytearray(EVENT_BYTES)
        struct.pack_into("=I", event, 0, _READABLE)
        struct.pack_into("=Q", event, EVENT_DATA, number)
        memory = (ctypes.c_char * EVENT_BYTES).from_buffer(event)
        if epoll_ctl(self._epoll.fileno(), _ADD, descriptor, ctypes.addressof(memory)) != 0:
            raise OSError("the kernel refused to watch a socket")

    def _readable(self) -> None:
        self._collect()
        self._deliver()

    def _collect(self) -> None:
        """Read which streams have come back."""
        try:
            data = os.read(self._results, 8 * STREAMS_MAX)
        except BlockingIOError:
            return
        for (number,) in struct.iter_unpack("=q", data):
            if number == STARTED:
                self._ready = True
                continue
            stream = self._active.pop(number)
            stream.result = self._result(number)
            self._free.append(number)
            for descriptor in stream.sockets:
                os.close(descriptor)
            if not stream.taken:
                self._returned.append(stream)

    def _deliver(self) -> None:
        returned = self._returned.copy()
        self._returned.clear()
        for stream in returned:
            self._loop.call_soon(self._deliver_one, stream)

    def _deliver_one(self, stream: ForwardedStream) -> None:
        if not stream.taken:
            assert stream.result is not None
            stream.returned(stream.result)

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
