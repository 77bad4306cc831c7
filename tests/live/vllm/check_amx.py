"""Runs in vLLM's environment: registering the KV cache of a CPU requests AMX tiles before the first step.

`check_amx.py CPUINFO...` uses each file in turn instead of the kernel's /proc/cpuinfo, registers a KV cache with a real
connector, and prints the log lines about AMX.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import torch  # type: ignore[import-not-found]
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # type: ignore[import-not-found]

from kvroute_engine.connector import amx
from kvroute_engine.connector.vllm import KvrouteConnector

BLOCKS = 4


class Printer(logging.Handler):
    """Prints the messages only."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line."""
        print(record.getMessage())  # noqa: T201


def main() -> None:
    """Register a KV cache and shut down, for each file."""
    amx.log.setLevel(logging.INFO)
    amx.log.addHandler(Printer())
    for file in sys.argv[1:]:
        print("registering")  # noqa: T201
        amx.CPUINFO = Path(file)
        register()


def register() -> None:
    """Register a KV cache and shut down."""
    transfer = SimpleNamespace(
        kv_connector_extra_config={},
        engine_id="e",
        is_kv_producer=True,
        is_kv_consumer=True,
        kv_load_failure_policy="recompute",
    )
    parallel = SimpleNamespace(
        pipeline_parallel_size=1,
        prefill_context_parallel_size=1,
        decode_context_parallel_size=1,
        tensor_parallel_size=1,
        rank=0,
        data_parallel_index=0,
        data_parallel_external_lb=False,
    )
    config = SimpleNamespace(
        kv_transfer_config=transfer,
        parallel_config=parallel,
        cache_config=SimpleNamespace(block_size=32),
        model_config=SimpleNamespace(served_model_name="tiny"),
    )
    cache = SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=[None])
    connector = KvrouteConnector(config, KVConnectorRole.WORKER, cache)
    connector.register_kv_caches({"layer0": torch.zeros(BLOCKS, 2, 32, 8)})
    connector.shutdown()


if __name__ == "__main__":
    main()
