"""The protocol between clients and the gateway: the server of its ports, and the requests that it makes."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvroute.http.deadlines import Deadlines
from kvroute.http.server.request_parser import RequestLimits
from kvroute.http.server.server import HttpServer, ServerHooks
from kvroute.http.server.web_pages import WebPages
from kvroute.serve.api.anthropic.errors import ApiErrors
from kvroute.serve.api.passthrough_paths import COMPLETIONS
from kvroute.serve.observe.logs import log_accept_paused
from kvroute.serve.proxy.completion.request import ProxiedRequest
from kvroute.serve.proxy.endpoints import Endpoints, MakePassthrough, MakeRequest
from kvroute.serve.proxy.legs.passthrough import PassthroughRequest
from kvroute.types import Discovered, OwnPicker


class FrontendServer(Protocol):
    """Accepts the requests of clients and passes them to endpoints."""

    limits: RequestLimits

    @property
    def connections(self) -> int:
        """Number of open connections."""

    async def listen(self, host: str, port: int, ssl: ssl.SSLContext | None = None) -> int:
        """Accept clients at an address and return the port. Raises OSError if it cannot be used."""

    def stop_accepting(self) -> None:
        """Accept no new clients; open connections stay."""

    async def drain(self, timeout_s: float, *, idle_s: float = 0.5) -> None:
        """See `HttpServer.drain`."""


@dataclass(frozen=True, slots=True)
class ServerParts:
    """What a server of the gateway uses."""

    endpoints: Endpoints
    limits: RequestLimits
    deadlines: Deadlines
    pages: WebPages
    ready: Callable[[], str]
    """Returns why the gateway accepts no requests; empty: it accepts them."""
    key_pair: Callable[[], tuple[bytes, bytes]] | None = None
    """Returns the present key and certificate in PEM, for a server with a TLS of its own; None: no TLS."""


class Frontend(Protocol):
    """The protocol between clients and the gateway."""

    @property
    def proxied(self) -> MakeRequest:
        """Makes the request of a completion."""

    @property
    def relayed(self) -> MakePassthrough:
        """Makes any other request."""

    @property
    def routed(self) -> frozenset[bytes]:
        """Paths whose requests get a decision: see `Endpoints`."""

    @property
    def metrics(self) -> bool:
        """Whether clients may read the metrics if no keys are required and the settings do not say."""

    def server(self, parts: ServerParts) -> FrontendServer:
        """Return a server that does not listen yet."""

    def engine_fault(self, engine: Discovered) -> str:
        """Return why requests cannot be sent to a discovered engine; empty if they can."""

    def picker(self, port: int) -> OwnPicker | None:
        """Return this process as the endpoint picker of another proxy; None: it is none.

        Args:
            port: on which its server listens.
        """


class HttpFrontend:
    """HTTP/1.1: clients send requests to the gateway, which relays the responses of engines."""

    proxied: MakeRequest = ProxiedRequest
    relayed: MakePassthrough = PassthroughRequest
    routed = COMPLETIONS
    metrics = True

    def __init__(self, *, shares_port: bool = False) -> None:
        """Args: `shares_port`: other processes of the same user listen at the same address."""
        self._shares_port = shares_port

    def server(self, parts: ServerParts) -> FrontendServer:
        """See `Frontend`."""
        hooks = ServerHooks(parts.endpoints.guard, parts.endpoints.refused, log_accept_paused)
        return HttpServer(
            parts.endpoints,
            parts.limits,
            hooks=hooks,
            errors=ApiErrors(),
            deadlines=parts.deadlines,
            pages=parts.pages,
            shares_port=self._shares_port,
        )

    def engine_fault(self, engine: Discovered) -> str:
        """See `Frontend`."""
        return ""

    def picker(self, port: int) -> OwnPicker | None:
        """See `Frontend`."""
        return None
