"""Messages between two instances, and their frames: a length, a msgpack header and, after the handshake, a tag.

A frame of kind `BlockPart` is followed by raw KV bytes. Everything here is a pure function over bytes; `channel` reads
and writes sockets, `authentication` computes tags.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec

from kvroute_engine.connector.blocks import BlockLayout, BlockNumber, Extent

VERSION = 6
HANDSHAKE_BYTES_MAX = 4 << 10
"""Maximum size of a header before the peer has proved the token, in bytes."""
HEADER_BYTES_MAX = 256 << 10
"""Maximum size of a header after that, in bytes. The longest one is an offer of memory, with keys for every region."""
LENGTH_BYTES = 4
MATCH_KEYS_MAX = 1024
_LENGTH = struct.Struct("!I")

Code: TypeAlias = Literal[
    "version", "token", "address", "layout", "prompt", "unknown", "gone", "range", "busy", "malformed", "store"
]


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    """First message of the server."""

    version: int
    nonce: bytes


class Hello(msgspec.Struct, frozen=True, tag="hello", kw_only=True):
    """First message of the client."""

    version: int
    nonce: bytes
    host: str
    """IP address that the client has connected to."""
    port: int
    """TCP port that the client has connected to."""
    layout: BlockLayout
    traffic_class: str
    instance: str
    proof: bytes = b""
    """Proof of the token, computed over the challenge and every other field of this message."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Second message of the server, with its own proof of the token."""

    proof: bytes


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """Request to transfer parts on this connection by reads from the server's memory instead of raw bytes."""


class Attached(msgspec.Struct, frozen=True, tag="attached", kw_only=True):
    """Answer to `Attach`. Without metadata the server has no NIXL, and parts are followed by raw bytes as before."""

    metadata: bytes = b""
    """Metadata of the server's NIXL agent."""
    extents: tuple[Extent, ...] = ()
    """Place of each region in the server's memory."""


class Fetch(msgspec.Struct, frozen=True, tag="fetch", kw_only=True):
    """Request for this lane's part of `count` blocks from position `first` of a prompt, as they are computed."""

    request_id: str
    first: int
    count: int
    transfer: str
    """Name of the transfer. Its fetches share the transfer's blocks: each block is sent over one of their
    connections."""
    lane: int = 0
    after: int = -1
    """Number of the last chunk that arrived over the lane's earlier connections. Later chunks are sent again."""
    checksum: bool = False
    prompt: str = ""
    """Digest of the prompt, for the server to compare; empty: it has already been compared."""
    wait_s: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    """Time for which the request may be unknown to the server, in seconds; 0: the server's default."""


class BlockPart(msgspec.Struct, frozen=True, tag="part", kw_only=True):
    """Header of `nbytes` raw bytes, which are `count` blocks of one region from position `first` on.

    In `MemoryParts` no bytes follow.
    """

    region: int
    first: int
    count: int
    number: int
    """Number of the chunk in its lane. It increases across the lane's connections."""
    nbytes: int
    crc32: int | None = None
    blocks: tuple[BlockNumber, ...] = ()
    """In `MemoryParts`: numbers of the blocks in the server's cache."""


class MemoryParts(msgspec.Struct, frozen=True, tag="parts"):
    """Parts of any regions that the client reads together from the server's memory. It answers with `Copied`."""

    parts: tuple[BlockPart, ...]


class Copied(msgspec.Struct, frozen=True, tag="copied"):
    """The client has read the parts up to this number from the server's memory.

    The server's next message other than a refusal confirms that it held the blocks until now, so that the bytes are
    those of the request.
    """

    number: int


class KeepAlive(msgspec.Struct, frozen=True, tag="waiting"):
    """Keep-alive message while there is nothing to send, or while a read from memory is in progress."""


class LaneEnd(msgspec.Struct, frozen=True, tag="end"):
    """No chunk is left for this lane."""


class Release(msgspec.Struct, frozen=True, tag="release"):
    """The request's blocks are no longer needed, fetched or not."""

    request_id: str


class Released(msgspec.Struct, frozen=True, tag="released"):
    """Confirmation of a release."""

    request_id: str


class Match(msgspec.Struct, frozen=True, tag="match"):
    """Question to a buffer server: how many leading blocks are in its store? At most `MATCH_KEYS_MAX` keys."""

    keys: tuple[bytes, ...]


class Matched(msgspec.Struct, frozen=True, tag="matched"):
    """Answer to `Match`."""

    blocks: int


class StoreBlock(msgspec.Struct, frozen=True, tag="store", kw_only=True):
    """Header of one full block, region by region, that a buffer server is to write to its store."""

    key: bytes
    parent: bytes
    """Key of the block before it; empty for the first block of a prompt."""
    nbytes: int
    crc32: int | None = None


class StoreAnswer(msgspec.Struct, frozen=True, tag="stored"):
    """Answer to `StoreBlock`: whether the block is in the store now. It is not if its parent is missing there."""

    stored: bool


class WireRefusal(msgspec.Struct, frozen=True, tag="refused"):
    """Refusal, with its reason."""

    code: Code
    reason: str


Message: TypeAlias = (
    Challenge
    | Hello
    | Welcome
    | Attach
    | Attached
    | Fetch
    | BlockPart
    | MemoryParts
    | Copied
    | KeepAlive
    | LaneEnd
    | Release
    | Released
    | Match
    | Matched
    | StoreBlock
    | StoreAnswer
    | WireRefusal
)
Request: TypeAlias = Attach | Fetch | Release | Match | StoreBlock
"""What a client sends after the handshake."""
M = TypeVar("M", bound=Message)
_DECODER = msgspec.msgpack.Decoder(Message)


class WireError(ConnectionError):
    """The connection is no longer usable; `code` gives the reason in one word."""

    def __init__(self, code: str, reason: str) -> None:
        self.code, self.reason = code, reason
        super().__init__(f"{code}: {reason}")


def encode(message: Message, limit: int = HEADER_BYTES_MAX) -> bytes:
    """Encode a message as the header of a frame, without its length.

    Raises:
        WireError: it is longer than `limit` bytes, so the peer would refuse it.
    """
    header = msgspec.msgpack.encode(message)
    if len(header) > limit:
        raise WireError("malformed", f"{type(message).__name__} takes {len(header)} bytes; at most {limit} are allowed")
    return header


def decode(header: bytes | bytearray | memoryview) -> Message:
    """Decode the message in a frame's header.

    Raises:
        WireError: `header` is not exactly one message.
    """
    try:
        message: Message = _DECODER.decode(header)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError("malformed", str(error)) from None
    return message


def encode_length(header: bytes) -> bytes:
    """Return the first `LENGTH_BYTES` bytes of the frame that carries `header`."""
    return _LENGTH.pack(len(header))


def decode_length(prefix: bytes | bytearray | memoryview, limit: int = HEADER_BYTES_MAX) -> int:
    """Return the size of the header that follows `prefix`, the first `LENGTH_BYTES` bytes of a frame.

    Raises:
        WireError: the header is longer than `limit` bytes.
    """
    (size,) = _LENGTH.unpack(prefix)
    if size > limit:
        raise WireError("malformed", f"the peer announces a header of {size} bytes; at most {limit} are allowed")
    return int(size)


def crc32(views: Iterable[memoryview]) -> int:
    """Return one checksum over all views, in order."""
    value = 0
    for view in views:
        value = zlib.crc32(view, value)
    return value
