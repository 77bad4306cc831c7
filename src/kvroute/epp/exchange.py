"""One request in Envoy: the picker chooses where it goes, and learns when its response begins and ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvroute.epp.envoy_pb2 import ProcessingResponse
from kvroute.epp.messages import immediate_reply
from kvroute.http.headers import Headers, request_id_of
from kvroute.serve.api.anthropic.errors import in_format_of, is_anthropic


@dataclass(frozen=True, slots=True)
class PickRequest:
    """A request as Envoy has received it."""

    method: bytes
    path: bytes
    query: bytes
    headers: Headers
    """Without pseudo-headers."""
    body: bytes
    peer: str
    subsets: tuple[frozenset[str], ...]
    """Sets of endpoints (`ip:port`, or `ip` for all ports); the chosen one must be in each of them."""


@dataclass(frozen=True, slots=True)
class Pick:
    """Where Envoy sends a request."""

    destination: str
    """Endpoints in the order to try, separated by commas."""
    added: Headers
    """Headers that the engine receives in place of the client's."""
    removed: list[bytes]
    """Names of the client's headers that it does not receive."""
    body: bytes
    wait_s: float
    """Time limit for the beginning of the response, in seconds."""


def id_headers(path: bytes, request_id: bytes) -> Headers:
    """Return the headers with the id of a request that each response has."""
    names = [b"x-request-id", b"request-id"] if is_anthropic(path) else [b"x-request-id"]
    return [(name, request_id) for name in names]


class PickExchange:
    """See `ClientExchange`. Envoy relays the response, so nothing of it is written here: call `respond` or `pick`.

    After `pick`, `on_response` is called with the status and the endpoint that has served it (empty: none has), and
    `on_end` when the response is over. If Envoy ends the request before, `on_gone` is called, and `on_late` if it
    reports no response in time. Until the response begins, `respond` withdraws the request from its engine: Envoy
    closes it there and sends this response instead.
    """

    __slots__ = (
        "_answer",
        "_request_id",
        "_reset",
        "body",
        "finished",
        "gone",
        "headers",
        "method",
        "on_end",
        "on_gone",
        "on_late",
        "on_response",
        "path",
        "peer",
        "picked",
        "query",
        "resized",
        "started",
        "subsets",
    )
    writer = None
    full_status = 429  # the protocol of endpoint pickers: 503 means that there is no endpoint

    def __init__(
        self,
        request: PickRequest,
        answer: Callable[[Pick | ProcessingResponse], None],
        reset: Callable[[], None],
    ) -> None:
        """Args:

        request: as Envoy has received it.
        answer: takes the choice, the response that Envoy sends at once, or first the one and then the other.
        reset: ends the stream to Envoy with an error.
        """
        self.method, self.path, self.query = request.method, request.path, request.query
        self.headers, self.body, self.peer, self.subsets = request.headers, request.body, request.peer, request.subsets
        self.started = self.finished = self.gone = False
        self.picked = False
        """Envoy has the choice, which cannot be changed."""
        self.on_gone: Callable[[], None] | None = None
        self.on_late: Callable[[], None] | None = None
        self.on_response: Callable[[int, str], None] | None = None
        self.on_end: Callable[[], None] | None = None
        self._answer, self._reset = answer, reset
        self._request_id = b""
        self.resized: Callable[[int], bool] | None = None
        """Called with the size of the body when that changes; returns whether there is memory for it."""

    @property
    def request_id(self) -> bytes:
        """See `Exchange`."""
        if not self._request_id:
            self._request_id = request_id_of(self.headers)
        return self._request_id

    def header(self, name: bytes) -> bytes | None:
        """Return the value of the first header with this name (lower case), or None."""
        return next((value for key, value in self.headers if key == name), None)

    def release_body(self) -> None:
        """Free the memory of the body."""
        self.replace_body(b"")

    def replace_body(self, body: bytes) -> bool:
        """See `Exchange`."""
        self.body = body
        return self.resized is None or self.resized(len(body))

    def pick(self, pick: Pick) -> None:
        """Send the request to an endpoint."""
        assert not self.picked, "Envoy sends a request once"
        if not self.gone:
            self.picked = True
            self._answer(pick)

    def respond(
        self,
        status: int,
        body: bytes,
        content_type: bytes = b"application/json",
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        """Let Envoy send this response to the client."""
        if self.gone or self.finished:
            return
        assert not self.started, "a request has one response"
        self.started = self.finished = True
        self._forget()
        own = id_headers(self.path, self.request_id)
        self._answer(immediate_reply(status, in_format_of(self.path, status, body), content_type, [*own, *headers]))

    def abort(self) -> None:
        """End the stream to Envoy with an error, so that the client sees a truncated response, or none."""
        if not (self.gone or self.finished):
            self.finished = True
            self._forget()
            self._reset()

    def response_began(self, status: int, served: str) -> None:
        """Report the beginning of the response. Args: see `on_response`."""
        self.started = True
        if self.on_response is not None:
            self.on_response(status, served)

    def late(self) -> None:
        """Report that no response has begun in time."""
        if self.on_late is not None and not (self.gone or self.finished):
            self.on_late()

    def closed(self) -> None:
        """Report the end of the stream to Envoy: the response is over, or the request ended before it began."""
        if self.gone or self.finished:
            return
        then = self.on_end if self.started else self.on_gone
        self.gone, self.finished = not self.started, self.started
        self._forget()
        if then is not None:
            then()

    def _forget(self) -> None:
        """Break the reference cycle with the owner."""
        self.on_gone = self.on_late = self.on_response = self.on_end = self.resized = None
