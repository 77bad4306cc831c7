"""Tensor-parallel groups that reduce one tensor after another on shared links, with a scheduler that chooses how.

Every tensor is a set of flows with max-min fair rates; it is reduced when its last flow ends. Other traffic takes a
share of a link in bursts. The scheduler gets the counters of the links from time to time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal, Protocol, TypeAlias

import numpy as np

from kvroute.collectives import CollectiveFlow
from kvroute.collectives.policy import CollectiveScheduler, Option
from kvroute.flows import FlowNetwork
from kvroute.types import FloatArray

_Event: TypeAlias = Literal["start", "phase", "burst", "counters"]
_FIRST_S = 1e-3
"""Groups start their first tensor within this time."""


class AllReduceScheduler(Protocol):
    """Decides for every tensor of every group."""

    def start(self, at: float, group: int, nbytes: float) -> tuple[int, int]:
        """Return a ticket and the number of the option."""

    def finish(self, ticket: int) -> None:
        """Record that a tensor is reduced."""

    def measured(self, at: float, counted_bytes: FloatArray) -> None:
        """Take the counters of all links."""


class SchedulerReplicas:
    """Several schedulers that know each other's tensors only since their last synchronisation, instead of one."""

    def __init__(self, schedulers: Sequence[CollectiveScheduler], every: int) -> None:
        """`every`: decisions between two synchronisations. Groups use the schedulers in turn."""
        self._schedulers, self._every = schedulers, every
        links = len(schedulers[0].loads.outstanding_bytes)
        self._own: list[FloatArray] = [np.zeros(links) for _ in schedulers]
        self._running: dict[int, tuple[int, int, Option, float]] = {}
        self._decisions = 0

    def start(self, at: float, group: int, nbytes: float) -> tuple[int, int]:
        """Decide with the group's own scheduler."""
        number = group % len(self._schedulers)
        scheduler = self._schedulers[number]
        ticket, choice = scheduler.start(at, group, nbytes)
        option = scheduler.options[group][choice]
        self._own[number][option.links] += option.share * nbytes
        self._decisions += 1
        self._running[self._decisions] = number, ticket, option, nbytes
        if self._decisions % self._every == 0:
            whole = np.maximum(sum(self._own), 0.0)
            for other in self._schedulers:
                other.loads.outstanding_bytes[:] = whole
        return self._decisions, choice

    def finish(self, ticket: int) -> None:
        """Record the end in the scheduler that has decided."""
        number, own, option, nbytes = self._running.pop(ticket)
        self._own[number][option.links] -= option.share * nbytes
        self._schedulers[number].finish(own)

    def measured(self, at: float, counted_bytes: FloatArray) -> None:
        """All schedulers see the counters."""
        for scheduler in self._schedulers:
            scheduler.measured(at, counted_bytes)


@dataclass(frozen=True, slots=True)
class TensorTraffic:
    """Tensors of the groups, and other traffic."""

    large_bytes: float = 8e6
    """Tensor of a prefill."""
    small_bytes: float = 1.2e6
    """Tensor of a decode iteration."""
    large_pause_s: float = 100e-6
    """Mean time between two tensors while a group prefills (exponential)."""
    small_pause_s: float = 400e-6
    prefill_s: float = 3e-3
    """Mean time in which a group prefills, before it decodes (exponential)."""
    decode_s: float = 7e-3
    burst_share: float = 0.75
    """Share of a link that other traffic takes in a burst."""
    burst_s: float = 5e-3
    """Mean length of a burst (exponential)."""
    background: float = 0.0
    """Bursts of a link per time without one; 0: no other traffic."""
    counters_s: float = 1e-3
    """Period of the link counters."""


@dataclass(slots=True)
class Reduced:
    """Tensors that were reduced, in the order of their ends."""

    seconds: list[float] = field(default_factory=list)
    slowdown: list[float] = field(default_factory=list)
    """Time divided by that of the same bytes at the group's `idle_s`."""
    options: list[str] = field(default_factory=list)
    nbytes: float = 0.0


@dataclass(frozen=True, slots=True)
class PricedOption:
    """An option with its flows for one byte of the tensor."""

    option: Option
    flows: tuple[CollectiveFlow, ...]

    @classmethod
    def of(cls, name: str, flows: Sequence[CollectiveFlow]) -> PricedOption:
        """Return the option that puts these flows on their links; sizes are for one byte of the tensor."""
        share: dict[int, float] = {}
        for flow in flows:
            for link in flow.links:
                share[link] = share.get(link, 0.0) + flow.nbytes
        links = np.array(sorted(share), dtype=np.int64)
        return cls(Option(name, links, np.array([share[link] for link in links.tolist()])), tuple(flows))

    def idle_s(self, capacity_bytes_per_s: FloatArray) -> float:
        """Return the time of one byte on idle links: flows of one option share no link in the same direction."""
        return float((self.option.share / capacity_bytes_per_s[self.option.links]).max())


class AllReduceSimulation:
    """One run; the same arguments give the same result."""

    def __init__(
        self,
        priced_options: Sequence[Sequence[PricedOption]],
        idle_s: Sequence[float],
        capacity_bytes_per_s: FloatArray,
        scheduler: AllReduceScheduler,
        traffic: TensorTraffic,
        seed: int,
        shared: Sequence[int],
    ) -> None:
        """Args:

        priced_options: options of each group with their flows.
        idle_s: time of one byte by which each group's times are divided.
        capacity_bytes_per_s: by link.
        scheduler: has the same options.
        traffic: tensors and bursts.
        seed: of sizes, pauses and bursts, which do not depend on the scheduler's choices.
        shared: links that other traffic uses.
        """
        self._priced_options, self._capacity, self._scheduler, self._traffic = (
            priced_options,
            capacity_bytes_per_s,
            scheduler,
            traffic,
        )
        self._network = FlowNetwork(capacity_bytes_per_s)
        self._draws = [np.random.default_rng([seed, group]) for group in range(len(priced_options))]
        self._bursts = {link: np.random.default_rng([seed, 1_000 + link]) for link in shared}
        self._prefilling = [draw.random() < 0.3 for draw in self._draws]
        self._busy: dict[int, float] = {}
        """Links with a burst, and its beginning since the last counters."""
        self._counted: FloatArray = np.zeros(len(capacity_bytes_per_s))
        self._events: list[tuple[float, int, _Event, int]] = []
        self._flow_group: dict[int, int] = {}
        self._left: dict[int, int] = {}
        """Flows of the group's tensor that have not ended."""
        self._current: dict[int, tuple[float, float, int, PricedOption]] = {}
        """By group: start, bytes, ticket, way."""
        self._idle_s = idle_s
        self._flows = self._order = 0
        self.reduced = Reduced()

    def run(self, end_s: float) -> Reduced:
        """Run until `end_s`, and return the tensors reduced until then."""
        traffic = self._traffic
        for group, draw in enumerate(self._draws):
            self._plan(float(draw.random()) * _FIRST_S, "start", group)
            self._plan(self._phase_s(group), "phase", group)
        if traffic.background:
            for link, draw in self._bursts.items():
                self._plan(float(draw.exponential(traffic.burst_s / traffic.background)), "burst", link)
        self._plan(traffic.counters_s, "counters", 0)
        while self._events:
            upcoming = self._network.next_finish()
            at = self._events[0][0]
            if upcoming is not None and upcoming[0] <= at:
                at = upcoming[0]
            if at > end_s:
                break
            for flow in self._network.advance(at):
                self._ended(at, self._flow_group.pop(flow))
            while self._events and self._events[0][0] <= at:
                _, _, event, number = heappop(self._events)
                getattr(self, f"_{event}")(at, number)
        return self.reduced

    def _plan(self, at: float, event: _Event, number: int) -> None:
        self._order += 1
        heappush(self._events, (at, self._order, event, number))

    def _phase_s(self, group: int) -> float:
        mean_s = self._traffic.prefill_s if self._prefilling[group] else self._traffic.decode_s
        return float(self._draws[group].exponential(mean_s))

    def _phase(self, at: float, group: int) -> None:
        self._prefilling[group] = not self._prefilling[group]
        self._plan(at + self._phase_s(group), "phase", group)

    def _burst(self, at: float, link: int) -> None:
        traffic, draw = self._traffic, self._bursts[link]
        if link in self._busy:
            self._count_burst(at, link)
            del self._busy[link]
            left, gap_s = 1.0, traffic.burst_s / traffic.background
        else:
            self._busy[link] = at
            left, gap_s = 1.0 - traffic.burst_share, traffic.burst_s
        self._network.set_capacity(link, float(self._capacity[link]) * left)
        self._plan(at + float(draw.exponential(gap_s)), "burst", link)

    def _count_burst(self, at: float, link: int) -> None:
        self._counted[link] += (at - self._busy[link]) * self._traffic.burst_share * float(self._capacity[link])
        self._busy[link] = at

    def _counters(self, at: float, _number: int) -> None:
        for link in self._busy:
            self._count_burst(at, link)
        self._scheduler.measured(at, self._counted)
        self._counted = np.zeros_like(self._counted)
        self._plan(at + self._traffic.counters_s, "counters", 0)

    def _start(self, at: float, group: int) -> None:
        nbytes = self._traffic.large_bytes if self._prefilling[group] else self._traffic.small_bytes
        ticket, choice = self._scheduler.start(at, group, nbytes)
        priced = self._priced_options[group][choice]
        self._current[group] = at, nbytes, ticket, priced
        self._left[group] = len(priced.flows)
        for flow in priced.flows:
            self._flows += 1
            self._flow_group[self._flows] = group
            self._network.start(self._flows, flow.links, flow.nbytes * nbytes)

    def _ended(self, at: float, group: int) -> None:
        self._left[group] -= 1
        if self._left[group]:
            return
        began, nbytes, ticket, priced = self._current.pop(group)
        self._scheduler.finish(ticket)
        self._counted[priced.option.links] += priced.option.share * nbytes
        self.reduced.seconds.append(at - began)
        self.reduced.slowdown.append((at - began) / (self._idle_s[group] * nbytes))
        self.reduced.options.append(priced.option.name)
        self.reduced.nbytes += nbytes
        traffic = self._traffic
        pause_s = traffic.large_pause_s if self._prefilling[group] else traffic.small_pause_s
        self._plan(at + float(self._draws[group].exponential(pause_s)), "start", group)
