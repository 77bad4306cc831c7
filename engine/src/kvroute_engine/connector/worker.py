"""The connector's half in a vLLM worker: starts the planned transfers and reports which have ended. No vllm."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from kvroute_engine.connector.blocks import BlockLayout, Fence, Region
from kvroute_engine.connector.options import ConnectorSettings
from kvroute_engine.connector.scheduler import ConnectorStep, HeldBlocks, Pull
from kvroute_engine.connector.stats import (
    TransferCounts,
    count_early,
    count_failure,
    count_link,
    count_nixl,
    count_transfer,
    no_counts,
)
from kvroute_engine.connector.storage.loads import KeptBlocks
from kvroute_engine.connector.storage.merged_pull import MergedPulls
from kvroute_engine.connector.transfer.client import Result, TransferClient
from kvroute_engine.connector.transfer.nixl_agent import nixl_agent
from kvroute_engine.connector.transfer.pool import PeerServer, buffer_peer
from kvroute_engine.connector.transfer.remote_memory import NixlAgent, SharedMemory
from kvroute_engine.connector.transfer.server import TransferServer
from kvroute_engine.connector.transfer.transfer_lanes import BlockTransfer
from kvroute_engine.connector.transfer_params import KvTransferParams
from kvroute_engine.errors import InputError

log = logging.getLogger(__name__)
CHECK_S = 0.5
"""Minimum interval between queries of the kernel's connection statistics, in seconds."""


class ConnectorWorker:
    """One tensor-parallel rank of one data-parallel `replica`: a server if a producer, a client if a consumer."""

    def __init__(
        self,
        regions: Sequence[Region],
        layout: BlockLayout,
        options: ConnectorSettings,
        *,
        producer: bool = True,
        consumer: bool = True,
        replica: int = 0,
        layers: Mapping[str, Sequence[int]] = MappingProxyType({}),
        fence: Callable[[], Fence | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        environ: Mapping[str, str] | None = None,
        agent: Callable[[], NixlAgent] = nixl_agent,
    ) -> None:
        """Args:
        layers: by a layer's name, the numbers of the regions that hold its KV.
        fence: makes a fence behind the work that the model has queued on its device.
        agent: makes the NIXL agent, if the options ask for one.

        Raises:
            InputError: the options ask for NIXL, which is not installed.
        """
        self._options, self._layers, self._fence, self._clock = options, layers, fence, clock
        self._rank, self._ranks = layout.rank, layout.tp
        offset = replica * layout.tp + layout.rank
        self._memory = SharedMemory(regions, agent()) if options.data_plane == "nixl" else None
        shared: dict[str, Any] = {"environ": environ, "memory": self._memory}
        self._server = TransferServer(regions, layout, options, port_offset=offset, **shared) if producer else None
        self._client = TransferClient(regions, layout, options, **shared) if consumer else None
        self._merged = MergedPulls(self._client, self._pulled) if self._client else None
        self._failed_blocks: set[int] = set()
        self._received: set[str] = set()
        self._counts = no_counts()
        self._checked_at = clock()

    @property
    def address(self) -> tuple[str, int] | None:
        """Address of this rank's server; None without a server."""
        return self._server.address if self._server else None

    def begin(self, step: ConnectorStep) -> None:
        """Start the holds, pulls and releases of a step. Returns at once."""
        self.offer(step)
        if self._server:
            for name, owner in step.drops:
                self._server.drop(name, owner)
            for name in step.refusals:
                self._server.forget(name)
        if self._client:
            for request_id in step.cancels:
                self._client.cancel(request_id)
            for pull in step.pulls:
                self._pull(pull)
            for transfer_params in step.releases:
                self._client.release(self._peer(transfer_params), transfer_params.remote_request_id)
                if (kept := self._own_blocks(transfer_params)) is not None:
                    self._client.release(buffer_peer(kept.data), kept.id)

    def offer(self, step: ConnectorStep) -> None:
        """Start the holds of a step, which it then no longer has. Called before the model runs: these prompts are
        computed, so a decode instance need not wait for the end of this step."""
        if self._server:
            for held in step.holds:
                self._hold(self._server, held)
            step.holds.clear()

    def overwrites(self, step: ConnectorStep) -> None:
        """Stop reads of the blocks that vLLM has taken back and is about to overwrite. No reader is left on return."""
        if self._server:
            for name in step.withdrawn:
                self._server.withdraw(name)

    def computed(self, step: ConnectorStep, layer: str) -> None:
        """Allow sending the KV of `layer`, which the model has computed or queued."""
        if self._server and step.computing:
            passed = self._fence()
            for request in step.computing:
                self._server.computed(request, self._layers.get(layer, ()), passed)

    def ended(self) -> tuple[set[str], set[str]]:
        """Return the requests whose blocks may be freed, and the requests whose pull has ended, successful or not."""
        sent = set()
        for freed in self._server.freed() if self._server else ():
            sent.add(freed.request_id)
            if freed.expired:
                self._counts["expired"] += 1
                log.warning(
                    "the KV of %s expired: no instance fetched it within %g s", freed.request_id, self._options.hold_s
                )
        for result in self._client.results() if self._client else ():
            self._count(result)
            if self._merged is None or not self._merged.result(result):
                self._pulled(result.transfer.request_id, set(result.transfer.blocks) if result.failure else set())
        received, self._received = self._received, set()
        return sent, received

    def failed_blocks(self) -> set[int]:
        """Return the blocks of ended pulls whose content is not valid; each once."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def counts(self) -> TransferCounts:
        """Return the counts since the last call."""
        now = self._clock()
        if self._server and now >= self._checked_at + CHECK_S:
            self._checked_at = now
            for target, (sent, gauges) in self._server.links().items():
                count_link(self._counts, target, self._rank, sent, replace(gauges, looked_s=now))
        counts, self._counts = self._counts, no_counts()
        return counts

    def count(self, results: Iterable[Result]) -> None:
        """Count transfers of another client of this rank."""
        for result in results:
            self._count(result)

    def close(self) -> None:
        """End all threads and connections."""
        if self._memory:
            self._memory.close()
        if self._client:
            self._client.close()
        if self._server:
            self._server.close()

    def _hold(self, server: TransferServer, held: HeldBlocks) -> None:
        try:
            server.hold(held.name, held.blocks, held.owner, held.prompt)
        except InputError as error:
            log.error("the KV of request %s cannot be fetched: %s", held.owner, error)

    def _pull(self, pull: Pull) -> None:
        assert self._client is not None
        assert self._merged is not None
        kept = self._own_blocks(pull.transfer_params)
        if kept is None:
            self._client.start(self._transfer(pull))
        else:
            self._merged.start(self._transfer(pull), kept, buffer_peer(kept.data))

    def _pulled(self, request_id: str, failed_blocks: set[int]) -> None:
        self._received.add(request_id)
        self._failed_blocks |= failed_blocks

    def _own_blocks(self, transfer_params: KvTransferParams) -> KeptBlocks | None:
        """Return the blocks in the buffer server of this node; None if there are none."""
        kept = transfer_params.kept
        return kept if kept is not None and kept.data == self._options.buffer else None

    def _transfer(self, pull: Pull) -> BlockTransfer:
        transfer_params = pull.transfer_params
        checksum = self._options.checksum if transfer_params.checksum is None else transfer_params.checksum
        return BlockTransfer(
            request_id=pull.request_id,
            peer=self._peer(transfer_params),
            remote_request_id=transfer_params.remote_request_id,
            first=pull.first,
            blocks=pull.blocks,
            checksum=checksum,
            prompt=pull.prompt,
            wait_s=self._options.hold_s if transfer_params.early else 0.0,
            connections=transfer_params.connections,
            fence=self._fence(),
        )

    def _peer(self, transfer_params: KvTransferParams) -> PeerServer:
        port = transfer_params.port(self._rank)
        return PeerServer(
            transfer_params.remote_host, port, transfer_params.remote_instance, transfer_params.traffic_class
        )

    def _count(self, result: Result) -> None:
        source = result.transfer.peer.source
        count_nixl(self._counts, source, result.nixl_bytes)
        if result.failure:
            count_failure(self._counts, source, result.failure)
        elif result.transfer.wait_s:
            count_early(self._counts, source, result.nbytes)
        else:
            share = {"rank": self._rank, "ranks": self._ranks}
            count_transfer(self._counts, source, result.nbytes, result.seconds, **share)
