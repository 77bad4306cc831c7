"""What a prefill engine's kernel says of its connections to decode engines, page by page: pace, queues, standstill.

Its connector shows `TCP_INFO` (`kvroute:kv_sent_*`, `kvroute:kv_link_*`); two looks at it make an observation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvroute.gateway.samples import Budget, labels_of, lines_between, samples
from kvroute.gateway.slices import Slices

_LINK, _SENT = b"\nkvroute:kv_link", b"\nkvroute:kv_sent"
_BUSY_SHARE = 0.9
"""Of the time between two looks in which every connection had data under way."""
_WAITING_BYTES = 64 << 10
"""Unsent on every connection: half of what the connector has the kernel keep while there is more. Less is what has just
been computed."""
_RTT_GROWTH = 1.5
_QUEUE_DELAY_S = 1e-3
"""A round trip so much longer than the shortest, by both measures, shows a queue on the way."""
_AGAIN_SHARE = 0.01
"""So much sent again is more than a line's own loss."""


@dataclass(frozen=True, slots=True)
class LinkTotals:
    """Connections to one target as a page shows them; the ranks of an engine are added up."""

    sent_bytes: float = 0.0
    """Since the engine began, those sent again included, as the next."""
    again_bytes: float = 0.0
    busy_s: float = 0.0
    """Time with data under way, connections added up."""
    connections: float = 0.0
    """That carry something now; what follows is theirs."""
    rtt_s: float = 0.0
    min_rtt_s: float = 0.0
    queue_bytes: float = 0.0
    """Written, and not acknowledged."""
    unsent_bytes: float = 0.0
    """Of these, not taken by the network yet."""
    looked_s: float = 0.0
    """When the kernel was asked, by the engine's clock; 0: it does not say."""


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
class LinkSeen:
    """One target between two looks."""

    target: str
    seconds: float
    """From look to look."""
    arrived_bytes: float
    """Sent for the first time."""
    again_share: float
    """Of what was sent, what had been sent before."""
    queue_delay_s: float
    """Round trip beyond the shortest one seen."""
    backlogged: bool
    """There was more to send than the network took, from look to look."""
    congested: bool
    """The same, and a queue stands on the way, or overflows."""
    still_s: float
    """For so long nothing has gone, and what went before is not acknowledged; 0: it goes."""

    @property
    def bytes_per_s(self) -> float:
        """Pace."""
        return self.arrived_bytes / self.seconds


def link_lines(page: bytes) -> bytes:
    """The part of a page that `read_links` reads; empty where it says nothing of links."""
    return lines_between(page, _LINK, _SENT) if page.find(_LINK) >= 0 else b""


def read_links(lines: bytes, budget: Budget) -> Slices[dict[str, LinkTotals]]:
    """By target, what `link_lines` gave; round trips and clocks of several ranks count as the longest of them."""
    found: dict[str, dict[str, float]] = {}
    for name, field in _FIELDS.items():
        for text, value in (yield from samples(lines, name, budget)):
            if budget.spend(len(text)):
                yield
            target = labels_of(text).get("target", "")
            totals = found.setdefault(target, {})
            before = totals.get(field, 0.0)
            totals[field] = before + value if field in _ADDED else max(before, value)
    return {target: LinkTotals(**totals) for target, totals in found.items()}


def between(target: str, old: LinkTotals, new: LinkTotals, still_s: float) -> LinkSeen | None:
    """What two looks at one target show; None of a page that is as old as the last, or of counters that fell: the
    engine has begun anew.

    Args:
        target: its name.
        old, new: as they were, and as they are.
        still_s: as of the last observation.
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
    return LinkSeen(
        target=target,
        seconds=seconds,
        arrived_bytes=arrived,
        again_share=again_share,
        queue_delay_s=delay_s,
        backlogged=backlogged,
        congested=backlogged and (queued or again_share >= _AGAIN_SHARE),
        still_s=still_s + seconds if stuck and arrived == 0.0 else 0.0,
    )


def _waits(totals: LinkTotals) -> bool:
    return totals.unsent_bytes > 0 and totals.unsent_bytes >= _WAITING_BYTES * totals.connections


class LinkWatch:
    """One engine's pages, one after the other; the first only says where to count from."""

    __slots__ = ("_before", "_still_s")

    def __init__(self) -> None:
        self._before: Mapping[str, LinkTotals] = {}
        self._still_s: dict[str, float] = {}

    def seen(self, links: Mapping[str, LinkTotals]) -> tuple[LinkSeen, ...] | None:
        """Targets that something was or is to be sent to since the last page, in their order by name; None where
        nobody has looked since."""
        before, self._before = self._before, links
        observed, looked = [], False
        for target in sorted(links):
            old, new = before.get(target), links[target]
            if old is None or new.looked_s == old.looked_s:
                continue
            looked = True
            seen = between(target, old, new, self._still_s.get(target, 0.0))
            self._still_s[target] = seen.still_s if seen is not None else 0.0
            if seen is not None and (seen.arrived_bytes or new.connections):
                observed.append(seen)
        return tuple(observed) if looked else None

    def forget(self) -> bool:
        """The page cannot be read any more; False where none had anything to say."""
        knew = bool(self._before)
        self._before = {}
        self._still_s.clear()
        return knew
