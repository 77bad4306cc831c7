"""The cluster that follows from a file and discovered engines: their places, their GPUs, and what cannot join."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.control.churn_rig import BASE, engine

from kvroute.topology import Cluster, parse
from kvroute.topology.reading.assembly import load
from kvroute.topology.reading.data_parallel import discovered_ranks
from kvroute.topology.reading.discovery import admitted, grown
from kvroute.types import (
    CROSS_DATACENTER,
    SAME_DATACENTER,
    SAME_NODE,
    SAME_POD,
    SAME_RACK,
    Discovered,
    Endpoint,
    InputError,
    InputErrors,
    Joined,
    Place,
)

LISTED = """
name: listed
racks: [{name: rack0, uplinks: {count: 1, capacity: 10 Gbps}}]
nodes:
  - {name: node0, rack: rack0, gpus: 4, nics: {compute: {count: 1, capacity: 25 Gbps}}}
  - {name: node1, rack: rack0, gpus: 4, nics: {compute: {count: 1, capacity: 25 Gbps}}}
timing:
  default: {prefill: {kind: linear, per_token: 100 us, base: 10 ms}, decode: {base: 10 ms, per_request: 1 ms}}
defaults: {model: llama-3-70b, tp: 2, kv_capacity: 80 GB}
instances: [{name: fixed, role: prefill, gpus: "node0:0-1"}]
discovery: {file: engines.yaml, node: {gpus: 8, nics: {compute: {count: 4, capacity: 100 Gbps}}}}
"""
PLACES = st.builds(
    Place,
    node=st.sampled_from(["n0", "n1", "n2"]),
    rack=st.sampled_from(["", "r0", "r1"]),
    pod=st.sampled_from(["", "s0", "s1"]),
    datacenter=st.sampled_from(["", "east"]),
)
ENGINES = st.lists(
    st.builds(
        lambda name, place, role: Discovered(
            name=name, uid="", role=role, endpoint=Endpoint(url=f"http://{name}:80"), place=place
        ),
        st.sampled_from("abcdefgh"),
        PLACES,
        st.sampled_from(["prefill", "decode", "both"]),
    ),
    unique_by=lambda engine: engine.name,
)


def joined(base: Cluster, *engines: Discovered) -> tuple[Joined, ...]:
    """Return the engines with their GPUs; all must be accepted."""
    found, refused = admitted(base, {}, sorted(engines, key=lambda engine: engine.name))
    assert not refused
    return found


@given(ENGINES, st.randoms(use_true_random=False))
def test_the_order_of_joining_does_not_matter(engines: list[Discovered], chance: object) -> None:
    """The same members give the same cluster, and any two instances have a tier of their places."""
    base = parse(BASE)
    found, _ = admitted(base, {}, sorted(engines, key=lambda engine: engine.name))
    shuffled = list(found)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = grown(base, found), grown(base, shuffled)
    assert one.instances == other.instances
    assert one.links == other.links
    np.testing.assert_array_equal(one.tier, other.tier)
    np.testing.assert_array_equal(one.tier_bytes_per_s, other.tier_bytes_per_s)
    assert np.isfinite(one.tier_bytes_per_s).all()
    assert (one.tier_bytes_per_s > 0).all()
    for number, instance in enumerate(one.instances):
        for peer, there in enumerate(one.instances):
            if instance.node == there.node:
                assert one.tier[number, peer] == SAME_NODE
            elif instance.rack and instance.rack == there.rack:
                assert one.tier[number, peer] == SAME_RACK
            else:
                assert one.tier[number, peer] > SAME_RACK
            assert one.hops(number, peer, 0)


@given(ENGINES)
def test_no_two_engines_share_a_gpu(engines: list[Discovered]) -> None:
    """However many join; those without room are refused."""
    base = parse(BASE.replace("gpus: 16", "gpus: 4"))
    found, refused = admitted(base, {}, sorted(engines, key=lambda engine: engine.name))
    gpus = [gpu for instance in grown(base, found).instances for gpu in instance.gpus]
    assert len(set(gpus)) == len(gpus) == 2 * len(found)
    assert {joined.engine.name for joined in found} | refused.keys() == {joined.name for joined in engines}
    assert all("GPUs" in why for why in refused.values())


def test_an_engine_that_stays_keeps_its_gpus() -> None:
    """A new engine takes the first free ones, also if its name comes first."""
    base = parse(BASE)
    first = joined(base, engine("m"), engine("z"))
    present = {member.engine.name: member for member in first[1:]}
    (new,), _ = admitted(base, present, [engine("a")])
    assert (first[0].gpus, first[1].gpus, new.gpus) == ((0, 1), (2, 3), (0, 1))


def test_domains_are_made_from_the_templates() -> None:
    """Nodes and racks as the section says; a pod without a template is no limit."""
    cluster = grown(parse(BASE), joined(parse(BASE), engine("p", "prefill", 0), engine("d", "decode", 2)))
    assert [(node.name, node.rack, node.gpus) for node in cluster.file.nodes] == [
        ("node0", "rack0", 16),
        ("node2", "rack1", 16),
    ]
    assert [(rack.name, rack.pod, rack.uplinks.count if rack.uplinks else 0) for rack in cluster.file.racks] == [
        ("rack0", "pod0", 2),
        ("rack1", "pod0", 2),
    ]
    assert int(cluster.tier[0, 1]) == SAME_POD
    pod = cluster.file.pods[0].uplinks
    assert pod is not None
    assert float(pod.bytes_per_s) * pod.count == 32 * 4 * 12.5e9


def test_a_file_keeps_its_own_domains() -> None:
    """An engine on a listed node uses that node's NIC and rack, and the GPUs that no listed instance has."""
    base = parse(LISTED)
    here = msgspec.structs.replace(engine("d", "decode"), place=Place(node="node0"))
    there = msgspec.structs.replace(engine("e", "decode"), place=Place(node="far", rack="rack0", pod="elsewhere"))
    cluster = grown(base, joined(base, here, there))
    d, e, fixed = (cluster.instances[cluster.index(name)] for name in ("d", "e", "fixed"))
    assert (d.gpus, d.rack) == (("node0/2", "node0/3"), "rack0")
    assert int(cluster.tier[cluster.index("d"), cluster.index("fixed")]) == SAME_NODE
    assert (e.rack, e.pod) == ("rack0", "")
    assert fixed.gpus == ("node0/0", "node0/1")
    assert next(node for node in cluster.file.nodes if node.name == "node0").gpus == 4


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"name": "fixed"}, "the cluster file lists an instance with this name"),
        ({"name": "present"}, "another engine has this name"),
        ({"name": "a b"}, "its name may have letters"),
        ({"role": "boss"}, "there is no role 'boss'"),
        ({"endpoint": Endpoint(url="host:80")}, "its endpoint is invalid"),
        ({"endpoint": Endpoint(url="http://host:99999")}, "port 99999"),
        ({"endpoint": Endpoint(url="http://present-1:8000")}, "is already the endpoint of present"),
        ({"endpoint": Endpoint(url="http://h:1", protocol="sglang"), "role": "prefill"}, "bootstrap server"),
        ({"endpoint": Endpoint(url="http://h:1", kv_replay="tcp://h:2")}, "`kv_replay` requires `kv_events`"),
        ({"engine": "fixed"}, "its engine has the name of the instance fixed"),
        ({"engine": "e", "endpoint": Endpoint(url="http://h:1", protocol="sglang", bootstrap="h:2")}, "from a header"),
        ({"model": "nonsense-3b"}, "nonsense-3b"),
        ({"timing": "fast"}, "there is no timing 'fast'"),
        ({"tp": 3}, "it needs 3 GPUs, and node node0 has 2 free of 4"),
        ({"place": Place(node="node 0")}, "'node 0' is not the name of a node"),
        ({"place": Place(node="n", rack="-")}, "'-' is not the name of a rack"),
        ({"place": Place(node="n", datacenter="mars")}, "no `wan` links lead to datacenter mars"),
    ],
)
def test_why_an_engine_cannot_join(change: dict[str, object], why: str) -> None:
    """One sentence; the others join."""
    base = parse(LISTED)
    place = Place(node="spare", datacenter="earth")
    present = {"present": Joined(msgspec.structs.replace(engine("present"), place=place), (0, 1))}
    plain = msgspec.structs.replace(engine("new"), place=Place(node="node0"))
    wrong = msgspec.structs.replace(plain, **change)
    fine = msgspec.structs.replace(engine("other"), place=Place(node="node1"))
    found, refused = admitted(base, present, [wrong, fine])
    assert [joined.engine.name for joined in found] == ["other"]
    assert why in refused[wrong.name]


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("  file: engines.yaml\n", "  drain: 1 s\n", "discovery: `discovery` has no source of engines"),
        ("  file: engines.yaml\n", "  file: a\n  dns: {both: x.y}\n", "`discovery` has several sources"),
        ("file: engines.yaml\n", "kubernetes: {}\n  file: a\n", "several sources: file, kubernetes; write one of"),
        ("file: engines.yaml", "kubernetes: {namespace: Prod}", "discovery.kubernetes.namespace: 'Prod' does not fit"),
        ("file: engines.yaml", "kubernetes: {selector: app in x}", "discovery.kubernetes.selector: 'app in x' is no"),
        (
            "file: engines.yaml",
            "kubernetes: {levels: {rak: [a]}}",
            "levels.rak: the key 'rak' is unknown; did you mean",
        ),
        ("file: engines.yaml", "kubernetes: {levels: {rack: []}}", "levels.rack: there are 0 entries; write 1 or more"),
        ("file: engines.yaml", "kubernetes: {levels: {rack: [a b]}}", "levels.rack[0]: 'a b' does not fit"),
        (
            "file: engines.yaml",
            "kubernetes: {levels: {rack: [a/b], pod: [a/b]}}",
            "levels.rack[0]: the label a/b gives the level pod, too; give each label one level",
        ),
        ("  file: engines.yaml\n", "  dns: {interval_min: 1 s}\n", "`dns` has no name"),
        ("file: engines.yaml", "dns: {both: x.y, interval_min: 9 s, interval_max: 1 s}", "is longer than"),
        ("nics: {compute: {count: 4, capacity: 100 Gbps}}", "nvlink: 450 GB/s", "have no compute NICs"),
        (", kv_capacity: 80 GB", "", "the KV memory of discovered engines is not given"),
        ("llama-3-70b", "nonsense-3b", "defaults.model"),
        ("  default:", "  fast:", "there is no timing 'default'"),
        ("discovery:\n", "storage: {}\ndiscovery:\n", "`storage` and `discovery` cannot be given together"),
    ],
)
def test_faults_of_the_section(old: str, new: str, error: str) -> None:
    """Each with its line and field."""
    assert old in BASE
    with pytest.raises(InputErrors) as raised:
        parse(BASE.replace(old, new), "live.yaml")
    assert any(error in str(problem) and "live.yaml:" in str(problem) for problem in raised.value.problems)


def test_commands_that_need_instances_say_so(tmp_path: object) -> None:
    """In one sentence."""
    path = f"{tmp_path}/live.yaml"
    with open(path, "w", encoding="utf-8") as file:
        file.write(BASE)
    with pytest.raises(InputError, match="the file has no instances of its own: `kvroute serve` discovers them"):
        load(path)


def test_a_missing_rack_is_shared_with_no_engine() -> None:
    """As in a cluster file."""
    base = parse(BASE)
    engines = [msgspec.structs.replace(engine(name), place=Place(node=name)) for name in "ab"]
    assert int(grown(base, joined(base, *engines)).tier[0, 1]) == SAME_DATACENTER


DECLARED = BASE.replace("  rack: {uplinks: {count: 2, capacity: 50 Gbps}}\n", "") + (
    "network: {tier_bandwidth: {rack: 200 Gbps, pod: 80 Gbps, datacenter: 40 Gbps, wan: 8 Gbps}}\n"
)
SPREAD = st.lists(
    st.builds(
        Place,
        node=st.sampled_from(["n0", "n1", "n2", "n3", "n4", "n5"]),
        rack=st.sampled_from(["", "r0", "r1"]),
        pod=st.sampled_from(["", "s0", "s1"]),
        datacenter=st.sampled_from(["", "east", "west", "north"]),
    ),
    min_size=2,
    max_size=7,
)


@given(SPREAD, st.sampled_from(["flow", "transfer"]))
def test_declared_speeds_hold_in_new_domains(places: list[Place], ecmp: str) -> None:
    """A lone transfer of engines of the default size gets the speed of its tier from the links, as in the table."""
    base = parse(DECLARED.replace("network: {", f"network: {{ecmp: {ecmp}, "))
    engines = [msgspec.structs.replace(engine(f"e{n}"), place=place) for n, place in enumerate(places)]
    found, refused = admitted(base, {}, engines)
    assert not refused
    cluster = grown(base, found)
    declared = [float(speed) for speed in cluster.tier_bytes_per_s]
    assert declared[SAME_RACK:] == [25e9, 10e9, 5e9, 1e9]
    draws = 1 if ecmp == "transfer" else 2
    sites = [site.name for site in cluster.file.datacenters]
    assert len(cluster.file.wan) == len(sites) * (len(sites) - 1) // 2
    for number in range(len(places)):
        for peer in range(len(places)):
            tier = int(cluster.tier[number, peer])
            groups = cluster.hops(number, peer, 0)
            for group in groups if tier > SAME_RACK else ():
                links = [cluster.links[link] for link in group]
                if links[0].tier in (SAME_POD, SAME_DATACENTER):
                    lone = draws * links[0].bytes_per_s
                    assert lone in (declared[SAME_POD], declared[SAME_DATACENTER])
                    assert lone >= declared[tier]
                    assert sum(link.bytes_per_s for link in links) >= 16 * lone


def test_zones_are_connected_if_their_speed_is_declared() -> None:
    """And refused with the fix if it is not."""
    sites = [
        msgspec.structs.replace(engine(name), place=Place(node=name, datacenter=name)) for name in ("east", "west")
    ]
    cluster = grown(parse(DECLARED), joined(parse(DECLARED), *sites))
    assert int(cluster.tier[0, 1]) == CROSS_DATACENTER
    assert [(wan.source, wan.target, float(wan.bytes_per_s)) for wan in cluster.file.wan] == [("east", "west", 1e9)]
    _, refused = admitted(parse(BASE), {}, sites)
    assert refused == {
        "west": "no `wan` links lead to datacenter west; add it with `wan` links, or add "
        "`network: {tier_bandwidth: {wan: 10 Gbps}}`"
    }


def test_the_ranks_of_an_engine_share_its_address() -> None:
    """Each is an instance with its own GPUs; another engine cannot have the address."""
    base = parse(LISTED)
    whole = msgspec.structs.replace(engine("e"), place=Place(node="node1"), tp=1)
    ranks = discovered_ranks(whole, 3)
    thief = msgspec.structs.replace(engine("thief"), endpoint=whole.endpoint, place=Place(node="spare"))
    found, refused = admitted(base, {}, [*ranks, thief])
    assert refused == {"thief": f"{whole.endpoint.url} is already the endpoint of e"}
    cluster = grown(base, found)
    instances = {instance.name: instance for instance in cluster.instances if instance.engine}
    assert list(instances) == ["e_dp0", "e_dp1", "e_dp2"]
    assert [instance.rank for instance in instances.values()] == [0, 1, 2]
    assert [instance.gpus for instance in instances.values()] == [("node1/0",), ("node1/1",), ("node1/2",)]
    assert {instance.ep_group for instance in instances.values()} == {"e"}
