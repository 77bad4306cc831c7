"""The full configuration of a control core as data: equal configurations lead to equal decisions. It is stored in the
first line of a log and built from command options."""

from __future__ import annotations

import msgspec

from kvroute.control.core import Control
from kvroute.control.rehearsal import warm_up
from kvroute.control.settings import ControlOptions, CoreSpec
from kvroute.oracle import NetworkOracle, OracleSpec
from kvroute.policies import (
    DEFAULT_DECODE_POLICY,
    PairingPolicy,
    TopologyConstraint,
    decode_policy,
    known_parameters,
    prefill_policy,
)
from kvroute.topology import Cluster
from kvroute.topology.reading.discovery import template_cluster


class ControlSpec(ControlOptions, frozen=True, kw_only=True):
    """The options, and the policies by name with their parameters."""

    decode: str = DEFAULT_DECODE_POLICY
    parameters: dict[str, float] = msgspec.field(default_factory=dict)
    """Parameters of the decode policy, e.g. {"cache_weight": 1.5} for cla."""
    shadow: str = ""
    """A second decode policy, evaluated with default parameters and without effect; empty: none."""
    prefill: str = "least-loaded"
    constraint: str = ""
    """`level:enforcement[:weight]`, e.g. "pod:fail"; empty: none."""
    oracle: OracleSpec = OracleSpec()

    def check(self) -> None:
        """Raises InputError for an unknown policy, parameter or constraint."""
        self._settings(frozenset())

    def build(self, cluster: Cluster) -> Control:
        """Build a fresh core. Raises InputError for an unknown policy, parameter or constraint."""
        return Control(cluster, self._settings(self._switchable(cluster)), NetworkOracle.of(cluster, self.oracle))

    def check_cluster(self, cluster: Cluster) -> None:
        """Raises InputError if no core can be built for this cluster, or for one of the engines that it discovers."""
        self.build(cluster if cluster.instances else template_cluster(cluster))

    @property
    def serves_aggregated(self) -> bool:
        """Whether the decode policy may let one instance serve a request of two legs."""
        policy = decode_policy(self.decode, **self.parameters)
        return isinstance(policy, PairingPolicy) and bool(policy.pair_policy(None).serves_aggregated)

    def remarks(self, prefill: str) -> list[str]:
        """Return what the user should know of this combination of policies. Args: `prefill`: the prefill policy that is
        used unless the user sets another one.

        Raises:
            InputError: an unknown policy, parameter or constraint.
        """
        self.check()
        if self.prefill == prefill or not isinstance(decode_policy(self.decode, **self.parameters), PairingPolicy):
            return []
        return [
            f"{self.decode} chooses prefill and decode instances together; the prefill policy {self.prefill} is used "
            "only for engines that receive both legs at once and for instances of role both. Use foresight to choose "
            "prefill instances by that policy."
        ]

    def with_policy(self, decode: str) -> ControlSpec:
        """Return the same configuration with another decode policy, which gets those of the parameters that it has."""
        parameters = known_parameters(decode, self.parameters) if decode != self.decode else self.parameters
        return msgspec.structs.replace(self, decode=decode, parameters=parameters)

    def pairs_only(self) -> ControlSpec:
        """Return the same configuration with a decode policy that lets no instance serve a request of two legs."""
        if not self.serves_aggregated:
            return self
        return msgspec.structs.replace(self, parameters=self.parameters | {"aggregated": 0.0})

    def warm_up(self, cluster: Cluster) -> None:
        """Run synthetic requests through separate cores, to compile now what is compiled on first use.

        A constraint, or an aggregated request, may keep these requests from paths that later ones take, so
        there are also cores without them.
        """
        cluster = cluster if cluster.instances else template_cluster(cluster)
        free = msgspec.structs.replace(self, constraint="")
        specs = [self]
        specs += [spec for spec in (free, free.pairs_only()) if spec != specs[-1]]
        for spec in specs:
            warm_up(spec.build(cluster))

    def _switchable(self, cluster: Cluster) -> frozenset[int]:
        """Prefill and decode instances of the datacenters that decode, if role switches are enabled."""
        by_traffic = self.scaling is not None and self.scaling.manages == "roles"
        if not by_traffic and (self.offload is None or not self.offload.long_term.role_switches):
            return frozenset()
        homes = {instance.datacenter for instance in cluster.instances if instance.role != "prefill"}
        return frozenset(
            index
            for index, instance in enumerate(cluster.instances)
            if instance.datacenter in homes and instance.role != "both"
        )

    def _settings(self, switchable: frozenset[int]) -> CoreSpec:
        return CoreSpec(
            decode_policy=decode_policy(self.decode, **self.parameters),
            prefill_policy=prefill_policy(self.prefill),
            shadow_policy=decode_policy(self.shadow) if self.shadow else None,
            constraint=TopologyConstraint.parse(self.constraint) if self.constraint else None,
            options=self,
            switchable=switchable,
        )
