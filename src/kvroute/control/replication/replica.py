"""What one gateway reports to the others of its cluster, and what it makes of their reports; without I/O and clock.

The gateways share one ordered stream. The driver writes what `take` returns and passes each entry that it reads to
`received`. There is no other way of communication: a gateway that joins, or that has missed reports, asks in the stream
for whole reports.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Literal, TypeAlias

from msgspec.structs import replace

from kvroute.control.core import Control
from kvroute.control.replication.admissions import Admissions
from kvroute.control.replication.usage import ChargedUsage
from kvroute.control.state.report_checks import check_counts
from kvroute.types import (
    Admitted,
    Arrived,
    ClusterChanged,
    DecodeFailed,
    Event,
    Finished,
    InputError,
    KvStored,
    PeerBooking,
    PeerEvent,
    PeerLost,
    PeerReport,
    PeerReported,
    PrefillFailed,
    PrefillFinished,
    RoleSwitched,
    Served,
    ThresholdKnown,
    TransferFinished,
)

EVERYONE = "*"
"""In `PeerReport.asks`: all gateways."""
_STEPS = frozenset((PrefillFinished, PrefillFailed, DecodeFailed, Served, TransferFinished, Admitted, Finished))
_KNOWLEDGE_MAX = 10_000
"""Number of own events that wait for the stream; the oldest are dropped."""
_EVENTS_MAX = 1_000
"""Number of events in one report."""

SyncState: TypeAlias = Literal["disconnected", "joining", "in_sync"]
"""`disconnected`: without the stream; `joining`: some gateways have not answered yet."""


class Replica:
    """One gateway's side of the shared stream. Times are the caller's; they never decrease."""

    def __init__(
        self,
        gateway: str,
        *,
        lease_s: float,
        approximate: frozenset[str] = frozenset(),
        block_tokens: int = 16,
        admissions: Admissions | None = None,
        usage: ChargedUsage | None = None,
    ) -> None:
        """
        Args:
            gateway: identifier of this process, different from that of every other process.
            lease_s: time without a report after which the others take back the bookings of a gateway.
            approximate: instances whose cached prefixes are known from the gateways' requests alone.
            block_tokens: size of the blocks of these prefixes.
            admissions: counts for common limits of admission; None: each gateway has limits of its own.
            usage: charges for common rate limits; None: each gateway has limits of its own.
        """
        self.gateway, self.approximate, self.block_tokens = gateway, approximate, block_tokens
        self.lease_s = lease_s
        self._admissions, self._usage = admissions, usage
        self._changed: dict[int, None] = {}
        """Requests whose bookings have changed since the last report, in the order of their change."""
        self._events: deque[PeerEvent] = deque(maxlen=_KNOWLEDGE_MAX)
        self._knowledge: Iterator[PeerEvent] | None = None
        """The rest of the answer to another gateway that joins."""
        self._teaches, self._untaught = False, True
        self._connected, self._whole, self._joined = False, False, False
        self._asks: dict[str, float] = {}
        """Gateways to ask for a whole report, and the time from which they may be asked (again)."""
        self._sequence, self._sent_at, self._whole_sequence = 0, 0.0, 0
        self._joined_at: float | None = None
        """Time when the first own report since the connection was read; None before."""
        self._heard_at: dict[str, float] = {}
        """Time of the last report of each gateway whose lease has not expired."""

    # Own traffic

    def handled(self, event: Event) -> None:
        """Note that the core has handled an event of own traffic."""
        if not self._connected:
            return  # the first report is whole
        kind = type(event)
        if kind in _STEPS:
            self._changed[event.request_id] = None  # type: ignore[union-attr]
        elif isinstance(event, Arrived):
            self._changed[event.request.id] = None
        elif kind is ClusterChanged:
            self._whole = True

    def learned(self, event: PeerEvent) -> None:
        """Note what own traffic has taught, which the others cannot observe."""
        self._events.append(event)

    def take(self, now: float, cores: Sequence[Control]) -> PeerReport | None:
        """Return the next report; None if there is nothing to report yet.

        Args:
            now: time in seconds.
            cores: the cores of this gateway that have requests, the current one first.
        """
        if not self._connected:
            return None
        asks = tuple(sorted(name for name, at in self._asks.items() if at <= now))
        beat = now - self._sent_at >= self._beat_s
        teaches = self._teaches or self._knowledge is not None
        counted = self._admissions is not None and self._admissions.changed
        counted = counted or (self._usage is not None and self._usage.changed)
        if not (beat or asks or self._whole or self._changed or self._events or teaches or counted):
            return None
        self._sequence, self._sent_at = self._sequence + 1, now
        whole, self._whole = self._whole, False
        requests = [number for core in cores for number in core.requests] if whole else list(self._changed)
        self._changed.clear()
        if whole:
            self._whole_sequence = self._sequence
        for name in asks:
            self._asks[name] = now + self._beat_s
        self._asks.pop(EVERYONE, None)
        knowledge = tuple(self._next_knowledge(now, cores[0])) if teaches else ()
        return PeerReport(
            self.gateway,
            self._sequence,
            now,
            bookings=tuple([_booked(number, cores) for number in requests]),
            events=tuple(self._next_events(now, cores[0], beat=beat)),
            whole=whole,
            asks=asks,
            asks_knowledge=self._untaught and (beat or EVERYONE in asks),
            knowledge=knowledge,
            knowledge_ends=teaches and self._knowledge is None,
            admissions=self._admissions.take(whole=whole) if self._admissions is not None else None,
            usage=self._usage.take(whole=whole) if self._usage is not None else None,
        )

    def _next_events(self, now: float, core: Control, *, beat: bool) -> Iterator[PeerEvent]:
        for _ in range(min(len(self._events), _EVENTS_MAX)):
            yield self._events.popleft()
        if core.offloading is not None and beat and self.leads:
            for site, threshold in core.offloading.thresholds.items():
                name = core.offloading.datacenters.names[site]
                yield ThresholdKnown(now, name, threshold.tokens, threshold.base_tokens)

    def _next_knowledge(self, now: float, core: Control) -> Iterator[PeerEvent]:
        if self._knowledge is None:
            self._teaches = False
            self._knowledge = self._all_knowledge(now, core)
        for _ in range(_EVENTS_MAX):
            event = next(self._knowledge, None)
            if event is None:
                self._knowledge = None
                return
            yield event

    def _all_knowledge(self, now: float, core: Control) -> Iterator[PeerEvent]:
        """What the core knows of the network, of roles and of the caches of instances that do not report them, one
        instance at a time in its present state."""
        yield from core.knowledge(now)
        for instance, role in core.roles.items():
            yield RoleSwitched(now, instance, role)
        yield from core.sessions(now)
        for name in sorted(self.approximate):
            with suppress(InputError):  # the instance has left meanwhile
                index = core.cluster.index(name)
                for tier, blocks in list(core.caches.chains(index)):
                    yield KvStored(now, name, blocks, self.block_tokens, tier)

    # The stream

    def connected(self, now: float) -> None:
        """Begin to report: the stream can be read from now on. The first report is whole and asks all others."""
        self._connected, self._whole, self._joined, self._joined_at = True, True, False, None
        self._whole_sequence = self._sequence + 1
        self._asks = {EVERYONE: now}
        for name in self._heard_at:
            self._heard_at[name] = now  # nothing could be read, which does not mean that nothing was written

    def disconnected(self) -> None:
        """Go on without the stream. What is booked meanwhile needs no memory: the first report after it is whole."""
        self._connected = self._joined = self._teaches = False
        self._knowledge = None
        self._changed.clear()

    def received(self, now: float, report: PeerReport) -> PeerReported | None:
        """Process an entry of the stream. Return the event that the caller passes to its core, after which it calls
        `applied`; None for an own report.

        Raises:
            InputError: a number is out of its bounds. Nothing changes.
        """
        check_counts(report)
        if report.gateway == self.gateway:
            if self._joined_at is None and report.sequence >= self._whole_sequence:
                self._joined_at = now
            return None
        self._heard_at[report.gateway] = now
        if self._admissions is not None:
            self._admissions.received(report)
        if self._usage is not None:
            self._usage.received(report)
        if EVERYONE in report.asks or self.gateway in report.asks:
            self._whole = self._whole or self._connected
        if report.asks_knowledge and self._joined and self.gateway == self._first(report.gateway):
            self._teaches = self._knowledge is None
        learns = report.events + report.knowledge if self._untaught else report.events
        learns = tuple([event for event in learns if type(event) is not KvStored or event.instance in self.approximate])
        self._untaught = self._untaught and not report.knowledge_ends
        return PeerReported(now, replace(report, events=learns, knowledge=(), admissions=None, usage=None))

    def applied(self, now: float, core: Control, gateway: str) -> None:
        """Ask a gateway for a whole report if its bookings are not complete in the core."""
        peer = core.peers.all.get(gateway)
        if peer is None or peer.in_sync:
            self._asks.pop(gateway, None)
        else:
            self._asks.setdefault(gateway, now)

    def refresh(self, now: float) -> tuple[PeerLost, ...]:
        """Apply what depends on time alone: return an event for each gateway whose lease has expired."""
        gone = sorted(name for name, at in self._heard_at.items() if now - at >= self.lease_s)
        for name in gone:
            del self._heard_at[name]
            self._asks.pop(name, None)
            if self._admissions is not None:
                self._admissions.lost(name)
            if self._usage is not None:
                self._usage.lost(name)
        # Each gateway reports at least once per beat, so after one all others are known.
        if not self._joined and self._joined_at is not None and now - self._joined_at >= self._beat_s:
            self._joined = self._connected and not self._asks
            self._untaught = self._untaught and bool(self._heard_at)
        return tuple(PeerLost(now, name) for name in gone)

    @property
    def state(self) -> SyncState:
        """Whether the view contains what the other gateways have booked."""
        if not self._connected:
            return "disconnected"
        return "in_sync" if self._joined and not self._asks else "joining"

    @property
    def gateways(self) -> tuple[str, ...]:
        """The other gateways whose leases have not expired, by name."""
        return tuple(sorted(self._heard_at))

    @property
    def leads(self) -> bool:
        """Whether this gateway is the one that reviews roles and thresholds: the first by name of those in sync."""
        return self._joined and self.gateway == self._first("")

    @property
    def _beat_s(self) -> float:
        """Longest time between two reports."""
        return self.lease_s / 4

    def _first(self, asking: str) -> str:
        return min((self.gateway, *(name for name in self._heard_at if name != asking)))


def _booked(number: int, cores: Sequence[Control]) -> PeerBooking:
    for core in cores:
        if core.in_progress(number):
            return core.booked(number)
    return PeerBooking(number)
