"""KV events of engines over ZMQ: subscribes, requests missed batches, and emits events for `Control`.

`kv_stream` detects missing batches; `engine_blocks` interprets their content.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import zmq

from kvroute.serve.observe.logs import log_event
from kvroute.serve.telemetry.engine_blocks import BlockCounts
from kvroute.serve.telemetry.kv_batch import BATCH_BYTES_MAX
from kvroute.serve.telemetry.kv_stream import KvStream, StreamCounts
from kvroute.types import Endpoint, Event, InputError, InputErrors

_MESSAGE_BYTES_MAX = 2 * BATCH_BYTES_MAX
"""ZMQ closes the connection of an engine that sends a larger message; a message that is slightly too large is rejected
with a log line."""
_TURN_S = 0.002
"""Time spent reading one socket before other callbacks run: a replay may bring thousands of messages."""
_HEARTBEAT_MS, _SILENCE_MS = 5_000, 15_000
"""Half-open connections are detected and reconnected; without heartbeats TCP would wait without limit."""
_RECONNECT_MS, _RECONNECT_MAX_MS = 100, 5_000
_MORE_SOCKETS = 16_384
"""Spare sockets for instances that are added later: ZMQ's limit cannot change once the context is in use."""
_SEQUENCE_BYTES = 8
_END = b"\xff" * _SEQUENCE_BYTES


class _Link:
    """One engine's sockets. ZMQ's descriptors are edge-triggered: a reader drains its socket or schedules itself
    again."""

    def __init__(self, owner: KvEvents, name: str, events_url: str, replay_url: str) -> None:
        self.stream = KvStream(name, owner.block_tokens, replays=bool(replay_url))
        self._owner = owner
        self._replay_url = replay_url
        self._replay: zmq.Socket[bytes] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._next: asyncio.Handle | None = None
        """Set while a large batch is applied in slices; no socket is read meanwhile."""
        self._round = 0
        self._warned: set[str] = set()
        self._rank: int | None = None
        """The rank that was reported to the owner's `on_rank`."""
        self._told = (0, 0)
        """Batches and gaps that were reported to the owner's `count`."""
        self._loop = asyncio.get_running_loop()
        self._live = owner.open(zmq.SUB, events_url, name)
        self._live.subscribe(b"")
        self._watch(self._live, self._read_live)

    def _watch(self, socket: zmq.Socket[bytes], read: Callable[[], None]) -> None:
        self._loop.add_reader(socket.FD, read)
        self._loop.call_soon(read)  # messages that arrived before the reader was added

    def close(self) -> None:
        """Close all sockets and cancel all timers."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
        self.stream.close()
        self._end_replay()
        if not self._live.closed:
            self._loop.remove_reader(self._live.FD)
            self._live.close(linger=0)

    def restart(self, started_s: float | None) -> None:
        """See `KvEvents.restarted`."""
        if started_s is None or not self.stream.follows(started_s):
            self.stream.restart()
            self._tell(self.stream.more(self._owner.now()))

    def _read_live(self) -> None:
        until = self._loop.time() + _TURN_S
        while self._loop.time() < until:
            if self._next is not None:
                return
            frames = _receive(self._live)
            if frames is None:
                return
            if len(frames) >= 2 and len(frames[-2]) == _SEQUENCE_BYTES:
                sequence = int.from_bytes(frames[-2], "big")
                self._tell(self.stream.received(self._owner.now(), sequence, frames[-1]))
        self._loop.call_soon(self._read_live)

    def _read_replay(self) -> None:
        until = self._loop.time() + _TURN_S
        while self._loop.time() < until:
            if self._next is not None:
                return
            frames = None if self._replay is None else _receive(self._replay)
            if frames is None:
                return
            if len(frames) < 2 or len(frames[-2]) != _SEQUENCE_BYTES:
                continue
            if frames[-2] == _END:
                self._replay_ended()
            else:
                self._set_timer()
                sequence = int.from_bytes(frames[-2], "big")
                self._tell(self.stream.replayed(self._owner.now(), sequence, frames[-1]))
        self._loop.call_soon(self._read_replay)

    def _replay_ended(self) -> None:
        self._end_replay()
        self._tell(self.stream.replay_ended(self._owner.now()))

    def _tell(self, events: list[Event]) -> None:
        for event in events:
            self._owner.emit(event)
        self._count()
        if self.stream.rank != self._rank and self.stream.rank is not None:
            self._rank = self.stream.rank
            self._owner.on_rank(self.stream.blocks.instance, self._rank)
        if self.stream.blocks.counts.unusable:
            ours = self._owner.block_tokens
            reason = f"the engine's block size is not a multiple of gateway.prompt.block_tokens ({ours})"
            self._warn("kv_events_ignored", reason)
        if self.stream.counts.broken:
            self._warn("kv_events_refused", f"{self.stream.why_broken}; the cached blocks of this engine are dropped")
        if self.stream.counts.unreadable:
            reason = f"an event of the engine has a form that the gateway does not know ({self.stream.why_unreadable})"
            self._warn("kv_event_unreadable", f"{reason}; its blocks are not used for routing")
        if self.stream.wanted is None:
            self._end_replay()
        elif self.stream.rounds != self._round:
            self._end_replay()
            self._round = self.stream.rounds
            self._begin_replay(self.stream.wanted)
        if self.stream.pending and self._next is None:
            if self._timer is not None:  # the engine is not silent: its messages are still queued here
                self._timer.cancel()
                self._timer = None
            self._next = self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """Apply the next slice of the received batches."""
        self._next = None
        self._tell(self.stream.more(self._owner.now()))
        if self._next is None:
            if self._replay is not None:
                self._set_timer()
                self._read_replay()
            self._read_live()

    def _warn(self, event: str, reason: str) -> None:
        """Log a warning once per event name."""
        if event not in self._warned:
            self._warned.add(event)
            log_event("warning", event, instance=self.stream.blocks.instance, reason=reason)

    def _count(self) -> None:
        counts, (batches, gaps) = self.stream.counts, self._told
        if counts.batches != batches or counts.gaps != gaps:
            self._told = counts.batches, counts.gaps
            self._owner.count(self.stream.blocks.instance, counts.batches - batches, counts.gaps - gaps)

    def _begin_replay(self, first: int) -> None:
        self._replay = self._owner.open(zmq.DEALER, self._replay_url, self.stream.blocks.instance)
        self._replay.send_multipart([b"", first.to_bytes(_SEQUENCE_BYTES, "big")])
        self._set_timer()
        self._watch(self._replay, self._read_replay)

    def _end_replay(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._replay is not None:
            self._loop.remove_reader(self._replay.FD)
            self._replay.close(linger=0)
            self._replay = None

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(self._owner.replay_s, self._replay_ended)


class KvEvents:
    """Subscriptions to all engines that publish KV events, on the running loop; two file descriptors for each.

    ZMQ's own descriptors wake the loop, so idle engines cost no loop time. Each engine has its own socket, because a
    message does not name its sender.
    """

    def __init__(
        self,
        endpoints: Mapping[str, Endpoint],
        block_tokens: int,
        emit: Callable[[Event], None],
        now: Callable[[], float],
        *,
        replay_s: float = 5.0,
        count: Callable[[str, int, int], None] = lambda instance, batches, gaps: None,
        on_rank: Callable[[str, int], None] = lambda instance, rank: None,
    ) -> None:
        """
        Args:
            endpoints: by instance; those without `kv_events` are left out.
            block_tokens: tokens per block in the gateway.
            emit: receives events for `Control`, in each engine's order.
            now: clock of these events, in seconds.
            replay_s: silence after which a replay counts as complete.
            count: receives (instance, batches, gaps) since its previous call.
            on_rank: receives (instance, data-parallel rank of the publisher in the whole engine) when that is known.
        """
        self.block_tokens = block_tokens
        self.emit = emit
        self.now = now
        self.replay_s = replay_s
        self.count, self.on_rank = count, on_rank
        self._endpoints = {name: endpoint for name, endpoint in endpoints.items() if endpoint.kv_events}
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._links: dict[str, _Link] = {}

    def start(self) -> None:
        """Connect, from within the loop. Connections to engines that do not listen yet are retried until `close`.

        Raises:
            InputError: an endpoint that ZMQ cannot connect to.
        """
        assert self._context is None
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 2 * len(self._endpoints) + _MORE_SOCKETS)
        try:
            for name, endpoint in self._endpoints.items():
                self._links[name] = _Link(self, name, endpoint.kv_events, endpoint.kv_replay)
        except BaseException:
            self.close()
            raise

    def change(self, endpoints: Mapping[str, Endpoint]) -> None:
        """Follow these endpoints from now on; unchanged ones continue without interruption.

        Raises:
            InputError: an endpoint that ZMQ cannot connect to; the others are followed.
        """
        wanted = {name: endpoint for name, endpoint in endpoints.items() if endpoint.kv_events}
        for name in [name for name in self._links if wanted.get(name) != self._endpoints[name]]:
            self._links.pop(name).close()
        self._endpoints = wanted
        problems = []
        for name, endpoint in wanted.items():
            if name not in self._links:
                try:
                    self._links[name] = _Link(self, name, endpoint.kv_events, endpoint.kv_replay)
                except InputError as error:
                    problems.append(error)
        if problems:
            raise InputErrors(problems)

    def add(self, name: str, endpoint: Endpoint) -> None:
        """Follow another engine, if it publishes KV events.

        Raises:
            InputError: ZMQ cannot connect to its endpoint.
        """
        if endpoint.kv_events and self._context is not None:
            self._links[name] = _Link(self, name, endpoint.kv_events, endpoint.kv_replay)
            self._endpoints[name] = endpoint

    def remove(self, name: str) -> None:
        """Follow an engine no more. Does nothing for one that is not followed."""
        self._endpoints.pop(name, None)
        link = self._links.pop(name, None)
        if link is not None:
            link.close()

    def open(self, kind: int, url: str, instance: str) -> zmq.Socket[bytes]:
        """Return a connected socket."""
        assert self._context is not None
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.RCVHWM, 100_000)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, "[" in url)
        socket.setsockopt(zmq.MAXMSGSIZE, _MESSAGE_BYTES_MAX)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        try:
            socket.connect(url)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            hint = "write tcp://host:port"
            raise InputError(f"cannot connect to {url!r} ({error})", where=f"instance {instance}", hint=hint) from None
        return socket

    def restarted(self, instance: str, started_s: float | None = None) -> bool:
        """Report that another source found this engine to be a new process; sequence numbers do not always show it.

        Args:
            instance: name of the instance.
            started_s: start of the process in seconds since 1970; nothing happens if its batches have already arrived.

        Returns:
            whether this object follows its KV events; if not, the caller must report that its cache is empty.
        """
        link = self._links.get(instance)
        if link is not None:
            link.restart(started_s)
        return link is not None

    def counts(self) -> dict[str, tuple[StreamCounts, BlockCounts]]:
        """Return the counts of each stream and of its blocks, by instance."""
        return {name: (link.stream.counts, link.stream.blocks.counts) for name, link in self._links.items()}

    def close(self) -> None:
        """Disconnect; nothing is emitted afterwards."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None


def _receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    """Return the next message, or None if there is none."""
    if socket.closed:
        return None
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
