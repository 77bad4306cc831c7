"""Sends requests to instances: the choice of each leg, its booking and the decision about it. It handles no events."""

from __future__ import annotations

import msgspec
import numpy as np

from kvroute.control.booking import Booking
from kvroute.control.decode_choice import DecodeChoice, DecodePick
from kvroute.control.forecast import Forecast, Forecaster
from kvroute.control.kv_loads import KvLoads
from kvroute.control.offload.offloader import Offloader
from kvroute.control.pairing import AlonePick, Pairing
from kvroute.control.prefix_copies.source import PrefixCopies
from kvroute.control.reservations import Reservations
from kvroute.control.shadow_policy import ShadowPolicy
from kvroute.control.state.pool import DecodePool
from kvroute.control.state.storage_reads import ReadRange, StorageReads
from kvroute.control.view import ClusterView, PoolKey
from kvroute.policies import PrefillCandidates
from kvroute.types import (
    Candidates,
    Choice,
    Decision,
    Decode,
    Prefill,
    Reject,
    Shadowed,
    Terms,
)

_JOINT_WIDTH = 4
"""Number of prefill instances whose decode instances are priced when both legs are chosen at once."""


class Dispatcher:
    """Sends requests to instances of a view. The caller stores the bookings and reports when their steps are over."""

    def __init__(
        self, view: ClusterView, offloader: Offloader | None, prefixes: PrefixCopies, reservations: Reservations
    ) -> None:
        self._view, self._offloader, self._prefixes = view, offloader, prefixes
        self._reservations, self._decodes = reservations, DecodeChoice(view)
        self.pairing = Pairing(view)
        self._loads = KvLoads(view)
        self.forecaster = Forecaster(view)
        """Predicts times to the first token; it books nothing."""
        shadow = view.settings.shadow_policy
        self._shadow = ShadowPolicy(self._decodes, shadow) if shadow is not None else None

    def route(self, booking: Booking, at: float) -> tuple[Decision, ...]:
        """Choose the prefill, and the decode if both legs start at once or on one instance; or only the decode, on an
        instance that computes the prompt itself. A Reject comes last."""
        request, model, view = booking.request, booking.model, self._view
        candidates = view.prefill_candidates(request, model, at, booking.avoid)
        candidates, loads = self._loads.offer(request, model, candidates)
        cached = candidates
        candidates, fetches = self._prefixes.with_fetches(request, model, candidates, at)
        candidates, adapter_s = view.with_adapter(request, candidates)
        placement = self._offloader.place(request, candidates, at, booking.at_home) if self._offloader else None
        candidates = placement.candidates if placement else candidates
        chosen = self.pairing.choose(request, model, candidates, cached, at, booking.avoid)
        if isinstance(chosen, Reject):
            return (chosen,)
        predicts = view.options.predicts or booking.ttft_max_s is not None
        if isinstance(chosen, AlonePick):
            late = self._foreseen(booking, self.forecaster.alone(chosen)) if predicts else None
            return (late,) if late is not None else self._alone(booking, at, chosen)
        booking.transfer_s = chosen.transfer_s
        choice, pool = view.prefill_of_session(chosen.prefill, request), view.prefill[model]
        pick: DecodePick | Reject | None = None
        if booking.joint or self._view.cluster.instances[int(pool.ids[choice.index])].traits.concurrent_legs:
            choice, pick = self._jointly(booking, at, candidates, choice)
        if predicts:
            early = self._leaves_early(placement is not None and placement.away)
            partner = pick or self._partner(booking, at, choice.index, early=True)
            forecast = self.forecaster.pair(candidates, choice.index, partner, early=early)
            if (late := self._foreseen(booking, forecast)) is not None:
                return (late,)
        index = int(pool.ids[choice.index])
        booking.wait_s, booking.began_s = float(candidates.pending_s[choice.index]), at
        self._reservations.book_prefill(booking, at, choice.index, float(candidates.prefill_s[choice.index]))
        terms = choice.terms
        if adapter_s is not None and len(terms.names) == len(adapter_s):
            terms = msgspec.structs.replace(terms, parts=terms.parts | {"adapter_s": adapter_s})
        if request.adapter:
            view.adapters.used(pool.names[choice.index], request.adapter)
        view.sessions.served(request.session, "prefill", pool.names[choice.index])
        hit_tokens = int(candidates.hit_tokens[choice.index])
        name, ttft_s = pool.names[choice.index], booking.ttft_s
        prefill = Prefill(request.id, name, hit_tokens, terms, ttft_s=ttft_s, alone=chosen.alone)
        if self._offloader is not None:
            self._offloader.prefills(at, choice.index, request, hit_tokens)
        prefill = self._prefixes.attach(prefill, request, model, placement, fetches, at)
        booking.copy_id = prefill.copy_id
        if loads is not None:
            prefill = loads.attach(prefill, choice.index)
        if placement is not None:
            prefill = msgspec.structs.replace(prefill, offload=placement.offload)
        if self._leaves_early(placement is not None and placement.away):
            booking.early = True
            pick = self._partner(booking, at, choice.index, early=True)
            if isinstance(pick, Reject):
                pick = None  # No instance has room now; one may have room when the prefill is over.
        instance = self._view.cluster.instances[index]
        if instance.role == "both":
            return (prefill, self._stay(booking, at, (model, instance.protocol), index))
        if pick is None:
            if loads is None or prefill.copy_from or not loads.stored_tokens[choice.index]:
                return (prefill,)
            return self._with_read(booking, at, prefill, choice.index)
        return (prefill, pick if isinstance(pick, Reject) else self._go(booking, at, pick))

    def _with_read(self, booking: Booking, at: float, prefill: Prefill, position: int) -> tuple[Decision, ...]:
        """Return the prefill decision, followed by the read of its cached tokens from the store that it waits for.

        If the read path depends on the decode instance, that is chosen and booked now. Its decision is due after the
        prefill.
        """
        reads, model = self._view.reads, self._view.models[booking.model]
        assert reads is not None, "without a store nothing is read"
        target = None
        read = ReadRange(0, prefill.cached_tokens, float(model.kv_bytes(prefill.cached_tokens)))
        if reads.needs_decode_instance:
            pick = self._partner(booking, at, position, early=True)
            if isinstance(pick, DecodePick):
                booking.planned = self._go(booking, at, self._reads_soonest(booking, pick, reads, read.kv_bytes))
                target = booking.target
        if not reads.bytes_per_s[[booking.source, booking.source if target is None else target]].any():
            return (prefill,)  # the decode instance with a storage NIC is full or down
        decision = reads.begin(booking.request, booking.source, target, read)
        booking.read_id = decision.read_id
        booking.decode_read_at = decision.first_token + decision.prefill_tokens
        return (prefill, decision)

    def _reads_soonest(self, booking: Booking, pick: DecodePick, reads: StorageReads, kv_bytes: float) -> DecodePick:
        """Return the decode instance with the lowest cost if the time to read from the store counts, too. A policy that
        does not use seconds keeps its choice."""
        terms = pick.choice.terms
        if terms.unit != "s":
            return pick
        pool = self._view.decode[booking.model, self._view.cluster.instances[booking.source].protocol]
        read_s = reads.finish_s(booking.source, pool.ids, kv_bytes)
        able = terms.feasible & np.isfinite(read_s)
        if not able.any():
            return pick
        read_s = np.where(np.isfinite(read_s), read_s, 0.0)
        cost = terms.cost + read_s
        index = int(np.where(able, cost, np.inf).argmin())
        priced = Terms(terms.names, cost, able, terms.parts | {"read_s": read_s})
        tier = int(self._view.cluster.tier[booking.source, pool.ids[index]])
        return msgspec.structs.replace(pick, choice=Choice(index, priced), tier=tier)

    def _leaves_early(self, away: bool) -> bool:
        """Whether the KV cache is sent layer by layer during the prefill. Args: `away`: another datacenter prefills."""
        offloads_so = away and self._offloader is not None and self._offloader.spec.layerwise
        return self._view.options.layerwise or offloads_so

    def _jointly(
        self, booking: Booking, at: float, candidates: PrefillCandidates, choice: Choice
    ) -> tuple[Choice, DecodePick | Reject | None]:
        """Choose both legs at once.

        If both policies price in seconds, the choice is, of the few cheapest prefill instances, the one with the
        shortest total time. Otherwise it is the cheapest prefill instance with its best decode instance. A prefill
        instance is skipped if no decode instance has room for its request. One whose decode leg is decided later has no
        total price, so it is taken only if no other one can be.
        """
        pool, terms = self._view.prefill[booking.model], choice.terms
        usable: list[tuple[int, DecodePick]] = []
        later: Choice | None = None
        refused: Reject | None = None
        in_seconds = terms.unit == "s"
        for i in terms.cost.argsort(kind="stable").tolist():
            if not terms.feasible[i]:
                continue
            pick = self._partner(booking, at, i)
            if isinstance(pick, Reject):
                refused = refused or pick
                continue
            if pick is None:
                later = later or Choice(i, terms)
                continue
            usable.append((i, pick))
            in_seconds = in_seconds and pick.choice.terms.unit == "s"
            if len(usable) == (_JOINT_WIDTH if in_seconds else 1):
                break
        if not usable:
            return (later, None) if later else (choice, refused)
        if not in_seconds:
            return Choice(usable[0][0], terms), usable[0][1]
        decode_s = [float(pick.choice.terms.cost[pick.choice.index]) for _, pick in usable]
        prefill_s = [float(candidates.pending_s[i] + candidates.prefill_s[i]) for i, _ in usable]
        if "session_s" in terms.parts:
            prefill_s = [
                seconds + float(terms.parts["session_s"][i]) for seconds, (i, _) in zip(prefill_s, usable, strict=True)
            ]
        whole_s = np.array(prefill_s) + np.array(decode_s)
        best = int(whole_s.argmin())
        parts = {"finish_s": np.array(prefill_s), "decode_path_s": np.array(decode_s)}
        names = tuple(pool.names[i] for i, _ in usable)
        joint = Terms(names, whole_s, np.ones(len(usable), dtype=np.bool_), parts)
        return Choice(usable[best][0], joint), usable[best][1]

    def _partner(
        self, booking: Booking, at: float, position: int, *, early: bool = False
    ) -> DecodePick | Reject | None:
        """The decode instance for this prefill instance. None if it decodes itself, or if the decode leg is decided
        later and not `early`."""
        index = int(self._view.prefill[booking.model].ids[position])
        instance = self._view.cluster.instances[index]
        if instance.role == "both" or not (instance.traits.concurrent_legs or booking.joint or early):
            return None
        key = (booking.model, instance.protocol)
        return self._decodes.choose(booking.request, key, index, at, booking.avoid)

    def place_single(self, booking: Booking, at: float) -> tuple[Decision, ...]:
        """Choose the one instance for a request of one leg, or return a Reject."""
        found = self._decodes.choose_aggregated(booking.request, booking.model, at, booking.avoid)
        if isinstance(found, Reject):
            return (found,)
        key, pick = found
        if self._view.options.predicts or booking.ttft_max_s is not None:
            late = self._foreseen(booking, self.forecaster.single(booking.request, key, pick, at))
            if late is not None:
                return (late,)
        pool = self._view.decode[key]
        booking.source = int(pool.ids[pick.choice.index])
        decode = self._book(booking, at, pool, pick.choice.index, pick.candidates, pick.tier, pick.choice.terms)
        return (_with_forecast(decode, booking),)

    def _foreseen(self, booking: Booking, forecast: Forecast) -> Reject | None:
        """Store the prediction for a request that is not booked yet; return a Reject if it would be too late."""
        most_s = booking.ttft_max_s
        if most_s is not None and forecast.ttft_s > most_s:
            reason = f"the first token is expected in {forecast.ttft_s:.3g} s, and {max(most_s, 0.0):.3g} s are left"
            return Reject(booking.request.id, reason, ttft_s=forecast.ttft_s, least_s=forecast.least_s)
        booking.ttft_s, booking.ttft_max_s = forecast.ttft_s, None
        return None

    def _alone(self, booking: Booking, at: float, alone: AlonePick) -> tuple[Decision, ...]:
        """Prefill and decode on one instance. On a prefill instance the prompt is booked as any other prefill."""
        pool, choice, terms = alone.pool, alone.pick.choice, alone.compared
        candidates, tier = alone.pick.candidates, alone.pick.tier
        index = int(pool.ids[choice.index])
        booking.source = index
        if not alone.stays:
            decode = self._book(booking, at, pool, choice.index, candidates, tier, terms)
            self._reservations.book_prompt(booking, at, alone.prompt_s)
            return (_with_forecast(decode, booking),)
        position = self._view.prefill[booking.model].position[index]
        self._reservations.book_prefill(booking, at, position, alone.prompt_s)
        self._view.sessions.served(booking.request.session, "prefill", pool.names[choice.index])
        hit_tokens = int(candidates.hit_tokens[choice.index])
        decision = Prefill(booking.request.id, pool.names[choice.index], hit_tokens, terms, ttft_s=booking.ttft_s)
        return decision, self._book(booking, at, pool, choice.index, candidates, tier, None)

    def _stay(self, booking: Booking, at: float, key: PoolKey, index: int) -> Decode:
        """Decode on the prefill instance."""
        pool, request = self._view.decode[key], booking.request
        hit_tokens = np.zeros(len(pool.ids), dtype=np.int64)
        model = self._view.models[booking.model]
        candidates = pool.candidates(request, model, hit_tokens, self._view.options.reserve_bytes, None)
        candidates.kv_bytes[:] = 0.0
        return self._book(booking, at, pool, pool.position[index], candidates, 0, None)

    def _go(self, booking: Booking, at: float, pick: DecodePick) -> Decode:
        """Decode on another instance than the prefill instance."""
        instance = self._view.cluster.instances[booking.source]
        key = (booking.model, instance.protocol)
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
        self._reservations.book_decode(booking, at, pool, position, candidates)
        if booking.request.adapter:
            self._view.adapters.used(pool.names[position], booking.request.adapter)
        self._view.sessions.served(booking.request.session, "decode", pool.names[position])
        if self._offloader is not None:
            hit_tokens = int(candidates.hit_tokens[position])
            self._offloader.decodes(at, position, booking.request, hit_tokens, tier)
        return Decode(
            request_id=booking.request.id,
            source=self._view.cluster.instances[booking.source].name,
            target=pool.names[position],
            tier=tier,
            kv_bytes=booking.kv_bytes,
            need_bytes=booking.need_bytes,
            hit_tokens=int(candidates.hit_tokens[position]),
            terms=terms,
            shadow=shadow,
        )

    def choose_decode(self, booking: Booking, at: float) -> Decision:
        """Choose the decode instance for a request whose prefill is complete on its source, or return a Reject."""
        request, instance = booking.request, self._view.cluster.instances[booking.source]
        key = (booking.model, instance.protocol)
        pick = self._decodes.choose(request, key, booking.source, at, booking.avoid)
        return pick if isinstance(pick, Reject) else self._go(booking, at, pick)

    def move(self, booking: Booking, pool: DecodePool, position: int, at: float) -> Decode:
        """Book the decode on another instance, which serves it already. The transfer starts again."""
        admitted, request, prompt_s = booking.admitted, booking.request, booking.prompt_s
        self._reservations.release_decode(booking, at)
        hit_tokens = self._view.caches.hit_tokens(request, pool.ids, request.input_tokens)
        model, options = self._view.models[booking.model], self._view.options
        candidates = pool.candidates(request, model, hit_tokens, options.reserve_bytes, None)
        index = int(pool.ids[position])
        if booking.source == booking.target:
            self._reservations.move_prefill(booking, index, at)
            booking.source = index
        if booking.source == index:
            candidates.kv_bytes[:] = 0.0
        tier = int(self._view.cluster.tier[booking.source, index])
        decode = self._book(booking, at, pool, position, candidates, tier, None)
        self._reservations.book_prompt(booking, at, prompt_s)
        if admitted:
            self._reservations.end_transfer(booking, at, landed=True)
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
            self._reservations.release_decode(booking, at)
            return None
        request, ids = booking.request, booking.pool.ids[booking.position : booking.position + 1]
        hit_tokens = int(self._view.caches.hit_tokens(request, ids, request.input_tokens)[0])
        model, kept_end = self._view.models[booking.model], booking.decode_read_at + kept_tokens
        kept_bytes = model.kv_bytes(kept_end) - model.kv_bytes(min(max(booking.decode_read_at, hit_tokens), kept_end))
        booking.kv_bytes = float(model.kv_bytes(request.input_tokens, hit_tokens) - kept_bytes)
        self._reservations.start_transfer(booking, at)
        return msgspec.structs.replace(planned, hit_tokens=hit_tokens, kv_bytes=booking.kv_bytes)


def _with_forecast(decode: Decode, booking: Booking) -> Decode:
    """Return the first decision about a request with its predicted time to the first token, if there is one."""
    return decode if booking.ttft_s is None else msgspec.structs.replace(decode, ttft_s=booking.ttft_s)
