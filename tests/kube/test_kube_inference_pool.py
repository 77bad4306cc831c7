"""What an InferencePool selects, what it says of its picker, and how its ports change what pods are read as."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kube.inference_pool import pool_document
from tests.kube.manifests import node, pod

from kvroute.kube.api.inference_pool import (
    InferencePool,
    Members,
    Service,
    members_of,
    reference_faults,
)
from kvroute.kube.discovery.pods import PodReading, PodReadSpec, read_pod
from kvroute.topology.label_selector import selector_fault
from kvroute.types import InputError, OwnPicker

LABEL = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,20}[A-Za-z0-9])?", fullmatch=True)
PORTS = st.lists(st.integers(1, 65535), min_size=1, max_size=8, unique=True)
OWN = OwnPicker(9002)
PRODUCER = '{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}'


def pool(labels: dict[str, str] | None = None, ports: tuple[int, ...] = (8000,), **spec: Any) -> InferencePool:
    """Return a pool as discovery reads it."""
    document = pool_document("a", {"app": "vllm"} if labels is None else labels, ports, **spec)
    return msgspec.json.decode(msgspec.json.encode(document), type=InferencePool)


def service(*ports: dict[str, Any], kind: str = "ClusterIP") -> Service:
    """Return a Service as the check reads it."""
    return msgspec.convert({"metadata": {"name": "epp"}, "spec": {"type": kind, "ports": list(ports)}}, Service)


def read(ports: tuple[int, ...], **changes: Any) -> PodReading:
    """Return what a pod is with the ports of a pool."""
    return read_pod(pod("a", **changes), node(), PodReadSpec(selected=True, ports=ports))


@given(st.dictionaries(LABEL, LABEL | st.just(""), min_size=1, max_size=4), PORTS)
def test_every_valid_pool_has_a_selector_and_its_ports(labels: dict[str, str], ports: list[int]) -> None:
    """The selector has every label, in a form that the API server accepts, whatever the order of the labels."""
    found = members_of(pool(labels, tuple(ports)))
    assert found.ports == tuple(ports)
    assert selector_fault(found.labels) == ""
    assert dict(part.split("=") for part in found.labels.split(",")) == labels
    assert members_of(pool(dict(reversed(labels.items())), tuple(ports))) == found


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (pool({}), "spec.selector: it selects no pods; add matchLabels"),
        (pool(ports=()), "spec.targetPorts: it has no usable ports"),
        (pool(ports=(8000, 8000)), "spec.targetPorts: it has no usable ports"),
        (pool(ports=(0,)), "spec.targetPorts: it has no usable ports"),
        (pool(appProtocol="kubernetes.io/h2c"), "spec.appProtocol: kvroute does not speak kubernetes.io/h2c"),
        (InferencePool(), "spec.selector: it selects no pods"),
    ],
)
def test_a_pool_without_endpoints_is_one_sentence(made: InferencePool, says: str) -> None:
    """With the field."""
    with pytest.raises(InputError) as raised:
        members_of(made)
    assert str(raised.value).startswith(says)


@pytest.mark.parametrize(
    ("reference", "found", "says"),
    [
        ({}, service({"port": 9002}), ""),
        ({}, service({"port": 9002, "targetPort": 9002}), ""),
        ({}, service({"port": 9002, "targetPort": "grpc"}), ""),
        ({"port": {"number": 443}}, service({"port": 80}, {"port": 443, "targetPort": 9002}), ""),
        ({}, service({"port": 9002, "targetPort": 9003}), "port 9002 of the Service epp leads to port 9003, and this"),
        ({"port": {"number": 9003}}, service({"port": 9003}), "port 9003 of the Service epp leads to port 9003, and"),
        ({}, service({"port": 80}, {"port": 81}), "the Service epp has no port 9002; its ports: 80, 81"),
        ({}, service(), "the Service epp has no port 9002; its ports: none"),
        ({}, service({"port": 9002}, kind="ExternalName"), "the Service epp is an ExternalName, which gateways must"),
        ({}, None, "there is no Service 'epp'; create it"),
        ({"kind": "Picker", "group": "example.com"}, None, "it names a example.com/Picker, not a Service"),
        ({"port": None}, None, "it names no port; add the port of the picker's Service"),
    ],
)
def test_the_reference_should_lead_to_this_picker(reference: dict[str, Any], found: Service | None, says: str) -> None:
    """By the target port of the Service, which need not be the port of the reference."""
    given_ = {"name": "epp", "port": {"number": 9002}} | reference
    made = pool(endpointPickerRef={key: value for key, value in given_.items() if value is not None})
    assert made.spec.endpoint_picker_ref is not None
    faults = [*reference_faults(made.spec.endpoint_picker_ref, OWN, found, known=True)]
    assert [fault.where.startswith("spec.endpointPickerRef") for fault in faults] == [True] * bool(says)
    assert not says or says in str(faults[0])


def test_without_the_right_to_read_the_service_its_port_counts_as_its_target_port() -> None:
    """The sentence says that the Service may map it."""
    for number, count in ((9002, 0), (443, 1)):
        made = pool(endpointPickerRef={"name": "epp", "port": {"number": number}})
        assert made.spec.endpoint_picker_ref is not None
        faults = [*reference_faults(made.spec.endpoint_picker_ref, OWN, None, known=False)]
        assert len(faults) == count
        assert all(
            "map it to 9002 in the Service epp, which this picker may not read" in str(fault) for fault in faults
        )


@pytest.mark.parametrize("fails_open", [None, False, True])
@pytest.mark.parametrize("mode", ["FailOpen", "FailClose", None])
def test_the_written_configuration_of_envoy_should_fail_as_the_pool_says(
    mode: str | None, fails_open: bool | None
) -> None:
    """FailClose is the default. Without a written configuration, there is nothing to compare."""
    given_ = {"name": "epp", "port": {"number": 9002}} | ({"failureMode": mode} if mode else {})
    made = pool(endpointPickerRef=given_)
    assert made.spec.endpoint_picker_ref is not None
    own, found = OwnPicker(9002, fails_open), service({"port": 9002})
    faults = reference_faults(made.spec.endpoint_picker_ref, own, found, known=True)
    opens = mode == "FailOpen"
    wanted = [] if fails_open in (None, opens) else [f"use --fail {'open' if opens else 'closed'}"]
    assert [fault.hint for fault in faults] == wanted


def test_each_port_of_a_pool_is_an_engine_of_each_pod() -> None:
    """Rank by rank, with KV events on one port after the other; the command line's port does not count."""
    events = '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557"}'
    args = ["meta-llama/Llama-3.1-8B", "--port", "9000", "--kv-events-config", events]
    engines = read((8001, 8000), args=args).engines
    assert [(engine.name, engine.endpoint.url, engine.endpoint.kv_events) for engine in engines] == [
        ("llm.a_8001", "http://10.0.0.1:8001", "tcp://10.0.0.1:5557"),
        ("llm.a_8000", "http://10.0.0.1:8000", "tcp://10.0.0.1:5558"),
    ]
    assert [engine.name for engine in read((8001,), args=args).engines] == ["llm.a"]


def test_a_label_with_other_ports_is_a_warning() -> None:
    """The gateway sends requests to the ports of the pool only."""
    labels = {"kvroute.io/role": "decode", "kvroute.io/port": "8100"}
    reading = read((8000,), labels=labels)
    assert [engine.endpoint.url for engine in reading.engines] == ["http://10.0.0.1:8000"]
    [finding] = reading.findings
    assert (finding.effect, finding.field) == ("warning", "kvroute.io/port")
    assert not read((8100,), labels=labels).findings


@pytest.mark.parametrize(
    ("container", "role"),
    [
        ({"image": "example.com/engine:1", "command": ["engine"], "args": []}, "both"),
        ({}, "both"),
        ({"args": ["m", "--kv-transfer-config", PRODUCER]}, "prefill"),
        ({"command": ["python3", "-m", "dynamo.vllm"], "args": ["--model", "m"]}, "both"),
    ],
)
def test_a_member_of_a_pool_serves_whole_requests_unless_something_says_otherwise(
    container: dict[str, Any], role: str
) -> None:
    """Without a pool, a pod whose role is not known is left out."""
    [engine] = read((8000,), labels={}, container=container).engines
    assert engine.role == role
    alone = read_pod(pod("a", labels={}, container=container), node(), PodReadSpec(selected=True))
    assert bool(alone.engines) == (role != "both")


def test_a_pod_that_says_that_it_is_no_engine_is_none() -> None:
    """Although the pool selects it."""
    assert read((8000,), labels={"kvroute.io/role": "none"}) == PodReading()


def test_members_are_compared_by_selector_and_ports() -> None:
    """A change of anything else of the pool is no reason to list the pods again."""
    assert members_of(pool()) == members_of(pool(endpointPickerRef={"name": "x"})) == Members("app=vllm", (8000,))
