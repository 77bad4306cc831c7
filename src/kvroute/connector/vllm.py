"""`KvrouteConnector`, which vLLM loads by `kv_connector_module_path`: translates vLLM's hooks, decides nothing itself.

The prefill instance serves a finished prompt's blocks out of its cache, so prompts that are computed in several chunks
need no care; the decode instance loads them between its steps, while others decode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from kvroute.connector.blocks import Layout
from kvroute.connector.options import Options, read_options
from kvroute.connector.scheduler import Scheduler, Step
from kvroute.connector.stats import Counts, add, is_empty, no_counts, summary
from kvroute.connector.worker import Worker
from kvroute.types import InputError

try:
    from prometheus_client import Counter
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # type: ignore[import-not-found]
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorRole,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats  # type: ignore[import-not-found]
    from vllm.logger import init_logger  # type: ignore[import-not-found]
    from vllm.v1.request import RequestStatus  # type: ignore[import-not-found]
except ModuleNotFoundError as error:
    raise ImportError(
        f"kvroute.connector.vllm is loaded by vLLM (0.32) and needs it: {error.name} is not installed here"
    ) from None

from kvroute.connector.device import regions_of

# vLLM shows the log lines of its own loggers only; ours join them.
init_logger("kvroute")
log = init_logger("kvroute.connector")


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to the workers."""

    step: Step


@dataclass
class Listening(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """From a worker to the scheduler, once."""

    address: tuple[str, int]


class KvrouteStats(KVConnectorStats):  # type: ignore[misc]
    """`stats.Counts` in vLLM's wrapping."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or dict(no_counts()))

    @property
    def counts(self) -> Counts:
        """The data by its right type."""
        return cast(Counts, self.data)

    def reset(self) -> None:
        """Forget all."""
        self.data = dict(no_counts())

    def aggregate(self, other: KVConnectorStats) -> KvrouteStats:
        """Add another worker's or another step's."""
        add(self.counts, KvrouteStats(other.data).counts)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line."""
        return summary(self.counts)

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return is_empty(self.counts)


class KvrouteMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The counters on vLLM's own /metrics page."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._transfers = self._counter("kv_transfers", "KV transfers pulled, by source instance", "source")
        self._bytes = self._counter("kv_transfer_bytes", "Bytes of KV pulled, by source instance", "source")
        self._seconds = self._counter("kv_transfer_seconds", "Seconds that transfers took", "source")
        self._failures = self._counter("kv_transfer_failures", "KV transfers that failed", "source", "reason")
        self._expired = self._counter("kv_expired", "Requests whose KV nobody fetched in time")

    def _counter(self, name: str, text: str, *labels: str) -> Any:
        return self._counter_cls(name=f"kvroute:{name}", documentation=text, labelnames=[*self._labelnames, *labels])

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's counts."""
        counts = KvrouteStats(transfer_stats_data).counts
        engine = self.per_engine_labelvalues[engine_idx]
        for source, transfers in counts["transfers"].items():
            self._transfers.labels(*engine, source).inc(transfers)
            self._bytes.labels(*engine, source).inc(counts["nbytes"][source])
            self._seconds.labels(*engine, source).inc(counts["seconds"][source])
        for source, reasons in counts["failures"].items():
            for reason, failures in reasons.items():
                self._failures.labels(*engine, source, reason).inc(failures)
        self._expired.labels(*engine).inc(counts["expired"])


class KvrouteConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """vLLM makes one in its scheduler and one beside every worker."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._options: Options = read_options(transfer.kv_connector_extra_config)
        self._check(vllm_config, kv_cache_config)
        self._worker: Worker | None = None
        self._scheduler: Scheduler | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = Scheduler(
                self._options,
                engine_id=transfer.engine_id,
                block_tokens=vllm_config.cache_config.block_size,
                tp=vllm_config.parallel_config.tensor_parallel_size,
                producer=transfer.is_kv_producer,
                consumer=transfer.is_kv_consumer,
            )
            if transfer.is_kv_consumer and transfer.kv_load_failure_policy != "recompute":
                log.warning('a failed transfer fails its request; "kv_load_failure_policy": "recompute" heals it')

    def _check(self, vllm_config: Any, kv_cache_config: Any) -> None:
        where, parallel = "KvrouteConnector", vllm_config.parallel_config
        if parallel.pipeline_parallel_size > 1:
            raise InputError("pipeline parallelism is not supported", where=where, mend="use tensor parallelism")
        if max(parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size) > 1:
            raise InputError("context parallelism is not supported", where=where, mend="use tensor parallelism")
        if kv_cache_config is not None and len(kv_cache_config.kv_cache_groups) != 1:
            raise InputError("models with several kinds of KV cache are not supported", where=where)

    # Scheduler's half

    @property
    def _plan(self) -> Scheduler:
        assert self._scheduler is not None
        return self._scheduler

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Listening]) -> None:
        """The workers' servers listen."""
        self._plan.listening({rank: listening.address for rank, listening in metadata.items()})

    def on_new_request(self, request: Any) -> None:
        """A request has arrived."""
        self._plan.arrived(request.request_id, request.kv_transfer_params, request.prompt_token_ids)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that can be pulled, always between steps."""
        tokens = self._plan.matched(request.request_id, request.num_prompt_tokens, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks to pull into."""
        (ids,) = blocks.get_block_ids()
        self._plan.allocated(request.request_id, request.num_prompt_tokens, ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """This step's plan."""
        return StepMetadata(self._plan.take())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks are held, and what the decode instance must be told."""
        told = self._plan.finished(
            request.request_id,
            request.kv_transfer_params,
            request.prompt_token_ids,
            completed=request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED),
            computed_tokens=request.num_computed_tokens,
            blocks=block_ids,
        )
        return told is not None, told

    # Worker's half

    @property
    def _work(self) -> Worker:
        assert self._worker is not None, "register_kv_caches comes first"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Where the blocks lie."""
        config, transfer = self._vllm_config, self._vllm_config.kv_transfer_config
        blocks, staging = self._kv_cache_config.num_blocks, self._options.staging
        regions = [
            region
            for layer, tensor in kv_caches.items()
            for region in regions_of(layer, tensor, blocks, staging=staging)
        ]
        layout = Layout(
            model=str(config.model_config.served_model_name),
            dtype=str(next(iter(kv_caches.values())).dtype),
            block_tokens=config.cache_config.block_size,
            region_bytes=tuple(region.block_bytes for region in regions),
            tp=config.parallel_config.tensor_parallel_size,
            rank=config.parallel_config.rank % config.parallel_config.tensor_parallel_size,
        )
        self._worker = Worker(
            regions,
            layout,
            self._options,
            producer=transfer.is_kv_producer,
            consumer=transfer.is_kv_consumer,
            replica=config.parallel_config.data_parallel_index,
        )

    def get_handshake_metadata(self) -> Listening | None:
        """Where this worker listens."""
        address = self._work.address
        return Listening(address) if address else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin this step's plan; returns at once."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        self._work.begin(metadata.step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded inside a step."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved inside a step: blocks are served from the cache."""

    def wait_for_save(self) -> None:
        """Nothing to wait for."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Requests whose blocks may be freed, and requests whose blocks have come."""
        return self._work.ended()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks for vLLM to compute again."""
        return self._work.failed_blocks()

    def get_kv_connector_stats(self) -> KvrouteStats | None:
        """Counts since the last step; the scheduler's half has none."""
        if self._worker is None:
            return None
        stats = KvrouteStats(dict(self._worker.counts()))
        return None if stats.is_empty() else stats

    def shutdown(self) -> None:
        """End threads and connections."""
        if self._worker:
            self._worker.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvrouteStats:
        """For vLLM's log line."""
        return KvrouteStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvrouteMetrics:
        """For vLLM's metrics page."""
        assert Counter in metric_types
        return KvrouteMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
