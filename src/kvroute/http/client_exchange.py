"""A client's request and its response, as the code that serves it sees them, whatever the protocol of the client is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from kvroute.http.headers import Headers


class ResponseWriter(Protocol):
    """Sends a response part by part: `start`, `write`..., `end`. Writes after the client has disconnected are
    dropped."""

    paused: bool
    """The client reads more slowly than the response is written."""
    on_pause: Callable[[], None] | None
    on_resume: Callable[[], None] | None

    def start(self, status: int, headers: Iterable[tuple[bytes, bytes]], length: int | None) -> None:
        """See `Exchange`."""
        ...

    def write(self, data: bytes) -> None:
        """See `Exchange`."""
        ...

    def write_chunk(self, chunk: bytes, data_bytes: int) -> None:
        """See `Exchange`."""
        ...

    def stream_socket(self) -> int | None:
        """See `Exchange`."""
        ...

    def write_framed(self, chunks: bytes) -> None:
        """See `Exchange`."""
        ...

    def end(self) -> None:
        """See `Exchange`."""
        ...


class ClientExchange(Protocol):
    """One complete client request, and the response to it as a whole: an `Exchange`, or a request whose response
    another proxy sends."""

    method: bytes
    path: bytes
    query: bytes
    headers: Headers
    body: bytes
    peer: str
    full_status: int
    """Status of the response to a request for which there is no room."""
    started: bool
    """The response has begun, so no other response can be sent."""
    finished: bool
    gone: bool
    """The client has disconnected."""
    on_gone: Callable[[], None] | None

    @property
    def request_id(self) -> bytes:
        """See `Exchange`."""
        ...

    @property
    def writer(self) -> ResponseWriter | None:
        """Sends a response part by part; None: another proxy relays the engine's response."""
        ...

    def header(self, name: bytes) -> bytes | None:
        """See `Exchange`."""
        ...

    def release_body(self) -> None:
        """See `Exchange`."""
        ...

    def replace_body(self, body: bytes) -> bool:
        """See `Exchange`."""
        ...

    def respond(
        self,
        status: int,
        body: bytes,
        content_type: bytes = b"application/json",
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        """See `Exchange`."""
        ...

    def abort(self) -> None:
        """See `Exchange`."""
        ...
