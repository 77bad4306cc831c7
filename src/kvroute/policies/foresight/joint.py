"""Chooses prefill and decode instance together at arrival, or an instance that serves it aggregated. It is pure.

The decode instance of a pair is not booked: it is chosen again when the prefill has ended and more is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec
import numpy as np

from kvroute.policies.constraint import TopologyConstraint, constrain
from kvroute.policies.foresight.aggregated import (
    AggregatedChoice,
    AggregatedOffer,
    LoadPrices,
    PairPrice,
    cheapest_aggregated,
    load_of,
    targets_of,
)
from kvroute.policies.foresight.aggregated_pricing import later_s, misses
from kvroute.policies.foresight.policy import Foresight
from kvroute.policies.foresight.sight import NetworkView
from kvroute.policies.foresight.spec import ForesightSpec
from kvroute.policies.prefill import PrefillCandidates
from kvroute.types import Candidates, Choice, FloatArray, NetworkCosts, Reject, Request, Role, Terms


@dataclass(frozen=True, slots=True)
class JointPath:
    """The decode side for one prefill instance. The transfer starts when that prefill ends (in
    `network_view.starts_s`)."""

    candidates: Candidates
    costs: NetworkCosts
    network_view: NetworkView


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill instance (index into `PrefillCandidates`) and its decode instance, chosen at arrival."""

    prefill: Choice
    decode: Choice
    aggregated: Terms | None = None
    """Terms of the instances that could have served it aggregated, if there are any, and of this pair."""


class Starts(NamedTuple):
    """When the transfer from each prefill instance can start, and the price of that, [n] each."""

    start_s: FloatArray
    """Predicted end of the prefill."""
    cost_s: FloatArray
    """The same with `delay_s` and `session_s`."""
    delay_s: FloatArray | None
    """Delay of the requests that decode on each prefill instance; None: none does."""
    session_s: FloatArray | None
    """Minus the bonus of the instance that served the session last; None: there is none."""

    @classmethod
    def of(
        cls,
        spec: ForesightSpec,
        prefill: PrefillCandidates,
        offer: AggregatedOffer | None,
        session_s: FloatArray | None,
    ) -> Starts:
        """Price the prefill on each instance."""
        start_s = cost_s = prefill.pending_s + prefill.prefill_s
        delay_s = None
        if offer is not None and offer.decoding.any():
            delay_s = spec.delay_weight * offer.decoding * prefill.prefill_s
            cost_s = cost_s + delay_s
        if session_s is not None:
            cost_s = cost_s + session_s
        return cls(start_s, cost_s, delay_s, session_s)

    def terms(self) -> dict[str, FloatArray]:
        """Return the parts of the price that not every request has."""
        parts = {"delay_s": self.delay_s, "session_s": self.session_s}
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def bonus_s(self) -> float:
        """The most by which the price is less than the predicted end of a prefill."""
        return 0.0 if self.session_s is None else -float(self.session_s.min())


@dataclass(frozen=True, slots=True)
class ForesightJoint:
    """Chooses at arrival the pair with the earliest end of the transfer, plus the delay imposed on others; or an
    instance that serves it aggregated, if that costs less than the pair."""

    spec: ForesightSpec = field(default_factory=ForesightSpec)
    constraint: TopologyConstraint | None = None
    """Constraint on the decode instance relative to the prefill instance."""
    _closed_form: Foresight = field(init=False, repr=False, compare=False)
    """Prices decode instances at arrival without a simulation; `_simulating` with one."""
    _simulating: Foresight = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        closed = Foresight(msgspec.structs.replace(self.spec, width=0), at_arrival=True)
        object.__setattr__(self, "_closed_form", closed)
        object.__setattr__(self, "_simulating", Foresight(self.spec, at_arrival=True))

    @property
    def serves_aggregated(self) -> frozenset[Role]:
        """See PairPolicy."""
        roles: tuple[Role, ...] = ("decode", "prefill")
        return frozenset(roles[: int(self.spec.aggregated)])

    @property
    def has_targets(self) -> bool:
        """See PairPolicy."""
        return self.spec.has_targets

    def choose(
        self,
        request: Request,
        prefill: PrefillCandidates,
        path_of: Callable[[int], JointPath | None],
        turn: int,
        offer: AggregatedOffer | None = None,
        session_s: FloatArray | None = None,
    ) -> Pair | AggregatedChoice | Reject:
        """Choose among the n prefill instances that have decode candidates (`path_of` returns None if there are none),
        and among the instances of the offer, if there is one.

        Prefill instances are evaluated in order of their predicted prefill end, at most `spec.joint_reach` of them.
        Evaluation stops at one whose prefill would end only after the transfer of another one. The closed form ranks
        them; for the first `spec.joint_width` the fluid model simulates the best pair. The terms of the prefill choice
        hold `start_s` and, for those evaluated, `decode_s`, the cost of the best decode instance. Those not simulated
        keep the closed form and rank behind those simulated.

        With an offer, an instance serves the request aggregated if that costs less than the best pair. Both prices are
        the time to the first token, the price of a decode slot, the delay of others by the prompt, and the delay of the
        response by later prompts. The terms of the prefill choice then also hold `delay_s` of the requests that decode
        on a prefill instance, `pair_s` of the chosen pair and `aggregated_s` of the best single instance.

        `session_s` is minus the bonus of the prefill instance that served the request's session last, [n].
        """
        starts = Starts.of(self.spec, prefill, offer, session_s)
        found, refused = self._closed(request, prefill, starts, path_of, turn)
        pair: Pair | None = None
        if found:
            order = sorted(found, key=lambda index: (starts.cost_s[index] + _paid(found[index][1]), index))
            pair = self._with_simulated_transfers(request, prefill, starts, turn, found, order)
        aggregated = None
        if offer is not None and offer.pools:
            aggregated, pair = self._against(pair, offer, prefill, starts, found)
        # A decode instance may have room later. A target for TPOT alone is worth that wait.
        waits = pair is None and refused is not None and self.spec.tpot and not self.spec.ttft
        if aggregated is not None and not (waits and _misses(aggregated)):
            return aggregated
        nothing = Reject(request.id, "no prefill instance can transfer its KV cache to a decode instance")
        return pair or refused or nothing

    def _against(
        self,
        pair: Pair | None,
        offer: AggregatedOffer,
        prefill: PrefillCandidates,
        starts: Starts,
        found: dict[int, tuple[JointPath, Choice]],
    ) -> tuple[AggregatedChoice | None, Pair | None]:
        """Return the best single instance if it is cheaper than the pair, else None; and the pair, whose terms then
        hold both prices."""
        loads = [load_of(self.spec, pool.candidates, offer.output_tokens) for pool in offer.pools]
        if pair is None:
            return cheapest_aggregated(self.spec, offer, loads, None)[0], None
        candidates = found[pair.prefill.index][0].candidates
        known = zip(offer.pools, loads, strict=True)
        alike = ((pool.share, load) for pool, load in known if pool.candidates.names is candidates.names)
        nothing = np.zeros(len(candidates.names))
        share, load = next(alike, (nothing, None))
        load = load or load_of(self.spec, candidates, offer.output_tokens)
        target = pair.decode.index
        delay_s = later_s(float(self.spec.delay_weight), float(load.response_s[target]), float(share[target]))
        used_share = found[pair.prefill.index][0].network_view.used_share(target)
        price = self._pair_price(pair, offer, prefill, load, delay_s, used_share)
        if starts.session_s is not None:
            price = price._replace(session_s=float(starts.session_s[pair.prefill.index]))
        if self.spec.has_targets:
            # Prompts beside this response do not count: a target keeps later ones away from its decode instance.
            prompt_s = price.prefill_s if offer.decoding[pair.prefill.index] else 0.0
            targets = targets_of(self.spec, offer)
            missed = misses(price.ttft_s, float(load.step_s[target]), 0.0, prompt_s, targets)
            price = price._replace(misses=missed)
        aggregated, compared = cheapest_aggregated(self.spec, offer, loads, price)
        if aggregated is None:
            return None, replace(pair, aggregated=compared)
        aggregated_s = _paid(aggregated.decode)
        if (_misses(aggregated), aggregated_s) < (price.misses, price.cost):
            return aggregated, pair
        terms, count = pair.prefill.terms, len(prefill.names)
        pair_s, each_aggregated_s = np.zeros(count), np.empty(count)
        pair_s[pair.prefill.index] = price.cost
        each_aggregated_s.fill(aggregated_s)
        parts = terms.parts | {"pair_s": pair_s, "aggregated_s": each_aggregated_s}
        priced = Terms(terms.names, terms.cost, terms.feasible, parts)
        return None, Pair(Choice(pair.prefill.index, priced), pair.decode, compared)

    def _pair_price(
        self,
        pair: Pair,
        offer: AggregatedOffer,
        prefill: PrefillCandidates,
        load: LoadPrices,
        later: float,
        used_share: float,
    ) -> PairPrice:
        """Return the price of a pair.

        The transfer and the delay that it imposes are as much longer than predicted as recent transfers were. A link in
        use for the share r of the time costs 1 / (1 - r)^2 times an idle one, because a transfer also delays later
        ones and is delayed by them. The transfers in flight explain (1 + r) / (1 - r) of that; `later_s` gets the rest.

        Args:
            pair: the pair.
            offer: numbers of requests on its prefill instance.
            prefill: the prefill instances.
            load: of the decode candidates of its prefill instance.
            later: delay of its response by later prompts.
            used_share: highest share in use of a link of its transfer.
        """
        source, target = pair.prefill.index, pair.decode.index
        pending_s, prefill_s = float(prefill.pending_s[source]), float(prefill.prefill_s[source])
        parts = pair.decode.terms.parts
        sent_s = float(parts["transfer_s"][target]) + self.spec.imposed_weight * float(parts["imposed_s"][target])
        late_s = (offer.transfers_factor - 1.0) * sent_s
        transfer_s = _paid(pair.decode) + late_s
        squared = used_share * used_share
        later += (sent_s + late_s) * squared / (1.0 - squared)
        if offer.layerwise:
            transfer_s -= min(transfer_s, prefill_s)
        delayed = offer.waits_factor * int(offer.waiting[source]) + int(offer.decoding[source])
        slot_wait_s = max(float(load.wait_s[target]) - pending_s - prefill_s - transfer_s, 0.0)
        return PairPrice(
            name=f"{prefill.names[source]} and {pair.decode.terms.names[target]}",
            wait_s=pending_s + slot_wait_s,
            prefill_s=prefill_s,
            transfer_s=transfer_s,
            steps_s=float(load.step_s[target]),
            slot_s=float(load.slot_s[target]),
            delay_s=self.spec.delay_weight * delayed * prefill_s,
            later_s=later,
            reserve_s=0.0,
            batch_s=float(load.batch_s[target]),
            beyond_s=0.0,
            session_s=0.0,
            hit_tokens=float(prefill.hit_tokens[source]),
        )

    def _closed(
        self,
        request: Request,
        prefill: PrefillCandidates,
        starts: Starts,
        path_of: Callable[[int], JointPath | None],
        turn: int,
    ) -> tuple[dict[int, tuple[JointPath, Choice]], Reject | None]:
        """Decode candidates and best decode instance by the closed form, by prefill instance; and the first Reject."""
        found: dict[int, tuple[JointPath, Choice]] = {}
        refused: Reject | None = None
        best_s = np.inf
        for index in starts.start_s.argsort(kind="stable").tolist():
            if starts.start_s[index] - starts.bonus_s >= best_s or len(found) == self.spec.joint_reach:
                break
            path = path_of(index) if prefill.allowed is None or prefill.allowed[index] else None
            if path is None:
                continue
            choice = self._price(self._closed_form, path, request, turn)
            if isinstance(choice, Reject):
                refused = refused or choice
                continue
            found[index] = path, choice
            best_s = min(best_s, starts.cost_s[index] + _paid(choice))
        return found, refused

    def _with_simulated_transfers(
        self,
        request: Request,
        prefill: PrefillCandidates,
        starts: Starts,
        turn: int,
        found: dict[int, tuple[JointPath, Choice]],
        order: list[int],
    ) -> Pair:
        decode_s, feasible = np.zeros(len(prefill.names)), np.zeros(len(prefill.names), dtype=np.bool_)
        chosen: dict[int, Choice] = {}
        shift_s = 0.0
        for place, index in enumerate(order):
            path, closed = found[index]
            feasible[index] = True
            if place >= self.spec.joint_width:
                decode_s[index] = _paid(closed) + shift_s
                chosen[index] = closed
                continue
            choice = self._price(self._simulating, path, request, turn)
            assert isinstance(choice, Choice), "room has nothing to do with the fluid model"
            shift_s = max(shift_s, _paid(choice) - _paid(closed))
            decode_s[index] = _paid(choice)
            chosen[index] = choice
        cost = starts.cost_s + decode_s
        index = int(np.where(feasible, cost, np.inf).argmin())
        parts = {"start_s": starts.start_s, "decode_s": decode_s, "hit_tokens": prefill.hit_tokens.astype(np.float64)}
        parts |= starts.terms()
        return Pair(Choice(index, Terms(prefill.names, cost, feasible, parts)), chosen[index])

    def _price(self, policy: Foresight, path: JointPath, request: Request, turn: int) -> Choice | Reject:
        seeing = policy.informed(path.network_view)
        if self.constraint is None:
            return seeing.choose(request, path.candidates, path.costs, turn)
        return constrain(seeing, self.constraint, request, path.candidates, path.costs, turn)


@dataclass(frozen=True, slots=True)
class PairingForesight(Foresight):
    """`Foresight` at the decode decision and `ForesightJoint` at arrival, in place of a prefill policy."""

    def pair_policy(self, constraint: TopologyConstraint | None) -> ForesightJoint:
        """See PairingPolicy."""
        return ForesightJoint(self.spec, constraint)


def _misses(aggregated: AggregatedChoice) -> int:
    """Return the number of targets that a single instance would miss; 0 without targets."""
    parts = aggregated.decode.terms.parts
    return int(parts["misses"][aggregated.decode.index]) if "misses" in parts else 0


def _paid(choice: Choice) -> float:
    return float(choice.terms.cost[choice.index])
