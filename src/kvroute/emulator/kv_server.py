"""The server of an instance that sends KV at the fabric's rate, one transfer per connection (`kv_wire`).

Complete KV is sent as fast as the links allow. A target that requests it early receives it layer by layer while it is
computed. `GET /query` on the same port responds as Mooncake's bootstrap server does.
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
from kvroute.emulator.engine.counters import TargetConnections
from kvroute.emulator.engine.engine import Engine
from kvroute.emulator.engine.sequence import EngineSequence
from kvroute.emulator.kv.fabric import EmulatedFabric, EmulatedTransfer
from kvroute.emulator.kv.kv_arrivals import HandshakeBounds
from kvroute.emulator.kv.kv_wire import (
    LINE_BYTES_MAX,
    QUERY,
    STAGED_PREFIX,
    PullHeader,
    PullRequest,
    is_complete,
    read_order,
)
from kvroute.emulator.kv.storage import StorageNode
from kvroute.topology import Cluster
from kvroute.types import InputError

ZEROS = bytes(1 << 18)
AWAIT_S = 60.0
"""Time for which a source waits for announced KV, in seconds."""
SEND_BUFFER_BYTES = 4 << 20
"""Modelled maximum of unsent bytes in the sender's kernel."""
_WHOLE = 1.0 - 1e-6


@dataclass(slots=True, eq=False)
class KvServerInstance:
    """State of one instance that its KV server uses. The engine changes when the instance restarts."""

    name: str
    cluster: Cluster
    clock: Clock
    fabric: EmulatedFabric
    faulty: Callable[[], bool]
    """Returns whether the next transfer is to break halfway."""
    storage: StorageNode | None = None
    """The buffer of its node; None: there is no store."""
    engine: Engine = field(init=False)
    engine_id: str = ""


class KvServer:
    """Serves all pulls from one instance."""

    def __init__(self, kv_source: KvServerInstance) -> None:
        self.kv_source = kv_source
        self.deliveries: set[KvTransfer] = set()
        """Open connections."""
        self.awaited: dict[str, KvTransfer] = {}
        """Connections that wait for incomplete KV, by its key."""
        self.arrivals = HandshakeBounds(kv_source.clock)

    def open(self, engine: Engine) -> None:
        """Serve from this engine from now on."""
        self.kv_source.engine = engine
        engine.kv_listener = self

    def __call__(self) -> KvTransfer:
        """Return the protocol of a new connection."""
        return KvTransfer(self)

    def computing(self, sequence: EngineSequence) -> None:
        """See `KvListener`."""
        delivery = self.awaited.get(sequence.name)
        if delivery is not None:
            delivery.follow(sequence)

    def held(self, key: str) -> None:
        """See `KvListener`."""
        delivery = self.awaited.pop(key, None)
        if delivery is not None:
            delivery.complete()

    def given_up(self, name: str) -> None:
        """See `KvListener`."""
        delivery = self.awaited.pop(name, None)
        if delivery is not None:
            delivery.lose(f"the prompt of {name} is no longer computed")

    def links(self) -> tuple[dict[str, TargetConnections], float]:
        """Return the transfers in progress by target, and the time of this state."""
        found: dict[str, TargetConnections] = {}
        now = self.kv_source.fabric.sync()
        for delivery in list(self.deliveries):
            if (link := delivery.link(now)) is not None:
                target = delivery.target
                found[target] = found[target].beside(link) if target in found else link
        return found, now

    def abort(self) -> None:
        """Abort all connections."""
        for delivery in list(self.deliveries):
            delivery.abort()


class KvTransfer(asyncio.Protocol):
    """One connection at the source."""

    def __init__(self, kv_server: KvServer) -> None:
        self._kv_server, self._source = kv_server, kv_server.kv_source
        self._engine = kv_server.kv_source.engine
        self._line = b""
        self._pull_request: PullRequest | None = None
        self._transport: asyncio.Transport | None = None
        self._transfer: EmulatedTransfer | None = None
        self._patience: Alarm | None = None
        self._first_layer: Alarm | None = None
        self._kv_bytes = 0.0
        self._counted_bytes = self._counted_s = 0.0
        """Bytes of this transfer that the engine has counted, and the time of the last count."""
        self._breaks = self._ended = False
        self._read_id = ""
        """Id of the read from the store whose blocks are sent and then released."""

    @property
    def target(self) -> str:
        """Name of the instance that pulls; empty before its request."""
        return self._pull_request.target if self._pull_request else ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)
        self._kv_server.deliveries.add(self)
        self._kv_server.arrivals.begin(self)

    def data_received(self, data: bytes) -> None:
        """Process the pull request. Later bytes are ignored."""
        assert self._transport is not None
        if self._pull_request is not None or self._transport.is_closing():
            return
        self._line += data
        if is_complete(self._line):
            self._kv_server.arrivals.end(self)
            self._answer_query() if self._line.startswith(QUERY) else self._take(self._line)
        elif len(self._line) >= LINE_BYTES_MAX:
            self.abort()

    def _take(self, line: bytes) -> None:
        pull_request = read_order(line)
        if isinstance(pull_request, str):
            self._refuse(f"the KV request cannot be read: {pull_request}")
            return
        self._pull_request = pull_request
        storage = self._source.storage
        if storage is not None and pull_request.key.startswith(STAGED_PREFIX):
            self._send_staged(storage, pull_request.key.removeprefix(STAGED_PREFIX))
        elif pull_request.key in self._engine.held:
            self.start()
        elif pull_request.awaited:
            self._kv_server.awaited[pull_request.key] = self
            self._patience = self._source.clock.at(self._source.clock.now() + AWAIT_S, self._give_up)
            sequence = self._engine.computing_sequence(pull_request.key)
            if sequence is not None:
                self.follow(sequence)
        else:
            self._refuse(
                f"{self._source.name} holds no KV for {pull_request.key}: it has been fetched, has expired or is lost"
            )

    def _send_staged(self, storage: StorageNode, read_id: str) -> None:
        """Send the blocks of a read from the store. Its buffer is then free, unless the decode instance needs it."""
        read = storage.complete_read(read_id)
        if read is None:
            self._refuse(f"the node of {self._source.name} has no blocks of read {read_id} in its buffer")
            return
        assert self._pull_request is not None
        self._read_id = "" if self._pull_request.keep else read_id
        self._send_bytes(read.kv_bytes)

    def _give_up(self) -> None:
        self._patience = None
        assert self._pull_request is not None
        self._kv_server.awaited.pop(self._pull_request.key, None)
        self._refuse(f"the KV of {self._pull_request.key} was not available within {AWAIT_S:g} s")

    def follow(self, sequence: EngineSequence) -> None:
        """Send KV that is being computed: bytes leave from the end of the first layer on, as in the simulator."""
        self._be_patient()
        layers = sum(group.count for group in self._engine.model.layers)
        if (
            self._pull_request is not None
            and self._pull_request.early
            and layers > 1
            and sequence.ends_s > sequence.begins_s
        ):
            first_s = sequence.begins_s + (sequence.ends_s - sequence.begins_s) / layers
            self._first_layer = self._source.clock.at(first_s, partial(self._stream, sequence, (layers - 1) / layers))

    def _stream(self, sequence: EngineSequence, share: float) -> None:
        """Send at the rate at which all layers but the last have left when the last one is computed."""
        self._first_layer = None
        left_s = sequence.ends_s - self._source.clock.now()
        if left_s > 0.0:
            self._send(sequence, share / left_s)

    def complete(self) -> None:
        """Send the KV, or the rest of it, at full speed, because all of it is computed."""
        assert self._pull_request is not None
        if self._ended:
            self._engine.release(self._pull_request.key)
        elif self._transfer is None:
            self.start()
        else:
            self._engine.fetching(self._pull_request.key)
            self._source.fabric.release(self._transfer)

    def lose(self, why: str) -> None:
        """Stop: the KV will not be complete."""
        self._be_patient()
        if self._transfer is not None:
            self.abort()
        elif not self._ended:
            self._refuse(why)

    def start(self) -> None:
        """Start sending held KV."""
        assert self._pull_request is not None
        self._be_patient()
        if self._send(self._engine.held[self._pull_request.key].job):
            self._engine.fetching(self._pull_request.key)

    def _be_patient(self) -> None:
        for alarm in (self._patience, self._first_layer):
            if alarm is not None:
                alarm.cancel()
        self._patience = self._first_layer = None

    def _send(self, sequence: EngineSequence, pace_per_s: float = math.inf) -> bool:
        """Start sending, at most `pace_per_s` times the whole KV per second. Return False if no path exists."""
        pull_request = self._pull_request
        assert pull_request is not None
        kv_bytes = float(
            self._engine.model.kv_bytes(sequence.input_tokens, min(pull_request.cached_tokens, sequence.input_tokens))
        )
        return self._send_bytes(kv_bytes, sequence.traced, kv_bytes * pace_per_s if kv_bytes else math.inf)

    def _send_bytes(self, kv_bytes: float, traced: int | None = None, produced_bytes_per_s: float = math.inf) -> bool:
        pull_request, kv_source = self._pull_request, self._source
        assert pull_request is not None
        self._breaks, self._kv_bytes = kv_source.faulty(), kv_bytes
        try:
            ends = kv_source.cluster.index(kv_source.name), kv_source.cluster.index(pull_request.target)
            self._transfer = kv_source.fabric.send(
                *ends, kv_bytes, self, traced, produced_bytes_per_s=produced_bytes_per_s
            )
        except InputError as error:
            self._refuse(str(error))
            return False
        self._counted_s = kv_source.clock.now()
        self._write(PullHeader(source=kv_source.name, wire_bytes=self._transfer.wire_bytes, kv_bytes=kv_bytes))
        return True

    def link(self, now: float) -> TargetConnections | None:
        """Return the state of the transfer, and count the bytes sent. `now` is the time of the fabric's last `sync`.

        Returns:
            None if there is no transfer, or if the computation and not the network limits it.
        """
        if self._transfer is None:
            return None
        sent_bytes, rate = self._source.fabric.progress(self._transfer)
        self._count(sent_bytes, now)
        if not self._transfer.flows or rate >= _WHOLE * self._transfer.produced_bytes_per_s:
            return None
        return TargetConnections(1, self._transfer.latency_s, min(self._kv_bytes - sent_bytes, SEND_BUFFER_BYTES), rate)

    def _count(self, sent_bytes: float, now: float) -> None:
        self._engine.counters.sends(self.target, sent_bytes - self._counted_bytes, now - self._counted_s)
        self._counted_bytes, self._counted_s = sent_bytes, now

    def carry(self, wire_bytes: int, last: bool) -> None:
        """See `Carrier`."""
        assert self._transport is not None
        assert self._pull_request is not None
        if self._breaks:
            self.abort()
            return
        for start in range(0, wire_bytes, len(ZEROS)):
            self._transport.write(memoryview(ZEROS)[: min(wire_bytes - start, len(ZEROS))])
        if last:
            self._transfer, self._ended = None, True
            self._count(self._kv_bytes, self._source.clock.now())
            self._engine.release(self._pull_request.key)
            if self._read_id and self._source.storage is not None:
                self._source.storage.release(self._read_id)
            self._transport.close()

    def _write(self, header: PullHeader) -> None:
        assert self._transport is not None
        self._transport.write(msgspec.json.encode(header) + b"\n")

    def _refuse(self, why: str) -> None:
        self._write(PullHeader(source=self._source.name, error=why))
        assert self._transport is not None
        self._transport.close()

    def _answer_query(self) -> None:
        """Respond to `GET /query` of Mooncake's bootstrap protocol: data-parallel rank to engine."""
        assert self._transport is not None
        found = self._line.startswith(b"GET /query")
        body = msgspec.json.encode({"0": {"engine_id": self._source.engine_id}}) if found else b"{}"
        status = b"200 OK" if found else b"404 Not Found"
        head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
        self._transport.write(head % (status, len(body)) + body)
        self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Clean up. KV that has not been sent completely stays held, because another target may request it."""
        self._kv_server.deliveries.discard(self)
        self._kv_server.arrivals.end(self)
        self._be_patient()
        pull_request = self._pull_request
        if pull_request is None:
            return
        if self._kv_server.awaited.get(pull_request.key) is self and not self._ended:
            del self._kv_server.awaited[pull_request.key]
        if self._transfer is not None:
            self._source.fabric.cancel(self._transfer)
            if pull_request.key in self._engine.held:
                self._engine.keep(pull_request.key)
