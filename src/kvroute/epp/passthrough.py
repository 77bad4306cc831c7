"""One request that needs no decision: Envoy sends it to any instance that is up, in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

from kvroute.epp.decode_leg import connects_s, engine_address, engine_at, header_changes, instances_in
from kvroute.epp.exchange import Pick, PickExchange
from kvroute.http.headers import forwarded, header_lines
from kvroute.serve.api.json_fields import RequestError
from kvroute.serve.api.passthrough_paths import READ
from kvroute.serve.api.responses import error_body
from kvroute.serve.engines.breaker import is_failure
from kvroute.serve.engines.fault_attribution import FaultAttribution
from kvroute.serve.proxy.legs.leg import blame_engine
from kvroute.serve.proxy.legs.passthrough import answerers, first_byte_s

if TYPE_CHECKING:
    from kvroute.http.server.exchange import ClientExchange
    from kvroute.serve.api.passthrough_body import PassthroughBody
    from kvroute.serve.engines.breaker import Attempt
    from kvroute.serve.engines.client import EngineClient
    from kvroute.serve.proxy.runtime import ClusterRuntime

_GONE = 499


class PassthroughPick:
    """See `PassthroughRequest`. Envoy makes the call, and tries the next instance if it cannot connect to the first."""

    def __init__(
        self,
        runtime: ClusterRuntime,
        exchange: ClientExchange,
        content: PassthroughBody,
        turn: int,
        request_id: bytes,
        on_end: Callable[[int], None],
    ) -> None:
        assert isinstance(exchange, PickExchange), "this request is made for those of Envoy"
        self._runtime, self._exchange, self._content, self._turn = runtime, exchange, content, turn
        self._request_id, self._on_end = request_id, on_end
        self._engine: EngineClient | None = None
        self._attempt: Attempt = 0
        self._faults = FaultAttribution()
        self._status = 0
        self._engine_id = b""

    def begin(self) -> None:
        """Let Envoy send the request."""
        runtime, exchange = self._runtime, self._exchange
        try:
            exchange.on_gone = self._client_gone
            model = runtime.models.name(self._content.model) if self._content.model else ""
            engines = self._candidates(model)
            self._engine_id = runtime.request_ids.enter(exchange)
            if not engines:
                body = error_body("no instance is up", "service_unavailable")
                exchange.respond(503, body, headers=[(b"retry-after", b"1")])
                self._ended(503)
                return
            self._engine = engines[0]
            self._attempt = self._engine.started(runtime.now(), counted=True)
            head = header_lines(forwarded(exchange.headers, self._engine_id, runtime.forward_headers)) + runtime.added
            added, removed = header_changes(exchange.headers, head)
            exchange.on_response, exchange.on_end = self._on_response, self._on_response_end
            exchange.on_late = self._on_late
            wait_s = first_byte_s(self._content, runtime.timeouts) + connects_s(runtime)
            destination = ",".join(dict.fromkeys(engine_address(engine) for engine in engines))
            body = b"" if exchange.method in READ else self._content.body
            exchange.pick(Pick(destination, added, removed, body, wait_s))
            exchange.release_body()
        except RequestError as refused:
            exchange.respond(refused.status, refused.body())
            self._ended(refused.status)
        except Exception as error:
            self._broke(error)

    def _candidates(self, model: str) -> list[EngineClient]:
        runtime = self._runtime
        only = instances_in(self._exchange.subsets, runtime)
        able = (
            engine
            for engine in answerers(runtime.engines.values(), model, self._turn, generates=self._content.generates)
            if (only is None or engine.name in only) and engine_address(engine)
        )
        return list(islice(able, runtime.settings.retries.attempts))

    def _on_late(self) -> None:
        """Respond that Envoy has reported no response in time."""
        engine = self._engine
        assert engine is not None
        now, faults = self._runtime.now(), self._faults
        blame_engine(engine, self._attempt, "passthrough", "timeout", 0, lambda: faults, now)
        faults.ended(504, now)
        self._leave()
        self._exchange.respond(504, error_body("the instance did not respond in time", "server_error"))
        self._ended(504)

    def _on_response(self, status: int, served: str) -> None:
        engine, now = self._engine, self._runtime.now()
        assert engine is not None
        self._status = status
        if served and served != engine_address(engine):
            other = engine_at(self._runtime, served)
            if other is not None:
                engine.availability.cancelled(self._attempt, now)
                engine.leg_closed()
                engine = self._engine = other
                self._attempt = other.started(now, counted=True)
        if not served and status < 500:  # Envoy's own response: its routes do not have the path
            engine.availability.cancelled(self._attempt, now)
        elif served and status != 429 and not is_failure(status):
            engine.availability.succeeded(self._attempt, now)
        else:
            kind = "status" if served else "refused"
            faults = self._faults
            blame_engine(engine, self._attempt, "passthrough", kind, status, lambda: faults, now)
            faults.ended(status, now)

    def _on_response_end(self) -> None:
        self._leave()
        self._ended(self._status)

    def _ended(self, status: int) -> None:
        self._runtime.request_ids.leave(self._engine_id)
        self._on_end(status)

    def _client_gone(self) -> None:
        if self._engine is not None:
            self._engine.availability.cancelled(self._attempt, self._runtime.now())
        self._leave()
        self._ended(_GONE)

    def _leave(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.leg_closed()

    def _broke(self, error: Exception) -> None:
        """Handle an internal error: the client gets an error response, and all resources are released."""
        asyncio.get_running_loop().call_exception_handler(
            {"message": "a passthrough request failed with an internal error", "exception": error}
        )
        self._leave()
        with suppress(Exception):
            if self._exchange.started:
                self._exchange.abort()
            else:
                self._exchange.respond(500, error_body("internal error in the gateway", "server_error"))
        self._ended(500)
