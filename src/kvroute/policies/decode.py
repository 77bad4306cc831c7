"""Decode policies: arrays over candidates in, one choice with the cost terms of all candidates out. They have no state
and no randomness.

Every cost is finite and zero or more, and lower is better, so a topology constraint can rank the candidates again.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Protocol, TypeVar

import numpy as np

from kvroute.policies.kernels import (
    CONGESTION,
    COST,
    DECODE_S,
    EFFECTIVE,
    HIT_TOKENS,
    NO_CANDIDATE,
    NO_PAIRS,
    OWN_TRANSFERS,
    QUEUE_S,
    ROWS,
    TIER,
    TRANSFER_S,
    netkv_terms,
)
from kvroute.types import (
    BoolArray,
    Candidates,
    Choice,
    FloatArray,
    InputError,
    IntArray,
    NetworkCosts,
    Reject,
    Request,
    Terms,
)

Policy = TypeVar("Policy")

_NONE: IntArray = np.array(0)
"""An array, because numpy converts a Python number slower than it compares a dozen candidates with an array."""


class DecodePolicy(Protocol):
    """Chooses the instance that decodes a request whose KV cache is complete."""

    def choose(self, request: Request, candidates: Candidates, costs: NetworkCosts, turn: int) -> Choice | Reject:
        """Choose among n candidates; the lower index wins a tie.

        Args:
            request: the request to place.
            candidates: arrays of length n; infeasible ones lack KV memory (need_bytes > free_kv_bytes).
            costs: the network between the prefill instance and the candidates.
            turn: number of decode decisions made before this one.

        Returns:
            the choice with all terms, or a Reject if no candidate is feasible.
        """
        ...


def feasible_mask(candidates: Candidates) -> BoolArray:
    """Candidates with enough free KV memory (NetKV algorithm 1, line 1; the reserve is inside `need_bytes`)."""
    mask: BoolArray = candidates.need_bytes <= candidates.free_kv_bytes
    return mask


def no_room(request: Request, candidates: Candidates, among: str = "decode instance") -> Reject:
    """The Reject that names the candidate closest to having room and what it lacks."""
    if not candidates.names:
        return Reject(request.id, f"there is no {among}")
    closest = int(np.argmax(candidates.free_kv_bytes - candidates.need_bytes))
    need_bytes, free_bytes = float(candidates.need_bytes[closest]), float(candidates.free_kv_bytes[closest])
    return Reject(
        request.id,
        f"no {among} has room for the KV cache: {candidates.names[closest]} comes closest, "
        f"where it needs {need_bytes / 1e9:.4g} GB and {free_bytes / 1e9:.4g} GB are free",
    )


def cheapest(
    names: tuple[str, ...], cost: FloatArray, feasible: BoolArray, parts: dict[str, FloatArray], unit: str = "s"
) -> Choice | None:
    """The feasible candidate of least cost, the first of equals; None if none is feasible."""
    if not names:
        return None
    index = int(cost.argmin())
    if not feasible[index]:
        index = int(np.where(feasible, cost, np.inf).argmin())
        if not feasible[index]:
            return None
    return Choice(index, Terms(names, cost, feasible, parts, unit))


def turns_to_wait(eligible: BoolArray, turn: int) -> FloatArray:
    """Number of turns that each eligible candidate waits if they take turns in order, [n]."""
    rank = eligible.cumsum()
    count = int(rank[-1]) if len(rank) else 0
    return ((rank - 1 - turn) % max(count, 1)).astype(np.float64)


def queue_and_decode_s(candidates: Candidates) -> tuple[FloatArray, FloatArray]:
    """Queueing delay and first decode step of each candidate, [n] seconds (NetKV eq. 6 and 7)."""
    batch, per_request_s = candidates.batch, candidates.iteration_per_request_s
    iteration_s = candidates.iteration_base_s + per_request_s * batch
    blocked = candidates.queued - candidates.batch_max + batch
    return np.maximum(blocked, _NONE) * iteration_s, iteration_s + per_request_s


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Feasible candidates in turn, by name. The cost is the number of turns that a candidate still has to wait."""

    def choose(self, request: Request, candidates: Candidates, costs: NetworkCosts, turn: int) -> Choice | Reject:
        """See DecodePolicy. Infeasible candidates are skipped, so the others share the turns evenly."""
        feasible = feasible_mask(candidates)
        cost = turns_to_wait(feasible, turn)
        return cheapest(candidates.names, cost, feasible, {}, "turns") or no_room(request, candidates)


@dataclass(frozen=True, slots=True)
class LoadAware:
    """Least wait for a slot plus first decode step: T_queue + T_decode (NetKV eq. 6 and 7)."""

    def choose(self, request: Request, candidates: Candidates, costs: NetworkCosts, turn: int) -> Choice | Reject:
        """See DecodePolicy."""
        feasible = feasible_mask(candidates)
        queue_s, decode_s = queue_and_decode_s(candidates)
        parts = {"queue_s": queue_s, "decode_s": decode_s}
        return cheapest(candidates.names, queue_s + decode_s, feasible, parts) or no_room(request, candidates)


@dataclass(frozen=True, slots=True)
class CacheAware:
    """Longest cached prefix; on a tie the shorter wait.

    The cost is the number of tokens not cached, plus load / (1 + load), which stays below one token.
    """

    def choose(self, request: Request, candidates: Candidates, costs: NetworkCosts, turn: int) -> Choice | Reject:
        """See DecodePolicy."""
        feasible = feasible_mask(candidates)
        queue_s, decode_s = queue_and_decode_s(candidates)
        load_s = queue_s + decode_s
        cost = np.maximum(request.input_tokens - candidates.hit_tokens, _NONE) + load_s / (1.0 + load_s)
        parts = {"hit_tokens": candidates.hit_tokens.astype(np.float64), "queue_s": queue_s, "decode_s": decode_s}
        return cheapest(candidates.names, cost, feasible, parts, "tokens") or no_room(request, candidates)


@dataclass(frozen=True, slots=True)
class CacheAndLoadAware:
    """Cache and load in one score, as in Mooncake's Conductor and llm-d's composite scorer."""

    cache_weight: float = 1.0
    load_weight: float = 1.0

    def __post_init__(self) -> None:
        for name, weight in (("cache_weight", self.cache_weight), ("load_weight", self.load_weight)):
            if not 0 <= weight < math.inf:
                raise InputError(f"{weight} is not a valid weight", where=name, hint="use 0 or more")
        if self.cache_weight + self.load_weight == 0:
            raise InputError("both weights are zero", where="cla", hint="give cache_weight or load_weight a value")

    def choose(self, request: Request, candidates: Candidates, costs: NetworkCosts, turn: int) -> Choice | Reject:
        """See DecodePolicy."""
        feasible = feasible_mask(candidates)
        missing = np.maximum(1.0 - candidates.hit_tokens / max(request.input_tokens, 1), 0.0)
        load = (candidates.batch + candidates.queued) / candidates.batch_max
        cost = self.cache_weight * missing + self.load_weight * load
        parts = {"missing_share": missing, "load_share": load}
        return cheapest(candidates.names, cost, feasible, parts, "score") or no_room(request, candidates)


@dataclass(frozen=True, slots=True)
class NetKV:
    """Earliest end of transfer + queue + first decode step (NetKV eq. 5, algorithm 1).

    Without `congestion` it assumes tiers without traffic except the router's own transfers. Without `in_flight` it
    ignores these too and uses only the tier map. With `queued` the first decode step counts the requests that wait for
    a slot or whose transfer is in flight. They are in the batch when this one joins it, and without them transfers in
    flight do not make a target less attractive until they end.
    """

    congestion: bool = True
    in_flight: bool = True
    queued: bool = False

    def choose(self, request: Request, candidates: Candidates, costs: NetworkCosts, turn: int) -> Choice | Reject:
        """See DecodePolicy."""
        count = len(candidates.names)
        feasible: BoolArray = np.empty(count, dtype=np.bool_)
        terms = np.empty((ROWS, count))
        index = netkv_terms(
            candidates.kv_bytes,
            candidates.need_bytes,
            candidates.free_kv_bytes,
            candidates.hit_tokens,
            candidates.batch,
            candidates.queued,
            candidates.batch_max,
            candidates.iteration_base_s,
            candidates.iteration_per_request_s,
            costs.tier,
            NO_PAIRS if costs.pair_bytes_per_s is None else costs.pair_bytes_per_s,
            costs.bytes_per_s,
            costs.latency_s,
            costs.congestion,
            costs.in_flight,
            self.congestion and self.in_flight,
            self.in_flight,
            self.queued,
            feasible,
            terms,
        )
        if index == NO_CANDIDATE:
            return no_room(request, candidates)
        parts = {
            "transfer_s": terms[TRANSFER_S],
            "queue_s": terms[QUEUE_S],
            "decode_s": terms[DECODE_S],
            "hit_tokens": terms[HIT_TOKENS],
            "effective_bytes_per_s": terms[EFFECTIVE],
            "tier": terms[TIER],
            "congestion": terms[CONGESTION],
            "own_transfers": terms[OWN_TRANSFERS],
        }
        return Choice(index, Terms(candidates.names, terms[COST], feasible, parts))


def netkv() -> NetKV:
    """Full NetKV."""
    return NetKV()


def netkv_queued() -> NetKV:
    """Full NetKV, with t(batch + queued + 1) as the first decode step."""
    return NetKV(queued=True)


def netkv_static() -> NetKV:
    """NetKV without telemetry."""
    return NetKV(congestion=False)


def netkv_topo() -> NetKV:
    """NetKV with only the tier map."""
    return NetKV(congestion=False, in_flight=False)


def policy_of(
    policies: Mapping[str, Callable[..., Policy]],
    kind: str,
    name: str,
    parameters: Mapping[str, Any],
    unused: Set[str] = frozenset(),
) -> Policy:
    """Look up a policy and build it. The InputError for a wrong name or parameter lists the right ones. Args: `unused`:
    parameters of the function that builds it, which this policy does not have."""
    if name not in policies:
        near = get_close_matches(name, policies, 1, cutoff=0.5)
        hint = (f"did you mean {near[0]!r}? " if near else "") + f"known: {', '.join(policies)}"
        raise InputError(f"unknown {kind} {name!r}", hint=hint)
    accepted = [parameter for parameter in inspect.signature(policies[name]).parameters if parameter not in unused]
    for parameter, value in parameters.items():
        if parameter not in accepted:
            near = get_close_matches(parameter, accepted, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(accepted) or 'none'}"
            raise InputError(f"{kind} {name!r} has no parameter {parameter!r}", where=parameter, hint=hint)
        if isinstance(value, bool) or not isinstance(value, int | float):
            what = f"{parameter} of {kind} {name!r} is {value!r}"
            raise InputError(what, where=parameter, hint="give a number")
    return policies[name](**parameters)
