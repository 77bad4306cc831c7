"""Groups of a cluster file: names, schemes, slots and ports."""

from __future__ import annotations

import pytest
from tests.collectives.scheduler.agent_clusters import TIMING, cluster_of

from kvroute.collectives import Aggregation, AllReduce, all_seconds
from kvroute.collectives.scheduler.groups import (
    groups_of,
    groups_on,
    nvlink_links,
    port_links,
    switch_names,
)
from kvroute.topology import load, parse
from kvroute.types import InputError


def test_a_group_over_servers_has_all_schemes_that_ranks_can_choose() -> None:
    """Slots: one pool for the whole tensor, or one for each NIC of a server."""
    [group] = groups_of(cluster_of(slots=100))
    assert (group.name, group.nodes) == ("decode-0", ("a0", "a1", "a2"))
    assert {choice.option.name: dict(choice.slots) for choice in group.choices} == {
        "ring": {},
        "hierarchical-ring": {},
        "ina": {"access": 100},
        "hierarchical-ina": {"access": 400},
    }


def test_without_aggregation_there_are_rings_only() -> None:
    [group] = groups_of(cluster_of(aggregation=False))
    assert [choice.option.name for choice in group.choices] == ["ring", "hierarchical-ring"]


def test_the_time_of_a_lonely_tensor_is_that_of_the_cost_model() -> None:
    """Busiest link, latency and limit of the slots together; 4 slots of 1 kB limit aggregation."""
    cluster = cluster_of(slots=4)
    aggregation = Aggregation.of(cluster.file.collectives.aggregation)
    choices = {choice.option.name: choice for choice in groups_of(cluster)[0].choices}
    for nbytes in (1e4, 1e7):
        tensor = AllReduce(cluster.shards[0], nbytes)
        times = {str(scheme): time_s for scheme, time_s in all_seconds(tensor, cluster, aggregation).items()}
        for scheme, choice in choices.items():
            links = choice.option.links
            busiest_s = float((choice.option.share * nbytes / cluster.capacity_bytes_per_s[links]).max())
            found_s = busiest_s + choice.latency_s + choice.extra_s_per_byte * nbytes
            assert found_s == pytest.approx(times[scheme])
    assert choices["ina"].extra_s_per_byte > 0
    assert choices["ring"].extra_s_per_byte == pytest.approx(0.0, abs=1e-15)


def test_pipeline_stages_are_groups_of_their_own() -> None:
    """tp 4 and pp 2 over two servers: each stage is on one server and has its ring only."""
    text = f"""
name: stages
racks: [{{name: access}}]
nodes:
  - {{name: a0, rack: access, gpus: 4, nics: {{compute: {{count: 4, capacity: 100 Gbps}}}}}}
  - {{name: a1, rack: access, gpus: 4, nics: {{compute: {{count: 4, capacity: 100 Gbps}}}}}}
{TIMING}
defaults: {{model: llama-3-70b, kv_capacity: 180 GB}}
instances: [{{name: decode-0, role: both, tp: 4, pp: 2, gpus: "a0:0-3,a1:0-3"}}]
"""
    found = groups_of(parse(text))
    assert [(group.name, group.nodes) for group in found] == [("decode-0/0", ("a0",)), ("decode-0/1", ("a1",))]
    assert all([choice.option.name for choice in group.choices] == ["ring"] for group in found)
    assert [group.name for group in groups_on(found, "a1")] == ["decode-0/1"]


def test_a_cluster_without_tensor_parallelism_has_no_groups() -> None:
    cluster = parse(
        f"""
name: lone
nodes: [{{name: a0, gpus: 1}}]
{TIMING}
defaults: {{model: llama-3-8b, kv_capacity: 18 GB}}
instances: [{{name: decode-0, role: both, gpus: "a0:0"}}]
"""
    )
    with pytest.raises(InputError, match="lone has no instance with tp > 1"):
        groups_of(cluster)


def test_ports_of_servers_and_switches_are_links_of_the_cluster() -> None:
    cluster = load("examples/fat-tree-64gpu.yaml")
    node, rack = cluster.places.nodes[0].name, cluster.file.racks[0].name
    for port, (out, into) in enumerate(port_links(cluster, node, switch=False)):
        assert (cluster.links[out].source, cluster.links[into].target) == (node, node), port
    for out, into in nvlink_links(cluster, node):
        assert {cluster.links[out].tier, cluster.links[into].tier} == {0}
    uplinks = port_links(cluster, rack, switch=True)
    assert uplinks
    assert all(cluster.links[out].source == rack for out, _ in uplinks)
    assert {rack, cluster.file.pods[0].name} <= set(switch_names(cluster))


def test_a_rack_and_a_pod_of_one_name_are_an_error() -> None:
    text = f"""
name: twins
pods: [{{name: x}}]
racks: [{{name: x, pod: x}}]
nodes: [{{name: a0, rack: x, gpus: 2, nics: {{compute: {{capacity: 100 Gbps}}}}}}]
{TIMING}
defaults: {{model: llama-3-8b, tp: 2, kv_capacity: 18 GB}}
instances: [{{name: decode-0, role: both, gpus: "a0:0-1"}}]
"""
    with pytest.raises(InputError, match="'x' is the name of two of: rack, pod, datacenter"):
        switch_names(parse(text))
