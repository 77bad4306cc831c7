"""A connected socket that exchanges frames (`wire`), and the socket options of KV connections."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvroute_engine.connector.transfer.authentication import TAG_BYTES, FrameTags, verify_proof
from kvroute_engine.connector.transfer.wire import (
    HANDSHAKE_BYTES_MAX,
    HEADER_BYTES_MAX,
    LENGTH_BYTES,
    M,
    Message,
    WireError,
    WireRefusal,
    decode,
    decode_length,
    encode,
    encode_length,
)

BUFFER_BYTES = 4 << 20
UNSENT_BYTES_MAX = 128 << 10
HANDSHAKE_S = 10.0
"""Maximum duration of a whole handshake, in seconds, even if bytes keep arriving."""
PROBE_S = 1
"""Time without a byte from the server after which a client in its handshake probes the connection, in seconds."""
SYSCTL_CORE = Path("/proc/sys/net/core")
_IOV_MAX = 512


class FramedSocket:
    """A connected socket that exchanges frames. The owner closes it.

    It starts in the handshake, where headers are short and a deadline applies. `secure` ends the handshake; from then
    on every frame has a tag.
    """

    def __init__(self, sock: socket.socket, timeout_s: float, handshake_s: float = HANDSHAKE_S) -> None:
        """At least one byte must move in `timeout_s` seconds, and the handshake must end in `handshake_s` seconds."""
        self.sock = sock
        self._timeout_s = timeout_s
        self._deadline: float | None = time.monotonic() + handshake_s
        self._limit = HANDSHAKE_BYTES_MAX
        """Maximum size of a header, in both directions, in bytes."""
        self._send_tags: FrameTags | None = None
        self._receive_tags: FrameTags | None = None
        sock.settimeout(timeout_s)

    def secure(self, *, send_key: bytes, receive_key: bytes) -> None:
        """End the handshake after the peer has proved the token. From now on frames have tags under these keys."""
        self._send_tags, self._receive_tags = FrameTags(send_key), FrameTags(receive_key)
        self._deadline, self._limit = None, HEADER_BYTES_MAX
        self.sock.settimeout(self._timeout_s)

    def send(self, message: Message, payload: Sequence[memoryview] = ()) -> None:
        """Send a header, followed by `payload` directly from memory.

        Raises:
            WireError: the message is longer than the peer accepts.
            OSError: the connection broke, or the peer accepted no byte in time.
        """
        header = encode(message, self._limit)
        tag = self._send_tags.next(header) if self._send_tags else b""
        self._send_all([memoryview(encode_length(header) + header + tag), *payload])

    def receive(self) -> Message | None:
        """Return the next header; None if the peer has closed the connection between two frames.

        Raises:
            WireError: the peer uses another protocol or disconnects within a frame, or a frame was modified in transit.
            OSError: the connection broke, or nothing arrived in time.
        """
        prefix = self._exactly(LENGTH_BYTES, may_end=True)
        if prefix is None:
            return None
        size = decode_length(prefix, self._limit)
        frame = self._exactly(size + (TAG_BYTES if self._receive_tags else 0))
        assert frame is not None
        header = frame[:size]
        if self._receive_tags and not verify_proof(frame[size:], self._receive_tags.next(header)):
            raise WireError("integrity", "a frame does not carry the tag of this connection")
        return decode(header)

    def receive_request(self) -> Message | None:
        """Wait without limit until the peer sends, then return its header; see `receive`.

        Once a byte has arrived, the whole header must arrive in `timeout_s`: TCP's keep-alive detects a dead peer,
        and not one that stops in the middle of a header.
        """
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        poll.poll()
        self._deadline = time.monotonic() + self._timeout_s
        try:
            return self.receive()
        finally:
            self._deadline = None
            self.sock.settimeout(self._timeout_s)

    def receive_next(self) -> Message:
        """Return the next header. The end of the connection is an error.

        Raises:
            WireError: the peer has disconnected, or it refuses: then with the refusal's own code and reason.
        """
        message = self.receive()
        if message is None:
            raise WireError("reset", "the peer has closed the connection")
        if isinstance(message, WireRefusal):
            raise WireError(message.code, message.reason)
        return message

    def expect(self, kind: type[M]) -> M:
        """Return the next header, which must be a `kind`.

        Raises:
            WireError: it is another kind, or as for `receive_next`.
        """
        message = self.receive_next()
        if not isinstance(message, kind):
            raise WireError("malformed", f"{type(message).__name__} instead of {kind.__name__}")
        return message

    def readable(self) -> bool:
        """Return whether the peer has sent something, or has disconnected."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return bool(poll.poll(0))

    def receive_into(self, views: Iterable[memoryview]) -> None:
        """Fill `views`, one after the other."""
        for view in views:
            while len(view):
                got = self.sock.recv_into(view, min(len(view), BUFFER_BYTES))
                if not got:
                    raise WireError("reset", "the peer closed the connection in the middle of a layer")
                view = view[got:]

    def abort(self) -> None:
        """Wake the thread that waits in this channel. It finds the channel broken and closes it."""
        with suppress(OSError):  # the peer closed it first
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Wake the thread that waits in this channel, and close the socket."""
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
                raise WireError("reset", "the peer closed the connection in the middle of a header")
            filled += got
        return bytes(data)

    def _keep(self, deadline: float) -> None:
        """Limit the wait to the deadline: a peer that sends single bytes must not be waited for forever."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            what = "a header" if self._receive_tags else "the handshake"
            raise TimeoutError(f"{what} was not complete in time")
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
    """Close a socket in which another thread may be waiting."""
    with suppress(OSError):  # the peer closed it first, or it was never connected
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def tune(
    sock: socket.socket, dscp: int, *, control: str = "", buffer_bytes: int = BUFFER_BYTES, limits: Path = SYSCTL_CORE
) -> None:
    """Set no delay, large buffers, keep-alive, and the traffic class's mark on every packet.

    Args:
        control: TCP congestion control by the kernel's name; empty: the system's.
        buffer_bytes: size of each socket buffer; 0: chosen by TCP.
        limits: folder in which the kernel gives the maximum buffer sizes (`wmem_max`, `rmem_max`).
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Data that is written but not yet sent can no longer be given to a faster connection.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES_MAX)
    if control:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
    for buffer, limit in ((socket.SO_SNDBUF, "wmem_max"), (socket.SO_RCVBUF, "rmem_max")):
        # A size above the limit would set the limit and end TCP's own growth, which may go much further.
        if 0 < buffer_bytes <= _number(limits / limit):
            sock.setsockopt(socket.SOL_SOCKET, buffer, buffer_bytes)
    mark(sock, dscp)


@contextmanager
def probed(sock: socket.socket) -> Iterator[None]:
    """Send keep-alive probes after `PROBE_S` while a client waits for the server's first message.

    A server that stops listening while a connection is being opened may discard it without a reset. The client then has
    an open connection and nothing to send, so only a probe detects the loss.
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
