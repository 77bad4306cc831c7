"""Sends requests to instances: the choice of each leg, its booking and the decision about it. It handles no events."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from kvroute.control.booking import Booking
from kvroute.control.choice.decode_choice import DecodeChoice
from kvroute.control.choice.forecast import Forecaster
from kvroute.control.choice.pairing import AggregatedPick, Pairing
from kvroute.control.choice.partners import Partners
from kvroute.control.choice.shadow_policy import ShadowPolicy
from kvroute.control.features import features_of
from kvroute.control.offers import DecodePick, Feature, Offer, Placed
from kvroute.control.offload.offloader import Offloader
from kvroute.control.prefix_copies.source import PrefixCopies
from kvroute.control.reservations import Reservations
from kvroute.control.state.pool import DecodePool
from kvroute.control.view import ClusterView, PoolKey
from kvroute.types import Candidates, Decision, Decode, Prefill, Reject, Shadowed, Terms


class Dispatcher:
    """Sends requests to instances of a view. The caller stores the bookings and reports when their steps are over."""

    def __init__(self, view: ClusterView, offloader: Offloader | None, prefixes: PrefixCopies) -> None:
        self._view = view
        decode_features: list[Feature[Any]] = []  # filled below, because features choose decode instances, too
        self._decodes = DecodeChoice(view, decode_features)
        self._partners = Partners(view, self._decodes)
        self.pairing = Pairing(view)
        self.forecaster = Forecaster(view, self._partners)
        """Predicts times to the first token; it books nothing."""
        self._features = features_of(view, offloader, prefixes, self._partners, self.forecaster)
        self._attached = self._features[::-1]
        """The features in the order in which they are attached to a prefill."""
        decode_features += [feature for feature in self._features if "decode" in feature.legs]
        self._attached_to_decode = decode_features[::-1]
        holding = [feature for feature in self._attached if type(feature).release is not Feature.release]
        self.reservations = Reservations(view, offloader, holding)
        """What requests hold; the caller reports when their steps are over."""
        shadow = view.settings.shadow_policy
        self._shadow = ShadowPolicy(self._decodes, shadow) if shadow is not None else None

    def route(self, booking: Booking, at: float) -> tuple[Decision, ...]:
        """Choose the prefill, and the decode if both legs start at once or on one instance; or only the decode, on an
        instance that computes the prompt itself. A Reject comes last."""
        request, view = booking.request, self._view
        candidates = view.prefill_candidates(request, booking.model, at, booking.avoid)
        offer = Offer(booking, at, candidates, view.options.layerwise)
        offered = [feature.offer(offer) for feature in self._features]
        chosen = self.pairing.choose(offer)
        if isinstance(chosen, Reject):
            return (chosen,)
        if isinstance(chosen, AggregatedPick):
            return self._serve_aggregated(booking, at, chosen)
        booking.transfer_s = chosen.transfer_s
        pool, choice = view.prefill[booking.model], chosen.prefill
        if offer.further_s:
            choice = offer.preferred(choice)
        pick: DecodePick | Reject | None = None
        index = int(pool.ids[choice.index])
        if booking.both_on_arrival or view.cluster.instances[index].traits.concurrent_legs:
            choice, pick = self._partners.choose_both(offer, choice)
            index = int(pool.ids[choice.index])
        position, candidates = choice.index, offer.candidates
        name, hit_tokens = pool.names[position], int(candidates.hit_tokens[position])
        prefill = Prefill(request.id, name, hit_tokens, choice.terms, aggregated=chosen.aggregated)
        placed = Placed(at, "prefill", position, name, hit_tokens, prefill, offer, pick)
        for feature in self._attached:
            refused = feature.attach(booking, placed, offered.pop())
            if refused is not None:
                return (refused,)
        booking.source, booking.wait_s, booking.began_s = index, float(candidates.pending_s[position]), at
        self.reservations.book_prefill(booking, at, position, float(candidates.prefill_s[position]))
        return (placed.decision, *self._book_pick(booking, placed))

    def _book_pick(self, booking: Booking, placed: Placed) -> tuple[Decision, ...]:
        """Book the decode instance that was chosen with a prefill; return the decisions that follow the prefill's."""
        instance = self._view.cluster.instances[booking.source]
        if instance.role == "both":
            return (self._book_local(booking, placed.at, (booking.model, instance.protocol)),)
        if isinstance(placed.pick, Reject):
            return (placed.pick,)
        if placed.pick is not None:
            decode = self._book_remote(booking, placed.at, placed.pick)
            if not placed.due_later:
                return (decode, *placed.further)
            booking.planned = decode
        return placed.further

    def place_single(self, booking: Booking, at: float) -> tuple[Decision, ...]:
        """Choose the one instance for a request of one leg, or return a Reject."""
        found = self._decodes.choose_aggregated(booking.request, booking.model, at, booking.avoid)
        if isinstance(found, Reject):
            return (found,)
        key, pick = found
        if self.forecaster.predicts(booking):
            late = self.forecaster.foreseen(booking, self.forecaster.single(booking.request, key, pick, at))
            if late is not None:
                return (late,)
        pool = self._view.decode[key]
        booking.source = int(pool.ids[pick.choice.index])
        decode = self._book(booking, at, pool, pick.choice.index, pick.candidates, pick.tier, pick.choice.terms)
        return (_with_forecast(decode, booking),)

    def _serve_aggregated(self, booking: Booking, at: float, chosen: AggregatedPick) -> tuple[Decision, ...]:
        """Prefill and decode on one instance. On a prefill instance the prompt is booked as any other prefill."""
        if self.forecaster.predicts(booking):
            late = self.forecaster.foreseen(booking, self.forecaster.aggregated(chosen))
            if late is not None:
                return (late,)
        pool, choice, terms = chosen.pool, chosen.pick.choice, chosen.compared
        candidates, tier = chosen.pick.candidates, chosen.pick.tier
        booking.source = int(pool.ids[choice.index])
        if not chosen.kept:
            decode = self._book(booking, at, pool, choice.index, candidates, tier, terms)
            self.reservations.book_prompt(booking, at, chosen.prompt_s)
            return (_with_forecast(decode, booking),)
        position = self._view.prefill[booking.model].position[booking.source]
        name, hit_tokens = pool.names[choice.index], int(candidates.hit_tokens[choice.index])
        prefill = Prefill(booking.request.id, name, hit_tokens, terms)
        placed = Placed(at, "prefill", position, name, hit_tokens, prefill)
        for feature in self._attached:
            feature.attach(booking, placed, None)
        self.reservations.book_prefill(booking, at, position, chosen.prompt_s)
        return placed.decision, self._book(booking, at, pool, choice.index, candidates, tier, None)

    def _book_local(self, booking: Booking, at: float, key: PoolKey) -> Decode:
        """Decode on the prefill instance."""
        pool, request = self._view.decode[key], booking.request
        hit_tokens = np.zeros(len(pool.ids), dtype=np.int64)
        model = self._view.models[booking.model]
        candidates = pool.candidates(request, model, hit_tokens, self._view.options.reserve_bytes, None)
        candidates.kv_bytes[:] = 0.0
        return self._book(booking, at, pool, pool.position[booking.source], candidates, 0, None)

    def _book_remote(self, booking: Booking, at: float, pick: DecodePick) -> Decode:
        """Decode on another instance than the prefill instance."""
        key = (booking.model, self._view.cluster.instances[booking.source].protocol)
        shadow = self._shadow.evaluate(booking.request, key, booking.source, pick, at) if self._shadow else None
        pool = self._view.decode[key]
        return self._book(booking, at, pool, pick.choice.index, pick.candidates, pick.tier, pick.choice.terms, shadow)

    def _book(
        self,
        booking: Booking,
        at: float,
        pool: DecodePool,
        position: int,
        candidates: Candidates,
        tier: int,
        terms: Terms | None,
        shadow: Shadowed | None = None,
    ) -> Decode:
        """Book a decode leg and attach the features to it."""
        self.reservations.book_decode(booking, at, pool, position, candidates)
        name, hit_tokens = pool.names[position], int(candidates.hit_tokens[position])
        decode = Decode(
            request_id=booking.request.id,
            source=self._view.cluster.instances[booking.source].name,
            target=name,
            tier=tier,
            kv_bytes=booking.kv_bytes,
            need_bytes=booking.need_bytes,
            hit_tokens=hit_tokens,
            terms=terms,
            shadow=shadow,
        )
        placed = Placed(at, "decode", position, name, hit_tokens, decode)
        for feature in self._attached_to_decode:
            feature.attach(booking, placed, None)
        assert isinstance(placed.decision, Decode), "features complete a decision, they do not replace it"
        return placed.decision

    def choose_decode(self, booking: Booking, at: float) -> Decision:
        """Choose the decode instance for a request whose prefill is complete on its source, or return a Reject."""
        key = (booking.model, self._view.cluster.instances[booking.source].protocol)
        pick = self._decodes.choose(booking.request, key, booking.source, at, booking.avoid)
        return pick if isinstance(pick, Reject) else self._book_remote(booking, at, pick)

    def move(self, booking: Booking, pool: DecodePool, position: int, at: float) -> Decode:
        """Book the decode on another instance, which serves it already. The transfer starts again."""
        admitted, request, prompt_s = booking.admitted, booking.request, booking.prompt_s
        self.reservations.release_decode(booking, at)
        hit_tokens = self._view.caches.hit_tokens(request, pool.ids, request.input_tokens)
        model, options = self._view.models[booking.model], self._view.options
        candidates = pool.candidates(request, model, hit_tokens, options.reserve_bytes, None)
        index = int(pool.ids[position])
        if booking.source == booking.target:
            self.reservations.move_prefill(booking, index, at)
            booking.source = index
        if booking.source == index:
            candidates.kv_bytes[:] = 0.0
        tier = int(self._view.cluster.tier[booking.source, index])
        decode = self._book(booking, at, pool, position, candidates, tier, None)
        self.reservations.book_prompt(booking, at, prompt_s)
        if admitted:
            self.reservations.end_transfer(booking, at, landed=True)
            pool.admit(position)
            booking.admitted = True
        return decode

    def take_planned(self, booking: Booking, at: float, kept_tokens: int) -> Decode | None:
        """Return the decode decision that was made on arrival, and start its transfer. Only the KV that the instance
        has not cached by now, and that its node has not read from the store, crosses the network. Return None if there
        is no such decision, or if its instance has gone down: it is then released, and another one must be chosen.

        Args:
            booking: the request.
            at: time in seconds.
            kept_tokens: as in `PrefillFinished`.
        """
        planned, booking.planned = booking.planned, None
        if planned is None or booking.pool is None:
            return None
        if not booking.pool.up[booking.position]:
            self.reservations.release_decode(booking, at)
            return None
        request, ids = booking.request, booking.pool.ids[booking.position : booking.position + 1]
        hit_tokens = int(self._view.caches.hit_tokens(request, ids, request.input_tokens)[0])
        model, kept_end = self._view.models[booking.model], booking.decode_read_at + kept_tokens
        kept_bytes = model.kv_bytes(kept_end) - model.kv_bytes(min(max(booking.decode_read_at, hit_tokens), kept_end))
        booking.kv_bytes = float(model.kv_bytes(request.input_tokens, hit_tokens) - kept_bytes)
        self.reservations.start_transfer(booking, at)
        return msgspec.structs.replace(planned, hit_tokens=hit_tokens, kv_bytes=booking.kv_bytes)


def _with_forecast(decode: Decode, booking: Booking) -> Decode:
    """Return the first decision about a request with its predicted time to the first token, if there is one."""
    return decode if booking.ttft_s is None else msgspec.structs.replace(decode, ttft_s=booking.ttft_s)
