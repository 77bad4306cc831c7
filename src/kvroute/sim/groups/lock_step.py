"""Data-parallel ranks that step together: an iteration of a group takes the time of its slowest rank.

With a mixture of experts, the ranks of an engine exchange tokens in every layer, so all of them run each iteration. A
rank without requests runs one with a dummy token (vLLM's `execute_dummy_batch`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvroute.sim.agenda import Agenda
from kvroute.sim.groups.pipelines import PipelinePrompt
from kvroute.sim.instances import DecodeInstance, DecodeStep
from kvroute.topology import Cluster
from kvroute.types import InputError


def lock_step_groups(cluster: Cluster, *, all_reducing: Mapping[int, object], layerwise: bool) -> list[tuple[int, ...]]:
    """Return the instances of each group that steps together: an expert-parallel group, or the ranks of an engine.

    Args:
        cluster: the cluster.
        all_reducing: instances whose all-reduces share links.
        layerwise: KV caches are sent while they are computed.

    Raises:
        InputError: there is no such group, or it has what is not modelled in lock-step.
    """
    groups: dict[str, list[int]] = {}
    for index, instance in enumerate(cluster.instances):
        if instance.ep_group:
            groups.setdefault(instance.ep_group, []).append(index)
    where = "lock_step"
    if not groups:
        what = f"no engine of {cluster.name} has data-parallel ranks"
        raise InputError(what, where=where, hint="add `dp: 8` to instances, or simulate without lock-step")
    if layerwise:
        raise InputError("layer-wise transfers are not modelled in lock-step", where=where, hint="use transfer: serial")
    for name, indices in groups.items():
        if any(index in all_reducing for index in indices):
            what = f"{name} has all-reduces on shared links, which are not modelled in lock-step"
            raise InputError(what, where=where, hint="remove `all_reduce` from its instances")
        schedulers = [cluster.timing[cluster.instances[index].timing].scheduler for index in indices]
        if any(scheduler.step_tokens is not None or scheduler.transfers != "at-once" for scheduler in schedulers):
            what = f"{name} has a timing with `scheduler`, which is not modelled in lock-step"
            raise InputError(what, where=where, hint="remove `scheduler` from its timing; see `lock_step_tokens`")
        if any(cluster.instances[index].pp > 1 for index in indices):
            what = f"{name} has pipeline stages, which are not modelled in lock-step"
            raise InputError(what, where=where, hint="use pp: 1")
    return [tuple(indices) for indices in groups.values()]


@dataclass(slots=True, eq=False)
class DecodeRanks:
    """Decode iterations of the ranks of one group."""

    members: tuple[int, ...]
    """Indices of its instances."""
    instances: Mapping[int, DecodeInstance]
    """Those of the run that decode, by index."""
    agenda: Agenda
    boundary: Callable[[int], tuple[DecodeStep, float | None]]
    """Processes an iteration boundary of an instance now; returns None as the second value if it is idle."""
    first_tokens: Callable[[tuple[int, ...], float, float], None]
    """Records (requests, time of their first token, duration of that iteration)."""
    _running: bool = False
    _began_s: float = -1.0
    """Start of the iteration in progress."""
    _admitted: list[tuple[int, ...]] = field(default_factory=list)
    """Requests whose first iteration it is, by rank and time of admission."""
    _version: int = 0
    """Version of the plan: a planned step of an older version is ignored."""

    def wake(self) -> None:
        """Take a new request of a rank into account: into the iteration that begins now, if any or if no rank had a
        request, otherwise into the next one."""
        now = self.agenda.now
        if not self._running or self._began_s == now:
            self._running = True
            self._plan(now, 0)

    def _plan(self, at: float, iterations: int) -> None:
        self._version += 1
        self.agenda.at(at, self._step, self._version, iterations)

    def _step(self, version: int, iterations: int) -> None:
        """Begin an iteration. Args: `iterations` that have ended since the last step: 1, or 0 if the step only adds
        requests at the same time."""
        if version != self._version:
            return
        if iterations:
            self._admitted.clear()
        seconds, self._running = 0.0, False
        for index in self.members:
            decode = self.instances.get(index)
            if decode is None:  # it prefills
                continue
            decode.planned_steps = iterations if decode.batch else 0
            step, wake_s = self.boundary(index)
            self._admitted.append(step.admitted)
            self._running |= wake_s is not None
            seconds = max(seconds, decode.time.seconds(max(decode.batch, 1), max(decode.context_tokens, 1)))
        if not self._running:
            self._admitted.clear()
            return
        self._began_s = self.agenda.now
        for requests in self._admitted:
            self.first_tokens(requests, self._began_s + seconds, seconds)
        self._plan(self._began_s + seconds, 1)


@dataclass(slots=True, eq=False)
class _Queued:
    """A prompt of one rank."""

    prompt: PipelinePrompt
    left: int
    """Tokens that are not computed yet."""
    begun: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """What an iteration computes of a prompt."""

    rank: int
    queued: _Queued
    tokens: int
    seconds: float

    @property
    def ends(self) -> bool:
        """Whether it is the last part of the prompt."""
        return self.tokens == self.queued.left


@dataclass(slots=True, eq=False)
class PrefillRanks:
    """Prompts of the ranks of one group, first come, first served on each rank.

    In an iteration every rank computes tokens from its queue, up to `batch_tokens`, one prompt after the other. A rank
    that needs less time than the slowest one takes proportionally longer for each of its prompts.
    """

    agenda: Agenda
    batch_tokens: int
    """Largest number of tokens of a rank in one iteration."""
    queues: Sequence[deque[_Queued]]
    """[rank]: prompts that have not ended."""
    _parts: list[_Part] = field(default_factory=list)
    """What the iteration in progress computes; empty: all ranks are idle, or an iteration begins now."""
    _began_s: float = -1.0
    _version: int = 0
    """See `DecodeRanks`."""

    @classmethod
    def of(cls, agenda: Agenda, batch_tokens: int, ranks: int) -> PrefillRanks:
        """Return idle ranks."""
        return cls(agenda, batch_tokens, [deque() for _ in range(ranks)])

    def submit(self, rank: int, prompt: PipelinePrompt) -> None:
        """Add a prompt now: to the iteration that begins now, if any or if all ranks were idle, otherwise to a later
        one."""
        self.queues[rank].append(_Queued(prompt, prompt.tokens))
        if not self._parts or self._began_s == self.agenda.now:
            self._version += 1
            self.agenda.at(self.agenda.now, self._begin, self._version)

    def _begin(self, version: int, _: int) -> None:
        if version != self._version:
            return
        by_rank = [self._batch(rank) for rank in range(len(self.queues))]
        self._parts = [part for parts in by_rank for part in parts]
        if not self._parts:
            return
        self._version += 1
        self._began_s = now = self.agenda.now
        own_s = [sum(part.seconds for part in parts) for parts in by_rank]
        ends_s, number = now + max(own_s), 0
        for parts, seconds in zip(by_rank, own_s, strict=True):
            stretch, at = max(own_s) / seconds if seconds else 1.0, now
            for part in parts:
                self.agenda.at(min(at, ends_s), self._part_begins, self._version, number)
                at += part.seconds * stretch
                self.agenda.at(min(at, ends_s), self._part_ends, self._version, number)
                number += 1
        self.agenda.at(ends_s, self._end, self._version)

    def _batch(self, rank: int) -> list[_Part]:
        """Return what a rank computes in the iteration that begins now."""
        parts, room = [], self.batch_tokens
        for queued in self.queues[rank]:
            if not room:
                break
            tokens, whole = min(queued.left, room), queued.prompt.tokens
            parts.append(_Part(rank, queued, tokens, queued.prompt.seconds * (tokens / whole if whole else 1.0)))
            room -= tokens
        return parts

    def _part_begins(self, version: int, number: int) -> None:
        queued = self._parts[number].queued if version == self._version else None
        if queued is not None and not queued.begun:
            queued.begun = True
            queued.prompt.begun(queued.prompt.number, 1)

    def _part_ends(self, version: int, number: int) -> None:
        if version != self._version:
            return
        part = self._parts[number]
        ends = part.ends
        part.queued.left -= part.tokens
        if ends:
            prompt = self.queues[part.rank].popleft().prompt
            prompt.ended(prompt.number)

    def _end(self, version: int, _: int) -> None:
        if version != self._version:
            return
        self._parts = []
        self._version += 1
        self.agenda.at(self.agenda.now, self._begin, self._version)


@dataclass(frozen=True, slots=True, eq=False)
class RankQueue:
    """The prompts of one rank; it takes the place of the rank's `PrefillPipeline`."""

    ranks: PrefillRanks
    rank: int

    def submit(self, prompt: PipelinePrompt) -> None:
        """Add a prompt now."""
        self.ranks.submit(self.rank, prompt)
