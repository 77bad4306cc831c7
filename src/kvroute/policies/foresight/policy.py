"""The foresight policy: prices a decode instance by the full cost of the transfer there, including the delay of others.

It is pure: `control` holds the table of transfers in flight, and `flows` computes their rates.
Without a table it prices by tiers alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvroute.policies.decode import no_room
from kvroute.policies.foresight.pricing import (
    COST,
    NO_CANDIDATE,
    PACE,
    PARTS,
    ROWS,
    SLOT_S,
    STEP_S,
    WAIT_S,
    foresee,
    price_all,
)
from kvroute.policies.foresight.sight import NetworkView
from kvroute.policies.foresight.spec import ForesightSpec
from kvroute.types import BoolArray, Candidates, Choice, FloatArray, NetworkCosts, Reject, Request, Terms

_NO_PROMPTS: FloatArray = np.zeros(0)


@dataclass(frozen=True, slots=True)
class Foresight:
    """Minimises the sum of transfer, delay imposed on others, prompts in progress, slot wait, first step and slot
    price.

    The closed form ranks all candidates; the fluid model simulates the transfers to the best `spec.width` of them. If
    the network limits no transfer, similar candidates are ranked by load, as `cla` does.
    """

    spec: ForesightSpec = field(default_factory=ForesightSpec)
    network_view: NetworkView | None = None
    """State of the network at this decision; None: only the tiers in `NetworkCosts` are used."""
    at_arrival: bool = False
    """Whether the prefill has not started yet; load then has the weight `spec.arrival_load_weight`."""

    def informed(self, network_view: NetworkView) -> Foresight:
        """See NetworkViewPolicy."""
        return Foresight(self.spec, network_view, self.at_arrival)

    def choose(self, request: Request, candidates: Candidates, costs: NetworkCosts, turn: int) -> Choice | Reject:
        """See DecodePolicy.

        Terms: transfer_s (with latency), imposed_s, prompts_s, wait_s, step_s, slot_s; the mean rate of the transfer
        (pace_bytes_per_s), its tier, and whether it was simulated (1) or estimated in closed form (0).
        """
        count = len(candidates.names)
        feasible: BoolArray = np.empty(count, dtype=np.bool_)
        terms = np.empty((ROWS, count))
        index = self._by_tiers(candidates, costs, feasible, terms) if self.network_view is None else NO_CANDIDATE
        if self.network_view is not None:
            index = self._by_links(candidates, costs, self.network_view, feasible, terms)
        if index == NO_CANDIDATE:
            return no_room(request, candidates)
        if self.spec.tpot:
            index = self._within_target(index, feasible, terms)
        parts = dict(zip(PARTS, terms, strict=False))
        if candidates.prompts_s is None:
            del parts["prompts_s"]
        return Choice(index, Terms(candidates.names, terms[COST], feasible, parts))

    def _within_target(self, index: int, feasible: BoolArray, terms: FloatArray) -> int:
        """Return the cheapest candidate whose steps keep the target TPOT; `index` if there is none."""
        keeps = feasible & (terms[STEP_S] <= self.spec.tpot)
        return int(np.where(keeps, terms[COST], np.inf).argmin()) if keeps.any() else index

    def load_s(self, candidates: Candidates, output_tokens: float) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return wait_s, step_s and slot_s of every candidate for a request without a transfer, [n] each. Args:
        `output_tokens`: mean length of a response."""
        terms = np.empty((ROWS, len(candidates.names)))
        no_transfer_s = np.zeros(len(candidates.names))
        price_all(
            no_transfer_s,
            candidates.batch,
            candidates.queued,
            candidates.batch_max,
            candidates.iteration_base_s,
            candidates.iteration_per_request_s,
            _NO_PROMPTS,
            np.zeros(len(candidates.names), dtype=np.int8),
            0.0,
            self._weights(output_tokens),
            terms,
        )
        return terms[WAIT_S], terms[STEP_S], terms[SLOT_S]

    def _by_links(
        self,
        candidates: Candidates,
        costs: NetworkCosts,
        network_view: NetworkView,
        feasible: BoolArray,
        terms: FloatArray,
    ) -> int:
        links = network_view.links
        return foresee(
            candidates.need_bytes,
            candidates.free_kv_bytes,
            candidates.kv_bytes,
            candidates.batch,
            candidates.queued,
            candidates.batch_max,
            candidates.iteration_base_s,
            candidates.iteration_per_request_s,
            _NO_PROMPTS if candidates.prompts_s is None else candidates.prompts_s,
            costs.tier,
            costs.latency_s,
            network_view.source,
            network_view.targets,
            network_view.starts_s,
            self._weights(network_view.output_tokens),
            links.attached,
            links.wan,
            network_view.cable_bytes_per_s,
            links.cables,
            network_view.flows_per_link,
            network_view.capacity_bytes_per_s,
            links.hashed_paths,
            self.spec.rival_weight * links.hashed_paths,
            self.spec.sibling_weight * (links.hashed_paths - 1),
            network_view.mean_bytes_per_s,
            network_view.factor,
            network_view.tier_bytes_per_s,
            int(self.spec.width),
            int(self.spec.near_max),
            *network_view.state,
            feasible,
            terms,
        )

    def _by_tiers(self, candidates: Candidates, costs: NetworkCosts, feasible: BoolArray, terms: FloatArray) -> int:
        """Use NetKV eq. 4 for the transfer, without NICs, uplinks and other sources."""
        np.less_equal(candidates.need_bytes, candidates.free_kv_bytes, out=feasible)
        uncontended = costs.bytes_per_s.take(costs.tier) if costs.pair_bytes_per_s is None else costs.pair_bytes_per_s
        pace = uncontended * ((1.0 - costs.congestion) / (1.0 + costs.in_flight)).take(costs.tier)
        price_all(
            candidates.kv_bytes / pace + costs.latency_s.take(costs.tier),
            candidates.batch,
            candidates.queued,
            candidates.batch_max,
            candidates.iteration_base_s,
            candidates.iteration_per_request_s,
            _NO_PROMPTS if candidates.prompts_s is None else candidates.prompts_s,
            costs.tier,
            0.0,
            self._weights(self.spec.output_tokens),
            terms,
        )
        terms[PACE] = pace
        index = int(np.where(feasible, terms[COST], np.inf).argmin()) if len(feasible) else NO_CANDIDATE
        return index if index != NO_CANDIDATE and feasible[index] else NO_CANDIDATE

    def _weights(self, output_tokens: float) -> FloatArray:
        spec = self.spec
        load_weight = spec.arrival_load_weight if self.at_arrival else 1.0
        load = (spec.wait_weight, spec.slot_weight, spec.step_weight, spec.answer_weight, spec.answer_transfers)
        return np.array((spec.imposed_weight, *load, load_weight, spec.step_floor_s, output_tokens))
