"""Clients of an engine: when they send requests, and how long they wait."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvroute.sim.agenda import Agenda
from kvroute.sim.engine.scheduler import EngineRequest, EngineSpec
from kvroute.sim.engine.serving import ServingEngine
from kvroute.timing.steps import RanksTime
from kvroute.types import InputError


@dataclass(frozen=True, slots=True)
class LoadStage:
    """Requests at a mean rate for some time."""

    rate_per_s: float
    duration_s: float

    @property
    def requests(self) -> int:
        """Number of requests."""
        return int(self.rate_per_s * self.duration_s)


def stage_arrivals(
    stages: Sequence[LoadStage], gaps: Literal["exponential", "even"], seed: int, pause_s: float = 30.0
) -> list[list[float]]:
    """Return the times of the requests of each stage.

    Args:
        stages: one after the other.
        gaps: between requests; exponential ones are scaled so that they fill the stage, as inference-perf does.
        seed: of the random gaps.
        pause_s: time between two stages.
    """
    draw, begin_s, found = random.Random(seed), 0.0, []
    for stage in stages:
        drawn = [1.0 if gaps == "even" else draw.expovariate(1.0) for _ in range(stage.requests)]
        scale, at, times = stage.duration_s / (sum(drawn) or 1.0), begin_s, []
        for gap in drawn:
            at += gap * scale
            times.append(at)
        found.append(times)
        begin_s += stage.duration_s + pause_s
    return found


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A number of clients, each of which sends its next request when the last one has ended."""

    clients: int
    first_wave_per_s: float | None = None
    """Highest rate of the first request of each client; None: all at once."""


def run_engine(
    spec: EngineSpec,
    steps: RanksTime,
    requests: Sequence[EngineRequest],
    *,
    ranks: int = 1,
    loop: ClosedLoop | None = None,
    timeout_s: float | None = None,
) -> ServingEngine:
    """Serve requests until all of them have ended; their times are in the requests.

    Args:
        spec: the engine, or each rank of it.
        steps: time of a step of all ranks.
        requests: in the order in which they are sent; with a closed loop their `arrived_s` is set.
        ranks: number of data-parallel ranks.
        loop: the clients; None: each request is sent at its `arrived_s`.
        timeout_s: time after which a client gives up; its request has failed, and the engine drops it.

    Raises:
        InputError: a request does not fit into the engine's memory.
    """
    agenda = Agenda()
    clients = _Clients(agenda, requests, timeout_s)
    engine = ServingEngine(agenda, spec, steps, ranks=ranks, ends=clients.ended)
    for request in requests:
        if request.output_tokens < 1 or not engine.ranks[0].fits(request):
            size = f"{request.input_tokens} + {request.output_tokens} tokens"
            what = f"request {request.number} of {size} does not fit into {spec.blocks} blocks of {spec.block_tokens}"
            raise InputError(what, hint="give the engine more blocks, or leave the request out")
    clients.begin(engine, loop)
    while agenda.due:
        agenda.now = agenda.due[0][0]
        agenda.act()
    return engine


class _Clients:
    """Sends requests, gives up, and in a closed loop sends the next one."""

    def __init__(self, agenda: Agenda, requests: Sequence[EngineRequest], timeout_s: float | None) -> None:
        self._agenda, self._requests, self._timeout_s = agenda, requests, timeout_s
        self._next: int | None = None
        """Index of the next request of a closed loop."""
        self._submit: Callable[[EngineRequest], None] = lambda request: None
        self._abort: Callable[[EngineRequest], bool] = lambda request: False

    def begin(self, engine: ServingEngine, loop: ClosedLoop | None) -> None:
        """Schedule the first requests: all of an open load, one of each client of a loop."""
        self._submit, self._abort = engine.submit, engine.abort
        if loop is None:
            for index, request in enumerate(self._requests):
                self._agenda.at(request.arrived_s, self._send, index)
            return
        self._next = min(loop.clients, len(self._requests))
        for index in range(self._next):
            at = index / loop.first_wave_per_s if loop.first_wave_per_s is not None else 0.0
            self._agenda.at(at, self._send, index)

    def ended(self, request: EngineRequest) -> None:
        """Send the next request of a closed loop when the client has the whole answer."""
        assert request.ended_s is not None
        self._follow(request.ended_s)

    def _follow(self, at: float) -> None:
        if self._next is not None and self._next < len(self._requests):
            self._agenda.at(at, self._send, self._next)
            self._next += 1

    def _send(self, index: int, _: int) -> None:
        request = self._requests[index]
        request.arrived_s = self._agenda.now
        self._submit(request)
        if self._timeout_s is not None:
            self._agenda.at(self._agenda.now + self._timeout_s, self._give_up, index)

    def _give_up(self, index: int, _: int) -> None:
        if self._abort(self._requests[index]):
            self._follow(self._agenda.now)
