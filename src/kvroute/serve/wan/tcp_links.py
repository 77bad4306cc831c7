"""TCP counters of a prefill engine's connections to decode engines, page by page: throughput, queues, stalls.

The engine's connector exports `TCP_INFO` (`kvroute:kv_sent_*`, `kvroute:kv_link_*`); two samples make an observation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvroute.http.slices import Slices
from kvroute.serve.observe.metrics.prometheus_text import Budget, labels_of, lines_between, samples

_LINK, _SENT = b"\nkvroute:kv_link", b"\nkvroute:kv_sent"
_BUSY_SHARE = 0.9
"""Minimum share of the time between two samples in which every connection had data in flight."""
_WAITING_BYTES = 64 << 10
"""Minimum unsent bytes per connection of a backlog: half of what the connector lets the kernel buffer while more is to
be sent. A smaller amount has only just been computed."""
_RTT_GROWTH = 1.5
_QUEUE_DELAY_S = 1e-3
"""A round trip that exceeds the shortest one by both this factor and this time shows a queue on the path."""
_AGAIN_SHARE = 0.01
"""Share of retransmissions that shows congestion; the loss rate of the link itself is smaller."""


@dataclass(frozen=True, slots=True)
class TcpCounters:
    """Connections to one target as a metrics page shows them; the ranks of an engine are summed."""

    sent_bytes: float = 0.0
    """Bytes since the engine started, retransmissions included; `again_bytes` and `busy_s` have the same start."""
    again_bytes: float = 0.0
    busy_s: float = 0.0
    """Time with data in flight, summed over connections."""
    connections: float = 0.0
    """Connections that carry data now; the fields below describe these."""
    rtt_s: float = 0.0
    min_rtt_s: float = 0.0
    queue_bytes: float = 0.0
    """Bytes that are written and not acknowledged."""
    unsent_bytes: float = 0.0
    """Part of `queue_bytes` that is not sent yet."""
    looked_s: float = 0.0
    """Time at which the kernel was queried, by the engine's clock; 0: not reported."""


_FIELDS = {
    b"kvroute:kv_sent_bytes_total": "sent_bytes",
    b"kvroute:kv_sent_again_bytes_total": "again_bytes",
    b"kvroute:kv_sent_busy_seconds_total": "busy_s",
    b"kvroute:kv_link_connections": "connections",
    b"kvroute:kv_link_rtt_seconds": "rtt_s",
    b"kvroute:kv_link_min_rtt_seconds": "min_rtt_s",
    b"kvroute:kv_link_queue_bytes": "queue_bytes",
    b"kvroute:kv_link_unsent_bytes": "unsent_bytes",
    b"kvroute:kv_link_looked_seconds": "looked_s",
}
_ADDED = frozenset(("sent_bytes", "again_bytes", "busy_s", "connections", "queue_bytes", "unsent_bytes"))


@dataclass(frozen=True, slots=True)
class TcpSample:
    """One target between two samples."""

    target: str
    seconds: float
    """Time between the two samples."""
    arrived_bytes: float
    """Bytes sent for the first time."""
    again_share: float
    """Share of the sent bytes that are retransmissions."""
    queue_delay_s: float
    """Round trip time beyond the shortest one seen."""
    backlogged: bool
    """Throughout the interval, more data was ready than the network took."""
    congested: bool
    """`backlogged` is true, and a queue on the path has built up or overflows."""
    stalled_s: float
    """Time without progress: nothing new was sent, and earlier bytes are not acknowledged; 0: data moves."""

    @property
    def bytes_per_s(self) -> float:
        """Throughput."""
        return self.arrived_bytes / self.seconds


def link_lines(page: bytes) -> bytes:
    """Return the part of a page that `read_links` reads; empty if the page has no such series."""
    return lines_between(page, _LINK, _SENT) if page.find(_LINK) >= 0 else b""


def read_links(lines: bytes, budget: Budget) -> Slices[dict[str, TcpCounters]]:
    """Return the totals by target from `link_lines`; of round trips and clocks of several ranks the largest counts."""
    found: dict[str, dict[str, float]] = {}
    for name, field in _FIELDS.items():
        for text, value in (yield from samples(lines, name, budget)):
            if budget.spend(len(text)):
                yield
            target = labels_of(text).get("target", "")
            totals = found.setdefault(target, {})
            before = totals.get(field, 0.0)
            totals[field] = before + value if field in _ADDED else max(before, value)
    return {target: TcpCounters(**totals) for target, totals in found.items()}


def between(target: str, old: TcpCounters, new: TcpCounters, stalled_s: float) -> TcpSample | None:
    """Return the difference of two samples of one target; None if the page is as old as the last one, or if counters
    fell because the engine restarted.

    Args:
        target: its name.
        old, new: the earlier and the later sample.
        stalled_s: `stalled_s` of the last observation.
    """
    seconds = new.looked_s - old.looked_s
    sent, again, busy_s = new.sent_bytes - old.sent_bytes, new.again_bytes - old.again_bytes, new.busy_s - old.busy_s
    if seconds <= 0 or min(sent, again, busy_s) < 0:
        return None
    stuck = old.queue_bytes > 0 < new.queue_bytes
    connections = (old.connections + new.connections) / 2
    backlogged = _waits(old) and _waits(new) and busy_s >= _BUSY_SHARE * seconds * connections
    again_share = again / sent if sent else 0.0
    delay_s = max(new.rtt_s - new.min_rtt_s, 0.0) if new.min_rtt_s else 0.0
    queued = delay_s >= _QUEUE_DELAY_S and new.rtt_s >= _RTT_GROWTH * new.min_rtt_s
    arrived = max(sent - again, 0.0)
    return TcpSample(
        target=target,
        seconds=seconds,
        arrived_bytes=arrived,
        again_share=again_share,
        queue_delay_s=delay_s,
        backlogged=backlogged,
        congested=backlogged and (queued or again_share >= _AGAIN_SHARE),
        stalled_s=stalled_s + seconds if stuck and arrived == 0.0 else 0.0,
    )


def _waits(totals: TcpCounters) -> bool:
    return totals.unsent_bytes > 0 and totals.unsent_bytes >= _WAITING_BYTES * totals.connections


class TcpDelta:
    """Compares consecutive pages of one engine; the first page only sets the baseline."""

    __slots__ = ("_before", "_stalled_s")

    def __init__(self) -> None:
        self._before: Mapping[str, TcpCounters] = {}
        self._stalled_s: dict[str, float] = {}

    def seen(self, links: Mapping[str, TcpCounters]) -> tuple[TcpSample, ...] | None:
        """Return the targets with traffic or active connections since the last page, ordered by name; None if the
        kernel was not queried since."""
        before, self._before = self._before, links
        observed, looked = [], False
        for target in sorted(links):
            old, new = before.get(target), links[target]
            if old is None or new.looked_s == old.looked_s:
                continue
            looked = True
            seen = between(target, old, new, self._stalled_s.get(target, 0.0))
            self._stalled_s[target] = seen.stalled_s if seen is not None else 0.0
            if seen is not None and (seen.arrived_bytes or new.connections):
                observed.append(seen)
        return tuple(observed) if looked else None

    def forget(self) -> bool:
        """Discard the baseline because the page cannot be read any more; return False if there was none."""
        knew = bool(self._before)
        self._before = {}
        self._stalled_s.clear()
        return knew
