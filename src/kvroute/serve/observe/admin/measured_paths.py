"""Measured rates of KV transfers by pair of instances, beside the rate that the cluster file gives for the pair."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import nsmallest

from kvroute.serve.observe.decision_view import short
from kvroute.serve.observe.view import MeasuredPath
from kvroute.topology import Cluster
from kvroute.types import TIER_COUNT, MeasuredBy, TransferMeasured

_KEPT = 0.8
"""Weight that the earlier transfers of a pair keep with each later one."""
RECENT_S = 600.0
"""Time for which the last measurement of a pair counts in gauges, in seconds."""


@dataclass(slots=True)
class _Path:
    tier: int
    map_bytes_per_s: float
    at: float = 0.0
    kv_bytes: float = 0.0
    seconds: float = 0.0
    transfers: int = 0
    measured_by: MeasuredBy = ""

    @property
    def ratio(self) -> float:
        return self.kv_bytes / self.seconds / self.map_bytes_per_s


class MeasuredPaths:
    """Receives the measurements of one cluster's transfers."""

    def __init__(self, cluster: Cluster) -> None:
        self._paths: dict[tuple[str, str], _Path] = {}
        self.change(cluster)

    def change(self, cluster: Cluster) -> None:
        """Follow a change of the cluster: pairs whose instances stay keep their measurements."""
        self._cluster, self._names = cluster, {instance.name for instance in cluster.instances}
        self._paths = {ends: path for ends, path in self._paths.items() if self._names.issuperset(ends)}
        for ends, path in self._paths.items():
            path.tier, path.map_bytes_per_s = self._mapped(*ends)

    def measured(self, event: TransferMeasured) -> None:
        """Process a measurement. One of a pair that is not in the cluster (yet, or any more) is ignored."""
        ends = event.source, event.target
        if not (event.kv_bytes > 0 and event.seconds > 0 and self._names.issuperset(ends)):
            return
        path = self._paths.get(ends)
        if path is None or path.measured_by != event.measured_by:
            path = self._paths[ends] = _Path(*self._mapped(*ends), measured_by=event.measured_by)
        kept = _KEPT**event.transfers
        path.kv_bytes, path.seconds = path.kv_bytes * kept + event.kv_bytes, path.seconds * kept + event.seconds
        path.transfers += event.transfers
        path.at = event.at

    def slowest(self, at: float, count: int) -> tuple[MeasuredPath, ...]:
        """Return the pairs that are slowest compared with the cluster file, the slowest first."""
        found = nsmallest(count, self._paths.items(), key=lambda entry: (entry[1].ratio, entry[0]))
        return tuple(
            MeasuredPath(
                source=source,
                target=target,
                tier=path.tier,
                measured_by=path.measured_by,
                transfers=path.transfers,
                bytes_per_s=short(path.kv_bytes / path.seconds),
                map_bytes_per_s=short(path.map_bytes_per_s),
                ratio=short(path.ratio),
                age_s=round(max(0.0, at - path.at), 3),
            )
            for (source, target), path in found
        )

    def lowest_ratios(self, at: float) -> tuple[float | None, ...]:
        """Return, by tier, the lowest ratio of a pair's rate to that of the cluster file; None: no pair was measured
        within `RECENT_S`. First bytes of responses do not count: they show queues, too."""
        lowest: list[float | None] = [None] * TIER_COUNT
        for path in self._paths.values():
            known = lowest[path.tier]
            counts = path.measured_by != "first-byte" and at - path.at <= RECENT_S
            if counts and (known is None or path.ratio < known):
                lowest[path.tier] = path.ratio
        return tuple(lowest)

    def _mapped(self, source: str, target: str) -> tuple[int, float]:
        index = self._cluster.index
        tier = int(self._cluster.tier[index(source), index(target)])
        return tier, float(self._cluster.tier_bytes_per_s[tier])
