"""A connected socket that speaks frames (`wire`), and the socket options of KV connections."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvroute.connector.authentication import TAG_BYTES, FrameTags, proven
from kvroute.connector.wire import (
    HANDSHAKE_BYTES_MAX,
    HEADER_BYTES_MAX,
    LENGTH_BYTES,
    M,
    Message,
    Refused,
    WireError,
    decode,
    decode_length,
    encode,
    encode_length,
)

BUFFER_BYTES = 4 << 20
UNSENT_BYTES_MAX = 128 << 10
HANDSHAKE_S = 10.0
"""A handshake that takes longer as a whole has failed, though bytes keep coming."""
PROBE_S = 1
"""After so long without a byte from the server, a client in its handshake asks whether it is still there."""
SYSCTL_CORE = Path("/proc/sys/net/core")
_IOV_MAX = 512


class Channel:
    """A connected socket that speaks frames. The owner closes it.

    It begins in the handshake: headers are short, and it has to be over in time. `secure` ends the handshake; from then
    on every frame carries a tag.
    """

    def __init__(self, sock: socket.socket, timeout_s: float, handshake_s: float = HANDSHAKE_S) -> None:
        """Args: seconds in which at least one byte must move, and in which the handshake must be over."""
        self.sock = sock
        self._timeout_s = timeout_s
        self._deadline: float | None = time.monotonic() + handshake_s
        self._limit = HANDSHAKE_BYTES_MAX
        """Bytes of a header at most, in both directions."""
        self._send_tags: FrameTags | None = None
        self._receive_tags: FrameTags | None = None
        sock.settimeout(timeout_s)

    def secure(self, *, send_key: bytes, receive_key: bytes) -> None:
        """The peer has proved the token: the handshake is over, and frames carry tags under these keys."""
        self._send_tags, self._receive_tags = FrameTags(send_key), FrameTags(receive_key)
        self._deadline, self._limit = None, HEADER_BYTES_MAX
        self.sock.settimeout(self._timeout_s)

    def send(self, message: Message, payload: Sequence[memoryview] = ()) -> None:
        """A header and, behind it, `payload` straight from memory.

        Raises:
            WireError: the message is longer than the peer accepts.
            OSError: the connection broke, or the peer took nothing in time.
        """
        header = encode(message, self._limit)
        tag = self._send_tags.next(header) if self._send_tags else b""
        self._send_all([memoryview(encode_length(header) + header + tag), *payload])

    def receive(self) -> Message | None:
        """The next header; None if the peer has closed between two frames.

        Raises:
            WireError: the peer speaks something else, or leaves in the middle, or somebody between has changed a frame.
            OSError: the connection broke, or nothing came in time.
        """
        prefix = self._exactly(LENGTH_BYTES, may_end=True)
        if prefix is None:
            return None
        size = decode_length(prefix, self._limit)
        frame = self._exactly(size + (TAG_BYTES if self._receive_tags else 0))
        assert frame is not None
        header = frame[:size]
        if self._receive_tags and not proven(frame[size:], self._receive_tags.next(header)):
            raise WireError("integrity", "a frame does not carry the tag of this connection")
        return decode(header)

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
            if self._deadline is not None:
                self._keep(self._deadline)
            got = self.sock.recv_into(view[filled:])
            if not got:
                if may_end and not filled:
                    return None
                raise WireError("reset", "the peer left in the middle of a header")
            filled += got
        return bytes(data)

    def _keep(self, deadline: float) -> None:
        """A peer that sends a byte now and then must not stay in the handshake for ever."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the handshake was not complete in time")
        self.sock.settimeout(min(left_s, self._timeout_s))

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


@contextmanager
def probed(sock: socket.socket) -> Iterator[None]:
    """Keep-alive probes after `PROBE_S`, for a client that waits for the server's first message.

    A server that stops listening while a connection is being opened may discard it without a reset. The client then has
    an open connection and nothing to send, so that only a probe finds out.
    """
    idle_s = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_S)
    yield
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)


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
