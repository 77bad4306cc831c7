"""What requests report of their transfers, legs and ends: to metrics, the dashboard, the logs and the core."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from kvroute.serve.observe.logs import access, log_event
from kvroute.types import Decode, TransferMeasured

if TYPE_CHECKING:
    from kvroute.serve.engines.client import EngineClient
    from kvroute.serve.observe.admin.state import DashboardState
    from kvroute.serve.observe.file_descriptors import OpenFiles
    from kvroute.serve.observe.metrics.metrics import Leg, Metrics
    from kvroute.serve.observe.view import TtftBreakdown
    from kvroute.serve.proxy.own_transfers import OwnTransfers
    from kvroute.serve.proxy.request_events import Caller, RequestEvents


class RequestInProgress(Protocol):
    """A proxied request that has not ended."""

    def stop(self) -> None:
        """Abort the request because the gateway shuts down."""

    def uses(self, name: str) -> bool:
        """Return whether the request is in progress on the instance, or needs the KV cache that it holds."""

    def transfers(self, source: str, target: str) -> bool:
        """Return whether the KV cache of the request crosses from one instance to the other."""

    def on_process_ended(self, name: str) -> None:
        """Send the request again if a decode engine waits for what this instance was to write."""


class EndedRequest(msgspec.Struct, frozen=True, gc=False):
    """A proxied request that has ended."""

    number: int
    """Its id in the event log."""
    ticket: int
    """Ticket of its admission."""
    kind: str
    """Kind of the completion."""
    status: int
    """Status of the response."""
    seconds: float
    """Time since it was received."""
    relayed_bytes: int
    """Size of the relayed response body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReports:
    """Takes the reports of one cluster's requests."""

    metrics: Metrics
    dashboard: DashboardState
    now: Callable[[], float]
    events: RequestEvents
    engines: Mapping[str, EngineClient]
    requests: MutableMapping[int, RequestInProgress]
    """Those that have not ended, by number."""
    callers: MutableMapping[int, Caller]
    """Client of each request, by number; filled only if a log uses it."""
    own_transfers: OwnTransfers
    """By pair, for engines whose counters do not name the other instance."""
    open_files: OpenFiles
    on_end: Callable[[int], None]
    """Called with the ticket of each request that ends."""

    def transfer_started(self, decision: Decode, now: float, expected_s: float) -> None:
        """Report that a decode leg that fetches KV was sent."""
        self.metrics.transfer_started(decision.tier)
        self.dashboard.transfer_started(decision, now, expected_s)
        self.own_transfers.started(decision)

    def transfer_ended(self, decision: Decode, now: float, landed: bool, seconds: float | None) -> None:
        """Report the end of a transfer: complete (with the duration, if it was observed) or failed."""
        self.metrics.transfer_ended(decision.tier, decision.kv_bytes, landed, seconds)
        self.dashboard.transfer_ended(decision.request_id, now, landed=landed)
        self.own_transfers.ended(decision, seconds, now)

    def transfer_observed(self, decision: Decode, seconds: float, now: float) -> None:
        """Report the duration of a transfer that the gateway has observed by the first byte of the response."""
        ends = decision.source, decision.target
        event = TransferMeasured(now, *ends, decision.kv_bytes, seconds, measured_by="first-byte")
        self.events.transfer_measured(event)
        self.dashboard.transfer_measured(event)

    def kv_lost(self, instance: str, failed: int, expired: int) -> None:
        """Report transfers that have failed, and requests whose KV no engine has fetched in time, as an engine's
        connector has counted them since its last page."""
        self.metrics.kv_lost(instance, failed, expired)
        counts = {"failed": failed} if failed else {}
        log_event("warning", "kv_lost", instance=instance, **counts, **({"expired": expired} if expired else {}))

    def first_token(self, decision: Decode, ttft: TtftBreakdown, now: float, exemplar: tuple[str, str] | None) -> None:
        """Report that the client has the first byte of its stream."""
        aggregated = decision.source == decision.target
        protocol = self.engines[decision.target].instance.protocol
        self.metrics.first_token("aggregated" if aggregated else protocol, ttft, exemplar)
        self.dashboard.first_token(ttft, now, tier=None if aggregated else decision.tier, kv_bytes=decision.kv_bytes)

    def whole_answer(self, decision: Decode, now: float) -> None:
        """Report that the client has its complete, unstreamed response, whose first token cannot be observed."""
        aggregated = decision.source == decision.target
        self.dashboard.whole_answer(now, tier=None if aggregated else decision.tier, kv_bytes=decision.kv_bytes)

    def leg_failed(self, leg: Leg, instance: str, kind: str, why: str, request_id: bytes) -> None:
        """Report the failure of a leg."""
        self.metrics.leg_failed(leg, instance, kind)
        if kind == "out_of_files":  # many requests may fail at once: limit the log lines
            self.open_files.report("engine", self.now())
            return
        name = request_id.decode("latin-1")
        log_event("warning", "leg_failed", request_id=name, instance=instance, leg=leg, kind=kind, reason=why)

    def ended(self, ended: EndedRequest, now: float) -> None:
        """Report the end of a request."""
        number, kind, status, seconds = ended.number, ended.kind, ended.status, ended.seconds
        try:
            self.metrics.finished(kind, status, seconds, ended.relayed_bytes)
            self.dashboard.finished(now, status)
            if self.callers and (caller := self.callers.pop(number, None)) is not None:
                name, client, key = caller
                access(name, kind, status, seconds, number=number, client=client, key_name=key)
        finally:
            self.requests.pop(number, None)
            self.on_end(ended.ticket)
