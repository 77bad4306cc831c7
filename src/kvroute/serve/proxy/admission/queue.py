"""The admission queue: starts admitted requests, holds waiting ones and rejects the rest, as `admission` decides."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvroute.serve.api.responses import error_body
from kvroute.serve.observe.logs import access, access_on, log_event
from kvroute.serve.proxy.admission.admission import (
    Accepted,
    AdmissionController,
    AdmissionLimits,
    Queued,
    Refused,
)

if TYPE_CHECKING:
    from kvroute.http.client_exchange import ClientExchange
    from kvroute.serve.observe.admin.state import DashboardState
    from kvroute.serve.observe.metrics.metrics import Metrics

_FULL = frozenset(("queue_full", "queue_wait"))
"""Causes of a rejection that a request at another time would not meet."""
_CLOSING = Refused(503, "the gateway is shutting down", 1)
_LOOK_S = 0.005
"""Interval at which waiting requests are admitted to room that another worker has made, in seconds."""


@dataclass(slots=True)
class _Waiting:
    """A request that waits or is rejected."""

    exchange: ClientExchange
    start: Callable[[int], None]
    kind: str
    key: str | None
    since: float


class AdmissionQueue:
    """Admits every request, and is called when the request is over."""

    def __init__(
        self, admission: AdmissionController, metrics: Metrics, state: DashboardState, now: Callable[[], float]
    ) -> None:
        """Args: `admission` decides, with times of the clock `now`; `metrics` and `state` count."""
        self.admission = admission
        self._metrics, self._state, self._now = metrics, state, now
        self._waiting: dict[int, _Waiting] = {}
        self._let_in: deque[int] = deque()
        """Tickets of waiting requests that are admitted now, in order."""
        self._letting_in = self._closed = False
        self._tickets = 0
        self._timer: asyncio.TimerHandle | None = None

    def submit(self, exchange: ClientExchange, kind: str, key: str | None, start: Callable[[int], None]) -> None:
        """Call `start` with a ticket, now or when there is room, or respond that there is none.

        Args:
            exchange: the request.
            kind: name of the endpoint in metrics.
            key: name of the API key, if keys are in use.
            start: starts the request; once it is over, `release` must be called with the ticket.
        """
        self._tickets += 1
        ticket, now = self._tickets, self._now()
        if self._closed:
            self._send_away(_Waiting(exchange, start, kind, key, now), _CLOSING, "closing")
            return
        entry = self.admission.acquire(ticket, key, now)
        if isinstance(entry, Accepted):
            self._begin(ticket, exchange, start)
        elif isinstance(entry, Queued):
            self._waiting[ticket] = _Waiting(exchange, start, kind, key, now)
            exchange.on_gone = lambda: self._left_queue(ticket)
            self._watch_queue()
        else:
            metric_reason = "key_limit" if entry.status == 429 else "queue_full"
            self._send_away(_Waiting(exchange, start, kind, key, now), entry, metric_reason)

    def release(self, ticket: int) -> None:
        """Release the place of a request that is over; waiting requests are admitted."""
        admitted = self.admission.release(ticket, self._now())
        if admitted:
            self._admit(admitted)

    def change(self, limits: AdmissionLimits) -> None:
        """Set new limits; waiting requests are admitted as far as the limits allow."""
        self._admit(self.admission.change(limits))

    def log_finished(self, exchange: ClientExchange, kind: str, status: int, seconds: float, key: str | None) -> None:
        """Count and log the end of a request that has no `ProxiedRequest`."""
        self._metrics.finished(kind, status, seconds)
        if access_on():
            access(
                exchange.request_id.decode("latin-1"), kind, status, seconds, client=exchange.peer, key_name=key or ""
            )

    def close(self) -> None:
        """Reject all waiting requests and all new ones."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            ticket, waiting = self._waiting.popitem()
            self.admission.cancel(ticket)
            self._send_away(waiting, _CLOSING, "closing")

    def _begin(self, ticket: int, exchange: ClientExchange, start: Callable[[int], None]) -> None:
        """Start a request; an exception releases its place."""
        try:
            start(ticket)
        except Exception as error:
            log_event("error", "request_failed", reason=f"{type(error).__name__}: {error}")
            if exchange.started:
                exchange.abort()
            else:
                exchange.respond(500, error_body("internal error in the gateway", "internal_error"))
            self.release(ticket)

    def _admit(self, tickets: list[int]) -> None:
        """Start these requests one after the other. Each may end at once and make room for more, so this is a loop to
        avoid recursion."""
        self._let_in += tickets
        if self._letting_in or not self._let_in:
            return
        self._letting_in = True
        while self._let_in:
            ticket = self._let_in.popleft()
            waiting = self._waiting.pop(ticket, None)
            if waiting is not None:
                self._begin(ticket, waiting.exchange, waiting.start)
        self._letting_in = False

    def _left_queue(self, ticket: int) -> None:
        waiting = self._waiting.pop(ticket, None)
        if waiting is not None:
            self._metrics.client_gone()
            self.log_finished(waiting.exchange, waiting.kind, 499, self._now() - waiting.since, waiting.key)
            self.release(ticket)

    def _watch_queue(self) -> None:
        expires_at = self.admission.expires_at
        if self._timer is None and expires_at is not None:
            delay_s = max(0.0, expires_at - self._now()) + 0.001
            wait_s = min(delay_s, _LOOK_S) if self.admission.shared else delay_s
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._expire)

    def _expire(self) -> None:
        self._timer = None
        now = self._now()
        if self.admission.shared:
            self._admit(self.admission.admit())
        for ticket in self.admission.expire(now):
            self._send_away(self._waiting.pop(ticket), self.admission.overdue(now), "queue_wait")
        self._watch_queue()

    def _send_away(self, waiting: _Waiting, refused: Refused, metric_reason: str) -> None:
        exchange, now = waiting.exchange, self._now()
        status = exchange.full_status if metric_reason in _FULL else refused.status
        error = "rate_limit_error" if status == 429 else "service_unavailable"
        headers = [(b"retry-after", b"%d" % refused.retry_after_s)]
        exchange.on_gone = None
        exchange.respond(status, error_body(refused.reason, error), headers=headers)
        self._metrics.rejected(metric_reason)
        self._state.rejected(now)
        self.log_finished(exchange, waiting.kind, status, now - waiting.since, waiting.key)
