"""The prefill instance's side: serves held blocks to whoever knows the token, one thread per connection.

A peer names a request and positions in its prompt, never block numbers: it can read nothing that was not held for a
fetch.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvroute.connector.blocks import Layout, Region
from kvroute.connector.holds import Freed, Holds
from kvroute.connector.options import Options, fault_of
from kvroute.connector.wire import (
    VERSION,
    Challenge,
    Channel,
    Fetch,
    Hello,
    Layer,
    Refused,
    Release,
    Released,
    Welcome,
    WireError,
    crc32,
    fresh_nonce,
    mark,
    proof,
    proven,
    shut,
    tune,
)

log = logging.getLogger(__name__)
CONNECTIONS_MAX = 1024
UNKNOWN_WAIT_S = 5.0
"""A fetch may be faster than the scheduler's own word to its worker; for so long it waits for it, or half of
`timeout_s`: the refusal shall come before the peer has lost its patience."""


class Server:
    """Listens at once; `close` ends every thread and connection that it has started."""

    def __init__(
        self,
        regions: Sequence[Region],
        layout: Layout,
        options: Options,
        *,
        port_offset: int = 0,
        clock: Callable[[], float] = time.monotonic,
        environ: Mapping[str, str] | None = None,
        unknown_wait_s: float | None = None,
    ) -> None:
        self._regions, self._layout, self._options = regions, layout, options
        self._token = options.secret() if environ is None else options.secret(environ)
        self._clock = clock
        patience_s = min(UNKNOWN_WAIT_S, options.timeout_s / 2)
        self._unknown_wait_s = patience_s if unknown_wait_s is None else unknown_wait_s
        self._holds = Holds()
        self._changed = threading.Condition()
        self._connections: dict[Channel, threading.Thread] = {}
        self._closed = False
        self._ending = threading.Event()
        port = options.port + port_offset if options.port else 0
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        self._listener = socket.create_server((options.host, port), family=family, backlog=128)
        self._acceptor = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._acceptor.start()

    @property
    def address(self) -> tuple[str, int]:
        """Where decode instances reach it."""
        return self._options.advertised(), int(self._listener.getsockname()[1])

    @property
    def held(self) -> int:
        """Requests whose blocks are held now."""
        with self._changed:
            return len(self._holds)

    def hold(self, request_id: str, blocks: Sequence[int]) -> None:
        """Keep `blocks` (the prompt's, in order) for fetching until released or expired."""
        with self._changed:
            self._holds.hold(request_id, blocks, self._clock() + self._options.hold_s)
            self._changed.notify_all()

    def freed(self) -> list[Freed]:
        """Requests whose blocks vLLM may use again; each once."""
        with self._changed:
            return self._holds.freed(self._clock())

    def close(self) -> None:
        """Break all connections and wait for their threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            connections = dict(self._connections)
        self._ending.set()
        shut(self._listener)
        self._acceptor.join()
        for channel in connections:
            channel.close()
        for thread in connections.values():
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                sock, peer = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                self._ending.wait(0.05)  # out of descriptors, or the peer went between its knock and our answer
                continue
            channel = Channel(sock, self._options.timeout_s)
            thread = threading.Thread(target=self._serve, args=(channel, peer[0]), name="kv-serve", daemon=True)
            with self._changed:
                if self._closed or len(self._connections) >= CONNECTIONS_MAX:
                    channel.close()
                    continue
                self._connections[channel] = thread
                thread.start()

    def _serve(self, channel: Channel, peer: str) -> None:
        try:
            if self._greet(channel):
                # An idle peer may stay as long as it likes; a dead one is found by TCP's keep-alive.
                while (message := self._next(channel)) is not None:
                    self._answer(channel, message)
        except OSError as error:
            if not self._closed:
                log.warning("KV connection from %s ended: %s", peer, error)
        finally:
            channel.close()
            with self._changed:
                self._connections.pop(channel, None)

    def _next(self, channel: Channel) -> Fetch | Release | None:
        channel.sock.settimeout(None)
        message = channel.receive()
        channel.sock.settimeout(self._options.timeout_s)
        if message is None or isinstance(message, Fetch | Release):
            return message
        raise WireError("malformed", f"{type(message).__name__} instead of Fetch or Release")

    def _greet(self, channel: Channel) -> bool:
        tune(channel.sock, 0)
        nonce = fresh_nonce()
        channel.send(Challenge(VERSION, nonce))
        hello = channel.expect(Hello)
        refusal = self._refusal(hello, nonce)
        if refusal:
            log.warning("refused KV connection of %s: %s", hello.instance or "a peer without a name", refusal.reason)
            channel.send(refusal)
            return False
        mark(channel.sock, self._options.dscp.get(hello.traffic_class, 0))
        channel.send(Welcome(proof(self._token, "server", nonce, hello.nonce)))
        return True

    def _refusal(self, hello: Hello, nonce: bytes) -> Refused | None:
        if hello.version != VERSION:
            return Refused("version", f"this side speaks version {VERSION}, the peer {hello.version}")
        if not proven(hello.proof, proof(self._token, "client", nonce, hello.nonce)):
            return Refused("token", "the peer has another token")
        if hello.layout != self._layout:
            return Refused("layout", f"KV caches differ: {difference(self._layout, hello.layout)}")
        return None

    def _answer(self, channel: Channel, message: Fetch | Release) -> None:
        if isinstance(message, Release):
            with self._changed:
                self._holds.release(message.request_id)
            channel.send(Released(message.request_id))
            return
        found = self._find(message)
        if isinstance(found, Refused):
            channel.send(found)
            return
        try:
            self._send_layers(channel, message, found)
        finally:
            with self._changed:
                self._holds.leave(message.request_id)

    def _find(self, fetch: Fetch) -> tuple[int, ...] | Refused:
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._holds.state(fetch.request_id) != "unknown", self._unknown_wait_s
            )
            state = self._holds.state(fetch.request_id)
            if state == "held":
                found = self._holds.read(fetch.request_id, fetch.first, fetch.count)
                return found or Refused("range", f"request {fetch.request_id} holds fewer blocks than asked for")
        if state == "gone":
            return Refused("gone", f"the blocks of request {fetch.request_id} have expired or were released")
        return Refused("unknown", f"no request {fetch.request_id} is held here")

    def _send_layers(self, channel: Channel, fetch: Fetch, blocks: Sequence[int]) -> None:
        for index, region in enumerate(self._regions):
            views = region.outgoing(blocks)
            checksum = crc32(views) if fetch.checksum else None
            if self._options.fault_file:
                views = self._spoil(index, fetch.first, len(blocks), views)
            channel.send(Layer(region=index, nbytes=len(blocks) * region.block_bytes, crc32=checksum), views)

    def _spoil(self, layer: int, first: int, count: int, views: list[memoryview]) -> list[memoryview]:
        """What the fault file asks for: other bytes than the cache's, or none at all until we are closed."""
        path = Path(self._options.fault_file)
        match fault_of(path.read_text(encoding="utf-8")) if path.exists() else None:
            case ("corrupt", spoilt, block) if spoilt == layer:
                return [memoryview(_damaged(b"".join(views), count, None if block is None else block - first))]
            case ("stall", stalled, _) if stalled == layer:
                while path.exists() and fault_of(path.read_text(encoding="utf-8")) and not self._ending.wait(0.05):
                    pass
        return views


def _damaged(data: bytes, count: int, block: int | None) -> bytes:
    """`data` is `count` blocks, of which block number `block`, or each, is turned into something else."""
    size = len(data) // count
    spoilt = range(count) if block is None else [block] if 0 <= block < count else []
    damaged = bytearray(data)
    for number in spoilt:
        here = slice(number * size, (number + 1) * size)
        damaged[here] = bytes(byte ^ 0x15 for byte in data[here])
    return bytes(damaged)


def difference(ours: Layout, theirs: Layout) -> str:
    """The first field in which two layouts differ, in words."""
    for field in ours.__struct_fields__:
        here, there = getattr(ours, field), getattr(theirs, field)
        if here != there:
            return f"{field} is {here} here and {there} there"
    return "nothing"
