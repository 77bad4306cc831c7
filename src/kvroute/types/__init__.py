"""Shared types: request, instance, snapshots, events, decisions and errors. They have no behaviour.

Units are seconds and bytes. msgspec Structs are sent, logged or read from a file; frozen dataclasses are internal.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvroute.types.discovered import Discovered, DiscoverySource, Joined, OwnPicker, Place, Reporter
from kvroute.types.events import (
    AdaptersMeasured,
    Admitted,
    Arrived,
    BandwidthLearned,
    CapacityLearned,
    ClusterChanged,
    CongestionMeasured,
    CopyFinished,
    DecodeFailed,
    Event,
    Finished,
    InstanceDown,
    InstanceMeasured,
    InstanceUp,
    LinksMeasured,
    MeasuredBy,
    PeerEvent,
    PeerLost,
    PeerReport,
    PeerReported,
    PrefillFailed,
    PrefillFinished,
    RatioLearned,
    ReadFinished,
    ReviewDue,
    RoleDraining,
    RoleSwitched,
    ScaleEnded,
    ScalingDue,
    Served,
    SessionsServed,
    Side,
    ThresholdKnown,
    TransferFinished,
    TransferMeasured,
)
from kvroute.types.instances import (
    CROSS_DATACENTER,
    SAME_DATACENTER,
    SAME_NODE,
    SAME_POD,
    SAME_RACK,
    TIER_COUNT,
    DecodeSpec,
    Endpoint,
    Instance,
    LinearPrefill,
    PiecewisePrefill,
    PrefillSpec,
    QuadraticPrefill,
    Role,
    SchedulerSpec,
    TimingSpec,
    TransferStart,
)
from kvroute.types.kv_events import KvCleared, KvEvicted, KvStored, MemoryTier
from kvroute.types.peers import AdmissionCounts, PeerBooking, UsageCounts
from kvroute.types.protocols import TRAITS, KvProtocol, ProtocolTraits
from kvroute.types.requests import Request
from kvroute_engine.errors import InputError, InputErrors, cannot_listen

if TYPE_CHECKING:
    from kvroute.types.decisions import (
        CopyPrefix,
        Decision,
        Decode,
        FleetDecision,
        Offload,
        Prefill,
        ReadKv,
        Reject,
        Replicas,
        ScaleIn,
        ScaleOut,
        Shadowed,
        SwitchRole,
    )
    from kvroute.types.snapshots import Candidates, Choice, NetworkCosts, Terms
    from kvroute_engine.arrays import BoolArray, FloatArray, IntArray, TierArray
else:

    def __getattr__(name: str) -> object:
        """Import a name of the modules that import numpy, which help pages do without."""
        modules = ("kvroute_engine.arrays", f"{__name__}.decisions", f"{__name__}.snapshots")
        for module in modules if name in __all__ else ():
            names = vars(import_module(module))
            if name in names:
                return globals().setdefault(name, names[name])
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "CROSS_DATACENTER",
    "SAME_DATACENTER",
    "SAME_NODE",
    "SAME_POD",
    "SAME_RACK",
    "TIER_COUNT",
    "TRAITS",
    "AdaptersMeasured",
    "AdmissionCounts",
    "Admitted",
    "Arrived",
    "BandwidthLearned",
    "BoolArray",
    "Candidates",
    "CapacityLearned",
    "Choice",
    "ClusterChanged",
    "CongestionMeasured",
    "CopyFinished",
    "CopyPrefix",
    "Decision",
    "Decode",
    "DecodeFailed",
    "DecodeSpec",
    "Discovered",
    "DiscoverySource",
    "Endpoint",
    "Event",
    "Finished",
    "FleetDecision",
    "FloatArray",
    "InputError",
    "InputErrors",
    "Instance",
    "InstanceDown",
    "InstanceMeasured",
    "InstanceUp",
    "IntArray",
    "Joined",
    "KvCleared",
    "KvEvicted",
    "KvProtocol",
    "KvStored",
    "LinearPrefill",
    "LinksMeasured",
    "MeasuredBy",
    "MemoryTier",
    "NetworkCosts",
    "Offload",
    "OwnPicker",
    "PeerBooking",
    "PeerEvent",
    "PeerLost",
    "PeerReport",
    "PeerReported",
    "PiecewisePrefill",
    "Place",
    "Prefill",
    "PrefillFailed",
    "PrefillFinished",
    "PrefillSpec",
    "ProtocolTraits",
    "QuadraticPrefill",
    "RatioLearned",
    "ReadFinished",
    "ReadKv",
    "Reject",
    "Replicas",
    "Reporter",
    "Request",
    "ReviewDue",
    "Role",
    "RoleDraining",
    "RoleSwitched",
    "ScaleEnded",
    "ScaleIn",
    "ScaleOut",
    "ScalingDue",
    "SchedulerSpec",
    "Served",
    "SessionsServed",
    "Shadowed",
    "Side",
    "SwitchRole",
    "Terms",
    "ThresholdKnown",
    "TierArray",
    "TimingSpec",
    "TransferFinished",
    "TransferMeasured",
    "TransferStart",
    "UsageCounts",
    "cannot_listen",
]
