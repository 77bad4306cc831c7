"""KV bytes over TCP: what a target asks of a source, what that answers, and the call that pulls.

One connection is one transfer. The target sends a line of JSON (`Order`), the source answers with one (`Parcel`) and
then the bytes, which are zeros.
"""

from __future__ import annotations

import asyncio
import math
from typing import Annotated, TypeVar, cast

import msgspec

from kvroute.emulator.refusal import Broken

LINE_BYTES_MAX = 4 << 10
"""Of an order or an answer, its end included."""
QUERY = b"GET "
"""How a query of HTTP begins."""
_LOOKS = 4
"""Within the time after which a transfer that stands still is given up."""


S = TypeVar("S", bound=msgspec.Struct)


class Order(msgspec.Struct, frozen=True):
    """What a target wants."""

    key: str
    target: str
    """Its name in the cluster."""
    cached_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """It has these."""
    awaited: bool = False
    """Wait for KV that is not there yet."""
    early: bool = False
    """And send it while it is computed."""


class Parcel(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a source is about to send."""

    source: str
    wire_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    kv_bytes: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    """As modelled, before scaling."""
    error: str = ""


def is_complete(data: bytes) -> bool:
    """Whether `data` holds all of an order, which is a line, or of a query, which is an HTTP head."""
    return (b"\r\n\r\n" if data.startswith(QUERY) else b"\n") in data[:LINE_BYTES_MAX]


def read_order(data: bytes) -> Order | str:
    """The order in the first line of `data`, or in words what is wrong with it."""
    return _read(data.partition(b"\n")[0], Order)


def read_parcel(line: bytes) -> Parcel | str:
    """The answer in a line of JSON, or in words what is wrong with it."""
    return _read(line, Parcel)


def _read(line: bytes, kind: type[S]) -> S | str:
    if len(line) > LINE_BYTES_MAX:
        return f"it is longer than {LINE_BYTES_MAX} bytes"
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return str(error)


class PullFailed(Broken):
    """The KV has not arrived."""


class _Intake(asyncio.Protocol):
    """One connection at the target."""

    def __init__(self, done: asyncio.Future[Parcel], order: Order) -> None:
        self._done, self._order = done, order
        self._head = b""
        self._parcel: Parcel | None = None
        self._left = 0
        self._transport: asyncio.Transport | None = None
        self.pieces = 0
        """So many have come."""

    @property
    def counts(self) -> bool:
        """Whether bytes are to come that show how far the transfer is."""
        return self._left > 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(msgspec.json.encode(self._order) + b"\n")

    def data_received(self, data: bytes) -> None:
        self.pieces += 1
        if self._parcel is None:
            self._head += data
            line, found, rest = self._head.partition(b"\n")
            if not found and len(self._head) < LINE_BYTES_MAX:
                return
            parcel = read_parcel(line)
            if isinstance(parcel, str):
                self._fail(f"the KV source's answer for {self._order.key} cannot be read: {parcel}")
                return
            self._parcel = parcel
            self._left = self._parcel.wire_bytes - len(rest)
        else:
            self._left -= len(data)

    def _fail(self, why: str) -> None:
        if not self._done.done():
            self._done.set_exception(PullFailed(why))
        assert self._transport is not None
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The end of the connection is the end of the transfer: with nothing to send, latency is paid all the same."""
        if self._done.done():
            return
        if self._parcel is None or (self._left and not self._parcel.error):
            left = f"{self._left} bytes short" if self._parcel is not None else "without an answer"
            self._done.set_exception(PullFailed(f"the KV transfer of {self._order.key} broke off {left}"))
        elif self._parcel.error:
            self._done.set_exception(PullFailed(self._parcel.error))
        else:
            self._done.set_result(self._parcel)


async def pull(host: str, port: int, order: Order, *, patience_s: float = math.inf) -> Parcel:
    """Fetch KV from `host:port`; returns what has come once all of it is here.

    Args:
        host: where the source hands out KV.
        port: of its door.
        order: what is wanted.
        patience_s: bytes that are due and stay away for so long do not come any more, or a quarter longer.

    Raises:
        PullFailed: nobody there, no such KV, the connection broke before the end, or the transfer stands still.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Parcel] = loop.create_future()
    try:
        transport, intake = await loop.create_connection(lambda: _Intake(done, order), host, port)
    except OSError as error:
        raise PullFailed(f"no KV source at {host}:{port} ({error})") from None
    try:
        return await (done if patience_s == math.inf else _watched(done, intake, order.key, patience_s))
    finally:
        done.cancel()  # what happens to the connection from now on is nobody's news
        transport.abort()


async def _watched(done: asyncio.Future[Parcel], intake: _Intake, key: str, patience_s: float) -> Parcel:
    """Look a few times within the patience, in place of winding up a clock at every piece."""
    pieces, looks = -1, 0
    while not done.done():
        if intake.pieces != pieces or not intake.counts:
            pieces, looks = intake.pieces, 0
        elif looks > _LOOKS:
            raise PullFailed(f"the KV transfer of {key} has stood still for {patience_s:g} s")
        looks += 1
        await asyncio.wait((done,), timeout=patience_s / _LOOKS)
    return done.result()
