"""Bookings of other gateways in front of the same cluster, counted in the core's own view.

A policy sees own and foreign load as one: foreign bookings are in the pools, in the counts of transfers and in the
tables of transfers in flight. Load beyond both that an engine reports is that of clients without a gateway.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count

from kvroute.control.cluster_change import CoreParts
from kvroute.control.state.pool import DecodePool, PrefillPool
from kvroute.control.state.report_checks import check_report
from kvroute.types import InputError, PeerBooking, PeerEvent, PeerReport, Role, RoleDraining, RoleSwitched

_NUMBERS_FROM = 1 << 62
"""First number of a foreign transfer, above the ids of own requests."""
BOOKINGS_MAX = 1 << 16
"""Bookings that are counted for one gateway; its limits of admission allow far fewer."""
_LOST_MAX = 256
"""Number of lost gateways whose last sequence number is kept, so that late reports are recognised."""


@dataclass(slots=True)
class _Placed:
    """A foreign booking and what it counts in. An instance that the cluster does not have counts nowhere."""

    booking: PeerBooking
    prefill: tuple[PrefillPool, int] | None = None
    prompt: tuple[DecodePool, int] | None = None
    """The prefill, if the decode instance computes the prompt itself."""
    decode: tuple[DecodePool, int] | None = None
    decode_bytes: float = 0.0
    """KV memory that is counted there."""
    transfer: tuple[int, int, int] | None = None
    """Number, source and target."""


@dataclass(slots=True)
class PeerGateway:
    """Another gateway, as its reports describe it."""

    sequence: int = 0
    """Number of its last report."""
    in_sync: bool = False
    """Whether its bookings are complete: a whole report was received, and no report since then is missing."""
    counted: bool = False
    """Whether its bookings are counted: from its first whole report on, until it is lost."""
    draining: dict[str, Role] = field(default_factory=dict)
    """Instances that it drains for a role switch, and their roles before."""
    placed: dict[int, _Placed] = field(default_factory=dict)
    """Its bookings and what they count in, by request."""

    @property
    def bookings(self) -> tuple[PeerBooking, ...]:
        """Its bookings, by the number of the request."""
        return tuple(self.placed[number].booking for number in sorted(self.placed))


class PeerGateways:
    """The other gateways of a core. The caller decides when one is lost; reports may be late, repeated or missing."""

    def __init__(self, parts: CoreParts) -> None:
        self._parts, self._peers = parts, dict[str, PeerGateway]()
        self._numbers = count(_NUMBERS_FROM)
        self.arrivals = 0
        """Number of requests that other gateways have booked since they were in sync; it only rises."""

    @property
    def all(self) -> Mapping[str, PeerGateway]:
        """Every gateway that has reported, by its identifier; lost ones are kept for a while."""
        return self._peers

    def uses(self, instance: str) -> bool:
        """Whether another gateway has a request in progress on this instance, or needs the KV cache that it holds."""
        return any(
            instance in (booking.prefill, booking.target, booking.source)
            for peer in self._peers.values()
            for booking in peer.bookings
        )

    def reported(self, at: float, report: PeerReport) -> tuple[PeerEvent, ...]:
        """Process a report; return the events in it that the caller must apply.

        A report that is not newer than the last one of its gateway is ignored: it was repeated or is late. After a
        missing report, bookings are applied, because each one is complete in itself, but the gateway is not in sync
        until a whole report. Nothing is booked for a gateway before its first whole report, or after it was lost until
        its next one.

        Raises:
            InputError: a number is out of its bounds. The view does not change.
        """
        check_report(report)
        peer = self._peers.setdefault(report.gateway, PeerGateway())
        if report.sequence <= peer.sequence:
            return ()
        follows = report.sequence == peer.sequence + 1
        peer.sequence = report.sequence
        if report.whole:
            named = {booking.request_id for booking in report.bookings}
            for number in [number for number in sorted(peer.placed) if number not in named]:
                self._apply(at, peer, PeerBooking(number))
            peer.in_sync = peer.counted = True
        else:
            peer.in_sync = peer.in_sync and follows
        for booking in report.bookings if peer.counted else ():
            fresh = not report.whole and not booking.empty and booking.request_id not in peer.placed
            self.arrivals += fresh
            self._apply(at, peer, booking)
        return tuple([event for event in report.events if not self._drains(peer, event)])

    def lost(self, at: float, gateway: str) -> None:
        """Release all bookings of a gateway whose lease has expired. Does nothing if it is unknown or lost already."""
        peer = self._peers.get(gateway)
        if peer is None or not peer.counted:
            return
        for number in sorted(peer.placed):
            self._apply(at, peer, PeerBooking(number))
        peer.in_sync = peer.counted = False
        for instance, role in sorted(peer.draining.items()):
            self._restore(instance, role)
        peer.draining.clear()
        self._peers[gateway] = self._peers.pop(gateway)  # the one that was lost last is the last to be forgotten
        gone = [name for name, other in self._peers.items() if not other.counted]
        for name in gone[: max(len(gone) - _LOST_MAX, 0)]:
            del self._peers[name]

    def known(self, at: float) -> Iterator[PeerReport]:
        """Yield the state as reports, from which another core of this gateway continues."""
        for name, peer in self._peers.items():
            if peer.in_sync:
                yield PeerReport(name, peer.sequence, at, peer.bookings, whole=True)

    def lift(self, at: float) -> None:
        """Take all bookings out of the view before the cluster changes; `put_back` must follow."""
        for peer in self._peers.values():
            for placed in peer.placed.values():
                self._update(at, placed, PeerBooking(placed.booking.request_id))

    def put_back(self, at: float, parts: CoreParts) -> None:
        """Book again what `lift` has taken out, on the instances of these parts. A transfer begins again."""
        self._parts = parts
        for peer in self._peers.values():
            for placed in peer.placed.values():
                self._update(at, placed, placed.booking)

    def _drains(self, peer: PeerGateway, event: PeerEvent) -> bool:
        """Follow the drains of a gateway; return whether the event was the start of one. An instance that is drained
        takes no new requests here either."""
        if isinstance(event, RoleSwitched):
            peer.draining.pop(event.instance, None)
        if not isinstance(event, RoleDraining):
            return False
        index, offloading = _index(self._parts, event.instance), self._parts.offloading
        if index is None or index not in self._parts.view.settings.switchable:
            return True
        role = self._parts.view.roles[index]
        if role is not None and peer.counted:
            peer.draining[event.instance] = role
            self._parts.view.set_role(index, None)
            if offloading is not None:
                offloading.switching += 1
        return True

    def _restore(self, instance: str, role: Role) -> None:
        """Give an instance its role again because the gateway that drained it is lost."""
        index, offloading = _index(self._parts, instance), self._parts.offloading
        if index is not None and self._parts.view.roles[index] is None:
            self._parts.view.set_role(index, role)
            if offloading is not None:
                offloading.switching -= 1

    def _apply(self, at: float, peer: PeerGateway, booking: PeerBooking) -> None:
        placed = peer.placed.get(booking.request_id)
        if placed is None:
            if booking.empty or len(peer.placed) >= BOOKINGS_MAX:
                return
            placed = peer.placed[booking.request_id] = _Placed(PeerBooking(booking.request_id))
        self._update(at, placed, booking)
        placed.booking = booking
        if booking.empty:
            del peer.placed[booking.request_id]

    def _update(self, at: float, placed: _Placed, new: PeerBooking) -> None:
        """Change what is counted for a booking to `new`; parts that are equal keep their counts."""
        old = placed.booking
        self._served(old, new)
        self._move_transfer(at, placed, new)
        self._update_prefill(at, placed, new)
        same = (old.target, old.need_bytes) == (new.target, new.need_bytes) and old.admitted <= new.admitted
        if placed.decode is not None and not same:
            takers, position = placed.decode
            takers.release(position, placed.decode_bytes, admitted=old.admitted)
            placed.decode = None
        if placed.decode is None and new.target:
            placed.decode_bytes = self._held_bytes(new.target, new.need_bytes)
            placed.decode = self._book_decode(at, new, placed.decode_bytes)
        elif placed.decode is not None and new.admitted and not old.admitted:
            takers, position = placed.decode
            takers.admit(position)

    def _served(self, old: PeerBooking, new: PeerBooking) -> None:
        """Record the instances that serve the session of a request. Of a prefill that was over before the first report,
        the transfer shows the instance."""
        sessions = self._parts.view.sessions
        for before, now in ((old.prefill, new.prefill), (old.source, new.source)):
            if now and now != before:
                sessions.served(new.session, "prefill", now)
        if new.target and new.target != old.target:
            sessions.served(new.session, "decode", new.target)

    def _update_prefill(self, at: float, placed: _Placed, new: PeerBooking) -> None:
        old = placed.booking
        if (old.prefill, old.prefill_s) != (new.prefill, new.prefill_s):
            unfinished_s = old.prefill_s if new.prefill or not new.target else 0.0
            if placed.prefill is not None:
                pool, position = placed.prefill
                pool.release(position, at, unfinished_s)
            if placed.prompt is not None:
                takers, position = placed.prompt
                takers.release_prompt(position, at, unfinished_s)
            placed.prefill = placed.prompt = None
        if placed.prefill is None and placed.prompt is None and new.prefill:
            placed.prompt = self._book_prompt(at, new)
            if placed.prompt is None:
                placed.prefill = self._book_prefill(at, new)

    def _book_prompt(self, at: float, booking: PeerBooking) -> tuple[DecodePool, int] | None:
        """Book the prompt if a decode instance computes it itself; prefill instances and those of role `both` have a
        prefill pool for that."""
        found = self._decode_position(booking.target) if booking.prefill == booking.target else None
        if found is None or found[0] not in self._parts.view.decode.values() or not found[0].partner[found[1]]:
            return None
        found[0].book_prompt(found[1], at, booking.prefill_s)
        return found

    def _move_transfer(self, at: float, placed: _Placed, new: PeerBooking) -> None:
        old, reservations = placed.booking, self._parts.reservations
        same = (old.source, old.target, old.kv_bytes) == (new.source, new.target, new.kv_bytes)
        if placed.transfer is not None and not (same and new.source):
            # The transfer has arrived if the request stays on its decode instance without it.
            landed = not new.source and new.target == old.target
            number, source, target = placed.transfer
            reservations.transfer_ended(at, number, source, target, landed=landed)
            placed.transfer = None
        if placed.transfer is None and new.source and new.target:
            source_index, target_index = _index(self._parts, new.source), _index(self._parts, new.target)
            if source_index is not None and target_index is not None:
                placed.transfer = next(self._numbers), source_index, target_index
                kv_bytes = self._held_bytes(new.target, new.kv_bytes)
                reservations.transfer_started(at, *placed.transfer, kv_bytes)

    def _book_prefill(self, at: float, booking: PeerBooking) -> tuple[PrefillPool, int] | None:
        index = _index(self._parts, booking.prefill)
        if index is None:
            return None
        pool = self._parts.view.prefill[self._parts.cluster.instances[index].model]
        if index not in pool.position:
            return None
        position = pool.position[index]
        pool.book(position, at, booking.prefill_s)
        if pool.slow_start.started:
            pool.slow_start.booked(position, at, int(pool.up.sum()))
        return pool, position

    def _decode_position(self, name: str) -> tuple[DecodePool, int] | None:
        """Return the decode pool of an instance and its position there."""
        index = _index(self._parts, name)
        if index is None:
            return None
        pool = self._parts.view.decode_pool_of(index)
        return None if pool is None else (pool, pool.position[index])

    def _held_bytes(self, name: str, nbytes: float) -> float:
        """Return the part of a booking that an instance can hold: another gateway books more for a request that is too
        large, and a faulty writer any number."""
        index = _index(self._parts, name)
        return nbytes if index is None else min(nbytes, self._parts.cluster.instances[index].kv_capacity_bytes)

    def _book_decode(self, at: float, booking: PeerBooking, need_bytes: float) -> tuple[DecodePool, int] | None:
        found = self._decode_position(booking.target)
        if found is None:
            return None
        pool, position = found
        pool.book(position, need_bytes)
        if pool.slow_start.started:
            pool.slow_start.booked(position, at, int(pool.up.sum()))
        if booking.admitted:
            pool.admit(position)
        return pool, position


def _index(parts: CoreParts, name: str) -> int | None:
    """Index of an instance in the cluster; None if it is not (yet, or any more) in it."""
    try:
        return parts.cluster.index(name)
    except InputError:
        return None
