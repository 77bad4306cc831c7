"""All-reduce schemes: bytes per link in closed form, times on an idle and on a shared network, and wrong groups."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.collectives import (
    Aggregation,
    AllReduce,
    CollectiveFlow,
    all_reduce,
    all_seconds,
    bound_s,
    link_bytes,
    seconds,
)
from kvroute.topology import Cluster, parse
from kvroute.topology.gpu_paths import GpuPaths
from kvroute.topology.place import Shards
from kvroute.types import InputError
from kvroute_engine.agent.schemes import SCHEMES, Scheme

FP16 = Aggregation(frozenset({"rack", "pod"}), slots=100_000, wire="fp16")


def cluster_of(servers: int, gpus: int, *, racks: int = 1, nics: str = "", nvlink: str = "240 GB/s") -> Cluster:
    """Return racks of equal servers in one pod, by default with one NIC of 90 Gbps per GPU."""
    names = [(f"s{rack}-{server}", f"r{rack}") for rack in range(racks) for server in range(servers)]
    card = nics or f"{{count: {gpus}, capacity: 90 Gbps}}"
    nodes = "\n".join(
        f"  - {{name: {name}, rack: {rack}, gpus: {gpus}, nvlink: {nvlink}, nics: {{compute: {card}}}}}"
        for name, rack in names
    )
    uplinks = f"uplinks: {{count: {servers * gpus}, capacity: 90 Gbps}}"
    rack_lines = ", ".join(f"{{name: r{rack}, pod: p0, {uplinks}}}" for rack in range(racks))
    return parse(f"""
name: groups
pods: [{{name: p0}}]
racks: [{rack_lines}]
nodes:
{nodes}
network: {{latency: {{node: 2 us, rack: 5 us, pod: 8 us}}}}
timing: {{default: {{prefill: {{kind: linear, per_token: 1 us}}, decode: {{base: 1 ms}}}}}}
defaults: {{model: llama-3-70b, kv_capacity: 10 GB}}
instances: [{{name: i0, role: both, gpus: "s0-0:0"}}]
""")


def everyone(cluster: Cluster) -> Shards:
    return tuple((node, gpu) for node, server in enumerate(cluster.places.nodes) for gpu in range(server.gpus))


shapes = st.tuples(st.integers(2, 5), st.integers(1, 5))
sizes = st.floats(1e3, 1e9)


def by_kind(cluster: Cluster, loads: dict[int, float]) -> dict[str, list[float]]:
    """Return the bytes of the links that carry any, by kind: NVLink, NIC or uplink."""
    found: dict[str, list[float]] = {}
    for link, nbytes in loads.items():
        kind = {0: "nvlink", 1: "nic"}.get(cluster.links[link].tier, "uplink")
        found.setdefault(kind, []).append(nbytes)
    return found


def closed_form(scheme: Scheme, servers: int, gpus: int, nbytes: float) -> dict[str, tuple[int, float]]:
    """Return the number of links of each kind, and the bytes on each, of equal servers with a NIC per GPU."""
    count = servers * gpus
    around = 2 * (count - 1) / count * nbytes
    shard = 2 * (servers - 1) / servers * nbytes / gpus
    inside = {"nvlink": (2 * count, 2 * (gpus - 1) / gpus * nbytes)} if gpus > 1 else {}
    if scheme == "ring":
        hops = {"nvlink": (2 * servers * (gpus - 1), around)} if gpus > 1 else {}
        return {**hops, "nic": (2 * servers, around)}
    if scheme == "multi-rail-ring":
        hops = {"nvlink": (2 * count, around * (gpus - 1) / gpus)} if gpus > 1 else {}
        return {**hops, "nic": (2 * count, around / gpus)}
    if scheme == "hierarchical-ring":
        return {**inside, "nic": (2 * count, shard)}
    if scheme == "ina":
        return {"nic": (2 * count, nbytes)}
    return {**inside, "nic": (2 * count, nbytes / gpus)}


@given(st.sampled_from(SCHEMES), shapes, sizes)
def test_the_bytes_of_every_link_equal_the_closed_form(scheme: Scheme, shape: tuple[int, int], nbytes: float) -> None:
    cluster = cluster_of(*shape)
    collective = all_reduce(scheme, AllReduce(everyone(cluster), nbytes), cluster, FP16)
    assert collective is not None
    found = by_kind(cluster, link_bytes(collective))
    expected = closed_form(scheme, *shape, nbytes)
    assert {kind: len(values) for kind, values in found.items()} == {kind: n for kind, (n, _) in expected.items()}
    for kind, (_, wanted) in expected.items():
        assert found[kind] == pytest.approx([wanted] * len(found[kind]))


@st.composite
def groups(draw: st.DrawFn) -> tuple[Cluster, Shards]:
    """Draw up to 3 racks of up to 3 servers, NICs of any scope, and a group of any of their GPUs."""
    gpus = draw(st.integers(1, 4))
    cards = draw(st.sampled_from([f"count: {gpus}", "count: 1, scope: server", "count: 1"]))
    nics = f"{{{cards}, capacity: {draw(st.sampled_from(['25 Gbps', '100 Gbps']))}}}"
    cluster = cluster_of(draw(st.integers(1, 3)), gpus, racks=draw(st.integers(1, 3)), nics=nics)
    members = draw(st.sets(st.sampled_from(everyone(cluster)), min_size=min(2, len(everyone(cluster)))))
    return cluster, tuple(draw(st.permutations(sorted(members))))


@given(groups(), sizes, st.sampled_from([1.0, 1.5, 10.0]), st.data())
def test_more_bandwidth_is_never_slower(
    drawn: tuple[Cluster, Shards], nbytes: float, factor: float, data: st.DataObject
) -> None:
    cluster, gpus = drawn
    if len(gpus) < 2:
        return
    capacity = cluster.capacity_bytes_per_s
    faster = capacity.copy()
    faster[data.draw(st.integers(0, len(capacity) - 1))] *= factor
    for scheme in SCHEMES:
        collective = all_reduce(scheme, AllReduce(gpus, nbytes), cluster, FP16)
        if collective is not None:
            assert seconds(collective, faster) <= seconds(collective, capacity) * (1 + 1e-9)


@given(groups(), sizes)
def test_the_time_is_at_least_the_bound_and_the_sum_of_a_group_crosses_every_server(
    drawn: tuple[Cluster, Shards], nbytes: float
) -> None:
    """A link never carries more than its capacity, so the bound of its bytes holds. Every server must send at least
    one copy of its sum, or its share of a ring's, and receive as much."""
    cluster, gpus = drawn
    if len(gpus) < 2:
        return
    nodes = Counter(node for node, _ in gpus)
    for scheme in SCHEMES:
        collective = all_reduce(scheme, AllReduce(gpus, nbytes), cluster, FP16)
        if collective is None:
            assert scheme.endswith("ina")
            assert len(nodes) == 1
            continue
        time_s = seconds(collective, cluster.capacity_bytes_per_s)
        assert time_s >= bound_s(collective, cluster.capacity_bytes_per_s) * (1 - 1e-9)
        if len(nodes) > 1:
            loads = link_bytes(collective)
            for node in nodes:
                for direction in (0, 1):
                    sent = sum(loads.get(pair[direction], 0.0) for pair in cluster.cables.nic[node])
                    assert sent >= nbytes * (1 - 1e-9)


@given(shapes, sizes)
def test_hierarchical_schemes_are_never_slower_than_flat_ones_where_nvlink_is_faster(
    shape: tuple[int, int], nbytes: float
) -> None:
    """Apart from latency: their bytes on each NIC are at most those of the flat scheme."""
    cluster = cluster_of(*shape, nvlink="900 GB/s")
    tensor = AllReduce(everyone(cluster), nbytes)

    def bytes_s(scheme: Scheme) -> float:
        collective = all_reduce(scheme, tensor, cluster, FP16)
        assert collective is not None
        return seconds(collective, cluster.capacity_bytes_per_s) - collective.latency_s

    assert bytes_s("hierarchical-ina") <= bytes_s("ina") * (1 + 1e-9)
    assert bytes_s("hierarchical-ring") <= bytes_s("multi-rail-ring") * (1 + 1e-9)
    assert bytes_s("multi-rail-ring") <= bytes_s("ring") * (1 + 1e-9)


@pytest.mark.parametrize(
    ("shape", "expected_us"),
    [
        ((2, 4), [1283, 350, 200, 722, 201]),
        ((4, 4), [1416, 416, 309, 722, 201]),
        ((8, 8), [1699, 474, 254, 722, 128]),
        ((4, 1), [1097, 1097, 1097, 722, 722]),
    ],
)
def test_worked_examples_of_8_mb(shape: tuple[int, int], expected_us: list[int]) -> None:
    """8 servers of 8 GPUs, flat aggregation: 8 MB / 11.25 GB/s + 2 * 5 us + 1 us = 722 us."""
    cluster = cluster_of(*shape)
    times = all_seconds(AllReduce(everyone(cluster), 8e6), cluster, FP16)
    assert [round(time_s * 1e6) for time_s in times.values()] == expected_us
    assert tuple(times) == SCHEMES


def test_elements_of_four_bytes_double_the_bytes_of_half_precision() -> None:
    cluster = cluster_of(4, 1)
    tensor = AllReduce(everyone(cluster), 8e6, element_bytes=2)
    collective = all_reduce("ina", tensor, cluster, Aggregation(wire="int32"))
    assert collective is not None
    assert set(link_bytes(collective).values()) == {16e6}
    full = all_reduce("ina", AllReduce(everyone(cluster), 8e6, element_bytes=4), cluster, Aggregation(wire="int32"))
    assert full is not None
    assert set(link_bytes(full).values()) == {8e6}


def test_few_slots_limit_the_rate() -> None:
    """32 packets of 1,024 bytes per round trip of 2 * 5 us + 1 us: 2.98 GB/s in place of 11.25 GB/s."""
    cluster = cluster_of(4, 1)
    tensor = AllReduce(everyone(cluster), 8e6)
    few = all_seconds(tensor, cluster, Aggregation(slots=32, wire="fp16"), ["ina"])["ina"]
    assert few == pytest.approx(8e6 / (32 * 1024 / 11e-6) + 11e-6)


def test_rack_switches_send_one_sum_up() -> None:
    """Two racks of three workers: the rack uplinks carry one copy if rack switches aggregate, otherwise three."""
    cluster = cluster_of(3, 1, racks=2)
    tensor = AllReduce(everyone(cluster), 1e6)
    for levels, copies in ((frozenset({"rack", "pod"}), 1), (frozenset({"pod"}), 3)):
        collective = all_reduce("ina", tensor, cluster, Aggregation(levels, wire="fp16"))  # type: ignore[arg-type]
        assert collective is not None
        found = by_kind(cluster, link_bytes(collective))
        assert found["nic"] == [1e6] * 12
        assert sum(found["uplink"]) == 2 * 2 * copies * 1e6
    assert all_reduce("ina", tensor, cluster, Aggregation(frozenset({"rack"}))) is None


def test_a_transfer_on_the_same_nic_takes_half_of_it() -> None:
    """A KV transfer of twice the bytes leaves by the NIC of the first worker, which then has half its rate for them."""
    cluster = cluster_of(4, 1)
    gpus = everyone(cluster)
    collective = all_reduce("ina", AllReduce(gpus, 8e6), cluster, FP16)
    assert collective is not None
    transfer = CollectiveFlow(GpuPaths(cluster, gpus).up(gpus[0], 1), 16e6)
    capacity = cluster.capacity_bytes_per_s
    alone_s, beside_s = seconds(collective, capacity), seconds(collective, capacity, [transfer])
    assert beside_s - collective.latency_s == pytest.approx(2 * (alone_s - collective.latency_s))


def test_one_server_needs_no_network() -> None:
    cluster = cluster_of(2, 4)
    tensor = AllReduce(tuple((0, gpu) for gpu in range(4)), 1e6)
    times = all_seconds(tensor, cluster, FP16)
    assert set(times) == {"ring", "multi-rail-ring", "hierarchical-ring"}
    assert list(times.values()) == pytest.approx([2 * 3 / 4 * 1e6 / 240e9 + 2 * 3 * 2e-6] * 3)


def no_uplinks() -> Cluster:
    text = """
name: apart
racks: [{name: r0}, {name: r1}]
nodes:
  - {name: a, rack: r0, gpus: 2, nics: {compute: {capacity: 90 Gbps}}}
  - {name: b, rack: r1, gpus: 2, nics: {compute: {capacity: 90 Gbps}}}
timing: {default: {prefill: {kind: linear, per_token: 1 us}, decode: {base: 1 ms}}}
defaults: {model: llama-3-70b, kv_capacity: 10 GB}
instances: [{name: i0, role: both, gpus: "a:0"}]
"""
    return parse(text)


@pytest.mark.parametrize(
    ("scheme", "gpus", "problem"),
    [
        ("tree", ((0, 0), (0, 1)), "'tree' is not an all-reduce scheme"),
        ("ring", ((0, 0),), "fewer than two GPUs"),
        ("ring", ((0, 0), (0, 0)), "one GPU twice"),
        ("ring", ((0, 0), (1, 0)), "has no network to the other nodes"),
    ],
)
def test_wrong_groups(scheme: Scheme, gpus: Shards, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        all_reduce(scheme, AllReduce(gpus, 1e6), no_uplinks())


@pytest.mark.parametrize(
    "wrong", [{"slots": 0}, {"packet_bytes": 0}, {"switch_s": -1.0}, {"switch_s": math.inf}, {"fallback_share": 1.5}]
)
def test_wrong_aggregation(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match="aggregation"):
        Aggregation(**wrong)  # type: ignore[arg-type]


shares = st.floats(0.0, 1.0)


@given(st.sampled_from(["ina", "hierarchical-ina"]), shapes, sizes, shares)
def test_a_fallback_loads_the_nic_of_the_worker_that_sums(
    scheme: Scheme, shape: tuple[int, int], nbytes: float, share: float
) -> None:
    """Each NIC carries the tensor as before, that of the summing worker 1 - f + (W - 1) f times as much."""
    servers, gpus = shape
    cluster = cluster_of(servers, gpus)
    collective = all_reduce(scheme, AllReduce(everyone(cluster), nbytes), cluster, with_fallback(share))
    assert collective is not None
    each, workers = (nbytes, servers * gpus) if scheme == "ina" else (nbytes / gpus, servers)
    loads = link_bytes(collective)
    for server in range(servers):
        for gpu, pair in enumerate(cluster.cables.nic[server]):
            sums = server == 0 and (gpu == 0 or scheme == "hierarchical-ina")
            expected = (1 - share + (workers - 1) * share) * each if sums else each
            assert [loads.get(link, 0.0) for link in pair] == pytest.approx([expected] * 2)


def with_fallback(share: float) -> Aggregation:
    return Aggregation(frozenset({"rack", "pod"}), slots=100_000, wire="fp16", fallback_share=share)


@given(groups(), sizes, shares, shares)
def test_more_fallback_is_never_faster_where_slots_suffice(
    drawn: tuple[Cluster, Shards], nbytes: float, one: float, other: float
) -> None:
    """The bound of the links is that of the summing NIC; a rate that slots limit can profit from a fallback."""
    cluster, gpus = drawn
    if len(gpus) < 2:
        return
    low, high = sorted((one, other))
    tensor, capacity = AllReduce(gpus, nbytes), cluster.capacity_bytes_per_s
    for scheme in ("ina", "hierarchical-ina"):
        less = all_reduce(scheme, tensor, cluster, with_fallback(low))
        more = all_reduce(scheme, tensor, cluster, with_fallback(high))
        if less is not None and more is not None:
            assert seconds(more, capacity) >= seconds(less, capacity) * (1 - 1e-6)


@given(st.sampled_from(["ina", "hierarchical-ina"]), shapes, sizes)
def test_no_fallback_is_plain_aggregation(scheme: Scheme, shape: tuple[int, int], nbytes: float) -> None:
    cluster = cluster_of(*shape)
    tensor = AllReduce(everyone(cluster), nbytes)
    assert all_reduce(scheme, tensor, cluster, with_fallback(0.0)) == all_reduce(scheme, tensor, cluster, FP16)


def test_worked_example_of_a_fallback() -> None:
    """Four servers of one GPU, 8 MB, a quarter without slots: the summing NIC carries 0.75 + 3 * 0.25 = 1.5 times."""
    cluster = cluster_of(4, 1)
    time_s = all_seconds(AllReduce(everyone(cluster), 8e6), cluster, with_fallback(0.25), ["ina"])["ina"]
    assert time_s == pytest.approx(1.5 * 8e6 / 11.25e9 + 11e-6)
