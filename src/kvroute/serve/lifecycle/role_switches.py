"""Role switches at run time: requests reviews, drains instances, calls the operator's hook and reports to the core.

The control core decides which instance switches its role. The operator's hook makes the engine serve the new role.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from kvroute.serve.lifecycle.role_hook import switch_role
from kvroute.serve.observe.logs import log_event
from kvroute.serve.proxy.runtime import same_engine
from kvroute.types import Event, KvCleared, ReviewDue, Role, RoleDraining, RoleSwitched, SwitchRole

if TYPE_CHECKING:
    from kvroute.control.offload.allocation import Review
    from kvroute.serve.config.offload import RoleSwitchSection
    from kvroute.serve.proxy.runtime import ClusterRuntime

Outcome: TypeAlias = Literal["switched", "failed", "declined", "abandoned"]
"""`declined`: not tried, because there is no hook or an earlier switch failed a short time ago; `abandoned`: the
gateway shuts down or the file has changed."""

SWITCHING = "switching"
"""Reason for giving an instance no requests while its role is switched."""
_DOUBLINGS = 4


@dataclass(slots=True, eq=False)
class RoleSwitch:
    """The role switch of one instance: the instance is drained first, then the hook is called."""

    instance: str
    role: Role
    before: Role
    until: float
    """Latest time of the hook call; draining ends then at the latest."""
    hook: asyncio.Task[None] | None = None
    inherited: bool = False
    """The switch began before a reload, so the present core has no record of it."""

    @property
    def stage(self) -> Literal["draining", "hook"]:
        """The present stage."""
        return "draining" if self.hook is None else "hook"


class RoleSwitches:
    """The role switches of the current cluster; the caller runs `advance` periodically and `take_over` at a reload."""

    def __init__(self, runtime: ClusterRuntime, on_event: Callable[[Event], None]) -> None:
        """Args: `on_event` receives the event that an instance has restarted, like those of a collector."""
        self._runtime, self._on_event = runtime, on_event
        self.in_progress: dict[str, RoleSwitch] = {}
        """Role switches in progress, by instance."""
        self._ask_at = 0.0
        self._seen: Review | None = None
        self._failures, self._backs_off_until = 0, 0.0
        self._stopped = False

    def advance(self, clusters: Sequence[ClusterRuntime]) -> None:
        """Request a review if one is due, and continue the role switches. Args: `clusters` that have requests."""
        now = self._runtime.now()
        if now >= self._ask_at and not self._stopped:
            self._review(now)
        for switch in list(self.in_progress.values()):
            due = now >= switch.until or not _needed(switch.instance, clusters)
            if switch.hook is None and due:
                switch.hook = asyncio.get_running_loop().create_task(self._call(switch))

    def _review(self, now: float) -> None:
        runtime = self._runtime
        offload, offloading = runtime.settings.offload, runtime.control.offloading
        if (
            offload is None
            or offloading is None
            or any(role_switch.inherited for role_switch in self.in_progress.values())
        ):
            return
        if runtime.sharing is not None and not runtime.sharing.leads:
            return  # another gateway reviews the roles, or none can because they do not know of each other
        self._ask_at = now + float(offload.check_interval_s)
        decisions = runtime.decide(ReviewDue(now))
        review = offloading.last_review
        if review is not None and review is not self._seen:
            self._seen = review
            runtime.metrics.reviewed(review.verdict)
            _tell(review, offload.role_switch is not None)
        for decision in decisions:
            if isinstance(decision, SwitchRole):
                self.begin(decision)

    @property
    def _section(self) -> RoleSwitchSection | None:
        """The hook, of `offload` or of `autoscaling`."""
        settings = self._runtime.settings
        if settings.offload is not None:
            return settings.offload.role_switch
        return settings.autoscaling.role_switch if settings.autoscaling is not None else None

    def begin(self, decision: SwitchRole) -> None:
        """Carry out a role switch that the core has decided."""
        now = self._runtime.now()
        self._runtime.state.decided(decision, now)
        self._begin(decision, self._section, now)

    def _begin(self, decision: SwitchRole, section: RoleSwitchSection | None, now: float) -> None:
        engine = self._runtime.engines[decision.instance]
        drain_s = float(section.drain_s) if section is not None else 0.0
        switch = RoleSwitch(decision.instance, decision.role, engine.role, now + drain_s)
        self.in_progress[decision.instance] = switch
        if section is None or now < self._backs_off_until:
            self._end(switch, "declined")
            return
        log_event("info", "role_switch_started", instance=decision.instance, role=decision.role)
        if self._runtime.sharing is not None:
            self._runtime.sharing.learned(RoleDraining(now, decision.instance))
        engine.availability.hold(SWITCHING, now)

    async def _call(self, switch: RoleSwitch) -> None:
        runtime = self._runtime
        section, instance = self._section, runtime.engines[switch.instance].instance
        why = "the configuration no longer has a hook"
        try:
            if section is not None:
                why = await switch_role(section, instance, switch.before, switch.role)
        except asyncio.CancelledError:
            self._end(switch, "abandoned")
            raise
        except Exception as error:  # a bug in the gateway must not keep the instance out of service
            why = f"{type(error).__name__}: {error}"
        if not why:
            self._failures = 0
        elif section is not None:
            self._backs_off_until = runtime.now() + float(section.back_off_s) * 2 ** min(self._failures, _DOUBLINGS)
            self._failures += 1
        self._end(switch, "failed" if why else "switched", why)

    def _end(self, switch: RoleSwitch, outcome: Outcome, why: str = "") -> None:
        """Finish a role switch: the instance serves again, in the new role or the old one."""
        name, runtime = switch.instance, self._runtime
        if self.in_progress.pop(name, None) is not switch:
            return
        runtime.metrics.role_switch_ended(outcome)
        reason = {"reason": why} if why else {}
        log_event("error" if why else "info", f"role_switch_{outcome}", instance=name, role=switch.role, **reason)
        engine, now = runtime.engines[name], runtime.now()
        if outcome == "switched":
            engine.role = switch.role
            self._on_event(KvCleared(now, name))  # the engine has most likely restarted
        if _may_switch(runtime, name):
            event = RoleSwitched(now, name, engine.role)
            runtime.notify(event)
            if runtime.sharing is not None:
                runtime.sharing.learned(event)
        engine.availability.release(SWITCHING, now)

    def followed(self, event: RoleSwitched) -> None:
        """Serve an instance in the role that it has after a switch by another gateway. The core knows already."""
        engine = self._runtime.engines.get(event.instance)
        if engine is None or engine.role == event.role or not _may_switch(self._runtime, event.instance):
            return
        engine.role = event.role
        self._on_event(KvCleared(self._runtime.now(), event.instance))
        log_event("info", "role_switch_followed", instance=event.instance, role=event.role)

    def take_over(self, old: ClusterRuntime, new: ClusterRuntime) -> None:
        """Carry over roles and role switches at a reload, for each instance that the new file keeps unchanged and
        allows to switch roles. For other instances the file's role applies."""
        now, self._runtime = new.now(), new
        for name, before in old.engines.items():
            switch, after = self.in_progress.get(name), new.engines.get(name)
            same = same_engine(name, old, new) and after is not None and before.instance.role == after.instance.role
            if not (same and after is not None and _may_switch(new, name)):
                if switch is not None:
                    self._abandon(switch)
                if after is not None and before.role != after.role:
                    log_event("warning", "role_from_file", instance=name, role=after.role)
                continue
            if before.role != after.role:
                after.role = before.role
                new.notify(RoleSwitched(now, name, before.role))
            if switch is not None:
                switch.inherited = True
                after.availability.hold(SWITCHING, now)

    def _abandon(self, switch: RoleSwitch) -> None:
        """End a role switch without an event to the core: the new file defines the instance's role."""
        self.in_progress.pop(switch.instance, None)
        if switch.hook is not None:
            switch.hook.cancel()
        self._runtime.metrics.role_switch_ended("abandoned")
        log_event("warning", "role_switch_abandoned", instance=switch.instance, role=switch.role)

    def stop(self) -> None:
        """Begin no more switches. Draining instances serve again in their old role; a running hook may finish."""
        self._stopped = True
        for switch in list(self.in_progress.values()):
            if switch.hook is None:
                self._end(switch, "abandoned")

    async def close(self) -> None:
        """Stop, and cancel the running hooks."""
        self.stop()
        hooks = [role_switch.hook for role_switch in self.in_progress.values() if role_switch.hook is not None]
        for hook in hooks:
            hook.cancel()
        await asyncio.gather(*hooks, return_exceptions=True)


def _may_switch(runtime: ClusterRuntime, name: str) -> bool:
    return runtime.control.may_switch(name)


def _needed(name: str, clusters: Sequence[ClusterRuntime]) -> bool:
    """Whether any request of this gateway or another is in flight on the instance, or needs the KV that it holds."""
    return any(runtime.needs(name) or runtime.control.peers.uses(name) for runtime in clusters)


def _tell(review: Review, switches_roles: bool) -> None:
    best = "; ".join(f"{p} prefill, {d} decode" for p, d in zip(review.n_prefill, review.n_decode, strict=True))
    log_event(
        "info",
        "review",
        verdict=review.verdict,
        binding=review.binding,
        gain=round(review.gain, 4),
        rate_per_s=round(review.rate_per_s, 4),
        lambda_max_per_s=round(review.lambda_max_per_s, 4),
        reason=f"best split: {best}" + ("" if switches_roles else " (no hook: roles do not change)"),
    )
