"""The decode instance's side: pulls a request's blocks over several connections into its own KV cache.

Every transfer ends in exactly one `Result`, good or bad; the producer is told that it may free the blocks either way.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from kvroute.connector.blocks import Layout, Region, shares
from kvroute.connector.options import KV_CLASS, Options
from kvroute.connector.wire import (
    VERSION,
    Challenge,
    Channel,
    Fetch,
    Hello,
    Layer,
    Release,
    Released,
    Welcome,
    WireError,
    crc32,
    fresh_nonce,
    proof,
    proven,
    tune,
)

log = logging.getLogger(__name__)
A = TypeVar("A", Layer, Released)
SHARE_BYTES_MIN = 256 << 10
"""A connection more is not worth its round trips for fewer bytes than this."""
TRANSFERS_AT_ONCE = 4
"""Transfers that do not wait for each other's connections."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A prefill instance's server and how its packets are marked."""

    host: str
    port: int
    instance: str = ""
    traffic_class: str = KV_CLASS

    @property
    def source(self) -> str:
        """Its name in metrics."""
        return self.instance or f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Transfer:
    """Blocks from position `first` of a request on `peer`, and the blocks here that they land in, in order."""

    request_id: str
    """The request's name here."""
    peer: Peer
    remote_request_id: str
    first: int
    blocks: tuple[int, ...]
    checksum: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """How a transfer ended; `failure` is empty, or one word as in `WireError.code`."""

    transfer: Transfer
    nbytes: int
    seconds: float
    failure: str = ""


@dataclass(slots=True)
class _Progress:
    transfer: Transfer
    began: float
    shares_left: int
    nbytes: int = 0
    failure: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)


class Client:
    """Starts transfers and hands back their results; `close` ends all of them."""

    def __init__(
        self,
        regions: Sequence[Region],
        layout: Layout,
        options: Options,
        *,
        clock: Callable[[], float] = time.monotonic,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._regions, self._layout, self._options, self._clock = regions, layout, options, clock
        self._token = options.secret() if environ is None else options.secret(environ)
        self._idle: dict[Peer, list[Channel]] = {}
        self._open: set[Channel] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(options.connections * TRANSFERS_AT_ONCE, thread_name_prefix="kv-pull")

    def start(self, transfer: Transfer) -> None:
        """Begin; the outcome will be among `results`."""
        nbytes = len(transfer.blocks) * sum(region.block_bytes for region in self._regions)
        parts = shares(len(transfer.blocks), max(1, min(self._options.connections, nbytes // SHARE_BYTES_MIN)))
        assert parts, "a transfer of no blocks is a release"
        progress = _Progress(transfer, self._clock(), len(parts))
        for first, count in parts:
            self._threads.submit(self._run, progress, first, count)

    def release(self, peer: Peer, remote_request_id: str) -> None:
        """Tell `peer` that nobody will fetch the request; if it does not hear, its blocks expire."""
        self._threads.submit(self._release, peer, remote_request_id)

    def results(self) -> list[Result]:
        """Transfers that have ended since the last call."""
        ended = []
        while not self._results.empty():
            ended.append(self._results.get())
        return ended

    def wait(self, timeout_s: float) -> Result | None:
        """The next transfer to end, if one does in time."""
        try:
            return self._results.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Break what is under way (it fails with `reset`) and wait for all threads."""
        with self._lock:
            self._closed = True
            channels = list(self._open)
        for channel in channels:
            channel.close()
        self._threads.shutdown(wait=True)

    def _run(self, progress: _Progress, first: int, count: int) -> None:
        nbytes, failure = 0, ""
        try:
            nbytes = self._fetch_share(progress.transfer, first, count)
        except OSError as error:
            failure = _word(error)
            log.warning(
                "KV transfer of %s from %s failed: %s",
                progress.transfer.request_id,
                progress.transfer.peer.source,
                error,
            )
        except Exception:
            # Our own bug: the request must still end, or vLLM would wait for it for ever.
            log.exception("KV transfer of %s", progress.transfer.request_id)
            failure = "bug"
        with progress.lock:
            progress.shares_left -= 1
            progress.nbytes += nbytes
            progress.failure = progress.failure or failure
            ended = not progress.shares_left
        if ended:
            self._end(progress)

    def _end(self, progress: _Progress) -> None:
        seconds = self._clock() - progress.began
        self._results.put(Result(progress.transfer, progress.nbytes, seconds, progress.failure))
        self._release(progress.transfer.peer, progress.transfer.remote_request_id)

    def _fetch_share(self, transfer: Transfer, first: int, count: int) -> int:
        blocks = transfer.blocks[first : first + count]
        fetch = Fetch(
            request_id=transfer.remote_request_id,
            first=transfer.first + first,
            count=count,
            checksum=transfer.checksum,
        )
        channel, layer = self._ask(transfer.peer, fetch, Layer)
        try:
            nbytes = 0
            for index, region in enumerate(self._regions):
                layer = channel.expect(Layer) if index else layer
                nbytes += _land(channel, layer, index, region, blocks)
        except BaseException:
            self._drop(channel)
            raise
        self._keep(transfer.peer, channel)
        return nbytes

    def _release(self, peer: Peer, remote_request_id: str) -> None:
        try:
            channel, _ = self._ask(peer, Release(remote_request_id), Released)
        except OSError as error:
            log.info("%s was not told that %s may be freed: %s", peer.source, remote_request_id, error)
        else:
            self._keep(peer, channel)

    def _ask(self, peer: Peer, message: Fetch | Release, answer: type[A]) -> tuple[Channel, A]:
        """Send on a kept connection or, where that has died meanwhile, on a new one; the answer's head."""
        while (channel := self._kept(peer)) is not None:
            try:
                channel.send(message)
                return channel, channel.expect(answer)
            except OSError as error:
                self._drop(channel)
                if not _died_idle(error):
                    raise
        channel = self._connect(peer)
        try:
            channel.send(message)
            return channel, channel.expect(answer)
        except BaseException:
            self._drop(channel)
            raise

    def _connect(self, peer: Peer) -> Channel:
        sock = socket.create_connection((peer.host, peer.port), self._options.timeout_s)
        channel = Channel(sock, self._options.timeout_s)
        with self._lock:
            if self._closed:
                channel.close()
                raise WireError("reset", "closed")
            self._open.add(channel)
        try:
            tune(sock, self._options.dscp.get(peer.traffic_class, 0))
            self._greet(channel, peer)
        except BaseException:
            self._drop(channel)
            raise
        return channel

    def _greet(self, channel: Channel, peer: Peer) -> None:
        challenge = channel.expect(Challenge)
        if challenge.version != VERSION:
            raise WireError("version", f"this side speaks version {VERSION}, {peer.source} {challenge.version}")
        nonce = fresh_nonce()
        hello = Hello(
            version=VERSION,
            nonce=nonce,
            proof=proof(self._token, "client", challenge.nonce, nonce),
            layout=self._layout,
            traffic_class=peer.traffic_class,
            instance=self._options.instance,
        )
        channel.send(hello)
        welcome = channel.expect(Welcome)
        if not proven(welcome.proof, proof(self._token, "server", challenge.nonce, nonce)):
            raise WireError("token", f"{peer.source} has another token")

    def _kept(self, peer: Peer) -> Channel | None:
        with self._lock:
            idle = self._idle.get(peer)
            return idle.pop() if idle else None

    def _keep(self, peer: Peer, channel: Channel) -> None:
        with self._lock:
            idle = self._idle.setdefault(peer, [])
            if not self._closed and len(idle) < self._options.connections * TRANSFERS_AT_ONCE:
                idle.append(channel)
                return
        self._drop(channel)

    def _drop(self, channel: Channel) -> None:
        channel.close()
        with self._lock:
            self._open.discard(channel)


def _land(channel: Channel, layer: Layer, index: int, region: Region, blocks: Sequence[int]) -> int:
    expected = len(blocks) * region.block_bytes
    if layer.region != index or layer.nbytes != expected:
        raise WireError("malformed", f"layer {layer.region} of {layer.nbytes} bytes; expected {index} of {expected}")
    views = region.landing(blocks)
    channel.receive_into(views)
    if layer.crc32 is not None and crc32(views) != layer.crc32:
        raise WireError("checksum", f"layer {index} was damaged on its way")
    region.landed(blocks, views)
    return expected


def _died_idle(error: OSError) -> bool:
    """Whether a kept connection failed because its peer had restarted, not because it refuses or hangs."""
    return error.code == "reset" if isinstance(error, WireError) else isinstance(error, ConnectionError)


def _word(error: OSError) -> str:
    match error:
        case WireError():
            return error.code
        case ConnectionRefusedError():
            return "refused"
        case TimeoutError():
            return "timeout"
        case ConnectionError():
            return "reset"
        case _:
            return "unreachable"
