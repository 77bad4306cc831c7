"""Chooses prefill and decode instance together at arrival, by the cost of the transfer between them. It is pure.

The decode instance is not booked: it is chosen again when the prefill has ended and more is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from kvroute.policies.constraint import TopologyConstraint, constrain
from kvroute.policies.foresight import Foresight
from kvroute.policies.foresight_sight import Sight
from kvroute.policies.foresight_spec import ForesightSpec
from kvroute.policies.prefill import PrefillCandidates
from kvroute.types import Candidates, Choice, FloatArray, NetworkCosts, Reject, Request, Terms


@dataclass(frozen=True, slots=True)
class JointPath:
    """The decode side for one prefill instance. The transfer starts when that prefill ends (in `sight.starts_s`)."""

    candidates: Candidates
    costs: NetworkCosts
    sight: Sight


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill instance (index into `PrefillCandidates`) and its decode instance, chosen at arrival."""

    prefill: Choice
    decode: Choice


@dataclass(frozen=True, slots=True)
class ForesightJoint:
    """Chooses at arrival the pair with the earliest end of the transfer, plus the delay imposed on others."""

    spec: ForesightSpec = field(default_factory=ForesightSpec)
    constraint: TopologyConstraint | None = None
    """Constraint on the decode instance relative to the prefill instance."""

    def choose(
        self, request: Request, prefill: PrefillCandidates, path_of: Callable[[int], JointPath | None], turn: int
    ) -> Pair | Reject:
        """Choose among the n prefill instances that have decode candidates (`path_of` returns None if there are none).

        Prefill instances are evaluated in order of their predicted prefill end, at most `spec.joint_reach` of them.
        Evaluation stops at one whose prefill would end only after the transfer of another one. The closed form ranks
        them; for the first `spec.joint_width` the fluid model simulates the best pair. The terms of the prefill choice
        hold `start_s` and, for those evaluated, `decode_s`, the cost of the best decode instance. Those not simulated
        keep the closed form and rank behind those simulated.
        """
        start_s = prefill.pending_s + prefill.prefill_s
        found, refused = self._closed(request, prefill, start_s, path_of, turn)
        if not found:
            return refused or Reject(request.id, "no prefill instance can transfer its KV cache to a decode instance")
        order = sorted(found, key=lambda index: (start_s[index] + _paid(found[index][1]), index))
        return self._played(request, prefill, start_s, turn, found, order)

    def _closed(
        self,
        request: Request,
        prefill: PrefillCandidates,
        start_s: FloatArray,
        path_of: Callable[[int], JointPath | None],
        turn: int,
    ) -> tuple[dict[int, tuple[JointPath, Choice]], Reject | None]:
        """Decode candidates and best decode instance by the closed form, by prefill instance; and the first Reject."""
        policy = Foresight(msgspec.structs.replace(self.spec, width=0), at_arrival=True)
        found: dict[int, tuple[JointPath, Choice]] = {}
        refused: Reject | None = None
        best_s = np.inf
        for index in start_s.argsort(kind="stable").tolist():
            if start_s[index] >= best_s or len(found) == self.spec.joint_reach:
                break
            path = path_of(index) if prefill.allowed is None or prefill.allowed[index] else None
            if path is None:
                continue
            choice = self._price(policy, path, request, turn)
            if isinstance(choice, Reject):
                refused = refused or choice
                continue
            found[index] = path, choice
            best_s = min(best_s, start_s[index] + _paid(choice))
        return found, refused

    def _played(
        self,
        request: Request,
        prefill: PrefillCandidates,
        start_s: FloatArray,
        turn: int,
        found: dict[int, tuple[JointPath, Choice]],
        order: list[int],
    ) -> Pair:
        policy = Foresight(self.spec, at_arrival=True)
        decode_s, feasible = np.zeros(len(start_s)), np.zeros(len(start_s), dtype=np.bool_)
        chosen: dict[int, Choice] = {}
        shift_s = 0.0
        for place, index in enumerate(order):
            path, closed = found[index]
            feasible[index] = True
            if place >= self.spec.joint_width:
                decode_s[index] = _paid(closed) + shift_s
                chosen[index] = closed
                continue
            choice = self._price(policy, path, request, turn)
            assert isinstance(choice, Choice), "room has nothing to do with the fluid model"
            shift_s = max(shift_s, _paid(choice) - _paid(closed))
            decode_s[index] = _paid(choice)
            chosen[index] = choice
        cost = start_s + decode_s
        index = int(np.where(feasible, cost, np.inf).argmin())
        parts = {"start_s": start_s, "decode_s": decode_s, "hit_tokens": prefill.hit_tokens.astype(np.float64)}
        return Pair(Choice(index, Terms(prefill.names, cost, feasible, parts)), chosen[index])

    def _price(self, policy: Foresight, path: JointPath, request: Request, turn: int) -> Choice | Reject:
        seeing = policy.informed(path.sight)
        if self.constraint is None:
            return seeing.choose(request, path.candidates, path.costs, turn)
        return constrain(seeing, self.constraint, request, path.candidates, path.costs, turn)


@dataclass(frozen=True, slots=True)
class PairingForesight(Foresight):
    """`Foresight` at the decode decision and `ForesightJoint` at arrival, in place of a prefill policy."""

    def pair_policy(self, constraint: TopologyConstraint | None) -> ForesightJoint:
        """See PairingPolicy."""
        return ForesightJoint(self.spec, constraint)


def _paid(choice: Choice) -> float:
    return float(choice.terms.cost[choice.index])
