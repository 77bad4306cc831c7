"""A topology constraint: keep the KV cache inside the prefill instance's domain. It works with any decode policy.

Two instances share a domain of a level if their tier is at most that level's. An instance without a label for the level
shares a domain with no other, so `required` excludes it and `preferred` takes it last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal, cast, get_args

import numpy as np
from msgspec.structs import replace

from kvroute.policies.decode import DecodePolicy, feasible_mask, no_room
from kvroute.types import (
    SAME_DATACENTER,
    SAME_NODE,
    SAME_POD,
    SAME_RACK,
    BoolArray,
    Candidates,
    Choice,
    InputError,
    IntArray,
    NetworkCosts,
    Reject,
    Request,
    Terms,
    TierArray,
)

Level = Literal["node", "rack", "pod", "datacenter"]
Enforcement = Literal["required", "preferred"]

_TIER: dict[str, int] = {"node": SAME_NODE, "rack": SAME_RACK, "pod": SAME_POD, "datacenter": SAME_DATACENTER}
_ENFORCEMENT: dict[str, Enforcement] = {
    "required": "required",
    "preferred": "preferred",
    "fail": "required",
    "fallback": "preferred",
}


@dataclass(frozen=True, slots=True)
class TopologyConstraint:
    """Where the KV cache may go, as in Dynamo's KV transfer policy.

    `required`: only inside the domain. `preferred` with a weight w in (0, 1]: costs inside the domain are multiplied by
    exp(-tanh(w)), and on equal cost the domain wins (otherwise the preference would have no effect on a cost of zero).
    `preferred` without a weight: outside the domain only if no instance inside has room.
    """

    level: Level
    enforcement: Enforcement = "required"
    weight: float | None = 1.0
    """Used only by `preferred`. None: the domain first, at any cost."""

    def __post_init__(self) -> None:
        _known(self.level, get_args(Level), "level")
        _known(self.enforcement, get_args(Enforcement), "enforcement")
        if self.weight is not None and not 0 < self.weight <= 1:
            raise InputError(f"weight {self.weight} is outside (0, 1]", where="constraint", hint="try 0.5")

    @classmethod
    def parse(cls, text: str) -> TopologyConstraint:
        """Parse `level:enforcement[:weight]`: "pod:required", "rack:preferred:0.5", "pod:fallback".

        `fail` is a synonym of `required`; `fallback` is `preferred` without a weight.

        Raises:
            InputError: an unknown word, a weight that is not a number in (0, 1], or a weight where none is allowed.
        """
        level, *rest = (part.strip() for part in text.split(":"))
        _known(level, get_args(Level), "level")
        if len(rest) > 2:
            raise InputError(f"{text!r} has too many parts", where="constraint", hint="write level:enforcement:weight")
        word = rest[0] if rest else "required"
        _known(word, tuple(_ENFORCEMENT), "enforcement")
        if len(rest) == 2 and word != "preferred":
            raise InputError(f"{word!r} takes no weight", where="constraint", hint=f"write {level}:preferred:{rest[1]}")
        weight = None if word == "fallback" else 1.0
        if len(rest) == 2:
            weight = _weight(rest[1])
        return cls(cast(Level, level), _ENFORCEMENT[word], weight)

    def __str__(self) -> str:
        """The text that `parse` reads."""
        if self.enforcement == "required":
            return f"{self.level}:required"
        return f"{self.level}:fallback" if self.weight is None else f"{self.level}:preferred:{self.weight}"

    @property
    def tier_max(self) -> int:
        """The highest tier inside the domain."""
        return _TIER[self.level]


def constrain(
    policy: DecodePolicy,
    constraint: TopologyConstraint,
    request: Request,
    candidates: Candidates,
    costs: NetworkCosts,
    turn: int,
) -> Choice | Reject:
    """Let `policy` choose under `constraint`; arguments and result as in `DecodePolicy.choose`.

    The terms get the additional part `same_domain` (1 or 0) and, with a weight, `policy_cost`, the cost before the
    discount. Candidates outside the domain are infeasible under `required`, and under `preferred` without a weight
    while the domain has room.
    """
    inside: BoolArray = costs.tier <= constraint.tier_max
    if constraint.enforcement == "preferred" and constraint.weight is not None:
        choice = policy.choose(request, candidates, costs, turn)
        return choice if isinstance(choice, Reject) else _discounted(choice, inside, constraint.weight)
    if (inside & feasible_mask(candidates)).any():
        # No instance has infinite memory, so a policy skips these candidates like any full instance.
        candidates = replace(candidates, need_bytes=np.where(inside, candidates.need_bytes, np.inf))
    elif constraint.enforcement == "required":
        return _no_candidate_inside(constraint, request, candidates, inside)
    choice = policy.choose(request, candidates, costs, turn)
    return choice if isinstance(choice, Reject) else _with_domain(choice, inside)


def prefill_mask(
    constraint: TopologyConstraint, tier: TierArray, prefill_indices: IntArray, decode_indices: IntArray
) -> BoolArray:
    """Mask of the prefill instances that have a decode instance in their domain, [len(prefill_indices)].

    Args:
        constraint: only its level is used.
        tier: [n, n] of all instances.
        prefill_indices, decode_indices: indices into `tier`.
    """
    inside = tier[np.ix_(prefill_indices, decode_indices)] <= constraint.tier_max
    return np.asarray(inside.any(axis=1), dtype=np.bool_)


def _with_domain(choice: Choice, inside: BoolArray) -> Choice:
    terms = choice.terms
    parts = terms.parts | {"same_domain": inside.astype(np.float64)}
    return Choice(choice.index, Terms(terms.names, terms.cost, terms.feasible, parts, terms.unit))


def _discounted(choice: Choice, inside: BoolArray, weight: float) -> Choice:
    """Rank again with lower costs inside the domain (Dynamo's preferred taint); ties go to the domain."""
    terms = choice.terms
    cost = np.where(inside, terms.cost * math.exp(-math.tanh(weight)), terms.cost)
    best = terms.feasible & (cost == cost.min(where=terms.feasible, initial=np.inf))
    index = int(np.argmax(best & inside if (best & inside).any() else best))
    parts = terms.parts | {"same_domain": inside.astype(np.float64), "policy_cost": terms.cost}
    return Choice(index, Terms(terms.names, cost, terms.feasible, parts, terms.unit))


def _no_candidate_inside(
    constraint: TopologyConstraint, request: Request, candidates: Candidates, inside: BoolArray
) -> Reject:
    among = f"decode instance in the prefill instance's {constraint.level}"
    if not inside.any():
        return Reject(
            request.id, f"there is no {among}, and the constraint {constraint.level}:required allows no other"
        )
    return no_room(
        request, replace(candidates, free_kv_bytes=np.where(inside, candidates.free_kv_bytes, -np.inf)), among
    )


def _known(word: str, words: tuple[str, ...], what: str) -> None:
    if word not in words:
        near = get_close_matches(word, words, 1)
        hint = (f"did you mean {near[0]!r}? " if near else "") + f"known: {', '.join(words)}"
        raise InputError(f"unknown {what} {word!r}", where="constraint", hint=hint)


def _weight(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"weight {text!r} is not a number", where="constraint", hint="give one in (0, 1]") from None
