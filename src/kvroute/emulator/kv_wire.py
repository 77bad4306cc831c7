"""KV bytes over TCP: what a target asks of a source, what that answers, and the call that pulls.

One connection is one transfer. The target sends a line of JSON (`Order`), the source answers with one (`Parcel`) and
then the bytes, which are zeros.
"""

from __future__ import annotations

import asyncio
import math
from typing import cast

import msgspec

from kvroute.emulator.refusal import Broken

_LOOKS = 4
"""Within the time after which a transfer that stands still is given up."""


class Order(msgspec.Struct, frozen=True):
    """What a target wants."""

    key: str
    target: str
    """Its name in the cluster."""
    cached_tokens: int = 0
    """It has these."""
    awaited: bool = False
    """Wait for KV that is not there yet."""
    early: bool = False
    """And send it while it is computed."""


class Parcel(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a source is about to send."""

    source: str
    wire_bytes: int = 0
    kv_bytes: float = 0.0
    """As modelled, before scaling."""
    error: str = ""


class PullFailed(Broken):
    """The KV has not arrived."""


class _Intake(asyncio.Protocol):
    """One connection at the target."""

    def __init__(self, done: asyncio.Future[Parcel], order: Order) -> None:
        self._done, self._order = done, order
        self._head = b""
        self._parcel: Parcel | None = None
        self._left = 0
        self.pieces = 0
        """So many have come."""

    @property
    def counts(self) -> bool:
        """Whether bytes are to come that show how far the transfer is."""
        return self._left > 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(msgspec.json.encode(self._order) + b"\n")

    def data_received(self, data: bytes) -> None:
        self.pieces += 1
        if self._parcel is None:
            self._head += data
            line, found, rest = self._head.partition(b"\n")
            if not found:
                return
            self._parcel = msgspec.json.decode(line, type=Parcel)
            self._left = self._parcel.wire_bytes - len(rest)
        else:
            self._left -= len(data)

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
