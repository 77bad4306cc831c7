"""The network as the router knows it: tiers, own transfers and the operator's telemetry; never the true network."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvroute.oracle.links import LinkView
from kvroute.oracle.telemetry import Congestion, OracleSettings, utilisation_array
from kvroute.topology import Cluster
from kvroute.types import TIER_COUNT, FloatArray, InputError, IntArray, NetworkCosts, TierArray


class NetworkOracle:
    """NetKV's oracle (III-E): static maps, a congestion signal as old as its last refresh, own transfers counted."""

    def __init__(
        self,
        tier: TierArray,
        bytes_per_s: FloatArray,
        latency_s: FloatArray,
        settings: OracleSettings | None = None,
        links: LinkView | None = None,
    ) -> None:
        """Start with nothing in flight and no telemetry, that is with the static view.

        Args:
            tier: [n, n] tier of each ordered pair of instances, 0 to TIER_COUNT - 1.
            bytes_per_s: [TIER_COUNT] static bandwidth of a lone transfer, > 0.
            latency_s: [TIER_COUNT] base latency, >= 0.
            settings: how counters and telemetry are read.
            links: needed only for telemetry by link.

        Raises:
            InputError: a shape or a value is out of these bounds.
        """
        self._tier = np.ascontiguousarray(tier, dtype=np.int8)
        if self._tier.ndim != 2 or self._tier.shape[0] != self._tier.shape[1]:
            raise InputError(f"the tier map has shape {self._tier.shape}", where="tier", mend="give an [n, n] array")
        if self._tier.size and not (self._tier.min() >= 0 and self._tier.max() < TIER_COUNT):
            raise InputError("the tier map holds an unknown tier", where="tier", mend=f"use 0 to {TIER_COUNT - 1}")
        self._bytes_per_s = _per_tier(bytes_per_s, "bytes_per_s", above_zero=True)
        self._latency_s = _per_tier(latency_s, "latency_s", above_zero=False)
        self._settings = settings or OracleSettings()
        self._links = links
        self._congestion = Congestion(self._settings)
        self._utilisation: FloatArray | None = None
        self._in_flight: IntArray = np.zeros((len(self._tier), TIER_COUNT), dtype=np.int64)
        self._nothing: IntArray = np.zeros(TIER_COUNT, dtype=np.int64)
        self._nothing.flags.writeable = False

    @classmethod
    def of(cls, cluster: Cluster, settings: OracleSettings | None = None) -> NetworkOracle:
        """The oracle of a loaded cluster, ready for telemetry by tier and by link."""
        return cls(cluster.tier, cluster.tier_bytes_per_s, cluster.tier_latency_s, settings, LinkView.of(cluster))

    def transfer_started(self, source: int, target: int) -> None:
        """Count a transfer of ours as under way (NetKV algorithm 1, line 14)."""
        self._in_flight[source, self._tier[source, target]] += 1

    def transfer_finished(self, source: int, target: int) -> None:
        """Count it out again. One that never started changes nothing: an engine may report the same end twice."""
        tier = self._tier[source, target]
        if self._in_flight[source, tier] > 0:
            self._in_flight[source, tier] -= 1

    def congestion_measured(self, at: float, per_tier: Sequence[float]) -> None:
        """Take the operator's telemetry by tier.

        Args:
            at: when it was measured; older than the last measurement it is void.
            per_tier: utilisation by others, length TIER_COUNT; values of 0.99 and more read as 0.99.

        Raises:
            InputError: wrong length, or a value that is negative, infinite or not a number; the old view then stays.
        """
        self._congestion.measured(at, utilisation_array(per_tier, TIER_COUNT, "per_tier"))

    def links_measured(self, at: float, utilisation: Sequence[float]) -> None:
        """Take the operator's telemetry by link, in the cluster's order of links; the tier view follows from it.

        Raises:
            InputError: as for `congestion_measured`, or this oracle knows no links.
        """
        if self._links is None:
            raise InputError("telemetry by link, but the oracle knows no links", mend="give it a LinkView")
        measured = utilisation_array(utilisation, self._links.link_count, "utilisation")
        if self._congestion.measured(at, self._links.aggregate(measured)):
            self._utilisation = measured

    def costs(self, source: int, targets: IntArray, at: float) -> NetworkCosts:
        """What a policy may know of the network between `source` and `targets` at a time; a snapshot.

        Args:
            source: index of the prefill instance.
            targets: [m] indices of the candidates, in the candidates' order.
        """
        own = self._settings.separates_own_traffic
        return NetworkCosts(
            tier=self._tier[source].take(targets),
            bytes_per_s=self._bytes_per_s,
            latency_s=self._latency_s,
            congestion=self._congestion.at(at),
            in_flight=np.minimum(self._in_flight[source], self._settings.in_flight_max) if own else self._nothing,
        )

    def residual_bytes_per_s(self, source: int, targets: IntArray, at: float) -> FloatArray:
        """What the links leave to a lone transfer of each pair, [m], after the last telemetry by link.

        Finer than the tiers: it sees one hot uplink. Telemetry fades here as it does for tiers.

        Raises:
            InputError: this oracle knows no links.
        """
        if self._links is None:
            raise InputError("the oracle knows no links", mend="give it a LinkView")
        utilisation = np.zeros(self._links.link_count) if self._utilisation is None else self._utilisation
        return self._links.residual_bytes_per_s(source, targets, utilisation * self._congestion.fading(at))

    def staleness_s(self, at: float) -> float | None:
        """Age of the newest telemetry; None before the first: the view is then static."""
        return self._congestion.age_s(at)


def _per_tier(values: FloatArray, where: str, *, above_zero: bool) -> FloatArray:
    array = np.array(values, dtype=np.float64)
    if array.shape != (TIER_COUNT,):
        raise InputError(f"{array.size} values for {TIER_COUNT} tiers", where=where, mend="give one for each tier")
    if not (np.isfinite(array).all() and (array > 0 if above_zero else array >= 0).all()):
        bound = "above zero" if above_zero else "zero or more"
        raise InputError(f"{array.tolist()} are not all finite and {bound}", where=where, mend="mend the tier's value")
    array.flags.writeable = False
    return array
