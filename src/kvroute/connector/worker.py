"""The connector's half beside a vLLM worker: begins what the scheduler planned, and says what has ended. No vllm."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from kvroute.connector.blocks import Layout, Region
from kvroute.connector.client import Client, Peer, Result, Transfer
from kvroute.connector.handover import Handover
from kvroute.connector.options import Options
from kvroute.connector.scheduler import Pull, Step
from kvroute.connector.server import Server
from kvroute.connector.stats import Counts, count_failure, count_transfer, no_counts

log = logging.getLogger(__name__)


class Worker:
    """One tensor-parallel rank of one data-parallel `replica`: a server if a producer, a client if a consumer."""

    def __init__(
        self,
        regions: Sequence[Region],
        layout: Layout,
        options: Options,
        *,
        producer: bool = True,
        consumer: bool = True,
        replica: int = 0,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._options, self._rank = options, layout.rank
        offset = replica * layout.tp + layout.rank
        self._server = Server(regions, layout, options, port_offset=offset, environ=environ) if producer else None
        self._client = Client(regions, layout, options, environ=environ) if consumer else None
        self._failed_blocks: set[int] = set()
        self._counts = no_counts()

    @property
    def address(self) -> tuple[str, int] | None:
        """Where this rank's server is reached."""
        return self._server.address if self._server else None

    def begin(self, step: Step) -> None:
        """Hold, pull and release; returns at once."""
        if self._server:
            for request_id, blocks in step.holds:
                self._server.hold(request_id, blocks)
        if self._client:
            for pull in step.pulls:
                self._client.start(self._transfer(pull))
            for handover in step.releases:
                self._client.release(self._peer(handover), handover.remote_request_id)

    def ended(self) -> tuple[set[str], set[str]]:
        """Requests whose blocks may be freed, and requests whose blocks have been pulled, well or not."""
        sent, received = set(), set()
        for freed in self._server.freed() if self._server else ():
            sent.add(freed.request_id)
            if freed.expired:
                self._counts["expired"] += 1
                log.warning("nobody fetched the KV of %s within %g s", freed.request_id, self._options.hold_s)
        for result in self._client.results() if self._client else ():
            received.add(result.transfer.request_id)
            self._count(result)
        return sent, received

    def failed_blocks(self) -> set[int]:
        """Blocks of ended pulls whose content is not what it should be; once."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def counts(self) -> Counts:
        """Since the last call."""
        counts, self._counts = self._counts, no_counts()
        return counts

    def close(self) -> None:
        """End all threads and connections."""
        if self._client:
            self._client.close()
        if self._server:
            self._server.close()

    def _transfer(self, pull: Pull) -> Transfer:
        handover = pull.handover
        checksum = self._options.checksum if handover.checksum is None else handover.checksum
        peer = self._peer(handover)
        return Transfer(pull.request_id, peer, handover.remote_request_id, pull.first, pull.blocks, checksum)

    def _peer(self, handover: Handover) -> Peer:
        port = handover.port(self._rank)
        return Peer(handover.remote_host, port, handover.remote_instance, handover.traffic_class)

    def _count(self, result: Result) -> None:
        source = result.transfer.peer.source
        if result.failure:
            self._failed_blocks.update(result.transfer.blocks)
            count_failure(self._counts, source, result.failure)
        else:
            count_transfer(self._counts, source, result.nbytes, result.seconds)
