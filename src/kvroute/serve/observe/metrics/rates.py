"""Rates of the last seconds, and own KV bytes on the links between datacenters, for display only."""

from __future__ import annotations

from collections.abc import Iterable

from kvroute.serve.observe.view import WanLoad
from kvroute.topology import Cluster

RATE_S = 10


class EventRate:
    """Events per second over the last `seconds` complete seconds; constant memory."""

    __slots__ = ("_counts", "_second", "_slots", "total")

    def __init__(self, seconds: int = RATE_S) -> None:
        self.total = 0.0
        self._slots = seconds + 1
        self._counts = [0.0] * self._slots
        self._second = 0

    def add(self, at: float, amount: float = 1.0) -> None:
        """Add an amount."""
        second = int(at)
        if second > self._second:
            self._forward(second)
        self._counts[self._second % self._slots] += amount
        self.total += amount

    def per_s(self, at: float) -> float:
        """Return the mean over the complete seconds; fewer than `seconds` after the start."""
        self._forward(int(at))
        seconds = min(self._slots - 1, self._second)
        whole = sum(self._counts) - self._counts[self._second % self._slots]
        return whole / seconds if seconds else 0.0

    def recent(self, at: float) -> float:
        """Return the total of those seconds and of the current, incomplete one."""
        self._forward(int(at))
        return sum(self._counts)

    def _forward(self, second: int) -> None:
        for passed in range(max(self._second + 1, second - self._slots + 1), second + 1):
            self._counts[passed % self._slots] = 0.0
        self._second = max(self._second, second)


class WanTraffic:
    """Bytes per entry of the cluster file's `wan` and direction, along the route between two instances."""

    def __init__(self, cluster: Cluster) -> None:
        self._datacenters = [instance.datacenter for instance in cluster.instances]
        self._routes = {ends: route for ends, route in cluster.routes.items() if route}
        self._bytes_per_s = [float(entry.bytes_per_s) * entry.count for entry in cluster.file.wan]
        self._landed = [(EventRate(), EventRate()) for _ in self._bytes_per_s]

    def landed(self, source: int, target: int, kv_bytes: float, at: float) -> None:
        """Add a KV transfer that has completed between two instances, given by their positions in the cluster."""
        for entry, forward in self._route(source, target):
            self._landed[entry][0 if forward else 1].add(at, kv_bytes)

    def load(self, moving: Iterable[tuple[int, int, float]], at: float) -> tuple[WanLoad, ...]:
        """Return the load of every entry. Args: `moving`: source, target and bytes of the transfers in progress."""
        counts = [[0, 0] for _ in self._bytes_per_s]
        nbytes = [[0.0, 0.0] for _ in self._bytes_per_s]
        for source, target, kv_bytes in moving:
            for entry, forward in self._route(source, target):
                counts[entry][0 if forward else 1] += 1
                nbytes[entry][0 if forward else 1] += kv_bytes
        return tuple(
            WanLoad(
                in_flight=(count[0], count[1]),
                in_flight_bytes=(size[0], size[1]),
                utilisation=(forward.per_s(at) / bytes_per_s, backward.per_s(at) / bytes_per_s),
            )
            for count, size, (forward, backward), bytes_per_s in zip(
                counts, nbytes, self._landed, self._bytes_per_s, strict=True
            )
        )

    def _route(self, source: int, target: int) -> Iterable[tuple[int, bool]]:
        return self._routes.get((self._datacenters[source], self._datacenters[target]), ())
