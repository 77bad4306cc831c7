"""KV bytes over TCP: the target's request, the source's response, and the function that pulls.

One connection is one transfer. The target sends a line of JSON (`PullRequest`). The source responds with a line of JSON
(`PullHeader`) and then the bytes, which are zeros.
"""

from __future__ import annotations

import asyncio
import math
from typing import Annotated, TypeVar, cast

import msgspec

from kvroute.emulator.errors import EngineError
from kvroute_engine.addresses import host_port

LINE_BYTES_MAX = 4 << 10
"""Maximum length of a request or response line, line end included."""
STAGED_PREFIX = "read/"
QUERY = b"GET "
"""First bytes of an HTTP query."""
_CHECKS = 4
"""Number of checks within the time after which a stalled transfer is aborted."""


S = TypeVar("S", bound=msgspec.Struct)


class PullRequest(msgspec.Struct, frozen=True):
    """Pull request of a target."""

    key: str
    target: str
    """Name of the target in the cluster."""
    cached_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Prompt tokens that the target already has, or gets from elsewhere."""
    awaited: bool = False
    """True: wait for KV that does not exist yet."""
    early: bool = False
    """True: send that KV while it is computed."""
    keep: bool = False
    """True: blocks from the store stay in the source's buffer."""


class PullHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    """Header that a source sends before the KV."""

    source: str
    wire_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    kv_bytes: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    """Modelled bytes, before scaling."""
    error: str = ""


def staged_key(read_id: str) -> str:
    """Return the key under which the blocks of a read from the store are fetched."""
    return f"{STAGED_PREFIX}{read_id}"


def is_complete(data: bytes) -> bool:
    """Return whether `data` contains a complete pull request (a line) or a complete query (an HTTP head)."""
    return (b"\r\n\r\n" if data.startswith(QUERY) else b"\n") in data[:LINE_BYTES_MAX]


def read_order(data: bytes) -> PullRequest | str:
    """Return the pull request in the first line of `data`, or a text that says what is wrong with it."""
    return _read(data.partition(b"\n")[0], PullRequest)


def read_pull_header(line: bytes) -> PullHeader | str:
    """Return the header in a line of JSON, or a text that says what is wrong with it."""
    return _read(line, PullHeader)


def _read(line: bytes, kind: type[S]) -> S | str:
    if len(line) > LINE_BYTES_MAX:
        return f"it is longer than {LINE_BYTES_MAX} bytes"
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return str(error)


class PullFailed(EngineError):
    """KV could not be pulled."""


class _Intake(asyncio.Protocol):
    """One connection at the target."""

    def __init__(self, done: asyncio.Future[PullHeader], pull_request: PullRequest) -> None:
        self._done, self._pull_request = done, pull_request
        self._head = b""
        self._header: PullHeader | None = None
        self._left = 0
        self._transport: asyncio.Transport | None = None
        self.pieces = 0
        """Number of data chunks received."""

    @property
    def counts(self) -> bool:
        """True while more bytes are expected, so that a stall can be detected."""
        return self._left > 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(msgspec.json.encode(self._pull_request) + b"\n")

    def data_received(self, data: bytes) -> None:
        self.pieces += 1
        if self._header is None:
            self._head += data
            line, found, rest = self._head.partition(b"\n")
            if not found and len(self._head) < LINE_BYTES_MAX:
                return
            header = read_pull_header(line)
            if isinstance(header, str):
                self._fail(f"the KV source's response for {self._pull_request.key} cannot be read: {header}")
                return
            self._header = header
            self._left = self._header.wire_bytes - len(rest)
        else:
            self._left -= len(data)

    def _fail(self, why: str) -> None:
        if not self._done.done():
            self._done.set_exception(PullFailed(why))
        assert self._transport is not None
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Set the result. The transfer ends with the connection: latency applies even if there is nothing to send."""
        if self._done.done():
            return
        if self._header is None or (self._left and not self._header.error):
            left = f"with {self._left} bytes missing" if self._header is not None else "without a response"
            self._done.set_exception(PullFailed(f"the KV transfer of {self._pull_request.key} ended {left}"))
        elif self._header.error:
            self._done.set_exception(PullFailed(self._header.error))
        else:
            self._done.set_result(self._header)


async def pull(host: str, port: int, pull_request: PullRequest, *, patience_s: float = math.inf) -> PullHeader:
    """Fetch KV from `host:port` and return its header when all of it has arrived.

    Args:
        host: host of the KV source.
        port: port of its KV server.
        pull_request: the pull request.
        patience_s: time without progress after which the transfer fails; detection may take a quarter longer.

    Raises:
        PullFailed: no source at this address, no such KV, the connection broke before the end, or the transfer stalled.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[PullHeader] = loop.create_future()
    try:
        transport, prefix_import = await loop.create_connection(lambda: _Intake(done, pull_request), host, port)
    except OSError as error:
        raise PullFailed(f"no KV source at {host_port(host, port)} ({error})") from None
    try:
        return await (done if patience_s == math.inf else _watched(done, prefix_import, pull_request.key, patience_s))
    finally:
        done.cancel()  # later events of the connection are ignored
        transport.abort()


async def _watched(done: asyncio.Future[PullHeader], prefix_import: _Intake, key: str, patience_s: float) -> PullHeader:
    """Check for progress a few times within `patience_s`, instead of restarting a timer at every chunk."""
    pieces, checks = -1, 0
    while not done.done():
        if prefix_import.pieces != pieces or not prefix_import.counts:
            pieces, checks = prefix_import.pieces, 0
        elif checks > _CHECKS:
            raise PullFailed(f"the KV transfer of {key} made no progress for {patience_s:g} s")
        checks += 1
        await asyncio.wait((done,), timeout=patience_s / _CHECKS)
    return done.result()
