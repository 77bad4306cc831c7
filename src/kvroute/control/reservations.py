"""Books prefills, decodes and transfers of requests in the pools of a view, and releases them. It chooses nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvroute.control.booking import Booking
from kvroute.control.offers import Feature
from kvroute.control.offload.offloader import Offloader
from kvroute.control.state.datacenters import Egress
from kvroute.control.state.pool import DecodePool
from kvroute.control.view import ClusterView
from kvroute.types import CROSS_DATACENTER, Candidates


class Reservations:
    """What requests hold on instances and links. The caller keeps bookings and reports when their steps are over."""

    def __init__(self, view: ClusterView, offloader: Offloader | None, features: Sequence[Feature[Any]]) -> None:
        """Args: `features`: those that hold something for a prefill, in the order in which they are released."""
        self._view, self._offloader, self._features = view, offloader, features

    def book_prefill(self, booking: Booking, at: float, position: int, prefill_s: float) -> None:
        """Book a prefill of this time, in seconds. Args: `position`: of its instance in the prefill pool."""
        pool = self._view.prefill[booking.model]
        pool.decisions += 1
        booking.prefill, booking.prefill_s = position, prefill_s
        pool.book(position, at, prefill_s)
        if pool.slow_start.started:
            pool.slow_start.booked(position, at, int(pool.up.sum()))

    def move_prefill(self, booking: Booking, index: int, at: float) -> None:
        """Book the unfinished prefill of a request that one instance serves on another one, if that prefills."""
        if booking.prefill < 0:
            return
        pool, prefill_s = self._view.prefill[booking.model], booking.prefill_s
        self.release_prefill(booking, at)
        position = pool.position.get(index, -1)
        if position >= 0:
            pool.book(position, at, prefill_s)
            booking.prefill = position

    def book_prompt(self, booking: Booking, at: float, prompt_s: float) -> None:
        """Book a prompt on the decode instance of the request, unless it takes no time."""
        if prompt_s and booking.pool is not None:
            booking.prompt_s = prompt_s
            booking.pool.book_prompt(booking.position, at, prompt_s)

    def book_decode(self, booking: Booking, at: float, pool: DecodePool, position: int, candidates: Candidates) -> None:
        """Book the slot and the memory on a decode instance, and the transfer if the KV cache leaves its source now.

        Args:
            booking: the request; its source is known.
            at: time in seconds.
            pool: the decode pool.
            position: of the instance in the pool.
            candidates: the candidates that it was chosen from.
        """
        pool.decisions += 1
        booking.pool, booking.position, booking.target = pool, position, int(pool.ids[position])
        booking.need_bytes = float(candidates.need_bytes[position]) - self._view.options.reserve_bytes
        booking.kv_bytes = float(candidates.kv_bytes[position])
        pool.book(position, booking.need_bytes)
        if pool.slow_start.started:
            pool.slow_start.booked(position, at, int(pool.up.sum()))
        if (booking.prefill < 0 or booking.early) and booking.source != booking.target:
            self.start_transfer(booking, at)

    def start_transfer(self, booking: Booking, at: float) -> None:
        """Record that the KV cache leaves its source. Does nothing if the transfer has already started."""
        if booking.in_transfer:
            return
        booking.in_transfer, booking.began_s = True, at
        if booking.early:
            booking.transfer_s = 0.0  # it lasts as long as the prefill, which was not predicted
        self._view.prefill[booking.model].transfers.begin(at, booking.transfer_s)
        self.transfer_started(at, booking.request.id, booking.source, booking.target, booking.kv_bytes)

    def end_transfer(self, booking: Booking, at: float, *, landed: bool = False) -> None:
        """Record that the transfer is complete (`landed`) or has failed. Does nothing if none is in progress."""
        if booking.in_transfer:
            booking.in_transfer = False
            transfers = self._view.prefill[booking.model].transfers
            if landed:
                transfers.end(at, booking.began_s, booking.transfer_s)
            else:
                transfers.drop(booking.began_s, booking.transfer_s)
            booking.transfer_s = 0.0
            self.transfer_ended(at, booking.request.id, booking.source, booking.target, landed=landed)

    def transfer_started(self, at: float, number: int, source: int, target: int, kv_bytes: float) -> None:
        """Count a transfer. Args: `number`: identifies it; `source` and `target`: indices in the cluster."""
        self._view.oracle.transfer_started(source, target)
        for state in self._view.states.all:
            state.started(at, number, source, target, kv_bytes)
        if self._offloader is not None and (egress := self._egress(source, target)) is not None:
            egress.started(number, kv_bytes)

    def transfer_ended(self, at: float, number: int, source: int, target: int, *, landed: bool) -> None:
        """Count the end of a transfer that was started. Args: see `transfer_started`."""
        self._view.oracle.transfer_finished(source, target)
        for state in self._view.states.all:
            state.finished(at, number, landed=landed)
        if self._offloader is not None and (egress := self._egress(source, target)) is not None:
            egress.ended(at, number, landed=landed)

    def is_offloaded(self, booking: Booking) -> bool:
        """Whether the prefill and the decode are in different datacenters."""
        return self._egress(booking.source, booking.target) is not None

    def _egress(self, source: int, target: int) -> Egress | None:
        if self._offloader is None or self._view.cluster.tier[source, target] < CROSS_DATACENTER:
            return None
        return self._offloader.egress.get(self._offloader.site_of(source))

    def end_prefill(self, booking: Booking, at: float) -> None:
        """Release a prefill that has finished, and learn how long it waited, unless a copy or a read delayed it."""
        pool = self._view.prefill[booking.model]
        if not (booking.copy_id or booking.read_id):
            pool.waits.learn(at - booking.began_s - booking.prefill_s, booking.wait_s)
        pool.release(booking.prefill, at)
        booking.prefill, booking.wait_s = -1, 0.0
        for feature in self._features:
            feature.release(booking, at)

    def release_prefill(self, booking: Booking, at: float) -> None:
        """Release a prefill that has not finished."""
        for feature in self._features:
            feature.release(booking, at)
        if booking.prefill >= 0:
            self._view.prefill[booking.model].release(booking.prefill, at, booking.prefill_s)
            booking.prefill = -1

    def release_prompt(self, booking: Booking, at: float, unfinished_s: float = 0.0) -> None:
        """Release the prompt that a decode instance computes itself. Does nothing if there is none.

        Args:
            booking: the request.
            at: time in seconds.
            unfinished_s: the part of its time that is not computed.
        """
        if booking.prompt_s and booking.pool is not None:
            booking.pool.release_prompt(booking.position, at, unfinished_s)
            booking.prompt_s = 0.0

    def release_decode(self, booking: Booking, at: float) -> None:
        """Release the slot and the memory on the decode instance."""
        if booking.pool is None or booking.position < 0:
            return
        self.end_transfer(booking, at)
        self.release_prompt(booking, at, booking.prompt_s)
        booking.planned = None
        booking.pool.release(booking.position, booking.need_bytes, admitted=booking.admitted)
        booking.position, booking.admitted = -1, False
