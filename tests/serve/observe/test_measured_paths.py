"""Measured rates of pairs beside those of the cluster file."""

from __future__ import annotations

import pytest

from kvroute.serve.observe.admin.measured_paths import MeasuredPaths
from kvroute.topology import Cluster, parse
from kvroute.types import MeasuredBy, TransferMeasured

FILE = """
name: measured
racks: [{name: rack0}, {name: rack1}]
pods: [{name: pod0}]
nodes:
  - {name: node0, rack: rack0, gpus: 2, nics: {compute: {count: 1, capacity: 80 Gbps}}}
  - {name: node1, rack: rack0, gpus: 2, nics: {compute: {count: 1, capacity: 80 Gbps}}}
timing:
  default: {prefill: {kind: linear, per_token: 100 us, base: 10 ms}, decode: {base: 10 ms, per_request: 1 ms}}
defaults: {model: llama-3-70b, tp: 1, batch_max: 2, kv_capacity: 40 GB}
instances:
  - {name: prefill0, role: prefill, gpus: "node0:0"}
  - {name: prefill1, role: prefill, gpus: "node0:1"}
  - {name: decode0, role: decode, gpus: "node1:0"}
"""


def cluster(text: str = FILE) -> Cluster:
    return parse(text.replace("racks: [{name: rack0}, {name: rack1}]\npods: [{name: pod0}]", "racks: [{name: rack0}]"))


def measured(
    source: str, kv_bytes: float, seconds: float, transfers: int = 1, measured_by: MeasuredBy = "nixl", at: float = 1.0
) -> TransferMeasured:
    return TransferMeasured(at, source, "decode0", kv_bytes, seconds, transfers, measured_by)


def test_the_slowest_pair_comes_first_with_what_has_measured_it() -> None:
    paths = MeasuredPaths(cluster())
    paths.measured(measured("prefill0", 1e9, 0.125))
    paths.measured(measured("prefill1", 1e9, 10.0, measured_by="first-byte", at=3.0))
    slow, fast = paths.slowest(4.0, 8)
    assert (slow.source, slow.measured_by, slow.bytes_per_s, slow.age_s) == ("prefill1", "first-byte", 1e8, 1.0)
    assert (slow.map_bytes_per_s, slow.ratio) == pytest.approx((1e10, 0.01))
    assert (fast.source, fast.measured_by) == ("prefill0", "nixl")
    assert fast.ratio == pytest.approx(0.8)
    assert paths.slowest(4.0, 1) == (slow,)


def test_later_transfers_count_more() -> None:
    paths = MeasuredPaths(cluster())
    paths.measured(measured("prefill0", 1e9, 10.0))
    paths.measured(measured("prefill0", 20e9, 2.0, transfers=20))
    (path,) = paths.slowest(1.0, 8)
    assert path.transfers == 21
    assert path.bytes_per_s == pytest.approx(1e10, rel=0.1)


def test_another_measurement_replaces_the_first_one() -> None:
    """The first byte of a response also shows queueing; the engine's counters do not, so they are not mixed."""
    paths = MeasuredPaths(cluster())
    paths.measured(measured("prefill0", 1e9, 10.0, measured_by="first-byte"))
    paths.measured(measured("prefill0", 1e9, 0.2))
    (path,) = paths.slowest(1.0, 8)
    assert (path.measured_by, path.bytes_per_s, path.transfers) == ("nixl", 5e9, 1)


def test_the_lowest_ratio_is_that_of_a_recent_pair_which_an_engine_has_measured() -> None:
    """By tier: the slowest pair, as long as its last transfer is at most ten minutes old."""
    paths = MeasuredPaths(cluster())
    paths.measured(measured("prefill0", 1e9, 10.0, measured_by="first-byte"))
    assert set(paths.lowest_ratios(1.0)) == {None}
    paths.measured(measured("prefill0", 1e9, 0.2, at=100.0))
    paths.measured(measured("prefill1", 1e9, 1.0))
    found = {tier: ratio for tier, ratio in enumerate(paths.lowest_ratios(100.0)) if ratio is not None}
    assert list(found.values()) == pytest.approx([0.1])
    assert max(ratio or 0.0 for ratio in paths.lowest_ratios(650.0)) == pytest.approx(0.5)
    assert set(paths.lowest_ratios(701.0)) == {None}


def test_empty_measurements_and_unknown_instances_are_ignored() -> None:
    paths = MeasuredPaths(cluster())
    paths.measured(measured("prefill9", 1e9, 1.0))
    paths.measured(measured("prefill0", 0.0, 1.0))
    paths.measured(measured("prefill0", 1.0, 0.0))
    assert paths.slowest(1.0, 8) == ()


def test_pairs_that_stay_keep_their_measurements() -> None:
    paths = MeasuredPaths(cluster())
    paths.measured(measured("prefill0", 1e9, 0.2))
    paths.measured(measured("prefill1", 1e9, 0.2))
    fewer = "\n".join(line for line in FILE.splitlines() if "prefill1" not in line).replace("80 Gbps", "40 Gbps")
    paths.change(cluster(fewer))
    (path,) = paths.slowest(1.0, 8)
    assert path.source == "prefill0"
    assert path.ratio == pytest.approx(1.0)
