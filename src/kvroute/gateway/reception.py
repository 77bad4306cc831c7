"""Who asks for what: checks keys, admits, queues or refuses, and hands each request to a journey or a relay."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from kvroute.gateway.admission import Admission, Admitted, Queued, Refused
from kvroute.gateway.journey import Journey
from kvroute.gateway.keys import Keys
from kvroute.gateway.openai import RequestError, error_body, models_body, read_completion
from kvroute.gateway.relay import Relay

if TYPE_CHECKING:
    from kvroute.gateway.exchange import Exchange
    from kvroute.gateway.serving import Serving
    from kvroute.gateway.station import Station

COMPLETIONS = frozenset((b"/v1/completions", b"/v1/chat/completions"))
PASSED_ON = frozenset((b"/v1/embeddings", b"/tokenize", b"/detokenize"))
_READ = frozenset((b"GET", b"HEAD"))
_ID_MOST = 200


class _Model(msgspec.Struct):
    model: str = ""


_MODEL = msgspec.json.Decoder(_Model)


@dataclass(slots=True)
class _Waiting:
    """A request in the queue."""

    exchange: Exchange
    start: Callable[[int], None]
    kind: str
    since: float


class Reception:
    """The door's handler."""

    def __init__(
        self,
        serving: Serving,
        admission: Admission,
        keys: Keys,
        *,
        ready: Callable[[], str],
        page: Callable[[str], tuple[str, bytes]] | None,
        description: bytes,
        started_unix_s: int,
    ) -> None:
        """
        Args:
            serving: the cluster for new requests; replaced at a reload.
            admission: who may come in.
            keys: whose requests are served.
            ready: why no requests are taken; empty: they are.
            page: the metrics for an Accept header; None: they are shown on the admin port alone.
            description: the OpenAPI document.
            started_unix_s: for the list of models.
        """
        self.serving, self.admission, self.keys = serving, admission, keys
        self._ready, self._page, self._description, self._started = ready, page, description, started_unix_s
        self._waiting: dict[int, _Waiting] = {}
        self._tickets = 0
        self._turn = 0
        self._timer: asyncio.TimerHandle | None = None

    def __call__(self, exchange: Exchange) -> None:
        """Take a request."""
        path, method = exchange.path, exchange.method
        if path in COMPLETIONS and method == b"POST":
            self._completion(exchange)
        elif path in PASSED_ON and method == b"POST":
            self._pass_on(exchange)
        elif path == b"/v1/models" and method in _READ:
            self._models(exchange)
        else:
            self._own(exchange)

    # Completions and what is passed on

    def _completion(self, exchange: Exchange) -> None:
        key = self._key(exchange)
        if key is _NOBODY:
            return
        try:
            completion = read_completion(exchange.path, exchange.body)
        except RequestError as error:
            self._refuse(exchange, error.status, error.body(), completion_kind(exchange.path))
            return
        serving, received_at = self.serving, self.serving.now()
        request_id = _request_id(exchange)
        serving.state.arrived(received_at)

        def start(ticket: int) -> None:
            serving = self.serving
            journey = Journey(serving, exchange, completion, request_id, received_at)
            journey.ticket = ticket
            serving.journeys[journey.number] = journey
            journey.begin()

        self._enter(exchange, completion.kind, key, start)

    def _pass_on(self, exchange: Exchange) -> None:
        key = self._key(exchange)
        if key is _NOBODY:
            return
        try:
            model = _MODEL.decode(exchange.body).model
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            body = error_body(f"the body is no JSON object with a string `model` ({error})", "invalid_request_error")
            self._refuse(exchange, 400, body, "passed_on")
            return
        self._relay(exchange, key, self._answerers(self.serving, model))

    def _models(self, exchange: Exchange) -> None:
        key = self._key(exchange)
        if key is _NOBODY:
            return
        names = self.serving.served_models()
        if names:
            exchange.respond(200, models_body(names, self._started))
            self.serving.metrics.finished("models", 200, 0.0)
        else:
            self._relay(exchange, key, self._answerers(self.serving, ""))

    def _relay(self, exchange: Exchange, key: str | None, stations: Iterator[Station]) -> None:
        serving, received_at = self.serving, self.serving.now()

        def start(ticket: int) -> None:
            def end(status: int) -> None:
                now = serving.now()
                serving.metrics.finished("passed_on", status, now - received_at)
                self.leave(ticket)

            Relay(serving, exchange, stations, _request_id(exchange), end).begin()

        self._enter(exchange, "passed_on", key, start)

    def _answerers(self, serving: Serving, model: str) -> Iterator[Station]:
        """Instances of the model that are up, in turn; decode instances last, for prefill ones are idle sooner."""
        name = serving.model_of(model)
        stations = [s for s in serving.stations.values() if s.guard.up and name in ("", s.instance.model)]
        self._turn += 1
        start = self._turn % max(len(stations), 1)
        yield from stations[start:] + stations[:start]

    # Admission

    def _enter(self, exchange: Exchange, kind: str, key: str | None, start: Callable[[int], None]) -> None:
        self._tickets += 1
        ticket, now = self._tickets, self.serving.now()
        entry = self.admission.enter(ticket, key, now)
        if isinstance(entry, Admitted):
            start(ticket)
        elif isinstance(entry, Queued):
            self._waiting[ticket] = _Waiting(exchange, start, kind, now)
            exchange.on_gone = lambda: self._left_queue(ticket)
            self._watch_queue()
        else:
            self._send_away(exchange, entry, kind, now, "key_limit" if entry.status == 429 else "queue_full")

    def leave(self, ticket: int) -> None:
        """A request is over; those who have waited come in."""
        for admitted in self.admission.leave(ticket, self.serving.now()):
            waiting = self._waiting.pop(admitted)
            waiting.start(admitted)

    def change(self, admission_changed: list[int]) -> None:
        """Limits have changed; these come in."""
        for admitted in admission_changed:
            self._waiting.pop(admitted).start(admitted)

    def _left_queue(self, ticket: int) -> None:
        waiting = self._waiting.pop(ticket, None)
        if waiting is not None:
            self.admission.cancel(ticket)
            self.serving.metrics.client_gone()
            self.serving.metrics.finished(waiting.kind, 499, self.serving.now() - waiting.since)

    def _watch_queue(self) -> None:
        expires_at = self.admission.expires_at
        if self._timer is None and expires_at is not None:
            delay_s = max(0.0, expires_at - self.serving.now())
            self._timer = asyncio.get_running_loop().call_later(delay_s + 0.001, self._expire)

    def _expire(self) -> None:
        self._timer = None
        now = self.serving.now()
        for ticket in self.admission.expire(now):
            waiting = self._waiting.pop(ticket)
            waiting.exchange.on_gone = None
            overdue = self.admission.overdue(now)
            self._send_away(waiting.exchange, overdue, waiting.kind, waiting.since, "queue_wait")
        self._watch_queue()

    def _send_away(self, exchange: Exchange, refused: Refused, kind: str, since: float, word: str) -> None:
        serving = self.serving
        now = serving.now()
        error = "rate_limit_error" if refused.status == 429 else "service_unavailable"
        headers = [(b"retry-after", b"%d" % refused.retry_after_s)]
        exchange.respond(refused.status, error_body(refused.reason, error), headers=headers)
        serving.metrics.rejected(word)
        serving.state.rejected(now)
        serving.metrics.finished(kind, refused.status, now - since)

    def close(self) -> None:
        """Nobody waits any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # The gateway's own pages

    def _own(self, exchange: Exchange) -> None:
        path, method = exchange.path, exchange.method
        if path in COMPLETIONS | PASSED_ON:
            self._wrong_method(exchange, b"POST")
        elif path in _OWN and method not in _READ:
            self._wrong_method(exchange, b"GET, HEAD")
        elif path == b"/health":
            exchange.respond(200, b'{"status":"ok"}')
        elif path == b"/ready":
            why = self._ready()
            exchange.respond(503, error_body(why, "service_unavailable")) if why else exchange.respond(
                200, b'{"status":"ready"}'
            )
        elif path == b"/metrics" and self._page is not None:
            kind, page = self._page((exchange.header(b"accept") or b"").decode("latin-1"))
            exchange.respond(200, page, kind.encode())
        elif path == b"/openapi.json":
            exchange.respond(200, self._description)
        else:
            what = f"there is no {path.decode('latin-1')[:200]!r} here"
            self._refuse(exchange, 404, error_body(what, "invalid_request_error", code="not_found"), "other")

    def _wrong_method(self, exchange: Exchange, allowed: bytes) -> None:
        what = f"{exchange.method.decode('latin-1')} is not for {exchange.path.decode()}; use {allowed.decode()}"
        body = error_body(what, "invalid_request_error", code="method_not_allowed")
        exchange.respond(405, body, headers=[(b"allow", allowed)])
        self.serving.metrics.finished("other", 405, 0.0)

    def _key(self, exchange: Exchange) -> str | None:
        """The name of the client's key; None where keys are not asked for; `_NOBODY` after a refusal."""
        if not self.keys.required:
            return None
        name = self.keys.name_of(exchange.header(b"authorization"))
        if name is not None:
            return name
        body = error_body(
            "no valid API key; send `Authorization: Bearer KEY`", "authentication_error", code="invalid_api_key"
        )
        exchange.respond(401, body, headers=[(b"www-authenticate", b"Bearer")])
        self.serving.metrics.rejected("key")
        self.serving.metrics.finished(completion_kind(exchange.path), 401, 0.0)
        return _NOBODY

    def _refuse(self, exchange: Exchange, status: int, body: bytes, kind: str) -> None:
        exchange.respond(status, body)
        self.serving.metrics.finished(kind, status, 0.0)


_NOBODY = "\0"
_OWN = frozenset((b"/v1/models", b"/health", b"/ready", b"/metrics", b"/openapi.json"))


def completion_kind(path: bytes) -> str:
    """The endpoint as metrics name it."""
    return {b"/v1/completions": "completions", b"/v1/chat/completions": "chat"}.get(path, "passed_on")


def _request_id(exchange: Exchange) -> bytes:
    given = exchange.header(b"x-request-id")
    return given if given and len(given) <= _ID_MOST else os.urandom(16).hex().encode()
