"""TCP statistics of the kernel for a sending connection: retransmissions, round trip, window, rate and queue (Linux).

The sender detects a congested path before a transfer ends: its queue grows, its round trips lengthen, its segments are
lost.
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
"""Format and offset in `struct tcp_info` of linux/tcp.h, which is only extended at its end."""
_NO_RTT_US = 2**32 - 1
"""`min_rtt_us` of a connection on which no round trip has been measured yet."""


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """Fields of `struct tcp_info` since the connection began, with the kernel's names; times in microseconds.

    Fields that the kernel does not report are 0.
    """

    snd_mss: int = 0
    rtt_us: int = 0
    snd_cwnd: int = 0
    """Congestion window, in segments."""
    total_retrans: int = 0
    """Number of retransmitted segments."""
    notsent_bytes: int = 0
    """Bytes written here and not yet sent for the first time: the network is slower than the writer."""
    min_rtt_us: int = 0
    data_segs_out: int = 0
    """Number of segments with data, retransmissions included."""
    delivery_rate: int = 0
    """Most recent delivery rate, in bytes per second."""
    busy_time_us: int = 0
    """Time during which sent data was not yet acknowledged."""
    bytes_sent: int = 0
    """Data bytes sent, retransmissions included."""
    bytes_retrans: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """State of one connection at one moment."""

    info: TcpInfo
    queue_bytes: int
    """Bytes written here and not acknowledged by the peer (SIOCOUTQ)."""


@dataclass(frozen=True, slots=True)
class SentCounters:
    """Counters of connections, added up over their lifetimes: all data, and retransmitted data."""

    nbytes: int = 0
    segments: int = 0
    again_bytes: int = 0
    again_segments: int = 0
    busy_us: int = 0
    """Time during which data was in flight, added up over all connections, in microseconds."""

    def __add__(self, other: SentCounters) -> SentCounters:
        return SentCounters(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(SentCounters)))

    def __sub__(self, other: SentCounters) -> SentCounters:
        return SentCounters(*(getattr(self, field.name) - getattr(other, field.name) for field in fields(SentCounters)))


@dataclass(frozen=True, slots=True)
class Gauges:
    """State of several connections to one peer at one moment."""

    connections: int = 0
    """Number of connections that carry data now. The other fields describe only these."""
    rtt_s: float = 0.0
    """Mean of the smoothed round-trip times."""
    min_rtt_s: float = 0.0
    """Shortest round-trip time measured on any connection: the one without a queue."""
    cwnd_bytes: float = 0.0
    """Sum of the congestion windows."""
    queue_bytes: float = 0.0
    delivery_bytes_per_s: float = 0.0
    """Sum of the most recent delivery rates."""
    unsent_bytes: float = 0.0
    """Part of `queue_bytes` that the network has not accepted yet; 0 if the network waits for more data."""
    looked_s: float = 0.0
    """Time of the query to the kernel, on the caller's clock; 0: not given."""


def parse(data: bytes) -> TcpInfo:
    """Parse the kernel's bytes. Fields beyond their end stay 0."""
    found = {}
    for name, (form, offset) in _FIELDS.items():
        if offset + struct.calcsize(form) <= len(data):
            (found[name],) = struct.unpack_from(f"={form}", data, offset)
    return TcpInfo(**found)


def sample(sock: socket.socket) -> Sample | None:
    """Query the kernel. Return None if the socket is already closed."""
    try:
        info = parse(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES))
        (queue_bytes,) = struct.unpack("=i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4))
    except (OSError, ValueError):
        return None
    return Sample(info, queue_bytes)


def sent(info: TcpInfo) -> SentCounters:
    """Return the counters of a connection."""
    return SentCounters(info.bytes_sent, info.data_segs_out, info.bytes_retrans, info.total_retrans, info.busy_time_us)


def gauges(samples: Iterable[Sample]) -> Gauges:
    """Aggregate the connections that carry data. All fields are 0 if none does."""
    busy = [sample for sample in samples if sample.queue_bytes]
    if not busy:
        return Gauges()
    shortest_us = min((sample.info.min_rtt_us for sample in busy if 0 < sample.info.min_rtt_us < _NO_RTT_US), default=0)
    return Gauges(
        connections=len(busy),
        rtt_s=sum(sample.info.rtt_us for sample in busy) / len(busy) / 1e6,
        min_rtt_s=shortest_us / 1e6,
        cwnd_bytes=float(sum(sample.info.snd_cwnd * sample.info.snd_mss for sample in busy)),
        queue_bytes=float(sum(sample.queue_bytes for sample in busy)),
        delivery_bytes_per_s=float(sum(sample.info.delivery_rate for sample in busy)),
        unsent_bytes=float(sum(sample.info.notsent_bytes for sample in busy)),
    )


_REST = (SentCounters(), Gauges())


@dataclass(slots=True)
class _Connection:
    sock: socket.socket
    target: str
    reported: SentCounters = field(default_factory=SentCounters)


class TcpMonitor:
    """Open connections by target. Threads may add and remove connections while another one reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, _Connection] = {}
        self._left: dict[str, SentCounters] = {}
        """Counts of the connections closed since the last `read`, without what was reported before."""
        self._busy: set[str] = set()
        """Targets that were not idle at the last `read`."""

    def opened(self, sock: socket.socket, target: str) -> None:
        """Register `sock` as a connection to `target`."""
        with self._lock:
            self._open[id(sock)] = _Connection(sock, target)

    def closing(self, sock: socket.socket) -> None:
        """Unregister `sock`, which is about to be closed. No effect if it was not registered."""
        with self._lock:
            connection = self._open.pop(id(sock), None)
            if connection and (last := sample(sock)):
                target = connection.target
                self._left[target] = self._left.get(target, SentCounters()) + (sent(last.info) - connection.reported)

    def ignore(self, sock: socket.socket) -> None:
        """Unregister `sock` without a report of what it has sent since the last `read`."""
        with self._lock:
            self._open.pop(id(sock), None)

    def read(self) -> dict[str, tuple[SentCounters, Gauges]]:
        """Return, by target, the data sent since the last call and the current gauges. Omits targets that stay idle."""
        with self._lock:
            counts, self._left = self._left, {}
            samples: dict[str, list[Sample]] = {}
            for connection in self._open.values():
                now = sample(connection.sock)
                if now is None:
                    continue
                counters = sent(now.info)
                counts[connection.target] = counts.get(connection.target, SentCounters()) + (
                    counters - connection.reported
                )
                connection.reported = counters
                samples.setdefault(connection.target, []).append(now)
            found = {target: (counts[target], gauges(samples.get(target, ()))) for target in sorted(counts)}
            reported = {target: state for target, state in found.items() if state != _REST or target in self._busy}
            self._busy = {target for target, state in reported.items() if state != _REST}
        return reported
