"""The X-Request-Id that engines get: the client's own, unless an engine may have a request with it already.

An engine names its requests by it. Of two at the same time with one id it rejects the second one, or mixes their
outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvroute.http.client_exchange import ClientExchange


class RequestIds:
    """The ids of the requests in progress; `leave` follows `enter`."""

    def __init__(self, draw: Callable[[], int], *, shared: bool = False) -> None:
        """
        Args:
            draw: returns random bits.
            shared: whether other gateways send requests to the same engines, whose ids are not known here.
        """
        self._draw, self._shared = draw, shared
        self._present: set[bytes] = set()

    def enter(self, exchange: ClientExchange) -> bytes:
        """Return the id that engines get for a request: with random bits at its end if it is in use."""
        request_id = exchange.request_id
        if request_id in self._present or (self._shared and exchange.header(b"x-request-id") == request_id):
            request_id = self.another(request_id)
        self._present.add(request_id)
        return request_id

    def another(self, request_id: bytes) -> bytes:
        """Return an id for another attempt of the same request: an engine may not have noticed yet that the attempt
        before was aborted."""
        return b"%b-%016x" % (request_id, self._draw())

    def leave(self, engine_id: bytes) -> None:
        """Forget a request that is over. Args: `engine_id`: what `enter` has returned."""
        self._present.discard(engine_id)
