"""Where admitted requests begin, others wait and the rest are sent away: carries out what admission decides."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvroute.gateway.admission import Admission, AdmissionLimits, Admitted, Queued, Refused
from kvroute.gateway.answers import error_body
from kvroute.gateway.logs import access, access_on, note

if TYPE_CHECKING:
    from kvroute.gateway.exchange import Exchange
    from kvroute.gateway.metrics import Metrics
    from kvroute.gateway.state import ClusterState

_CLOSING = Refused(503, "the gateway is shutting down", 1)


@dataclass(slots=True)
class _Waiting:
    """A request that is not let in, or not yet."""

    exchange: Exchange
    start: Callable[[int], None]
    kind: str
    key: str | None
    since: float


class Entrance:
    """Every request comes in here and says so when it leaves."""

    def __init__(self, admission: Admission, metrics: Metrics, state: ClusterState, now: Callable[[], float]) -> None:
        """Args: `admission` decides, by the clock `now`; `metrics` and `state` count."""
        self.admission = admission
        self._metrics, self._state, self._now = metrics, state, now
        self._waiting: dict[int, _Waiting] = {}
        self._let_in: deque[int] = deque()
        """Those who have waited and now come in, in order."""
        self._letting_in = self._closed = False
        self._tickets = 0
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, exchange: Exchange, kind: str, key: str | None, start: Callable[[int], None]) -> None:
        """Call `start` with a ticket, now or when there is room, or answer that there is none.

        Args:
            exchange: the request.
            kind: the endpoint as metrics name it.
            key: its name, where keys are asked for.
            start: whoever is called must `leave` with the ticket.
        """
        self._tickets += 1
        ticket, now = self._tickets, self._now()
        if self._closed:
            self._send_away(_Waiting(exchange, start, kind, key, now), _CLOSING, "closing")
            return
        entry = self.admission.enter(ticket, key, now)
        if isinstance(entry, Admitted):
            self._begin(ticket, exchange, start)
        elif isinstance(entry, Queued):
            self._waiting[ticket] = _Waiting(exchange, start, kind, key, now)
            exchange.on_gone = lambda: self._left_queue(ticket)
            self._watch_queue()
        else:
            word = "key_limit" if entry.status == 429 else "queue_full"
            self._send_away(_Waiting(exchange, start, kind, key, now), entry, word)

    def leave(self, ticket: int) -> None:
        """A request is over; those who have waited come in."""
        self._admit(self.admission.leave(ticket, self._now()))

    def change(self, limits: AdmissionLimits) -> None:
        """New limits from now on; whoever has room by them comes in."""
        self._admit(self.admission.change(limits))

    def over(
        self, exchange: Exchange, kind: str, status: int, seconds: float, key: str | None, request_id: bytes = b""
    ) -> None:
        """A request without a journey is over: count it and log it."""
        self._metrics.finished(kind, status, seconds)
        if access_on():
            name = (request_id or exchange.header(b"x-request-id") or b"").decode("latin-1")
            access(name, kind, status, seconds, client=exchange.peer, key_name=key or "")

    def close(self) -> None:
        """Nobody waits any more, and nobody comes in: each is told so."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            ticket, waiting = self._waiting.popitem()
            self.admission.cancel(ticket)
            self._send_away(waiting, _CLOSING, "closing")

    def _begin(self, ticket: int, exchange: Exchange, start: Callable[[int], None]) -> None:
        """Let a request in; a fault of ours gives its place back."""
        try:
            start(ticket)
        except Exception as error:
            note("error", "request_failed", reason=f"{type(error).__name__}: {error}")
            if exchange.started:
                exchange.abort()
            else:
                exchange.respond(500, error_body("a fault of the gateway", "internal_error"))
            self.leave(ticket)

    def _admit(self, tickets: list[int]) -> None:
        """Let these in one after the other, though each may be over at once and make room for more: a loop, lest a
        queue become a recursion."""
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
            self.over(waiting.exchange, waiting.kind, 499, self._now() - waiting.since, waiting.key)
            self.leave(ticket)

    def _watch_queue(self) -> None:
        expires_at = self.admission.expires_at
        if self._timer is None and expires_at is not None:
            delay_s = max(0.0, expires_at - self._now())
            self._timer = asyncio.get_running_loop().call_later(delay_s + 0.001, self._expire)

    def _expire(self) -> None:
        self._timer = None
        now = self._now()
        for ticket in self.admission.expire(now):
            self._send_away(self._waiting.pop(ticket), self.admission.overdue(now), "queue_wait")
        self._watch_queue()

    def _send_away(self, waiting: _Waiting, refused: Refused, word: str) -> None:
        exchange, now = waiting.exchange, self._now()
        error = "rate_limit_error" if refused.status == 429 else "service_unavailable"
        headers = [(b"retry-after", b"%d" % refused.retry_after_s)]
        exchange.on_gone = None
        exchange.respond(refused.status, error_body(refused.reason, error), headers=headers)
        self._metrics.rejected(word)
        self._state.rejected(now)
        self.over(exchange, waiting.kind, refused.status, now - waiting.since, waiting.key)
