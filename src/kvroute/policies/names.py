"""The decode policies by the names used in configuration and commands."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Set
from typing import TypeVar

import msgspec

from kvroute.policies.decode import (
    CacheAndLoadAware,
    CacheAware,
    DecodePolicy,
    LoadAware,
    RoundRobin,
    netkv,
    netkv_queued,
    netkv_static,
    netkv_topo,
    policy_of,
)
from kvroute.policies.foresight.joint import PairingForesight
from kvroute.policies.foresight.policy import Foresight
from kvroute.policies.foresight.spec import PAIRING_ONLY, SIMULATION_ONLY, ForesightSpec
from kvroute.policies.soft_topology import SoftTopology
from kvroute.policies.storage.balanced import BalancedTokens

Value = TypeVar("Value")


def _closed_form(spec: ForesightSpec) -> Foresight:
    return Foresight(msgspec.structs.replace(spec, width=0))


FORESIGHT_POLICIES: dict[str, Callable[[ForesightSpec], Foresight]] = {
    "foresight": Foresight,
    "foresight-closed": _closed_form,
    "foresight-joint": PairingForesight,
}
"""Variants of foresight by name."""
_UNUSED: dict[str, Set[str]] = {
    "foresight": PAIRING_ONLY,
    "foresight-closed": PAIRING_ONLY | SIMULATION_ONLY,
    "foresight-joint": frozenset(),
}
"""Fields of `ForesightSpec` without an effect on a variant, which are no parameters of it."""

DECODE_POLICIES: dict[str, Callable[..., DecodePolicy]] = {
    "round-robin": RoundRobin,
    "load-aware": LoadAware,
    "cache-aware": CacheAware,
    "cla": CacheAndLoadAware,
    "dualpath": BalancedTokens,
    "soft-topology": SoftTopology,
    "netkv-topo": netkv_topo,
    "netkv-static": netkv_static,
    "netkv": netkv,
    "netkv-queued": netkv_queued,
    **FORESIGHT_POLICIES,
}

DECODE_USES = {
    "foresight": "every request must be a pair, or the prefill policy is yours; transfers share NICs or uplinks",
    "foresight-closed": "thousands of instances, or if a difference of one per cent does not matter",
    "foresight-joint": "the default; prefill and decode chosen together, or one instance for both",
    "netkv": "telemetry is available, even once a minute",
    "netkv-queued": "as `netkv`, where transfers take long: it does not send many at once to one instance",
    "netkv-static": "no telemetry",
    "netkv-topo": "no telemetry, light traffic",
    "cla": "what Mooncake's Conductor and llm-d's scorers do; the baseline to beat",
    "dualpath": "equal instances behind a flat network whose memory is the limit; DualPath's own choice",
    "soft-topology": "to compare with Dynamo's proposed cost, or to keep its `kvTransferWeight` when you migrate",
    "cache-aware": "few hot prefixes, much spare capacity",
    "load-aware": "no shared prefixes, flat network",
    "round-robin": "as a baseline; equal, short requests",
}
"""When to use each decode policy."""

DEFAULT_DECODE_POLICY = "foresight-joint"
"""Default of the simulator, the gateway and the testbed."""


def decode_policy(name: str, **parameters: float) -> DecodePolicy:
    """Return the decode policy with this name.

    `cla` takes `cache_weight` and `load_weight`, `dualpath` takes `balance`, `soft-topology` takes
    `kv_transfer_weight`; the foresight policies take the fields of `ForesightSpec` that have an effect on them.

    Raises:
        InputError: unknown name or parameter, or a parameter out of bounds.
    """
    if name in FORESIGHT_POLICIES:
        return foresight_policy(name, **parameters)
    return policy_of(DECODE_POLICIES, "decode policy", name, parameters)


def known_parameters(name: str, parameters: Mapping[str, Value]) -> dict[str, Value]:
    """Return those of the parameters that the decode policy with this name has; none if there is no such policy."""
    kind = ForesightSpec if name in FORESIGHT_POLICIES else DECODE_POLICIES.get(name)
    accepted = set(inspect.signature(kind).parameters if kind is not None else ()) - _UNUSED.get(name, frozenset())
    return {parameter: value for parameter, value in parameters.items() if parameter in accepted}


def foresight_policy(name: str, **parameters: float) -> Foresight:
    """Return the variant of foresight with this name; parameters are the fields of `ForesightSpec` that have an effect
    on it.

    Raises:
        InputError: unknown name or parameter, or a parameter out of bounds.
    """
    unused = _UNUSED.get(name, frozenset())
    spec = policy_of(dict.fromkeys(FORESIGHT_POLICIES, ForesightSpec), "decode policy", name, parameters, unused)
    return FORESIGHT_POLICIES[name](spec)
