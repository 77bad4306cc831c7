"""The draft of a cluster file from discovered engines: it is valid, and says of them what discovery says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.control.churn_rig import engine

from kvroute.serve.config.preflight import deployment_of
from kvroute.topology import parse
from kvroute.topology.drafts.discovered import draft_discovered
from kvroute.types import CROSS_DATACENTER, SAME_NODE, SAME_POD, SAME_RACK, Discovered, Endpoint, InputError, Place

PLACES = st.builds(
    Place,
    node=st.sampled_from(["n0", "n1", "n2", "n3"]),
    rack=st.sampled_from(["", "r0", "r1"]),
    pod=st.sampled_from(["", "s0", "s1"]),
    datacenter=st.sampled_from(["", "east", "west"]),
)
ENGINES = st.lists(
    st.builds(
        lambda name, place, role, tp, ready: Discovered(
            name=f"llm.{name}",
            uid="",
            role=role,
            endpoint=Endpoint(url=f"http://{name}:80", kv_events=f"tcp://{name}:5557"),
            place=place,
            model="meta-llama/Llama-3.1-8B",
            tp=tp,
            ready=ready,
        ),
        st.sampled_from("abcdefgh"),
        PLACES,
        st.sampled_from(["prefill", "decode", "both"]),
        st.sampled_from([None, 1, 4, 16]),
        st.booleans(),
    ),
    unique_by=lambda engine: engine.name,
    max_size=6,
)
BOTH = Discovered(
    name="zz", uid="", role="both", endpoint=Endpoint(url="http://z:80"), place=Place(node="n9"), model="llama-3-8b"
)


@given(ENGINES)
def test_the_file_can_be_served_and_has_every_engine(found: list[Discovered]) -> None:
    """With its role, address, model and degree; two on one node share it, and so on for the listed levels."""
    engines = sorted([*found, BOTH], key=lambda engine: engine.name)
    text, refused = draft_discovered("live", engines, model="llama-3-70b", tp=2)
    roles = {engine.role for engine in found}
    alone = {"prefill": "decode" not in roles, "decode": "prefill" not in roles, "both": False}
    assert refused.keys() == {engine.name for engine in engines if alone[engine.role]}
    assert all("engine has its model and protocol" in why for why in refused.values())
    engines = [engine for engine in engines if not alone[engine.role]]
    cluster, _ = deployment_of(text, "live.yaml", environ=None)
    assert cluster.file.discovery is None
    by_name = {written.name: written for written in cluster.instances}
    assert by_name.keys() == {engine.name for engine in engines}
    for placed in engines:
        instance = by_name[placed.name]
        assert (instance.role, instance.endpoint, instance.model) == (placed.role, placed.endpoint, placed.model)
        assert len(instance.gpus) == (placed.tp or 2)
        assert instance.kv_capacity_bytes == 40e9 * len(instance.gpus)
        assert instance.node == placed.place.node
    for placed in engines:
        for other in engines:
            tier = int(cluster.tier[cluster.index(placed.name), cluster.index(other.name)])
            if placed.place.node == other.place.node:
                assert tier == SAME_NODE
            elif by_name[placed.name].rack and by_name[placed.name].rack == by_name[other.name].rack:
                assert tier == SAME_RACK
            else:
                assert SAME_RACK < tier <= CROSS_DATACENTER


def test_an_example() -> None:
    """Uplinks carry what the NICs below them send."""
    found = [engine("d0", "decode", 0), engine("d1", "decode", 1), engine("p0", "prefill", 2)]
    text, _ = draft_discovered("live", found, model="llama-3-70b", tp=2, gpus_per_node=4, nic_bytes_per_s=50e9)
    cluster = parse(text)
    racks = {rack.name: rack.uplinks for rack in cluster.file.racks}
    assert {name: (rack.count, float(rack.bytes_per_s)) for name, rack in racks.items() if rack} == {
        "rack0": (8, 50e9),
        "rack1": (4, 50e9),
    }
    assert int(cluster.tier[cluster.index("p0"), cluster.index("d0")]) == SAME_POD
    assert text.startswith("# First draft: engines, nodes and their places are those of the cluster.")


def test_engines_that_cannot_be_used_are_named() -> None:
    """One is left out with its reason; if none remains, or none exists, one sentence says so."""
    odd = Discovered(
        name="odd", uid="", role="both", endpoint=Endpoint(url="http://o:80"), place=Place(node="n"), model="odd-1b"
    )
    text, refused = draft_discovered("live", [odd, BOTH], model="llama-3-70b")
    assert [instance.name for instance in parse(text).instances] == ["zz"]
    assert "there is no model 'odd-1b'" in refused["odd"]
    with pytest.raises(InputError, match="no engine can be used; odd: there is no model 'odd-1b'"):
        draft_discovered("live", [odd], model="llama-3-70b")
    with pytest.raises(InputError, match="no pod is an engine; `kvroute kube check` says why"):
        draft_discovered("live", [], model="llama-3-70b")
