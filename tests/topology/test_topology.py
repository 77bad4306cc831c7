"""Laws of tiers, paths and tier bandwidths, then NetKV's cluster as the worked example."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.examples import CLUSTERS, EXAMPLES

from kvroute.control import ControlSpec
from kvroute.flows import FlowNetwork
from kvroute.sim.metrics import Summary
from kvroute.sim.run import simulate
from kvroute.sim.settings import SimSpec
from kvroute.sim.workload import generate
from kvroute.topology import (
    LLAMA_70B_TP4,
    STORAGE,
    Cluster,
    ClusterFile,
    InstanceCounts,
    InstanceEntry,
    build,
    expand,
    fat_tree,
    load,
    parse,
    superpod,
    two_datacenters,
)
from kvroute.topology.drafts.builders import H100_LLAMA_70B_TP4
from kvroute.topology.schema import Datacenter, Network, Nic, Nics, Node, Pod, Rack, Uplinks, Wan
from kvroute.types import CROSS_DATACENTER, SAME_NODE, SAME_RACK, TIER_COUNT, Endpoint, InputError
from kvroute_engine.files.units import Bandwidth, Latency

GBPS = 1e9 / 8

uplinks = st.builds(
    Uplinks,
    count=st.integers(1, 3),
    bytes_per_s=st.sampled_from([25, 50, 100]).map(lambda gbps: Bandwidth(gbps * GBPS)),
)
nics = st.builds(
    Nics,
    compute=st.builds(
        Nic,
        count=st.integers(1, 4),
        bytes_per_s=st.just(Bandwidth(100 * GBPS)),
        scope=st.sampled_from(["gpu", "instance", "server"]),
    ),
    storage=st.none() | st.just(Nic(bytes_per_s=Bandwidth(400 * GBPS))),
)


@st.composite
def cluster_files(draw: st.DrawFn) -> ClusterFile:
    """Draw uneven trees: some levels are missing, instances have 1, 2 or 4 shards, all roles are `both`."""
    sites = [Datacenter(name=f"dc{index}") for index in range(draw(st.integers(1, 3)))]
    pods, racks, nodes = [], [], []
    for site in sites:
        inner = [
            Pod(name=f"{site.name}-pod{i}", datacenter=site.name, uplinks=draw(uplinks))
            for i in range(draw(st.integers(0, 2)))
        ]
        parents = [{"pod": pod.name} for pod in inner] + [{"datacenter": site.name}]
        racks += [
            Rack(name=f"{site.name}-rack{index}", uplinks=draw(uplinks), **draw(st.sampled_from(parents)))
            for index in range(draw(st.integers(0, 3)))
        ]
        pods += inner
        parents += [{"rack": rack.name} for rack in racks if rack.name.startswith(site.name)]
        for index in range(draw(st.integers(1, 3))):
            parent = draw(st.sampled_from(parents))
            node = Node(name=f"{site.name}-n{index}", gpus=4, nics=draw(nics))
            nodes.append(msgspec.structs.replace(node, **parent))
    entries = []
    for node in nodes:
        tp = draw(st.sampled_from([1, 2, 4]))
        entries += [
            InstanceEntry(name=f"{node.name}-{g}", role="both", tp=tp, gpus=f"{node.name}:{g}-{g + tp - 1}")
            for g in range(0, 4, tp)
        ]
    wan = [
        Wan(
            source="dc0",
            target=site.name,
            bytes_per_s=Bandwidth(10 * GBPS),
            latency_s=Latency(draw(st.sampled_from([0.0, 5e-3]))),
        )
        for site in sites[1:]
    ]
    return ClusterFile(
        name="drawn",
        datacenters=sites,
        pods=pods,
        racks=racks,
        nodes=nodes,
        wan=wan,
        network=Network(
            ecmp=draw(st.sampled_from(["flow", "transfer"])), flows_per_transfer=draw(st.sampled_from(["tp", 1, 3]))
        ),
        timing={"default": H100_LLAMA_70B_TP4},
        defaults=LLAMA_70B_TP4,
        instances=entries,
    )


@st.composite
def clusters_with_pair(draw: st.DrawFn) -> tuple[Cluster, int, int, int]:
    cluster = build(draw(cluster_files()))
    ids = st.integers(0, len(cluster.instances) - 1)
    return cluster, draw(ids), draw(ids), draw(st.integers(0, 5))


@given(cluster_files())
@settings(max_examples=30, deadline=None)
def test_tiers_are_symmetric_and_ultrametric(file: ClusterFile) -> None:
    """Of three instances, no pair has a larger distance than the larger one of the other two pairs."""
    tier = build(file).tier
    assert (tier == tier.T).all()
    assert (np.diag(tier) == SAME_NODE).all()
    assert ((tier >= 0) & (tier < TIER_COUNT)).all()
    farther = np.maximum(tier[:, :, None], tier[None, :, :])
    assert (tier[:, None, :] <= farther).all()


@given(cluster_files())
@settings(max_examples=30, deadline=None)
def test_tier_is_the_nearest_shared_domain(file: ClusterFile) -> None:
    cluster = build(file)
    for i, a in enumerate(cluster.instances):
        for j, b in enumerate(cluster.instances):
            shared = [a.node == b.node, bool(a.rack) and a.rack == b.rack, bool(a.pod) and a.pod == b.pod]
            shared += [a.datacenter == b.datacenter, True]
            assert cluster.tier[i, j] == shared.index(True)


@given(clusters_with_pair())
@settings(max_examples=60, deadline=None)
def test_a_path_leads_from_the_source_to_the_target(drawn: tuple[Cluster, int, int, int]) -> None:
    """All links of a group connect the same two places, and each group starts where the previous one ends."""
    cluster, source, target, shard = drawn
    here, there = cluster.instances[source], cluster.instances[target]
    path = cluster.hops(source, target, shard)
    ends: list[tuple[str, str]] = []
    for group in path:
        assert group
        assert len(set(group)) == len(group)
        places = {(cluster.links[link].source, cluster.links[link].target) for link in group}
        assert len(places) == 1
        ends += places
    assert all(before[1] == after[0] for before, after in pairwise(ends))
    inside = cluster.tier[source, target] == SAME_NODE
    assert ends[0][0] == (here.gpus[shard % len(here.gpus)] if inside else here.node)
    assert ends[-1][1] == (there.gpus[shard % len(there.gpus)] if inside else there.node)


@given(clusters_with_pair())
@settings(max_examples=60, deadline=None)
def test_a_path_climbs_to_its_tier_and_no_higher(drawn: tuple[Cluster, int, int, int]) -> None:
    cluster, source, target, shard = drawn
    tier = int(cluster.tier[source, target])
    tiers = [cluster.links[group[0]].tier for group in cluster.hops(source, target, shard)]
    assert max(tiers) <= tier
    assert tiers[0] == tiers[-1] == min(tier, 1)
    full = all(i.rack and i.pod for i in (cluster.instances[source], cluster.instances[target]))
    if full or tier < 2:
        assert set(tiers) == ({0} if tier == 0 else set(range(1, tier + 1)))
    peak = tiers.index(max(tiers))
    assert tiers[: peak + 1] == sorted(tiers[: peak + 1])
    assert tiers[peak:] == sorted(tiers[peak:], reverse=True)


@given(clusters_with_pair())
@settings(max_examples=40, deadline=None)
def test_the_reverse_path_has_the_same_capacities_on_other_links(drawn: tuple[Cluster, int, int, int]) -> None:
    cluster, source, target, shard = drawn
    out, back = cluster.hops(source, target, shard), cluster.hops(target, source, shard)
    sizes = [[cluster.links[link].bytes_per_s for link in group] for group in out]
    assert sizes == [[cluster.links[link].bytes_per_s for link in group] for group in reversed(back)]
    assume(source != target)
    assert not {link for group in out for link in group} & {link for group in back for link in group}
    assert cluster.latency_s(source, target) == cluster.latency_s(target, source)


@given(clusters_with_pair())
@settings(max_examples=40, deadline=None)
def test_tier_bandwidth_is_at_most_that_of_the_best_draw(drawn: tuple[Cluster, int, int, int]) -> None:
    cluster, source, target, _ = drawn
    assert np.isfinite(cluster.tier_bytes_per_s).all()
    assert (cluster.tier_bytes_per_s > 0).all()
    assume(source != target)
    assume(len(cluster.shards[source]) == len(cluster.shards[target]))
    tier = int(cluster.tier[source, target])
    best = best_draw_bytes_per_s(cluster, source, target)
    assert best >= cluster.tier_bytes_per_s[tier] * (1 - 1e-9)


def best_draw_bytes_per_s(cluster: Cluster, source: int, target: int) -> float:
    """Return the rate of a single transfer when its flows share each group as evenly as possible."""
    network = FlowNetwork(cluster.capacity_bytes_per_s)
    flows = cluster.flows_per_transfer(source, target)
    for shard in range(flows):
        draw = 0 if cluster.ecmp == "transfer" else shard
        path = [group[draw % len(group)] for group in cluster.hops(source, target, shard)]
        network.start(shard, path, 1.0)
    return flows * min(network.rate(shard) for shard in range(flows))


@given(cluster_files())
@settings(max_examples=30, deadline=None)
def test_a_dumped_file_reads_back_equal(file: ClusterFile) -> None:
    again = parse(file.to_yaml())
    assert again.file == file
    assert again.links == build(file).links


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.sampled_from(["rack", "spread", "packed"]))
@settings(max_examples=30, deadline=None)
def test_shorthands_use_every_gpu_once_and_have_the_requested_bandwidth(
    pods: int, racks: int, prefill: int, placement: str
) -> None:
    counts = InstanceCounts(prefill=prefill, decode=4, placement=placement)  # type: ignore[arg-type]
    file = fat_tree(pods=pods, racks_per_pod=racks, nodes_per_rack=2, instances=counts)
    room = pods * racks * 4
    free = room - (4 if placement == "rack" else prefill)
    if free < 4:
        with pytest.raises(InputError, match="do not fit"):
            build(file)
        return
    cluster = build(file)
    gpus = [gpu for instance in cluster.instances for gpu in instance.gpus]
    assert len(gpus) == len(set(gpus)) == 4 * (prefill + 4)
    sides = {role: [i for i, x in enumerate(cluster.instances) if x.role == role] for role in ("prefill", "decode")}
    assert [len(side) for side in sides.values()] == [prefill, 4]
    racks_of = {role: [cluster.instances[i].rack for i in side] for role, side in sides.items()}
    if placement == "rack":
        assert cluster.tier[np.ix_(*sides.values())].min() >= 2
        assert len(set(racks_of["prefill"])) == 1
    if placement == "spread":
        assert len(set(racks_of["prefill"])) == min(prefill, pods * racks)


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_examples_load_and_round_trip(path: Path) -> None:
    cluster = load(path)
    assert parse(cluster.file.to_yaml()).file == cluster.file
    assert cluster.name == path.stem
    assert [i.name for i in cluster.instances] == sorted(i.name for i in cluster.instances)
    assert all(i.kv_capacity_bytes > 0 and i.timing in cluster.timing for i in cluster.instances)


def test_the_cluster_of_netkv() -> None:
    cluster = load(EXAMPLES / "fat-tree-64gpu.yaml")
    np.testing.assert_allclose(cluster.tier_bytes_per_s[:4], [450e9, 100 * GBPS, 50 * GBPS, 25 * GBPS])
    np.testing.assert_allclose(cluster.tier_latency_s[:4], [1e-6, 3e-6, 8e-6, 15e-6])
    prefill = [i for i, x in enumerate(cluster.instances) if x.role == "prefill"]
    decode = [i for i, x in enumerate(cluster.instances) if x.role == "decode"]
    assert (len(prefill), len(decode), len(cluster.instances)) == (4, 12, 16)
    tiers = cluster.tier[np.ix_(prefill, decode)]
    assert np.bincount(tiers.ravel()).tolist() == [0, 0, 16, 32], "tiers 0 and 1 are unreached (NetKV VII-B)"
    far = decode[int(np.argmax(tiers[0]))]
    assert cluster.flows_per_transfer(prefill[0], far) == 4
    path = cluster.hops(prefill[0], far, 1)
    assert [len(group) for group in path] == [1, 32, 64, 64, 32, 1]
    assert [cluster.links[group[0]].bytes_per_s / GBPS for group in path] == pytest.approx([100, 50, 25, 25, 50, 100])
    assert [len(cluster.links_of_tier(tier)) for tier in range(TIER_COUNT)] == [128, 128, 4 * 64, 2 * 128, 0]
    first = cluster.instances[prefill[0]]
    assert (first.batch_max, first.kv_capacity_bytes, first.model) == (64, 180e9, "llama-3-70b")
    assert cluster.timing["default"].prefill.per_token_s == pytest.approx(90e-6)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("scope", "ecmp", "gbps"),
    [
        ("gpu", "transfer", [400, 50, 25]),
        ("gpu", "flow", [400, 200, 100]),
        ("instance", "transfer", [100, 50, 25]),
        ("instance", "flow", [100, 100, 100]),
        ("server", "flow", [800, 200, 100]),
    ],
)
def test_derived_bandwidth_of_the_netkv_cluster(scope: str, ecmp: str, gbps: list[float]) -> None:
    """With one card for all four flows and one draw per transfer, the tiers have NetKV's 100, 50 and 25 Gbps."""
    file = fat_tree(
        pods=2,
        racks_per_pod=2,
        nodes_per_rack=2,
        nic_scope=scope,  # type: ignore[arg-type]
        rack_uplinks=(32, 50 * GBPS),
        pod_uplinks=(64, 25 * GBPS),
        instances=InstanceCounts(prefill=4, decode=12),
        network=Network(ecmp=ecmp),  # type: ignore[arg-type]
    )
    cluster = build(file)
    assert cluster.tier_bytes_per_s[1:4] / GBPS == pytest.approx(gbps)
    for tier in (1, 2, 3):
        source, target = np.argwhere(cluster.tier == tier)[0].tolist()
        assert best_draw_bytes_per_s(cluster, source, target) == pytest.approx(cluster.tier_bytes_per_s[tier])


def test_oversubscription_slows_each_uplink() -> None:
    counts = InstanceCounts(prefill=4, decode=12)
    file = fat_tree(pods=2, racks_per_pod=2, nodes_per_rack=2, oversubscription=(2, 4), instances=counts)
    flat = expand(file)
    assert [(rack.uplinks.count, rack.uplinks.bytes_per_s / GBPS) for rack in flat.racks if rack.uplinks] == [
        (16, 50)
    ] * 4
    assert [(pod.uplinks.count, pod.uplinks.bytes_per_s / GBPS) for pod in flat.pods if pod.uplinks] == [(32, 25)] * 2


def _with_cards(file: ClusterFile, capacity: float = 1.0, efficiency: float = 1.0) -> ClusterFile:
    """Return the file with other cards in all nodes: `capacity` is a factor."""

    def card(nic: Nic) -> Nic:
        return msgspec.structs.replace(nic, bytes_per_s=Bandwidth(nic.bytes_per_s * capacity), efficiency=efficiency)

    nodes = [
        msgspec.structs.replace(
            node,
            nics=Nics(
                compute=node.nics.compute and card(node.nics.compute),
                storage=node.nics.storage and card(node.nics.storage),
            ),
        )
        for node in file.nodes
    ]
    return msgspec.structs.replace(file, nodes=nodes)


@given(cluster_files(), st.sampled_from([1.0, 0.5, 0.25]))
@settings(max_examples=100, deadline=None)
def test_efficiency_of_cards_is_capacity_of_cards(file: ClusterFile, share: float) -> None:
    """A share of the capacity gives the same links and tiers as cards of that capacity; other links do not change."""
    whole, less = build(file), build(_with_cards(file, efficiency=share))
    smaller = build(_with_cards(file, capacity=share))
    assert np.array_equal(less.capacity_bytes_per_s, smaller.capacity_bytes_per_s)
    assert np.array_equal(less.tier_bytes_per_s, smaller.tier_bytes_per_s)
    card = np.array([link.tier in (SAME_RACK, STORAGE) for link in whole.links])
    assert np.array_equal(less.capacity_bytes_per_s[card], whole.capacity_bytes_per_s[card] * share)
    assert np.array_equal(less.capacity_bytes_per_s[~card], whole.capacity_bytes_per_s[~card])


def test_simulated_transfers_see_the_efficiency() -> None:
    """Half the efficiency, half the capacity: the same results, and slower transfers than with whole cards."""
    file = expand(load(EXAMPLES / "fat-tree-64gpu.yaml").file)
    requests = generate(40, seed=2)
    whole, less, smaller = (
        _without_wall_time(simulate(build(cluster_file), requests, ControlSpec(decode="foresight"), SimSpec()).summary)
        for cluster_file in (file, _with_cards(file, efficiency=0.05), _with_cards(file, capacity=0.05))
    )
    assert less == smaller
    slow_s, fast_s = less.transfer_s.mean, whole.transfer_s.mean
    assert slow_s is not None
    assert fast_s is not None
    assert slow_s > 2 * fast_s


def _without_wall_time(summary: Summary) -> Summary:
    """Return the summary without the times of the simulating machine."""
    return msgspec.structs.replace(summary, decision_s=None, wall_s=0.0, cpu_s=0.0)


def test_efficiency_of_eight_cards() -> None:
    """Eight cards of 400 Gbps that reach 80 % carry 2.56 Tbps; a superpod's `efficiency` is that of its cards."""
    text = (
        (EXAMPLES / "vllm-tp8.yaml")
        .read_text()
        .replace("capacity: 400 Gbps}}}", "capacity: 400 Gbps, efficiency: 0.8}}}")
    )
    assert parse(text).tier_bytes_per_s[SAME_RACK] / GBPS == pytest.approx(0.8 * 8 * 400)
    counts = InstanceCounts(prefill=1, decode=1, tp=8)
    file = superpod(nodes_per_unit=2, instances=counts)
    assert file.fabric is not None
    slower = build(msgspec.structs.replace(file, fabric=msgspec.structs.replace(file.fabric, efficiency=0.5)))
    assert slower.tier_bytes_per_s[SAME_RACK] == build(file).tier_bytes_per_s[SAME_RACK] / 2
    [(out, _)] = slower.storage_links(0)
    assert slower.links[out].bytes_per_s == 400 * GBPS


def test_superpod_has_a_nic_per_gpu_and_one_for_storage() -> None:
    counts = InstanceCounts(prefill=2, decode=2, tp=8)
    cluster = build(superpod(units=2, nodes_per_unit=2, instances=counts))
    assert len(cluster.links_of_tier(1)) == 4 * 8 * 2
    assert len(cluster.links_of_tier(STORAGE)) == 4 * 2
    ((out, into),) = cluster.storage_links(0)
    assert cluster.links[out].source == cluster.links[into].target == cluster.instances[0].node
    used = {link for group in cluster.hops(0, 3, 0) for link in group}
    assert not used & set(cluster.links_of_tier(STORAGE))


def test_two_datacenters_share_one_slow_link() -> None:
    cluster = build(two_datacenters(prefill_nodes=2, local_prefill_nodes=1, decode_nodes=3, wan_latency_s=5e-3))
    source, target = cluster.index("prefill-site-prefill0"), cluster.index("local-site-decode1")
    assert cluster.tier[source, target] == CROSS_DATACENTER
    assert cluster.latency_s(source, target) == pytest.approx(5e-3 + 15e-6)
    tiers = [cluster.links[group[0]].tier for group in cluster.hops(source, target, 0)]
    assert tiers == [1, 2, 4, 2, 1]
    assert cluster.tier_bytes_per_s[CROSS_DATACENTER] == pytest.approx(100 * GBPS)


def test_a_path_may_pass_through_a_third_datacenter() -> None:
    """The faster path has two links; the direct one is slower."""
    file = two_datacenters(prefill_nodes=1, local_prefill_nodes=0, decode_nodes=1, wan_latency_s=50e-3)
    detour = [
        Wan(source=source, target=target, bytes_per_s=Bandwidth(40 * GBPS), latency_s=Latency(10e-3))
        for source, target in (("prefill-site", "hub"), ("hub", "local-site"))
    ]
    sites = [*file.datacenters, Datacenter(name="hub")]
    cluster = build(msgspec.structs.replace(file, datacenters=sites, wan=[*file.wan, *detour]))
    source, target = cluster.index("prefill-site-prefill0"), cluster.index("local-site-decode0")
    across = [cluster.links[group[0]] for group in cluster.hops(source, target, 0) if cluster.links[group[0]].tier == 4]
    assert [(link.source, link.target) for link in across] == [("prefill-site", "hub"), ("hub", "local-site")]
    assert cluster.latency_s(source, target) == pytest.approx(20e-3 + 15e-6)


def test_an_instance_may_span_nodes() -> None:
    """Sixteen shards are on two servers: the second half sends from the second server."""
    counts = InstanceCounts(prefill=1, decode=1, tp=8, pp=2)
    cluster = build(fat_tree(pods=1, racks_per_pod=2, nodes_per_rack=2, instances=counts))
    source, target = cluster.index("prefill0"), cluster.index("decode0")
    assert cluster.instances[source].gpus[8] == "node1/0"
    assert cluster.flows_per_transfer(source, target) == 16
    first = [cluster.links[cluster.hops(source, target, shard)[0][0]].source for shard in (0, 7, 8, 15)]
    assert first == ["node0", "node0", "node1", "node1"]


def test_a_cluster_of_ten_thousand_instances() -> None:
    counts = InstanceCounts(prefill=2500, decode=7500, placement="spread")
    cluster = build(fat_tree(pods=10, racks_per_pod=25, nodes_per_rack=20, instances=counts))
    assert cluster.tier.shape == (10_000, 10_000)
    assert cluster.tier.dtype == np.int8
    assert len(cluster.hops(9_999, 0, 3)) in (2, 4, 6)


def test_an_unknown_instance_is_rejected() -> None:
    with pytest.raises(InputError, match="no instance 'unknown'"):
        load(EXAMPLES / "small.yaml").index("unknown")


def test_the_documented_sections_make_valid_files() -> None:
    text = (EXAMPLES.parent / "docs" / "cluster-file.md").read_text(encoding="utf-8")
    sections = re.findall(r"```yaml\n(?!# yaml-language-server)(.*?)```", text, re.S)
    name, lists, cards, wan, tree, pod, network, storage, timing, steps, instances, counts, live, *gateway = sections
    defaults = "defaults: {model: llama-3-70b, tp: 4, kv_capacity: 180 GB}\n"
    nodes = "".join(f"  - {{name: node{n}, rack: rack0, {cards.strip()}}}\n" for n in (1, 2))
    for section in (tree, pod):
        assert len(parse(name + section + network + timing + defaults + counts).instances) == 16
    for times in (timing, steps):
        assert len(parse(name + lists + nodes + network + storage + times + instances).instances) == 3
    decode, prefill = parse(name + lists + timing + defaults + live).instances
    assert (decode.protocol, prefill.protocol) == ("sglang", "sglang")
    assert prefill.endpoint == Endpoint(
        url="http://10.0.0.1:8000",
        protocol="sglang",
        bootstrap="10.0.0.1:8998",
        kv_events="tcp://10.0.0.1:5557",
        kv_replay="tcp://10.0.0.1:5558",
    )
    assert all(len(parse(name + tree + timing + defaults + counts + section).instances) == 16 for section in gateway)
    sites = lists.replace("{name: dc0}", "{name: dc0}, {name: dc1}").replace(
        "{name: pod0,", "{name: pod0, datacenter: dc0,"
    )
    nodes = nodes.replace("rack: rack0", "datacenter: dc1")
    assert parse(name + sites + nodes + wan + timing + instances).tier.max() == CROSS_DATACENTER
