"""One request passed on as it came, to any instance that may answer; a failure before the answer goes to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvroute.gateway.answers import error_body
from kvroute.gateway.dialects import forwarded
from kvroute.gateway.exchange import Headers
from kvroute.gateway.pool import request_bytes

if TYPE_CHECKING:
    from kvroute.gateway.breaker import Attempt
    from kvroute.gateway.call import Call, Failure
    from kvroute.gateway.exchange import Exchange
    from kvroute.gateway.serving import Serving
    from kvroute.gateway.station import Station

_TRIES = 3


class Relay:
    """Listens to one engine after the other until one answers."""

    def __init__(
        self,
        serving: Serving,
        exchange: Exchange,
        stations: Iterator[Station],
        request_id: bytes,
        on_end: Callable[[int], None],
    ) -> None:
        """
        Args:
            stations: who may answer, in the order to try them.
            on_end: called once with the status of the answer.
        """
        self._serving, self._exchange, self._stations = serving, exchange, stations
        self._request_id, self._on_end = request_id, on_end
        self._call: Call | None = None
        self._station: Station | None = None
        self._attempt: Attempt = 0
        self._tries = 0
        self._status = 0
        self._headers: Headers = []

    def begin(self) -> None:
        """Ask the first."""
        self._exchange.on_gone = self._client_gone
        self._next("no instance is up", 503)

    def _next(self, why: str, status: int) -> None:
        station = next(self._stations, None) if self._tries < _TRIES else None
        self._tries += 1
        exchange = self._exchange
        if station is None:
            self._refuse(status, why)
            return
        self._station = station
        self._attempt = station.guard.started(self._serving.now())
        station.under_way += 1
        target = exchange.path + (b"?" + exchange.query if exchange.query else b"")
        headers = self._serving.engine_headers(forwarded(exchange.headers, self._request_id))
        # Engines know no HEAD; the exchange leaves the body out.
        method = b"GET" if exchange.method == b"HEAD" else exchange.method
        request = request_bytes(method, target, station.pool.host, headers, exchange.body)
        timeouts = self._serving.settings.timeouts
        self._call = station.pool.send(
            request,
            self,
            first_byte_s=timeouts.prefill_s,
            idle_s=timeouts.between_tokens_s,
        )

    def _refuse(self, status: int, why: str) -> None:
        headers = [(b"x-request-id", self._request_id)]
        if status == 503:
            headers.append((b"retry-after", b"1"))
        self._exchange.respond(status, error_body(why, "upstream_error"), headers=headers)
        self._over(status)

    def on_head(self, status: int, headers: Headers) -> None:
        """See Sink."""
        self._status, self._headers = status, headers

    def on_body(self, data: bytes) -> None:
        """See Sink."""
        if self._status >= 500:
            return  # another instance may do better
        self._start()
        self._exchange.write(data)

    def on_end(self) -> None:
        """See Sink."""
        now, station = self._serving.now(), self._station
        assert station is not None
        if self._status >= 500:
            station.guard.failed(self._attempt, now)
            station.left()
            self._next(f"instance {station.name} answered {self._status}", 502)
            return
        station.guard.succeeded(self._attempt, now)
        station.left()
        self._start()
        self._exchange.end()
        self._over(self._status)

    def on_failure(self, failure: Failure) -> None:
        """See Sink."""
        station = self._station
        assert station is not None
        station.guard.failed(self._attempt, self._serving.now())
        station.left()
        if self._exchange.started:
            self._exchange.abort()
            self._over(502)
        else:
            self._next(f"instance {station.name} gave no answer ({failure.kind})", 502)

    def _start(self) -> None:
        if not self._exchange.started:
            call = self._call
            assert call is not None
            self._exchange.on_pause, self._exchange.on_resume = call.pause, call.resume
            headers = self._serving.answer_headers(self._headers, self._request_id)
            length = next((value for name, value in self._headers if name == b"content-length"), None)
            self._exchange.start(self._status, headers, int(length) if length is not None else None)

    def _client_gone(self) -> None:
        if self._call is not None:
            self._call.abort()
        if self._station is not None:
            self._station.guard.cancelled(self._attempt, self._serving.now())
            self._station.left()
        self._over(499)

    def _over(self, status: int) -> None:
        self._call = self._station = None
        self._on_end(status)
