"""Configuration of an Envoy that asks a picker: the smallest one that does all that the picker expects of a gateway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvroute.epp.addresses import check_addresses
from kvroute.epp.envoy_clusters import (
    PICKER,
    TYPE,
    discovered_engines,
    fallback_engines,
    listed_engines,
    picker_cluster,
    seconds,
    socket_address,
)
from kvroute.epp.envoy_routes import routes
from kvroute.epp.messages import DESTINATION, NAMESPACE, SERVED
from kvroute.http.server.request_parser import RequestLimits
from kvroute.serve.config.settings import GatewaySettings
from kvroute.topology import Cluster
from kvroute.types import InputError

_HTTP = TYPE + "extensions.filters.http."
_SERVED_HEADER = "x-kvroute-served"
"""Response header that carries the served endpoint from the router to the metadata; clients do not see it."""
_LOG_FLUSH_S = 0.2
_REGEX_SIZE = {"re2.max_program_size.error_level": 10_000}
"""Envoy's default of 100 is too small for the list of paths."""
_HEADERS_KB_MOST = 8192
"""The largest limit for headers that Envoy accepts."""


@dataclass(frozen=True, slots=True)
class EnvoySpec:
    """What the configuration says beside the cluster file."""

    picker: str
    """`ip:port` of the picker."""
    listen: str = "127.0.0.1:10000"
    """`ip:port` for clients."""
    admin: str = ""
    """`ip:port` of Envoy's admin interface; empty: none."""
    fail_open: bool = False
    """Whether requests go to the engines in turn while no picker responds; else they fail with status 503."""
    buffered: bool = False
    """Whether Envoy sends each body whole. Envoy can then fail open at any time, and needs memory for the bodies."""
    fallback: tuple[str, ...] = ()
    """`host:port` of the engines that serve in turn while no picker responds; only for discovered engines with
    `fail_open`, since Envoy knows no address of them."""


def envoy_config(cluster: Cluster, settings: GatewaySettings, options: EnvoySpec, source: str) -> dict[str, Any]:
    """Return the bootstrap configuration, as Envoy reads it from JSON or YAML.

    Args:
        cluster: whose instances have endpoints, or are discovered.
        settings: of the cluster file; retries, limits and timeouts are those of the gateway.
        options: the rest.
        source: name of the cluster file, for errors.

    Raises:
        InputError: Envoy cannot reach an instance, or the options do not fit the cluster.
    """
    check_addresses(cluster.instances, source)
    discovered = cluster.file.discovery is not None
    _check_fallback(discovered, options)
    engines = discovered_engines(settings) if discovered else [listed_engines(cluster, settings)]
    if options.fallback:
        engines.append(fallback_engines(options.fallback, settings))
    config: dict[str, Any] = {
        "static_resources": {
            "listeners": [_listener(settings, options)],
            "clusters": [*engines, picker_cluster(options.picker, settings, fail_open=options.fail_open)],
        }
    }
    config["layered_runtime"] = {"layers": [{"name": "kvroute", "static_layer": _REGEX_SIZE}]}
    if options.admin:
        config["admin"] = {"address": socket_address(options.admin)}
    return config


def _check_fallback(discovered: bool, options: EnvoySpec) -> None:
    if discovered and options.fail_open and not options.fallback:
        what = "Envoy knows no address of discovered engines while no picker responds"
        hint = "add --envoy-fallback HOST:PORT, such as a headless Service of the decode engines, or use --fail closed"
        raise InputError(what, where="--fail open", hint=hint)
    if options.fallback and not (discovered and options.fail_open):
        why = "the engines are discovered" if options.fail_open else "Envoy fails open"
        raise InputError(f"it has an effect only if {why}", where="--envoy-fallback", hint="leave it out")


def _listener(settings: GatewaySettings, options: EnvoySpec) -> dict[str, Any]:
    manager = {
        "@type": TYPE + "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "kvroute",
        "use_remote_address": True,  # clients connect here: x-forwarded-for ends with their address
        "generate_request_id": True,
        "preserve_external_request_id": True,
        **_limits(settings),
        "access_log": [_access_log(), *([_warning()] if options.fail_open else [])],
        "route_config": {"name": "kvroute", "virtual_hosts": [_virtual_host(settings, options)]},
        "http_filters": [_processor(settings, options), _served_filter(), _router()],
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    return {
        "name": "kvroute",
        "address": socket_address(options.listen),
        "per_connection_buffer_limit_bytes": int(settings.limits.body_bytes),
        "filter_chains": [chain],
    }


def _limits(settings: GatewaySettings) -> dict[str, Any]:
    """Return how Envoy normalizes paths, so that routes, picker and engine see the same one, and its limits for
    requests, which are those of the gateway."""
    limits = settings.limits
    return {
        "normalize_path": True,
        "merge_slashes": True,
        "path_with_escaped_slashes_action": "UNESCAPE_AND_FORWARD",  # clients escape slashes in names of models
        "max_request_headers_kb": min(-(-int(limits.header_bytes) // 1024), _HEADERS_KB_MOST),
        "request_headers_timeout": seconds(float(limits.header_s)),
        "common_http_protocol_options": {
            "max_headers_count": RequestLimits().header_count,
            "idle_timeout": seconds(float(limits.keep_alive_s)),
        },
    }


def _virtual_host(settings: GatewaySettings, options: EnvoySpec) -> dict[str, Any]:
    served = {"key": _SERVED_HEADER, "value": "%UPSTREAM_REMOTE_ADDRESS%"}
    return {
        "name": "kvroute",
        "domains": ["*"],
        "response_headers_to_add": [{"header": served, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}],
        "request_body_buffer_limit": int(settings.limits.body_bytes),
        "routes": routes(settings, fallback=bool(options.fallback)),
    }


def _processor(settings: GatewaySettings, options: EnvoySpec) -> dict[str, Any]:
    waits_s = float(settings.timeouts.prefill_s) * settings.retries.attempts + float(settings.limits.queue_wait_s)
    modes = {
        "request_header_mode": "SEND",
        "request_body_mode": "BUFFERED" if options.buffered else "FULL_DUPLEX_STREAMED",
        "request_trailer_mode": "SKIP" if options.buffered else "SEND",
        "response_header_mode": "SEND",
        "response_body_mode": "NONE",
        "response_trailer_mode": "SEND",
    }
    config = {
        "@type": _HTTP + "ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": PICKER}},
        "message_timeout": seconds(waits_s),  # the picker runs the prefill before it answers
        "failure_mode_allow": options.fail_open,
        "status_on_error": {"code": 503},
        "processing_mode": modes,
        "metadata_options": {
            "forwarding_namespaces": {"untyped": [NAMESPACE, f"{NAMESPACE}.subset_hint"]},
            "receiving_namespaces": {"untyped": [NAMESPACE]},
        },
    }
    if options.fallback:
        config["route_cache_action"] = "CLEAR"  # the route depends on whether the picker has chosen
    return {"name": "envoy.filters.http.ext_proc", "typed_config": config}


def _served_filter() -> dict[str, Any]:
    """Move the served endpoint from the router's response header into the metadata that the picker receives."""
    rule = {
        "header": _SERVED_HEADER,
        "on_header_present": {"metadata_namespace": NAMESPACE, "key": SERVED},
        "remove": True,
    }
    config = {"@type": _HTTP + "header_to_metadata.v3.Config", "response_rules": [rule]}
    return {"name": "envoy.filters.http.header_to_metadata", "typed_config": config}


def _router() -> dict[str, Any]:
    return {"name": "envoy.filters.http.router", "typed_config": {"@type": _HTTP + "router.v3.Router"}}


def _access_log() -> dict[str, Any]:
    """Report each request to the picker when it has ended."""
    config = {
        "@type": TYPE + "extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig",
        "common_config": {
            "log_name": "kvroute",
            "transport_api_version": "V3",
            "grpc_service": {"envoy_grpc": {"cluster_name": PICKER}},
            "buffer_flush_interval": seconds(_LOG_FLUSH_S),
        },
    }
    return {"name": "envoy.access_loggers.http_grpc", "typed_config": config}


def _warning() -> dict[str, Any]:
    """Print a line for each request that no picker has seen: the key is missing. No value that it has is null."""
    matcher = {"filter": NAMESPACE, "path": [{"key": DESTINATION}], "value": {"null_match": {}}}
    line = "warning: no picker responds; request %REQ(X-REQUEST-ID)% went to %UPSTREAM_REMOTE_ADDRESS% in turn\n"
    config = {
        "@type": TYPE + "extensions.access_loggers.stream.v3.StderrAccessLog",
        "log_format": {"text_format_source": {"inline_string": line}},
    }
    return {
        "name": "envoy.access_loggers.stderr",
        "filter": {"metadata_filter": {"matcher": matcher, "match_if_key_not_found": True}},
        "typed_config": config,
    }
