"""`KvrouteConnector`, which vLLM loads by `kv_connector_module_path`. It translates vLLM's hooks and decides nothing.

The prefill instance serves blocks from its cache: those of a finished prompt or, layer by layer, of one that is being
computed. The decode instance loads them between its steps, while other requests decode.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from kvroute_engine.connector.amx import allow_amx
from kvroute_engine.connector.blocks import BlockLayout
from kvroute_engine.connector.options import ConnectorSettings, of_rank, read_options
from kvroute_engine.connector.scheduler import ConnectorScheduler, ConnectorStep
from kvroute_engine.connector.storage.plan import StoragePlan, StorageStep, StorePrompt
from kvroute_engine.connector.storage.worker import StorageWorker, WrittenBlocks
from kvroute_engine.connector.storage.write_back import StoredChain
from kvroute_engine.connector.worker import ConnectorWorker
from kvroute_engine.errors import InputError

try:
    from vllm.distributed.kv_events import BlockStored  # type: ignore[import-not-found]
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # type: ignore[import-not-found]
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorWorkerMetadata,
    )
    from vllm.logger import init_logger  # type: ignore[import-not-found]
    from vllm.v1.request import RequestStatus  # type: ignore[import-not-found]
except ModuleNotFoundError as error:
    raise ImportError(
        f"kvroute_engine.connector.vllm is loaded by vLLM (0.32) and requires it: {error.name} is not installed here"
    ) from None

from kvroute_engine.connector.device import fence_of, regions_of
from kvroute_engine.connector.vllm_metrics import KvrouteMetrics, KvrouteStats

IDLE_PAUSE_S = 0.005
"""Pause between two steps of an idle engine whose blocks are being written, in seconds."""
# vLLM prints only the log lines of its own loggers, so kvroute's loggers are created through vLLM.
init_logger("kvroute")
log = init_logger("kvroute.connector")


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Message from the scheduler to the workers."""

    step: ConnectorStep
    storage: StorageStep


@dataclass
class Written(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Message from the workers to the scheduler: what each of them has written to the store."""

    by_worker: tuple[WrittenBlocks, ...]

    def aggregate(self, other: Written) -> Written:
        """Return the reports of both."""
        return Written(self.by_worker + other.by_worker)


@dataclass
class Listening(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Message from a worker to the scheduler, sent once."""

    address: tuple[str, int]


class KvrouteConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """The connector. vLLM creates one in its scheduler and one for every worker."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._options: ConnectorSettings = of_rank(
            read_options(transfer.kv_connector_extra_config), _shared_rank(vllm_config)
        )
        self._check(vllm_config, kv_cache_config)
        self._worker: ConnectorWorker | None = None
        self._storage_worker: StorageWorker | None = None
        """Only with a buffer server."""
        self._scheduler: ConnectorScheduler | None = None
        self._storage: StoragePlan | None = None
        """Only with a buffer server."""
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = ConnectorScheduler(
                self._options,
                engine_id=transfer.engine_id,
                block_tokens=vllm_config.cache_config.block_size,
                tp=vllm_config.parallel_config.tensor_parallel_size,
                producer=transfer.is_kv_producer,
                consumer=transfer.is_kv_consumer,
            )
            if self._options.buffer:
                tp = vllm_config.parallel_config.tensor_parallel_size
                self._storage = StoragePlan(vllm_config.cache_config.block_size, tp)
            loads = transfer.is_kv_consumer or self._options.buffer
            if loads and transfer.kv_load_failure_policy != "recompute":
                log.warning(
                    'a failed transfer fails its request; set "kv_load_failure_policy" to "recompute" to avoid it'
                )

    def _check(self, vllm_config: Any, kv_cache_config: Any) -> None:
        where, parallel = "KvrouteConnector", vllm_config.parallel_config
        if parallel.pipeline_parallel_size > 1:
            raise InputError("pipeline parallelism is not supported", where=where, hint="use tensor parallelism")
        if max(parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size) > 1:
            raise InputError("context parallelism is not supported", where=where, hint="use tensor parallelism")
        if kv_cache_config is not None and len(kv_cache_config.kv_cache_groups) != 1:
            raise InputError("models with several kinds of KV cache are not supported", where=where)

    # Scheduler's half

    @property
    def _plan(self) -> ConnectorScheduler:
        assert self._scheduler is not None
        return self._scheduler

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Listening]) -> None:
        """Receive the addresses of the workers' servers."""
        self._plan.listening({rank: listening.address for rank, listening in metadata.items()})

    def on_new_request(self, request: Any) -> None:
        """Handle a new request."""
        self._plan.arrived(request.request_id, request.kv_transfer_params, request.prompt_token_ids)
        if self._storage is not None:
            prompt = StorePrompt(
                request.prompt_token_ids or (),
                request.all_token_ids,
                request.cache_salt or "",
                storable=request.lora_request is None and not request.mm_features,
            )
            self._storage.arrived(request.request_id, request.kv_transfer_params, prompt)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return the number of tokens to pull or load, and whether vLLM must wait for them: pulls run between steps,
        and staged blocks are loaded within a step."""
        tokens = self._plan.matched(request.request_id, request.num_prompt_tokens, num_computed_tokens)
        if tokens or self._storage is None:
            return tokens, tokens > 0
        return self._storage.matched(request.request_id, request.num_prompt_tokens, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Receive the blocks to pull or load into."""
        (ids,) = blocks.get_block_ids()
        pulls = self._plan.pulls(request.request_id)
        self._plan.allocated(request.request_id, request.num_prompt_tokens, ids, num_external_tokens)
        if self._storage is not None:
            self._storage.allocated(request.request_id, ids, 0 if pulls else num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """Return the plan of this step."""
        for request_id in scheduler_output.preempted_req_ids or ():
            self._plan.preempted(request_id)
        state, before = scheduler_output.kv_connector_block_state, _computed_before(scheduler_output)
        after = {
            request_id: tokens + scheduler_output.num_scheduled_tokens[request_id]
            for request_id, tokens in before.items()
        }
        for request_id, computed in self._plan.watched(after):
            (blocks,) = state.get_block_ids(request_id)
            self._plan.scheduled(request_id, blocks, computed)
        if self._storage is None:
            return StepMetadata(self._plan.take(), StorageStep())
        for request_id, computed in before.items():
            if self._storage.is_due(request_id, computed):
                (blocks,) = state.get_block_ids(request_id)
                self._storage.computed(request_id, computed, blocks)
        return StepMetadata(self._plan.take(), self._storage.take())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the blocks are held, and the transfer parameters for the decode instance."""
        keep, params = self._plan.finished(
            request.request_id,
            request.kv_transfer_params,
            request.prompt_token_ids,
            completed=request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED),
            computed_tokens=request.num_computed_tokens,
            blocks=block_ids,
        )
        if self._storage is not None:
            kept = self._storage.take_kept(request.request_id)
            if params is not None and kept is not None:
                params["kept"] = msgspec.to_builtins(kept)
            writes = self._storage.finished(request.request_id, request.num_computed_tokens, block_ids, kept=keep)
            keep = keep or writes
        return keep, params

    def update_connector_output(self, connector_output: Any) -> None:
        """Receive the reports of the workers."""
        written = connector_output.kv_connector_worker_meta
        if self._storage is not None and isinstance(written, Written):
            for report in written.by_worker:
                self._storage.stored(report.rank, report.keys, report.settled_number)

    def has_pending_push_work(self) -> bool:
        """Return whether vLLM must go on with steps, although no request is in progress.

        vLLM calls it only then, in a loop without a pause, so it pauses here.
        """
        if self._storage is None or not self._storage.pending:
            return False
        time.sleep(IDLE_PAUSE_S)
        return True

    def take_events(self) -> Iterable[Any]:
        """Return the KV events of blocks in the store."""
        if self._storage is None:
            return ()
        size = self._vllm_config.cache_config.block_size
        return [_stored_event(chain, size) for chain in self._storage.take_events()]

    # Worker's half

    @property
    def _work(self) -> ConnectorWorker:
        assert self._worker is not None, "register_kv_caches must be called first"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Receive the location of the blocks. Called before the first step."""
        allow_amx(next(iter(kv_caches.values())).device.type)
        config, transfer = self._vllm_config, self._vllm_config.kv_transfer_config
        blocks, staging = self._kv_cache_config.num_blocks, self._options.staging
        fence = partial(fence_of, next(iter(kv_caches.values())))
        by_layer = {layer: regions_of(layer, tensor, blocks, staging=staging) for layer, tensor in kv_caches.items()}
        regions = [region for own in by_layer.values() for region in own]
        numbers = iter(range(len(regions)))
        layers = {layer: [next(numbers) for _ in own] for layer, own in by_layer.items()}
        layout = BlockLayout(
            model=str(config.model_config.served_model_name),
            dtype=str(next(iter(kv_caches.values())).dtype),
            block_tokens=config.cache_config.block_size,
            region_bytes=tuple(region.block_bytes for region in regions),
            tp=config.parallel_config.tensor_parallel_size,
            rank=config.parallel_config.rank % config.parallel_config.tensor_parallel_size,
        )
        self._worker = ConnectorWorker(
            regions,
            layout,
            self._options,
            producer=transfer.is_kv_producer,
            consumer=transfer.is_kv_consumer,
            replica=config.parallel_config.data_parallel_index,
            layers=layers,
            fence=fence,
        )
        if self._options.buffer:
            self._storage_worker = StorageWorker(regions, layout, self._options, layers, fence)

    def get_handshake_metadata(self) -> Listening | None:
        """Return the address on which this worker listens."""
        address = self._work.address
        return Listening(address) if address else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the plan of this step. Returns when the blocks to write are copied."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        self._work.begin(metadata.step)
        if self._storage_worker is not None:
            self._storage_worker.begin(metadata.storage)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for a layer's staged blocks. Pulls run between steps."""
        if self._storage_worker is not None:
            self._storage_worker.wait_for_layer(layer_name)

    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        """Stop reads of the blocks that this step may overwrite, and offer those of finished prompts. Called before its
        model runs."""
        self._work.overwrites(kv_connector_metadata.step)
        self._work.offer(kv_connector_metadata.step)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Allow sending a layer's blocks. Nothing is copied: they are served from the cache."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        self._work.computed(metadata.step, layer_name)

    def wait_for_save(self) -> None:
        """Wait for the loads of this step. Nothing that is saved must be waited for."""
        if self._storage_worker is not None:
            self._storage_worker.finish()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Return the requests whose blocks may be freed, and the requests whose pull has ended."""
        sent, received = self._work.ended()
        if self._storage_worker is not None:
            sent |= self._storage_worker.ended()
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that vLLM must compute again."""
        failed = self._work.failed_blocks()
        if self._storage_worker is not None:
            failed |= self._storage_worker.failed_blocks()
        return failed

    def build_connector_worker_meta(self) -> Written | None:
        """Return what this worker has written to the store since its last report."""
        written = self._storage_worker.written() if self._storage_worker is not None else None
        return Written((written,)) if written is not None else None

    def get_kv_connector_stats(self) -> KvrouteStats | None:
        """Return the counts since the last step. The scheduler's half has none."""
        if self._worker is None:
            return None
        if self._storage_worker is not None:
            self._worker.count(self._storage_worker.results())
        stats = KvrouteStats(dict(self._worker.counts()))
        return None if stats.is_empty() else stats

    def shutdown(self) -> None:
        """End all threads and connections."""
        if self._storage_worker:
            self._storage_worker.close()
        if self._worker:
            self._worker.close()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return True for layer-wise sending and loading: a graph of the whole model does not call for each layer."""
        options = read_options(extra_config)
        return options.layerwise or bool(options.buffer)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvrouteStats:
        """Create the counts for vLLM's log line."""
        return KvrouteStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvrouteMetrics:
        """Create the metrics for vLLM's metrics page."""
        return KvrouteMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _shared_rank(vllm_config: Any) -> int | None:
    """Return the data-parallel rank that requests to the server name in a header; None: the server has only one rank.

    Ranks of dense models are configured as if they were alone, but the id of each engine still ends in its rank.
    """
    parallel, engine_id = vllm_config.parallel_config, str(vllm_config.kv_transfer_config.engine_id)
    index: int = parallel.data_parallel_index
    if parallel.data_parallel_external_lb or not engine_id.endswith(f"_dp{index}"):
        return None
    return int(parallel.data_parallel_rank_local) if parallel.data_parallel_hybrid_lb else index


def _computed_before(output: Any) -> dict[str, int]:
    """Return, by request, the number of tokens whose KV is in the cache before a step."""
    cached = output.scheduled_cached_reqs
    before = {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
    before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return before


def _stored_event(chain: StoredChain, block_tokens: int) -> Any:
    extra_keys = [(chain.salt,), *[None] * (len(chain.hashes) - 1)] if chain.salt else None
    return BlockStored(
        block_hashes=list(chain.hashes),
        parent_block_hash=chain.parent,
        token_ids=list(chain.tokens),
        block_size=block_tokens,
        lora_id=None,
        medium="STORE",
        lora_name=None,
        extra_keys=extra_keys,
        group_idx=0,
    )
