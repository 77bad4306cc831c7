"""Converts TCP counters of KV transfers into events for the core: throughput of a pair, others' share of WAN paths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvroute.serve.wan.tcp_links import TcpSample
from kvroute.types import CROSS_DATACENTER, CongestionMeasured, TransferMeasured

if TYPE_CHECKING:
    from kvroute.serve.proxy.runtime import ClusterRuntime


class LinkEvents:
    """Emits events on the outgoing KV connections of one cluster's prefill instances."""

    def __init__(self, runtime: ClusterRuntime) -> None:
        self._runtime = runtime
        self._others = 0.0
        """Value that was last emitted."""

    def seen(self, source: str, links: Sequence[TcpSample]) -> None:
        """Take new samples of the connections on which an instance sends KV."""
        runtime = self._runtime
        now = runtime.now()
        for link in links:
            if link.backlogged and link.arrived_bytes and link.target in runtime.engines:
                # The event describes one transfer; the core accounts for the others in progress.
                kv_bytes = link.arrived_bytes / max(self._crossing(source, link.target), 1)
                runtime.on_telemetry(
                    TransferMeasured(now, source, link.target, kv_bytes, link.seconds, measured_by="tcp")
                )
        if runtime.wan_paths is not None:
            runtime.wan_paths.links_seen(source, links, now)
            self._congestion(runtime.wan_paths.others(now), now)

    def _crossing(self, source: str, target: str) -> int:
        """Return the number of own transfers in progress between two instances."""
        return sum(request.transfers(source, target) for request in self._runtime.requests.values())

    def _congestion(self, others: float | None, now: float) -> None:
        """Emit others' share of the WAN paths, and 0 once when it ends; operator telemetry is more complete and
        replaces it."""
        oracle = self._runtime.settings.oracle
        if others is None or oracle.source != "static" or not oracle.separates_own_traffic:
            return
        if others or self._others:
            self._runtime.on_telemetry(CongestionMeasured(now, (0.0,) * CROSS_DATACENTER + (others,)))
        self._others = others
