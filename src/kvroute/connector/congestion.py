"""What the kernel's TCP says of a connection that sends: retransmissions, round trip, window, rate and queue (Linux).

The sender sees a path fill up before a transfer ends: its queue grows, its round trips lengthen, its segments are lost.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

_INFO_BYTES = 232
_FIELDS = {
    "snd_mss": ("I", 16),
    "rtt_us": ("I", 68),
    "snd_cwnd": ("I", 80),
    "total_retrans": ("I", 100),
    "notsent_bytes": ("I", 144),
    "min_rtt_us": ("I", 148),
    "data_segs_out": ("I", 156),
    "delivery_rate": ("Q", 160),
    "busy_time_us": ("Q", 168),
    "bytes_sent": ("Q", 200),
    "bytes_retrans": ("Q", 208),
}
"""Format and offset in `struct tcp_info` of linux/tcp.h, which only ever grows at its end."""
_NO_RTT_US = 2**32 - 1
"""`min_rtt_us` of a connection on which no round trip has been measured yet."""


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """Fields of `struct tcp_info` since the connection began, by the kernel's names; times in microseconds.

    A kernel that knows less of them leaves the rest 0.
    """

    snd_mss: int = 0
    rtt_us: int = 0
    snd_cwnd: int = 0
    """In segments."""
    total_retrans: int = 0
    """Segments sent again."""
    notsent_bytes: int = 0
    """Written here and not sent for the first time: the network is slower than the writer."""
    min_rtt_us: int = 0
    data_segs_out: int = 0
    """Segments with data, those sent again included."""
    delivery_rate: int = 0
    """Bytes per second, most recently."""
    busy_time_us: int = 0
    """Time with data sent and not acknowledged."""
    bytes_sent: int = 0
    """Of data, those sent again included."""
    bytes_retrans: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """One connection at one moment."""

    info: TcpInfo
    queue_bytes: int
    """Written here and not acknowledged by the peer (SIOCOUTQ)."""


@dataclass(frozen=True, slots=True)
class Sent:
    """Counters of connections, added up over their lives: data and what of it was sent again."""

    nbytes: int = 0
    segments: int = 0
    again_bytes: int = 0
    again_segments: int = 0
    busy_us: int = 0
    """Microseconds in which data was under way, all connections added up."""

    def __add__(self, other: Sent) -> Sent:
        return Sent(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(Sent)))

    def __sub__(self, other: Sent) -> Sent:
        return Sent(*(getattr(self, one.name) - getattr(other, one.name) for one in fields(Sent)))


@dataclass(frozen=True, slots=True)
class Gauges:
    """Several connections to one peer at one moment."""

    connections: int = 0
    """Those that carry something now; the other fields are theirs."""
    rtt_s: float = 0.0
    """Mean of the smoothed round trips."""
    min_rtt_s: float = 0.0
    """Shortest round trip that any has seen: without a queue."""
    cwnd_bytes: float = 0.0
    """Sum of the congestion windows."""
    queue_bytes: float = 0.0
    delivery_bytes_per_s: float = 0.0
    """Sum of the most recent rates."""
    unsent_bytes: float = 0.0
    """Of `queue_bytes`, what waits for the network to take it; none where the network waits for more to be written."""
    looked_s: float = 0.0
    """When the kernel was asked, by the clock of whoever did; 0: it does not say."""


def parse(data: bytes) -> TcpInfo:
    """The kernel's bytes; fields that they do not reach stay 0."""
    found = {}
    for name, (form, offset) in _FIELDS.items():
        if offset + struct.calcsize(form) <= len(data):
            (found[name],) = struct.unpack_from(f"={form}", data, offset)
    return TcpInfo(**found)


def sample(sock: socket.socket) -> Sample | None:
    """Ask the kernel; None of a socket that is closed already."""
    try:
        info = parse(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES))
        (queue_bytes,) = struct.unpack("=i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4))
    except (OSError, ValueError):
        return None
    return Sample(info, queue_bytes)


def sent(info: TcpInfo) -> Sent:
    """A connection's counters."""
    return Sent(info.bytes_sent, info.data_segs_out, info.bytes_retrans, info.total_retrans, info.busy_time_us)


def gauges(samples: Iterable[Sample]) -> Gauges:
    """Those connections that carry something; all 0 if none does."""
    busy = [one for one in samples if one.queue_bytes]
    if not busy:
        return Gauges()
    shortest_us = min((one.info.min_rtt_us for one in busy if 0 < one.info.min_rtt_us < _NO_RTT_US), default=0)
    return Gauges(
        connections=len(busy),
        rtt_s=sum(one.info.rtt_us for one in busy) / len(busy) / 1e6,
        min_rtt_s=shortest_us / 1e6,
        cwnd_bytes=float(sum(one.info.snd_cwnd * one.info.snd_mss for one in busy)),
        queue_bytes=float(sum(one.queue_bytes for one in busy)),
        delivery_bytes_per_s=float(sum(one.info.delivery_rate for one in busy)),
        unsent_bytes=float(sum(one.info.notsent_bytes for one in busy)),
    )


_REST = (Sent(), Gauges())


@dataclass(slots=True)
class _Connection:
    sock: socket.socket
    target: str
    told: Sent = field(default_factory=Sent)


class Links:
    """Open connections by whom they lead to. Threads may come and go while another one reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, _Connection] = {}
        self._left: dict[str, Sent] = {}
        """Of connections that have gone since the last `read`, what was not told before."""
        self._busy: set[str] = set()
        """Not at rest when last read."""

    def opened(self, sock: socket.socket, target: str) -> None:
        """`sock` leads to `target`."""
        with self._lock:
            self._open[id(sock)] = _Connection(sock, target)

    def closing(self, sock: socket.socket) -> None:
        """`sock` is about to be closed; one that never led anywhere is passed by."""
        with self._lock:
            connection = self._open.pop(id(sock), None)
            if connection and (last := sample(sock)):
                target = connection.target
                self._left[target] = self._left.get(target, Sent()) + (sent(last.info) - connection.told)

    def read(self) -> dict[str, tuple[Sent, Gauges]]:
        """By target: what has been sent since the last call, and how it goes now; not of those at rest since then."""
        with self._lock:
            counts, self._left = self._left, {}
            samples: dict[str, list[Sample]] = {}
            for connection in self._open.values():
                now = sample(connection.sock)
                if now is None:
                    continue
                counters = sent(now.info)
                counts[connection.target] = counts.get(connection.target, Sent()) + (counters - connection.told)
                connection.told = counters
                samples.setdefault(connection.target, []).append(now)
            found = {target: (counts[target], gauges(samples.get(target, ()))) for target in sorted(counts)}
            told = {target: each for target, each in found.items() if each != _REST or target in self._busy}
            self._busy = {target for target, each in told.items() if each != _REST}
        return told
