"""The cluster file of a gateway: from a KvRouter and what its constraint means."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvroute.kube.discovery.labels import TOPOLOGY_PREFIX
from kvroute.kube.resources import KvRouterSpec, place_of
from kvroute.kube.resources.fields import plain_values
from kvroute.kube.resources.resolution import ResolvedTopology
from kvroute.kube.resources.router import SOFT_POLICY
from kvroute.kube.resources.timing import EngineTiming
from kvroute.topology.schema import yaml_text
from kvroute_engine.files.units import quantity_text

KEYS_FOLDER = "/etc/kvroute-keys"
_PREFILL_FIELDS = {
    "linear": ("kind", "base", "per_token"),
    "quadratic": ("kind", "base", "per_token", "per_token2"),
    "piecewise": ("kind", "tokens", "times"),
}
"""Fields of a prefill timing in a cluster file, by its kind."""


def cluster_file(name: str, namespace: str, spec: KvRouterSpec, resolved: ResolvedTopology | None) -> str:
    """Return the file's text; equal inputs give equal texts.

    Args:
        name, namespace: of the KvRouter.
        resolved: None: the KvRouter has no constraint.
    """
    document: dict[str, Any] = {
        "name": name,
        "discovery": {
            "kubernetes": _kubernetes(namespace, spec, resolved),
            **plain_values({level: getattr(spec.network, level) for level in ("node", "rack", "pod")}),
            "drain": f"{spec.drain_seconds} s",
        },
        "timing": {name: _timing(timing) for name, timing in sorted(spec.timing.items())},
        "defaults": {"model": spec.model, **_snake_case(plain_values(spec.defaults))},
    }
    network = _network(spec, resolved)
    if network:
        document["network"] = network
    document["gateway"] = _gateway(spec, resolved)
    return yaml_text(document)


def _kubernetes(namespace: str, spec: KvRouterSpec, resolved: ResolvedTopology | None) -> dict[str, Any]:
    labels = sorted(spec.engines.selector.match_labels.items())
    found: dict[str, Any] = {
        "namespace": namespace,
        "selector": ",".join(f"{key}={value}" for key, value in labels),
    }
    levels = _levels(resolved) if resolved else {}
    return found | ({"levels": levels} if levels else {})


def _levels(resolved: ResolvedTopology) -> dict[str, list[str]]:
    """Return the labels that give each level of the network model: that of nodes, then its copy on pods, for gateways
    that cannot read nodes. The name of a node needs no label."""
    named = {place_of(level): level for level in resolved.levels} | {resolved.place: resolved.level}
    return {
        place: [level.label_key, f"{TOPOLOGY_PREFIX}{level.domain}"]
        for place, level in named.items()
        if place is not None and place != "node"
    }


def _timing(timing: EngineTiming) -> dict[str, Any]:
    """Return one timing in the form of a cluster file, which has other fields for each kind of prefill."""
    prefill = _snake_case(plain_values(timing.prefill))
    kept = _PREFILL_FIELDS[timing.prefill.kind]
    return {
        "prefill": {name: value for name, value in prefill.items() if name in kept},
        "decode": _snake_case(plain_values(timing.decode)),
    }


def _snake_case(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by the keys of a cluster file: `kvCapacity` is `kv_capacity`."""
    return {re.sub("[A-Z]", lambda match: f"_{match[0].lower()}", key): value for key, value in values.items()}


def _network(spec: KvRouterSpec, resolved: ResolvedTopology | None) -> dict[str, Any]:
    """Return latency and bandwidth of each tier: those of the KvRouter, else `networkQoS` of the level."""
    latency: dict[str, Any] = {}
    bandwidth: dict[str, Any] = {}
    for level in resolved.levels if resolved else ():
        place, qos = place_of(level), level.network_qos
        if place is not None and qos is not None:
            latency |= {place: quantity_text(qos.latency_s)} if qos.latency_s is not None else {}
            bandwidth |= {place: quantity_text(qos.bytes_per_s)} if qos.bytes_per_s is not None else {}
    latency |= plain_values(spec.network.latency)
    bandwidth |= plain_values(spec.network.tier_bandwidth)
    return ({"latency": latency} if latency else {}) | ({"tier_bandwidth": bandwidth} if bandwidth else {})


def _gateway(spec: KvRouterSpec, resolved: ResolvedTopology | None) -> dict[str, Any]:
    transfer = spec.kv_cache_transfer_topology
    settings: dict[str, Any] = {
        "listen": {"host": "0.0.0.0", "port": spec.ports.client},
        "admin": {"host": "0.0.0.0", "port": spec.ports.admin},
        "policy": spec.policy,
    }
    if transfer is not None and resolved is not None:
        settings["constraint"] = str(transfer.constraint(resolved.place))
        if transfer.kv_transfer_weight is not None:
            settings |= {"policy": SOFT_POLICY, "parameters": {"kv_transfer_weight": transfer.kv_transfer_weight}}
    if spec.keys_secret_ref is not None:
        settings["keys"] = {"file": f"{KEYS_FOLDER}/{spec.keys_secret_ref.key}"}
    own_timeouts = spec.gateway.get("timeouts")
    settings["timeouts"] = (own_timeouts if isinstance(own_timeouts, dict) else {}) | {
        "drain": f"{spec.drain_seconds} s"
    }
    return {name: value for name, value in spec.gateway.items() if name not in settings} | settings
