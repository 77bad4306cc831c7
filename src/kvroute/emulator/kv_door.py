"""The door of an instance that hands out KV at the fabric's pace, each connection one transfer (`kv_wire`).

KV that is complete goes as fast as the links let it; who asks early gets it layer by layer while it is computed. A
`GET /query` on the same port answers as Mooncake's bootstrap server does.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import msgspec

from kvroute.emulator.clock import Alarm, Clock
from kvroute.emulator.counters import Link
from kvroute.emulator.engine import Engine
from kvroute.emulator.fabric import Fabric, Transfer
from kvroute.emulator.job import Job
from kvroute.emulator.kv_arrivals import Arrivals
from kvroute.emulator.kv_wire import LINE_BYTES_MAX, QUERY, Order, Parcel, is_complete, read_order
from kvroute.topology import Cluster
from kvroute.types import InputError

ZEROS = bytes(1 << 18)
AWAIT_S = 60.0
"""How long a source waits for KV that it has been told will come."""
SEND_BUFFER_BYTES = 4 << 20
"""Modelled: what waits in the sender's kernel, at most."""
_WHOLE = 1.0 - 1e-6


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
        self.deliveries: set[Delivery] = set()
        """Open connections."""
        self.awaited: dict[str, Delivery] = {}
        """Those whose KV is not complete, by its key."""
        self.arrivals = Arrivals(shelf.clock)

    def open(self, engine: Engine) -> None:
        """Serve from this engine from now on."""
        self.shelf.engine = engine
        engine.door = self

    def __call__(self) -> Delivery:
        """The protocol of one more connection."""
        return Delivery(self)

    def computing(self, job: Job) -> None:
        """See `Door`."""
        delivery = self.awaited.get(job.name)
        if delivery is not None:
            delivery.follow(job)

    def held(self, key: str) -> None:
        """See `Door`."""
        delivery = self.awaited.pop(key, None)
        if delivery is not None:
            delivery.complete()

    def given_up(self, name: str) -> None:
        """See `Door`."""
        delivery = self.awaited.pop(name, None)
        if delivery is not None:
            delivery.lose(f"the prompt of {name} is not computed any more")

    def links(self) -> tuple[dict[str, Link], float]:
        """What is on its way, by target, and the time at which that was so."""
        found: dict[str, Link] = {}
        now = self.shelf.fabric.look()
        for delivery in list(self.deliveries):
            if (link := delivery.link(now)) is not None:
                target = delivery.target
                found[target] = found[target].beside(link) if target in found else link
        return found, now

    def abort(self) -> None:
        """Break off whatever is under way."""
        for delivery in list(self.deliveries):
            delivery.abort()


class Delivery(asyncio.Protocol):
    """One connection at the source."""

    def __init__(self, door: KvDoor) -> None:
        self._door, self._shelf = door, door.shelf
        self._engine = door.shelf.engine
        self._line = b""
        self._order: Order | None = None
        self._transport: asyncio.Transport | None = None
        self._transfer: Transfer | None = None
        self._patience: Alarm | None = None
        self._first_layer: Alarm | None = None
        self._kv_bytes = 0.0
        self._counted_bytes = self._counted_s = 0.0
        """What the engine has counted of it, and when."""
        self._breaks = self._ended = False

    @property
    def target(self) -> str:
        """Who pulls."""
        return self._order.target if self._order else ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)
        self._door.deliveries.add(self)
        self._door.arrivals.begin(self)

    def data_received(self, data: bytes) -> None:
        """The order; nothing is expected after it."""
        assert self._transport is not None
        if self._order is not None or self._transport.is_closing():
            return
        self._line += data
        if is_complete(self._line):
            self._door.arrivals.end(self)
            self._answer_query() if self._line.startswith(QUERY) else self._take(self._line)
        elif len(self._line) >= LINE_BYTES_MAX:
            self.abort()

    def _take(self, line: bytes) -> None:
        order = read_order(line)
        if isinstance(order, str):
            self._refuse(f"the order cannot be read: {order}")
            return
        self._order = order
        if order.key in self._engine.held:
            self.start()
        elif order.awaited:
            self._door.awaited[order.key] = self
            self._patience = self._shelf.clock.at(self._shelf.clock.now() + AWAIT_S, self._give_up)
            job = self._engine.under_way(order.key)
            if job is not None:
                self.follow(job)
        else:
            self._refuse(f"{self._shelf.name} holds no KV for {order.key}: it has been fetched, has expired or is lost")

    def _give_up(self) -> None:
        self._patience = None
        assert self._order is not None
        self._door.awaited.pop(self._order.key, None)
        self._refuse(f"the KV of {self._order.key} did not come in {AWAIT_S:g} s")

    def follow(self, job: Job) -> None:
        """The KV is being computed: bytes leave from the end of the first layer on, as the simulator has it."""
        self._be_patient()
        layers = sum(group.count for group in self._engine.model.layers)
        if self._order is not None and self._order.early and layers > 1 and job.ends_s > job.begins_s:
            first_s = job.begins_s + (job.ends_s - job.begins_s) / layers
            self._first_layer = self._shelf.clock.at(first_s, partial(self._stream, job, (layers - 1) / layers))

    def _stream(self, job: Job, share: float) -> None:
        """At such a pace that all layers but the last have left when that one is computed."""
        self._first_layer = None
        left_s = job.ends_s - self._shelf.clock.now()
        if left_s > 0.0:
            self._send(job, share / left_s)

    def complete(self) -> None:
        """All of the KV is here: send it, or what is left of it, at once."""
        assert self._order is not None
        if self._ended:
            self._engine.release(self._order.key)
        elif self._transfer is None:
            self.start()
        else:
            self._engine.fetching(self._order.key)
            self._shelf.fabric.release(self._transfer)

    def lose(self, why: str) -> None:
        """The KV will not be complete."""
        self._be_patient()
        if self._transfer is not None:
            self.abort()
        elif not self._ended:
            self._refuse(why)

    def start(self) -> None:
        """The KV is here: send it."""
        assert self._order is not None
        self._be_patient()
        if self._send(self._engine.held[self._order.key].job):
            self._engine.fetching(self._order.key)

    def _be_patient(self) -> None:
        for alarm in (self._patience, self._first_layer):
            if alarm is not None:
                alarm.cancel()
        self._patience = self._first_layer = None

    def _send(self, job: Job, pace_per_s: float = math.inf) -> bool:
        """Begin, with so much of the whole a second at most; False where nobody can be reached."""
        order, shelf = self._order, self._shelf
        assert order is not None
        kv_bytes = float(self._engine.model.kv_bytes(job.input_tokens, min(order.cached_tokens, job.input_tokens)))
        self._breaks, self._kv_bytes = shelf.faulty(), kv_bytes
        produced_bytes_per_s = kv_bytes * pace_per_s if kv_bytes else math.inf
        try:
            ends = shelf.cluster.index(shelf.name), shelf.cluster.index(order.target)
            self._transfer = shelf.fabric.send(
                *ends, kv_bytes, self, job.traced, produced_bytes_per_s=produced_bytes_per_s
            )
        except InputError as error:
            self._refuse(str(error))
            return False
        self._counted_s = shelf.clock.now()
        self._write(Parcel(source=shelf.name, wire_bytes=self._transfer.wire_bytes, kv_bytes=kv_bytes))
        return True

    def link(self, now: float) -> Link | None:
        """How the transfer goes; None where there is none, or the network waits for the engine. What has left is
        counted. Args: the time of the fabric's last `look`."""
        if self._transfer is None:
            return None
        sent_bytes, rate = self._shelf.fabric.progress(self._transfer)
        self._count(sent_bytes, now)
        if not self._transfer.flows or rate >= _WHOLE * self._transfer.produced_bytes_per_s:
            return None
        return Link(1, self._transfer.latency_s, min(self._kv_bytes - sent_bytes, SEND_BUFFER_BYTES), rate)

    def _count(self, sent_bytes: float, now: float) -> None:
        self._engine.counters.sends(self.target, sent_bytes - self._counted_bytes, now - self._counted_s)
        self._counted_bytes, self._counted_s = sent_bytes, now

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
            self._transfer, self._ended = None, True
            self._count(self._kv_bytes, self._shelf.clock.now())
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
        self._door.deliveries.discard(self)
        self._door.arrivals.end(self)
        self._be_patient()
        order = self._order
        if order is None:
            return
        if self._door.awaited.get(order.key) is self and not self._ended:
            del self._door.awaited[order.key]
        if self._transfer is not None:
            self._shelf.fabric.cancel(self._transfer)
            if order.key in self._engine.held:
                self._engine.keep(order.key)
