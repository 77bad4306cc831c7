"""Pages about the gateway itself: health, readiness, metrics and the description of its API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvroute.serve.api.responses import error_body
from kvroute.serve.proxy.retry import retry_after

if TYPE_CHECKING:
    from kvroute.http.client_exchange import ClientExchange


@dataclass(frozen=True, slots=True)
class OwnPages:
    """What these pages show."""

    ready: Callable[[], str]
    """Returns the reason why no requests are accepted; empty: they are accepted."""
    description: bytes
    """The OpenAPI document."""
    metrics: Callable[[str], tuple[str, Iterator[str]]] | None = None
    """Returns content type and pieces of the metrics for an Accept header; None: only the admin port has them."""
    metrics_without_key: bool = False
    """Whether every client may read the metrics although keys are required."""

    def answer(self, exchange: ClientExchange) -> bool:
        """Respond to a request for a page; return False if there is no such page."""
        path = exchange.path
        if path == b"/health":
            exchange.respond(200, b'{"status":"ok"}')
        elif path == b"/ready":
            why = self.ready()
            if why:
                exchange.respond(503, error_body(why, "service_unavailable"), headers=retry_after(503))
            else:
                exchange.respond(200, b'{"status":"ready"}')
        elif path == b"/openapi.json":
            exchange.respond(200, self.description)
        else:
            return False
        return True

    def shows_metrics(self, *, keys_required: bool) -> bool:
        """Whether a client may read the metrics."""
        return self.metrics is not None and (self.metrics_without_key or not keys_required)

    async def show_metrics(self, exchange: ClientExchange) -> None:
        """Respond with the metrics, rendered piece by piece so that other requests run in between."""
        assert self.metrics is not None, "the client may not read them"
        kind, pieces = self.metrics((exchange.header(b"accept") or b"").decode("latin-1"))
        parts = []
        for text in pieces:
            parts.append(text)
            await asyncio.sleep(0)
        exchange.respond(200, "".join(parts).encode(), kind.encode())


def no_such_path(path: bytes) -> str:
    """Return the error message for a path that does not exist."""
    what = f"the path {path.decode('latin-1')[:200]!r} does not exist"
    if path == b"/metrics":
        return what + "; the admin port serves it, and `gateway: {listen: {metrics: true}}` opens it to all clients"
    return what + "; `gateway: {passthrough: [PATH]}` forwards further paths to an engine"
