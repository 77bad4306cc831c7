"""One passthrough request: forwarded to any suitable instance; if that fails before the response, the next is tried."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

from kvroute.http.headers import answered, forwarded, header_lines
from kvroute.serve.api.json_fields import RequestError
from kvroute.serve.api.responses import error_body, error_text, with_text_code
from kvroute.serve.engines.availability import NOT_COUNTED
from kvroute.serve.engines.breaker import is_failure
from kvroute.serve.engines.fault_attribution import FaultAttribution
from kvroute.serve.proxy.legs.leg import FAILURE_STATUS, FULL, blame_engine
from kvroute.serve.proxy.retry import EndStream, LegFailure, Progress, Retry, decide

if TYPE_CHECKING:
    from kvroute.http.client.call import Call, Failure
    from kvroute.http.headers import Headers
    from kvroute.http.server.exchange import ClientExchange
    from kvroute.serve.api.passthrough_body import PassthroughBody
    from kvroute.serve.config.settings import TimeoutSettings
    from kvroute.serve.engines.breaker import Attempt
    from kvroute.serve.engines.client import EngineClient
    from kvroute.serve.observe.tracing import LegTrace, RequestTrace
    from kvroute.serve.proxy.runtime import ClusterRuntime

PASSTHROUGH: Literal["passthrough"] = "passthrough"
_NONE_IS_UP = LegFailure("refused", "no instance is up", 503, sent=False)
_ERROR_BYTES_MAX = 64 * 1024
"""Longest error response that is read as a whole."""


def answerers(
    engines: Iterable[EngineClient], model: str, turn: int, *, generates: bool = False
) -> Iterator[EngineClient]:
    """Yield the instances that serve a model (empty: any) in the order to try them.

    An instance must be up when its turn comes. Instances that decode come first for requests that generate tokens, and
    last for others, since prefill instances are idle sooner. Of several, the one with the fewest requests in flight
    comes first; equal ones take turns.
    """
    of_model = [engine for engine in engines if model in ("", engine.instance.model)]
    last = "prefill" if generates else "decode"
    for comes_last in (False, True):
        some = [engine for engine in of_model if (engine.role == last) is comes_last]
        start = turn % max(len(some), 1)
        untried = some[start:] + some[:start]
        while up := [engine for engine in untried if engine.availability.up]:
            best = min(up, key=lambda engine: engine.in_flight)
            untried.remove(best)
            yield best


def first_byte_s(content: PassthroughBody, timeouts: TimeoutSettings) -> float:
    """Return the timeout for the first byte of the response's body, in seconds. Without streaming it comes after the
    last token."""
    if not content.generates:
        return timeouts.prefill_s
    return timeouts.first_token_s if content.streams else timeouts.answer_s


class PassthroughRequest:
    """Calls one engine after the other until one responds, within the retries that the settings allow."""

    def __init__(
        self,
        runtime: ClusterRuntime,
        exchange: ClientExchange,
        content: PassthroughBody,
        turn: int,
        request_id: bytes,
        on_end: Callable[[int], None],
    ) -> None:
        """
        Args:
            content: the model and the body.
            turn: increases by one with each request, so that instances take turns.
            on_end: called once with the status of the response.
        """
        self._runtime, self._exchange, self._content, self._turn = runtime, exchange, content, turn
        self._engines: Iterator[EngineClient] = iter(())
        self._trace: RequestTrace | None = None
        self._request_id, self._on_end = request_id, on_end
        self._engine_id = self._entered_id = b""
        """X-Request-Id for engines: of this attempt, and of the first one."""
        self._call: Call | None = None
        self._engine: EngineClient | None = None
        self._leg: LegTrace | None = None
        self._attempt: Attempt = 0
        self._faults: FaultAttribution | None = None
        self._attempts = 0
        self._status = 0
        self._headers: Headers = []
        self._error = bytearray()
        """Body of an error response; a longer one is relayed as it comes."""
        self._over = False

    def begin(self) -> None:
        """Call the first instance."""
        runtime, exchange = self._runtime, self._exchange
        try:
            exchange.on_gone = self._client_gone
            self._trace = runtime.tracer.request(exchange.headers, PASSTHROUGH)
            self._engine_id = self._entered_id = runtime.request_ids.enter(exchange)
            model = runtime.models.name(self._content.model) if self._content.model else ""
            self._engines = answerers(runtime.engines.values(), model, self._turn, generates=self._content.generates)
            runtime.budget.request(runtime.now())
            self._next(_NONE_IS_UP)
        except RequestError as refused:
            exchange.respond(refused.status, refused.body())
            self._end(refused.status, refused.message)
        except Exception as error:
            self._broke(error)

    def _next(self, failure: LegFailure) -> None:
        """Call the next instance; without one the request ends with the last failure."""
        engine = next(self._engines, None) if self._may_try() else None
        if engine is None:
            self._refuse(failure)
            return
        self._attempts += 1
        if self._attempts > 1:
            self._runtime.metrics.retried(PASSTHROUGH)
            self._engine_id = self._runtime.request_ids.another(self._request_id)
        self._engine, exchange, runtime = engine, self._exchange, self._runtime
        engine.in_flight += 1
        self._attempt = engine.availability.started(runtime.now()) if self._faults is None else NOT_COUNTED
        target = exchange.path + (b"?" + exchange.query if exchange.query else b"")
        head = header_lines(forwarded(exchange.headers, self._engine_id, runtime.forward_headers)) + runtime.added
        head += engine.rank_head
        if self._trace is not None:
            self._leg = self._trace.leg(PASSTHROUGH, {"kvroute.instance": engine.name})
            head += self._leg.head
        # Engines do not support HEAD; the exchange omits the body of the response.
        method = b"GET" if exchange.method == b"HEAD" else exchange.method
        # An engine would read a body without a length as a second request: a GET is sent without its body.
        body = self._content.body if method != b"GET" else b""
        length = b"content-length: %d\r\n" % len(body) if method != b"GET" else b""
        start = b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (method, target, engine.pool.host)
        request = b"".join((start, head, length, b"\r\n", body))
        idle_s = runtime.timeouts.between_tokens_s
        wait_s = first_byte_s(self._content, runtime.timeouts)
        self._call = engine.pool.send(request, self, first_byte_s=wait_s, idle_s=idle_s)

    def _may_try(self) -> bool:
        runtime = self._runtime
        if self._attempts == 0:
            return True
        if self._attempts >= runtime.settings.retries.attempts:
            return False
        if runtime.budget.spend(runtime.now()):
            return True
        runtime.metrics.retry_refused(PASSTHROUGH)
        return False

    def _refuse(self, failure: LegFailure) -> None:
        headers = [(b"retry-after", b"1")] if failure.status == 503 else []
        self._exchange.respond(failure.status, error_body(failure.message, "upstream_error"), headers=headers)
        self._end(failure.status, failure.reason)

    def on_head(self, status: int, headers: Headers) -> None:
        """See `ResponseHandler`."""
        self._status, self._headers = status, headers

    def on_body(self, data: bytes) -> None:
        """See `ResponseHandler`."""
        try:
            if self._status >= 400 and not self._exchange.started:
                self._error += data
                if len(self._error) <= _ERROR_BYTES_MAX or self._refused():
                    del self._error[_ERROR_BYTES_MAX:]
                    return
                data = bytes(self._error)
            self._start()
            self._exchange.write(data)
        except Exception as error:
            self._broke(error)

    def on_end(self) -> None:
        """See `ResponseHandler`."""
        engine, status = self._engine, self._status
        assert engine is not None
        try:
            if self._refused():
                full = status in FULL
                why = f"instance {engine.name} returned status {status}"
                self._on_failed(
                    LegFailure("status", why, 503 if full else 502, not full, error_text(bytes(self._error)))
                )
                return
            now = self._runtime.now()
            engine.availability.succeeded(self._attempt, now)
            if self._faults is not None and status < 400:
                self._faults.answered(PASSTHROUGH, now)
            if status >= 400 and not self._exchange.started:
                content_type, headers = answered(self._headers)
                self._exchange.respond(status, with_text_code(bytes(self._error)), content_type, headers)
            else:
                self._start()
                self._exchange.end()
            self._leave("")
            self._end(status)
        except Exception as error:
            self._broke(error)

    def on_failure(self, failure: Failure) -> None:
        """See `ResponseHandler`."""
        assert self._engine is not None
        try:
            kind, name = failure.kind, self._engine.name
            why = f"instance {name} sent no response ({kind})"
            if kind == "out_of_files":
                why = f"the gateway has no file descriptor left to connect to instance {name}"
            self._on_failed(LegFailure(kind, why, FAILURE_STATUS.get(kind, 502), sent=failure.phase != "connect"))
        except Exception as error:
            self._broke(error)

    def _refused(self) -> bool:
        """Whether another instance may succeed."""
        return self._status == 429 or is_failure(self._status)

    def _on_failed(self, failure: LegFailure) -> None:
        engine, runtime = self._engine, self._runtime
        assert engine is not None
        now = runtime.now()
        blame_engine(engine, self._attempt, PASSTHROUGH, failure.kind, self._status, self._fault_attribution, now)
        self._leave(failure.reason)
        runtime.leg_failed(PASSTHROUGH, engine.name, failure.kind, failure.reason, self._request_id)
        match decide(PASSTHROUGH, failure, Progress(response_started=self._exchange.started)):
            case EndStream():
                self._exchange.abort()
                self._end(502, failure.reason)
            case Retry():
                self._status = 0
                self._error.clear()
                self._next(failure)
            case _:
                self._refuse(failure)

    def _fault_attribution(self) -> FaultAttribution:
        self._faults = self._faults or FaultAttribution()
        return self._faults

    def _start(self) -> None:
        exchange, call = self._exchange, self._call
        if exchange.started:
            return
        if call is not None:
            exchange.on_pause, exchange.on_resume = call.pause, call.resume
        content_type, headers = answered(self._headers)
        length = next((value for name, value in self._headers if name == b"content-length"), None)
        headers.append((b"content-type", content_type))
        exchange.start(self._status, headers, int(length) if length is not None else None)

    def _client_gone(self) -> None:
        if not self._over:
            try:
                self._drop()
                self._end(499, "the client closed the connection")
            except Exception as error:
                self._broke(error)

    def _leave(self, error: str) -> None:
        """End the call."""
        engine, leg = self._engine, self._leg
        self._engine = self._leg = self._call = None
        if engine is not None:
            engine.leg_closed()
        if leg is not None:
            leg.end(error)

    def _drop(self) -> None:
        """Cancel the call because its response is no longer needed."""
        if self._call is not None:
            self._call.abort()
        if self._engine is not None:
            self._engine.availability.cancelled(self._attempt, self._runtime.now())
        self._leave("cancelled")

    def _broke(self, error: Exception) -> None:
        """Handle an internal error: the client gets an error response, and all resources are released."""
        asyncio.get_running_loop().call_exception_handler(
            {"message": "a passthrough request failed with an internal error", "exception": error}
        )
        with suppress(Exception):
            self._drop()
        with suppress(Exception):
            if self._exchange.started:
                self._exchange.abort()
            else:
                self._exchange.respond(500, error_body("internal error in the gateway", "server_error"))
        if not self._over:
            with suppress(Exception):
                self._end(500, "internal error in the gateway")

    def _end(self, status: int, error: str = "") -> None:
        self._over = True
        self._runtime.request_ids.leave(self._entered_id)
        try:
            if self._faults is not None:
                self._faults.ended(status, self._runtime.now())
            if self._trace is not None:
                self._trace.end(status, error)
        finally:
            self._on_end(status)
