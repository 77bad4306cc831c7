"""The cluster file of a KvRouter: `kvroute serve` accepts it, and it says what the KvRouter says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.kube.deploy.deployed import DEPLOY, read
from tests.kube.resources.router_examples import Manifest, constrained, router, topology
from typer.testing import CliRunner

from kvroute.cli.app import app
from kvroute.kube.resources import ClusterTopologySpec, KvRouterSpec, read_spec
from kvroute.kube.resources.cluster_file import cluster_file
from kvroute.kube.resources.fields import plain_values
from kvroute.kube.resources.resolution import Catalog, resolve
from kvroute.policies.constraint import TopologyConstraint
from kvroute.serve.config.preflight import deployment_of
from kvroute.serve.lifecycle.deployment import Deployment
from kvroute.topology.reading.discovery import template_cluster

EXAMPLES = sorted(path for path in (DEPLOY / "examples").glob("*.yaml") if path.name != "topology.yaml")
[TOPOLOGY] = read(DEPLOY / "examples/topology.yaml")
LATENCIES = st.fixed_dictionaries({}, optional={"rack": st.just("3 us"), "datacenter": st.just("1 ms")})
UPLINKS: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({}), st.fixed_dictionaries({"uplinks": st.just({"count": 4, "capacity": "100 Gbps"})})
)
NODES = st.fixed_dictionaries(
    {},
    optional={
        "gpus": st.integers(1, 16),
        "nvlink": st.just("900 GB/s"),
        "nics": st.fixed_dictionaries(
            {
                "compute": st.fixed_dictionaries(
                    {},
                    optional={
                        "count": st.integers(1, 8),
                        "capacity": st.just("100 Gbps"),
                        "scope": st.sampled_from(["gpu", "instance", "server"]),
                        "efficiency": st.floats(0.001, 1),
                    },
                )
            }
        ),
    },
)
PREFILLS = st.sampled_from(
    [
        {"perToken": "9 us"},
        {"kind": "quadratic", "perToken": "9 us", "perToken2": "1 ns", "base": "1 ms"},
        {"kind": "piecewise", "tokens": [1, 64, 4096], "times": ["1 ms", "8 ms", "400 ms"]},
        {"kind": "piecewise", "tokens": [1, 64], "times": ["1 ms", "8 ms"], "perToken": "9 us"},
    ]
)
TIMINGS = st.fixed_dictionaries({"prefill": PREFILLS, "decode": st.just({"base": "8 ms", "perRequest": "10 us"})})
SPECS = st.fixed_dictionaries(
    {},
    optional={
        "network": st.fixed_dictionaries(
            {}, optional={"latency": LATENCIES, "node": NODES, "rack": UPLINKS, "pod": UPLINKS}
        ),
        "defaults": st.fixed_dictionaries(
            {}, optional={"tp": st.integers(1, 8), "batchMax": st.integers(1, 512), "kvCapacity": st.just("300 GB")}
        ),
        "timing": st.fixed_dictionaries({"default": TIMINGS}, optional={"slow": TIMINGS}),
        "policy": st.sampled_from(["foresight", "netkv", "round-robin"]),
        "drainSeconds": st.integers(1, 3600),
        "keysSecretRef": st.just({"name": "keys"}),
        "gateway": st.just({"retries": {"share": 0.1}, "timeouts": {"connect": "1 s"}}),
        "kvCacheTransferTopology": st.sampled_from(
            [
                {"level": "rack", "clusterTopologyName": "cluster"},
                {"level": "zone", "label": "topology.kubernetes.io/zone", "mismatchPolicy": "fallback"},
                {"level": "hall", "label": "x/hall", "place": "pod", "mismatchPolicy": "preferred"},
                {"level": "host", "label": "kubernetes.io/hostname"},
            ]
        ),
    },
)


def text_of(manifest: Manifest, levels: Manifest | None = None) -> str:
    """Return the cluster file of a KvRouter in a cluster with one ClusterTopology `cluster`."""
    spec = read_spec(manifest, KvRouterSpec)
    catalog = Catalog(own={"cluster": read_spec(levels or topology(), ClusterTopologySpec)})
    transfer = spec.kv_cache_transfer_topology
    resolved = resolve(transfer, catalog) if transfer is not None else None
    return cluster_file(manifest["metadata"]["name"], manifest["metadata"]["namespace"], spec, resolved)


def document(manifest: Manifest, levels: Manifest | None = None) -> dict[str, Any]:
    """Return the cluster file as plain values."""
    found: dict[str, Any] = yaml.safe_load(text_of(manifest, levels))
    return found


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_file_of_every_example_can_be_served(path: Path, tmp_path: Path) -> None:
    """`kvroute topology check` finds no fault, and the gateway makes a control core of it."""
    file = tmp_path / "cluster.yaml"
    file.write_text(text_of(read(path)[0], TOPOLOGY), encoding="utf-8")
    checked = CliRunner().invoke(app, ["topology", "check", str(file)])
    assert (checked.exit_code, checked.output.count("error")) == (0, 0), checked.output
    deployment = Deployment.of(file.read_text(encoding="utf-8"), str(file))
    assert deployment.core().cluster.instances == ()
    transfer = read(path)[0]["spec"]["kvCacheTransferTopology"]
    place = {"block": "pod", "zone": "datacenter"}.get(transfer["level"], transfer["level"])
    wanted = TopologyConstraint.parse(f"{place}:{transfer['mismatchPolicy']}")
    assert deployment.settings.constraint == str(wanted)


@given(spec=SPECS)
def test_every_valid_spec_gives_a_file_that_is_accepted(spec: dict[str, Any]) -> None:
    """Nodes, racks and engines that discovery makes from the file are those of the KvRouter."""
    manifest = router(**spec)
    cluster, settings = deployment_of(text_of(manifest), "cluster.yaml", environ=None)
    given = read_spec(manifest, KvRouterSpec)
    section = cluster.file.discovery
    assert section is not None
    for level in ("node", "rack", "pod"):
        written = msgspec.to_builtins(getattr(section, level), enc_hook=float)
        assert written == msgspec.to_builtins(getattr(given.network, level), enc_hook=float) | written
    assert plain_values(cluster.file.defaults.kv_capacity_bytes) == plain_values(given.defaults.kv_capacity_bytes)
    assert {name: timing.decode.base_s for name, timing in cluster.timing.items()} == {
        name: float(timing.decode.base_s) for name, timing in given.timing.items()
    }
    assert settings.policy == given.policy
    size = given.defaults.tp * given.defaults.pp
    if size <= given.network.node.gpus:
        assert {instance.batch_max for instance in template_cluster(cluster).instances} == {given.defaults.batch_max}


@pytest.mark.parametrize(
    ("prefill", "written"),
    [
        ({"perToken": "9 us"}, {"kind": "linear", "base": "0 s", "per_token": "9 us"}),
        (
            {"kind": "quadratic", "perToken": "9 us", "perToken2": "1 ns"},
            {"kind": "quadratic", "base": "0 s", "per_token": "9 us", "per_token2": "1 ns"},
        ),
        (
            {"kind": "piecewise", "base": "1 s", "tokens": [1, 2], "times": ["1 ms", "2 ms"]},
            {"kind": "piecewise", "tokens": [1, 2], "times": ["1 ms", "2 ms"]},
        ),
    ],
)
def test_timings_have_the_fields_of_their_kind(prefill: dict[str, Any], written: dict[str, Any]) -> None:
    found = document(router(timing={"default": {"prefill": prefill, "decode": {"base": "1 ms"}}}))
    assert found["timing"]["default"]["prefill"] == written


def test_levels_are_labels_of_nodes_and_their_copies_on_pods() -> None:
    """The name of a node needs no label; of two levels with one place the constraint's counts, else the narrower."""
    levels = topology(zone="a/zone", spine="a/spine", block="a/block", rack="a/rack", host="kubernetes.io/hostname")
    narrow, wide = document(constrained("rack"), levels), document(constrained("spine"), levels)
    assert narrow["discovery"]["kubernetes"]["levels"] == {
        "datacenter": ["a/zone", "kvroute.io/topology.zone"],
        "pod": ["a/block", "kvroute.io/topology.block"],
        "rack": ["a/rack", "kvroute.io/topology.rack"],
    }
    assert wide["discovery"]["kubernetes"]["levels"]["pod"] == ["a/spine", "kvroute.io/topology.spine"]
    assert "levels" not in document(router())["discovery"]["kubernetes"]
