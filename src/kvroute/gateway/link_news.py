"""From what kernels say of KV on its way to what the core is told: a pair's pace, others' share of the ways home."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvroute.gateway.kv_links import LinkSeen
from kvroute.types import CROSS_DATACENTER, CongestionMeasured, TransferMeasured

if TYPE_CHECKING:
    from kvroute.gateway.serving import Serving


class LinkNews:
    """Of one cluster's prefill instances."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._others = 0.0
        """As told last."""

    def seen(self, source: str, links: Sequence[LinkSeen]) -> None:
        """How an instance's KV has left it of late."""
        serving = self._serving
        now = serving.now()
        for link in links:
            if link.backlogged and link.arrived_bytes and link.target in serving.stations:
                # The core asks for one transfer's pace, and knows what else is under way.
                kv_bytes = link.arrived_bytes / max(self._crossing(source, link.target), 1)
                serving.heard(TransferMeasured(now, source, link.target, kv_bytes, link.seconds))
        if serving.ways is not None:
            serving.ways.links_seen(source, links, now)
            self._congestion(serving.ways.others(now), now)

    def _crossing(self, source: str, target: str) -> int:
        """Own transfers under way between two instances."""
        answers = [journey.answer for journey in self._serving.journeys.values()]
        decisions = [answer.decision for answer in answers if answer is not None and answer.crossing]
        return sum((each.source, each.target) == (source, target) for each in decisions)

    def _congestion(self, others: float | None, now: float) -> None:
        """Others' share of the ways, unless an operator's telemetry tells it, who sees more; once when it is over."""
        oracle = self._serving.settings.oracle
        if others is None or oracle.source != "static" or not oracle.separates_own_traffic:
            return
        if others or self._others:
            self._serving.heard(CongestionMeasured(now, (0.0,) * CROSS_DATACENTER + (others,)))
        self._others = others
