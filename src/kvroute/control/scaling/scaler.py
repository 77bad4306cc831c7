"""How many prefill and decode instances each model needs, from observed traffic, and which ones start, stop or switch.

It only decides. The driver starts instances, drains those that stop, and reports `ScaleEnded` when that is over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from kvroute.control.scaling.demand import DemandWindow
from kvroute.control.scaling.scaled_fleet import ScaledFleet, uncached_s
from kvroute.control.view import ClusterView
from kvroute.policies.fleet.autoscaling import ScalingSpec, Stabiliser, one_switch
from kvroute.policies.fleet.replicas import (
    SCALED_ROLES,
    Demand,
    ReplicaNeed,
    ReplicaTarget,
    RoleNeed,
    ScaledRole,
    needed_replicas,
)
from kvroute.types import Replicas, Request, ScaleIn, ScaleOut, SwitchRole

_FIRST_CHECK_S = 30.0
"""Least time in which a discovered engine may pass its first health check before another one is started."""
ScalingDecision: TypeAlias = Replicas | ScaleIn | ScaleOut | SwitchRole


@dataclass(slots=True)
class _Scaled:
    """One model."""

    window: DemandWindow
    roles: dict[ScaledRole, Stabiliser]
    ordered: dict[ScaledRole, tuple[float, int]] = field(default_factory=dict)
    """Time and number of the last order of instances that have no name yet."""
    switched_at: float | None = None
    last: Replicas | None = None


class Scaling:
    """Autoscaling of every model of a core."""

    def __init__(self, spec: ScalingSpec) -> None:
        self.spec = spec
        self._models: dict[str, _Scaled] = {}
        self._leaving: set[str] = set()
        """Instances that drain before they stop."""
        self._stopped: set[str] = set()
        self._starting: set[str] = set()
        self._joined: dict[str, float] = {}
        """Times at which discovered engines have joined; they count as serving for the time of their start."""

    @property
    def last(self) -> dict[str, Replicas]:
        """The last result for each model, for displays."""
        return {name: scaled.last for name, scaled in self._models.items() if scaled.last is not None}

    @property
    def stopped(self) -> frozenset[str]:
        """Instances that drain before they stop, or have stopped."""
        return frozenset(self._leaving | self._stopped)

    def arrived(self, at: float, view: ClusterView, model: str, request: Request, service_s: float) -> None:
        """Count a request. Args: `service_s`: time of its prefill; 0: it could not be placed."""
        if not service_s:
            service_s = uncached_s(view, model, request)
        self._of(model).window.arrived(
            at, service_s, request.input_tokens, float(view.models[model].kv_bytes(request.input_tokens))
        )

    def arrived_elsewhere(self, at: float, requests: int) -> None:
        """Count requests of other gateways, divided over the models as the own ones are."""
        for scaled in self._models.values():
            scaled.window.arrived_elsewhere(at, requests)

    def answered(self, at: float, model: str, output_tokens: int) -> None:
        """Count a response."""
        self._of(model).window.answered(at, output_tokens)

    def ended(self, instance: str, *, serves: bool) -> None:
        """Record that an instance serves from now on, or has stopped."""
        self._leaving.discard(instance)
        self._starting.discard(instance)
        (self._stopped.discard if serves else self._stopped.add)(instance)

    def changed(self, at: float, view: ClusterView, joined: Collection[str]) -> None:
        """Forget the instances that are not in the cluster any more. Args: `joined`: names of new ones."""
        names = {instance.name for instance in view.cluster.instances}.difference(joined)
        for some in (self._leaving, self._stopped, self._starting):
            some &= names
        self._joined = {name: when for name, when in self._joined.items() if name in names} | dict.fromkeys(joined, at)

    def review(self, at: float, view: ClusterView, queued: int) -> tuple[ScalingDecision, ...]:
        """Return the desired numbers, and what to do about them. Args: `queued` requests that wait for admission."""
        limit_s = at - max(self.spec.startup_s, _FIRST_CHECK_S)
        self._joined = {name: when for name, when in self._joined.items() if when > limit_s}
        starting, decisions = self._starting | self._joined.keys(), list[ScalingDecision]()
        for model in sorted(view.models):
            fleet = ScaledFleet.of(at, view, model, self._leaving, starting, self._stopped)
            if fleet is None:
                continue
            replicas = self._desired(at, view, model, fleet, queued)
            decisions.append(replicas)
            if self.spec.manages == "instances":
                decisions += self._moves(at, model, fleet, replicas)
            elif self.spec.manages == "roles":
                decisions += self._switches(at, view, model, fleet, replicas)
        return tuple(decisions)

    def _of(self, model: str) -> _Scaled:
        scaled = self._models.get(model)
        if scaled is None:
            roles = {role: Stabiliser(self.spec.scale_in_s) for role in SCALED_ROLES}
            scaled = self._models[model] = _Scaled(DemandWindow(self.spec.window_s), roles)
        return scaled

    def _desired(self, at: float, view: ClusterView, model: str, fleet: ScaledFleet, queued: int) -> Replicas:
        scaled, target = self._of(model), self.spec.target
        if scaled.last is None:
            for role, stabiliser in scaled.roles.items():
                stabiliser.begin(at, len(fleet.serving[role]))
        grown = view.models[model].kv_bytes(1025) - view.models[model].kv_bytes(1)
        demand = scaled.window.demand(at, self.spec.startup_s, float(grown) / 1024.0)
        if demand is None:
            need = keeps = _idle(target)
            rate_per_s = 0.0
        else:
            demand = _with_backlog(demand, fleet, queued)
            need = needed_replicas(target, demand, fleet.model)
            rate_per_s = demand.rate_per_s
            keeps = needed_replicas(target, demand.at(rate_per_s * (1.0 + self.spec.margin)), fleet.model)
        counts = {
            role: scaled.roles[role].update(at, need.of(role).replicas, keeps.of(role).replicas)
            for role in SCALED_ROLES
        }
        scaled.last = Replicas(
            model=model,
            prefill=counts["prefill"],
            decode=counts["decode"],
            needed=(need.prefill.replicas, need.decode.replicas),
            reasons=(need.prefill.reason, need.decode.reason),
            serving=(len(fleet.serving["prefill"]), len(fleet.serving["decode"])),
            rate_per_s=rate_per_s,
            attainment=need.attainment,
        )
        return scaled.last

    def _moves(self, at: float, model: str, fleet: ScaledFleet, replicas: Replicas) -> Iterable[ScaleIn | ScaleOut]:
        """Stop the instances beyond the desired number, and start those that are missing."""
        for role in SCALED_ROLES:
            serving = fleet.serving[role]
            desired = replicas.prefill if role == "prefill" else replicas.decode
            if desired < len(serving):
                for name in fleet.removable[role][: len(serving) - desired]:
                    self._leaving.add(name)
                    yield ScaleIn(instance=name, model=model, role=role, replicas=desired)
            missing = desired - len(serving)
            for name in fleet.startable[role][: max(missing, 0)]:
                self._starting.add(name)
                self._stopped.discard(name)
                yield ScaleOut(instance=name, model=model, role=role, replicas=desired)
            if missing > len(fleet.startable[role]) and self._orders(at, model, role, desired):
                yield ScaleOut(instance="", model=model, role=role, replicas=desired)

    def _orders(self, at: float, model: str, role: ScaledRole, replicas: int) -> bool:
        """Whether to order instances without names: once for each number, and again if they do not come."""
        ordered = self._of(model).ordered
        before = ordered.get(role)
        if before is not None and before[1] == replicas and at - before[0] < 2.0 * self.spec.startup_s + 1.0:
            return False
        ordered[role] = (at, replicas)
        return True

    def _switches(
        self, at: float, view: ClusterView, model: str, fleet: ScaledFleet, replicas: Replicas
    ) -> tuple[SwitchRole, ...]:
        """Switch one instance to the role that lacks more, if that relieves it."""
        scaled = self._of(model)
        early = scaled.switched_at is not None and at - scaled.switched_at < self.spec.scale_in_s
        if early or any(role is None for role in view.roles):
            return ()
        prefill, decode = (len(fleet.serving[role]) for role in SCALED_ROLES)
        role = one_switch((replicas.prefill, replicas.decode), prefill, prefill + decode, self.spec.target)
        candidates = fleet.removable["decode" if role == "prefill" else "prefill"] if role is not None else []
        if role is None or not candidates:
            return ()
        scaled.switched_at = at
        return (SwitchRole(candidates[0], role),)


def _with_backlog(demand: Demand, fleet: ScaledFleet, queued: int) -> Demand:
    """Return the demand with work that waits: requests that wait for admission need both roles."""
    mean_s = float(demand.share @ demand.service_s)
    return replace(
        demand,
        prefill_backlog_s=fleet.pending_s + queued * mean_s,
        decode_backlog=float(fleet.queued + queued),
    )


def _idle(target: ReplicaTarget) -> ReplicaNeed:
    """The need without traffic: the least number of both roles."""
    prefill, decode = (
        RoleNeed(replicas=max(bounds.least, 0), reason="minimum", utilisation=0.0, attainment=1.0)
        for bounds in (target.prefill, target.decode)
    )
    return ReplicaNeed(prefill=prefill, decode=decode)
