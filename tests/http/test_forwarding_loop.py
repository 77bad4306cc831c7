"""The compiled loop: which bytes are whole chunks and what they contain, against a slow version."""

from __future__ import annotations

import ctypes
import os
import re
import select
import socket
import struct
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.http.forwarding.loop import (
    COLUMNS,
    COMMANDS,
    DATA_BYTES,
    DATA_LINES,
    DONE,
    EVENT_BYTES,
    EVENTS_MAX,
    OWNER,
    READ_BYTES,
    ROW_BITS,
    SOURCE,
    STOP,
    TOKEN_LINE_BYTES_MAX,
    TOKEN_LINES,
    count_chunks,
    epoll_ctl,
    forward,
)
from kvroute.serve.api.requests import Kind
from kvroute.serve.api.streams import DONE_CHUNK, STREAMS, USAGE_MARK

FORMATS = {stream.token_line: stream for stream in STREAMS.values()}
MARK = np.array(list(USAGE_MARK), np.uint8)
SIZE_LINE = re.compile(rb"([1-9a-f][0-9a-f]{0,6})\r\n")


class Counts(NamedTuple):
    whole: int
    data_bytes: int
    data_lines: int
    token_lines: int
    done: int


def version(kernel: Any, interpreted: bool) -> Any:
    """Return the interpreted or the compiled version of a kernel."""
    return kernel.py_func if interpreted else kernel


def counted(data: bytes, token_line: bytes, *, interpreted: bool) -> Counts:
    row = np.zeros(COLUMNS, np.int64)
    line = np.zeros(TOKEN_LINE_BYTES_MAX + 1, np.uint8)
    line[: len(token_line)] = np.frombuffer(token_line, np.uint8)
    line[TOKEN_LINE_BYTES_MAX] = len(token_line)
    buffer = np.frombuffer(data + b"\n\n\r\n5\r\n", np.uint8)  # what follows must not be read
    whole = version(count_chunks, interpreted)(buffer, len(data), line, MARK, row)
    return Counts(whole, *(int(row[column]) for column in (DATA_BYTES, DATA_LINES, TOKEN_LINES, DONE)))


def slowly(data: bytes, token_line: bytes) -> Counts:
    """Count in the way of the event loop, which has one chunk at a time."""
    whole = data_bytes = data_lines = token_lines = done = 0
    while (found := SIZE_LINE.match(data, whole)) is not None:
        nbytes = int(found[1], 16)
        chunk = data[whole : found.end() + nbytes + 2]
        if len(chunk) != found.end() - whole + nbytes + 2 or nbytes < 2 or not chunk.endswith(b"\n\n\r\n"):
            break
        tokens = FORMATS[token_line].token_lines(chunk) if token_line else 0
        if USAGE_MARK in chunk or (token_line and not tokens):
            break
        data_bytes += nbytes
        data_lines += chunk.count(b"\ndata:")
        token_lines += tokens
        done += chunk.endswith(DONE_CHUNK)
        whole += len(chunk)
    return Counts(whole, data_bytes, data_lines, token_lines, done)


texts = st.lists(
    st.sampled_from(
        [
            b"data: ",
            b"data:",
            b"data: [DONE]",
            b"data:[DONE]",
            b'"completion_tokens":7',
            b": keep-alive",
            b"[DONE]",
            b"\n",
            b"\n\n",
            b"\r\n",
            b"event: response.output_text.delta\n",
            b"event: content_block_delta\n",
            b".delta",
            b"x" * 20,
            b"\ndata",
        ]
    ),
    max_size=6,
).map(b"".join)
chunks = st.builds(
    lambda text, end, spelling: spelling % len(text + end) + text + end + b"\r\n",
    texts,
    st.sampled_from([b"\n\n", b"\n\n", b"\n\n", b"\n", b""]),
    st.sampled_from(
        [b"%x\r\n", b"%x\r\n", b"%x\r\n", b"%x\r\n", b"%X\r\n", b"0%x\r\n", b"%x;a=b\r\n", b"%x\n", b"1%x\r\n"]
    ),
)
bodies = st.builds(
    lambda parts, end, cut: (b"".join(parts) + end)[: len(b"".join(parts) + end) - cut],
    st.lists(chunks, max_size=5),
    st.sampled_from([b"", b"0\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n", b"\x00\xff"]),
    st.integers(0, 8) | st.just(0),
)


@given(bodies, st.sampled_from(sorted(FORMATS)))
def test_compiled_interpreted_and_slow_version_agree(data: bytes, token_line: bytes) -> None:
    expected = slowly(data, token_line)
    assert counted(data, token_line, interpreted=False) == expected
    assert counted(data, token_line, interpreted=True) == expected


@pytest.mark.parametrize("kind", ["chat", "responses", "messages"])
def test_events_are_counted_as_in_the_event_loop(kind: Kind) -> None:
    """A worked example: two chunks and the beginning of a third."""
    events = {
        "chat": (b'data: {"a": 1}\n\n', b'data: {"a": 2}\n\ndata: [DONE]\n\n', Counts(0, 0, 3, 0, 1)),
        "responses": (
            b"event: response.output_text.delta\ndata: {}\n\n",
            b"event: response.output_text.delta\ndata: {}\n\nevent: response.completed\ndata: {}\n\n",
            Counts(0, 0, 3, 2, 0),
        ),
        "messages": (
            b"event: content_block_delta\ndata: {}\n\n",
            b"event: content_block_delta\ndata: {}\n\nevent: message_stop\ndata: {}\n\n",
            Counts(0, 0, 3, 2, 0),
        ),
    }
    first, second, expected = events[kind]
    data = b"%x\r\n%b\r\n%x\r\n%b\r\n" % (len(first), first, len(second), second)
    token_line = STREAMS[kind].token_line
    found = counted(data + b"2\r\n\n", token_line, interpreted=False)
    assert found == expected._replace(whole=len(data), data_bytes=len(first + second))


@pytest.mark.parametrize("interpreted", [True, False])
@pytest.mark.parametrize("late", ["command", "event"])
def test_a_late_command_or_event_does_not_concern_the_next_stream_of_its_row(late: str, interpreted: bool) -> None:
    before, now = (1 << ROW_BITS) + 3, (2 << ROW_BITS) + 3
    rows = np.zeros((4, COLUMNS), np.int64)
    rows[3, OWNER] = now
    ends = [*os.pipe(), *os.pipe()]
    engine, source = socket.socketpair()
    epoll = select.epoll()
    try:
        rows[3, SOURCE] = source.fileno()
        engine.send(b"not for the thread yet")
        assert epoll_ctl(epoll.fileno(), 1, ends[0], ctypes.addressof(Event(1, COMMANDS))) == 0
        if late == "event":
            assert epoll_ctl(epoll.fileno(), 1, source.fileno(), ctypes.addressof(Event(1, before))) == 0
        else:
            os.write(ends[1], struct.pack("=q", before))
        os.write(ends[1], struct.pack("=q", STOP))
        kept, lines = np.zeros((4, READ_BYTES), np.uint8), np.zeros((1, TOKEN_LINE_BYTES_MAX + 1), np.uint8)
        events, buffer = np.zeros(EVENTS_MAX * EVENT_BYTES, np.uint8), np.zeros(READ_BYTES, np.uint8)
        run = version(forward, interpreted)
        run(epoll.fileno(), ends[0], ends[3], rows, kept, lines, MARK, events, buffer, np.zeros(4, np.int64))
        assert rows[3, OWNER] == now
        assert source.recv(100) == b"not for the thread yet"
        os.set_blocking(ends[2], False)
        with pytest.raises(BlockingIOError):
            os.read(ends[2], 8)
    finally:
        epoll.close()
        engine.close()
        source.close()
        for end in ends:
            os.close(end)


class Event(ctypes.Structure):
    """The kernel's `struct epoll_event`."""

    _pack_ = 1 if EVENT_BYTES == 12 else 8
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))
