"""What engines get of a request's headers. X-Request-Id is the client's own, unless an engine may have it already.

An engine names its requests by it. Of two at the same time with one id it rejects the second one, or mixes their
outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kvroute.http.headers import FORWARDED, Headers, forwarded, header_lines

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


class EngineHeaders:
    """The header lines that engines receive of a client's request."""

    __slots__ = ("_added", "_names")

    def __init__(self, names: Iterable[str], replaced: frozenset[bytes], engine_key: bytes | None) -> None:
        """
        Args:
            names: headers of the settings that are forwarded beside the usual ones.
            replaced: headers that the gateway itself sets.
            engine_key: key for all engines; empty: none is sent. None: the client's own key is forwarded.
        """
        own = replaced | (frozenset() if engine_key is None else {b"authorization"})
        self._names = FORWARDED.union(name.lower().encode() for name in names) - own
        self._added = b"authorization: Bearer %b\r\n" % engine_key if engine_key else b""

    def lines(self, headers: Headers, request_id: bytes) -> bytes:
        """Return the lines. Args: `request_id`: X-Request-Id for the engine."""
        return header_lines(forwarded(headers, request_id, self._names)) + self._added
