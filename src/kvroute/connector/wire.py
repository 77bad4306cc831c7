"""The bytes between two instances: a length, a msgpack header and, for a layer, raw KV bytes; and who may talk.

A connection opens with a challenge in both directions: each side proves that it knows the token by an HMAC over both
nonces, so the token never crosses the network. KV bytes themselves are not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import msgspec

from kvroute.connector.blocks import Layout

VERSION = 2
HEADER_BYTES_MAX = 1 << 20
BUFFER_BYTES = 4 << 20
UNSENT_BYTES_MAX = 128 << 10
SYSCTL_CORE = Path("/proc/sys/net/core")
_IOV_MAX = 512
_LENGTH = struct.Struct("!I")

Code: TypeAlias = Literal["version", "token", "layout", "prompt", "unknown", "gone", "range", "busy", "malformed"]


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    """Server's first word."""

    version: int
    nonce: bytes


class Hello(msgspec.Struct, frozen=True, tag="hello", kw_only=True):
    """Client's answer."""

    version: int
    nonce: bytes
    proof: bytes
    layout: Layout
    traffic_class: str
    instance: str


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
    wait_s: float = 0.0
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


class Channel:
    """A connected socket that speaks frames. Whoever made it closes it."""

    def __init__(self, sock: socket.socket, timeout_s: float | None) -> None:
        self.sock = sock
        sock.settimeout(timeout_s)

    def send(self, message: Message, payload: Sequence[memoryview] = ()) -> None:
        """A header and, behind it, `payload` straight from memory."""
        header = msgspec.msgpack.encode(message)
        self._send_all([memoryview(_LENGTH.pack(len(header)) + header), *payload])

    def receive(self) -> Message | None:
        """The next header; None if the peer has closed between two frames.

        Raises:
            WireError: the peer speaks something else, or leaves in the middle.
            OSError: the connection broke, or nothing came in time.
        """
        length = self._exactly(_LENGTH.size, may_end=True)
        if length is None:
            return None
        (size,) = _LENGTH.unpack(length)
        if size > HEADER_BYTES_MAX:
            raise WireError("malformed", f"a header of {size} bytes")
        header = self._exactly(size)
        assert header is not None
        try:
            message: Message = _DECODER.decode(header)
        except msgspec.MsgspecError as error:
            raise WireError("malformed", str(error)) from None
        return message

    def heard(self) -> Message:
        """The next header, if it is not the end.

        Raises:
            WireError: the peer has left, or refuses: then with the refusal's own code and reason.
        """
        message = self.receive()
        if message is None:
            raise WireError("reset", "the peer has left")
        if isinstance(message, Refused):
            raise WireError(message.code, message.reason)
        return message

    def expect(self, kind: type[M]) -> M:
        """The next header, which must be a `kind`.

        Raises:
            WireError: it is another one, or as `heard`.
        """
        message = self.heard()
        if not isinstance(message, kind):
            raise WireError("malformed", f"{type(message).__name__} instead of {kind.__name__}")
        return message

    def receive_into(self, views: Iterable[memoryview]) -> None:
        """Fill `views`, one after the other."""
        for view in views:
            while len(view):
                got = self.sock.recv_into(view, min(len(view), BUFFER_BYTES))
                if not got:
                    raise WireError("reset", "the peer left in the middle of a layer")
                view = view[got:]

    def abort(self) -> None:
        """Wake whoever waits in this channel: it finds it broken, and closes it."""
        with suppress(OSError):  # the peer was faster
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Wake whoever waits in this channel, and let go."""
        shut(self.sock)

    def _exactly(self, size: int, may_end: bool = False) -> bytes | None:
        data = bytearray(size)
        view, filled = memoryview(data), 0
        while filled < size:
            got = self.sock.recv_into(view[filled:])
            if not got:
                if may_end and not filled:
                    return None
                raise WireError("reset", "the peer left in the middle of a header")
            filled += got
        return bytes(data)

    def _send_all(self, views: list[memoryview]) -> None:
        at = 0
        while at < len(views):
            sent = self.sock.sendmsg(views[at : at + _IOV_MAX])
            while at < len(views) and sent >= len(views[at]):
                sent -= len(views[at])
                at += 1
            if sent:
                views[at] = views[at][sent:]


def shut(sock: socket.socket) -> None:
    """Close a socket that another thread may be waiting in."""
    with suppress(OSError):  # the peer was faster, or it was never connected
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def tune(
    sock: socket.socket, dscp: int, *, control: str = "", buffer_bytes: int = BUFFER_BYTES, limits: Path = SYSCTL_CORE
) -> None:
    """No delay, large buffers, dead peers noticed, and the traffic class's mark on every packet.

    Args:
        control: TCP congestion control by the kernel's name; empty: the system's.
        buffer_bytes: of each socket buffer; 0: as TCP sees fit.
        limits: folder where the kernel says how large a buffer (`wmem_max`, `rmem_max`) it lets anybody ask for.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # What is written and not yet sent can no longer be given to a faster connection.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES_MAX)
    if control:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
    for buffer, limit in ((socket.SO_SNDBUF, "wmem_max"), (socket.SO_RCVBUF, "rmem_max")):
        # Asking for more than the limit gives the limit and ends TCP's own growth, which may go much further.
        if 0 < buffer_bytes <= _number(limits / limit):
            sock.setsockopt(socket.SOL_SOCKET, buffer, buffer_bytes)
    mark(sock, dscp)


def _number(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii"))
    except OSError:
        return 0


def mark(sock: socket.socket, dscp: int) -> None:
    """Write the DSCP code point into the upper six bits of the traffic class (RFC 2474)."""
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, dscp << 2)
    else:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, dscp << 2)


def fresh_nonce() -> bytes:
    """A number used once."""
    return secrets.token_bytes(16)


def proof(token: str, side: Literal["client", "server"], challenge: bytes, answer: bytes) -> bytes:
    """HMAC-SHA256 over both nonces, different for both sides so that neither can be reflected."""
    return hmac.digest(token.encode(), side.encode() + challenge + answer, hashlib.sha256)


def proven(given: bytes, expected: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(given, expected)


def crc32(views: Iterable[memoryview]) -> int:
    """One checksum over all views in their order."""
    value = 0
    for view in views:
        value = zlib.crc32(view, value)
    return value
