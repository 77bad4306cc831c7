"""KV events in vLLM's wire format: a ZMQ publisher of numbered batches, and a socket that replays missed ones."""

from __future__ import annotations

import asyncio
import time
from collections import deque

import msgspec
import zmq
import zmq.asyncio

from kvroute.emulator.prompt import EmulatedPrompt
from kvroute.prefix import Evicted
from kvroute.types import cannot_listen

END = (-1).to_bytes(8, "big", signed=True)
BATCHES_KEPT = 10_000
"""Number of batches kept for replay; vLLM's default."""


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """A chain of stored blocks whose parent is `parent_block_hash`."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str = "GPU"
    lora_name: str | None = None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int = 0
    kv_cache_spec_kind: str = "full_attention"


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """Removed blocks, each with all its descendants."""

    block_hashes: list[int]
    medium: str = "GPU"
    group_idx: int = 0


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """All cached blocks are removed."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared
_ENCODER = msgspec.msgpack.Encoder()


def changes(
    prompt: EmulatedPrompt | None, before: int, now: int, evicted: list[Evicted], block_tokens: int
) -> list[KvEvent]:
    """Return the events of a cache change: blocks `before`..`now` of a prompt are new, `evicted` are removed."""
    events: list[KvEvent] = [BlockRemoved(list(blocks[keep:])) for _, blocks, keep in evicted]
    if prompt is not None and now > before:
        parent = prompt.blocks[before - 1] if before else None
        tokens = prompt.tokens[before * block_tokens : now * block_tokens].tolist()
        keys = _extra_keys(prompt, before, now)
        events.append(
            BlockStored(
                list(prompt.blocks[before:now]),
                parent,
                tokens,
                block_tokens,
                lora_id=1 if prompt.adapter else None,
                lora_name=prompt.adapter or None,
                extra_keys=keys,
            )
        )
    return events


def _extra_keys(prompt: EmulatedPrompt, before: int, now: int) -> list[tuple[str, ...] | None] | None:
    """Return what distinguishes each block besides its tokens, in vLLM's order: the adapter, and at the first block
    the cache salt."""
    if not prompt.salt and not prompt.adapter:
        return None
    adapter = (prompt.adapter,) if prompt.adapter else ()
    salt = (prompt.salt,) if prompt.salt else ()
    return [(adapter + salt if block == 0 else adapter) or None for block in range(before, now)]


class KvPublisher:
    """The PUB and ROUTER sockets of one instance; batches are numbered from 0 since its start."""

    def __init__(self, context: zmq.asyncio.Context, topic: str, endpoint: str, replay: str, *, rank: int = 0) -> None:
        """Bind both sockets, e.g. to `tcp://127.0.0.1:*`. The attributes `endpoint` and `replay` contain the chosen
        ports. Args: `rank` is the data-parallel rank in each batch.

        Raises:
            InputError: an address cannot be bound.
        """
        self._topic, self._rank = topic.encode(), rank
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=BATCHES_KEPT)
        self._next = 0
        self._pub = zmq.Context(context).socket(zmq.PUB)
        self._router = context.socket(zmq.ROUTER)
        for socket, address in ((self._pub, endpoint), (self._router, replay)):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, "[" in address)
            try:
                socket.bind(address)
            except zmq.ZMQError as error:
                # Closing a context waits forever for a socket that is left open.
                self._pub.close()
                self._router.close()
                place = address.removeprefix("tcp://").removesuffix(":*")
                raise cannot_listen(place, error.errno, zmq.strerror(error.errno or 0)) from None
        self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._task = asyncio.get_running_loop().create_task(self._repeat())

    def publish(self, events: list[KvEvent]) -> None:
        """Send one batch unless it is empty. A slow subscriber loses it, as usual with ZMQ."""
        if not events:
            return
        number = self._next.to_bytes(8, "big")
        self._next += 1
        payload = _ENCODER.encode([time.time(), events, self._rank])
        self._kept.append((number, payload))
        self._pub.send_multipart((self._topic, number, payload), zmq.NOBLOCK)

    def restart(self) -> None:
        """Restart the numbering at 0, as a new process does."""
        self._kept.clear()
        self._next = 0

    async def _repeat(self) -> None:
        while True:
            frames = await self._router.recv_multipart()
            if len(frames) != 3:
                continue
            client, _, first = frames
            for number, payload in list(self._kept):
                if number >= first:
                    await self._router.send_multipart((client, b"", self._topic, number, payload))
            await self._router.send_multipart((client, b"", b"", END, b""))

    async def close(self) -> None:
        """Close the sockets."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._pub.close()
        self._router.close()
