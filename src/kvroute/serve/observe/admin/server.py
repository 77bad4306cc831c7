"""The admin port: dashboard, metrics, health and pushed telemetry; on loopback by default, closed to other web pages.

Web pages of other origins can neither read from the port (no CORS, known host names only) nor change anything (the
Origin header is checked).
"""

from __future__ import annotations

import asyncio
import hmac
import ssl
from base64 import b64decode
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Protocol

import msgspec
from aiohttp import web

from kvroute.http.server.listener import Listener
from kvroute.serve.observe.admin.connections import AdminConnection, AdminConnections
from kvroute.serve.observe.redaction import redacted
from kvroute.serve.observe.view import DashboardUpdate, Snapshot
from kvroute.types import InputError, cannot_listen
from kvroute_engine.addresses import host_port
from kvroute_engine.origins import address, host_name

TICK_S = 0.25
WATCHERS_MOST = 32
BODY_MOST_BYTES = 4 << 20
BODY_S = 60.0
_OPEN = frozenset({"/health", "/ready"})
"""Paths that need no token, because load balancers have none."""
_ASSETS = {
    "index.html": "text/html",
    "dashboard.css": "text/css",
    "dashboard.js": "text/javascript",
    "map.js": "text/javascript",
    "routes.js": "text/javascript",
    "history.js": "text/javascript",
    "panels.js": "text/javascript",
    "format.js": "text/javascript",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class DashboardSource(Protocol):
    """What the dashboard shows: the state of one gateway, or of all workers."""

    @property
    def layout_id(self) -> int:
        """Changes with the layout."""
        ...

    @property
    def policy(self) -> str:
        """The decode policy."""
        ...

    def snapshot(self, at: float) -> Snapshot:
        """Return the whole state."""
        ...

    def tick(self, at: float) -> DashboardUpdate:
        """Return the values that change."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminParts:
    """The data that the port shows and the gateway functions that it calls."""

    state: DashboardSource
    page: Callable[[str], Awaitable[tuple[str, Iterable[str]]]]
    """Returns the metrics for an Accept header: content type, and the text by family."""
    now: Callable[[], float]
    ready: Callable[[], str]
    """Returns why the gateway accepts no requests; empty if it accepts them."""
    version: str
    config: Callable[[], object] = dict
    """Returns the settings as Structs or plain values. The port redacts their secrets."""
    push: Callable[[bytes], Awaitable[None]] | None = None
    """Accepts a telemetry body; raises InputError if it is invalid. None: telemetry is not accepted."""
    drain: Callable[[], None] | None = None
    token: str = ""
    """Bearer token that POST requires; empty: POST is allowed from this machine only."""
    read_token: str = ""
    """Token that GET requires (`token` is accepted too); empty: GET requires none."""
    host_names: frozenset[str] = frozenset()
    """Host names that requests may use, in addition to `localhost` and any IP address."""


@dataclass(slots=True)
class _Watch:
    """State of the event stream. All dashboards share one encoded update per tick."""

    closing: asyncio.Event = field(default_factory=asyncio.Event)
    watchers: int = 0
    tick: bytes = b""
    made_at: float = -1.0


class Admin:
    """The admin server. It listens from `start` to `close`."""

    def __init__(self, parts: AdminParts, connections: AdminConnections | None = None) -> None:
        """Args: `connections` with other limits than the defaults."""
        self._watch = _Watch()
        self.change(parts)
        self._runner: web.AppRunner | None = None
        self._listener: Listener | None = None
        self._connections = AdminConnections() if connections is None else connections

    def change(self, parts: AdminParts) -> None:
        """Replace the parts that the port shows and calls."""
        self._parts = parts
        self._names = {"localhost", *(name.lower() for name in parts.host_names)}

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Listen and return the port; the system chooses it if `port` is 0.

        Raises:
            InputError: the address cannot be used.
        """
        runner = web.AppRunner(self._application(), access_log=None, shutdown_timeout=2.0)
        await runner.setup()
        assert runner.server is not None
        server = runner.server
        listener = Listener(self._connections, lambda: AdminConnection(self._connections, server()), tls)
        try:
            drawn = await listener.listen(host, port)
        except OSError as error:
            await runner.cleanup()
            why = error.strerror or str(error)
            raise cannot_listen(host_port(host, port), error.errno, why, where="gateway.admin") from None
        self._runner, self._listener = runner, listener
        return drawn

    async def close(self) -> None:
        """End the event streams and stop listening."""
        self._watch.closing.set()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
            await self._connections.close()

    @property
    def watchers(self) -> int:
        """Number of dashboards that are connected now."""
        return self._watch.watchers

    def _application(self) -> web.Application:
        application = web.Application(client_max_size=BODY_MOST_BYTES, middlewares=[self._guarded])
        get, post = application.router.add_get, application.router.add_post
        for name, kind in _ASSETS.items():
            get("/" if name == "index.html" else f"/{name}", _asset(name, kind))
        get("/state", self._state)
        get("/events", self._events)
        get("/metrics", self._metrics)
        get("/health", self._health)
        get("/ready", self._ready)
        get("/version", self._version)
        get("/config", self._config)
        post("/telemetry", self._telemetry)
        post("/drain", self._drain)
        return application

    @web.middleware
    async def _guarded(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        self._connections.begin(request)
        try:
            return self._refusal(request) or await handler(request)
        except web.HTTPException as error:
            return _json(error.status, {"error": error.reason})
        finally:
            self._connections.end(request)

    def _refusal(self, request: web.Request) -> web.Response | None:
        name = host_name(request.headers.get("Host", ""))
        if not (name in self._names or address(name)):
            hint = "use an IP address, or add the name to gateway.admin.hosts"
            return _json(403, {"error": f"unknown host name in the Host header; {hint}"})
        if request.method in ("GET", "HEAD"):
            return self._unread(request)
        origin = request.headers.get("Origin")
        if origin is not None and origin.partition("://")[2] != request.headers.get("Host"):
            return _json(403, {"error": "requests of other web pages are refused"})
        return self._unauthorized(request)

    def _unread(self, request: web.Request) -> web.Response | None:
        """Return the error response of a GET without a valid token, or None.

        With Basic authentication, a browser asks its user for a name and a password. The token is the password, and
        any name is accepted. The browser then sends both with each request.
        """
        parts = self._parts
        if not parts.read_token or request.path in _OPEN:
            return None
        shown = _token_of(request.headers.get("Authorization", ""))
        tokens = [token.encode() for token in (parts.read_token, parts.token) if token]
        if sum(hmac.compare_digest(shown, token) for token in tokens):
            return None
        response = _json(401, {"error": "a token is required: gateway.admin.read_token"})
        response.headers["WWW-Authenticate"] = 'Basic realm="kvroute", charset="UTF-8"'
        return response

    def _unauthorized(self, request: web.Request) -> web.Response | None:
        if self._parts.token:
            given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
            if hmac.compare_digest(given, b"Bearer " + self._parts.token.encode()):
                return None
            return _json(401, {"error": "a bearer token is required: gateway.admin.push_token"})
        peer = address(request.remote or "")
        if peer and (getattr(peer, "ipv4_mapped", None) or peer).is_loopback:
            return None
        return _json(403, {"error": "requests from other machines require a token; set gateway.admin.push_token"})

    async def _state(self, request: web.Request) -> web.Response:
        snapshot = self._parts.state.snapshot(self._parts.now())
        return _response(200, msgspec.json.encode(snapshot))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Send Server-Sent Events: `snapshot` on connect and after each reload, then `tick` every TICK_S seconds."""
        watch = self._watch
        if watch.watchers >= WATCHERS_MOST or watch.closing.is_set():
            return _json(503, {"error": f"{watch.watchers} dashboards are open already"})
        response = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream"})
        watch.watchers += 1
        try:
            await response.prepare(request)
            layout_id = 0
            while not watch.closing.is_set():
                if layout_id != self._parts.state.layout_id:
                    layout_id = self._parts.state.layout_id
                    await response.write(self._snapshot_event())
                else:
                    await response.write(self._tick_event())
                await _set_within(watch.closing, TICK_S)
        except ConnectionError:
            pass  # the dashboard was closed
        finally:
            watch.watchers -= 1
        return response

    def _snapshot_event(self) -> bytes:
        snapshot = self._parts.state.snapshot(self._parts.now())
        return b"event: snapshot\ndata: " + msgspec.json.encode(snapshot) + b"\n\n"

    def _tick_event(self) -> bytes:
        watch, at = self._watch, self._parts.now()
        if at - watch.made_at >= TICK_S / 2 or not watch.tick:
            tick = msgspec.json.encode(self._parts.state.tick(at))
            watch.tick, watch.made_at = b"event: tick\ndata: " + tick + b"\n\n", at
        return watch.tick

    async def _metrics(self, request: web.Request) -> web.Response:
        content_type, families = await self._parts.page(request.headers.get("Accept", ""))
        parts = []
        for text in families:
            parts.append(text)
            await asyncio.sleep(0)  # so that the loop can serve requests between two families
        return web.Response(body="".join(parts).encode(), headers={**_HEADERS, "Content-Type": content_type})

    async def _health(self, request: web.Request) -> web.Response:
        return _json(200, {"status": "alive"})

    async def _ready(self, request: web.Request) -> web.Response:
        why = self._parts.ready()
        return _json(503, {"status": "not ready", "reason": why}) if why else _json(200, {"status": "ready"})

    async def _version(self, request: web.Request) -> web.Response:
        return _json(200, {"version": self._parts.version, "policy": self._parts.state.policy})

    async def _config(self, request: web.Request) -> web.Response:
        return _response(200, msgspec.json.format(msgspec.json.encode(redacted(self._parts.config()))))

    async def _telemetry(self, request: web.Request) -> web.Response:
        if self._parts.push is None:
            return _json(404, {"error": "telemetry is not accepted; set gateway.oracle.source to push"})
        try:
            async with asyncio.timeout(BODY_S):
                body = await request.read()
            await self._parts.push(body)
        except TimeoutError:
            return _json(408, {"error": f"the body took longer than {BODY_S:g} s"})
        except InputError as error:
            return _json(400, {"error": str(error), "where": error.where})
        return _json(200, {"status": "taken"})

    async def _drain(self, request: web.Request) -> web.Response:
        if self._parts.drain is None:
            return _json(404, {"error": "this gateway can be drained only by SIGTERM"})
        self._parts.drain()
        return _json(202, {"status": "draining"})


def _asset(name: str, kind: str) -> _Handler:
    body = files("kvroute.serve.observe").joinpath("dashboard", name).read_bytes()

    async def asset(request: web.Request) -> web.Response:
        return _response(200, body, f"{kind}; charset=utf-8")

    return asset


def _token_of(authorization: str) -> bytes:
    """Return the bearer token or the password of Basic authentication; empty if there is neither."""
    scheme, _, given = authorization.encode(errors="surrogateescape").partition(b" ")
    if scheme.lower() == b"bearer":
        return given
    if scheme.lower() != b"basic":
        return b""
    try:
        return b64decode(given, validate=True).partition(b":")[2]
    except ValueError:
        return b""


async def _set_within(event: asyncio.Event, timeout_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


def _response(status: int, body: bytes, content_type: str = "application/json") -> web.Response:
    return web.Response(status=status, body=body, headers={**_HEADERS, "Content-Type": content_type})


def _json(status: int, value: dict[str, str]) -> web.Response:
    return _response(status, msgspec.json.encode(value))
