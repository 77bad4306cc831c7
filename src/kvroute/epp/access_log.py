"""Envoy's access log: what the picker cannot see in its own streams, without a byte of the responses.

The stream of a request ends in the same way whether its response is complete or has broken off. The access log, which
Envoy sends after the end, tells the two apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvroute.epp.envoy_call import engine_at
from kvroute.epp.envoy_pb2 import HttpAccessLogEntry, ResponseFlags, SocketAddress
from kvroute.epp.messages import DESTINATION, NAMESPACE
from kvroute.serve.observe.logs import log_event
from kvroute_engine.addresses import host_port

if TYPE_CHECKING:
    from kvroute.serve.proxy.runtime import ClusterRuntime


class AccessLog:
    """Takes the entries of all Envoys."""

    def __init__(self, runtime: Callable[[], ClusterRuntime]) -> None:
        """Args: `runtime`: returns the present cluster."""
        self._runtime = runtime
        self.bypassed = 0
        """Requests that Envoy has sent without the picker."""

    def take(self, entry: HttpAccessLogEntry) -> None:
        """Report a response that has broken off, and requests that Envoy has sent without asking the picker."""
        common = entry.common_properties
        lb = common.metadata.filter_metadata
        upstream = address_text(common.upstream_remote_address.socket_address)
        if NAMESPACE not in lb or DESTINATION not in lb[NAMESPACE].fields:
            if upstream:
                self.bypassed += 1
                log_event("warning", "picker_bypassed", request_id=entry.request.request_id, instance=upstream)
            return
        status = entry.response.response_code.value
        if not 0 < status < 400:
            return  # the response headers have reported it
        why = _broken(common.response_flags)
        if why:
            self._report_broken_response(upstream, entry.request.request_id, why)
        elif _client_left(common.response_flags):
            self._runtime().metrics.client_gone()

    def _report_broken_response(self, upstream: str, request_id: str, why: str) -> None:
        runtime = self._runtime()
        now, engine = runtime.now(), engine_at(runtime, upstream)
        runtime.metrics.stream_failed()
        runtime.state.stream_failed(now)
        if engine is not None:
            engine.availability.failed(engine.availability.late_failure(now), now)
            reason = f"decode instance {engine.name} {why}"
            runtime.reports.leg_failed("decode", engine.name, "reset", reason, request_id.encode("latin-1", "replace"))


def address_text(address: SocketAddress) -> str:
    """Return an address as `ip:port`; empty if there is none."""
    if not address.address:
        return ""
    return host_port(address.address, address.port_value)


def _broken(flags: ResponseFlags) -> str:
    """Return how the engine has broken off a response that had begun; empty: it has not."""
    if flags.upstream_connection_termination or flags.upstream_remote_reset:
        return "closed the connection in the middle of its response"
    if flags.upstream_protocol_error:
        return "sent an invalid HTTP response"
    if flags.stream_idle_timeout or flags.upstream_request_timeout:
        return "stopped sending in the middle of its response"
    return ""


def _client_left(flags: ResponseFlags) -> bool:
    return bool(flags.downstream_connection_termination or flags.downstream_remote_reset)
