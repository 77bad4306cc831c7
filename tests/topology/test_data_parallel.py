"""An engine with data-parallel ranks in a cluster file: one instance for each rank, and every fault with its line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.topology import parse
from kvroute.topology.place import gpu_list, gpu_text
from kvroute.topology.reading.expansion import with_endpoints
from kvroute.types import Endpoint, InputErrors, Instance

FILE = """name: ranks
racks: [{name: rack0}]
nodes:
  - {name: node0, rack: rack0, nics: {compute: {count: 8, capacity: 100 Gbps}}}
  - {name: node1, rack: rack0, nics: {compute: {count: 8, capacity: 100 Gbps}}}
timing:
  default: {prefill: {kind: linear, per_token: 1 us, base: 1 ms}, decode: {base: 2 ms, per_request: 10 us}}
defaults: {model: llama-3-70b, tp: 2, kv_capacity: 60 GB}
instances:
  - name: p
    role: prefill
    gpus: "node0:0-7"
    dp: 4
    endpoint:
      url: http://10.0.0.1:8000
      kv_events: tcp://10.0.0.1:5557
      kv_replay: tcp://10.0.0.1:5657
      bootstrap: 10.0.0.1:7100
  - {name: d, role: decode, gpus: "node1:0-3", dp: 2}
  - {name: e, role: decode, gpus: "node1:4-5", dp: 1}
  - {name: f, role: decode, gpus: "node1:6-7"}
"""


def by_name(text: str) -> dict[str, Instance]:
    return {instance.name: instance for instance in parse(text).instances}


def test_each_rank_is_an_instance_with_its_own_gpus_and_ports() -> None:
    """The URL is that of the engine. KV events are on the port plus the rank, and kvroute's connector has tp ports for
    each rank, as in vLLM."""
    found = by_name(FILE)
    assert sorted(found) == ["d_dp0", "d_dp1", "e", "f", "p_dp0", "p_dp1", "p_dp2", "p_dp3"]
    third = found["p_dp2"]
    assert (third.engine, third.server, third.rank, third.tp) == ("p", "p", 2, 2)
    assert third.gpus == ("node0/4", "node0/5")
    assert third.endpoint == Endpoint(
        url="http://10.0.0.1:8000",
        kv_events="tcp://10.0.0.1:5559",
        kv_replay="tcp://10.0.0.1:5659",
        bootstrap="10.0.0.1:7104",
    )
    assert third.kv_capacity_bytes == found["f"].kv_capacity_bytes == 60e9
    assert (found["e"].engine, found["e"].server, found["f"].server) == ("", "e", "f")


def test_the_bootstrap_server_of_mooncake_is_that_of_all_ranks() -> None:
    text = FILE.replace("bootstrap: 10.0.0.1:7100", "bootstrap: 10.0.0.1:8998\n      protocol: mooncake")
    endpoints = [instance.endpoint for instance in parse(text).instances if instance.engine == "p"]
    assert {endpoint.bootstrap for endpoint in endpoints if endpoint is not None} == {"10.0.0.1:8998"}


def test_the_written_out_file_gives_the_same_cluster() -> None:
    cluster = parse(FILE)
    again = parse(cluster.file.to_yaml())
    assert again.instances == cluster.instances
    assert "dp:" not in cluster.file.to_yaml()


def test_counts_have_ranks_too() -> None:
    head = FILE.partition("instances:")[0]
    found = parse(f"{head}instances: {{prefill: 2, decode: 1, tp: 1, dp: 4}}\n").instances
    assert len(found) == 12
    assert {instance.server for instance in found} == {"prefill0", "prefill1", "decode0"}
    assert all(len(instance.gpus) == 1 for instance in found)


def test_an_address_is_that_of_an_engine() -> None:
    cluster = parse(FILE)
    placed = with_endpoints(cluster.file, ["d=http://10.0.0.9:8000", "f=http://10.0.0.8:8000"], "vllm")
    urls = {instance.name: instance.endpoint.url for instance in placed.instances if instance.endpoint is not None}  # type: ignore[union-attr]
    assert urls["d_dp0"] == urls["d_dp1"] == "http://10.0.0.9:8000"
    assert urls["f"] == "http://10.0.0.8:8000"


LISTED = """  - {name: g0, role: decode, gpus: "node1:0-1", engine: g, rank: 0, endpoint: {url: "http://10.0.0.2:8000"}}
  - {name: g1, role: decode, gpus: "node1:2-3", engine: g, rank: 1, endpoint: {url: "http://10.0.0.2:8000"}}
"""
"""An engine whose ranks are listed one by one."""

AT = 'endpoint: {url: "http://10.0.0'


def listed(old: str = "", new: str = "") -> str:
    line = '  - {name: d, role: decode, gpus: "node1:0-3", dp: 2}\n'
    return FILE.replace(line, LISTED.replace(old, new) if old else LISTED)


def test_ranks_may_be_listed_one_by_one() -> None:
    """As for an engine over several nodes, whose ranks publish KV events on different hosts."""
    found = by_name(listed())
    assert [(found[name].server, found[name].rank) for name in ("g0", "g1")] == [("g", 0), ("g", 1)]


@pytest.mark.parametrize(
    ("text", "line", "where", "what"),
    [
        (FILE.replace("dp: 4", "dp: 3"), 12, "instances[0].gpus", "p has 8 GPUs, but dp 3 x tp 2 x pp 1 = 6"),
        (FILE.replace("dp: 4", "dp: 0"), 13, "instances[0].dp", "0 does not fit"),
        (FILE.replace("dp: 2", "dp: 2, rank: 1"), 19, "instances[1].dp", "d has `dp`, so its ranks are numbered"),
        (FILE.replace("name: f", "name: d_dp1"), 21, "instances[3].name", "the name 'd_dp1' is used twice"),
        (FILE.replace("name: f", "name: d"), 19, "instances[1]", "'d' is the name of an instance and of an engine"),
        (FILE.replace("tcp://10.0.0.1:5557", "ipc:///run/kv"), 16, "instances[0].endpoint.kv_events", "cannot share"),
        (FILE.replace("url:", "protocol: sglang\n      url:"), 15, "instances[0].endpoint.protocol", "from a header"),
        (FILE.replace("name: f,", "name: f, rank: 1,"), 21, "instances[3].rank", "`rank` requires `engine`"),
        (FILE.replace("node1:6-7", "node1:8-9"), 21, "instances[3].gpus", "node1 has 8 GPUs and no GPU 8"),
        (listed("rank: 1", "rank: 2"), 19, "instances[1].rank", "g has 2 ranks, but none is rank 1"),
        (listed("rank: 1", "rank: 0"), 20, "instances[2].rank", "g0 is rank 0 of g, too"),
        (listed(f"1, {AT}.2", f"1, {AT}.3"), 20, "instances[2].endpoint.url", "have different URLs"),
    ],
)  # fmt: skip
def test_a_fault_names_its_line_once(text: str, line: int, where: str, what: str) -> None:
    """Also a fault that all ranks of an entry have, and one of an entry behind the ranks."""
    with pytest.raises(InputErrors) as raised:
        parse(text)
    (fault,) = [str(problem) for problem in raised.value.problems]
    assert fault.startswith(f"<text>:{line}: {where}: ")
    assert what in fault


@given(st.lists(st.tuples(st.sampled_from(["node0", "node1"]), st.integers(0, 12)), min_size=1, max_size=12))
def test_gpus_are_read_as_they_are_written(gpus: list[tuple[str, int]]) -> None:
    assert gpu_list(gpu_text(gpus)) == gpus
