"""Instances that start and stop during a run, as the core's autoscaling or a rule on queue lengths decides.

An instance costs from the order to start it until it has been drained. One that starts serves after its start-up time,
with an empty cache.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from kvroute.policies.fleet.replicas import SCALED_ROLES, ScaledRole
from kvroute.sim.agenda import Agenda
from kvroute.sim.fleet import Fleet
from kvroute.sim.router import Router
from kvroute.sim.settings import QueueRule, ScalingRun
from kvroute.topology import Cluster
from kvroute.types import InputError, InstanceDown, InstanceUp, KvCleared, ScaleEnded, ScaleIn, ScaleOut, ScalingDue

State: TypeAlias = Literal["serving", "starting", "draining", "stopped"]


class QueueScaler:
    """Kubernetes' horizontal autoscaler on the mean number of requests per instance of one role."""

    def __init__(self, rule: QueueRule, target: float, most: int) -> None:
        self._rule, self._target, self._most = rule, target, most
        self._advised: deque[tuple[float, int]] = deque()

    def desired(self, at: float, present: int, requests: int) -> int:
        """Return the number of instances: the highest advice of the stabilisation window, at least `present` if the
        present advice is higher. Args: `requests` on all present instances."""
        ratio = requests / max(present, 1) / self._target
        advice = present if abs(ratio - 1.0) <= self._rule.tolerance else math.ceil(present * ratio - 1e-9)
        advice = min(max(advice, 1), self._most)
        self._advised.append((at, advice))
        while self._advised[0][0] < at - self._rule.scale_in_s:
            self._advised.popleft()
        if advice >= present:
            return advice
        return min(max(count for _, count in self._advised), present)


@dataclass(slots=True)
class _Member:
    """One instance."""

    role: ScaledRole
    gpus: int
    state: State = "serving"
    since_s: float = 0.0
    gpu_s: float = 0.0


@dataclass(slots=True)
class FleetScaling:
    """The instances of a run that may start and stop."""

    cluster: Cluster
    fleet: Fleet
    router: Router
    agenda: Agenda
    settings: ScalingRun
    counts: list[tuple[float, int, int]] = field(default_factory=list)
    """Time and number of prefill and decode instances that serve, after each change."""
    _members: list[_Member] = field(default_factory=list)
    _rules: dict[ScaledRole, QueueScaler] = field(default_factory=dict)

    def begin(self) -> None:
        """Stop all instances beyond the first ones of each role. Raises InputError if there are too few."""
        first = {"prefill": self.settings.prefill, "decode": self.settings.decode}
        members = [(i, _role(instance.role)) for i, instance in enumerate(self.cluster.instances)]
        for role in SCALED_ROLES:
            most = sum(own == role for _, own in members)
            if not 1 <= first[role] <= most:
                what = f"{first[role]} {role} instances serve at the start, but the cluster has {most}"
                raise InputError(what, where="scaling", hint="start with 1 up to as many as the cluster file lists")
            if self.settings.queue is not None:
                target = self.settings.queue.prefill if role == "prefill" else self.settings.queue.decode
                self._rules[role] = QueueScaler(self.settings.queue, target, most)
        for index, role in members:
            self._members.append(_Member(role, len(self.cluster.instances[index].gpus)))
            first[role] -= 1
            if first[role] < 0:
                self._stop(index)
        self._count()
        self.fleet.on_stopped = self._stopped
        self.agenda.at(self.agenda.now + self.settings.review_s, self._review)

    def gpu_hours(self, until_s: float) -> float:
        """Return the GPU-hours of all instances up to a time."""
        running = [m.gpus * max(until_s - m.since_s, 0.0) for m in self._members if m.state != "stopped"]
        return (math.fsum(running) + math.fsum(member.gpu_s for member in self._members)) / 3600.0

    def _review(self, _: int, __: int) -> None:
        if self._rules:
            for role in SCALED_ROLES:
                self._follow_rule(role)
        else:
            for decision in self.router.handle(ScalingDue(self.agenda.now)):
                if isinstance(decision, ScaleIn):
                    self._stop(self.cluster.index(decision.instance))
                elif isinstance(decision, ScaleOut) and decision.instance:
                    self._start(self.cluster.index(decision.instance))
        self._count()
        self.agenda.at(self.agenda.now + self.settings.review_s, self._review)

    def _follow_rule(self, role: ScaledRole) -> None:
        here = self._in(role, ("serving", "starting"))
        requests = sum(self.fleet.requests(index) for index in self._in(role, ("serving",)))
        desired = self._rules[role].desired(self.agenda.now, len(here), requests)
        for index in self._in(role, ("stopped",))[: max(desired - len(here), 0)]:
            self._start(index)
        for index in self._in(role, ("serving",))[::-1][: max(len(here) - desired, 0)]:
            self._stop(index)

    def _in(self, role: ScaledRole, states: Sequence[State]) -> list[int]:
        return [i for i, member in enumerate(self._members) if member.role == role and member.state in states]

    def _start(self, index: int) -> None:
        member = self._members[index]
        assert member.state == "stopped", "only a stopped instance starts"
        member.state, member.since_s = "starting", self.agenda.now
        self.agenda.at(self.agenda.now + self.settings.startup_s, self._started, index)

    def _started(self, index: int, _: int) -> None:
        now, name = self.agenda.now, self.cluster.instances[index].name
        self._members[index].state = "serving"
        self.router.handle(ScaleEnded(now, name, serves=True))
        self.router.handle(InstanceUp(now, name))
        self._count()

    def _stop(self, index: int) -> None:
        self._members[index].state = "draining"
        self.router.handle(InstanceDown(self.agenda.now, self.cluster.instances[index].name))
        if self.fleet.stop(index):
            self._stopped(index)

    def _stopped(self, index: int) -> None:
        """Record that the last request of an instance has ended."""
        now, name, member = self.agenda.now, self.cluster.instances[index].name, self._members[index]
        member.state, member.gpu_s = "stopped", member.gpu_s + member.gpus * (now - member.since_s)
        self.fleet.empty(index)
        self.router.handle(KvCleared(now, name))
        self.router.handle(ScaleEnded(now, name, serves=False))

    def _count(self) -> None:
        prefill, decode = (len(self._in(role, ("serving",))) for role in SCALED_ROLES)
        if not self.counts or self.counts[-1][1:] != (prefill, decode):
            self.counts.append((self.agenda.now, prefill, decode))


def _role(role: str) -> ScaledRole:
    assert role != "both", "the simulator does not model role `both`"
    return "prefill" if role == "prefill" else "decode"
