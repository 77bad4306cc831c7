"""The full configuration of a control core as data: equal configurations lead to equal decisions. It is stored in the
first line of a log and built from command options."""

from __future__ import annotations

import msgspec

from kvroute.cachepool import CopySpec
from kvroute.control.core import Control
from kvroute.control.settings import ControlSettings
from kvroute.oracle import NetworkOracle, OracleSettings
from kvroute.policies import DEFAULT_DECODE_POLICY, TopologyConstraint, decode_policy, prefill_policy
from kvroute.policies.offload import OffloadSpec
from kvroute.topology import Cluster
from kvroute.types import Arrived, Prefill, PrefillFinished, Request


class ControlSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Policies by name, with their parameters."""

    decode: str = DEFAULT_DECODE_POLICY
    parameters: dict[str, float] = {}
    """Parameters of the decode policy, e.g. {"cache_weight": 1.5} for cla."""
    shadow: str = ""
    """A second decode policy, evaluated with default parameters and without effect; empty: none."""
    prefill: str = "least-loaded"
    constraint: str = ""
    """`level:enforcement[:weight]`, e.g. "pod:fail"; empty: none."""
    oracle: OracleSettings = OracleSettings()
    prefill_cache: bool = True
    """Whether prefill instances reuse cached prefixes."""
    reserve_bytes: float = 0.0
    """KV memory held back on every decode instance (NetKV m_min)."""
    overcommit: bool = False
    """If no instance has room by the router's count, choose as if all had room."""
    cache_block_tokens: int = 0
    """Above 0: the view of an instance's cached prefixes is bounded by its KV memory, in blocks of this many tokens."""

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

    slow_start_s: float = 0.0
    """Window over which the share of a returned instance rises, in seconds; 0: it takes its full share at once."""

    def check(self) -> None:
        """Raises InputError for an unknown policy, parameter or constraint."""
        self._settings(frozenset())

    def build(self, cluster: Cluster) -> Control:
        """Build a fresh core. Raises InputError for an unknown policy, parameter or constraint."""
        return Control(cluster, self._settings(self._switchable(cluster)), NetworkOracle.of(cluster, self.oracle))

    def rehearse(self, cluster: Cluster) -> None:
        """Run one synthetic request through a separate core, to compile now what is compiled on first use."""
        control, model = self.build(cluster), cluster.instances[0].model
        request = Request(id=0, input_tokens=16, blocks=(1,), block_tokens=16, max_output_tokens=1, model=model)
        decisions = control.handle(Arrived(0.0, request))
        if len(decisions) == 1 and isinstance(decisions[0], Prefill):
            control.handle(PrefillFinished(0.0, 0))

    def _switchable(self, cluster: Cluster) -> frozenset[int]:
        """Prefill and decode instances of the datacenters that decode, if role switches are enabled."""
        if self.offload is None or not self.offload.long_term.role_switches:
            return frozenset()
        homes = {instance.datacenter for instance in cluster.instances if instance.role != "prefill"}
        return frozenset(
            index
            for index, instance in enumerate(cluster.instances)
            if instance.datacenter in homes and instance.role != "both"
        )

    def _settings(self, switchable: frozenset[int]) -> ControlSettings:
        return ControlSettings(
            decode_policy=decode_policy(self.decode, **self.parameters),
            prefill_policy=prefill_policy(self.prefill),
            shadow_policy=decode_policy(self.shadow) if self.shadow else None,
            constraint=TopologyConstraint.parse(self.constraint) if self.constraint else None,
            reserve_bytes=self.reserve_bytes,
            prefill_cache=self.prefill_cache,
            overcommit=self.overcommit,
            cache_block_tokens=self.cache_block_tokens,
            offload=self.offload,
            layerwise=self.layerwise,
            prefix_pool=self.prefix_pool,
            copies=self.copies,
            slow_start_s=self.slow_start_s,
            switchable=switchable,
        )
