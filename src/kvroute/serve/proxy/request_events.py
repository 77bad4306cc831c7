"""Passes events to the control core and to the event log. No other code creates the events of a request's steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from kvroute.types import (
    Admitted,
    Arrived,
    CopyFinished,
    Decision,
    DecodeFailed,
    Event,
    Finished,
    KvStored,
    PeerEvent,
    Prefill,
    PrefillFailed,
    PrefillFinished,
    ReadFinished,
    Request,
    Served,
    Side,
    TransferFinished,
    TransferMeasured,
)

if TYPE_CHECKING:
    from kvroute.control import Control
    from kvroute.serve.observe.event_log import EventLogWriter
    from kvroute.serve.observe.metrics.metrics import Metrics
    from kvroute.serve.proxy.constraint_log import ConstraintFallbackLog

Decisions: TypeAlias = tuple[Decision, ...]
"""In the order in which they are to be carried out."""


class Caller(NamedTuple):
    """The client of a request, for the event log and the access log."""

    request_id: str
    """Value of the X-Request-Id header."""
    client: str
    """Address of the client."""
    key: str
    """Name of its key, if keys are required."""


class Sharing(Protocol):
    """Passes what happens to own requests to the other gateways of the cluster."""

    def handled(self, event: Event) -> None:
        """Note that the core has handled an event of own traffic."""

    def learned(self, event: PeerEvent) -> None:
        """Note what own traffic has taught, which other gateways cannot observe."""

    @property
    def leads(self) -> bool:
        """Whether this gateway is the one that reviews roles and thresholds."""


class LoggedControl:
    """A control core and the event log of what it receives and decides."""

    __slots__ = ("_control", "_log", "_metrics")

    def __init__(self, control: Control, log: EventLogWriter, metrics: Metrics) -> None:
        self._control, self._log, self._metrics = control, log, metrics

    def handle(self, event: Event) -> Decisions:
        """Pass an event to the core and log it with the decisions."""
        decisions = self._control.handle(event)
        self.write(event, decisions)
        return decisions

    def write(self, event: Event, decisions: Decisions, request_id: str = "") -> None:
        """Log an event that the core has handled. Args: `request_id`: value of the X-Request-Id header."""
        self._metrics.logged(self._log.write(event, decisions, request_id))


class RequestEvents:
    """The way from the gateway into one control core, with one method for each step of a request."""

    __slots__ = ("_callers", "_control", "_fallbacks", "_logged", "_metrics", "_sharing", "notify", "received")

    def __init__(
        self,
        control: Control,
        metrics: Metrics,
        log: EventLogWriter | None,
        callers: Mapping[int, Caller],
        fallbacks: ConstraintFallbackLog | None,
        sharing: Sharing | None = None,
    ) -> None:
        """
        Args:
            control: the core that decides.
            metrics: count decisions and their duration.
            log: the event log; None: events are not logged.
            callers: the client of each request, by number.
            fallbacks: logs decisions that violate the preferred constraint; None: there is no constraint.
            sharing: tells other gateways; None: there are none.
        """
        self._control, self._metrics = control, metrics
        self._callers, self._fallbacks = callers, fallbacks
        self._logged = LoggedControl(control, log, metrics) if log is not None else None
        self.notify: Callable[[Event], Decisions] = (control if self._logged is None else self._logged).handle
        """Passes an event that requires no decision to the core, directly if there is no log and no other gateway."""
        self.received = self.notify
        """Passes an event of another gateway to the core."""
        self._sharing = sharing
        if sharing is not None:
            self.notify = self._shared(self.notify, sharing)

    @staticmethod
    def _shared(notify: Callable[[Event], Decisions], sharing: Sharing) -> Callable[[Event], Decisions]:
        def notify_all(event: Event) -> Decisions:
            decisions = notify(event)
            sharing.handled(event)
            return decisions

        return notify_all

    def decide(self, event: Event) -> Decisions:
        """Pass an event that requires a decision to the core."""
        start = time.perf_counter()
        decisions = self._control.handle(event)
        if decisions:
            took_s = time.perf_counter() - start
            for decision in decisions:
                self._metrics.decided(decision, took_s)
            if self._fallbacks is not None:
                self._fallbacks.decided(event.at, decisions[-1])
        if self._logged is not None:
            caller = self._callers.get(event.request.id) if type(event) is Arrived else None
            self._logged.write(event, decisions, caller.request_id if caller else "")
        if self._sharing is not None:
            self._sharing.handled(event)
        return decisions

    def arrived(
        self,
        request: Request,
        now: float,
        only: tuple[str, ...] | None = None,
        *,
        both_on_arrival: bool = False,
        ttft_max_s: float | None = None,
    ) -> Decisions:
        """Report a new request. Args: see `Arrived`."""
        return self.decide(Arrived(now, request, only, both_on_arrival, ttft_max_s))

    def prefill_finished(self, number: int, now: float, kept_tokens: int = 0) -> Decisions:
        """Report that the KV cache is complete, or that no prefill instance computes it any more. Args: `kept_tokens`:
        see `PrefillFinished`."""
        return self.decide(PrefillFinished(now, number, kept_tokens))

    def prefill_failed(self, number: int, now: float) -> Decisions:
        """Report that the prefill is to be repeated on another instance."""
        return self.decide(PrefillFailed(now, number))

    def decode_failed(self, number: int, now: float, *, kv_lost: bool) -> Decisions:
        """Report that the decode is to be repeated on another instance. Args: see `retry.Retry`."""
        return self.decide(DecodeFailed(now, number, kv_lost=kv_lost))

    def served(self, number: int, instance: str, now: float) -> Decisions:
        """Report that another instance than the chosen one serves the decode leg."""
        return self.decide(Served(now, number, instance))

    def copy_finished(self, decision: Prefill, now: float, *, landed: bool) -> None:
        """Report the end of the prefix copy of this decision."""
        self.notify(CopyFinished(now, decision.copy_id, landed))

    def read_finished(self, read_id: int, side: Side, now: float) -> None:
        """Report that one node has read its part from the store, or has failed to."""
        self.notify(ReadFinished(now, read_id, side))

    def transfer_finished(self, number: int, now: float) -> None:
        """Report that the KV cache has reached the decode instance."""
        self.notify(TransferFinished(now, number))

    def transfer_measured(self, event: TransferMeasured) -> None:
        """Report how long a KV transfer took, as the gateway itself has observed."""
        self.notify(event)
        if self._sharing is not None:
            self._sharing.learned(event)

    def admitted(self, number: int, now: float) -> None:
        """Report that the decode instance has begun to decode the request."""
        self.notify(Admitted(now, number))

    def prefix_stored(self, instance: str, request: Request, now: float) -> None:
        """Report that an instance without KV cache events now has the prompt's prefix in its cache."""
        event = KvStored(now, instance, request.blocks, request.block_tokens)
        self.notify(event)
        if self._sharing is not None:
            self._sharing.learned(event)

    def finished(self, number: int, output_tokens: int | None, now: float, ttft_s: float | None = None) -> None:
        """Report the end of a request. Args: see `Finished`."""
        self.notify(Finished(now, number, output_tokens=output_tokens, ttft_s=ttft_s))
