"""Roles that change while the gateway serves: reviews are asked for, instances drained, hooks called, the core told.

What is to be converted is the core's decision; how an engine is made to serve another role is the operator's hook.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from kvroute.gateway.handover import stays
from kvroute.gateway.hooks import convert
from kvroute.gateway.logs import note
from kvroute.types import Convert, Event, InstanceConverted, KvCleared, ReviewDue, Role

if TYPE_CHECKING:
    from kvroute.gateway.journey import Journey
    from kvroute.gateway.offload_settings import ConversionSection
    from kvroute.gateway.serving import Serving
    from kvroute.policies.allocation import Review

Outcome: TypeAlias = Literal["converted", "failed", "declined", "abandoned"]
"""`declined`: at once, for one has failed not long ago; `abandoned`: the gateway ends, or the file has changed."""

CONVERTING = "converting"
"""Why an instance is held back."""
_DOUBLINGS = 4


@dataclass(slots=True, eq=False)
class Conversion:
    """One instance on its way to another role: drained first, then the hook is called."""

    instance: str
    role: Role
    before: Role
    until: float
    """It is drained by then, or taken for drained."""
    hook: asyncio.Task[None] | None = None
    inherited: bool = False
    """Begun before a reload: the core does not know of it."""

    @property
    def stage(self) -> Literal["draining", "hook"]:
        """How far it is."""
        return "draining" if self.hook is None else "hook"


class Conversions:
    """Of one cluster after the other; `look` is called now and then, `take_over` at a reload."""

    def __init__(self, serving: Serving, heard: Callable[[Event], None]) -> None:
        """Args: `heard` is told that an instance has been started anew, as by a watcher."""
        self._serving, self._heard = serving, heard
        self.under_way: dict[str, Conversion] = {}
        """By instance."""
        self._ask_at = 0.0
        self._seen: Review | None = None
        self._failures, self._backs_off_until = 0, 0.0
        self._stopped = False

    def look(self, clusters: Sequence[Serving]) -> None:
        """Ask for a review if one is due, and go on with what is under way. Args: `clusters` that have requests."""
        now = self._serving.now()
        if now >= self._ask_at and not self._stopped:
            self._review(now)
        for conversion in list(self.under_way.values()):
            due = now >= conversion.until or not _needed(conversion.instance, clusters)
            if conversion.hook is None and due:
                conversion.hook = asyncio.get_running_loop().create_task(self._call(conversion))

    def _review(self, now: float) -> None:
        serving = self._serving
        offload, offloading = serving.settings.offload, serving.control.offloading
        if offload is None or offloading is None or any(each.inherited for each in self.under_way.values()):
            return
        self._ask_at = now + float(offload.look_s)
        decisions = serving.decide(ReviewDue(now))
        review = offloading.last_review
        if review is not None and review is not self._seen:
            self._seen = review
            serving.metrics.reviewed(review.verdict)
            _tell(review, offload.conversion is not None)
        for decision in decisions:
            if isinstance(decision, Convert):
                serving.state.decided(decision, now)
                self._begin(decision, offload.conversion, now)

    def _begin(self, decision: Convert, section: ConversionSection | None, now: float) -> None:
        station = self._serving.stations[decision.instance]
        drain_s = float(section.drain_s) if section is not None else 0.0
        conversion = Conversion(decision.instance, decision.role, station.role, now + drain_s)
        self.under_way[decision.instance] = conversion
        if section is None or now < self._backs_off_until:
            self._end(conversion, "declined")
            return
        note("info", "conversion_begun", instance=decision.instance, role=decision.role)
        station.guard.hold(CONVERTING, now)

    async def _call(self, conversion: Conversion) -> None:
        serving = self._serving
        offload, instance = serving.settings.offload, serving.stations[conversion.instance].instance
        section = offload.conversion if offload is not None else None
        why = "no hook is given any more"
        try:
            if section is not None:
                why = await convert(section, instance, conversion.before, conversion.role)
        except asyncio.CancelledError:
            self._end(conversion, "abandoned")
            raise
        except Exception as error:  # a mistake of the gateway's own must not keep the instance out for good
            why = f"{type(error).__name__}: {error}"
        if not why:
            self._failures = 0
        elif section is not None:
            self._backs_off_until = serving.now() + float(section.back_off_s) * 2 ** min(self._failures, _DOUBLINGS)
            self._failures += 1
        self._end(conversion, "failed" if why else "converted", why)

    def _end(self, conversion: Conversion, outcome: Outcome, why: str = "") -> None:
        """The instance serves again: the new role, or the one of before."""
        name, serving = conversion.instance, self._serving
        if self.under_way.pop(name, None) is not conversion:
            return
        serving.metrics.converted(outcome)
        reason = {"reason": why} if why else {}
        note("error" if why else "info", f"conversion_{outcome}", instance=name, role=conversion.role, **reason)
        station, now = serving.stations[name], serving.now()
        if outcome == "converted":
            station.role = conversion.role
            self._heard(KvCleared(now, name))  # it has most likely been started anew
        if _may_convert(serving, name):
            serving.tell(InstanceConverted(now, name, station.role))
        station.guard.let_go(CONVERTING, now)

    def take_over(self, old: Serving, new: Serving) -> None:
        """A reload: roles and conversions go on where the file still has the instance, as it was, and lets it convert;
        otherwise the file's role holds."""
        now, self._serving = new.now(), new
        for name, before in old.stations.items():
            conversion, after = self.under_way.get(name), new.stations.get(name)
            same = stays(name, old, new) and after is not None and before.instance.role == after.instance.role
            if not (same and after is not None and _may_convert(new, name)):
                if conversion is not None:
                    self._abandon(conversion)
                if after is not None and before.role != after.role:
                    note("warning", "role_by_file", instance=name, role=after.role)
                continue
            if before.role != after.role:
                after.role = before.role
                new.tell(InstanceConverted(now, name, before.role))
            if conversion is not None:
                conversion.inherited = True
                after.guard.hold(CONVERTING, now)

    def _abandon(self, conversion: Conversion) -> None:
        """Nobody is told: the instance is what the new file says."""
        self.under_way.pop(conversion.instance, None)
        if conversion.hook is not None:
            conversion.hook.cancel()
        self._serving.metrics.converted("abandoned")
        note("warning", "conversion_abandoned", instance=conversion.instance, role=conversion.role)

    def stop(self) -> None:
        """Begin nothing more: what is being drained serves on as it did; a hook that has been called may end."""
        self._stopped = True
        for conversion in list(self.under_way.values()):
            if conversion.hook is None:
                self._end(conversion, "abandoned")

    async def close(self) -> None:
        """Wait for nothing: hooks under way are given up."""
        self.stop()
        hooks = [each.hook for each in self.under_way.values() if each.hook is not None]
        for hook in hooks:
            hook.cancel()
        await asyncio.gather(*hooks, return_exceptions=True)


def _may_convert(serving: Serving, name: str) -> bool:
    offloading = serving.control.offloading
    return offloading is not None and offloading.may_convert(serving.cluster.index(name))


def _needed(name: str, clusters: Sequence[Serving]) -> bool:
    """Whether some request is on the instance, or needs the KV cache that it holds."""
    for serving in clusters:
        station = serving.stations.get(name)
        if station is not None and station.under_way:
            return True
        if any(_needs(journey, name) for journey in serving.journeys.values()):
            return True
    return False


def _needs(journey: Journey, name: str) -> bool:
    prefill, answer = journey.prefill, journey.answer
    if answer is not None and answer.station.name == name:
        return True
    return prefill is not None and prefill.station.name == name and (answer is None or not answer.admitted)


def _tell(review: Review, converts: bool) -> None:
    best = "; ".join(f"{p} prefill, {d} decode" for p, d in zip(review.n_prefill, review.n_decode, strict=True))
    note(
        "info",
        "review",
        verdict=review.verdict,
        binding=review.binding,
        gain=round(review.gain, 4),
        rate_per_s=round(review.rate_per_s, 4),
        lambda_max_per_s=round(review.lambda_max_per_s, 4),
        reason=f"best split: {best}" + ("" if converts else " (no hook: roles stay)"),
    )
