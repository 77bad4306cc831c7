"""Fuzzing target: an engine's bytes through `UpstreamConnection`, and the values read from the body."""

from __future__ import annotations

import asyncio
import atexit
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

from tests.fuzz.cuts import bounded, pieces

from kvroute.http.client.call import Failure
from kvroute.http.client.pool import UpstreamPool
from kvroute.http.client.response_parser import HEAD_LINES_MAX
from kvroute.http.client.upstream_connection import UpstreamConnection
from kvroute.http.headers import Headers, answered
from kvroute.serve.api.responses import cached_tokens, sse_events, usage_of
from kvroute.serve.api.streams import STREAMS, reported
from kvroute.serve.engines.pd_protocol import ProtocolError
from kvroute.serve.engines.protocols import PROTOCOLS, engine_id

INSTRUMENTED = (
    "kvroute.http.client.response_parser",
    "kvroute.http.client.upstream_connection",
    "kvroute.serve.api.responses",
    "kvroute.serve.api.streams",
    "kvroute.serve.engines.protocols",
)
RUNS = 25_000
TOKENS_MAX = 2**31 - 1
_LOOP = asyncio.new_event_loop()
atexit.register(_LOOP.close)


class _Wire(asyncio.Transport):
    """A transport that sends nothing."""

    closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        self.closing = True


@dataclass
class Received:
    """Records the calls of a response handler."""

    status: int = 0
    headers: Headers = field(default_factory=list)
    body: bytes = b""
    end: tuple[str, str] = ("", "")
    calls: list[str] = field(default_factory=list, compare=False)

    def on_head(self, status: int, headers: Headers) -> None:
        """See Sink."""
        self.calls.append("head")
        self.status, self.headers = status, headers

    def on_body(self, data: bytes) -> None:
        """See Sink."""
        self.calls.append("body")
        self.body += data

    def on_end(self) -> None:
        """See Sink."""
        self.calls.append("end")
        self.end = ("end", "")

    def on_failure(self, failure: Failure) -> None:
        """See Sink."""
        self.calls.append("failure")
        self.end = (failure.kind, failure.phase)


def check(data: bytes) -> str:
    """For every split of the bytes, the calls are the same and in the guaranteed order. For every body, the gateway
    reads numbers within their bounds or rejects it."""
    received = bounded(lambda: _receive([data]), 5_000 + 60 * len(data))
    assert _receive(list(pieces(data))) == received
    ends = [call for call in received.calls if call in ("end", "failure")]
    assert len(ends) == 1
    assert received.calls[-1] == ends[0]
    assert received.calls.count("head") <= 1
    assert "body" not in received.calls or received.calls[0] == "head"
    assert len(received.body) <= len(data)
    assert len(received.headers) <= HEAD_LINES_MAX
    if received.end[0] == "end":
        head = b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n" % (received.status, len(received.body))
        again = _receive([head + received.body])
        assert (again.status, again.body, again.end) == (
            received.status,
            received.body,
            received.end,
        ) or received.status in (
            204,
            304,
        )
    for name, value in answered(received.headers)[1]:
        assert not any(c in b"\r\n\0" for c in name + value)
    _read_body(received.body or data)
    return "accepted" if received.end[0] == "end" else "refused"


def _receive(parts: list[bytes]) -> Received:
    async def main() -> Received:
        pool, received = UpstreamPool("http://engine:1"), Received()
        connection = UpstreamConnection(pool)
        connection.connection_made(cast(asyncio.BaseTransport, _Wire()))
        pool.keep(connection)
        pool.send(b"", received, first_byte_s=1e6, idle_s=1e6)
        for part in parts:
            if not received.end[0]:
                connection.data_received(part)
        connection.connection_lost(None)
        return received

    return _LOOP.run_until_complete(main())


def _read_body(body: bytes) -> None:
    for tokens in (*(usage_of(body) or ()), cached_tokens(body)):
        assert tokens is None or 0 <= tokens <= TOKENS_MAX
    for form in STREAMS.values():
        at, _ = form.first(body)
        assert 0 <= at <= len(body)
    usage, shown = reported(body, hidden=True)
    assert usage is not None or shown == body or len(shown) < len(body)
    assert 0 <= sse_events(body) <= len(body)
    for protocol in PROTOCOLS.values():
        with suppress(ProtocolError):
            protocol.allows_refetch(protocol.transfer_params(body))
    with suppress(ProtocolError):
        assert engine_id(body)
