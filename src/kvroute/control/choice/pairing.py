"""Chooses prefill and decode instance together, or one instance (aggregated), if the policy supports it; books
nothing."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kvroute.control.booking import Avoided
from kvroute.control.choice.aggregated_offers import AggregatedOfferBuilder
from kvroute.control.offers import DecodePick, Offer
from kvroute.control.state.pool import DecodePool
from kvroute.control.state.transfer_tracker import TransferTracker
from kvroute.control.view import ClusterView
from kvroute.policies import AggregatedChoice, AggregatedOffer, JointPath, PairingPolicy, PairPolicy, PrefillCandidates
from kvroute.types import SAME_NODE, Candidates, Choice, Reject, Request, Terms


class PairPick(NamedTuple):
    """A prefill instance."""

    prefill: Choice
    transfer_s: float = 0.0
    """Predicted time of the transfer to the best decode instance; 0: it was not chosen together with one."""
    aggregated: Terms | None = None
    """See `Pair`."""


class AggregatedPick(NamedTuple):
    """An instance that serves an aggregated request, and the time of the prompt there."""

    pool: DecodePool
    kept: bool
    """Whether it is a prefill instance, which goes on to decode."""
    pick: DecodePick
    compared: Terms
    """Terms of all instances that were compared, and of the best pair."""
    prompt_s: float
    """Time in which the prompt is computed, with the decode steps between its chunks."""


class Pairing:
    """Uses the acting decode policy if it is a `PairingPolicy`. Otherwise, or if the request has no such pair, the
    prefill policy chooses.

    Decode instances are offered for aggregated requests if their protocol allows it. They are not offered to a request
    for a LoRA adapter, because the offer does not price its load time, and not in a cluster
    with `offload` or with a store, which have rules of their own for the place of a prefill.
    """

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        policy, state = view.settings.decode_policy, view.states.acting
        self._tracker = state if isinstance(state, TransferTracker) else None
        self._policy: PairPolicy | None = None
        if isinstance(policy, PairingPolicy):
            self._policy = policy.pair_policy(view.settings.constraint)
        self._separable = {model: self._splits(model) for model in view.models}
        self._offers: AggregatedOfferBuilder | None = None
        if self._policy is not None and view.options.offload is None and view.reads is None:
            roles = self._policy.serves_aggregated
            self._offers = AggregatedOfferBuilder(view, roles) if roles else None

    @property
    def aggregated_ids(self) -> list[int]:
        """The instances that may serve an aggregated request in place of a pair, ascending."""
        instances = self._view.cluster.instances
        ids = self._offers.ids if self._offers is not None else []
        return [index for index in ids if self._separable[instances[index].model]]

    def choose(self, offered: Offer) -> PairPick | AggregatedPick | Reject:
        """Return the prefill instance, or an instance that serves the request aggregated.

        Waits for prefill and transfers are compared as long as recent ones of the model were, relative to their
        predictions.

        The prefill policy chooses if instances both prefill and decode, if they receive both legs at once, or if no
        decode instance has room for the KV cache now: one may have room when the prefill has ended.
        """
        request, model, candidates, at = offered.booking.request, offered.booking.model, offered.candidates, offered.at
        if self._policy is None or not self._separable[model]:
            return self._by_prefill_policy(request, model, candidates)
        cached = offered.without_fetches or candidates
        waits_factor = self._view.prefill[model].waits.factor(at)
        if waits_factor != 1.0:
            same = cached is candidates
            candidates = msgspec.structs.replace(candidates, pending_s=waits_factor * candidates.pending_s)
            cached = candidates if same else msgspec.structs.replace(cached, pending_s=candidates.pending_s)
        pools, offer = self._offer(request, model, cached, at, offered.booking.avoid, waits_factor)
        turn, by_protocol = self._view.prefill[model].decisions, dict[str, Candidates]()

        def joint_path(position: int) -> JointPath | None:
            return self._joint_path(request, model, candidates, position, at, by_protocol)

        chosen = self._policy.choose(request, candidates, joint_path, turn, offer, offered.further_s.get("session_s"))
        if isinstance(chosen, Reject):
            return self._by_prefill_policy(request, model, candidates)
        if offer is not None and isinstance(chosen, AggregatedChoice):
            return _picked(pools, offer, chosen)
        assert not isinstance(chosen, AggregatedChoice), "without an offer there is no aggregated request"
        transfer_s = float(chosen.decode.terms.parts["transfer_s"][chosen.decode.index])
        return PairPick(chosen.prefill, transfer_s, chosen.aggregated)

    def _by_prefill_policy(self, request: Request, model: str, candidates: PrefillCandidates) -> PairPick | Reject:
        choice = self._view.choose_prefill(request, model, candidates)
        return choice if isinstance(choice, Reject) else PairPick(choice)

    def _offer(
        self, request: Request, model: str, cached: PrefillCandidates, at: float, avoid: Avoided, waits_factor: float
    ) -> tuple[tuple[DecodePool, ...], AggregatedOffer | None]:
        if self._offers is None or self._tracker is None or request.adapter:
            return (), None
        output_tokens, own = self._tracker.table.answers.mean_tokens, self._view.prefill[model]
        pools, offer = self._offers.offer(request, model, cached, at, avoid, output_tokens)
        if self._policy is not None and self._policy.has_targets:
            offer = offer._replace(short_tokens=self._tracker.table.answers.short_tokens)
        return pools, offer._replace(waits_factor=waits_factor, transfers_factor=own.transfers.factor(at))

    def _splits(self, model: str) -> bool:
        """Whether every prefill instance of a model ends its leg before the decode leg starts."""
        cluster = self._view.cluster
        instances = (cluster.instances[index] for index in self._view.prefill[model].ids.tolist())
        return all(instance.role != "both" and not instance.traits.concurrent_legs for instance in instances)

    def _joint_path(
        self,
        request: Request,
        model: str,
        candidates: PrefillCandidates,
        position: int,
        at: float,
        by_protocol: dict[str, Candidates],
    ) -> JointPath | None:
        """The decode candidates for this prefill instance and the predicted network between them. `by_protocol`
        caches the candidates."""
        view = self._view
        source = int(view.prefill[model].ids[position])
        protocol = view.cluster.instances[source].protocol
        pool = view.decode.get((model, protocol))
        if pool is None or self._tracker is None:
            return None
        if protocol not in by_protocol:
            by_protocol[protocol] = pool.with_prompts(self._decode_candidates(request, model, pool), at)
        costs = view.oracle.costs(source, pool.ids, at, own_transfers=False)
        starts_s = float(candidates.pending_s[position] + candidates.prefill_s[position])
        return JointPath(
            by_protocol[protocol], costs, self._tracker.network_view(source, pool.ids, costs, at, starts_s)
        )

    def _decode_candidates(self, request: Request, model: str, pool: DecodePool) -> Candidates:
        view = self._view
        usable = None if pool.open else pool.up & pool.partner
        hit_tokens = view.caches.hit_tokens(request, pool.ids, request.input_tokens)
        return pool.candidates(request, view.models[model], hit_tokens, view.options.reserve_bytes, usable)


def _picked(pools: tuple[DecodePool, ...], offer: AggregatedOffer, aggregated: AggregatedChoice) -> AggregatedPick:
    choice, offered = aggregated.decode, offer.pools[aggregated.pool]
    parts = choice.terms.parts
    prompt_s = float(parts["prefill_s"][choice.index]) + float(parts["steps_s"][choice.index])
    pick = DecodePick(choice, offered.candidates, SAME_NODE)
    return AggregatedPick(pools[aggregated.pool], offered.kept, pick, aggregated.compared, prompt_s)
