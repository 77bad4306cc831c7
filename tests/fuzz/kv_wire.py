"""Fuzzing target: frames between KV connectors (`connector.wire`) and lines between emulated engines."""

from __future__ import annotations

import socket

import msgspec
from tests.fuzz.cuts import bounded

from kvroute.emulator.kv.kv_wire import LINE_BYTES_MAX, is_complete, read_order, read_pull_header
from kvroute_engine.connector.transfer.channel import FramedSocket
from kvroute_engine.connector.transfer.wire import (
    HANDSHAKE_BYTES_MAX,
    LENGTH_BYTES,
    Message,
    WireError,
    decode,
    decode_length,
    encode,
    encode_length,
)

INSTRUMENTED = (
    "kvroute_engine.connector.transfer.wire",
    "kvroute_engine.connector.transfer.channel",
    "kvroute.emulator.kv.kv_wire",
)
RUNS = 60_000


def check(data: bytes) -> str:
    """A channel reads from a socket the same as the pure functions read from the bytes, and raises only WireError. A
    message is read back equal after it is written."""
    messages, error = bounded(lambda: _frames(data), 500 + 20 * len(data))
    for message in messages:
        assert decode(encode(message)) == message
    assert _received(data) == (messages, error)
    _lines(data)
    return "refused" if error else "accepted" if messages else "waits"


def _frames(data: bytes) -> tuple[list[Message], str]:
    """Return the messages of complete frames, and how the input ends."""
    messages: list[Message] = []
    at = 0
    try:
        while at < len(data):
            if at + LENGTH_BYTES > len(data):
                return messages, "reset"
            size = decode_length(data[at : at + LENGTH_BYTES], HANDSHAKE_BYTES_MAX)
            at += LENGTH_BYTES
            if at + size > len(data):
                return messages, "reset"
            messages.append(decode(data[at : at + size]))
            assert encode_length(data[at : at + size]) == data[at - LENGTH_BYTES : at]
            at += size
    except WireError as error:
        return messages, error.code
    return messages, ""


def _received(data: bytes) -> tuple[list[Message], str]:
    near, far = socket.socketpair()
    with near, far:
        far.sendall(data)  # fits into the socket's buffer
        far.shutdown(socket.SHUT_WR)
        channel, messages = FramedSocket(near, 60.0, 60.0), []
        try:
            while (message := channel.receive()) is not None:
                messages.append(message)
        except WireError as error:
            return messages, error.code
        return messages, ""


def _lines(data: bytes) -> None:
    """A request is complete from some byte on, and later bytes do not change it."""
    ends = [end for end in range(0, min(len(data), LINE_BYTES_MAX) + 1, 7) if is_complete(data[:end])]
    assert not ends or is_complete(data)
    first = read_order(data)
    if is_complete(data) and not isinstance(first, str):
        assert read_order(data + b"more\n") == first
    for read in (read_order, read_pull_header):
        request = read(data.partition(b"\n")[0])
        if isinstance(request, str):
            assert request
        else:
            assert read(msgspec.json.encode(request)) == request
