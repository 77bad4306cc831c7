"""What runs beside requests: health checks, load, KV events and telemetry, each an emitter of events for the core."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from kvroute.gateway.kv_events import KvEvents
from kvroute.gateway.serving import Serving

if TYPE_CHECKING:
    from kvroute.gateway.gateway import Deployment


class Watchers:
    """All watchers of one cluster, between `start` and `close`."""

    def __init__(self, serving: Serving, deployment: Deployment, chance: random.Random) -> None:
        self._serving, self._deployment, self._chance = serving, deployment, chance

    async def start(self) -> None:
        """Begin to watch."""

    def push(self, body: bytes) -> None:
        """Telemetry that somebody sent."""

    async def close(self) -> None:
        """Stop watching."""
