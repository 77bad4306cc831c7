"""A call to an engine: what it is made of, who hears of it, how it comes to nothing; refuses to hold a connection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from kvroute.gateway.exchange import Headers

if TYPE_CHECKING:
    from kvroute.gateway.upstream import Keeper, Line

Phase = Literal["connect", "first_byte", "body"]


FailureKind = Literal["refused", "reset", "timeout", "malformed", "out_of_files"]
"""The last one is the gateway's own: it has no file descriptor left for a connection."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call came to nothing. The phase is `body` once a byte of the body has arrived."""

    kind: FailureKind
    phase: Phase
    text: str


class Sink(Protocol):
    """Who made the call. Every call ends in exactly one `on_end` or `on_failure`, or in neither if it was aborted."""

    def on_head(self, status: int, headers: Headers) -> None:
        """Status and headers are there; at most once."""
        ...

    def on_body(self, data: bytes) -> None:
        """Body bytes without their framing. May still come once or more after `pause`: what was read already."""
        ...

    def on_end(self) -> None:
        """The answer is complete; its connection may serve the next call already."""
        ...

    def on_failure(self, failure: Failure) -> None:
        """The answer will not be completed."""
        ...


class Call:
    """A request under way to an engine."""

    __slots__ = (
        "_keeper",
        "body",
        "first_byte_s",
        "head_only",
        "idle_s",
        "line",
        "over",
        "paused",
        "request",
        "retried",
        "sink",
    )

    def __init__(
        self, request: bytes, sink: Sink, first_byte_s: float, idle_s: float, head_only: bool, keeper: Keeper
    ) -> None:
        self.request = request
        self.body = b""
        """What follows the request's bytes, where one piece would be a large copy."""
        self.sink = sink
        self.first_byte_s = first_byte_s
        self.idle_s = idle_s
        self.head_only = head_only
        self.line: Line | None = None
        """None before a connection is there and after the end."""
        self.paused = False
        self.retried = False
        self.over = False
        self._keeper = keeper

    def abort(self) -> None:
        """Close the connection; the sink hears nothing more. Does nothing after the end."""
        if self.over:
            return
        line = self.line
        self.finish()
        if line is not None:
            line.drop()

    def forget_request(self) -> None:
        """The client's answer has begun, so the request is not sent again. One that still waits for its connection is
        kept: without it, the connection would carry nothing and the call would end in a timeout."""
        if self.line is not None:
            self.request = self.body = b""
            self.retried = True

    def pause(self) -> None:
        """Read nothing more from the engine; the timeout between bytes rests."""
        if not self.paused and not self.over:
            self.paused = True
            if self.line is not None:
                self.line.pause()

    def resume(self) -> None:
        """Read on."""
        if self.paused and not self.over:
            self.paused = False
            if self.line is not None:
                self.line.resume()

    def finish(self) -> None:
        """The call is over (the connection or the pool says so), however it ended."""
        assert not self.over
        self.over = True
        self.line = None
        self._keeper.ended(self)
