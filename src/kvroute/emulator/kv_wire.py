"""KV bytes over TCP: an instance's door that hands out held KV at the fabric's pace, and the call that pulls it.

One connection is one transfer. The target sends a line of JSON (`Order`), the source answers with one (`Parcel`) and
then the bytes, which are zeros. A `GET /query` on the same port answers as Mooncake's bootstrap server does.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import msgspec

from kvroute.emulator.clock import Alarm, Clock
from kvroute.emulator.engine import Engine
from kvroute.emulator.fabric import Fabric, Transfer
from kvroute.emulator.refusal import Broken
from kvroute.topology import Cluster
from kvroute.types import InputError

LINE_MAX = 1 << 16
ZEROS = bytes(1 << 18)
_LOOKS = 4
"""Within the time after which a transfer that stands still is given up."""
AWAIT_S = 60.0
"""How long a source waits for KV that it has been told will come."""


class Order(msgspec.Struct, frozen=True):
    """What a target wants."""

    key: str
    target: str
    """Its name in the cluster."""
    cached_tokens: int = 0
    """It has these."""
    awaited: bool = False
    """Wait for KV that is not there yet."""


class Parcel(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a source is about to send."""

    source: str
    wire_bytes: int = 0
    kv_bytes: float = 0.0
    """As modelled, before scaling."""
    error: str = ""


class PullFailed(Broken):
    """The KV has not arrived."""


@dataclass(slots=True, eq=False)
class Shelf:
    """What the door of one instance needs of it; the engine changes when the instance restarts."""

    name: str
    cluster: Cluster
    clock: Clock
    fabric: Fabric
    faulty: Callable[[], bool]
    """Whether the next transfer is to break in the middle."""
    engine: Engine = field(init=False)
    engine_id: str = ""


class KvDoor:
    """All pulls from one instance."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self._deliveries: set[Delivery] = set()
        self._awaited: dict[str, Delivery] = {}

    def open(self, engine: Engine) -> None:
        """Serve from this engine from now on."""
        self.shelf.engine = engine
        engine.on_held = self._on_held

    def __call__(self) -> Delivery:
        """The protocol of one more connection."""
        return Delivery(self.shelf, self._deliveries, self._awaited)

    def _on_held(self, key: str) -> None:
        delivery = self._awaited.pop(key, None)
        if delivery is not None:
            delivery.start()

    def abort(self) -> None:
        """Break off whatever is under way."""
        for delivery in list(self._deliveries):
            delivery.abort()


class Delivery(asyncio.Protocol):
    """One connection at the source."""

    def __init__(self, shelf: Shelf, deliveries: set[Delivery], awaited: dict[str, Delivery]) -> None:
        self._shelf, self._deliveries, self._awaited = shelf, deliveries, awaited
        self._engine = shelf.engine
        self._line = b""
        self._order: Order | None = None
        self._transport: asyncio.Transport | None = None
        self._transfer: Transfer | None = None
        self._patience: Alarm | None = None
        self._breaks = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)
        self._deliveries.add(self)

    def data_received(self, data: bytes) -> None:
        """The order; nothing is expected after it."""
        if self._order is not None:
            return
        self._line += data
        if self._line.startswith(b"GET "):
            self._answer_query()
        elif b"\n" in self._line:
            self._take(self._line)
        elif len(self._line) > LINE_MAX:
            self.abort()

    def _take(self, line: bytes) -> None:
        try:
            order = self._order = msgspec.json.decode(line, type=Order)
        except msgspec.DecodeError as error:
            self._refuse(f"the order cannot be read: {error}")
            return
        if order.key in self._engine.held:
            self.start()
        elif order.awaited:
            self._awaited[order.key] = self
            self._patience = self._shelf.clock.at(self._shelf.clock.now() + AWAIT_S, self._give_up)
        else:
            self._refuse(f"{self._shelf.name} holds no KV for {order.key}: it has been fetched, has expired or is lost")

    def _give_up(self) -> None:
        self._patience = None
        assert self._order is not None
        self._awaited.pop(self._order.key, None)
        self._refuse(f"the KV of {self._order.key} did not come in {AWAIT_S:g} s")

    def start(self) -> None:
        """The KV is here: send it."""
        order, shelf = self._order, self._shelf
        assert order is not None
        if self._patience is not None:
            self._patience.cancel()
        job = self._engine.held[order.key].job
        kv_bytes = float(self._engine.model.kv_bytes(job.input_tokens, min(order.cached_tokens, job.input_tokens)))
        self._breaks = shelf.faulty()
        try:
            ends = shelf.cluster.index(shelf.name), shelf.cluster.index(order.target)
            self._transfer = shelf.fabric.send(*ends, kv_bytes, self, job.traced)
        except InputError as error:
            self._refuse(str(error))
            return
        self._engine.fetching(order.key)
        self._write(Parcel(source=shelf.name, wire_bytes=self._transfer.wire_bytes, kv_bytes=kv_bytes))

    def carry(self, wire_bytes: int, last: bool) -> None:
        """See `Carrier`."""
        assert self._transport is not None
        assert self._order is not None
        if self._breaks:
            self.abort()
            return
        for start in range(0, wire_bytes, len(ZEROS)):
            self._transport.write(memoryview(ZEROS)[: min(wire_bytes - start, len(ZEROS))])
        if last:
            self._transfer = None
            self._engine.release(self._order.key)
            self._transport.close()

    def _write(self, parcel: Parcel) -> None:
        assert self._transport is not None
        self._transport.write(msgspec.json.encode(parcel) + b"\n")

    def _refuse(self, why: str) -> None:
        self._write(Parcel(source=self._shelf.name, error=why))
        assert self._transport is not None
        self._transport.close()

    def _answer_query(self) -> None:
        """`GET /query` of Mooncake's bootstrap: data-parallel rank to engine."""
        assert self._transport is not None
        if b"\r\n\r\n" in self._line:
            found = self._line.startswith(b"GET /query")
            body = msgspec.json.encode({"0": {"engine_id": self._shelf.engine_id}}) if found else b"{}"
            status = b"200 OK" if found else b"404 Not Found"
            head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
            self._transport.write(head % (status, len(body)) + body)
            self._transport.close()

    def abort(self) -> None:
        """Break off."""
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Whatever has not been sent stays held: another target may ask for it."""
        self._deliveries.discard(self)
        if self._patience is not None:
            self._patience.cancel()
        order = self._order
        if order is None:
            return
        if self._awaited.get(order.key) is self:
            del self._awaited[order.key]
        if self._transfer is not None:
            self._shelf.fabric.cancel(self._transfer)
            if order.key in self._engine.held:
                self._engine.keep(order.key)


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
