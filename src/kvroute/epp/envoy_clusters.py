"""Clusters of an Envoy that asks a picker: the engines, the picker itself, and the engines for its absence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvroute.epp.addresses import address_of, host_of, port_of
from kvroute.epp.messages import ATTEMPTS, DESTINATION, NAMESPACE
from kvroute.serve.config.settings import GatewaySettings
from kvroute.topology import Cluster
from kvroute.types import Instance

TYPE = "type.googleapis.com/envoy."
PICKER, POOL, FALLBACK = "kvroute_picker", "kvroute_engines", "kvroute_fallback"
_READINESS, _LIVENESS = "envoy.service.ext_proc.v3.ExternalProcessor", "liveness"
"""Health checks of the picker: whether it has engines, and whether it runs."""
_REQUESTS_MOST = 1_000_000


def socket_address(address: str) -> dict[str, Any]:
    """Return an `ip:port` or `host:port` as Envoy's configuration has it."""
    return {"socket_address": {"address": host_of(address), "port_value": port_of(address)}}


def seconds(number: float) -> str:
    """Return a time in seconds as Envoy's configuration has it."""
    return f"{number:.9f}".rstrip("0").rstrip(".") + "s"


def listed_engines(cluster: Cluster, settings: GatewaySettings) -> dict[str, Any]:
    """Return the cluster of all instances of a file, of which the picker's choice overrides Envoy's.

    Instances that only prefill have a lower priority, so that they serve no request in turn.
    """
    policy = {
        "@type": TYPE + "extensions.load_balancing_policies.override_host.v3.OverrideHost",
        # Not the header: a client could set it and choose its engine while no picker responds.
        "override_host_sources": [{"metadata": {"key": NAMESPACE, "path": [{"key": DESTINATION}]}}],
        "fallback_policy": _round_robin(),
    }
    return {
        "name": POOL,
        "type": "STATIC",
        "connect_timeout": seconds(float(settings.timeouts.connect_s)),
        "circuit_breakers": _breakers(settings),
        "load_assignment": {"cluster_name": POOL, "endpoints": _priorities(cluster)},
        "load_balancing_policy": {
            "policies": [{"typed_extension_config": {"name": "override_host", "typed_config": policy}}]
        },
    }


def discovered_engines(settings: GatewaySettings) -> list[dict[str, Any]]:
    """Return the clusters of engines that Envoy learns from the picker's choices: it connects to any address.

    A cluster of original destinations takes one address from metadata, which clients cannot set. There is one for each
    attempt, and a composite cluster goes from one to the next.
    """
    breakers = _breakers(settings)
    if settings.retries.attempts == 1:
        return [_named_engine(POOL, 1, settings) | {"circuit_breakers": breakers}]
    names = [f"{POOL}_{attempt}" for attempt in range(1, settings.retries.attempts + 1)]
    composite = {
        "@type": TYPE + "extensions.clusters.composite.v3.ClusterConfig",
        "clusters": [{"name": name} for name in names],
    }
    whole = {
        "name": POOL,
        "connect_timeout": seconds(float(settings.timeouts.connect_s)),
        "lb_policy": "CLUSTER_PROVIDED",
        "circuit_breakers": breakers,
        "cluster_type": {"name": "envoy.clusters.composite", "typed_config": composite},
    }
    return [whole, *(_named_engine(name, attempt, settings) for attempt, name in enumerate(names, start=1))]


def _named_engine(name: str, attempt: int, settings: GatewaySettings) -> dict[str, Any]:
    """Return the cluster of the endpoint that the picker names for one attempt."""
    key = {"key": NAMESPACE, "path": [{"key": ATTEMPTS}, {"key": str(attempt)}]}
    return {
        "name": name,
        "type": "ORIGINAL_DST",
        "connect_timeout": seconds(float(settings.timeouts.connect_s)),
        "lb_policy": "CLUSTER_PROVIDED",
        "circuit_breakers": {"thresholds": [_unlimited()]},
        "original_dst_lb_config": {"metadata_key": key},
    }


def fallback_engines(places: Sequence[str], settings: GatewaySettings) -> dict[str, Any]:
    """Return the cluster of engines for the time in which no picker responds: the addresses of names in DNS.

    Args:
        places: `host:port` of each name.
    """
    endpoints = [{"endpoint": {"address": socket_address(place)}} for place in places]
    return {
        "name": FALLBACK,
        "type": "STRICT_DNS",
        "dns_lookup_family": "V4_PREFERRED",
        "connect_timeout": seconds(float(settings.timeouts.connect_s)),
        "circuit_breakers": _breakers(settings),
        "load_assignment": {"cluster_name": FALLBACK, "endpoints": [{"lb_endpoints": endpoints}]},
        "load_balancing_policy": _round_robin(),
    }


def picker_cluster(address: str, settings: GatewaySettings, *, fail_open: bool) -> dict[str, Any]:
    """Return the cluster of the picker, with its health check.

    Args:
        address: `ip:port` of the picker.
        fail_open: whether a picker without engines counts as failed. If not, it is asked, and answers clients with
            the reason; Envoy itself would answer with an empty body.
    """
    check = {
        "timeout": "1s",
        "interval": "1s",
        "no_traffic_interval": "1s",
        "unhealthy_threshold": 2,
        "healthy_threshold": 1,
        "grpc_health_check": {"service_name": _READINESS if fail_open else _LIVENESS},
    }
    http2 = {
        "@type": TYPE + "extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    cluster = {
        "name": PICKER,
        "type": "STATIC",
        "connect_timeout": "1s",
        # Without a healthy picker Envoy fails open or closed at once, before it has sent any part of a body.
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "circuit_breakers": {"thresholds": [_unlimited()]},
        "health_checks": [check],
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2},
        "load_assignment": {
            "cluster_name": PICKER,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": socket_address(address)}}]}],
        },
    }
    if settings.listen.tls is not None:
        tls = {"@type": TYPE + "extensions.transport_sockets.tls.v3.UpstreamTlsContext"}
        cluster["transport_socket"] = {"name": "envoy.transport_sockets.tls", "typed_config": tls}
    return cluster


def _round_robin() -> dict[str, Any]:
    policy = {"@type": TYPE + "extensions.load_balancing_policies.round_robin.v3.RoundRobin"}
    return {"policies": [{"typed_extension_config": {"name": "round_robin", "typed_config": policy}}]}


def _priorities(cluster: Cluster) -> list[dict[str, Any]]:
    found = []
    groups = ([i for i in cluster.instances if (i.role == "prefill") is last] for last in (False, True))
    for priority, group in enumerate(filter(None, groups)):
        found.append({"priority": priority, "lb_endpoints": _endpoints(group)})
    return found


def _endpoints(group: Iterable[Instance]) -> list[dict[str, Any]]:
    """Return the endpoints of instances; data-parallel ranks of one server are one."""
    urls = dict.fromkeys(instance.endpoint.url for instance in group if instance.endpoint is not None)
    return [{"endpoint": {"address": socket_address(address_of(url))}} for url in urls]


def _breakers(settings: GatewaySettings) -> dict[str, Any]:
    """Limit retries as the gateway does, and nothing else."""
    retries = settings.retries
    budget = {"budget_percent": {"value": 100 * retries.share}, "min_retry_concurrency": int(retries.floor_per_s)}
    return {"thresholds": [_unlimited() | {"retry_budget": budget}]}


def _unlimited() -> dict[str, Any]:
    """Leave the limits to the picker's admission."""
    return {"max_connections": _REQUESTS_MOST, "max_pending_requests": _REQUESTS_MOST, "max_requests": _REQUESTS_MOST}
