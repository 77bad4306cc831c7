"""Reads from the store that a prefill waits for, and the decode instance that the read path depends on."""

from __future__ import annotations

import msgspec
import numpy as np

from kvroute.control.booking import Booking
from kvroute.control.choice.partners import Partners
from kvroute.control.offers import DecodePick, Feature, Placed
from kvroute.control.state.storage_reads import ReadRange
from kvroute.control.view import ClusterView
from kvroute.types import Choice, IntArray, Terms


class ReadPaths(Feature[None]):
    """The feature that reads the cached tokens of a request from the store, if its prefill instance chose to.

    `KvLoads` prices the reads. If the read path depends on the decode instance, that is chosen now; its decision is due
    after the prefill.
    """

    def __init__(self, view: ClusterView, partners: Partners) -> None:
        assert view.reads is not None, "without a store nothing is read"
        self._view, self._partners, self._reads = view, partners, view.reads

    def attach(self, booking: Booking, placed: Placed, offered: None) -> None:
        """See Feature. Nothing is read if the prefix is copied from another instance, or if the decode instance is
        known already."""
        offer, reads = placed.offer, self._reads
        if offer is None or offer.stored_tokens is None or not offer.stored_tokens[placed.position]:
            return
        if booking.copy_id or placed.pick is not None:
            return
        kv_bytes = float(self._view.models[booking.model].kv_bytes(placed.hit_tokens))
        read = ReadRange(0, placed.hit_tokens, kv_bytes)
        source, target = int(self._view.prefill[booking.model].ids[placed.position]), None
        if reads.needs_decode_instance:
            pick = self._partners.partner(booking, placed.at, placed.position, early=True)
            if isinstance(pick, DecodePick):
                ids = self._view.decode[booking.model, self._view.cluster.instances[source].protocol].ids
                placed.pick, placed.due_later = self._soonest(source, ids, pick, kv_bytes), True
                target = int(ids[placed.pick.choice.index])
        if not reads.bytes_per_s[[source, source if target is None else target]].any():
            return  # the decode instance with a storage NIC is full or down
        decision = reads.begin(booking.request, source, target, read)
        booking.read_id = decision.read_id
        booking.decode_read_at = decision.first_token + decision.prefill_tokens
        placed.further = (decision,)

    def release(self, booking: Booking, at: float) -> None:
        """End the read that the request waits for, if there is one."""
        if booking.read_id:
            self._reads.end(booking.read_id)
            booking.read_id = 0

    def _soonest(self, source: int, targets: IntArray, pick: DecodePick, kv_bytes: float) -> DecodePick:
        """Return the decode instance with the lowest cost if the time to read from the store counts, too. A policy that
        does not use seconds keeps its choice. Args: `source` and `targets`: indices in the cluster."""
        terms = pick.choice.terms
        if terms.unit != "s":
            return pick
        read_s = self._reads.finish_s(source, targets, kv_bytes)
        able = terms.feasible & np.isfinite(read_s)
        if not able.any():
            return pick
        read_s = np.where(np.isfinite(read_s), read_s, 0.0)
        cost = terms.cost + read_s
        index = int(np.where(able, cost, np.inf).argmin())
        priced = Terms(terms.names, cost, able, terms.parts | {"read_s": read_s})
        tier = int(self._view.cluster.tier[source, targets[index]])
        return msgspec.structs.replace(pick, choice=Choice(index, priced), tier=tier)
