"""A request to an engine: its data, the callbacks for its response, and its failures. It owns no connection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from kvroute.http.forwarding.stream_forwarder import Forwarded, ForwardedStream
from kvroute.http.headers import Headers

Phase = Literal["connect", "first_byte", "body"]


FailureKind = Literal["refused", "reset", "timeout", "malformed", "out_of_files"]
"""Cause of a failure. "out_of_files" is the gateway's own: it has no file descriptor left for a connection."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call failed. The phase is `body` once a byte of the body has arrived."""

    kind: FailureKind
    phase: Phase
    text: str


class ResponseHandler(Protocol):
    """Callbacks of a call. A call ends with exactly one `on_end` or `on_failure`, or with neither if it is aborted."""

    def on_head(self, status: int, headers: Headers) -> None:
        """Receive status and headers; called at most once."""
        ...

    def on_body(self, data: bytes) -> None:
        """Receive body bytes without their framing. Bytes that were read before `pause` may still arrive after it."""
        ...

    def on_end(self) -> None:
        """Handle the end of the response; its connection may already serve the next call."""
        ...

    def on_failure(self, failure: Failure) -> None:
        """Handle a failure: the response will not be completed."""
        ...


class CallConnection(Protocol):
    """The connection that carries a call."""

    def close(self) -> None:
        """Close at once."""
        ...

    def pause(self) -> None:
        """Stop reading."""
        ...

    def resume(self) -> None:
        """Continue reading."""
        ...


class ChunkHandler(Protocol):
    """Receives the chunks of a stream as they were received, with their framing."""

    def on_chunk(self, chunk: bytes, data_bytes: int) -> None:
        """Receive one chunk. Args: `data_bytes`: size of its data, which ends with an empty line."""
        ...

    def forward(self, source: int, returned: Callable[[Forwarded], None]) -> ForwardedStream | None:
        """Let a thread forward the chunks that follow; None: not now. Args: as for `StreamForwarder.begin`."""
        ...

    def on_forwarded(self, result: Forwarded) -> None:
        """Count the chunks that the thread has forwarded, and send what it has not sent."""
        ...


class Call:
    """A request in flight to an engine."""

    __slots__ = (
        "_on_done",
        "body",
        "chunks",
        "connection",
        "events",
        "first_byte_s",
        "handler",
        "head_only",
        "idle_s",
        "over",
        "paused",
        "request",
        "retried",
        "waits",
    )

    def __init__(
        self,
        request: bytes,
        handler: ResponseHandler,
        first_byte_s: float,
        idle_s: float,
        head_only: bool,
        on_done: Callable[[], None],
    ) -> None:
        self.request = request
        self.body = b""
        """Bytes to send after `request`; kept apart to avoid a large copy."""
        self.handler = handler
        self.first_byte_s = first_byte_s
        self.idle_s = idle_s
        self.head_only = head_only
        self.connection: CallConnection | None = None
        """The upstream connection; None before there is one and after the end."""
        self.paused = False
        self.chunks: ChunkHandler | None = None
        """Takes, in place of `handler.on_body`, a chunk of a chunked body that arrived alone and whose data ends with
        an empty line, as an event of a stream does. None: such chunks go to `handler.on_body`, too."""
        self.events = self.waits = False
        """`events`: the body consists of server-sent events, of which comments do not end a wait; `waits`: the timeout
        for the first byte goes on until the handler resets this, because the first bytes may be no response yet."""
        self.retried = False
        self.over = False
        self._on_done = on_done

    def abort(self) -> None:
        """Close the connection and call the sink no more. Does nothing after the end."""
        if self.over:
            return
        connection = self.connection
        self.finish()
        if connection is not None:
            connection.close()

    def forget_request(self) -> None:
        """Release the request's bytes, because the client's response has begun and the request is not sent again.

        Does nothing while the call waits for a connection: the bytes are still to be sent.
        """
        if self.connection is not None:
            self.request = self.body = b""
            self.retried = True

    def pause(self) -> None:
        """Stop reading from the engine; the timeout between bytes is suspended."""
        if not self.paused and not self.over:
            self.paused = True
            if self.connection is not None:
                self.connection.pause()

    def resume(self) -> None:
        """Read from the engine again."""
        if self.paused and not self.over:
            self.paused = False
            if self.connection is not None:
                self.connection.resume()

    def finish(self) -> None:
        """Mark the call as over, whatever its result. The connection or the pool calls it."""
        assert not self.over
        self.over = True
        self.connection = None
        self._on_done()
