"""Workload traces: read, written, changed and generated. This package does not depend on clusters or policies."""

from kvroute.files.compressed_lines import fingerprint
from kvroute.sim.workload.agents import THINK_MAX_S, Agents, Session, Turn, User
from kvroute.sim.workload.generator import MOONCAKE_CONVERSATION, TraceShape, generate
from kvroute.sim.workload.profiles import PROFILES, LengthProfile, apply_profile
from kvroute.sim.workload.readers import read, read_any, write
from kvroute.sim.workload.shaping import (
    filter_lengths,
    rescale,
    rescale_if_spread,
    share_prefixes,
    take,
    window,
    with_lengths,
)
from kvroute.sim.workload.trace import LengthStatistics, Loop, Trace, TracedRequest, TraceStatistics

__all__ = [
    "MOONCAKE_CONVERSATION",
    "PROFILES",
    "THINK_MAX_S",
    "Agents",
    "LengthProfile",
    "LengthStatistics",
    "Loop",
    "Session",
    "Trace",
    "TraceShape",
    "TraceStatistics",
    "TracedRequest",
    "Turn",
    "User",
    "apply_profile",
    "filter_lengths",
    "fingerprint",
    "generate",
    "read",
    "read_any",
    "rescale",
    "rescale_if_spread",
    "share_prefixes",
    "take",
    "window",
    "with_lengths",
    "write",
]
