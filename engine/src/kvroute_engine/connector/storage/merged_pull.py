"""Pulls of a prompt from two sources: the buffer server of the own node has some of its blocks, which it read from a
store for the prefill, and the prefill instance has all of them. No vllm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvroute_engine.connector.storage.loads import KeptBlocks
from kvroute_engine.connector.transfer.client import Result, TransferClient
from kvroute_engine.connector.transfer.pool import PeerServer
from kvroute_engine.connector.transfer.transfer_lanes import BlockTransfer


@dataclass(slots=True)
class _Merged:
    """One such pull."""

    whole: BlockTransfer
    """All blocks, from the prefill instance."""
    kept_id: str
    """Name of the read in the buffer server."""
    buffer: PeerServer
    running: set[str]
    """Names of the transfers in progress."""
    failed: set[int]
    """Local blocks that have not arrived."""


class MergedPulls:
    """Pulls in progress that have two sources. Blocks that the buffer server does not deliver are fetched from the
    prefill instance; both may free the blocks when the pull is over."""

    def __init__(self, client: TransferClient, ended: Callable[[str, set[int]], None]) -> None:
        """Args: `ended` is called with the name of a pull that is over and the local blocks that have not arrived."""
        self._client, self._ended = client, ended
        self._pulls: dict[str, _Merged] = {}
        """By the name of each transfer in progress."""

    def start(self, whole: BlockTransfer, kept: KeptBlocks, buffer: PeerServer) -> None:
        """Start a pull. Args: `whole`: all blocks, from the prefill instance."""
        parts = split(whole, kept, buffer)
        merged = _Merged(whole, kept.id, buffer, {part.request_id for part in parts}, set())
        for part in parts:
            self._pulls[part.request_id] = merged
        for part in parts:
            self._client.start(part)

    def result(self, result: Result) -> bool:
        """Handle the result of a transfer. Return False if it does not belong to such a pull."""
        transfer = result.transfer
        merged = self._pulls.pop(transfer.request_id, None)
        if merged is None:
            return False
        merged.running.remove(transfer.request_id)
        if result.failure and transfer.peer == merged.buffer:
            first = merged.whole.first + merged.whole.blocks.index(transfer.blocks[0])
            again = _part(merged.whole, "again", transfer.blocks, first)
            merged.running.add(again.request_id)
            self._pulls[again.request_id] = merged
            self._client.start(again)
        elif result.failure:
            merged.failed.update(transfer.blocks)
        if not merged.running:
            self._client.release(merged.whole.peer, merged.whole.remote_request_id)
            self._client.release(merged.buffer, merged.kept_id)
            self._ended(merged.whole.request_id, merged.failed)
        return True


def split(whole: BlockTransfer, kept: KeptBlocks, buffer: PeerServer) -> list[BlockTransfer]:
    """Divide a pull among its two sources.

    Args:
        whole: all blocks, from the prefill instance.
        kept: blocks of the prompt in the buffer server.
        buffer: the buffer server.

    Returns:
        Transfers that together fetch every block once and release nothing.
    """
    first, last = whole.first, whole.first + len(whole.blocks)
    start = min(max(kept.first_block, first), last)
    stop = max(min(kept.first_block + kept.blocks, last), start)
    parts = [
        _part(whole, name, whole.blocks[begin - first : end - first], begin)
        for name, begin, end in (("before", first, start), ("after", stop, last))
        if begin < end
    ]
    if start < stop:
        own = _part(whole, "kept", whole.blocks[start - first : stop - first], start - kept.first_block)
        own = replace(own, peer=buffer, remote_request_id=kept.id, prompt=kept.key, connections=0)
        parts.insert(0, own)
    return parts


def _part(whole: BlockTransfer, name: str, blocks: tuple[int, ...], first: int) -> BlockTransfer:
    return replace(whole, request_id=f"{whole.request_id} {name}", blocks=blocks, first=first, release=False)
