"""Everything that makes two cores decide alike, as data: a log's first line, a command's options."""

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
    """Of the decode policy, e.g. {"cache_weight": 1.5} for cla."""
    shadow: str = ""
    """A second decode policy that is asked and not obeyed, with the defaults of its parameters; empty for none."""
    prefill: str = "least-loaded"
    constraint: str = ""
    """`level:enforcement[:weight]`, e.g. "pod:fail"; empty for none."""
    oracle: OracleSettings = OracleSettings()
    prefill_cache: bool = True
    """Prefill instances reuse cached prefixes."""
    reserve_bytes: float = 0.0
    """KV memory held back on every decode instance (NetKV m_min)."""
    overcommit: bool = False
    """Where no instance has room by the router's count, choose as if all had."""
    cache_block_tokens: int = 0
    """Above 0: the view of each instance's cached prefixes is bounded by its KV memory, in blocks of so many tokens."""

    offload: OffloadSpec | None = None
    """When a prefill leaves its datacenter; None: instances are chosen whatever datacenter they are in."""
    layerwise: bool = False
    """Prefill and decode instance are chosen at once, and every KV cache leaves layer by layer while the prefill goes
    on; `offload` says so for prompts that another datacenter prefills."""
    prefix_pool: bool = False
    """A prefill instance may fetch a prefix that another one of its datacenter has cached, where that is sooner over
    than computing it; for drivers that can carry that out."""
    copies: CopySpec | None = None
    """When cached prefixes are copied ahead of demand, at reviews; None: never. For drivers that can carry that out."""

    slow_start_s: float = 0.0
    """Window over which the share of a returned instance rises; 0: it takes its full share at once."""

    def check(self) -> None:
        """Raises InputError for an unknown policy, parameter or constraint."""
        self._settings(frozenset())

    def build(self, cluster: Cluster) -> Control:
        """A fresh core. Raises InputError for an unknown policy, parameter or constraint."""
        return Control(cluster, self._settings(self._convertible(cluster)), NetworkOracle.of(cluster, self.oracle))

    def rehearse(self, cluster: Cluster) -> None:
        """One made-up request through a core of its own: what is compiled at its first use is compiled now."""
        control, model = self.build(cluster), cluster.instances[0].model
        request = Request(id=0, input_tokens=16, blocks=(1,), block_tokens=16, max_output_tokens=1, model=model)
        decisions = control.handle(Arrived(0.0, request))
        if len(decisions) == 1 and isinstance(decisions[0], Prefill):
            control.handle(PrefillFinished(0.0, 0))

    def _convertible(self, cluster: Cluster) -> frozenset[int]:
        """Prefill and decode instances of the datacenters that decode, where roles may change."""
        if self.offload is None or not self.offload.long_term.conversions:
            return frozenset()
        homes = {instance.datacenter for instance in cluster.instances if instance.role != "prefill"}
        return frozenset(
            index
            for index, instance in enumerate(cluster.instances)
            if instance.datacenter in homes and instance.role != "both"
        )

    def _settings(self, convertible: frozenset[int]) -> ControlSettings:
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
            convertible=convertible,
        )
