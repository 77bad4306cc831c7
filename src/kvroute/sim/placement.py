"""Admission, turns and deadlines of simulated requests: the gateway's queues, by the same code, in virtual time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvroute.control import Backlog, QueuedRequest, RequestQueue, WaitingRequest
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


class Admission(Protocol):
    """Limits on the number of requests in flight and waiting."""

    def arrive(self, request: int, now: float) -> float | str | None:
        """Process an arrival. None: the request is admitted; a number: it waits, at most until then; text: it is
        refused, and why."""
        ...

    def leave(self, request: int, now: float) -> Sequence[int]:
        """Remove a request that is over, and return those that are admitted now."""
        ...

    def expire(self, now: float) -> tuple[Sequence[int], str]:
        """Remove and return the requests that have waited too long, and why they are refused."""
        ...


@dataclass(frozen=True, slots=True)
class SimulatedTenancy:
    """The tenants of a run."""

    tenants: tuple[Tenant, ...]
    of_request: Sequence[int]
    """Index into `tenants` of each request of the trace."""
    work_s: float | None = None
    """Predicted work on every prefill instance from which on requests wait; None: none waits."""
    running: int | None = None
    """Number of requests on the instances from which on requests wait; None: all batch slots."""
    admission: Admission | None = None
    """None: every request is admitted at once."""
    wait_max_s: float = math.inf
    """Longest time that an admitted request waits for its turn."""


class BacklogView(Protocol):
    """What the queue asks a core."""

    def backlog(self, model: str, at: float) -> Backlog | None:
        """See `Control.backlog`."""
        ...

    def work_s(self, request: Request, at: float, output_tokens: float) -> float:
        """See `Control.work_s`."""
        ...


class PlacementTurns:
    """Requests that have arrived and wait for their turn."""

    def __init__(
        self,
        tenancy: SimulatedTenancy,
        core: BacklogView,
        agenda: Agenda,
        place: Callable[[Request, float | None], None],
        refuse: Callable[[int, str], None],
    ) -> None:
        """Args: `place` decides on a request with the time that is left for its first token; `refuse` ends a request,
        and is given the reason."""
        self._tenancy, self._core, self._agenda, self._place = tenancy, core, agenda, place
        self._refuse = refuse
        self._queue = RequestQueue()
        self._unadmitted: dict[int, Request] = {}
        self._deadlines: dict[int, float] = {}
        """Time by which the first token of each request must come, until it is placed."""
        self._requests: dict[int, Request] = {}
        self.placed_s: dict[int, float] = {}
        """Time at which each request in progress was placed."""
        self._output_tokens = _FIRST_OUTPUT_TOKENS
        self._entering: deque[int] = deque()
        """Requests that have just been admitted, and are not placed yet."""
        self._check_planned = self._pumping = self._is_entering = False

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return len(self._queue) + len(self._unadmitted)

    def arrive(self, request: Request) -> None:
        """Admit a request, and place it now or in its turn."""
        tenancy, now = self._tenancy, self._agenda.now
        ttft_max_s = tenancy.tenants[tenancy.of_request[request.id]].ttft_max_s
        self._deadlines[request.id] = math.inf if ttft_max_s is None else now + ttft_max_s
        entry = tenancy.admission.arrive(request.id, now) if tenancy.admission is not None else None
        if isinstance(entry, str):
            del self._deadlines[request.id]
            self._refuse(request.id, entry)
        elif entry is not None:
            self._unadmitted[request.id] = request
            self._agenda.at(entry, self._admission_expires)
        else:
            self._admitted(request)

    def _admitted(self, request: Request) -> None:
        tenancy, now = self._tenancy, self._agenda.now
        deadline = self._deadlines.pop(request.id)
        if tenancy.work_s is None:
            self._place(request, deadline - now if deadline < math.inf else None)
            return
        tenant = tenancy.tenants[tenancy.of_request[request.id]]
        work_s = self._core.work_s(request, now, self._output_tokens)
        waiting = WaitingRequest(request.id, tenant.name, tenant.priority, tenant.weight, work_s)
        self._requests[request.id] = request
        self._queue.push(QueuedRequest(waiting, now + tenancy.wait_max_s, deadline))
        self.place_ready()

    def _admission_expires(self, _: int, __: int) -> None:
        assert self._tenancy.admission is not None
        late, reason = self._tenancy.admission.expire(self._agenda.now)
        for request in late:
            del self._unadmitted[request], self._deadlines[request]
            self._refuse(request, reason)

    def ended(self, request: int, output_tokens: int | None) -> None:
        """Handle the end of a request. Args: `output_tokens`: None if it was rejected."""
        if output_tokens is not None:
            self._output_tokens += (output_tokens - self._output_tokens) * _OUTPUT_WEIGHT
        if self._tenancy.admission is not None:
            self._entering.extend(self._tenancy.admission.leave(request, self._agenda.now))
            self._enter()
        self.place_ready()

    def _enter(self) -> None:
        """Place the requests that are admitted; one that is refused makes room for more."""
        if self._is_entering:
            return
        self._is_entering = True
        while self._entering:
            self._admitted(self._unadmitted.pop(self._entering.popleft()))
        self._is_entering = False

    def place_ready(self) -> None:
        """Place waiting requests as far as there is room."""
        if self._pumping or not len(self._queue):
            return
        self._pumping = True
        now = self._agenda.now
        for late in self._queue.expire(now):
            request = self._requests.pop(late.waiting.number)
            if late.hopeless_at_deadline:
                self._place(request, late.deadline - now)
            else:
                self._refuse(request.id, "the gateway is full: the request has waited too long for its turn")
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
        self.place_ready()
