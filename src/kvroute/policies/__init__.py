"""Pure choices: where to prefill, where to decode, and what a topology constraint leaves to choose from."""

from kvroute.policies.constraint import Enforcement, Level, TopologyConstraint, constrain, prefill_mask
from kvroute.policies.decode import (
    DECODE_POLICIES,
    CacheAndLoadAware,
    CacheAware,
    DecodePolicy,
    LoadAware,
    NetKV,
    RoundRobin,
    decode_policy,
)
from kvroute.policies.prefill import PREFILL_POLICIES, PrefillCandidates, PrefillPolicy, prefill_policy

__all__ = [
    "DECODE_POLICIES",
    "PREFILL_POLICIES",
    "CacheAndLoadAware",
    "CacheAware",
    "DecodePolicy",
    "Enforcement",
    "Level",
    "LoadAware",
    "NetKV",
    "PrefillCandidates",
    "PrefillPolicy",
    "RoundRobin",
    "TopologyConstraint",
    "constrain",
    "decode_policy",
    "prefill_mask",
    "prefill_policy",
]
