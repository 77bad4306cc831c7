"""Runs one offline replay of a Mooncake trace with NVIDIA Dynamo's Rust simulator: disaggregated, KV router.

It prints one JSON line. It runs in Dynamo's environment and needs nothing else. KV transfers there have one bandwidth
for all, without contention.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

from dynamo._core import (  # type: ignore[import-not-found]
    KvRouterConfig,
    _normalize_mocker_config,
    run_mocker_trace_replay,
)

TRACE_BLOCK_TOKENS = 512
GPU_BLOCKS = 2_048
"""2,048 blocks of 512 tokens, equal to Dynamo's default of 16,384 blocks of 64."""
KV_BYTES_PER_TOKEN = 327_680
"""Llama-3-70B in 16 bits, as in our runs."""


def _engine(worker: str) -> Any:
    engine = {
        "backend": "vllm",
        "worker_type": worker,
        "block_size": TRACE_BLOCK_TOKENS,
        "num_gpu_blocks": GPU_BLOCKS,
        "kv_transfer_bytes_per_token": KV_BYTES_PER_TOKEN,
    }
    return _normalize_mocker_config({"engine": engine})


def replay(trace: Path, prefill: int, decode: int, speedup: float) -> dict[str, float]:
    """Return the figures of one replay, including the reading of the trace."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    result = run_mocker_trace_replay(
        [str(trace)],
        prefill_engine_args=_engine("prefill"),
        decode_engine_args=_engine("decode"),
        router_config=KvRouterConfig(),
        router_mode="kv_router",
        num_prefill_workers=prefill,
        num_decode_workers=decode,
        trace_block_size=TRACE_BLOCK_TOKENS,
        arrival_speedup_ratio=speedup,
        capture_planner_details=False,
    )
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "requests": result.summary["completed_requests"],
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "process_cpu_s": usage.ru_utime + usage.ru_stime,
        "rss_mb": usage.ru_maxrss * 1024 / 1e6,
    }


def main() -> None:
    """Print the figures of one replay."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, help="Mooncake JSON lines, not packed")
    parser.add_argument("--prefill", type=int, default=4)
    parser.add_argument("--decode", type=int, default=4)
    parser.add_argument("--speedup", type=float, default=1.0, help="arrivals come so many times faster")
    given = parser.parse_args()
    print(json.dumps(replay(given.trace, given.prefill, given.decode, given.speedup)))


if __name__ == "__main__":
    main()
