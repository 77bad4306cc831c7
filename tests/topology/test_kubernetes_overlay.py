"""`--kubernetes` and a cluster file: what the options replace, and what a gateway without a file assumes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.control.churn_rig import BASE

from kvroute.serve.lifecycle.deployment import Deployment
from kvroute.topology import parse
from kvroute.topology.drafts.kubernetes_overlay import KubernetesOverlay, kubernetes_file
from kvroute.topology.reading.assembly import examine
from kvroute.topology.schema import KubernetesEntry, LevelsEntry, yaml_text
from kvroute.types import InputErrors
from kvroute_engine.files.document import read_plain

FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "namespace": st.sampled_from(["llm", "*"]),
        "selector": st.sampled_from(["app=x", "role in (prefill,decode)"]),
        "kubeconfig": st.just("config"),
        "context": st.just("prod"),
    },
)
SECTIONS = st.one_of(
    st.none(),
    st.fixed_dictionaries({}, optional={"file": st.just("engines.yaml"), "drain": st.just("5 s")}),
    st.fixed_dictionaries({"kubernetes": FIELDS}, optional={"node": st.just({"gpus": 4})}),
)


@given(FIELDS, SECTIONS)
def test_options_replace_fields_and_the_rest_stays(options: dict[str, Any], section: dict[str, Any] | None) -> None:
    """Kubernetes is the only source; a field that is not given is the file's."""
    plain: dict[str, Any] = {"name": "x"} if section is None else {"name": "x", "discovery": section}
    overlay = KubernetesOverlay(msgspec.convert(options, KubernetesEntry))
    merged: Any = overlay(plain)
    assert overlay(merged) == merged
    found = merged["discovery"]
    assert found["kubernetes"] == (section or {}).get("kubernetes", {}) | options
    assert not {"file", "dns"} & found.keys()
    assert found.get("drain") == (section or {}).get("drain")
    assert found["node"] == (section or {}).get("node", kubernetes_node())
    assert merged["defaults"]["kv_capacity"] == "40 GB"
    assert "default" in merged["timing"]


def kubernetes_node() -> object:
    """Return the node template that a file without one gets."""
    section: Any = read_plain(kubernetes_file().to_yaml(), "")["discovery"]
    return section["node"]


def test_a_gateway_without_a_file() -> None:
    """The defaults need nothing else; the options are in the text that the event log gets."""
    overlay = KubernetesOverlay(KubernetesEntry(namespace="llm", levels=LevelsEntry(rack=["x/row"])))
    deployment = Deployment.of(kubernetes_file().to_yaml(), "--kubernetes", overlay=overlay)
    assert parse(deployment.text).file == deployment.cluster.file
    section = deployment.cluster.file.discovery
    assert section is not None
    assert section.kubernetes == overlay.given
    assert "namespace: llm" in deployment.log_header.cluster


def test_a_file_keeps_its_network_and_its_lines() -> None:
    """The source is replaced; a fault is reported at its line in the file as it is written."""
    overlay = KubernetesOverlay(KubernetesEntry())
    cluster, faults = examine(BASE, "live.yaml", overlay)
    assert cluster is not None
    assert not faults
    before, after = parse(BASE).file, cluster.file
    assert msgspec.structs.replace(after, discovery=None) == msgspec.structs.replace(before, discovery=None)
    assert before.discovery is not None
    assert after.discovery is not None
    assert (after.discovery.node, after.discovery.rack) == (before.discovery.node, before.discovery.rack)
    text = BASE.replace("kv_capacity", "kv_capacty")
    line = next(number for number, line in enumerate(text.splitlines(), start=1) if "kv_capacty" in line)
    _, faults = examine(text, "live.yaml", overlay)
    assert f"live.yaml:{line}: defaults.kv_capacty" in str(faults[0])


def test_a_file_may_say_little() -> None:
    """What it lacks is assumed; a NIC has the bandwidth that it declares for transfers inside a rack."""
    text = "name: small\nnetwork: {tier_bandwidth: {rack: 400 Gbps}}\ndefaults: {model: llama-3-8b, tp: 4}\n"
    deployment = Deployment.of(text, "small.yaml", overlay=KubernetesOverlay(KubernetesEntry()))
    section = deployment.cluster.file.discovery
    assert section is not None
    assert section.node.nics.compute is not None
    assert float(section.node.nics.compute.bytes_per_s) == 12.5e9
    assert deployment.cluster.file.defaults.model == "llama-3-8b"
    assert float(deployment.cluster.file.defaults.kv_capacity_bytes or 0) == 40e9


@pytest.mark.parametrize("section", ["discovery: 5", "discovery: {kubernetes: 5}", "defaults: 5"])
def test_a_wrong_form_is_reported(section: str) -> None:
    """The overlay leaves it to the check of the form."""
    with pytest.raises(InputErrors, match="5 is not a mapping"):
        Deployment.of(f"name: x\n{section}\n", "live.yaml", overlay=KubernetesOverlay(KubernetesEntry()))


def test_the_defaults_survive_their_text() -> None:
    """As every cluster file."""
    assert parse(kubernetes_file().to_yaml()).file == kubernetes_file()
    assert parse(yaml_text(read_plain(kubernetes_file().to_yaml(), ""))).file == kubernetes_file()
