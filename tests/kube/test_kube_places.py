"""Labels of nodes to places: laws, real label sets, and examples."""

from __future__ import annotations

import csv
import itertools
import json
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.kube.discovery.places import DEFAULT_LEVELS, NAME_MAX, place_of
from kvroute.types import InputError
from kvroute.types.discovered import Place

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "topology"
ZONE, REGION = "topology.kubernetes.io/zone", "topology.kubernetes.io/region"
TOPOGRAPH = "network.topology.nvidia.com/"
GENERATIONS = {
    "0.1": (f"{TOPOGRAPH}block", f"{TOPOGRAPH}spine", f"{TOPOGRAPH}accelerator"),
    "0.3": (f"{TOPOGRAPH}leaf", f"{TOPOGRAPH}spine", f"{TOPOGRAPH}accelerator"),
    "0.5": (f"{TOPOGRAPH}tier-0", f"{TOPOGRAPH}tier-1", f"{TOPOGRAPH}accelerator"),
    "1.0": ("fabric.topograph.run/tier-0", "fabric.topograph.run/tier-1", "accelerator.topograph.run/domain"),
}
"""Labels that versions of topograph write for the leaf switch, the switch above it, and the NVLink domain."""
VALUES = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,8}[a-z0-9])?", fullmatch=True)
LABELS = st.fixed_dictionaries(
    {}, optional=dict.fromkeys((REGION, ZONE, f"{TOPOGRAPH}spine", "nvidia.com/rack", f"{TOPOGRAPH}leaf"), VALUES)
)


def at(labels: dict[str, str], name: str = "n", **pod_labels: str) -> Place:
    return place_of(name, labels, pod_labels, DEFAULT_LEVELS)


@given(LABELS, LABELS)
def test_domains_are_nested(one: dict[str, str], other: dict[str, str]) -> None:
    """Two nodes of one rack are in one pod, and two of one pod in one datacenter."""
    a, b = at(one), at(other)
    if a.rack and a.rack == b.rack:
        assert a.pod == b.pod
        assert a.datacenter == b.datacenter
    if a.pod and a.pod == b.pod:
        assert a.datacenter == b.datacenter


@given(LABELS, LABELS)
def test_equal_names_mean_equal_labels(one: dict[str, str], other: dict[str, str]) -> None:
    """The first label of a level and those of the levels above it."""
    a, b = at(one), at(other)
    if a.rack and a.rack == b.rack:
        racks = [labels.get("nvidia.com/rack") or labels.get(f"{TOPOGRAPH}leaf") for labels in (one, other)]
        assert racks[0] == racks[1]
        assert one.get(f"{TOPOGRAPH}spine") == other.get(f"{TOPOGRAPH}spine")
        assert one.get(ZONE) == other.get(ZONE)


@given(LABELS)
def test_a_level_is_empty_exactly_if_it_has_no_label(labels: dict[str, str]) -> None:
    """And every name may stand in a cluster file."""
    found = at(labels)
    assert bool(found.datacenter) == (ZONE in labels)
    assert bool(found.pod) == (f"{TOPOGRAPH}spine" in labels)
    assert bool(found.rack) == ("nvidia.com/rack" in labels or f"{TOPOGRAPH}leaf" in labels)
    for name in (found.datacenter, found.pod, found.rack):
        assert len(name) <= NAME_MAX


def test_paths_of_values() -> None:
    """A zone that begins with its region is not prefixed again."""
    cloud = {REGION: "us-east-1", ZONE: "us-east-1a", f"{TOPOGRAPH}spine": "s2", f"{TOPOGRAPH}leaf": "s1.7"}
    assert at(cloud) == Place(node="n", rack="us-east-1a.s2.s1..7", pod="us-east-1a.s2", datacenter="us-east-1a")
    assert at({REGION: "eu", ZONE: "z1", "nvidia.com/rack": "r1"}).rack == "eu.z1._.r1"
    assert at({REGION: "eu"}) == Place(node="n")
    assert at({ZONE: ""}) == Place(node="n")
    long = at({ZONE: "z" * 63, f"{TOPOGRAPH}spine": "s" * 63, "nvidia.com/rack": "r" * 60 + "." + "r"})
    assert at({ZONE: "z" * 63, REGION: "e" * 63, f"{TOPOGRAPH}spine": "s" * 63, "nvidia.com/rack": "r1"}).rack != (
        at({ZONE: "z" * 63, REGION: "e" * 63, f"{TOPOGRAPH}spine": "s" * 63, "nvidia.com/rack": "r2"}).rack
    )
    assert len(long.rack) <= NAME_MAX


def test_labels_of_pods_stand_in_for_those_of_nodes() -> None:
    """As kvroute's operator, Dynamo's and Grove copy them; the node's own labels count first."""
    pod = {"nvidia.com/dynamo-topology.zone": "z1", "kvroute.io/topology.rack": "r1", "grove.io/topology.block": "b1"}
    assert place_of("n", {}, pod, DEFAULT_LEVELS) == Place(node="n", rack="z1.b1.r1", pod="z1.b1", datacenter="z1")
    assert place_of("n", {ZONE: "z2"}, pod, DEFAULT_LEVELS).datacenter == "z2"
    assert place_of("n", {}, {ZONE: "z3"}, DEFAULT_LEVELS).datacenter == "z3"


def test_the_labels_of_a_level_can_be_replaced() -> None:
    """Only those of that level."""
    levels = DEFAULT_LEVELS.with_keys("rack = example.com/row, nvidia.com/rack")
    assert place_of("n", {"example.com/row": "7", ZONE: "z"}, {}, levels).rack == "z._.7"
    assert place_of("n", {f"{TOPOGRAPH}leaf": "s1"}, {}, levels).rack == ""
    for wrong in ("row=x", "rack", "rack=", "=x", "node=kubernetes.io/hostname"):
        with pytest.raises(InputError, match="write LEVEL=LABEL"):
            DEFAULT_LEVELS.with_keys(wrong)


def _rows(name: str) -> list[dict[str, str]]:
    if not DATA.is_dir():
        pytest.skip("the data sets are not on this machine")
    with (DATA / name).open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("generation", GENERATIONS)
def test_real_label_sets_of_topograph(generation: str) -> None:
    """533 nodes of six models: a rack is a leaf switch, a pod the switch above it, in every version's labels."""
    leaf_key, spine_key, domain_key = GENERATIONS[generation]
    clusters: dict[str, dict[str, tuple[Place, tuple[str, ...]]]] = defaultdict(dict)
    for row in _rows("topograph_nodes.csv"):
        path = row["switch_path_root_to_leaf"].split("/")
        labels = {leaf_key: path[-1], domain_key: row["nvlink_domain"], "kubernetes.io/hostname": row["node"]}
        labels |= {spine_key: path[-2]} if len(path) > 1 else {}
        labels |= {ZONE: row["zone"], REGION: row["region"]} if row["zone"] else {}
        clusters[row["model"]][row["node"]] = (at(labels, row["node"]), (row["region"], row["zone"], *path[-2:]))
    assert sum(map(len, clusters.values())) == 533
    for nodes in clusters.values():
        for (a, path_a), (b, path_b) in itertools.combinations(nodes.values(), 2):
            assert a.rack
            assert a.node != b.node
            assert (a.rack == b.rack) == (path_a == path_b)
            assert (a.pod == b.pod) == (path_a[:-1] == path_b[:-1])
            assert (a.datacenter == b.datacenter) == (path_a[:2] == path_b[:2])


def test_real_label_sets_of_kueue() -> None:
    """Each block of its example has racks r1 and r2, and they are different racks."""
    rows = [json.loads(row["labels_json"]) for row in _rows("kueue_kind_nodes.csv")]
    placed = [(at(labels), labels) for labels in rows if "cloud.provider.com/topology-rack" in labels]
    assert len(placed) >= 8
    for (a, labels_a), (b, labels_b) in itertools.combinations(placed, 2):
        same = [
            labels_a.get(key) == labels_b.get(key)
            for key in ("cloud.provider.com/topology-block", "cloud.provider.com/topology-rack")
        ]
        assert (a.pod == b.pod) == same[0]
        assert (a.rack == b.rack) == all(same)
