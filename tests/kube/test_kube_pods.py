"""From pods to engines: laws over any pods, then the manifests of vLLM, SGLang, llm-d, Dynamo and others."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.kube.manifests import NIXL, node, pod, pod_document

from kvroute.kube.api.objects import KubeNode, KubePod
from kvroute.kube.discovery.labels import OWN_KEYS, ROLE_ALIASES
from kvroute.kube.discovery.pods import PodFinding, PodReading, PodReadSpec, read_pods
from kvroute.types import TRAITS, Endpoint
from kvroute.types.discovered import Discovered, Place

ROOT = Path(__file__).resolve().parents[2]
NODES = {"node-1": node("node-1", {"topology.kubernetes.io/zone": "z1", "nvidia.com/rack": "r1"})}
SGLANG = ["python3", "-m", "sglang.launch_server"]


def read(*pods: KubePod, nodes: dict[str, KubeNode] = NODES, **options: Any) -> PodReading:
    return read_pods(pods, nodes, PodReadSpec(**options))


def engine(one: KubePod, **options: Any) -> Discovered:
    """The only engine of a pod, which has no findings."""
    reading = read(one, **options)
    assert reading.findings == ()
    assert len(reading.engines) == 1
    return reading.engines[0]


def finding(one: KubePod, **options: Any) -> PodFinding:
    """The only finding of a pod."""
    reading = read(one, **options)
    assert len(reading.findings) == 1, reading
    return reading.findings[0]


TEXTS = st.text(alphabet='abdefilprv0189-,*:/ []{}"$', max_size=9)
OPTIONS = st.sampled_from(
    ["--port", "--kv-transfer-config", "--kv-events-config", "-tp", "--served-model-name", "--data-parallel-size"]
)
KEYS = st.sampled_from([*OWN_KEYS, *ROLE_ALIASES, "leaderworkerset.sigs.k8s.io/worker-index"])
COMMANDS = st.sampled_from([["vllm", "serve"], SGLANG, ["sh", "-c"], ["python3", "-m", "dynamo.vllm"], None])
KNOWN = st.sampled_from(["prefill", "decode", "both", "none", "8000", "8000-8002", "0", "1", NIXL])


@st.composite
def odd_pods(draw: st.DrawFn) -> KubePod:
    """Return a pod with labels, arguments and states of any kind."""
    values = st.one_of(TEXTS, KNOWN)
    words = [word for pair in draw(st.lists(st.tuples(OPTIONS, values), max_size=4)) for word in pair]
    document = pod_document(
        draw(st.sampled_from(["a", "b", "c", "d.e"])),
        args=["m", *words],
        labels=draw(st.dictionaries(KEYS, values, max_size=4)),
        annotations=draw(st.dictionaries(KEYS, values, max_size=3)),
        container={"command": draw(COMMANDS), "ports": draw(st.sampled_from([None, [{"containerPort": 80}], [{}]]))},
        phase=draw(st.sampled_from(["Pending", "Running", "Failed", "Succeeded", "Odd"])),
        podIP=draw(st.sampled_from(["", "10.0.0.1", "10.0.0.2", "fd00::1"])),
        ready=draw(st.booleans()),
        deleted=draw(st.booleans()),
        uid=draw(st.sampled_from(["u1", "u2"])),
    )
    for part in draw(st.lists(st.sampled_from(["spec", "status", "metadata"]), max_size=2)):
        document.pop(part, None)
    return msgspec.convert(document, KubePod)


@given(st.lists(odd_pods(), max_size=6), st.integers(0, 2**32))
def test_the_result_depends_only_on_the_set_of_pods(pods: list[KubePod], seed: int) -> None:
    """Not on their order, and no pod raises."""
    shuffled = pods.copy()
    random.Random(seed).shuffle(shuffled)
    reading = read(*pods, selected=True)
    assert read(*shuffled, selected=True) == reading
    assert read(*pods, *shuffled, selected=True) == reading


@given(st.lists(odd_pods(), max_size=6))
def test_engines_are_fit_to_be_reported(pods: list[KubePod]) -> None:
    """Ascending by name, with distinct names, and with distinct addresses if they are ready."""
    engines = read(*pods).engines
    names = [engine.name for engine in engines]
    assert names == sorted(set(names))
    ready = [engine.endpoint.url for engine in engines if engine.ready]
    assert len(ready) == len(set(ready))
    for engine in engines:
        assert msgspec.json.decode(msgspec.json.encode(engine), type=Discovered) == engine


@given(odd_pods())
def test_a_prefill_engine_has_the_bootstrap_server_that_its_protocol_needs(one: KubePod) -> None:
    """Unless its label says that there is none."""
    for engine in read(one).engines:
        if TRAITS[engine.endpoint.protocol].needs_bootstrap and one.value("kvroute.io/bootstrap-port") != "0":
            assert bool(engine.endpoint.bootstrap) == (engine.role == "prefill")


@given(odd_pods(), st.lists(odd_pods(), max_size=4))
def test_other_pods_change_an_engine_only_by_its_name_or_address(one: KubePod, others: list[KubePod]) -> None:
    """A pod gives the same engines beside pods with other names and addresses."""
    alone = read(one)
    taken = {word for engine in alone.engines for word in (engine.name, engine.endpoint.url)}

    def collides(other: KubePod) -> bool:
        return any({engine.name, engine.endpoint.url} & taken for engine in read(other).engines)

    beside = read(one, *(other for other in others if not collides(other)))
    assert set(alone.engines) <= set(beside.engines)
    assert set(alone.findings) <= set(beside.findings)


def test_a_vllm_pod() -> None:
    """Every field of an engine."""
    events = json.dumps({"enable_kv_cache_events": True, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"})
    args = ["org/m", "--served-model-name", "m", "other", "--port", "8100", "--tensor-parallel-size=4", "-pp", "2"]
    args += ["--kv-transfer-config", NIXL, "--kv-events-config", events]
    assert engine(pod(args=args, restarts=3)) == Discovered(
        name="llm.prefill-0",
        uid="uid-prefill-0-3",
        role="prefill",
        endpoint=Endpoint(url="http://10.0.0.1:8100", kv_events="tcp://10.0.0.1:5557", kv_replay="tcp://10.0.0.1:5558"),
        place=Place(node="node-1", rack="z1._.r1", datacenter="z1"),
        model="m",
        tp=4,
        pp=2,
        ready=True,
    )


def test_ends_of_pods() -> None:
    """A pod that ends stays until it is gone, and is not ready; a finished one is gone."""
    assert not engine(pod(deleted=True)).ready
    assert not engine(pod(ready=False)).ready
    assert not engine(pod(conditions=None)).ready
    assert read(pod(phase="Succeeded")) == PodReading()
    waiting = finding(pod(podIP="", phase="Pending"))
    assert (waiting.effect, waiting.field) == ("waiting", "status.podIP")


def test_a_restarted_container_is_another_engine() -> None:
    """Its KV cache is empty; a restart of a sidecar changes nothing."""
    sidecar = [{"name": "engine", "restartCount": 0}, {"name": "proxy", "restartCount": 7}]
    assert engine(pod()).uid != engine(pod(restarts=1)).uid
    assert engine(pod()).uid == engine(pod(containerStatuses=sidecar)).uid


def test_an_address_that_is_used_again() -> None:
    """Belongs to the ready pod; two ready pods with one address are a finding."""
    old, new = pod("old", deleted=True), pod("new")
    assert [engine.name for engine in read(old, new).engines] == ["llm.new"]
    both = read(pod("a"), pod("b"))
    assert [engine.name for engine in both.engines] == ["llm.a"]
    assert both.findings[0].pod == "llm/b"
    assert len(read(pod("a", ready=False), pod("b", ready=False)).engines) == 2


@pytest.mark.parametrize(
    ("labels", "role"),
    [
        ({"llm-d.ai/role": "prefill"}, "prefill"),
        ({"llm-d.ai/role": "prefill-decode"}, "both"),
        ({"llm-d.ai/role": "both"}, "both"),
        ({"nvidia.com/dynamo-component-type": "worker", "nvidia.com/dynamo-sub-component-type": "decode"}, "decode"),
        ({"nvidia.com/dynamo-component-type": "prefill"}, "prefill"),
        ({"disaggregatedset.x-k8s.io/role": "decode"}, "decode"),
        ({"model": "decode", "app": "decode"}, "decode"),
        ({"kvroute.io/role": "both", "llm-d.ai/role": "prefill"}, "both"),
    ],
)
def test_role_labels_of_other_projects(labels: dict[str, str], role: str) -> None:
    """kvroute's own label counts first."""
    assert engine(pod(labels=labels)).role == role


def test_pods_that_are_no_engines() -> None:
    """They give nothing, not even a finding, unless the user has selected them."""
    plain = {"command": ["nginx"], "args": None, "image": "nginx"}
    assert read(pod(labels={}, container=plain)) == PodReading()
    assert finding(pod(labels={}, container=plain), selected=True).field == "kvroute.io/role"
    for labels in (
        {"nvidia.com/dynamo-component-type": "frontend"},
        {"llm-d.ai/role": "encode"},
        {"kvroute.io/role": "none"},
    ):
        assert read(pod(labels=labels), selected=True) == PodReading()


def test_roles_by_command_line() -> None:
    """A connector in the role kv_both leaves it open; without a connector the engine does both."""
    producer, consumer = (NIXL.replace("kv_both", role) for role in ("kv_producer", "kv_consumer"))
    assert engine(pod(labels={}, args=["m", "--kv-transfer-config", producer])).role == "prefill"
    assert engine(pod(labels={}, args=["m", "--kv-transfer-config", consumer])).role == "decode"
    assert engine(pod(labels={}, args=["m"])).role == "both"
    assert finding(pod(labels={})).sentence == (
        "llm/prefill-0: kvroute.io/role: no label gives the role, and the command line leaves it open; "
        "add the label kvroute.io/role: prefill, decode, both or none"
    )
    contrary = finding(pod(args=["m", "--kv-transfer-config", consumer]))
    assert (contrary.effect, contrary.field) == ("warning", "spec.containers[].args")


def test_sglang() -> None:
    """The role comes from its mode, the bootstrap port from option, annotation or default."""
    args = ["--model-path", "/models/m", "--tp", "16", "--disaggregation-mode", "prefill"]

    def sglang(*more: str, **changes: Any) -> Discovered:
        return engine(pod(labels={}, args=[*args, *more], container={"command": SGLANG}, **changes))

    found = sglang()
    assert (found.role, found.tp, found.pp, found.model) == ("prefill", 16, 1, "/models/m")
    assert found.endpoint == Endpoint(url="http://10.0.0.1:30000", protocol="sglang", bootstrap="10.0.0.1:8998")
    assert sglang("--disaggregation-bootstrap-port", "9001").endpoint.bootstrap == "10.0.0.1:9001"
    assert sglang(annotations={"sglang.ai/bootstrap-port": "9002"}).endpoint.bootstrap == "10.0.0.1:9002"
    assert sglang(annotations={"kvroute.io/bootstrap-port": "9003"}).endpoint.bootstrap == "10.0.0.1:9003"
    decode = sglang("--disaggregation-mode=decode", podIP="fd00::7")
    assert decode.endpoint == Endpoint(url="http://[fd00::7]:30000", protocol="sglang")


def test_connectors_give_the_protocol() -> None:
    """Also inside a MultiConnector; kvroute's own has a port, which counts up by rank."""

    def endpoint(config: dict[str, object], **changes: Any) -> Endpoint:
        return engine(pod(args=["m", "-tp", "2", "--kv-transfer-config", json.dumps(config)], **changes)).endpoint

    assert endpoint({"kv_connector": "NixlConnector"}).protocol == "vllm"
    assert endpoint({"kv_connector": "NixlPushConnector"}).protocol == "nixl-push"
    mooncake = endpoint({"kv_connector": "MooncakeConnector"})
    assert (mooncake.protocol, mooncake.bootstrap) == ("mooncake", "10.0.0.1:8998")
    variable = {"env": [{"name": "VLLM_MOONCAKE_BOOTSTRAP_PORT", "value": "9100"}]}
    assert endpoint({"kv_connector": "MooncakeConnector"}, container=variable).bootstrap == "10.0.0.1:9100"
    inner = [{"kv_connector": "OffloadingConnector"}, {"kv_connector": "MooncakeConnector"}]
    multi: dict[str, object] = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": inner}}
    assert endpoint(multi).protocol == "mooncake"
    own: dict[str, object] = {"kv_connector": "KvrouteConnector", "kv_connector_extra_config": {"port": 7100}}
    assert (endpoint(own).protocol, endpoint(own).bootstrap) == ("vllm", "10.0.0.1:7100")
    assert engine(pod(annotations={"kvroute.io/protocol": "mooncake"})).endpoint.protocol == "mooncake"
    unknown = finding(pod(args=["m", "--kv-transfer-config", '{"kv_connector": "P2pNcclConnector"}']))
    assert unknown.effect == "left out"
    assert "P2pNcclConnector" in unknown.what
    assert finding(pod(args=["m"])).effect == "warning"


def test_data_parallel_servers() -> None:
    """One engine for each port; ports of events and of kvroute's connector count up."""
    config = {"kv_connector": "KvrouteConnector", "kv_connector_extra_config": {"port": 7100}}
    args = ["m", "-tp", "2", "--kv-transfer-config", json.dumps(config), "--data-parallel-size", "2"]
    args += ["--kv-events-config", '{"enable_kv_cache_events": true}']
    one, two = read(pod(args=args, annotations={"kvroute.io/port": "8000-8001"})).engines
    assert (one.name, two.name) == ("llm.prefill-0_8000", "llm.prefill-0_8001")
    assert one.uid == two.uid
    assert two.endpoint == Endpoint(
        url="http://10.0.0.1:8001", kv_events="tcp://10.0.0.1:5558", bootstrap="10.0.0.1:7102"
    )
    rank = engine(pod(args=[*args, "--data-parallel-rank", "3"]))
    assert (rank.endpoint.kv_events, rank.endpoint.bootstrap) == ("tcp://10.0.0.1:5560", "10.0.0.1:7106")


EVENTS = ["--kv-events-config", '{"enable_kv_cache_events": true, "replay_endpoint": "tcp://*:5657"}']


@pytest.mark.parametrize(
    "how",
    [
        {"args": ["m", "-dp", "2", *EVENTS]},
        {"args": ["m", *EVENTS], "labels": {"kvroute.io/dp": "2"}},
        {"args": ["m", *EVENTS], "labels": {"llm-d.ai/data-parallel-ranks-per-member": "2"}},
        {"args": ["m", "-dp", "8", *EVENTS], "annotations": {"kvroute.io/dp": "2"}},
        {"args": ["m", "-dp", "8", "--data-parallel-size-local", "2", "--data-parallel-hybrid-lb", *EVENTS]},
    ],
    ids=["option", "label", "llm-d", "label first", "hybrid"],
)
def test_data_parallel_ranks_behind_one_port(how: dict[str, Any]) -> None:
    """One engine of vLLM is an instance for each rank, with one URL; the label counts before the command line."""
    reading = read(pod(**{**how, "labels": {"kvroute.io/role": "decode", **how.get("labels", {})}}))
    assert reading.findings == () or [finding.effect for finding in reading.findings] == ["warning"]
    assert [(engine.name, engine.engine, engine.rank) for engine in reading.engines] == [
        ("llm.prefill-0_dp0", "llm.prefill-0", 0),
        ("llm.prefill-0_dp1", "llm.prefill-0", 1),
    ]
    assert [engine.endpoint for engine in reading.engines] == [
        Endpoint(
            url="http://10.0.0.1:8000",
            kv_events=f"tcp://10.0.0.1:{5557 + rank}",
            kv_replay=f"tcp://10.0.0.1:{5657 + rank}",
        )
        for rank in (0, 1)
    ]


def test_the_second_node_of_a_hybrid_load_balancer() -> None:
    """Requests name its ranks from 0; the ports of KV events count on from the first node."""
    options = ["-dp", "4", "--data-parallel-size-local", "2", "--data-parallel-start-rank", "2"]
    both = read(pod(args=["m", *options, *EVENTS], labels={"kvroute.io/role": "decode"})).engines
    assert [(engine.rank, engine.endpoint.kv_events) for engine in both] == [
        (0, "tcp://10.0.0.1:5559"),
        (1, "tcp://10.0.0.1:5560"),
    ]


@pytest.mark.parametrize("index", [0, 1])
def test_every_pod_of_the_documented_wide_ep_engine_serves_its_own_ranks(index: int) -> None:
    """A hybrid load balancer: also the workers of a LeaderWorkerSet serve. The start rank is computed by the shell, so
    it follows from the index of the pod."""
    page = (ROOT / "docs" / "data-parallel.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(apiVersion: leaderworkerset.*?)```", page, re.DOTALL)
    template = yaml.safe_load(text)["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    labels = {**template["metadata"]["labels"], "leaderworkerset.sigs.k8s.io/worker-index": str(index)}
    (container,) = template["spec"]["containers"]
    reading = read(pod(container=container, labels=labels))
    assert reading.findings == ()
    assert [engine.name for engine in reading.engines] == [f"llm.prefill-0_dp{rank}" for rank in range(8)]
    assert {(engine.model, engine.tp, engine.role) for engine in reading.engines} == {("deepseek-v3", 1, "prefill")}
    assert [(engine.endpoint.url, engine.endpoint.kv_events) for engine in reading.engines] == [
        ("http://10.0.0.1:8000", f"tcp://10.0.0.1:{5557 + 8 * index + rank}") for rank in range(8)
    ]


def test_llm_d_gives_the_first_rank_of_a_pod_by_a_label() -> None:
    labels = {"kvroute.io/role": "decode", "llm-d.ai/data-parallel-ranks-per-member": "2"}
    one, two = read(pod(args=["m", *EVENTS], labels={**labels, "llm-d.ai/data-parallel-rank-start": "6"})).engines
    assert (one.rank, one.endpoint.kv_events, two.endpoint.kv_events) == (
        0,
        "tcp://10.0.0.1:5563",
        "tcp://10.0.0.1:5564",
    )


def test_ranks_of_several_pods_behind_one_port_are_one_engine() -> None:
    """vLLM then divides the requests itself."""
    args = ["m", "-dp", "16", "--data-parallel-size-local", "8", "--kv-transfer-config", NIXL]
    reading = read(pod(args=args))
    (one,) = reading.engines
    assert (one.name, one.engine) == ("llm.prefill-0", "")
    (shared,) = reading.findings
    assert shared.what == (
        "the 16 data-parallel ranks of one port run in several pods, so the gateway sees them as one engine"
    )


def test_the_ranks_of_sglang_are_one_engine() -> None:
    args = ["--model-path", "m", "--disaggregation-mode", "decode", "--dp", "2"]
    reading = read(pod(args=args, container={"command": SGLANG}))
    (one,) = reading.engines
    assert one.engine == ""
    assert "sglang engines take no rank from a header" in reading.findings[0].what


def test_a_wrong_number_of_ranks_leaves_the_pod_out() -> None:
    left_out = finding(pod(labels={"kvroute.io/role": "decode", "kvroute.io/dp": "0"}))
    assert (left_out.effect, left_out.field) == ("left out", "kvroute.io/dp")
    assert left_out.hint == "give a number from 1 to 1024"


def test_followers_of_multi_node_engines_serve_nothing() -> None:
    """Of a LeaderWorkerSet, of vLLM without an API server, and of SGLang's other nodes."""
    index = "leaderworkerset.sigs.k8s.io/worker-index"
    assert engine(pod(labels={"kvroute.io/role": "prefill", index: "0"}))
    assert read(pod(labels={"kvroute.io/role": "prefill", index: "1"})) == PodReading()
    assert read(pod(args=["m", "--headless"])) == PodReading()
    assert read(pod(args=["--node-rank", "1"], container={"command": SGLANG})) == PodReading()


def test_dynamo_workers_have_no_http_server() -> None:
    """Unless a port is given."""
    dynamo = {"command": ["python3", "-m", "dynamo.vllm"]}
    labels = {"nvidia.com/dynamo-component-type": "decode"}
    left_out = finding(pod(labels=labels, args=["--model", "m"], container=dynamo))
    assert "Dynamo worker" in left_out.what
    assert (
        engine(pod(labels={**labels, "kvroute.io/port": "8000"}, args=["--model", "m"], container=dynamo)).role
        == "decode"
    )


def test_ports() -> None:
    """Label, option, default of the engine, then the declared ports."""
    plain: dict[str, Any] = {"command": ["serve-llm"], "image": "own"}
    two = [{"containerPort": 9090}, {"name": "http", "containerPort": 8080}]
    assert engine(pod(container={**plain, "ports": two})).endpoint.url == "http://10.0.0.1:8080"
    assert engine(pod(container={**plain, "ports": two[:1]})).endpoint.url == "http://10.0.0.1:9090"
    assert engine(pod(container={**plain, "ports": two}, annotations={"kvroute.io/port": "1"})).endpoint.url.endswith(
        ":1"
    )
    assert (
        finding(pod(container={**plain, "ports": [two[0], {"containerPort": 1}]})).field
        == "spec.containers[engine].ports"
    )
    assert finding(pod(args=["m", "--port", "$(PORT)"])).what == "the value of --port is not known"
    assert (
        engine(pod(args=["m", "--kv-transfer-config", NIXL, "--ssl-keyfile", "k"])).endpoint.url
        == "https://10.0.0.1:8000"
    )


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("kvroute.io/role", "prefil", "did you mean 'prefill'?"),
        ("kvroute.io/protocol", "nixl", "unknown protocol 'nixl'; known: vllm, mooncake, sglang"),
        ("kvroute.io/tp", "0", "'0' is not a number of shards"),
        ("kvroute.io/port", "8000-7000", "'8000-7000' is not a port"),
        ("kvroute.io/port", "8000,8000", "names a port twice"),
        ("kvroute.io/port", "1-65535", "up to 64"),
        ("kvroute.io/kv-events-port", "x", "'x' is not a port"),
        ("kvroute.io/container", "main", "its containers: engine"),
    ],
)
def test_wrong_labels_leave_a_pod_out(key: str, value: str, part: str) -> None:
    """With the field and how to fix it."""
    found = finding(
        pod(annotations={key: value}, labels={} if key == "kvroute.io/role" else {"kvroute.io/role": "prefill"})
    )
    assert (found.effect, found.field) == ("left out", key)
    assert part in found.sentence


def test_kv_events_that_nobody_can_subscribe_to() -> None:
    """vLLM connects to an endpoint with a host; llm-d's examples do so."""
    config = '{"enable_kv_cache_events": true, "endpoint": "tcp://gaie-epp:5557"}'
    args = ["m", "--kv-transfer-config", NIXL, "--kv-events-config", config]
    assert "tcp://*:PORT" in finding(pod(args=args)).sentence
    assert engine(pod(args=args, annotations={"kvroute.io/kv-events-port": "0"})).endpoint.kv_events == ""
    assert (
        engine(pod(args=args, annotations={"kvroute.io/kv-events-port": "5557"})).endpoint.kv_events
        == "tcp://10.0.0.1:5557"
    )


def test_nodes_that_are_not_known() -> None:
    """A warning, unless nodes cannot be read at all."""
    assert finding(pod(), nodes={}).field == "spec.nodeName"
    assert engine(pod(), nodes={}, nodes_known=False).place == Place(node="node-1")
    copied = {"kvroute.io/role": "prefill", "kvroute.io/topology.rack": "r9"}
    assert engine(pod(labels=copied), nodes={}, nodes_known=False).place.rack == "r9"


def test_several_containers() -> None:
    """The engine's container is the one that starts an engine, wherever it stands."""
    document = pod_document()
    document["spec"]["containers"].insert(0, {"name": "proxy", "image": "envoy", "ports": [{"containerPort": 1}]})
    assert engine(msgspec.convert(document, KubePod)).endpoint.url == "http://10.0.0.1:8000"
