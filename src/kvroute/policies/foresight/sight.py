"""What a policy may know of the network at one decision, and what it has learned, for displays; kept by `control`."""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from kvroute.flows.state import FlowState
from kvroute.policies.foresight.links import LinkModel
from kvroute.policies.foresight.transfers import busiest_share
from kvroute.types import FloatArray, IntArray

RECENT_S = 20.0
"""Time after which work that was started counts 1/e."""
_IDLE_S = 2.0
"""Idle time that counts beside the time since the first work, so that one piece of work alone is no high share."""


def recent_s(since_s: float, now_s: float) -> float:
    """Return the time by which recent work is divided to give its share of the time. Args: `since_s`: time of the first
    work."""
    return RECENT_S * (1.0 - math.exp(min(since_s - now_s, 0.0) / RECENT_S)) + _IDLE_S


class StartedBytes(NamedTuple):
    """Bytes of the transfers that were started on each link, fading; live arrays."""

    bytes_: FloatArray
    """Bytes when they were counted last, [m]."""
    at_s: FloatArray
    """Time at which the bytes of each link were counted last, [m]."""
    now_s: float
    since_s: float
    """Time of the first transfer."""


class NetworkView(NamedTuple):
    """The network state that one decision may use: live arrays, which a policy reads and must not keep."""

    links: LinkModel
    state: FlowState
    """Transfers in flight, with their remaining bytes and model rates at this time."""
    flows_per_link: IntArray
    """Number of transfers on each link, [m]."""
    capacity_bytes_per_s: FloatArray
    """Bandwidth of a link that other traffic leaves free, [m]."""
    cable_bytes_per_s: FloatArray
    """Bandwidth of one cable that other traffic leaves free, [m]."""
    tier_bytes_per_s: FloatArray
    """Bandwidth of a tier that other traffic leaves free, [TIER_COUNT]."""
    factor: FloatArray
    """Measured over nominal capacity, [TIER_COUNT]."""
    mean_bytes_per_s: float
    """Mean model rate of a hashed path."""
    output_tokens: float
    """Mean length of a response."""
    source: int
    targets: IntArray
    """Index of each candidate in the tier map, [n]."""
    starts_s: float = 0.0
    """Time from now until the transfer would start."""
    started: StartedBytes | None = None
    """None: not known."""

    def used_share(self, position: int) -> float:
        """Return the highest share in use of a link between the source and a candidate, 0 to 0.95."""
        if self.started is None:
            return 0.0
        links, target, started = self.links, int(self.targets[position]), self.started
        return busiest_share(
            self.source,
            target,
            int(links.tier[self.source, target]),
            links.attached,
            links.wan,
            self.capacity_bytes_per_s,
            started.bytes_,
            started.at_s,
            started.now_s,
            RECENT_S,
            recent_s(started.since_s, started.now_s),
        )


class TierLearned(msgspec.Struct, frozen=True, gc=False):
    """What foresight has learned about one tier, as a decision would use it at that moment; for displays."""

    factor: float
    """Measured over nominal capacity, including the effect of the priors."""
    weight: float
    """Number of recent transfers that it counts, older ones with less weight; 0: nothing was learned."""
    transfers: int
    """Number of transfers that taught the tier since the start."""
    age_s: float | None
    """Time since the last of them, in whole seconds; None: there was none."""
    bytes_per_s: float | None = None
    """Resulting rate of a transfer without others in flight; None: no two instances are in this tier."""
