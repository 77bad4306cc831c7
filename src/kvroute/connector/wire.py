"""Messages between two instances, and their frames: a length, a msgpack header and, after the handshake, a tag.

A frame of kind `Part` is followed by raw KV bytes. Everything here is a pure function over bytes; `channel` reads and
writes sockets, `authentication` computes tags.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec

from kvroute.connector.blocks import Layout

VERSION = 3
HANDSHAKE_BYTES_MAX = 4 << 10
"""Bytes of a header before the peer has proved the token."""
HEADER_BYTES_MAX = 64 << 10
"""Bytes of a header after that."""
LENGTH_BYTES = 4
_LENGTH = struct.Struct("!I")

Code: TypeAlias = Literal[
    "version", "token", "address", "layout", "prompt", "unknown", "gone", "range", "busy", "malformed"
]


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    """Server's first word."""

    version: int
    nonce: bytes


class Hello(msgspec.Struct, frozen=True, tag="hello", kw_only=True):
    """Client's answer."""

    version: int
    nonce: bytes
    host: str
    """IP address that the client has connected to."""
    port: int
    """TCP port that the client has connected to."""
    layout: Layout
    traffic_class: str
    instance: str
    proof: bytes = b""
    """Computed over the challenge and every other field of this message."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Server knows the token too."""

    proof: bytes


class Fetch(msgspec.Struct, frozen=True, tag="fetch", kw_only=True):
    """Send my part of `count` blocks from position `first` of the request's prompt, as they are computed."""

    request_id: str
    first: int
    count: int
    transfer: str
    """All fetches of one transfer share its blocks: each is sent over one of their connections."""
    lane: int = 0
    after: int = -1
    """Number of the last piece that has arrived over the lane's earlier connections: what followed is sent anew."""
    checksum: bool = False
    prompt: str = ""
    """Digest of the prompt, for the server to compare; empty: it has been compared already."""
    wait_s: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    """For so long a request may be unknown; 0: as the server likes."""


class Part(msgspec.Struct, frozen=True, tag="part", kw_only=True):
    """`nbytes` raw bytes follow: `count` blocks of one region from position `first` on."""

    region: int
    first: int
    count: int
    number: int
    """Ascends over a lane, whichever connection carries it."""
    nbytes: int
    crc32: int | None = None


class Waiting(msgspec.Struct, frozen=True, tag="waiting"):
    """Nothing to send yet, but I am here."""


class End(msgspec.Struct, frozen=True, tag="end"):
    """Nothing is left for this lane."""


class Release(msgspec.Struct, frozen=True, tag="release"):
    """The request's blocks are no longer needed, fetched or not."""

    request_id: str


class Released(msgspec.Struct, frozen=True, tag="released"):
    """Heard."""

    request_id: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """No, and why."""

    code: Code
    reason: str


Message: TypeAlias = Challenge | Hello | Welcome | Fetch | Part | Waiting | End | Release | Released | Refused
M = TypeVar("M", bound=Message)
_DECODER = msgspec.msgpack.Decoder(Message)


class WireError(ConnectionError):
    """The connection is of no further use; `code` says why in one word."""

    def __init__(self, code: str, reason: str) -> None:
        self.code, self.reason = code, reason
        super().__init__(f"{code}: {reason}")


def encode(message: Message, limit: int = HEADER_BYTES_MAX) -> bytes:
    """A message as the header of a frame, without its length.

    Raises:
        WireError: the peer would refuse it, because it is longer than `limit` bytes.
    """
    header = msgspec.msgpack.encode(message)
    if len(header) > limit:
        raise WireError("malformed", f"{type(message).__name__} takes {len(header)} bytes; at most {limit} are allowed")
    return header


def decode(header: bytes | bytearray | memoryview) -> Message:
    """The message in a frame's header.

    Raises:
        WireError: `header` is not exactly one message.
    """
    try:
        message: Message = _DECODER.decode(header)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError("malformed", str(error)) from None
    return message


def encode_length(header: bytes) -> bytes:
    """The first `LENGTH_BYTES` bytes of the frame that carries `header`."""
    return _LENGTH.pack(len(header))


def decode_length(prefix: bytes | bytearray | memoryview, limit: int = HEADER_BYTES_MAX) -> int:
    """Bytes of the header that follows `prefix`, the first `LENGTH_BYTES` bytes of a frame.

    Raises:
        WireError: the header is longer than `limit` bytes.
    """
    (size,) = _LENGTH.unpack(prefix)
    if size > limit:
        raise WireError("malformed", f"the peer announces a header of {size} bytes; at most {limit} are allowed")
    return int(size)


def crc32(views: Iterable[memoryview]) -> int:
    """One checksum over all views in their order."""
    value = 0
    for view in views:
        value = zlib.crc32(view, value)
    return value
