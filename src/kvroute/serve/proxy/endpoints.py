"""HTTP endpoints: checks keys, submits requests to the admission queue, and hands them to their handlers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias
from urllib.parse import unquote

from kvroute.http.server.content_coding import ACCEPTED, content_coding
from kvroute.http.server.request_parser import HttpError
from kvroute.http.server.web_pages import WebPages, answer_other_site
from kvroute.serve.api.api_keys import Keys
from kvroute.serve.api.json_fields import PIECE_BYTES, RequestError
from kvroute.serve.api.passthrough_body import (
    PassthroughBody,
    passthrough_of,
    passthrough_with_salt,
    read_any_body,
    read_passthrough,
)
from kvroute.serve.api.passthrough_paths import (
    ANY,
    COMPLETIONS,
    MODEL_LIST,
    MODEL_PATH,
    MODELS,
    OWN,
    READ,
    PassthroughEndpoint,
    is_own,
    is_plain,
)
from kvroute.serve.api.requests import KINDS, Completion, read_completion, with_salt
from kvroute.serve.api.responses import error_body, model_body, models_body, no_model_body
from kvroute.serve.observe.logs import access, access_on, log_event
from kvroute.serve.proxy.admission.queue import AdmissionQueue
from kvroute.serve.proxy.admission.tenancy import Charge, Refusal
from kvroute.serve.proxy.body_reader import BodyReader, Read, Taken
from kvroute.serve.proxy.completion.request import ProxiedRequest
from kvroute.serve.proxy.legs.passthrough import PassthroughRequest
from kvroute.serve.proxy.model_cards import ModelCards
from kvroute.serve.proxy.own_pages import OwnPages, no_such_path
from kvroute.serve.proxy.request_events import Caller
from kvroute.serve.proxy.retry import free_of_charge, retry_after

if TYPE_CHECKING:
    from kvroute.http.client_exchange import ClientExchange
    from kvroute.http.headers import Headers
    from kvroute.http.server.exchange import Exchange
    from kvroute.serve.proxy.runtime import ClusterRuntime

_NO_KEY = HttpError(
    401,
    "no valid API key; send `Authorization: Bearer KEY` or `X-Api-Key: KEY`",
    "authentication_error",
    "invalid_api_key",
    b"www-authenticate: Bearer\r\n",
)
_FULL = "connection_limit"
_REASONS = {401: "key", 403: "web_page", 408: "too_slow", 413: "too_large", 429: _FULL, 431: "too_large", 503: _FULL}
"""Reason for each rejection by the server, by status; any other status counts as malformed."""

_REFUSAL_HEADERS = {415: (b"accept-encoding", ACCEPTED), 503: (b"retry-after", b"1")}
"""Additional header of rejections, by status."""
MakeRequest: TypeAlias = "Callable[[ClusterRuntime, ClientExchange, Completion, bytes, float], ProxiedRequest]"
"""Makes the request of a completion; the arguments are those of `ProxiedRequest`."""


class AdmittedRequest(Protocol):
    """A request that has been admitted."""

    def begin(self) -> None:
        """Start it; it raises no exception."""


MakePassthrough: TypeAlias = (
    "Callable[[ClusterRuntime, ClientExchange, PassthroughBody, int, bytes, Callable[[int], None]], AdmittedRequest]"
)
"""Makes a request that needs no decision; the arguments are those of `PassthroughRequest`."""


class Endpoints:
    """The request handler of the server."""

    def __init__(
        self,
        runtime: ClusterRuntime,
        admission_queue: AdmissionQueue,
        keys: Keys,
        *,
        own_pages: OwnPages,
        started_unix_s: int,
        pages: WebPages | None = None,
        proxied: MakeRequest = ProxiedRequest,
        relayed: MakePassthrough = PassthroughRequest,
        routed: frozenset[bytes] = COMPLETIONS,
    ) -> None:
        """
        Args:
            runtime: the cluster for new requests; replaced on reload.
            admission_queue: the admission queue.
            keys: API keys of the clients that are served.
            own_pages: pages about the gateway itself.
            started_unix_s: start of the gateway, for the list of models.
            pages: decides which web pages may read responses; None: no page of another site.
            proxied: makes the request of an admitted completion.
            relayed: makes any other admitted request.
            routed: those of `COMPLETIONS` whose requests get a decision; one instance serves the others alone.
        """
        self.serving, self.keys = runtime, keys
        self._proxied, self._relayed, self._routed = proxied, relayed, routed
        self._pages, self._own_pages = pages or WebPages(), own_pages
        self._admission_queue = admission_queue
        self._started = started_unix_s
        self._turn, self._cards = 0, ModelCards()
        self._reader = BodyReader()
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, exchange: Exchange) -> None:
        """Handle a request of a client that is connected to the gateway."""
        if not (self._pages.origins and answer_other_site(self._pages, exchange)):
            self.answer(exchange)

    def answer(self, exchange: ClientExchange) -> None:
        """Handle a request. Path and method decide, in the same way for all protocols of clients, whether an engine
        gets it."""
        path, method = exchange.path, exchange.method
        if path in self._routed and method == b"POST":
            self._read(exchange, read_completion, self._complete)
        elif (endpoint := self.serving.reading.passthrough.find(path)) is not None:
            if method in endpoint.methods:
                self._forward(exchange, endpoint)
            else:
                self._wrong_method(exchange, b", ".join(sorted(endpoint.methods)))
        elif path == MODELS and method in READ:
            self._models(exchange)
        else:
            self._own(exchange)

    def pass_any(self, exchange: ClientExchange) -> None:
        """Handle a request, which an engine gets whatever its path is, unless the gateway serves the path itself."""
        path = exchange.path
        if is_own(path) or self.serving.reading.passthrough.find(path) is not None:
            self.answer(exchange)
        else:
            self._forward(exchange, ANY)

    def _forward(self, exchange: ClientExchange, endpoint: PassthroughEndpoint) -> None:
        """Handle a request for a path that is passed through."""
        content_types = [value for name, value in exchange.headers if name == b"content-type"]
        read = read_passthrough if endpoint.json else partial(read_any_body, content_types)
        self._read(exchange, read, partial(self._passthrough, endpoint))

    def guard(self, method: bytes, path: bytes, headers: Headers) -> HttpError | None:
        """Reject a client without a key before it sends a body (see `ServerHooks`)."""
        if not self.keys.required:
            return None
        return _NO_KEY if self.keys.name_in(headers) is None else None

    def refused(self, status: int, path: bytes, request_id: bytes, client: str) -> None:
        """Count and log a rejection by the server (see `ServerHooks`)."""
        metrics, kind = self.serving.metrics, self._kind(path)
        metrics.rejected(_REASONS.get(status, "malformed"))
        metrics.finished(kind, status, 0.0)
        if access_on():
            access(request_id.decode("latin-1"), kind, status, 0.0, client=client)

    # Completions and passthrough requests

    def _read(
        self,
        exchange: Taken,
        read: Callable[[bytes, bytes], Read],
        take: Callable[[Taken, str | None, Read, float], None],
    ) -> None:
        """Parse a body, a large one in a thread, and call `take` with the result, the key and the time of arrival."""
        key = self._key(exchange)
        if key is _UNAUTHENTICATED:
            return
        received_at = self.serving.now()
        coding = content_coding(exchange.headers)
        if coding or len(exchange.body) > PIECE_BYTES:
            self._spawn(self._read_aside(exchange, read, take, key, received_at, coding))
            return
        try:
            found = read(exchange.path, exchange.body)
        except RequestError as error:
            self._refuse(exchange, error.status, error.body(), self._kind(exchange.path), key)
            return
        take(exchange, key, found, received_at)

    async def _read_aside(
        self,
        exchange: Taken,
        read: Callable[[bytes, bytes], Read],
        take: Callable[[Taken, str | None, Read, float], None],
        key: str | None,
        received_at: float,
        coding: bytes,
    ) -> None:
        kind = self._kind(exchange.path)
        try:
            exchange.on_gone = exchange.release_body  # the body may wait long for its turn
            body_bytes_max = int(self.serving.settings.limits.body_bytes)
            found = await self._reader.read(exchange, read, coding, body_bytes_max)
            if found is not None and not exchange.gone:
                take(exchange, key, found, received_at)
                return
        except RequestError as refused:
            self._refuse(exchange, refused.status, refused.body(), kind, key)
            return
        except Exception as error:
            log_event("error", "request_failed", reason=f"{type(error).__name__}: {error}")
            self._refuse(exchange, 500, error_body("internal error in the gateway", "internal_error"), kind, key)
            return
        self.serving.metrics.client_gone()
        self._admission_queue.log_finished(exchange, kind, 499, self.serving.now() - received_at, key)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _complete(self, exchange: ClientExchange, key: str | None, completion: Completion, received_at: float) -> None:
        runtime = self.serving
        if not runtime.reading.models.splits(completion):
            endpoint = runtime.reading.passthrough.find(exchange.path)
            assert endpoint is not None, "a kind that not every engine can split has a path that is passed through"
            self._passthrough(endpoint, exchange, key, passthrough_of(completion), received_at)
            return
        if runtime.reading.salts is not None and key is not None:
            completion = with_salt(completion, runtime.reading.salts.salt(key, completion.salt))
        if runtime.placement is not None and not self._within_rates(exchange, completion.kind, key, received_at):
            return
        request_id = exchange.request_id
        runtime.state.arrived(received_at)

        def start(ticket: int) -> None:
            runtime = self.serving
            proxied = self._proxied(runtime, exchange, completion, request_id, received_at)
            proxied.account.ticket, proxied.account.key = ticket, key
            number = proxied.state.number
            runtime.requests[number] = proxied
            if runtime.events is not None or access_on():
                runtime.callers[number] = Caller(request_id.decode("latin-1"), exchange.peer, key or "")
            proxied.begin()

        self._admission_queue.submit(exchange, completion.kind, key, start)

    def _models(self, exchange: ClientExchange) -> None:
        key = self._key(exchange)
        if key is _UNAUTHENTICATED:
            return
        names = self.serving.reading.models.names()
        rest = exchange.path[len(MODEL_PATH) :]
        name = unquote(rest.decode("latin-1"))
        if exchange.path == MODELS and not names:
            self._forward_models(exchange, key)
        elif exchange.path != MODELS and ((names and name not in names) or not (names or is_plain(rest))):
            self._show_model(exchange, 404, no_model_body(name), key)
        elif names:
            self._spawn(self._own_models(exchange, key, names if exchange.path == MODELS else [name]))
        else:
            self._spawn(self._engines_model(exchange, key, name))

    def _forward_models(self, exchange: ClientExchange, key: str | None) -> None:
        self._passthrough(MODEL_LIST, exchange, key, PassthroughBody("", b"", {}), self.serving.now())

    async def _own_models(self, exchange: ClientExchange, key: str | None, names: list[str]) -> None:
        """Respond with names of the settings, with the context lengths that engines tell."""
        contexts = await self._cards.contexts(self.serving, exchange, names)
        if exchange.path == MODELS:
            self._show_model(exchange, 200, models_body(contexts, self._started), key)
        else:
            self._show_model(exchange, 200, model_body(names[0], self._started, contexts[names[0]]), key)

    async def _engines_model(self, exchange: ClientExchange, key: str | None, name: str) -> None:
        """Respond with the card from an engine's list: not every engine has a path for single models. Without it, an
        engine may know the path."""
        card = await self._cards.card(self.serving, exchange, name)
        if card is None:
            self._forward_models(exchange, key)
        else:
            self._show_model(exchange, 200, card, key)

    def _show_model(self, exchange: ClientExchange, status: int, body: bytes, key: str | None) -> None:
        exchange.respond(status, body)
        self._admission_queue.log_finished(exchange, "models", status, 0.0, key)

    def _passthrough(
        self,
        endpoint: PassthroughEndpoint,
        exchange: ClientExchange,
        key: str | None,
        content: PassthroughBody,
        received_at: float,
    ) -> None:
        salts = self.serving.reading.salts
        if salts is not None and key is not None and endpoint.salted:
            content = passthrough_with_salt(content, partial(salts.salt, key))
        content = content._replace(generates=endpoint.generates)
        charge: Charge | None = None
        if self.serving.placement is not None:
            if not self._within_rates(exchange, endpoint.name, key, received_at):
                return
            tokens = len(content.body) // self.serving.settings.prompt.bytes_per_token
            charged = self.serving.tenancy.charge(key, tokens, received_at)
            if isinstance(charged, Refusal):
                self._exceeded(exchange, endpoint.name, key, charged)
                return
            charge = charged
        request_id = exchange.request_id
        self._turn += 1

        def start(ticket: int) -> None:
            runtime = self.serving

            def end(status: int) -> None:
                if charge is not None and free_of_charge(status):
                    charge.refund(runtime.now())
                self._admission_queue.log_finished(exchange, endpoint.name, status, runtime.now() - received_at, key)
                self._admission_queue.release(ticket)

            self._relayed(runtime, exchange, content, self._turn, request_id, end).begin()

        self._admission_queue.submit(exchange, endpoint.name, key, start)

    def _within_rates(self, exchange: ClientExchange, kind: str, key: str | None, now: float) -> bool:
        """Return whether a key has something left of its rates; otherwise respond with 429."""
        refusal = self.serving.tenancy.exhausted(key, now)
        if refusal is None:
            return True
        self._exceeded(exchange, kind, key, refusal)
        return False

    def _exceeded(self, exchange: ClientExchange, kind: str, key: str | None, refusal: Refusal) -> None:
        headers = [*refusal.headers, *retry_after(refusal.status, refusal.retry_after_s)]
        exchange.respond(refusal.status, refusal.body, headers=headers)
        self.serving.metrics.rejected(refusal.metric_reason)
        self.serving.state.rejected(self.serving.now())
        self._admission_queue.log_finished(exchange, kind, refusal.status, 0.0, key)

    def _own(self, exchange: ClientExchange) -> None:
        path, method, pages = exchange.path, exchange.method, self._own_pages
        if path in COMPLETIONS:
            self._wrong_method(exchange, b"POST")
        elif (path in OWN or path.startswith(MODEL_PATH)) and method not in READ:
            self._wrong_method(exchange, b"GET, HEAD")
        elif path.startswith(MODEL_PATH):
            self._models(exchange)
        elif path == b"/metrics" and pages.shows_metrics(keys_required=self.keys.required):
            self._spawn(pages.show_metrics(exchange))
        elif not pages.answer(exchange):
            body = error_body(no_such_path(path), "invalid_request_error", code="not_found")
            self._refuse(exchange, 404, body, "other", None)

    def _wrong_method(self, exchange: ClientExchange, allowed: bytes) -> None:
        method, path = exchange.method.decode("latin-1"), exchange.path[:200].decode("latin-1")
        what = f"method {method} is not allowed for {path}; use {allowed.decode()}"
        body = error_body(what, "invalid_request_error", code="method_not_allowed")
        exchange.respond(405, body, headers=[(b"allow", allowed)])
        self._admission_queue.log_finished(exchange, "other", 405, 0.0, None)

    def _key(self, exchange: ClientExchange) -> str | None:
        """Return the name of the client's key; None if no keys are required; `_UNAUTHENTICATED` after a rejection."""
        if not self.keys.required:
            return None
        name = self.keys.name_in(exchange.headers)
        if name is not None:
            return name
        body = error_body(_NO_KEY.message, _NO_KEY.type, code=_NO_KEY.code)
        exchange.respond(401, body, headers=[(b"www-authenticate", b"Bearer")])
        self.serving.metrics.rejected("key")
        self._admission_queue.log_finished(exchange, self._kind(exchange.path), 401, 0.0, None)
        return _UNAUTHENTICATED

    def _kind(self, path: bytes) -> str:
        """Return the endpoint's name in metrics."""
        if path in KINDS:
            return KINDS[path]
        if path == MODELS or path.startswith(MODEL_PATH):
            return MODEL_LIST.name
        endpoint = self.serving.reading.passthrough.find(path)
        return endpoint.name if endpoint is not None else "other"

    def _refuse(self, exchange: ClientExchange, status: int, body: bytes, kind: str, key: str | None) -> None:
        headers = [_REFUSAL_HEADERS[status]] if status in _REFUSAL_HEADERS else []
        exchange.respond(status, body, headers=headers)
        self._admission_queue.log_finished(exchange, kind, status, 0.0, key)


_UNAUTHENTICATED = "\0"
