"""Prefill policies: choose the instance that computes the KV cache of a new request. They are pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import msgspec
import numpy as np

from kvroute.policies.decode import cheapest, policy_of, turns_to_wait
from kvroute.policies.kernels import NO_CANDIDATE, earliest_finish
from kvroute.types import BoolArray, Choice, FloatArray, IntArray, Reject, Request, Terms


class PrefillCandidates(msgspec.Struct, frozen=True, gc=False):
    """Prefill instances, ascending by name, as arrays of length n: a lower index wins a tie.

    The arrays belong to this request alone, so a choice may keep them.
    """

    names: tuple[str, ...]
    pending_s: FloatArray
    """Work ahead of a request that arrives now, in seconds."""
    hit_tokens: IntArray
    """Longest cached prefix of the request, tokens."""
    prefill_s: FloatArray
    """Time to compute this request there, given its cached prefix."""
    allowed: BoolArray | None = None
    """False for instances that a topology constraint excludes; None excludes none."""
    storage_queue_s: FloatArray | None = None
    """Time until the storage queue of each candidate's node is empty, in seconds; None: there is no store."""


class PrefillPolicy(Protocol):
    """Chooses the instance that prefills a request."""

    def choose(self, request: Request, candidates: PrefillCandidates, turn: int) -> Choice | Reject:
        """Choose among n candidates, the first of equals; `turn` counts the prefill decisions before this one.

        Returns:
            the choice with all terms, or a Reject if no candidate is allowed.
        """
        ...


def _allowed(candidates: PrefillCandidates) -> BoolArray:
    if candidates.allowed is None:
        return _all(len(candidates.names))
    allowed = candidates.allowed.copy()
    allowed.flags.writeable = False  # like `_all`: numba would compile the kernel again for another array type
    return allowed


@lru_cache(maxsize=64)
def _all(count: int) -> BoolArray:
    everybody: BoolArray = np.ones(count, dtype=np.bool_)
    everybody.flags.writeable = False
    return everybody


def _no_candidate(request: Request, candidates: PrefillCandidates) -> Reject:
    why = "is allowed by the topology constraint" if candidates.names else "exists"
    return Reject(request.id, f"no prefill instance {why}")


@dataclass(frozen=True, slots=True)
class PrefillRoundRobin:
    """Allowed candidates in turn, by name. The cost is the number of turns that a candidate still has to wait."""

    def choose(self, request: Request, candidates: PrefillCandidates, turn: int) -> Choice | Reject:
        """See PrefillPolicy."""
        allowed = _allowed(candidates)
        cost = turns_to_wait(allowed, turn)
        return cheapest(candidates.names, cost, allowed, {}, "turns") or _no_candidate(request, candidates)


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """Earliest start: the least work ahead. Ignores the cache and the request's own time."""

    def choose(self, request: Request, candidates: PrefillCandidates, turn: int) -> Choice | Reject:
        """See PrefillPolicy."""
        allowed = _allowed(candidates)
        parts = {"pending_s": candidates.pending_s}
        return cheapest(candidates.names, candidates.pending_s, allowed, parts) or _no_candidate(request, candidates)


@dataclass(frozen=True, slots=True)
class EarliestFinish:
    """Earliest finish: work ahead plus the request's own time, which a cached prefix shortens."""

    def choose(self, request: Request, candidates: PrefillCandidates, turn: int) -> Choice | Reject:
        """See PrefillPolicy."""
        allowed = _allowed(candidates)
        parts = {
            "pending_s": candidates.pending_s,
            "prefill_s": candidates.prefill_s,
            "hit_tokens": candidates.hit_tokens.astype(np.float64),
        }
        finish_s: FloatArray = np.empty(len(allowed))
        index = earliest_finish(candidates.pending_s, candidates.prefill_s, allowed, finish_s)
        if index == NO_CANDIDATE:
            return _no_candidate(request, candidates)
        return Choice(index, Terms(candidates.names, finish_s, allowed, parts))


@dataclass(frozen=True, slots=True)
class ShortStorageQueue:
    """Instances whose node has a short storage queue first, then the others, then the overloaded; among each the least
    work ahead (DualPath algorithm 1, with work in seconds in place of tokens).

    DualPath lets a request wait if all instances are overloaded. Here the one with the shortest queues takes it. The
    cost is the rank of a candidate.
    """

    alpha_s: float = 3.0
    """Longest storage queue that counts as short, in seconds."""
    beta_s: float = 5.0
    """Work ahead above which an instance is overloaded, in seconds."""

    def choose(self, request: Request, candidates: PrefillCandidates, turn: int) -> Choice | Reject:
        """See PrefillPolicy."""
        allowed, pending_s = _allowed(candidates), candidates.pending_s
        queue_s = np.zeros(len(allowed)) if candidates.storage_queue_s is None else candidates.storage_queue_s
        category = np.where(queue_s <= self.alpha_s, 0.0, 1.0)
        category[pending_s > self.beta_s] = 2.0
        rank: FloatArray = np.empty(len(allowed))
        rank[np.lexsort((pending_s, category, ~allowed))] = np.arange(len(allowed), dtype=np.float64)
        parts = {"pending_s": pending_s, "storage_queue_s": queue_s, "category": category}
        return cheapest(candidates.names, rank, allowed, parts, "rank") or _no_candidate(request, candidates)


PREFILL_POLICIES: dict[str, Callable[..., PrefillPolicy]] = {
    "round-robin": PrefillRoundRobin,
    "least-loaded": LeastLoaded,
    "cache-aware": EarliestFinish,
    "dualpath": ShortStorageQueue,
}


def prefill_policy(name: str) -> PrefillPolicy:
    """Return the prefill policy with this name.

    Raises:
        InputError: unknown name.
    """
    return policy_of(PREFILL_POLICIES, "prefill policy", name, {})
