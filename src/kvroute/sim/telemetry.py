"""Network telemetry that the router receives at every refresh, and the samples for the run's timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from kvroute.sim.metrics import Outcomes, Timeline
from kvroute.sim.network.transfers import Fabric
from kvroute.sim.settings import SimSpec
from kvroute.types import TIER_COUNT, CongestionMeasured, Event, FloatArray, LinksMeasured, TransferMeasured


class Telemetry:
    """Reads the fabric and the run's rows; changes neither."""

    def __init__(
        self,
        fabric: Fabric,
        settings: SimSpec,
        outcomes: Outcomes,
        threshold_tokens: Callable[[], float | None],
        reduced_bytes: FloatArray | None = None,
    ) -> None:
        """Args:

        threshold_tokens: returns the router's current routing threshold; None if nothing is offloaded.
        reduced_bytes: bytes of all-reduces by link so far, which their owner updates; None: no all-reduce uses a link.
        """
        self._fabric, self._settings, self._outcomes = fabric, settings, outcomes
        self._threshold_tokens, self._thresholds = threshold_tokens, list[float]()
        self._names = [instance.name for instance in fabric.cluster.instances]
        self._samples: list[tuple[float, list[float]]] = []
        self._last_s, self._sent = 0.0, fabric.own_bytes()
        """Time of the last refresh, and the bytes sent by tier until then."""
        self._reduced_bytes = reduced_bytes
        self._reduced_before, self._reduced_s = None if reduced_bytes is None else reduced_bytes.copy(), 0.0
        self._unmeasured: dict[tuple[int, int], list[tuple[int, float]]] = {}
        """Requests whose KV has arrived since the last refresh, with the start time of the transfer, by (source,
        target)."""

    def landed(self, request: int, sent_s: float) -> None:
        """Record that a KV transfer that started at `sent_s` has arrived."""
        outcomes = self._outcomes
        if self._settings.measures_transfers and outcomes.kv_bytes[request] > 0:
            pair = int(outcomes.source[request]), int(outcomes.target[request])
            self._unmeasured.setdefault(pair, []).append((request, sent_s))

    def refresh(self, at: float) -> Iterator[Event]:
        """Yield the events that the router receives now. The caller has moved bytes up to `at`."""
        separate = self._settings.separates_own_traffic
        if self._settings.reported is not None:
            yield CongestionMeasured(at, self._settings.reported)
        elif self._settings.telemetry == "tier":
            yield CongestionMeasured(at, self._fabric.congestion(separate, self._reduced_bytes_per_s(at)))
        elif self._settings.telemetry == "link":
            yield LinksMeasured(at, self._fabric.utilisation(separate, self._reduced_bytes_per_s(at)))
        yield from self._transfers(at)
        self._sample(at)
        if (threshold := self._threshold_tokens()) is not None:
            self._thresholds.append(threshold)

    def _reduced_bytes_per_s(self, at: float) -> FloatArray | None:
        """Return the mean rate of all-reduces on each link since the last refresh."""
        if self._reduced_bytes is None or self._reduced_before is None or at <= self._reduced_s:
            return None
        rates: FloatArray = (self._reduced_bytes - self._reduced_before) / (at - self._reduced_s)
        self._reduced_before, self._reduced_s = self._reduced_bytes.copy(), at
        return rates

    def _sample(self, at: float) -> None:
        """Store the mean shares since the last refresh: transfers are shorter than one period."""
        if at > self._last_s:
            shares = np.clip(self._fabric.mean_share(self._sent, at - self._last_s), 0.0, 1.0)
            self._last_s, self._sent = at, self._fabric.own_bytes()
        else:
            shares = np.zeros(TIER_COUNT)
        self._samples.append((at, shares.tolist()))

    def _transfers(self, at: float) -> Iterator[Event]:
        names, outcomes = self._names, self._outcomes
        for (source, target), sent in sorted(self._unmeasured.items()):
            requests = [request for request, _ in sent]
            seconds = float((outcomes.landed_s[requests] - np.array([sent_s for _, sent_s in sent])).sum())
            kv_bytes = float(outcomes.kv_bytes[requests].sum())
            yield TransferMeasured(at, names[source], names[target], kv_bytes, seconds, transfers=len(requests))
        self._unmeasured.clear()

    def timeline(self) -> Timeline:
        """Return own traffic between refreshes, and the threshold at each refresh, so far."""
        at_s, shares = tuple(at for at, _ in self._samples), [share for _, share in self._samples]
        tier = {str(tier): tuple(s[tier] for s in shares) for tier in range(TIER_COUNT)}
        return Timeline(at_s=at_s, tier=tier, threshold_tokens=tuple(self._thresholds))
