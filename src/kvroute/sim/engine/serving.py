"""An engine in virtual time: steps of its ranks, one after the other, and what a request costs besides them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from kvroute.sim.agenda import Agenda
from kvroute.sim.engine.scheduler import EngineRequest, EngineSpec, PlannedStep, StepScheduler
from kvroute.timing.steps import RanksTime, StepWork


class ServingEngine:
    """Runs requests through the steps of an engine. Ranks take their steps together, as with experts on all of them.

    With asynchronous scheduling the next step is planned as soon as one starts: a prompt that arrives then waits for
    the step after the next, and the first token is known one step later than without.
    """

    def __init__(
        self,
        agenda: Agenda,
        spec: EngineSpec,
        steps: RanksTime,
        *,
        ranks: int = 1,
        answers: Callable[[EngineRequest], None] = lambda request: None,
        ends: Callable[[EngineRequest], None] = lambda request: None,
    ) -> None:
        """Start without requests.

        Args:
            agenda: the pending actions of the run.
            spec: the engine, or each of its ranks.
            steps: time of a step of all ranks.
            ranks: number of data-parallel ranks.
            answers, ends: called with a request when its client has the first token, and the last.
        """
        self._agenda, self._spec, self._steps = agenda, spec, steps
        self._answers, self._ends = answers, ends
        self.ranks = tuple(StepScheduler(spec) for _ in range(ranks))
        self._rank_of: dict[EngineRequest, StepScheduler] = {}
        self._arriving: deque[EngineRequest] = deque()
        self._under_way: deque[tuple[float, Sequence[PlannedStep | None]]] = deque()
        """Steps that are planned and have not ended, with their ends."""
        self._woken = False
        self._free_at_s = 0.0
        self.steps = 0
        """Number of steps up to now."""
        self.busy_s = 0.0
        """Time of all steps."""

    @property
    def preemptions(self) -> int:
        """Number of preemptions up to now."""
        return sum(rank.preemptions for rank in self.ranks)

    def submit(self, request: EngineRequest) -> None:
        """Take a request that its client sends now."""
        self._arriving.append(request)
        self._agenda.at(self._agenda.now + self._spec.request_s / 2, self._arrived)

    def _arrived(self, _: int, __: int) -> None:
        request = self._arriving.popleft()
        rank = min(self.ranks, key=lambda rank: rank.load)
        self._rank_of[request] = rank
        rank.add(request)
        if not self._under_way:
            self._wake()

    def abort(self, request: EngineRequest) -> bool:
        """Remove a request whose client gives up; return whether it had not ended."""
        if request in self._rank_of and self._rank_of[request].abort(request):
            del self._rank_of[request]
            request.failed = True
            return True
        return False

    def _wake(self) -> None:
        """Plan now, but after all that arrives at this time."""
        if not self._woken:
            self._woken = True
            self._agenda.at(self._agenda.now, self._plan)

    def _plan(self, _: int, __: int) -> None:
        """Plan steps until the engine has to wait for the end of one."""
        self._woken = False
        now = self._agenda.now
        while len(self._under_way) < (2 if self._spec.asynchronous else 1):
            planned = [rank.plan(now) for rank in self.ranks]
            if not any(planned):
                break
            seconds = self._steps([step.work if step else StepWork() for step in planned])
            self._free_at_s = max(now, self._free_at_s) + seconds
            self._under_way.append((self._free_at_s, planned))
            self.steps += 1
            self.busy_s += seconds
        if self._under_way:
            self._agenda.at(self._under_way[0][0], self._ended)

    def _ended(self, _: int, __: int) -> None:
        """End a step: its tokens are sent, and the next one is planned."""
        planned = self._under_way.popleft()[1]
        for rank, step in zip(self.ranks, planned, strict=True):
            if step is not None:
                self._send(rank, step)
        self._wake()

    def _send(self, rank: StepScheduler, step: PlannedStep) -> None:
        delay_s = self._spec.request_s / 2 + self._spec.streaming_request_s * step.work.decoding
        sent_s = self._agenda.now + delay_s
        for request in step.first:
            if request.first_token_s is None and not request.failed:
                request.first_token_s = sent_s
                self._answers(request)
        for request in rank.finish(step):
            request.ended_s = sent_s
            del self._rank_of[request]
            self._ends(request)
