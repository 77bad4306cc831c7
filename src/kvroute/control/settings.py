"""The operator's configuration as the core uses it: plain options, and policy objects."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kvroute.control.state.hotspots import CopySpec
from kvroute.policies import DecodePolicy, PrefillPolicy, TopologyConstraint
from kvroute.policies.fleet.autoscaling import ScalingSpec
from kvroute.policies.fleet.offload import OffloadSpec


class ControlOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and features of a core, without its policies."""

    prefill_cache: bool = True
    """Whether prefill instances reuse cached prefixes."""
    reserve_bytes: float = 0.0
    """KV memory held back on every decode instance (NetKV m_min)."""
    overcommit: bool = False
    """If no instance has room by the router's count, choose as if all had room: live engines queue by themselves."""
    cache_block_tokens: int = 0
    """Above 0: the view of an instance's cached prefixes is bounded by its KV memory, in blocks of this many tokens.
    For engines that do not report their evictions."""
    offload: OffloadSpec | None = None
    """When a prefill leaves its datacenter; None: instances are chosen regardless of their datacenter."""
    layerwise: bool = False
    """Prefill and decode instance are chosen at once, and every KV cache is sent layer by layer while the prefill runs.
    `offload` can set this for prompts that another datacenter prefills only."""
    prefix_pool: bool = False
    """A prefill instance may fetch a prefix that another one of its datacenter has cached, if that is faster than
    computing it. The driver must support it."""
    copies: CopySpec | None = None
    """When cached prefixes are copied ahead of demand, at reviews; None: never. The driver must support it."""
    scaling: ScalingSpec | None = None
    """How many instances are needed; None: not computed."""
    adapters: dict[str, float] = msgspec.field(default_factory=dict)
    """Seconds that an instance needs to load a LoRA adapter, by name."""
    session_bonus_s: float = 0.0
    """Seconds by which the instance that has served a request's session last may cost more than another one."""
    predicts: bool = False
    """Whether decisions on arrival have a predicted time to the first token, also without a limit on it."""
    slow_start_s: float = 0.0
    """Window over which the share of a returned instance rises, in seconds; 0: it takes its full share at once."""


@dataclass(frozen=True, slots=True)
class CoreSpec:
    """The operator's configuration; fixed for the life of a core."""

    decode_policy: DecodePolicy
    prefill_policy: PrefillPolicy
    options: ControlOptions
    shadow_policy: DecodePolicy | None = None
    """A second decode policy that is evaluated at every decode decision without effect."""
    constraint: TopologyConstraint | None = None
    switchable: frozenset[int] = frozenset()
    """Indices in the cluster of the instances that may switch between prefill and decode."""
