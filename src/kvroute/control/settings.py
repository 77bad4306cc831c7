"""What the operator decides once, as the core uses it: policies ready to be called, and limits."""

from __future__ import annotations

from dataclasses import dataclass

from kvroute.cachepool import CopySpec
from kvroute.policies import DecodePolicy, PrefillPolicy, TopologyConstraint
from kvroute.policies.offload import OffloadSpec


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """What the operator decides once."""

    decode_policy: DecodePolicy
    prefill_policy: PrefillPolicy
    shadow_policy: DecodePolicy | None = None
    """Asked about every decode decision as well, and not obeyed."""
    constraint: TopologyConstraint | None = None
    reserve_bytes: float = 0.0
    """KV memory held back on every decode instance (NetKV m_min)."""
    prefill_cache: bool = True
    """Whether prefill instances reuse cached prefixes."""
    overcommit: bool = False
    """Where no instance has room by the router's count, choose as if all had: live engines queue by themselves."""
    cache_block_tokens: int = 0
    """Above 0: what is known of an instance's cached prefixes is bounded by its KV memory, in blocks of so many tokens;
    for a view without an engine's word on what it has dropped."""
    offload: OffloadSpec | None = None
    """When prefills leave their datacenter; None: never by plan."""
    layerwise: bool = False
    """Whether every KV cache leaves layer by layer while the prefill goes on; `offload` says so of other sites."""
    prefix_pool: bool = False
    """Whether a prefill instance may fetch a cached prefix from another one of its datacenter."""
    copies: CopySpec | None = None
    """When cached prefixes are copied ahead of demand; None: never."""
    slow_start_s: float = 0.0
    """Window over which the share of a returned instance rises; 0: it takes its full share at once."""
    convertible: frozenset[int] = frozenset()
    """Index in the cluster of instances that may turn from prefill to decode, or back."""
