"""Instances that were not compared as the only one of a request, each with the reason."""

from __future__ import annotations

from collections.abc import Collection

from kvroute.control import ControlSpec
from kvroute.policies import PairingPolicy, decode_policy
from kvroute.topology import Cluster
from kvroute.types import TRAITS, Instance, Request


def not_compared(cluster: Cluster, spec: ControlSpec, request: Request, compared: Collection[str]) -> dict[str, str]:
    """Return the reason by instance, for the instances of the request's model that are not in `compared`; empty if the
    policy never compares them, or if the request needs only one leg."""
    if request.one_leg or not isinstance(decode_policy(spec.decode, **spec.parameters), PairingPolicy):
        return {}
    offered = spec.build(cluster).aggregated_instances
    return {
        instance.name: _reason(cluster, spec, request, instance, offered=instance.name in offered)
        for instance in cluster.instances
        if instance.name not in compared and request.model in ("", instance.model)
    }


def _reason(cluster: Cluster, spec: ControlSpec, request: Request, instance: Instance, *, offered: bool) -> str:
    if not spec.serves_aggregated:
        return "aggregated: 0"
    if spec.offload is not None:
        return "offload"
    if request.adapter:
        return "LoRA adapter"
    if offered:
        return "unavailable"
    traits = TRAITS[instance.protocol]
    if not (traits.prefill_decodes if instance.role == "prefill" else traits.decode_prefills):
        return "engine"
    decodes_only = spec.parameters.get("aggregated") == 1 and instance.role == "prefill"
    mixed = any(peer.role == "both" for peer in cluster.instances if peer.model == instance.model)
    return "role" if decodes_only or mixed else "store"
