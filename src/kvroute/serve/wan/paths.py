"""WAN paths from prefill-only datacenters to the datacenters that decode: a circuit breaker over the transfers of each.

Without telemetry, nothing reports that a link between datacenters is down, except failed transfers and, earlier, the
TCP counters of the senders, if available. While a path is down, the core treats all instances behind it as down,
so that everything is prefilled at home. One request at a time probes the path, unless it is known to be stalled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvroute.http.client.callbacks import weakly
from kvroute.serve.config.offload import WanPathSection
from kvroute.serve.engines.availability import NOT_COUNTED, Availability
from kvroute.serve.engines.breaker import Attempt, Breaker
from kvroute.serve.engines.client import EngineClient
from kvroute.serve.engines.fault_attribution import FaultAttribution
from kvroute.serve.observe.logs import log_event
from kvroute.serve.observe.view import BreakerState
from kvroute.serve.wan.path_telemetry import PathTelemetry
from kvroute.serve.wan.tcp_links import TcpSample
from kvroute.topology import Cluster
from kvroute.types import Prefill

_CUT = "wan path"
"""Reason for holding an instance behind the path."""
_STALLED = "transfers make no progress"
"""Reason for holding a path."""
_FRESH_PAGES = 3.0
"""Age, in scrape intervals, up to which a metrics page counts."""


class PathAttempt:
    """One request prefilled in another datacenter; its outcome is reported to the path once, by the first caller."""

    __slots__ = ("_attempt", "_availability")

    def __init__(self, availability: Availability, now: float, *, counted: bool = True) -> None:
        """Args: `counted`: False for a request that has failed before: its outcome does not count for the path."""
        self._availability: Availability | None = availability
        self._attempt: Attempt = availability.started(now) if counted else NOT_COUNTED

    @property
    def open(self) -> bool:
        """Whether its outcome is not reported yet."""
        return self._availability is not None

    def arrived(self, now: float) -> None:
        """Report that its KV cache has reached the decode instance."""
        availability, self._availability = self._availability, None
        if availability is not None:
            availability.succeeded(self._attempt, now)

    def lost(self, faults: FaultAttribution, now: float, *, error: bool) -> None:
        """Report that its KV cache has not arrived, although neither instance is known to have failed.

        Args:
            faults: failures of the request.
            now: the time.
            error: whether the decode engine responded with an error. The request may be the cause, so the verdict is
                pending until another attempt decides it.
        """
        availability, self._availability = self._availability, None
        if availability is not None:
            faults.failed(availability, self._attempt, "decode", now, uncertain=error, proven="no_answer")

    def cancelled(self, now: float) -> None:
        """End the attempt without a verdict on the path."""
        availability, self._availability = self._availability, None
        if availability is not None:
            availability.cancelled(self._attempt, now)


class WanPaths:
    """Availability of the path of each datacenter without decode instances."""

    def __init__(
        self, cluster: Cluster, engines: Mapping[str, EngineClient], section: WanPathSection, *, scrape_s: float
    ) -> None:
        """Args: `scrape_s`: interval at which an engine's metrics are scraped."""
        self._engines = engines
        stalled_s = max(float(section.stalled_after_s), scrape_s)
        self.telemetry = PathTelemetry(cluster, stalled_s=stalled_s, fresh_s=_FRESH_PAGES * scrape_s)
        """State of the paths by TCP counters."""
        homes = {instance.datacenter for instance in cluster.instances if instance.role != "prefill"}
        self._site = {i.name: i.datacenter for i in cluster.instances if i.datacenter not in homes}
        self.availability: dict[str, Availability] = {}
        """Availability of each path, by datacenter."""
        self.changing = False
        """Whether instances go down or come up now because a path does."""
        self._shut: dict[str, bool] = {}
        open_s = float(section.open_s)
        for site in sorted(set(self._site.values())):
            # Successes from before an outage must not keep a path open, so only consecutive failures count. A long
            # outage does not make probing less useful, so the open time does not grow.
            breaker = Breaker(failures=section.failures, share=1.0, open_s=open_s, open_max_s=open_s)
            self.availability[site] = Availability(site, breaker, weakly(self._changed))

    def start_attempt(self, prefill: Prefill, now: float, *, counted: bool = True) -> PathAttempt | None:
        """Start the attempt of a request that is prefilled in another datacenter; None if it stays in a datacenter that
        decodes. `counted`: see `PathAttempt`."""
        availability = self.availability.get(self._site.get(prefill.instance, ""))
        return PathAttempt(availability, now, counted=counted) if availability is not None else None

    def state(self, site: str, now: float) -> BreakerState:
        """Return the state of the path from a datacenter."""
        availability = self.availability.get(site)
        if availability is None:
            return "closed"
        return "open" if availability.reason else availability.breaker.state(now)

    def inherit(self, before: WanPaths, now: float) -> None:
        """Carry over the state of the paths on reload."""
        for site, availability in self.availability.items():
            if site in before.availability:
                availability.breaker = before.availability[site].breaker
                availability.refresh(now)

    def refresh(self, now: float) -> None:
        """Apply the changes that depend on time alone."""
        for site, availability in self.availability.items():
            availability.refresh(now)
            self._update_stall(site, now)

    def links_seen(self, source: str, seen: Sequence[TcpSample], now: float) -> None:
        """Process the samples of a prefill instance's outgoing KV connections."""
        self.telemetry.record(source, seen, now)
        site = self._site.get(source)
        if site is not None:
            self._update_stall(site, now)

    def others(self, now: float) -> float | None:
        """Return the largest share of a path that other traffic takes; None: unknown."""
        samples = [self.telemetry.sample(site, now) for site in self.availability]
        return max(
            (sample.others for sample in samples if sample is not None and sample.others is not None), default=None
        )

    def _update_stall(self, site: str, now: float) -> None:
        """Hold a stalled path before requests time out; release it once data moves or none is waiting."""
        sample, availability = self.telemetry.sample(site, now), self.availability[site]
        stalled = sample is not None and sample.stalled
        if stalled and not availability.reason:
            availability.hold(_STALLED, now)
        elif availability.reason and not stalled:
            availability.release(_STALLED, now)

    def _changed(self, site: str, up: bool, now: float) -> None:
        state = self.state(site, now)
        if state == "closed":
            log_event("info", "wan_path_open", site=site)
        elif not self._shut.get(site, False):
            log_event(
                "warning",
                "wan_path_closed",
                site=site,
                reason=self.availability[site].reason or "transfers have failed",
            )
        self._shut[site] = state != "closed"
        self.changing = True
        for name, datacenter in self._site.items():
            if datacenter == site:
                availability = self._engines[name].availability
                if up:
                    availability.release(_CUT, now)
                else:
                    availability.hold(_CUT, now)
        self.changing = False
