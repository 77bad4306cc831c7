"""The ways home from datacenters that only prefill, as the gateway has seen them: a breaker over each one's transfers.

Without telemetry nobody says that a link between datacenters is cut; what fails on it does. While a way is shut, the
core is told that nobody is up behind it, so that everything is prefilled at home; one request at a time tries it.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvroute.gateway.breaker import Attempt, Breaker, BreakerState
from kvroute.gateway.logs import note
from kvroute.gateway.offload_settings import WaySection
from kvroute.gateway.station import Guard, Station
from kvroute.topology import Cluster
from kvroute.types import Prefill

_CUT = "way"
"""Why an instance is held back."""


class Passage:
    """One request on its way through another datacenter; its way hears of its end once, whoever tells it first."""

    __slots__ = ("_attempt", "_guard")

    def __init__(self, guard: Guard, now: float) -> None:
        self._guard: Guard | None = guard
        self._attempt: Attempt = guard.started(now)

    @property
    def open(self) -> bool:
        """Whether its end has yet to be told."""
        return self._guard is not None

    def arrived(self, now: float) -> None:
        """Its KV cache is where it is decoded."""
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.succeeded(self._attempt, now)

    def lost(self, now: float) -> None:
        """Its KV cache has not come, and neither end is known to have failed."""
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.failed(self._attempt, now)

    def given_up(self, now: float) -> None:
        """It says nothing of the way."""
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.cancelled(self._attempt, now)


class Ways:
    """One guard for each datacenter without decode instances."""

    def __init__(self, cluster: Cluster, stations: Mapping[str, Station], section: WaySection) -> None:
        self._stations = stations
        homes = {instance.datacenter for instance in cluster.instances if instance.role != "prefill"}
        self._site = {i.name: i.datacenter for i in cluster.instances if i.datacenter not in homes}
        self.guards: dict[str, Guard] = {}
        """By datacenter."""
        self.changing = False
        """A way is the reason why instances go down or come up now."""
        self._shut: dict[str, bool] = {}
        open_s = float(section.open_s)
        for site in sorted(set(self._site.values())):
            # Successes of before a cut are no reason to go on, so that only failures in a row count; and a long cut
            # makes the way no less worth trying.
            breaker = Breaker(failures=section.failures, share=1.0, open_s=open_s, open_max_s=open_s)
            self.guards[site] = Guard(site, breaker, self._changed)

    def depart(self, prefill: Prefill, now: float) -> Passage | None:
        """A request is sent to be prefilled; None where it stays in a datacenter that decodes."""
        guard = self.guards.get(self._site.get(prefill.instance, ""))
        return Passage(guard, now) if guard is not None else None

    def state(self, site: str, now: float) -> BreakerState:
        """Of the way from a datacenter."""
        guard = self.guards.get(site)
        return guard.breaker.state(now) if guard is not None else "closed"

    def inherit(self, before: Ways, now: float) -> None:
        """A reload: what is known of a way stays known."""
        for site, guard in self.guards.items():
            if site in before.guards:
                guard.breaker = before.guards[site].breaker
                guard.look(now)

    def look(self, now: float) -> None:
        """What changes with time alone."""
        for guard in self.guards.values():
            guard.look(now)

    def _changed(self, site: str, up: bool, now: float) -> None:
        state = self.guards[site].breaker.state(now)
        if state == "closed":
            note("warning", "way_open", site=site)
        elif not self._shut.get(site, False):
            note("warning", "way_shut", site=site)
        self._shut[site] = state != "closed"
        self.changing = True
        for name, datacenter in self._site.items():
            if datacenter == site:
                guard = self._stations[name].guard
                if up:
                    guard.let_go(_CUT, now)
                else:
                    guard.hold(_CUT, now)
        self.changing = False
