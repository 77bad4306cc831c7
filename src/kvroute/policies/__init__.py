"""Pure functions that choose the prefill instance, the decode instance and the datacenter, and topology constraints."""

from kvroute.policies.constraint import Enforcement, Level, TopologyConstraint, constrain, prefill_mask
from kvroute.policies.decode import (
    CacheAndLoadAware,
    CacheAware,
    DecodePolicy,
    LoadAware,
    NetKV,
    RoundRobin,
    queue_and_decode_s,
)
from kvroute.policies.foresight.aggregated import AggregatedCandidates, AggregatedChoice, AggregatedOffer
from kvroute.policies.foresight.joint import ForesightJoint, JointPath, Pair
from kvroute.policies.foresight.links import LinkModel
from kvroute.policies.foresight.policy import Foresight
from kvroute.policies.foresight.sight import NetworkView, TierLearned
from kvroute.policies.foresight.spec import NO_BOUND, TARGETS, ForesightSpec
from kvroute.policies.names import (
    DECODE_POLICIES,
    DECODE_USES,
    DEFAULT_DECODE_POLICY,
    FORESIGHT_POLICIES,
    decode_policy,
    foresight_policy,
    known_parameters,
)
from kvroute.policies.preferences import preferred
from kvroute.policies.prefill import PREFILL_POLICIES, PrefillCandidates, PrefillPolicy, prefill_policy
from kvroute.policies.stateful import (
    CapacityLearner,
    NetworkViewPolicy,
    PairingPolicy,
    PairPolicy,
    PolicyState,
    ResponseObserver,
)

__all__ = [
    "DECODE_POLICIES",
    "DECODE_USES",
    "DEFAULT_DECODE_POLICY",
    "FORESIGHT_POLICIES",
    "NO_BOUND",
    "PREFILL_POLICIES",
    "TARGETS",
    "AggregatedCandidates",
    "AggregatedChoice",
    "AggregatedOffer",
    "CacheAndLoadAware",
    "CacheAware",
    "CapacityLearner",
    "DecodePolicy",
    "Enforcement",
    "Foresight",
    "ForesightJoint",
    "ForesightSpec",
    "JointPath",
    "Level",
    "LinkModel",
    "LoadAware",
    "NetKV",
    "NetworkView",
    "NetworkViewPolicy",
    "Pair",
    "PairPolicy",
    "PairingPolicy",
    "PolicyState",
    "PrefillCandidates",
    "PrefillPolicy",
    "ResponseObserver",
    "RoundRobin",
    "TierLearned",
    "TopologyConstraint",
    "constrain",
    "decode_policy",
    "foresight_policy",
    "known_parameters",
    "preferred",
    "prefill_mask",
    "prefill_policy",
    "queue_and_decode_s",
]
