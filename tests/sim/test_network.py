"""KV transfers on the fabric: the time of a single one, the effect of other traffic, and the operator's telemetry."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.sim.network.capacity import LinkCapacities
from kvroute.sim.network.transfers import Fabric
from kvroute.sim.settings import Background
from kvroute.topology import Cluster, parse
from kvroute.types import SAME_NODE, TIER_COUNT

TEXT = """
name: fabric
pods: [{name: pod0, uplinks: {count: 2, capacity: 25 Gbps}}, {name: pod1, uplinks: {count: 2, capacity: 25 Gbps}}]
racks:
  - {name: rack0, pod: pod0, uplinks: {count: 3, capacity: 50 Gbps}}
  - {name: rack1, pod: pod0, uplinks: {count: 3, capacity: 50 Gbps}}
  - {name: rack2, pod: pod1, uplinks: {count: 3, capacity: 50 Gbps}}
nodes:
  - {name: node0, rack: rack0, gpus: 8, nics: {compute: {count: 8, capacity: 100 Gbps}}}
  - {name: node1, rack: rack0, gpus: 8, nics: {compute: {count: 8, capacity: 100 Gbps}}}
  - {name: node2, rack: rack1, gpus: 8, nics: {compute: {count: 8, capacity: 100 Gbps}}}
  - {name: node3, rack: rack2, gpus: 8, nics: {compute: {count: 8, capacity: 100 Gbps}}}
network: {latency: {node: 1 us, rack: 3 us, pod: 8 us, datacenter: 15 us}, ecmp: ECMP}
timing: {default: {prefill: {kind: linear, per_token: 90 us}, decode: {base: 12 ms}}}
defaults: {model: llama-3-70b, tp: 4, kv_capacity: 180 GB}
instances:
  - {name: p, role: prefill, gpus: "node0:0-3"}
  - {name: d0, role: decode, gpus: "node0:4-7"}
  - {name: d1, role: decode, gpus: "node1:0-3"}
  - {name: d2, role: decode, gpus: "node2:0-3"}
  - {name: d3, role: decode, gpus: "node3:0-3"}
"""
CLUSTERS = {ecmp: parse(TEXT.replace("ECMP", ecmp)) for ecmp in ("flow", "transfer")}
REQUESTS = 20
some = settings(max_examples=40, deadline=None)  # compiling the flow solver takes a second in the first test

ecmps = st.sampled_from(sorted(CLUSTERS))
shares = st.sampled_from([0.0, 0.25, 0.5, 0.9])


def fabric(cluster: Cluster, background: Background | None = None, seed: int = 0) -> Fabric:
    """Return a fabric with idle links."""
    return Fabric(cluster, LinkCapacities(cluster, background or Background(), seed), seed)


def transfer_s(cluster: Cluster, links: Fabric, target: str, nbytes: float, request: int = 0) -> float:
    """Return the time of a single transfer until all of it has arrived."""
    links.send(request, cluster.index("p"), cluster.index(target), nbytes)
    while True:
        finish_s = links.next_finish_s()
        for transfer in links.advance(finish_s):
            assert transfer.request == request
            return finish_s + transfer.latency_s


def expected_s(cluster: Cluster, links: Fabric, target: str, nbytes: float) -> float:
    """Return the bytes over the worst link's share, by counting the flows on each link, plus latency.

    The drawn links are identified by the bytes that they carried.
    """
    per_flow = nbytes / 4
    flows = np.rint(links.network.link_bytes / per_flow)
    wire_s = float((flows * per_flow / cluster.capacity_bytes_per_s).max())
    return wire_s + cluster.latency_s(cluster.index("p"), cluster.index(target))


@some
@given(ecmps, st.sampled_from(["d0", "d1", "d2", "d3"]), st.floats(1.0, 1e12), st.integers(0, 9), st.integers(0, 19))
def test_a_single_transfer_takes_bytes_over_the_slowest_link_plus_latency(
    ecmp: str, target: str, nbytes: float, seed: int, request: int
) -> None:
    """Uplinks are drawn at random, for all flows together or for each separately."""
    cluster = CLUSTERS[ecmp]
    links = fabric(cluster, seed=seed)
    taken_s = transfer_s(cluster, links, target, nbytes, request)
    assert taken_s == pytest.approx(expected_s(cluster, links, target, nbytes), rel=1e-9)
    hops = len(cluster.hops(cluster.index("p"), cluster.index(target), 0))
    assert links.network.link_bytes.sum() == pytest.approx(nbytes * hops)


@pytest.mark.parametrize(
    ("target", "bytes_per_s", "latency_s"),
    [("d0", 4 * 450e9, 1e-6), ("d1", 4 * 12.5e9, 3e-6), ("d2", 6.25e9, 8e-6), ("d3", 3.125e9, 15e-6)],
)
def test_transfer_times_in_every_tier_by_hand(target: str, bytes_per_s: float, latency_s: float) -> None:
    """Four NVLinks, four NICs, one 50 Gbps and one 25 Gbps uplink, where a transfer draws one uplink for all its
    flows."""
    cluster = CLUSTERS["transfer"]
    assert transfer_s(cluster, fabric(cluster), target, 5e9) == pytest.approx(5e9 / bytes_per_s + latency_s, rel=1e-12)


def test_flows_with_separate_draws_are_spread() -> None:
    """Four flows use two pod uplinks: over the requests, from all on one (4 units of time) to two on each (2)."""
    cluster = CLUSTERS["flow"]
    unit_s = 1.25e9 / 3.125e9
    times = [transfer_s(cluster, fabric(cluster), "d3", 5e9, request) - 15e-6 for request in range(REQUESTS)]
    assert {round(time_s / unit_s) for time_s in times} == {2, 3, 4}


def test_each_hop_has_its_own_draw() -> None:
    """Three rack uplinks and two pod uplinks give six pairs, and forty requests cover them all."""
    cluster = CLUSTERS["transfer"]
    up = cluster.hops(cluster.index("p"), cluster.index("d3"), 0)[1:3]
    assert [len(group) for group in up] == [3, 2]
    met = set()
    for seed in range(2):
        for request in range(REQUESTS):
            links = fabric(cluster, seed=seed)
            links.send(request, cluster.index("p"), cluster.index("d3"), 1e9)
            busy = set(np.flatnonzero(links.network.link_rate_bytes_per_s).tolist())
            met.add(tuple(link for group in up for link in group if link in busy))
    assert met == {(rack, pod) for rack in up[0] for pod in up[1]}


@some
@given(ecmps, st.sampled_from(["d1", "d2", "d3"]), shares, st.integers(0, 5))
def test_background_traffic_slows_transfers_by_its_share(ecmp: str, target: str, share: float, seed: int) -> None:
    """A transfer takes 1 / (1 - c) times as long on the network; NVLink inside a node has no background traffic."""
    cluster = CLUSTERS[ecmp]
    latency_s = cluster.latency_s(cluster.index("p"), cluster.index(target))
    idle_s = transfer_s(cluster, fabric(cluster, seed=seed), target, 5e9) - latency_s
    busy_s = transfer_s(cluster, fabric(cluster, Background.uniform(share), seed), target, 5e9) - latency_s
    assert busy_s == pytest.approx(idle_s / (1 - share), rel=1e-9)
    inside = [transfer_s(cluster, fabric(cluster, Background.uniform(part)), "d0", 5e9) for part in (0.0, share)]
    assert inside[0] == inside[1]


def test_a_transfer_without_bytes_ends_after_the_latency() -> None:
    """The target has the whole prompt cached."""
    cluster = CLUSTERS["flow"]
    assert transfer_s(cluster, fabric(cluster), "d2", 0.0) == 8e-6


@some
@given(ecmps, shares, st.booleans(), st.sampled_from(["d0", "d1", "d2", "d3"]))
def test_telemetry_includes_own_traffic_only_if_configured(
    ecmp: str, share: float, separates: bool, target: str
) -> None:
    """Per tier, own traffic is added as its rates over the tier's whole capacity; the links' averages give the same."""
    cluster = CLUSTERS[ecmp]
    links = fabric(cluster, Background.uniform(share))
    quiet = (0.0, share, share, share, share)
    assert links.congestion(separates) == quiet
    links.send(0, cluster.index("p"), cluster.index(target), 5e9)
    rates, whole = links.network.link_rate_bytes_per_s, cluster.capacity_bytes_per_s
    own = np.zeros(TIER_COUNT)
    for tier in range(TIER_COUNT):
        members = list(cluster.links_of_tier(tier))
        own[tier] = rates[members].sum() / whole[members].sum() if members else 0.0
    assert own[SAME_NODE if target == "d0" else SAME_NODE + 1] > 0
    assert links.own_share() == pytest.approx(own)
    expected = np.array(quiet) if separates else np.minimum(np.array(quiet) + own, 0.99)
    assert links.congestion(separates) == pytest.approx(expected.tolist())
    by_link = np.array(links.utilisation(separates))
    assert by_link.max() <= 0.99
    for tier in range(TIER_COUNT):
        members = list(cluster.links_of_tier(tier))
        if members and by_link[members].max() < 0.99:
            assert np.average(by_link[members], weights=whole[members]) == pytest.approx(expected[tier])


def test_a_burst_slows_transfers_in_flight() -> None:
    """Half of a transfer runs at 80 % of 50 Gbps, the other half at 30 %."""
    cluster = CLUSTERS["transfer"]
    background = Background(per_tier=(0, 0.2, 0.2, 0.2, 0.2), burst_per_tier=(0, 0, 0.5, 0.5, 0), burst_every_s=2.0)
    links = fabric(cluster, background)
    links.send(0, cluster.index("p"), cluster.index("d2"), 10e9)
    links.advance(1.0)
    links.change()
    assert links.next_finish_s() == pytest.approx(1.0 + 5e9 / (6.25e9 * 0.3))
