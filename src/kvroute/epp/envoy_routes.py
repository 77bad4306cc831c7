"""Routes of an Envoy that asks a picker: only paths that the picker lets through, also while no picker responds."""

from __future__ import annotations

from typing import Any

from kvroute.epp.envoy_clusters import FALLBACK, POOL, seconds
from kvroute.epp.messages import DESTINATION, NAMESPACE
from kvroute.serve.api.passthrough_paths import NOT_IN_WILDCARDS, READ, PassthroughPaths, PathPattern
from kvroute.serve.api.responses import error_body
from kvroute.serve.config.settings import GatewaySettings

_WHAT = "the path or method is not served; `gateway: {passthrough: [PATH]}` forwards further paths to an engine"
_NOT_FOUND = error_body(_WHAT, "invalid_request_error", code="not_found")


def routes(settings: GatewaySettings, *, fallback: bool) -> list[dict[str, Any]]:
    """Return the routes: requests for listed paths go to engines, and all others get status 404.

    Args:
        settings: of the cluster file.
        fallback: whether requests for which the picker has made no choice go to other engines.
    """
    exact, wildcards = PassthroughPaths(settings.passthrough).patterns()
    found = [route for pattern in exact for route in _forwarded(pattern, settings, fallback=fallback)]
    found.append(_direct({"path": "/health", **_methods(READ)}, 200, b'{"status":"ok"}'))
    if wildcards:
        found.append(_direct({"safe_regex": {"regex": NOT_IN_WILDCARDS}}, 404, _NOT_FOUND))
        found += [route for pattern in wildcards for route in _forwarded(pattern, settings, fallback=fallback)]
    return [*found, _direct({"prefix": "/"}, 404, _NOT_FOUND)]


def _forwarded(pattern: PathPattern, settings: GatewaySettings, *, fallback: bool) -> list[dict[str, Any]]:
    """Return one route; with a fallback, one for requests with a choice and one for those without."""
    retries = settings.retries
    route = {
        "timeout": "0s",  # a stream may last as long as it has events
        "idle_timeout": seconds(float(settings.timeouts.answer_s)),
        "retry_policy": {
            "retry_on": "connect-failure,refused-stream,retriable-status-codes",
            "retriable_status_codes": [503],  # an engine that is full has not touched the KV cache
            "num_retries": retries.attempts - 1,
        },
    }
    match = {"safe_regex": {"regex": pattern.regex}, **_methods(pattern.methods)}
    chosen = {"match": match, "route": {"cluster": POOL, **route}}
    if not fallback:
        return [chosen]
    present = {"filter": NAMESPACE, "path": [{"key": DESTINATION}], "value": {"present_match": True}}
    return [
        {**chosen, "match": {**match, "dynamic_metadata": [present]}},
        {"match": match, "route": {"cluster": FALLBACK, **route}},
    ]


def _methods(methods: frozenset[bytes]) -> dict[str, Any]:
    """Return the part of a match for methods."""
    regex = "|".join(sorted(method.decode() for method in methods))
    return {"headers": [{"name": ":method", "string_match": {"safe_regex": {"regex": regex}}}]}


def _direct(match: dict[str, Any], status: int, body: bytes) -> dict[str, Any]:
    """Return a route with a response of Envoy's own."""
    kind = {"header": {"key": "content-type", "value": "application/json"}}
    return {
        "match": match,
        "direct_response": {"status": status, "body": {"inline_string": body.decode()}},
        "response_headers_to_add": [{**kind, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}],
    }
