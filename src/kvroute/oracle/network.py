"""The network as the router sees it: tiers, own transfers and their measured rates, telemetry; never the true state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvroute.oracle.learned import LearnedBandwidth
from kvroute.oracle.links import LinkView
from kvroute.oracle.telemetry import Congestion, OracleSpec, utilisation_array
from kvroute.topology import Cluster
from kvroute.types import SAME_NODE, TIER_COUNT, FloatArray, InputError, IntArray, NetworkCosts, RatioLearned, TierArray


class NetworkOracle:
    """NetKV's oracle (III-E): static maps, congestion as old as its last refresh, and counts of own transfers."""

    def __init__(
        self,
        tier: TierArray,
        bytes_per_s: FloatArray,
        latency_s: FloatArray,
        settings: OracleSpec | None = None,
        links: LinkView | None = None,
    ) -> None:
        """Start without transfers in flight and without telemetry, that is with the static view.

        Args:
            tier: [n, n] tier of each ordered pair of instances, 0 to TIER_COUNT - 1.
            bytes_per_s: [TIER_COUNT] static bandwidth of a transfer alone, > 0.
            latency_s: [TIER_COUNT] base latency, >= 0.
            settings: how counters and telemetry are used.
            links: needed only for telemetry by link.

        Raises:
            InputError: a shape or a value is out of these bounds.
        """
        self._tier = np.ascontiguousarray(tier, dtype=np.int8)
        if self._tier.ndim != 2 or self._tier.shape[0] != self._tier.shape[1]:
            raise InputError(f"the tier map has shape {self._tier.shape}", where="tier", hint="give an [n, n] array")
        if self._tier.size and not (self._tier.min() >= 0 and self._tier.max() < TIER_COUNT):
            raise InputError("the tier map contains an unknown tier", where="tier", hint=f"use 0 to {TIER_COUNT - 1}")
        self._bytes_per_s = _per_tier(bytes_per_s, "bytes_per_s", above_zero=True)
        self._latency_s = _per_tier(latency_s, "latency_s", above_zero=False)
        self._settings = settings or OracleSpec()
        self._links = links
        self._congestion = Congestion(self._settings)
        self._utilisation: FloatArray | None = None
        self._in_flight: IntArray = np.zeros((len(self._tier), TIER_COUNT), dtype=np.int64)
        self._in_flight_max: IntArray = np.array(self._settings.in_flight_max)
        """An array, because numpy converts a Python number slower than it compares with an array."""
        self._nothing: IntArray = np.zeros(TIER_COUNT, dtype=np.int64)
        self._nothing.flags.writeable = False
        stale_after_s = self._settings.stale_after_s
        self._learned = (
            LearnedBandwidth(self._tier, self._bytes_per_s, self._latency_s, stale_after_s)
            if self._settings.self_measured
            else None
        )

    @classmethod
    def of(cls, cluster: Cluster, settings: OracleSpec | None = None) -> NetworkOracle:
        """The oracle of a loaded cluster, ready for telemetry by tier and by link."""
        return cls(cluster.tier, cluster.tier_bytes_per_s, cluster.tier_latency_s, settings, LinkView.of(cluster))

    def of_changed(self, cluster: Cluster) -> NetworkOracle:
        """Return the oracle of a cluster that may follow this one, with the same settings and no state of its own until
        `take_over`. It changes nothing here."""
        return NetworkOracle.of(cluster, self._settings)

    def take_over(
        self, old: NetworkOracle, before: IntArray, links_before: IntArray, transfers: Iterable[tuple[int, int]]
    ) -> None:
        """Continue with the state of the oracle of the cluster before, which must not be used any more.

        Args:
            old: the oracle of the cluster before; this one is its `of_changed`.
            before: [n] earlier index of each instance; -1: it is new.
            links_before: [links] earlier number of each link; -1: it is new.
            transfers: source and target of each own transfer in progress, as indices of this cluster.
        """
        self._congestion = old._congestion
        if old._utilisation is not None:
            known = old._utilisation
            self._utilisation = np.where(links_before < 0, 0.0, np.append(known, 0.0)[links_before])
        for source, target in transfers:
            self._in_flight[source, self._tier[source, target]] += 1
        if old._learned is not None:
            old._learned.change(self._tier, self._bytes_per_s, self._latency_s, before)
            self._learned = old._learned

    def transfer_started(self, source: int, target: int) -> None:
        """Count an own transfer as in progress (NetKV algorithm 1, line 14)."""
        tier = int(self._tier[source, target])
        if self._learned is not None:
            self._learned.started(source, target, self._counted(source, tier))
        self._in_flight[source, tier] += 1

    def transfer_finished(self, source: int, target: int) -> None:
        """Count its end. A transfer that never started is ignored: an engine may report the same end twice."""
        tier = int(self._tier[source, target])
        if self._in_flight[source, tier] > 0:
            self._in_flight[source, tier] -= 1
            if self._learned is not None:
                self._learned.ended(source, target, self._counted(source, tier))

    def transfer_measured(
        self, at: float, source: int, target: int, kv_bytes: float, seconds: float, transfers: int = 1
    ) -> None:
        """Process measurements of a pair, summed over `transfers` transfers. Does nothing without `self_measured`.

        Raises:
            InputError: a number is negative or not finite, or there is no transfer. The view does not change.
        """
        if self._learned is None:
            return
        tier = int(self._tier[source, target])
        congestion = float(self._congestion.at(at)[tier])
        in_flight = self._counted(source, tier)
        self._learned.measured(at, source, target, kv_bytes, seconds, transfers, congestion, in_flight)

    def _counted(self, source: int, tier: int) -> int:
        """Own transfers in progress as the formula counts them."""
        own = self._settings.separates_own_traffic
        return min(int(self._in_flight[source, tier]), self._settings.in_flight_max) if own else 0

    def congestion_measured(self, at: float, per_tier: Sequence[float]) -> None:
        """Process the operator's telemetry by tier.

        Args:
            at: time of the measurement; one older than the last is ignored.
            per_tier: utilisation by others, length TIER_COUNT; values above 0.99 count as 0.99.

        Raises:
            InputError: wrong length, or a value is negative, infinite or not a number. The view does not change.
        """
        self._congestion.measured(at, utilisation_array(per_tier, TIER_COUNT, "per_tier"))

    def links_measured(self, at: float, utilisation: Sequence[float]) -> None:
        """Process the operator's telemetry by link, in the cluster's order of links. It also updates the view by tier.

        Raises:
            InputError: as for `congestion_measured`, or this oracle has no links.
        """
        if self._links is None:
            raise InputError("telemetry is by link, but the oracle has no LinkView", hint="pass a LinkView")
        measured = utilisation_array(utilisation, self._links.link_count, "utilisation")
        if self._congestion.measured(at, self._links.aggregate(measured)):
            self._utilisation = measured

    def costs(self, source: int, targets: IntArray, at: float, *, own_transfers: bool = True) -> NetworkCosts:
        """A snapshot of what a policy may use of the network between `source` and `targets` at this time.

        Args:
            source: index of the prefill instance.
            targets: [m] indices of the candidates, in the candidates' order.
            at: time of the call.
            own_transfers: include the number and the measured rates of own transfers. A policy with a `NetworkView`
                does not need them, because its own table of transfers is more precise.
        """
        own = own_transfers and self._settings.separates_own_traffic
        tier = self._tier[source].take(targets)
        learned = self._learned if own_transfers else None
        return NetworkCosts(
            tier=tier,
            bytes_per_s=self._bytes_per_s,
            latency_s=self._latency_s,
            congestion=self._congestion.at(at),
            in_flight=np.minimum(self._in_flight[source], self._in_flight_max) if own else self._nothing,
            pair_bytes_per_s=None if learned is None else learned.bytes_per_s(source, targets, tier, at),
        )

    def residual_bytes_per_s(self, source: int, targets: IntArray, at: float) -> FloatArray:
        """Rate that the links leave to a transfer alone of each pair, [m], by the last telemetry by link.

        More precise than tiers: it includes a single busy uplink. Telemetry fades here as it does for tiers.

        Raises:
            InputError: this oracle has no links.
        """
        if self._links is None:
            raise InputError("the oracle has no LinkView", hint="pass a LinkView")
        utilisation = np.zeros(self._links.link_count) if self._utilisation is None else self._utilisation
        return self._links.residual_bytes_per_s(source, targets, utilisation * self._congestion.fading(at))

    def congestion(self, at: float) -> FloatArray:
        """Estimated share of each tier that other traffic uses, [TIER_COUNT] in [0, 1)."""
        return self._congestion.at(at)

    @property
    def separates_own_traffic(self) -> bool:
        """Whether telemetry excludes our own transfers."""
        return self._settings.separates_own_traffic

    def known(self) -> tuple[tuple[RatioLearned | None, ...], list[tuple[int, int, RatioLearned]]]:
        """What own transfers have taught, by tier and by pair of instances, for another oracle to restore."""
        return ((None,) * TIER_COUNT, []) if self._learned is None else self._learned.known()

    def resume(self, tiers: Sequence[RatioLearned | None], pairs: Iterable[tuple[int, int, RatioLearned]]) -> None:
        """Restore what another oracle has learned; raise InputError if it does not fit. Does nothing without
        `self_measured`."""
        if self._learned is not None:
            self._learned.resume(tiers, pairs)

    def learned_ratio(self, at: float) -> tuple[float | None, ...]:
        """Measured over nominal bandwidth by tier; None if nothing was measured."""
        return (None,) * TIER_COUNT if self._learned is None else self._learned.tier_ratio(at)

    def staleness_s(self, at: float) -> float | None:
        """Age of the newest telemetry, in seconds; None before the first one, when the view is static."""
        return self._congestion.age_s(at)


def _per_tier(values: FloatArray, where: str, *, above_zero: bool) -> FloatArray:
    array = np.array(values, dtype=np.float64)
    if array.shape != (TIER_COUNT,):
        raise InputError(f"{array.size} values for {TIER_COUNT} tiers", where=where, hint="give one per tier")
    if not (np.isfinite(array).all() and (array > 0 if above_zero else array >= 0).all()):
        bound = "above zero" if above_zero else "zero or more"
        raise InputError(
            f"{array.tolist()} are not all finite and {bound}", where=where, hint="correct the value of the tier"
        )
    array.flags.writeable = False
    return array


def at_home(count: int) -> NetworkCosts:
    """The network costs of a request that stays on one instance."""
    nothing = np.zeros(TIER_COUNT)
    return NetworkCosts(
        tier=np.full(count, SAME_NODE, dtype=np.int8),
        bytes_per_s=np.ones(TIER_COUNT),
        latency_s=nothing,
        congestion=nothing,
        in_flight=np.zeros(TIER_COUNT, dtype=np.int64),
    )
