"""Checks of an engine's KV events: whether its ZMQ endpoints respond, and which batches arrive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from kvroute.doctor.clock import Offset, from_timestamp
from kvroute.doctor.report import EventsReport
from kvroute.serve.telemetry.kv_batch import BATCH_BYTES_MAX, BatchError, KvEventBatch, read_batch
from kvroute.types import Endpoint

_SEQUENCE_BYTES = 8
_BEYOND_ALL = (1 << 62).to_bytes(_SEQUENCE_BYTES, "big")
"""A batch number that no engine has reached: a replay from there sends only its end."""
_COMPARED_TOKENS = 16
"""Number of tokens at a prompt's beginning that distinguish it from any other."""


@dataclass(frozen=True, slots=True)
class SentPrompt:
    """A prompt that was sent to an engine, and the time at which it was sent."""

    token_ids: Sequence[int]
    sent_s: float


@dataclass(slots=True, eq=False)
class Subscription:
    """One engine's KV events, from `open` to `close`."""

    context: zmq.asyncio.Context
    endpoint: Endpoint
    report: EventsReport = field(init=False)
    prompts: list[SentPrompt] = field(default_factory=list)
    """Prompts of the examination that this engine has computed."""
    offsets: list[Offset] = field(default_factory=list)
    """Bounds of the engine's clock offset, from batches about one of `prompts`."""
    _sockets: list[zmq.asyncio.Socket] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _subscribed: asyncio.Event = field(default_factory=asyncio.Event)
    _own: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.report = EventsReport(self.endpoint.kv_events, replay=False if self.endpoint.kv_replay else None)

    def open(self) -> None:
        """Start to connect and to read."""
        socket = self.context.socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, "[" in self.endpoint.kv_events)
        socket.setsockopt(zmq.MAXMSGSIZE, 2 * BATCH_BYTES_MAX)
        socket.subscribe(b"")
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._sockets = [monitor, socket]
        try:
            socket.connect(self.endpoint.kv_events)
        except zmq.ZMQError as error:
            self.report.broken = f"ZMQ cannot connect ({error})"
            return
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._watch(monitor)), loop.create_task(self._read(socket))]

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        await recv_monitor_message(monitor)
        self.report.subscribed = True
        self._subscribed.set()

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            received_s = time.time()
            self.report.batches += 1
            if len(frames) < 2 or len(frames[-2]) != _SEQUENCE_BYTES:
                self.report.broken = "a message without a batch number"
                continue
            try:
                self._take(read_batch(frames[-1]), received_s)
            except BatchError as error:
                self.report.broken = str(error)

    def _take(self, batch: KvEventBatch, received_s: float) -> None:
        self.report.broken = batch.why_unreadable or self.report.broken
        for event in batch.events:
            for prompt in self.prompts:
                first = event.token_ids[:_COMPARED_TOKENS]
                if first and first == list(prompt.token_ids[: len(first)]):
                    self.report.own_batches += 1
                    self.offsets.append(from_timestamp(batch.ts, prompt.sent_s, received_s))
                    self._own.set()
                    return

    @property
    def silent(self) -> bool:
        """True if the endpoint responds, but no batch is about one of `prompts`."""
        return self.report.subscribed and bool(self.prompts) and not self.report.own_batches

    async def subscribed(self, wait_s: float) -> None:
        """Wait until the engine's endpoint has responded, for `wait_s` seconds at most."""
        if self._tasks:
            await _within(self._subscribed, wait_s)

    async def own_batch(self, wait_s: float) -> None:
        """Wait for a batch about one of `prompts`, for `wait_s` seconds at most."""
        if self.silent:
            await _within(self._own, wait_s)

    async def check_replay(self, wait_s: float) -> None:
        """Request the end of a replay from the replay endpoint."""
        if not self.endpoint.kv_replay:
            return
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, "[" in self.endpoint.kv_replay)
        try:
            socket.connect(self.endpoint.kv_replay)
            async with asyncio.timeout(wait_s):
                await socket.send_multipart([b"", _BEYOND_ALL])
                self.report.replay = len(await socket.recv_multipart()) >= 2
        except (TimeoutError, zmq.ZMQError):
            self.report.replay = False
        finally:
            socket.close(linger=0)

    async def close(self) -> None:
        """Disconnect."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for socket in self._sockets:
            socket.close(linger=0)


async def _within(event: asyncio.Event, wait_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            await event.wait()
