"""Iterations that compute and reduce tensors in turn: their all-reduces are flows beside KV transfers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from kvroute.collectives import IterationTraffic
from kvroute.sim.agenda import Agenda
from kvroute.sim.delivery import Delivery
from kvroute.sim.metrics import AllReduceCost
from kvroute.types import FloatArray, Role

Ended: TypeAlias = Callable[[], None]
SliceEnded: TypeAlias = Callable[[int], None]
_ROUNDING = 1e-9
_ULPS = 16


@dataclass(slots=True, eq=False)
class _Iteration:
    """An iteration in progress."""

    phase: Role
    traffic: IterationTraffic
    tokens: int
    seconds: float
    """Its time on an idle network."""
    began_s: float
    ended: Ended
    slice_ended: SliceEnded | None
    slices: int
    slices_done: int = 0
    sent_s: float = 0.0
    """Start of the flows of the current slice."""
    delay_s: float = 0.0
    """Time that it has lost to other traffic."""


@dataclass(slots=True)
class _Totals:
    """Sums over the iterations of one phase that have ended."""

    iterations: int = 0
    seconds: float = 0.0
    reduced_s: float = 0.0
    idle_s: float = 0.0
    network_bytes: float = 0.0

    def add(self, iteration: _Iteration, now: float) -> None:
        idle_s = iteration.traffic.idle_s(iteration.tokens)
        self.iterations += 1
        self.seconds += now - iteration.began_s
        self.reduced_s += idle_s + iteration.delay_s
        self.idle_s += idle_s
        self.network_bytes += iteration.tokens * float(iteration.traffic.link_bytes.sum())

    def cost(self) -> AllReduceCost:
        return AllReduceCost(
            iterations=self.iterations,
            share=self.reduced_s / self.seconds if self.seconds else None,
            slowdown=self.reduced_s / self.idle_s if self.idle_s else None,
            network_bytes=self.network_bytes,
        )


@dataclass(slots=True)
class Iterations:
    """Runs each iteration in equal slices: a slice computes, then runs its part of the all-reduces as one set of flows.

    On an idle network an iteration takes the time of the timing model, whatever the number of slices. Other traffic
    makes it longer, never shorter.
    """

    agenda: Agenda
    delivery: Delivery
    advance: Callable[[], None]
    """Moves bytes up to now."""
    slice_s: float
    """Longest slice."""
    carried_bytes: FloatArray
    """[link]: bytes of all-reduces so far, counted at the end of each slice."""
    totals: dict[Role, _Totals] = field(default_factory=lambda: {"prefill": _Totals(), "decode": _Totals()})
    _running: dict[int, _Iteration] = field(default_factory=dict)
    _started: int = 0

    def start(
        self,
        phase: Role,
        traffic: IterationTraffic,
        tokens: int,
        seconds: float,
        ended: Ended,
        slice_ended: SliceEnded | None = None,
    ) -> None:
        """Start an iteration now.

        Args:
            phase: what it counts as.
            traffic: its all-reduces.
            tokens: tokens that it computes; without any it has no all-reduces.
            seconds: its time by the timing model, all-reduces on an idle network included.
            ended: called at its end.
            slice_ended: called at the end of each slice but the last one, with the number of slices done.
        """
        now, number = self.agenda.now, self._started
        seconds = max(seconds, traffic.idle_s(tokens))
        slices = self.slices_of(traffic, seconds)
        self._running[number] = _Iteration(phase, traffic, tokens, seconds, now, ended, slice_ended, slices)
        self._started += 1
        if tokens:
            self.agenda.at(now + self._compute_s(self._running[number]), self._send, number)
        else:
            self.agenda.at(now + seconds, self._end, number)

    def slices_of(self, traffic: IterationTraffic, seconds: float) -> int:
        """Return the number of slices of an iteration that takes `seconds` on an idle network."""
        return max(math.ceil(min(seconds / self.slice_s, traffic.count)), 1)

    def costs(self) -> dict[str, AllReduceCost]:
        """Return the cost of all-reduces of iterations that have ended, by phase; phases without any are left out."""
        return {phase: totals.cost() for phase, totals in self.totals.items() if totals.iterations}

    def _compute_s(self, iteration: _Iteration) -> float:
        """Return the time in which a slice computes."""
        return (iteration.seconds - iteration.traffic.idle_s(iteration.tokens)) / iteration.slices

    def _send(self, number: int, _: int) -> None:
        """Start the all-reduces of a slice."""
        iteration = self._running[number]
        self.advance()
        iteration.sent_s = self.agenda.now
        if not iteration.traffic.flows:  # a pipeline stage on links that nothing else uses ends as planned
            self._slice_ends(number, iteration)
            return
        self.delivery.fabric.reduce(number, iteration.traffic, iteration.tokens / iteration.slices)
        self.delivery.look_ahead()

    def reduced(self) -> None:
        """Continue the iterations whose flows have ended now."""
        ended = self.delivery.fabric.reduced
        for number in ended:
            self._slice_ends(number, self._running[number])
        ended.clear()

    def _slice_ends(self, number: int, iteration: _Iteration) -> None:
        now, traffic = self.agenda.now, iteration.traffic
        self.carried_bytes[traffic.links] += traffic.link_bytes * (iteration.tokens / iteration.slices)
        idle_s = traffic.s_per_token * iteration.tokens / iteration.slices
        late_s = now - iteration.sent_s - idle_s
        if late_s > max(_ROUNDING * idle_s, _ULPS * math.ulp(now)):
            iteration.delay_s += late_s
        iteration.slices_done += 1
        done = iteration.slices_done
        at = iteration.began_s + iteration.seconds * done / iteration.slices + iteration.delay_s
        if done == iteration.slices:
            self.agenda.at(max(now, at), self._end, number)
            return
        if iteration.slice_ended is not None:
            self.agenda.at(max(now, at), self._progressed, number, done)
        self.agenda.at(max(now, at + self._compute_s(iteration)), self._send, number)

    def _progressed(self, number: int, done: int) -> None:
        slice_ended = self._running[number].slice_ended
        assert slice_ended is not None
        slice_ended(done)

    def _end(self, number: int, _: int) -> None:
        iteration = self._running.pop(number)
        self.totals[iteration.phase].add(iteration, self.agenda.now)
        iteration.ended()
