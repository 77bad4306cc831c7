"""Counters of vLLM's and SGLang's own connectors: pages as recorded from engines, and their differences."""

from __future__ import annotations

import pytest

from kvroute.serve.proxy.own_transfers import OwnTransfers
from kvroute.serve.telemetry.connector_counters import ConnectorCounters, TransferTotals
from kvroute.serve.telemetry.metrics_page import read_metrics
from kvroute.serve.telemetry.scrape import TransferCounters
from kvroute.types import Decode, TransferMeasured

PAGE = """vllm:num_requests_running{engine="0",model_name="tiny"} 1.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
"""
NIXL = """# HELP vllm:nixl_xfer_time_seconds Histogram of transfer duration for NIXL KV Cache transfers.
# TYPE vllm:nixl_xfer_time_seconds histogram
vllm:nixl_xfer_time_seconds_bucket{engine="0",le="0.005",model_name="tiny"} 1.0
vllm:nixl_xfer_time_seconds_bucket{engine="0",le="+Inf",model_name="tiny"} 4.0
vllm:nixl_xfer_time_seconds_count{engine="0",model_name="tiny"} 4.0
vllm:nixl_xfer_time_seconds_sum{engine="0",model_name="tiny"} 0.566657
# HELP vllm:nixl_bytes_transferred Histogram of bytes transferred per NIXL KV Cache transfers.
# TYPE vllm:nixl_bytes_transferred histogram
vllm:nixl_bytes_transferred_bucket{engine="0",le="2048.0",model_name="tiny"} 0.0
vllm:nixl_bytes_transferred_count{engine="0",model_name="tiny"} 4.0
vllm:nixl_bytes_transferred_sum{engine="0",model_name="tiny"} 1.7170432e+07
# HELP vllm:nixl_num_failed_transfers_total Number of failed NIXL KV Cache transfers.
# TYPE vllm:nixl_num_failed_transfers_total counter
vllm:nixl_num_failed_transfers_total{engine="0",model_name="tiny"} 2.0
vllm:nixl_num_failed_transfers_created{engine="0",model_name="tiny"} 1.7641234e+09
# HELP vllm:nixl_num_kv_expired_reqs_total Number of requests that had their KV expire.
# TYPE vllm:nixl_num_kv_expired_reqs_total counter
vllm:nixl_num_kv_expired_reqs_total{engine="0",model_name="tiny"} 3.0
"""
SGLANG = """sglang:num_running_reqs{model_name="m"} 5
sglang:kv_transfer_total_mb_sum{model_name="m"} 3.0
sglang:kv_transfer_total_mb_count{model_name="m"} 2
sglang:kv_transfer_latency_ms_sum{model_name="m"} 40.0
sglang:num_transfer_failed_reqs_total{model_name="m"} 1
"""
KVROUTE = """kvroute:kv_transfer_bytes_total{source="p0"} 100.0
kvroute:kv_transfer_seconds_total{source="p0"} 2.0
kvroute:kv_transfers_total{source="p0"} 4.0
kvroute:kv_transfer_failures_total{source="p0",reason="timeout"} 2.0
kvroute:kv_transfer_failures_total{source="p1",reason="refused"} 1.0
kvroute:kv_expired_total 5.0
"""


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (PAGE, ConnectorCounters()),
        (PAGE + NIXL, ConnectorCounters({"nixl": TransferTotals(17_170_432.0, 0.566657, 4)}, 2, 3)),
        (SGLANG, ConnectorCounters({"sglang": TransferTotals(3e6, 0.04, 2)}, 1, None)),
        (PAGE + KVROUTE, ConnectorCounters({}, 3, 5)),
    ],
    ids=["none", "nixl", "sglang", "kvroute"],
)
def test_the_counters_of_each_connector_are_read(page: str, expected: ConnectorCounters) -> None:
    assert read_metrics(page.encode()).connectors == expected


def test_ranks_of_data_parallel_engines_are_added() -> None:
    both = NIXL + "\n".join(line for line in NIXL.replace('engine="0"', 'engine="1"').splitlines() if line[0] != "#")
    assert read_metrics((PAGE + both).encode()).connectors == ConnectorCounters(
        {"nixl": TransferTotals(2 * 17_170_432.0, 2 * 0.566657, 8)}, 4, 6
    )


def test_a_page_becomes_measurements_of_the_pairs_that_have_transferred() -> None:
    """From two pages to events, with the gateway's own record of its transfers between them."""
    own = OwnTransfers(lambda tier, nbytes: nbytes / 1e9, lambda name: 1)
    counters = TransferCounters("d0", own.measured)
    later = NIXL.replace("1.7170432e+07", "2.7170432e+07").replace("} 4.0", "} 6.0").replace("0.566657", "0.816657")
    before, after = read_metrics((PAGE + NIXL).encode()), read_metrics((PAGE + later).encode())
    assert counters.measured(1.0, before.transfers, before.connectors) == []
    for number in (1, 2):
        decision = Decode(number, "p0", "d0", 0, 5e6, 5e6, 0)
        own.started(decision)
        own.ended(decision, None, now=1.5)
    (event,) = counters.measured(2.0, after.transfers, after.connectors)
    assert event == TransferMeasured(2.0, "p0", "d0", 1e7, event.seconds, 2, "nixl")
    assert event.seconds == pytest.approx(0.25)
    assert counters.measured(3.0, after.transfers, after.connectors) == []


def test_what_other_routers_have_moved_is_not_measured() -> None:
    own = OwnTransfers(lambda tier, nbytes: nbytes / 1e9, lambda name: 1)
    counters = TransferCounters("d0", own.measured)
    assert counters.measured(1.0, {}, ConnectorCounters({"nixl": TransferTotals()})) == []
    assert counters.measured(2.0, {}, ConnectorCounters({"nixl": TransferTotals(1e7, 0.25, 2)})) == []
