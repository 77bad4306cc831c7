"""The decode policies by the names used in configuration and commands."""

from __future__ import annotations

from collections.abc import Callable

from kvroute.policies.decode import (
    CacheAndLoadAware,
    CacheAware,
    DecodePolicy,
    LoadAware,
    RoundRobin,
    netkv,
    netkv_static,
    netkv_topo,
    policy_of,
)
from kvroute.policies.foresight import FORESIGHT_POLICIES, foresight_policy

DECODE_POLICIES: dict[str, Callable[..., DecodePolicy]] = {
    "round-robin": RoundRobin,
    "load-aware": LoadAware,
    "cache-aware": CacheAware,
    "cla": CacheAndLoadAware,
    "netkv-topo": netkv_topo,
    "netkv-static": netkv_static,
    "netkv": netkv,
    **FORESIGHT_POLICIES,
}

DEFAULT_DECODE_POLICY = "foresight"
"""Default of the simulator, the gateway and the testbed."""


def decode_policy(name: str, **parameters: float) -> DecodePolicy:
    """Return the decode policy with this name.

    `cla` takes `cache_weight` and `load_weight`; the foresight policies take the fields of `ForesightSpec`.

    Raises:
        InputError: unknown name or parameter, or a parameter out of bounds.
    """
    if name in FORESIGHT_POLICIES:
        return foresight_policy(name, **parameters)
    return policy_of(DECODE_POLICIES, "decode policy", name, parameters)
