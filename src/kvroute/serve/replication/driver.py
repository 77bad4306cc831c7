"""Runs one gateway's side of the shared stream: writes reports, reads those of others, connects again."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from kvroute.control import Admissions, ChargedUsage, Control, Replica
from kvroute.serve.observe.logs import log_event
from kvroute.serve.observe.metrics.metrics import Metrics
from kvroute.serve.observe.view import ReplicationLoad
from kvroute.serve.replication.stream import ENTRY_MAX_BYTES, StreamError
from kvroute.types import Event, InputError, PeerEvent, PeerReport

_RETRY_S, _RETRY_MAX_S = 0.1, 2.0
"""Pause before the first and the last attempts to connect again."""
_IN_FLIGHT_MAX = 4_096
"""Number of own entries whose return is awaited to measure the lag."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(PeerReport).decode


class SharedStream(Protocol):
    """One ordered stream of all gateways. Every method raises StreamError if the stream cannot be used."""

    async def open(self) -> str:
        """Connect. Return the place after the last entry, from which reading begins."""

    async def append(self, entry: bytes) -> None:
        """Append an entry."""

    async def read(self, after: str) -> list[tuple[str, bytes]]:
        """Wait for entries after this place; return some of them with their places, or none after a while."""

    async def close(self) -> None:
        """Disconnect."""


class Cores(Protocol):
    """The cores of this gateway."""

    def cores(self) -> Sequence[Control]:
        """Return the cores that have requests, the current one first."""

    def notify(self, event: Event) -> None:
        """Pass an event to the current core and to its event log."""

    def approximate(self) -> frozenset[str]:
        """Return the instances whose cached prefixes are known from requests alone."""


class Replication:
    """The connection of this process to the other gateways. Nothing here delays a request."""

    def __init__(
        self,
        stream: Callable[[], SharedStream],
        cores: Cores,
        metrics: Metrics,
        now: Callable[[], float],
        *,
        lease_s: float,
        flush_s: float,
        admissions: Admissions | None = None,
        usage: ChargedUsage | None = None,
    ) -> None:
        """
        Args:
            stream: returns a new connection to the stream; raises StreamError if there can be none.
            cores: the cores of this gateway.
            metrics: counts entries.
            now: the gateway's clock, in seconds.
            lease_s: time without a report after which the others release the bookings of this gateway.
            flush_s: time for which changes are collected in one entry.
            admissions: counts for limits that hold over all gateways; None: each has limits of its own.
        """
        self._stream, self._cores, self._metrics, self._now = stream, cores, metrics, now
        self._lease_s, self._flush_s = lease_s, flush_s
        # The random part makes a restart a new gateway; names of hosts are for people.
        name = f"{socket.gethostname()}-{secrets.token_hex(6)}"
        self._replica = Replica(name, lease_s=lease_s, admissions=admissions, usage=usage)
        self._changed = asyncio.Event()
        self._sent: deque[tuple[int, float]] = deque(maxlen=_IN_FLIGHT_MAX)
        """Sequence number and time of own entries that were not read yet."""
        self._position = ""
        """Id of the last entry that was read; empty: none yet."""
        self._problem = ""
        self._task: asyncio.Task[None] | None = None
        self._closed = self._ended = self._works = False
        """Whether `close` was called; whether reading or writing has ended on the present connection; whether it has
        been read from. The first two are flags, because Python before 3.12 loses a cancellation that comes together
        with a result."""

    # Own traffic

    def handled(self, event: Event) -> None:
        """Note that the core has handled an event of own traffic."""
        self._replica.handled(event)
        self._changed.set()

    def learned(self, event: PeerEvent) -> None:
        """Note what own traffic has taught."""
        self._replica.learned(event)
        self._changed.set()

    def counted(self) -> None:
        """Note that own counts for the limits of admission have changed."""
        self._changed.set()

    @property
    def leads(self) -> bool:
        """See `Replica.leads`."""
        return self._replica.leads

    @property
    def load(self) -> ReplicationLoad:
        """The present gauges."""
        replica, peers = self._replica, self._cores.cores()[0].peers.all.values()
        return ReplicationLoad(
            gateway=replica.gateway,
            state=replica.state,
            gateways=len(replica.gateways),
            bookings=sum(len(peer.placed) for peer in peers),
            problem=self._problem,
        )

    # Life

    def start(self, block_tokens: int) -> None:
        """Begin to connect. Args: `block_tokens`: size of the blocks of prefixes."""
        self._replica.block_tokens, self._replica.approximate = block_tokens, self._cores.approximate()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def refresh(self) -> None:
        """Release the bookings of gateways whose leases have expired; to be called some times per second."""
        self._replica.approximate = self._cores.approximate()
        for event in self._replica.refresh(self._now()):
            self._cores.notify(event)
            self._metrics.replication.peer_lost()
            log_event("warning", "gateway_lost", gateway=event.gateway)

    async def close(self) -> None:
        """Disconnect. The others release the bookings after the lease, as those of a gateway that died."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        pause_s = _RETRY_S
        while not self._closed:
            self._works = False
            try:
                stream = self._stream()
                try:
                    await self._connected(stream)
                finally:
                    self._replica.disconnected()
                    await stream.close()
            except StreamError as error:
                self._failed(str(error))
            except Exception as error:  # an error of the gateway must not end replication for good
                self._failed(f"{type(error).__name__}: {error}")
            if self._works:
                pause_s = _RETRY_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _RETRY_MAX_S)

    def _failed(self, why: str) -> None:
        if not self._problem:
            log_event("error", "replication_lost", reason=why)
        self._problem = why

    async def _connected(self, stream: SharedStream) -> None:
        """Read and write until one of them fails."""
        end = await stream.open()
        self._position, self._ended = self._position or end, False
        self._replica.connected(self._now())
        self._changed.set()
        try:
            async with asyncio.TaskGroup() as tasks:
                for part in (self._read(stream), self._write(stream)):
                    tasks.create_task(part).add_done_callback(self._part_ended)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    def _part_ended(self, part: asyncio.Task[None]) -> None:
        self._ended = True

    async def _write(self, stream: SharedStream) -> None:
        beat_s = self._lease_s / 4
        while not (self._ended or self._closed):
            try:
                async with asyncio.timeout(beat_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
            await asyncio.sleep(self._flush_s)
            self._changed.clear()
            report = self._replica.take(self._now(), self._cores.cores())
            if report is not None:
                entry = _encode(report)
                self._sent.append((report.sequence, self._now()))
                await stream.append(entry)
                self._metrics.replication.replicated("written", len(entry))
                if report.knowledge and not report.knowledge_ends:
                    self._changed.set()

    async def _read(self, stream: SharedStream) -> None:
        flush_s = self._flush_s / 2
        while not (self._ended or self._closed):
            entries = await stream.read(self._position)
            self._works = True
            if self._problem:
                log_event("info", "replication_restored")
                self._problem = ""
            for number, entry in entries:
                self._position = number
                self._received(entry)
            await asyncio.sleep(flush_s)  # entries that come together cost one command

    def _received(self, entry: bytes) -> None:
        now, replica = self._now(), self._replica
        try:
            if len(entry) > ENTRY_MAX_BYTES:
                raise InputError(f"an entry of {len(entry)} bytes is larger than {ENTRY_MAX_BYTES} bytes")
            report = _decode(entry)
            event = replica.received(now, report)
            self._metrics.replication.replicated("read", len(entry))
            if event is None:
                self._returned(report.sequence, now)
                return
            before = replica.state
            self._cores.notify(event)
        except (msgspec.DecodeError, InputError, RecursionError) as error:
            self._metrics.replication.entry_refused()
            log_event("warning", "replication_entry_refused", reason=str(error))
            return
        replica.applied(now, self._cores.cores()[0], report.gateway)
        if report.asks or (before == "in_sync" and replica.state != "in_sync"):
            self._changed.set()

    def _returned(self, sequence: int, now: float) -> None:
        """Measure the time until an own entry was read, by which others have it too."""
        while self._sent and self._sent[0][0] <= sequence:
            number, sent_at = self._sent.popleft()
            if number == sequence:
                self._metrics.replication.lag(now - sent_at)
