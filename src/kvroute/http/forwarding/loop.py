"""The compiled loop that forwards the chunks of streams from engines to clients; its thread does not hold the GIL.

It forwards whole chunks only, as they were received. A stream with anything else (the end of its body, an event that
reports numbers of tokens, an error, a client that reads slowly) goes back to the event loop, with the bytes that were
read but not sent. `stream_forwarder` runs the loop and describes the exchange of streams. The same code also runs
interpreted (`forward.py_func`), as the tests do.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
import platform
from typing import Any

import numpy as np
import numpy.typing as npt
from numba.core import types

from kvroute.compiled import compiled_without_gil

OWNER, SOURCE, SINK, FORMAT, LAST_NS, DATA_BYTES, DATA_LINES, TOKEN_LINES, DONE, SENT, WHOLE, RECEIVED = range(12)
"""Columns of a stream's row: the key of the stream, 0 while the loop does not own it; the engine's and the client's
socket, and the format of its events (a row of `token_lines`); when data last arrived (CLOCK_MONOTONIC); of the chunks
that were forwarded, the bytes of their data, the lines that begin with `data:`, the lines that end with the token line,
and the chunks that end with `data: [DONE]`; of the last bytes that were received, how many were sent, are whole chunks,
and were received."""
COLUMNS = 12
READ_BYTES = 16 * 1024
"""Maximum bytes of one read."""
TOKEN_LINE_BYTES_MAX = 31
"""Maximum length of a token line; the last byte of a row of `token_lines` is its length."""
ROW_BITS = 16
"""A stream's key has the number of its row in so many lower bits, and above them a number that no other stream has, so
that a late event or command of a stream never concerns the next stream of its row."""
COMMANDS = 0
"""Identifies the pipe with commands among the sockets; no stream has this key."""
STOP = -1
"""The command that ends the loop. Any other command is the key of a stream that is to be returned."""
EVENT_BYTES = 12 if platform.machine() in ("x86_64", "i686", "i586", "i386") else 16
"""Size of the kernel's `struct epoll_event`; on x86 its 64 bits are not aligned (epoll_ctl(2))."""
EVENT_DATA = EVENT_BYTES - 8
"""Offset of the 64 bits that identify an event's socket."""
EVENTS_MAX = 64
"""Maximum events that one call of the kernel returns."""

_READABLE, _DELETE = 1, 2
"""EPOLLIN and EPOLL_CTL_DEL."""
_DO_NOT_WAIT, _NO_SIGNAL = 0x40, 0x4000
"""MSG_DONTWAIT and MSG_NOSIGNAL."""
_MONOTONIC = 1
"""CLOCK_MONOTONIC."""
_SIZE_DIGITS_MAX = 7
_CR, _LF, _SPACE = 13, 10, 32
_DATA = np.frombuffer(b"data:", np.uint8)
_DONE = np.frombuffer(b"[DONE]\n\n", np.uint8)

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]

_int, _size, _address = ctypes.c_int, ctypes.c_ssize_t, ctypes.c_void_p
_NUMBA_TYPES: dict[type[Any], Any] = {_int: types.int32, _size: types.intp, _address: types.uintp}


class _CFunction(types.ExternalFunction):
    """A function of the C library for compiled code, which links it by name, and for interpreted code. Its arguments
    and its result are integers; an address is also an integer."""

    def __init__(self, name: str, returns: type[Any], *arguments: type[Any]) -> None:
        signature: Any = _NUMBA_TYPES[returns](*(_NUMBA_TYPES[argument] for argument in arguments))
        super().__init__(name, signature)
        self._interpreted: Any = getattr(ctypes.CDLL(None), name, None)
        if self._interpreted is not None:  # otherwise the system has no such function, and the loop is not used
            self._interpreted.restype, self._interpreted.argtypes = returns, arguments

    def __call__(self, *arguments: int) -> int:  # type: ignore[override]  # numba's own is for its compiler
        return int(self._interpreted(*(int(argument) for argument in arguments)) or 0)  # None: the address 0


_recv = _CFunction("recv", _size, _int, _address, _size, _int)
_send = _CFunction("send", _size, _int, _address, _size, _int)
_read = _CFunction("read", _size, _int, _address, _size)
_write = _CFunction("write", _size, _int, _address, _size)
_epoll_wait = _CFunction("epoll_wait", _int, _int, _address, _int, _int)
epoll_ctl = _CFunction("epoll_ctl", _int, _int, _int, _int, _address)
_clock_gettime = _CFunction("clock_gettime", _int, _int, _address)
_memchr = _CFunction("memchr", _address, _address, _int, _size)
_memmem = _CFunction("memmem", _address, _address, _size, _address, _size)


@compiled_without_gil
def forward(
    epoll: int,
    commands: int,
    returned: int,
    streams: Numbers,
    kept: Bytes,
    token_lines: Bytes,
    mark: Bytes,
    events: Bytes,
    buffer: Bytes,
    words: Numbers,
) -> None:
    """Forward chunks until the command STOP.

    Args:
        epoll: descriptor of an epoll instance with the pipe `commands` and the engines' sockets of all streams.
        commands: the readable end of a pipe; a command is one int64.
        returned: the writable end of a pipe that receives the key of each stream that goes back, as an int64.
        streams: one row for each stream, `COLUMNS` wide.
        kept: one row for each stream, `READ_BYTES` wide: the last bytes that were received, if the stream goes back.
        token_lines: one row for each format of events, `TOKEN_LINE_BYTES_MAX` + 1 wide.
        mark: a chunk with these bytes goes back to the event loop; empty: none does for what it contains.
        events: memory for `EVENTS_MAX` events of `EVENT_BYTES` each.
        buffer: memory for `READ_BYTES`.
        words: memory for four numbers.
    """
    words_at = words.ctypes.data
    while True:
        ready = _epoll_wait(epoll, events.ctypes.data, EVENTS_MAX, -1)
        _clock_gettime(_MONOTONIC, words_at)
        now_ns = words[0] * 1_000_000_000 + words[1]
        for number in range(ready):
            at = number * EVENT_BYTES + EVENT_DATA
            key = 0
            for place in range(8):  # little-endian
                key |= int(events[at + place]) << (8 * place)
            command = key == COMMANDS
            if command:
                if _read(commands, words_at, 8) != 8:
                    continue
                key = int(words[0])
                if key == STOP:
                    return
            stream = key & ((1 << ROW_BITS) - 1)
            row = streams[stream]
            if row[OWNER] != key:
                continue  # it has gone back already
            if command or not forward_once(row, kept[stream], token_lines[row[FORMAT]], mark, buffer, now_ns):
                _give_back(epoll, returned, row, words)


@compiled_without_gil
def forward_once(row: Numbers, kept: Bytes, token_line: Bytes, mark: Bytes, buffer: Bytes, now_ns: int) -> bool:
    """Read once from a stream's engine and send the whole chunks to its client.

    Return False if the stream is to go back: bytes remain, which are in `kept` then, or the connection has ended.
    """
    received = _recv(int(row[SOURCE]), buffer.ctypes.data, READ_BYTES, _DO_NOT_WAIT)
    received = max(received, 0)
    lines = row[DATA_LINES]
    whole = count_chunks(buffer, received, token_line, mark, row)
    sent = 0
    if row[DATA_LINES] != lines or whole < received:  # otherwise only comments have arrived
        row[LAST_NS] = now_ns
    if whole:
        sent = max(_send(int(row[SINK]), buffer.ctypes.data, whole, _DO_NOT_WAIT | _NO_SIGNAL), 0)
    if received and sent == received:
        return True
    row[SENT], row[WHOLE], row[RECEIVED] = sent, whole, received
    for at in range(received):
        kept[at] = buffer[at]
    return False


@compiled_without_gil
def count_chunks(data: Bytes, size: int, token_line: Bytes, mark: Bytes, row: Numbers) -> int:
    """Return how many of the first `size` bytes are whole chunks, and add what they contain to a stream's row.

    Only chunks as the gateway itself would write them count, and only if their data ends with an empty line: size line
    in lower-case hexadecimal digits without leading zeros and extensions, data, line end. The chunk of size zero, which
    ends the body, does not count, nor does a chunk with `mark`, nor one without a token if its format has a token
    line: it may be the end of the stream.
    """
    whole = 0
    while True:
        at = whole
        nbytes = 0
        while at < size and at - whole < _SIZE_DIGITS_MAX:
            digit = int(data[at])
            if 48 <= digit <= 57:
                nbytes = nbytes * 16 + digit - 48
            elif 97 <= digit <= 102:
                nbytes = nbytes * 16 + digit - 87
            else:
                break
            at += 1
        end = at + 4 + nbytes  # with both line ends
        if nbytes < 2 or data[whole] == 48 or end > size or data[at] != _CR or data[at + 1] != _LF:
            return whole
        if data[end - 4] != _LF or data[end - 3] != _LF or data[end - 2] != _CR or data[end - 1] != _LF:
            return whole
        if not _count_lines(data, at + 1, end - 2, token_line, mark, row):
            return whole
        row[DATA_BYTES] += nbytes
        whole = end


@compiled_without_gil
def _count_lines(data: Bytes, start: int, end: int, token_line: Bytes, mark: Bytes, row: Numbers) -> bool:
    """Count the lines of events from `start`, the line feed before them, to `end`. Return False, and count nothing, if
    they contain `mark`, or lack the token line of their format."""
    length = int(token_line[TOKEN_LINE_BYTES_MAX])
    address = int(np.int64(data.ctypes.data))  # numba would add an unsigned address and an index as floats
    if len(mark) and _memmem(address + start, end - start, mark.ctypes.data, len(mark)):
        return False
    last = end
    data_lines = token_lines = 0
    at = start
    while True:
        if at + 6 <= end and _begins(data, at + 1, _DATA, 5):
            data_lines += 1
            last = at + 1
        line_end = at - 1 if at > start and data[at - 1] == _CR else at
        if length and line_end - start > length:
            token_lines += _begins(data, line_end - length, token_line, length)
        found = int(np.int64(_memchr(address + at + 1, _LF, end - at - 1)))
        if not found:
            break
        at = found - address
    if length and not token_lines:
        return False
    row[DATA_LINES] += data_lines
    row[TOKEN_LINES] += token_lines
    before = end - last - len(_DONE)
    if before == 5 or (before == 6 and data[last + 5] == _SPACE):
        row[DONE] += _begins(data, end - len(_DONE), _DONE, len(_DONE))
    return True


@compiled_without_gil
def _begins(data: Bytes, at: int, text: Bytes, length: int) -> bool:
    """Return whether `data` has the first `length` bytes of `text` at this position."""
    for place in range(length):  # noqa: SIM110  # numba compiles no generator here
        if data[at + place] != text[place]:
            return False
    return True


@compiled_without_gil
def _give_back(epoll: int, returned: int, row: Numbers, words: Numbers) -> None:
    """Stop watching a stream's engine, and tell the event loop that the stream is its own again."""
    epoll_ctl(epoll, _DELETE, int(row[SOURCE]), words.ctypes.data)
    words[0] = row[OWNER]
    row[OWNER] = 0
    _write(returned, words.ctypes.data, 8)
