"""Traces of requests: read, written, shaped and generated; nothing here knows of clusters or policies."""

from kvroute.sim.workload.generator import MOONCAKE_CONVERSATION, Shape, generate
from kvroute.sim.workload.profiles import PROFILES, Profile, apply_profile
from kvroute.sim.workload.readers import read, write
from kvroute.sim.workload.shaping import filter_lengths, rescale, share_prefixes, take, window, with_lengths
from kvroute.sim.workload.trace import LengthStatistics, Trace, TracedRequest, TraceStatistics

__all__ = [
    "MOONCAKE_CONVERSATION",
    "PROFILES",
    "LengthStatistics",
    "Profile",
    "Shape",
    "Trace",
    "TraceStatistics",
    "TracedRequest",
    "apply_profile",
    "filter_lengths",
    "generate",
    "read",
    "rescale",
    "share_prefixes",
    "take",
    "window",
    "with_lengths",
    "write",
]
