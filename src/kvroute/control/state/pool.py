"""The instances that serve one model: their load, memory and health, in arrays that a policy reads in place."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec
import numpy as np

from kvroute.control.learning.observed_delays import ObservedDelays
from kvroute.control.state.kernels import work_ahead
from kvroute.control.state.slow_start import SlowStart
from kvroute.llm import Model
from kvroute.policies.foresight.sight import RECENT_S, recent_s
from kvroute.timing import PrefillTime, prefill_each_s, step_base_s
from kvroute.types import BoolArray, Candidates, FloatArray, Instance, IntArray, Request, TimingSpec

_MEAN_WEIGHT = 0.1
"""Weight of the newest booking in the mean prefill time, which prices the requests of other routers."""
_SHARE_MAX = 0.9
"""Upper bound of a share: with more, decodes beside the prompts would hardly advance."""


@dataclass(slots=True)
class PromptShare:
    """Booked seconds of n instances, fading exponentially, as a share of the time in which they fade."""

    work_s: FloatArray
    since_s: float = -1.0
    """Time of the first prompt; below 0: there was none."""
    at_s: FloatArray = field(init=False)
    """Time at which each `work_s` was booked last."""

    def __post_init__(self) -> None:
        self.at_s = np.zeros(len(self.work_s))

    def add(self, position: int, at: float, seconds: float) -> None:
        """Count a prompt that is booked on an instance."""
        if self.since_s < 0:
            self.since_s = at
        faded = math.exp(min(float(self.at_s[position]) - at, 0.0) / RECENT_S)
        self.work_s[position] = float(self.work_s[position]) * faded + seconds
        self.at_s[position] = at

    def share(self, at: float) -> FloatArray:
        """Return the share of each instance, 0 to 0.9, [n]. Changes nothing."""
        faded: FloatArray = self.work_s * np.exp(np.minimum(self.at_s - at, 0.0) / RECENT_S)
        faded /= recent_s(self.since_s, at)
        return np.minimum(faded, _SHARE_MAX)

    def take_over(self, old: PromptShare, here: IntArray, there: IntArray) -> None:
        """Continue with the shares of the instances that stay: at `there` before, at `here` now."""
        self.work_s[here], self.at_s[here] = old.work_s[there], old.at_s[there]
        self.since_s = old.since_s


@dataclass(slots=True)
class DecodePool:
    """Decode instances of one model, ascending by name; the position in the arrays is the candidate index.

    `batch`, `queued` and `free_kv_bytes` count our own requests, and those of other routers that an engine reports
    beyond them (the arrays `others_*`).
    """

    names: tuple[str, ...]
    ids: IntArray
    """Index of each instance in the cluster."""
    batch: IntArray
    queued: IntArray
    batch_max: IntArray
    free_kv_bytes: FloatArray
    capacity_bytes: FloatArray
    iteration_base_s: FloatArray
    iteration_per_request_s: FloatArray
    chunk_tokens: IntArray
    step_base_s: FloatArray
    """See `kvroute.timing.step_base_s`."""
    up: BoolArray
    partner: BoolArray
    """Whether an instance takes KV from others; an instance of role `both` serves only itself."""
    others_batch: IntArray
    others_queued: IntArray
    others_bytes: FloatArray
    position: dict[int, int]
    """Position of each cluster index."""
    prompts: IntArray
    """Requests whose prompt waits or is computed on an instance, because they are aggregated."""
    prompts_until_s: FloatArray
    """Time at which each instance has computed these prompts."""
    share: PromptShare
    """Share of the time spent on such prompts."""
    has_prompts: bool = False
    """Whether any of `prompts` is above 0."""
    slow_start: SlowStart = field(default_factory=SlowStart)
    sites: tuple[str, ...] = ()
    """Datacenter of each instance."""
    group: IntArray | None = None
    """See `Candidates`."""
    decisions: int = 0
    open: bool = True
    """Whether all instances are up and take KV from others, so that no mask is needed."""

    @classmethod
    def of(cls, members: list[tuple[int, Instance]], timing: dict[str, TimingSpec]) -> DecodePool:
        """The pool of `members` (cluster index, instance), without load."""
        specs = [timing[instance.timing].decode for _, instance in members]
        count = len(members)
        pool = cls(
            names=tuple(instance.name for _, instance in members),
            ids=np.array([index for index, _ in members], dtype=np.int64),
            batch=np.zeros(count, dtype=np.int64),
            queued=np.zeros(count, dtype=np.int64),
            batch_max=np.array([instance.batch_max for _, instance in members], dtype=np.int64),
            free_kv_bytes=np.array([instance.kv_capacity_bytes for _, instance in members]),
            capacity_bytes=np.array([instance.kv_capacity_bytes for _, instance in members]),
            iteration_base_s=np.array([spec.base_s for spec in specs]),
            iteration_per_request_s=np.array([spec.per_request_s for spec in specs]),
            chunk_tokens=np.array([instance.chunk_tokens for _, instance in members], dtype=np.int64),
            step_base_s=np.array([step_base_s(timing[instance.timing]) for _, instance in members]),
            up=np.ones(count, dtype=np.bool_),
            partner=np.array([instance.role != "both" for _, instance in members], dtype=np.bool_),
            others_batch=np.zeros(count, dtype=np.int64),
            others_queued=np.zeros(count, dtype=np.int64),
            others_bytes=np.zeros(count),
            position={index: position for position, (index, _) in enumerate(members)},
            prompts=np.zeros(count, dtype=np.int64),
            prompts_until_s=np.zeros(count),
            share=PromptShare(np.zeros(count)),
            sites=tuple(instance.datacenter for _, instance in members),
            group=_groups([instance.group for _, instance in members]),
        )
        pool.open = bool(pool.partner.all())
        return pool

    def candidates(
        self, request: Request, model: Model, hit_tokens: IntArray, reserve_bytes: float, usable: BoolArray | None
    ) -> Candidates:
        """The pool as the candidates of `request`. The load arrays are live: a policy must not keep them.

        `need_bytes` is stricter than NetKV's m_d >= s_eff + m_min: cached blocks that are hit must stay in memory, so
        the whole prompt and the whole response count. An instance that is not `usable` has no room for any request.
        """
        need_bytes = float(model.kv_bytes(request.input_tokens + request.max_output_tokens)) + reserve_bytes
        needs = np.empty(len(self.names))
        needs.fill(need_bytes)
        return Candidates(
            names=self.names,
            batch=self.batch,
            queued=self.queued,
            batch_max=self.batch_max,
            free_kv_bytes=self.free_kv_bytes,
            hit_tokens=hit_tokens,
            kv_bytes=model.kv_bytes(request.input_tokens, hit_tokens),
            need_bytes=needs if usable is None else np.where(usable, needs, np.inf),
            iteration_base_s=self.iteration_base_s,
            iteration_per_request_s=self.iteration_per_request_s,
            capacity_bytes=self.capacity_bytes,
            group=self.group,
        )

    def take_over(self, old: DecodePool, before: IntArray) -> IntArray:
        """Continue with the load and health of the instances that stay; new ones are down.

        Args:
            old: the pool of the cluster before.
            before: [cluster] earlier index of each instance; -1: it is new.

        Returns:
            position here of each instance of the old pool; -1: it has left.
        """
        here, there, after = _moves(self.ids, old.ids, before)
        arrays = ("batch", "queued", "free_kv_bytes", "others_batch", "others_queued", "others_bytes")
        for name in (*arrays, "prompts", "prompts_until_s"):
            getattr(self, name)[here] = getattr(old, name)[there]
        self.has_prompts = bool(self.prompts.any())
        self.share.take_over(old.share, here, there)
        self.up[:] = False
        self.up[here] = old.up[there]
        self.open = bool(self.up.all() and self.partner.all())
        self.decisions = old.decisions
        self.slow_start.take_over(old.slow_start, dict(zip(there.tolist(), here.tolist(), strict=True)))
        return after

    def set_up(self, position: int, up: bool) -> None:
        """Set whether an instance takes requests."""
        self.up[position] = up
        self.open = bool(self.up.all() and self.partner.all())

    def book(self, position: int, need_bytes: float) -> None:
        """Book one more request on this instance; it is queued first."""
        self.free_kv_bytes[position] -= need_bytes
        self.queued[position] += 1

    def admit(self, position: int) -> None:
        """Move one queued request of this instance to the batch."""
        self.queued[position] -= 1
        self.batch[position] += 1

    def release(self, position: int, need_bytes: float, *, admitted: bool) -> None:
        """Release the memory and the slot of a request."""
        (self.batch if admitted else self.queued)[position] -= 1
        self.free_kv_bytes[position] += need_bytes

    def with_prompts(self, candidates: Candidates, at: float) -> Candidates:
        """Return candidates of this pool with the prompts that are booked on its instances, if there are any."""
        if not self.has_prompts:
            return candidates
        return msgspec.structs.replace(candidates, prompts_s=self.prompts_s(at))

    def prompts_s(self, at: float) -> FloatArray:
        """Seconds until each instance has computed the prompts of its aggregated requests."""
        return np.maximum(self.prompts_until_s - at, 0.0)

    def chunks(self, tokens: IntArray) -> IntArray:
        """Number of steps over which a prompt is divided beside the batch of each instance, [n]. Args: `tokens`: those
        to compute, [n]."""
        chunks: IntArray = -(-tokens // np.maximum(self.chunk_tokens - self.batch, 1))
        return chunks

    def shared_base_s(self) -> FloatArray:
        """Seconds of a prompt's time that the batch of each instance saves, because its step has the base, [n]."""
        return np.where(self.batch > 0, self.step_base_s, 0.0)

    def beside_s(self, tokens: IntArray) -> FloatArray:
        """Seconds by which the batch of each instance makes a prompt longer: a step beside each chunk, less the base
        that both share, [n]. Args: see `chunks`."""
        step_s = self.iteration_base_s + self.iteration_per_request_s * self.batch
        return np.where(self.batch > 0, self.chunks(tokens) * step_s, 0.0) - self.shared_base_s()

    def stretch_s(self, tokens: IntArray) -> FloatArray:
        """Seconds by which a batch of one would make a prompt longer on each instance, [n]. Args: see `chunks`."""
        step_s = self.iteration_base_s + self.iteration_per_request_s
        stretch_s: FloatArray = -(-tokens // self.chunk_tokens) * step_s - self.step_base_s
        return stretch_s

    def book_prompt(self, position: int, at: float, seconds: float) -> None:
        """Book the prompt of an aggregated request."""
        self.prompts_until_s[position] = max(float(self.prompts_until_s[position]), at) + seconds
        self.prompts[position] += 1
        self.has_prompts = True
        self.share.add(position, at, seconds)

    def release_prompt(self, position: int, at: float, unfinished_s: float = 0.0) -> None:
        """Release a prompt with `unfinished_s` of work not computed. An instance without prompts has no such work left,
        whatever the estimate was."""
        self.prompts[position] -= 1
        if self.prompts[position] == 0:
            self.prompts_until_s[position] = at
            self.has_prompts = bool(self.prompts.any())
        elif unfinished_s:
            self.prompts_until_s[position] = max(float(self.prompts_until_s[position]) - unfinished_s, at)

    def measured(self, position: int, running: int, waiting: int, kv_used_share: float | None) -> None:
        """Store an engine's own load figures; load beyond our own requests counts as that of others."""
        own_batch = int(self.batch[position] - self.others_batch[position])
        own_queued = int(self.queued[position] - self.others_queued[position])
        # The engine may already run a request of ours that is still queued here, or the reverse.
        beyond = max(running + waiting - own_batch - own_queued, 0)
        others_batch = min(max(running - own_batch, 0), beyond)
        self.others_batch[position], self.batch[position] = others_batch, own_batch + others_batch
        self.others_queued[position], self.queued[position] = beyond - others_batch, own_queued + beyond - others_batch
        if kv_used_share is None:
            return
        capacity = float(self.capacity_bytes[position])
        own_bytes = capacity - float(self.free_kv_bytes[position]) - float(self.others_bytes[position])
        others_bytes = max(kv_used_share * capacity - own_bytes, 0.0)
        self.others_bytes[position] = others_bytes
        self.free_kv_bytes[position] = capacity - own_bytes - others_bytes


@dataclass(slots=True)
class PrefillPool:
    """Prefill instances of one model, ascending by name, and the time when each can begin more work."""

    names: tuple[str, ...]
    ids: IntArray
    timing: tuple[str, ...]
    """Name of each instance's timing."""
    times: dict[str, PrefillTime]
    busy_until_s: FloatArray
    """Time at which the first pipeline stage of each instance has finished its assigned work."""
    stages: FloatArray
    """Pipeline stages of each instance; every stage takes an equal part of a prompt's time."""
    assigned: IntArray
    """Number of requests assigned to each instance and not yet prefilled."""
    up: BoolArray
    others: IntArray
    """Number of requests of other routers on each instance, as the engines report them."""
    alike: dict[str, IntArray]
    """Positions of the instances with the same timing, by its name."""
    share: PromptShare
    """Share of the time spent on prompts, of one stage."""
    slow_start: SlowStart = field(default_factory=SlowStart)
    sites: tuple[str, ...] = ()
    """Datacenter of each instance."""
    decisions: int = 0
    mean_s: float = 0.0
    """Smoothed mean of the booked times of one stage; the assumed cost of each request of others."""
    position: dict[int, int] = field(default_factory=dict)
    waits: ObservedDelays = field(default_factory=lambda: ObservedDelays(least=0.0, most=1.5))
    """Waits of pairs for the start of their prefill."""
    transfers: ObservedDelays = field(default_factory=lambda: ObservedDelays(least=0.5, most=20.0))
    """Transfers of pairs, as predicted at arrival."""

    @classmethod
    def of(cls, members: list[tuple[int, Instance]], times: dict[str, PrefillTime]) -> PrefillPool:
        """The pool of `members` (cluster index, instance), without load."""
        count = len(members)
        alike: dict[str, list[int]] = {}
        for position, (_, instance) in enumerate(members):
            alike.setdefault(instance.timing, []).append(position)
        return cls(
            names=tuple(instance.name for _, instance in members),
            ids=np.array([index for index, _ in members], dtype=np.int64),
            timing=tuple(instance.timing for _, instance in members),
            times=times,
            busy_until_s=np.zeros(count),
            stages=np.array([instance.pp for _, instance in members], dtype=np.float64),
            assigned=np.zeros(count, dtype=np.int64),
            up=np.ones(count, dtype=np.bool_),
            others=np.zeros(count, dtype=np.int64),
            alike={name: np.array(positions, dtype=np.int64) for name, positions in alike.items()},
            share=PromptShare(np.zeros(count)),
            position={index: position for position, (index, _) in enumerate(members)},
            sites=tuple(instance.datacenter for _, instance in members),
        )

    def prefill_s(self, tokens: int, hit_tokens: IntArray) -> FloatArray:
        """Seconds to prefill a prompt on each instance, given its cached tokens there."""
        if len(self.alike) == 1:
            return prefill_each_s(self.times[self.timing[0]], tokens, hit_tokens)
        seconds = np.empty(len(self.ids))
        for name, members in self.alike.items():
            seconds[members] = prefill_each_s(self.times[name], tokens, hit_tokens[members])
        return seconds

    def pending_s(self, at: float) -> FloatArray:
        """Seconds of work on each instance ahead of a request that arrives now."""
        pending: FloatArray = np.empty(len(self.names))
        work_ahead(self.busy_until_s, self.others, self.mean_s, at, pending)
        return pending

    def book(self, position: int, at: float, prefill_s: float) -> None:
        """Book one more request on this instance."""
        stage_s = prefill_s / float(self.stages[position])
        self.busy_until_s[position] = max(float(self.busy_until_s[position]), at) + stage_s
        self.assigned[position] += 1
        self.share.add(position, at, stage_s)
        self.mean_s += (stage_s - self.mean_s) * (_MEAN_WEIGHT if self.mean_s else 1.0)

    def release(self, position: int, at: float, unfinished_s: float = 0.0) -> None:
        """Release a request with `unfinished_s` of work not computed. An instance without requests has no work left,
        whatever the estimate was."""
        self.assigned[position] -= 1
        if self.assigned[position] == 0:
            self.busy_until_s[position] = at
        elif unfinished_s:
            stage_s = unfinished_s / float(self.stages[position])
            self.busy_until_s[position] = max(float(self.busy_until_s[position]) - stage_s, at)

    def take_over(self, old: PrefillPool, before: IntArray) -> IntArray:
        """See `DecodePool.take_over`."""
        here, there, after = _moves(self.ids, old.ids, before)
        for name in ("busy_until_s", "assigned", "others"):
            getattr(self, name)[here] = getattr(old, name)[there]
        self.share.take_over(old.share, here, there)
        self.up[:] = False
        self.up[here] = old.up[there]
        self.decisions, self.mean_s = old.decisions, old.mean_s
        self.waits, self.transfers = old.waits, old.transfers
        self.slow_start.take_over(old.slow_start, dict(zip(there.tolist(), here.tolist(), strict=True)))
        return after

    def measured(self, position: int, running: int, waiting: int) -> None:
        """Store an engine's own load figures; load beyond our own requests counts as that of others."""
        self.others[position] = max(running + waiting - int(self.assigned[position]), 0)


def _moves(ids: IntArray, old_ids: IntArray, before: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Return the positions of the instances that stay, here and in the old pool, and for each position in the old pool
    the one here (-1: none)."""
    position = np.full(max(int(old_ids.max(initial=-1)), int(before.max(initial=-1))) + 2, -1, dtype=np.int64)
    position[old_ids] = np.arange(len(old_ids))
    there = position[before[ids]]  # index -1 is the last entry, which is -1
    here = np.flatnonzero(there >= 0)
    there = there[here]
    after = np.full(len(old_ids), -1, dtype=np.int64)
    after[there] = here
    return here, there, after


def _groups(names: list[str]) -> IntArray | None:
    """Return the number of each instance's group, or None if all are one group."""
    numbers = {name: number for number, name in enumerate(sorted(set(names)))}
    return np.array([numbers[name] for name in names], dtype=np.int64) if len(numbers) > 1 else None
