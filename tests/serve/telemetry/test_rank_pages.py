"""A metrics page of a server with data-parallel ranks: each rank gets its own samples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.http.slices import whole
from kvroute.serve.observe.metrics.prometheus_text import PageError
from kvroute.serve.telemetry.metrics_page import read_metrics
from kvroute.serve.telemetry.rank_pages import pages_by_rank


def page_of(*labels: int) -> bytes:
    """Return a page whose values follow from the label of the rank."""
    lines = ["# HELP vllm:num_requests_running Requests", "process_start_time_seconds 17.0"]
    for label in labels:
        own = f'engine="{label}",model_name="m"'
        lines += [
            f"vllm:num_requests_running{{{own}}} {label + 1}.0",
            f"vllm:num_requests_waiting{{{own}}} {10 * label}.0",
            f'vllm:num_requests_waiting_by_reason{{{own},reason="capacity"}} 99.0',
            f"vllm:kv_cache_usage_perc{{{own}}} {label / 100}",
            f"vllm:nixl_bytes_transferred_sum{{{own}}} {label + 5}.0",
            f"vllm:nixl_bytes_transferred_count{{{own}}} {label + 1}.0",
            f"vllm:nixl_xfer_time_seconds_sum{{{own}}} 0.5",
            f'kvroute:kv_transfer_bytes_total{{{own},source="p"}} {label + 7}.0',
            f'kvroute:kv_transfer_seconds_total{{{own},source="p"}} 2.0',
            f'kvroute:kv_transfers_total{{{own},source="p"}} 3.0',
            f"vllm:prompt_tokens_total{{{own}}} 5.0",
        ]
    return ("\n".join(lines) + "\n").encode()


def test_each_rank_gets_its_own_samples() -> None:
    """Load, memory, transfers of both connectors; the start of the process is that of all ranks."""
    ranks = {"d_dp0": 0, "d_dp1": 1, "d_dp10": 10}
    for name, part in whole(pages_by_rank(page_of(*range(11)), ranks)).items():
        metrics, rank = read_metrics(part), ranks[name]
        assert (metrics.running, metrics.waiting, metrics.kv_used_share) == (rank + 1, 10 * rank, rank / 100)
        assert metrics.started_s == 17.0
        assert metrics.transfers["p"].kv_bytes == rank + 7
        assert metrics.connectors.moved["nixl"].kv_bytes == rank + 5
        assert b"prompt_tokens" not in part


def test_ranks_of_a_hybrid_load_balancer_begin_at_their_own_label() -> None:
    """The second node of an engine with 16 ranks: its header 1 is the rank 9 of the whole engine."""
    parts = whole(pages_by_rank(page_of(*range(8, 16)), {"d_dp0": 0, "d_dp1": 1}))
    assert [read_metrics(part).running for part in parts.values()] == [9, 10]


def test_a_page_that_lacks_a_rank_is_refused() -> None:
    with pytest.raises(
        PageError, match="metrics of 2 data-parallel ranks, not of 4: correct `dp`, or start the engine"
    ):
        whole(pages_by_rank(page_of(0, 1), {"d_dp0": 0, "d_dp3": 3}))


def test_a_page_without_ranks_is_that_of_no_known_engine() -> None:
    (part,) = whole(pages_by_rank(b"nothing 1\n", {"d_dp0": 0})).values()
    assert read_metrics(part).running is None


def test_a_rank_that_has_had_no_request_is_idle() -> None:
    """With several API servers, vLLM 0.32 leaves out its gauges until then."""
    unused = b'vllm:cache_config_info{block_size="32",engine="0"} 1.0\n'
    used = b'vllm:cache_config_info{block_size="32",engine="1"} 1.0\nvllm:num_requests_running{engine="1"} 2.0\n'
    parts = whole(pages_by_rank(unused + used, {"d_dp0": 0, "d_dp1": 1}))
    assert [read_metrics(part).running for part in parts.values()] == [0, 2]


@given(
    loads=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 4)), min_size=1, max_size=4),
    others=st.sampled_from(["tp_rank", "pp_rank", "moe_ep_rank", "attn_cp_rank", "cp_rank"]),
    copies=st.integers(1, 8),
    named=st.booleans(),
)
def test_ranks_that_count_the_same_requests_count_once(
    loads: list[tuple[int, int, int]], others: str, copies: int, named: bool
) -> None:
    """SGLang with metrics of all schedulers, and with context parallelism also without: the page has a copy of each
    data-parallel rank's load for each other rank. Transfers of its connector are counted once, too."""
    lines = []
    for rank, (running, waiting, quarters) in enumerate(loads):
        for copy in range(copies):
            data = f'dp_rank="{rank}",' if named or len(loads) > 1 else ""
            own = f'{{{data}engine_type="unified",model_name="m",{others}="{copy}"}}'
            lines += [f"sglang:num_running_reqs{own} {running}.0", f"sglang:num_queue_reqs{own} {waiting}.0"]
            lines += [f"sglang:token_usage{own} {quarters / 4}", f"sglang:num_transfer_failed_reqs_total{own} 2.0"]
            lines += [f"sglang:kv_transfer_total_mb_count{own} 3.0", f"sglang:kv_transfer_total_mb_sum{own} 30.0"]
            lines.append(f"sglang:kv_transfer_latency_ms_sum{own} 600.0")
    metrics = read_metrics(("\n".join(lines) + "\n").encode())
    ranks = len(loads)
    assert (metrics.running, metrics.waiting) == (sum(load[0] for load in loads), sum(load[1] for load in loads))
    assert metrics.kv_used_share == pytest.approx(sum(load[2] for load in loads) / (4 * ranks))
    moved = metrics.connectors.moved["sglang"]
    assert (moved.kv_bytes, moved.transfers, metrics.connectors.failed) == (30e6 * ranks, 3 * ranks, 2 * ranks)
    assert moved.seconds == pytest.approx(0.6 * ranks)


def test_other_labels_tell_series_apart() -> None:
    """Series that differ in anything but the rank of a scheduler are summed, as before."""
    page = b'sglang:num_running_reqs{engine_type="a"} 5\nsglang:num_running_reqs{engine_type="b"} 2\n'
    assert read_metrics(page).running == 7
