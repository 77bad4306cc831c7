"""Source of the cached prefix of a request: its prefill instance has it, or it is copied there from another instance.

This module books the copies; the prefill instance is chosen before.
"""

from __future__ import annotations

import msgspec

from kvroute.control.booking import Booking
from kvroute.control.offers import Feature, Offer, Placed
from kvroute.control.offload.offloader import Offloader
from kvroute.control.prefix_copies.copies import Copies
from kvroute.control.prefix_copies.rebalancing import Rebalancing
from kvroute.control.prefix_copies.sibling_fetches import SiblingCaches, SiblingFetches
from kvroute.control.view import ClusterView
from kvroute.types import CopyPrefix


class PrefixCopies(Feature[SiblingFetches]):
    """Copies of cached prefixes: for a request from another site or from a sibling, and ahead of demand."""

    def __init__(self, view: ClusterView, offloader: Offloader | None) -> None:
        options = view.options
        self._view = view
        self._copies = Copies(view, offloader)
        self._pool = SiblingCaches(view) if options.prefix_pool and options.prefill_cache else None
        self._rebalancing = (
            Rebalancing(options.copies, view, offloader, self._copies) if options.copies is not None else None
        )

    def offer(self, offer: Offer) -> SiblingFetches | None:
        """Let each candidate fetch a prefix from a sibling, if that makes it faster; return what they fetch."""
        if self._pool is None or not offer.candidates.hit_tokens.any():
            return None
        offer.without_fetches = offer.candidates
        booking = offer.booking
        offer.candidates, fetches = self._pool.offer(booking.request, booking.model, offer.candidates, offer.at)
        return fetches

    def attach(self, booking: Booking, placed: Placed, fetches: SiblingFetches | None) -> None:
        """Attach to a prefill the copy that it waits for, book the copy, and count the read for hotspots."""
        offer = placed.offer
        if offer is None:
            return
        request, pool = booking.request, self._view.prefill[booking.model]
        index = int(pool.ids[placed.position])
        own = int(fetches.own_tokens[placed.position]) if fetches else placed.hit_tokens
        holder, tokens = index, placed.hit_tokens
        if offer.copy_source >= 0 and offer.prefix_tokens > tokens:
            holder, tokens = offer.copy_source, offer.prefix_tokens
        if fetches is not None:
            holder = fetches.source_of(pool.position[holder], holder)
        if self._rebalancing is not None and tokens >= request.block_tokens:
            self._rebalancing.read(booking.model, holder, request, tokens)
        if fetches is not None:
            placed.add_term("fetch_s", fetches.fetch_s)
        if holder == index:
            return
        nbytes = float(self._view.models[booking.model].kv_bytes(tokens, own))
        booking.copy_id = self._copies.begin(placed.at, holder, index, nbytes)
        placed.decision = msgspec.structs.replace(
            placed.decision,
            cached_tokens=tokens,
            copy_from=self._view.cluster.instances[holder].name,
            copy_tokens=tokens - own,
            copy_bytes=nbytes,
            copy_id=booking.copy_id,
        )

    def release(self, booking: Booking, at: float) -> None:
        """End the copy that the request waits for, if there is one."""
        if booking.copy_id:
            self.ended(at, booking.copy_id, landed=False)
            booking.copy_id = 0

    def ended(self, at: float, copy_id: int, *, landed: bool) -> bool:
        """End a copy. Return False if no copy with this number is in progress."""
        return self._copies.end(at, copy_id, landed=landed)

    def in_progress(self, copy_id: int) -> bool:
        """Whether a copy has started and not ended."""
        return self._copies.in_progress(copy_id)

    def review(self, at: float) -> tuple[CopyPrefix, ...]:
        """Copies to start now ahead of demand."""
        return self._rebalancing.review(at) if self._rebalancing is not None else ()
