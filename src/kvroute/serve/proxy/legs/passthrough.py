"""One passthrough request: forwarded to any suitable instance; if that fails before the response, the next is tried."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

from kvroute.http.headers import answered
from kvroute.serve.api.json_fields import RequestError
from kvroute.serve.api.responses import error_body, with_text_code
from kvroute.serve.proxy.legs.leg import Leg
from kvroute.serve.proxy.request_state import RequestContext
from kvroute.serve.proxy.retry import (
    UNAVAILABLE,
    UPSTREAM,
    EndStream,
    Fail,
    LegFailure,
    PassOn,
    Progress,
    Retry,
    decide,
    passes_on,
    retry_after,
)

if TYPE_CHECKING:
    from kvroute.http.client_exchange import ClientExchange, ResponseWriter
    from kvroute.serve.api.passthrough_body import PassthroughBody
    from kvroute.serve.config.settings import TimeoutSettings
    from kvroute.serve.engines.client import EngineClient
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


class PassthroughLeg(Leg):
    """The call to one instance. Its response is relayed as it comes; an error is held back until its end, so that
    another instance may be tried."""

    __slots__ = ("owner",)
    kind = PASSTHROUGH
    owner: PassthroughRequest

    @property
    def who(self) -> str:
        """See `Leg`."""
        return f"instance {self.engine.name}"

    @property
    def refused(self) -> bool:
        """See `Leg`."""
        return self.status >= 400 and not self.state.exchange.started

    def on_body(self, data: bytes) -> None:
        """See `ResponseHandler`."""
        try:
            if self.refused:
                if self.size <= _ERROR_BYTES_MAX:
                    self._parts.append(data)
                self.size += len(data)
                if self.size <= _ERROR_BYTES_MAX or not passes_on(self.status):
                    return
                data = self.body()
            self._begin_response().write(data)
        except Exception as error:
            self.owner.internal_error(error)

    def on_response(self, now: float) -> None:
        """See `Leg`."""
        faults = self.state.faults
        self.succeeded(now)
        if faults is not None and self.status < 400:
            faults.answered(PASSTHROUGH, now)
        self._begin_response().end()
        self.close()
        self.owner.end(self.status)

    def _begin_response(self) -> ResponseWriter:
        """Begin the response if it has not begun, and return what writes it."""
        writer, call = self.state.exchange.writer, self.call
        assert writer is not None, "another proxy makes the call if it relays the response"
        if self.state.exchange.started:
            return writer
        if call is not None:
            writer.on_pause, writer.on_resume = call.pause, call.resume
        content_type, headers = answered(self.headers)
        length = next((value for name, value in self.headers if name == b"content-length"), None)
        headers.append((b"content-type", content_type))
        writer.start(self.status, headers, int(length) if length is not None else None)
        return writer


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
        self.runtime, self.content = runtime, content
        self.state = RequestContext(runtime, exchange, request_id)
        self.leg: Leg | None = None
        self.untried: Iterator[EngineClient] = iter(())
        """The instances that may serve it, in the order to try them."""
        self._turn, self._on_end = turn, on_end
        self._attempts = 0

    def begin(self) -> None:
        """Call the first instance."""
        runtime, state, content = self.runtime, self.state, self.content
        exchange = state.exchange
        try:
            exchange.on_gone = self._client_gone
            state.enter(PASSTHROUGH)
            if exchange.query:
                state.path = b"%b?%b" % (exchange.path, exchange.query)
            model = runtime.reading.models.name(content.model) if content.model else ""
            self.untried = answerers(runtime.engines.values(), model, self._turn, generates=content.generates)
            now = runtime.now()
            runtime.budget.request(now)
            if not self.send_next(now):
                self._refuse(_NONE_IS_UP, UNAVAILABLE)
        except RequestError as refused:
            exchange.respond(refused.status, refused.body(), headers=retry_after(refused.status))
            self.end(refused.status, refused.message)
        except Exception as error:
            self.internal_error(error)

    def send_next(self, now: float) -> bool:
        """Call the next instance. Return False if there is none."""
        engine = next(self.untried, None)
        if engine is None:
            return False
        self._attempts += 1
        if self._attempts > 1:
            self.runtime.metrics.retried(PASSTHROUGH)
            self.state.next_attempt()
        leg = self.leg = PassthroughLeg(self.state, self, engine, now)
        # Engines do not support HEAD; the exchange omits the body of the response.
        method = b"GET" if self.state.exchange.method == b"HEAD" else self.state.exchange.method
        # An engine would read a body without a length as a second request: a GET is sent without its body.
        body = self.content.body if method != b"GET" else b""
        leg.send(body, first_byte_s(self.content, self.runtime.settings.timeouts), now, method=method)
        return True

    def _may_retry(self, now: float) -> bool:
        runtime = self.runtime
        if self._attempts >= runtime.settings.retries.attempts:
            return False
        if runtime.budget.spend(now):
            return True
        runtime.metrics.retry_refused(PASSTHROUGH)
        return False

    def progress(self) -> Progress:
        """Return how far the request is."""
        return Progress(self.state.over, self.state.exchange.started)

    def on_leg_failed(self, leg: Leg, failure: LegFailure, now: float) -> None:
        """See `LegOwner`: `retry.decide` says what follows."""
        match decide(PASSTHROUGH, failure, self.progress()):
            case PassOn():
                content_type, headers = answered(leg.headers)
                self.state.exchange.respond(leg.status, with_text_code(leg.body()), content_type, headers)
                self.end(leg.status)
            case EndStream():
                self.state.exchange.abort()
                self.end(502, failure.reason)
            case Retry():
                if not (self._may_retry(now) and self.send_next(now)):
                    self._refuse(failure, UPSTREAM)
            case Fail(error_kind=error_kind):
                self._refuse(failure, error_kind)

    def _refuse(self, failure: LegFailure, kind: str) -> None:
        headers = retry_after(failure.status, failure.retry_after_s)
        self.state.exchange.respond(failure.status, error_body(failure.message, kind), headers=headers)
        self.end(failure.status, failure.reason)

    def _client_gone(self) -> None:
        if not self.state.over:
            try:
                self._drop_leg()
                self.end(499, "the client closed the connection")
            except Exception as error:
                self.internal_error(error)

    def _drop_leg(self) -> None:
        leg, self.leg = self.leg, None
        if leg is not None:
            leg.abort(self.runtime.now())

    def internal_error(self, error: Exception) -> None:
        """Handle a bug in the gateway: the client gets an error response, and all resources are released."""
        asyncio.get_running_loop().call_exception_handler(
            {"message": "a passthrough request failed with an internal error", "exception": error}
        )
        exchange = self.state.exchange
        with suppress(Exception):
            self._drop_leg()
        with suppress(Exception):
            if exchange.started:
                exchange.abort()
            else:
                exchange.respond(500, error_body("internal error in the gateway", "server_error"))
        if not self.state.over:
            with suppress(Exception):
                self.end(500, "internal error in the gateway")

    def end(self, status: int, error: str = "") -> None:
        """End the request and report it; its leg must be closed already."""
        state, self.leg = self.state, None
        state.leave()
        try:
            if state.faults is not None:
                state.faults.ended(status, self.runtime.now())
            if state.trace is not None:
                state.trace.end(status, error)
        finally:
            self._on_end(status)
