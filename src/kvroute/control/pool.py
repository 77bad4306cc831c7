"""The instances that serve one model: their load and memory as arrays that a policy reads in place."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvroute.llm import Model
from kvroute.timing import PrefillTime
from kvroute.types import Candidates, FloatArray, Instance, IntArray, Request, TimingSpec


@dataclass(slots=True)
class DecodePool:
    """Decode instances of one model, ascending by name; position in the arrays is the candidate index."""

    names: tuple[str, ...]
    ids: IntArray
    """Index of each in the cluster."""
    batch: IntArray
    queued: IntArray
    batch_max: IntArray
    free_kv_bytes: FloatArray
    iteration_base_s: FloatArray
    iteration_per_request_s: FloatArray
    decisions: int = 0

    @classmethod
    def of(cls, members: list[tuple[int, Instance]], timing: dict[str, TimingSpec]) -> DecodePool:
        """The idle pool of `members` (cluster index, instance)."""
        specs = [timing[instance.timing].decode for _, instance in members]
        return cls(
            names=tuple(instance.name for _, instance in members),
            ids=np.array([index for index, _ in members], dtype=np.int64),
            batch=np.zeros(len(members), dtype=np.int64),
            queued=np.zeros(len(members), dtype=np.int64),
            batch_max=np.array([instance.batch_max for _, instance in members], dtype=np.int64),
            free_kv_bytes=np.array([instance.kv_capacity_bytes for _, instance in members]),
            iteration_base_s=np.array([spec.base_s for spec in specs]),
            iteration_per_request_s=np.array([spec.per_request_s for spec in specs]),
        )

    def candidates(self, request: Request, model: Model, hit_tokens: IntArray, reserve_bytes: float) -> Candidates:
        """The pool as `request` sees it. The arrays of load are live: a policy reads them and keeps nothing.

        `need_bytes` is stricter than NetKV's m_d >= s_eff + m_min: cached blocks that are hit must stay in memory, so
        the whole prompt and the whole answer count.
        """
        need_bytes = float(model.kv_bytes(request.input_tokens + request.max_output_tokens)) + reserve_bytes
        return Candidates(
            names=self.names,
            batch=self.batch,
            queued=self.queued,
            batch_max=self.batch_max,
            free_kv_bytes=self.free_kv_bytes,
            hit_tokens=hit_tokens,
            kv_bytes=np.asarray(model.kv_bytes(request.input_tokens, hit_tokens), dtype=np.float64),
            need_bytes=np.full(len(self.names), need_bytes),
            iteration_base_s=self.iteration_base_s,
            iteration_per_request_s=self.iteration_per_request_s,
        )


@dataclass(slots=True)
class PrefillPool:
    """Prefill instances of one model, ascending by name, and when each would be done with what it was given."""

    names: tuple[str, ...]
    ids: IntArray
    timing: tuple[str, ...]
    """Name of each instance's timing."""
    times: dict[str, PrefillTime]
    busy_until_s: FloatArray
    assigned: IntArray
    """Requests given to each instance and not yet prefilled."""
    decisions: int = 0
    position: dict[int, int] = field(default_factory=dict)

    def prefill_s(self, tokens: int, hit_tokens: IntArray) -> FloatArray:
        """Seconds to prefill a prompt on each instance, given what each has cached; equal cases are computed once."""
        known: dict[tuple[str, int], float] = {}
        seconds = []
        for case in zip(self.timing, hit_tokens.tolist(), strict=True):
            if case not in known:
                known[case] = self.times[case[0]].seconds(tokens, case[1])
            seconds.append(known[case])
        return np.array(seconds)

    def pending_s(self, at: float) -> FloatArray:
        """Seconds of work still ahead of a request that arrives now."""
        pending: FloatArray = np.maximum(self.busy_until_s - at, 0.0)
        return pending

    def book(self, position: int, at: float, prefill_s: float) -> None:
        """One more request on this instance."""
        self.busy_until_s[position] = max(float(self.busy_until_s[position]), at) + prefill_s
        self.assigned[position] += 1

    def release(self, position: int, at: float) -> None:
        """A request has left this instance; an idle one owes nothing, whatever had been estimated."""
        self.assigned[position] -= 1
        if self.assigned[position] == 0:
            self.busy_until_s[position] = at
