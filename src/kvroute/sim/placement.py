"""Turns and deadlines of simulated requests: the gateway's queue, by the same code, in virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvroute.control import Backlog, QueuedRequest, RequestQueue, Waiting
from kvroute.sim.agenda import Agenda
from kvroute.types import Request

_CHECK_MIN_S, _CHECK_MAX_S = 0.002, 0.05
_OUTPUT_WEIGHT = 0.05
_FIRST_OUTPUT_TOKENS = 128.0
"""As in the gateway."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """What the requests of one tenant may use."""

    name: str
    weight: float = 1.0
    priority: int = 0
    ttft_max_s: float | None = None
    """Requests whose predicted time to the first token is longer are refused; None: none is."""


@dataclass(frozen=True, slots=True)
class Tenancy:
    """The tenants of a run."""

    tenants: tuple[Tenant, ...]
    of_request: Sequence[int]
    """Index into `tenants` of each request of the trace."""
    work_s: float | None = None
    """Predicted work on every prefill instance from which on requests wait; None: none waits."""
    running: int | None = None
    """Number of requests on the instances from which on requests wait; None: all batch slots."""


class BacklogView(Protocol):
    """What the queue asks a core."""

    def backlog(self, model: str, at: float) -> Backlog | None:
        """See `Control.backlog`."""
        ...

    def work_s(self, request: Request, at: float, output_tokens: float) -> float:
        """See `Control.work_s`."""
        ...


class Placement:
    """Requests that have arrived and wait for their turn."""

    def __init__(
        self,
        tenancy: Tenancy,
        core: BacklogView,
        agenda: Agenda,
        place: Callable[[Request, float | None], None],
    ) -> None:
        """Args: `place` decides on a request with the time that is left for its first token."""
        self._tenancy, self._core, self._agenda, self._place = tenancy, core, agenda, place
        self._queue = RequestQueue()
        self._requests: dict[int, Request] = {}
        self.placed_s: dict[int, float] = {}
        """Time at which each request in progress was placed."""
        self._output_tokens = _FIRST_OUTPUT_TOKENS
        self._check_planned = self._pumping = False

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return len(self._queue)

    def arrive(self, request: Request) -> None:
        """Place a request now or in its turn."""
        tenancy, now = self._tenancy, self._agenda.now
        tenant = tenancy.tenants[tenancy.of_request[request.id]]
        if tenancy.work_s is None:
            self._place(request, tenant.ttft_max_s)
            return
        work_s = self._core.work_s(request, now, self._output_tokens)
        waiting = Waiting(request.id, tenant.name, tenant.priority, tenant.weight, work_s)
        deadline = math.inf if tenant.ttft_max_s is None else now + tenant.ttft_max_s
        self._requests[request.id] = request
        self._queue.push(QueuedRequest(waiting, math.inf, deadline))
        self.pump()

    def ended(self, output_tokens: int) -> None:
        """Handle the end of a request."""
        self._output_tokens += (output_tokens - self._output_tokens) * _OUTPUT_WEIGHT
        self.pump()

    def pump(self) -> None:
        """Place waiting requests as far as there is room."""
        if self._pumping or not len(self._queue):
            return
        self._pumping = True
        now = self._agenda.now
        for late in self._queue.expire(now):
            self._place(self._requests.pop(late.waiting.number), late.deadline - now)
        while len(self._queue) and self._has_room():
            entry = self._queue.pop()
            assert entry is not None
            left_s = entry.deadline - now if entry.deadline < math.inf else None
            self._place(self._requests.pop(entry.waiting.number), left_s)
        self._pumping = False
        self._plan_check()

    def _has_room(self) -> bool:
        backlog, tenancy = self._core.backlog("", self._agenda.now), self._tenancy
        if backlog is None or not backlog.instances:
            return True
        most = tenancy.running if tenancy.running is not None else backlog.slots
        return backlog.work_s < (tenancy.work_s or math.inf) and backlog.running < most

    def _plan_check(self) -> None:
        if self._check_planned or not len(self._queue):
            return
        backlog, bound_s = self._core.backlog("", self._agenda.now), self._tenancy.work_s or 0.0
        shrinks_s = backlog.work_s - bound_s + 1e-6 if backlog is not None else 0.0
        now = self._agenda.now
        delay_s = min(max(shrinks_s, _CHECK_MIN_S), _CHECK_MAX_S, max(self._queue.next_end - now, _CHECK_MIN_S))
        self._check_planned = True
        self._agenda.at(now + delay_s, self._check)

    def _check(self, _: int, __: int) -> None:
        self._check_planned = False
        self.pump()
