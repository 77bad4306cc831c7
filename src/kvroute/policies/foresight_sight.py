"""What a policy may know of the network at one decision, and what it has learned, for displays; kept by `control`."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kvroute.flows.state import State
from kvroute.policies.foresight_links import LinkModel
from kvroute.types import FloatArray, IntArray


class Sight(NamedTuple):
    """The network state that one decision may use: live arrays, which a policy reads and must not keep."""

    links: LinkModel
    state: State
    """Transfers in flight, with their remaining bytes and model rates at this time."""
    crowd: IntArray
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
