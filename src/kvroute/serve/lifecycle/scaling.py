"""Autoscaling of a live gateway: requests the desired numbers, drains instances that stop, and calls the hook.

The control core decides. The hook starts and stops engines; without it the numbers are metrics for another autoscaler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from kvroute.serve.lifecycle.role_hook import call_hook
from kvroute.serve.observe.logs import log_event
from kvroute.serve.proxy.runtime import same_engine
from kvroute.types import Event, KvCleared, Role, ScaleEnded, ScaleIn, ScaleOut, ScalingDue, SwitchRole

if TYPE_CHECKING:
    from kvroute.serve.config.autoscaling import ScaleHookSection
    from kvroute.serve.lifecycle.role_switches import RoleSwitches
    from kvroute.serve.proxy.runtime import ClusterRuntime

Action: TypeAlias = Literal["start", "stop"]
Outcome: TypeAlias = Literal["done", "failed", "declined", "abandoned"]
"""`declined`: not tried, because an earlier call failed a short time ago; `abandoned`: the gateway shuts down or the
file has changed."""
Stage: TypeAlias = Literal["draining", "hook", "warming"]
"""`warming`: the hook has started the engine, which has not passed a health check yet."""

STOPPED = "scaled in"
"""Reason for giving an instance no requests from the decision to stop it until it has been started again."""
_DOUBLINGS = 4


@dataclass(slots=True, eq=False)
class ScaleStep:
    """An instance that starts or stops. An instance that stops is drained first, then the hook is called."""

    action: Action
    instance: str
    """Empty: as many new instances as `replicas` needs."""
    model: str
    role: Role
    replicas: int
    until: float
    """End of the drain, or of the wait for a health check."""
    stage: Stage
    hook: asyncio.Task[None] | None = None


class ScalingDriver:
    """Autoscaling of the current cluster; the caller runs `advance` periodically and `take_over` at a reload."""

    def __init__(
        self,
        runtime: ClusterRuntime,
        role_switches: RoleSwitches,
        queued: Callable[[], int],
        on_event: Callable[[Event], None],
    ) -> None:
        """
        Args:
            runtime: the current cluster.
            role_switches: carries out role switches.
            queued: returns the number of requests that wait for admission.
            on_event: receives the event that an instance has restarted, like those of a collector.
        """
        self._runtime, self._role_switches = runtime, role_switches
        self._queued, self._on_event = queued, on_event
        self.steps: list[ScaleStep] = []
        """Instances that start or stop now."""
        self.stopped: dict[str, str] = {}
        """Uid of each instance that the hook has stopped, by name."""
        self._due_at = 0.0
        self._failures, self._backs_off_until = 0, 0.0
        self._ended = False

    def advance(self, clusters: Sequence[ClusterRuntime]) -> None:
        """Request the desired numbers if they are due, and continue what is in progress. Args: `clusters` that have
        requests."""
        runtime, now = self._runtime, self._runtime.now()
        section = runtime.settings.autoscaling
        if section is not None and now >= self._due_at and not self._ended and self._leads():
            self._due_at = now + float(section.interval_s)
            for decision in runtime.decide(ScalingDue(now, self._queued())):
                if isinstance(decision, ScaleIn | ScaleOut):
                    self._begin(decision, section.hook, now)
                elif isinstance(decision, SwitchRole):
                    self._role_switches.begin(decision)
        for step in list(self.steps):
            self._advance(step, clusters, now)
        gone = [name for name, uid in self.stopped.items() if name not in runtime.engines or self._uid(name) != uid]
        for name in gone:  # it has left the cluster, or another engine has its name
            del self.stopped[name]

    def _uid(self, name: str) -> str:
        return self._runtime.uids.get(name, "")

    def _leads(self) -> bool:
        return self._runtime.sharing is None or self._runtime.sharing.leads

    def _begin(self, decision: ScaleIn | ScaleOut, hook: ScaleHookSection | None, now: float) -> None:
        runtime, name = self._runtime, decision.instance
        step = ScaleStep(
            "stop" if isinstance(decision, ScaleIn) else "start",
            name,
            decision.model,
            decision.role,
            decision.replicas,
            now + (float(hook.drain_s) if hook is not None else 0.0),
            "draining" if isinstance(decision, ScaleIn) else "hook",
        )
        if hook is None or now < self._backs_off_until or (name and name not in runtime.engines):
            self._report(step, "declined", serves=step.action == "stop")
            return
        runtime.state.decided(decision, now)
        self.steps.append(step)
        log_event("info", f"scale_{step.action}_begun", instance=name, role=decision.role, count=decision.replicas)
        if step.action == "stop":
            runtime.engines[name].availability.hold(STOPPED, now)
            self._tell(ScaleEnded(now, name, serves=False))
        else:
            self._call_soon(step)

    def _advance(self, step: ScaleStep, clusters: Sequence[ClusterRuntime], now: float) -> None:
        engine = self._runtime.engines.get(step.instance)
        if step.instance and engine is None:  # it has left the cluster, as its source of discovery says
            self._drop(step)
        elif step.stage == "draining" and (now >= step.until or not _needed(step.instance, clusters)):
            self._call_soon(step)
        elif step.stage == "warming" and engine is not None:
            if engine.availability.healthy:
                self._end(step, "done")
            elif now >= step.until:
                self._end(step, "failed", "the engine does not pass its health check")

    def _call_soon(self, step: ScaleStep) -> None:
        step.stage = "hook"
        step.hook = asyncio.get_running_loop().create_task(self._call(step))

    async def _call(self, step: ScaleStep) -> None:
        section, why = self._runtime.settings.autoscaling, "the configuration no longer has a hook"
        hook = section.hook if section is not None else None
        engine = self._runtime.engines.get(step.instance)
        url = engine.instance.endpoint.url if engine is not None and engine.instance.endpoint is not None else ""
        message: dict[str, str | int] = {
            "action": step.action,
            "instance": step.instance,
            "model": step.model,
            "role": step.role,
            "replicas": step.replicas,
        }
        try:
            if hook is not None:
                why = await call_hook(hook, url, message)
        except asyncio.CancelledError:
            self._end(step, "abandoned")
            raise
        except Exception as error:  # a bug in the gateway must not keep the instance out of service
            why = f"{type(error).__name__}: {error}"
        if why or step.action == "stop" or not step.instance:
            self._end(step, "failed" if why else "done", why)
            return
        step.stage, step.until = "warming", self._runtime.now() + (float(hook.timeout_s) if hook is not None else 0.0)

    def _end(self, step: ScaleStep, outcome: Outcome, why: str = "") -> None:
        """Finish a step. An instance that could not be stopped serves again; one that could not be started does not."""
        if step not in self.steps:
            return
        self.steps.remove(step)
        self._backs_off(outcome)
        serves = (step.action == "start") == (outcome == "done")
        self._report(step, outcome, serves=serves, why=why)
        engine, now = self._runtime.engines.get(step.instance), self._runtime.now()
        if engine is None:
            return
        if not serves:
            self.stopped[step.instance] = self._uid(step.instance)
            engine.availability.hold(STOPPED, now)
            return
        self.stopped.pop(step.instance, None)
        if step.action == "start":
            self._on_event(KvCleared(now, step.instance))
        engine.availability.release(STOPPED, now)

    def _backs_off(self, outcome: Outcome) -> None:
        section = self._runtime.settings.autoscaling
        if outcome == "done":
            self._failures = 0
        elif outcome == "failed" and section is not None and section.hook is not None:
            pause_s = float(section.hook.back_off_s) * 2 ** min(self._failures, _DOUBLINGS)
            self._backs_off_until = self._runtime.now() + pause_s
            self._failures += 1

    def _report(self, step: ScaleStep, outcome: Outcome, *, serves: bool, why: str = "") -> None:
        self._runtime.metrics.scaled(step.action, outcome)
        reason = {"reason": why} if why else {}
        event_name = f"scale_{step.action}_{outcome}"
        log_event("error" if why else "info", event_name, instance=step.instance, role=step.role, **reason)
        if step.instance and step.instance in self._runtime.engines:
            event = ScaleEnded(self._runtime.now(), step.instance, serves=serves)
            self._runtime.notify(event)
            self._tell(event)

    def _tell(self, event: ScaleEnded) -> None:
        """Report to the other gateways, which give a stopping instance no requests either."""
        if self._runtime.sharing is not None:
            self._runtime.sharing.learned(event)

    def _drop(self, step: ScaleStep) -> None:
        self.steps.remove(step)
        self.stopped.pop(step.instance, None)
        if step.hook is not None:
            step.hook.cancel()
        self._runtime.metrics.scaled(step.action, "done" if step.action == "stop" else "abandoned")

    def followed(self, event: ScaleEnded) -> None:
        """Hold or release an instance that another gateway stops or starts. The core knows already. Does nothing where
        autoscaling does not start and stop it."""
        engine, now = self._runtime.engines.get(event.instance), self._runtime.now()
        if engine is not None and self._runtime.control.may_scale(event.instance):
            (engine.availability.release if event.serves else engine.availability.hold)(STOPPED, now)
            self.stopped.pop(event.instance, None)
            if not event.serves:
                self.stopped[event.instance] = self._uid(event.instance)

    def take_over(self, old: ClusterRuntime, new: ClusterRuntime) -> None:
        """Carry over what is stopped or starts and stops at a reload, for each instance that the new file keeps
        unchanged. If it has no hook, instances that stop serve again."""
        now, self._runtime = new.now(), new
        section = new.settings.autoscaling
        keeps = section is not None and section.hook is not None
        for step in list(self.steps):
            if not keeps or (step.instance and not same_engine(step.instance, old, new)):
                self.steps.remove(step)
                if step.hook is not None:
                    step.hook.cancel()
                new.metrics.scaled(step.action, "abandoned")
        names = self.stopped.keys() | {step.instance for step in self.steps if step.action == "stop"}
        kept = {name for name in self.stopped if keeps and name in new.engines and same_engine(name, old, new)}
        self.stopped = {name: uid for name, uid in self.stopped.items() if name in kept}
        for name in sorted(names):
            if keeps and name in new.engines and same_engine(name, old, new):
                new.engines[name].availability.hold(STOPPED, now)
                new.notify(ScaleEnded(now, name, serves=False))

    def stop(self) -> None:
        """Begin nothing more. Instances that drain serve again; a running hook may finish."""
        self._ended = True
        for step in [step for step in self.steps if step.stage == "draining"]:
            self._end(step, "abandoned")

    async def close(self) -> None:
        """Stop, and cancel the running hooks."""
        self.stop()
        hooks = [step.hook for step in self.steps if step.hook is not None]
        for hook in hooks:
            hook.cancel()
        await asyncio.gather(*hooks, return_exceptions=True)


def _needed(name: str, clusters: Sequence[ClusterRuntime]) -> bool:
    """Whether any request of this gateway or another is in flight on the instance, or needs the KV that it holds."""
    return any(runtime.needs(name) or runtime.control.peers.uses(name) for runtime in clusters)
