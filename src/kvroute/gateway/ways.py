"""The ways home from datacenters that only prefill, as the gateway has seen them: a breaker over each one's transfers.

Without telemetry nobody says that a link between datacenters is cut; what fails on it does, and, sooner, the kernels
that send over it where they can be asked. While a way is shut, the core is told that nobody is up behind it, so that
everything is prefilled at home; one request at a time tries it, unless it is known to stand still.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvroute.gateway.breaker import Attempt, Breaker, BreakerState
from kvroute.gateway.callbacks import weakly
from kvroute.gateway.kv_links import LinkSeen
from kvroute.gateway.logs import note
from kvroute.gateway.offload_settings import WaySection
from kvroute.gateway.station import Guard, Station
from kvroute.gateway.suspicion import NOT_COUNTED, Suspicion
from kvroute.gateway.way_signals import WaySignals
from kvroute.topology import Cluster
from kvroute.types import Prefill

_CUT = "way"
"""Why an instance is held back."""
_STILL = "transfers stand still"
"""Why a way is."""
_FRESH_PAGES = 3.0
"""A page of metrics counts for so many intervals."""


class Passage:
    """One request on its way through another datacenter; its way hears of its end once, whoever tells it first."""

    __slots__ = ("_attempt", "_guard")

    def __init__(self, guard: Guard, now: float, *, counted: bool = True) -> None:
        """Args: `counted`: False for a request that has failed before: its end says nothing about the way."""
        self._guard: Guard | None = guard
        self._attempt: Attempt = guard.started(now) if counted else NOT_COUNTED

    @property
    def open(self) -> bool:
        """Whether its end has yet to be told."""
        return self._guard is not None

    def arrived(self, now: float) -> None:
        """Its KV cache is where it is decoded."""
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.succeeded(self._attempt, now)

    def lost(self, suspicion: Suspicion, now: float, *, error: bool) -> None:
        """Its KV cache has not arrived, and neither end is known to have failed.

        Args:
            suspicion: of the request.
            now: the time.
            error: the decode engine has answered with an error. The request may be the cause, so the verdict is pending
                until another attempt shows it.
        """
        guard, self._guard = self._guard, None
        if guard is not None:
            suspicion.failed(guard, self._attempt, "decode", now, error=error, proven="no_answer")

    def given_up(self, now: float) -> None:
        """It says nothing of the way."""
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.cancelled(self._attempt, now)


class Ways:
    """One guard for each datacenter without decode instances."""

    def __init__(
        self, cluster: Cluster, stations: Mapping[str, Station], section: WaySection, *, scrape_s: float
    ) -> None:
        """Args: `scrape_s`: an engine's metrics are read so often."""
        self._stations = stations
        still_s = max(float(section.still_s), scrape_s)
        self.signals = WaySignals(cluster, still_s=still_s, fresh_s=_FRESH_PAGES * scrape_s)
        """What kernels say."""
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
            self.guards[site] = Guard(site, breaker, weakly(self._changed))

    def depart(self, prefill: Prefill, now: float, *, counted: bool = True) -> Passage | None:
        """A request is sent to be prefilled; None where it stays in a datacenter that decodes. `counted`: see
        `Passage`."""
        guard = self.guards.get(self._site.get(prefill.instance, ""))
        return Passage(guard, now, counted=counted) if guard is not None else None

    def state(self, site: str, now: float) -> BreakerState:
        """Of the way from a datacenter."""
        guard = self.guards.get(site)
        if guard is None:
            return "closed"
        return "open" if guard.why else guard.breaker.state(now)

    def inherit(self, before: Ways, now: float) -> None:
        """A reload: what is known of a way stays known."""
        for site, guard in self.guards.items():
            if site in before.guards:
                guard.breaker = before.guards[site].breaker
                guard.look(now)

    def look(self, now: float) -> None:
        """What changes with time alone."""
        for site, guard in self.guards.items():
            guard.look(now)
            self._stands(site, now)

    def links_seen(self, source: str, seen: Sequence[LinkSeen], now: float) -> None:
        """How a prefill instance's KV leaves it, by its own page."""
        self.signals.heard(source, seen, now)
        site = self._site.get(source)
        if site is not None:
            self._stands(site, now)

    def others(self, now: float) -> float | None:
        """Share of the ways that others take, of the fullest; None: nothing tells."""
        ways = [self.signals.way(site, now) for site in self.guards]
        return max((way.others for way in ways if way is not None and way.others is not None), default=None)

    def _stands(self, site: str, now: float) -> None:
        """Shut a way that stands still before anybody has given up waiting; it is open again once something moves, or
        nothing waits any more."""
        way, guard = self.signals.way(site, now), self.guards[site]
        still = way is not None and way.still
        if still and not guard.why:
            guard.hold(_STILL, now)
        elif guard.why and not still:
            guard.let_go(_STILL, now)

    def _changed(self, site: str, up: bool, now: float) -> None:
        state = self.state(site, now)
        if state == "closed":
            note("info", "way_open", site=site)
        elif not self._shut.get(site, False):
            note("warning", "way_shut", site=site, reason=self.guards[site].why or "transfers have failed")
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
