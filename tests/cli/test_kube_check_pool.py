"""`kvroute kube check --pool` against an API server: it reports what `kvroute epp` discovers, and what is missing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.kube.inference_pool import POOLS, install, pool_document
from tests.kube.kubeconfigs import kubeconfig
from tests.kube.manifests import node_document
from tests.serve.discovery.kubernetes_rig import Rig, created, play
from tests.waiting import until

from kvroute.kube.api.client import Access
from kvroute.kube.discovery.engines import DiscoverySpec
from kvroute.kube.discovery.pool_discovery import PoolDiscovery

SERVICES = "/api/v1/namespaces/llm/services"
CHECK = ("kube", "check", "--kubeconfig", "kubeconfig", "--pool", "llm/a")
REFERENCE = {"name": "epp", "port": {"number": 9002}}


async def pool(rig: Rig, *ports: int, labels: dict[str, str] | None = None, **spec: Any) -> None:
    """Create the pool `a`; by default its pods are those with the label app=vllm."""
    await rig.client.must("POST", POOLS, pool_document("a", labels or {"app": "vllm"}, ports or (8000,), **spec))


async def member(rig: Rig, name: str, number: int, role: str = "", **changes: Any) -> None:
    """Create a pod of the pool."""
    labels = {"app": "vllm"} | ({"kvroute.io/role": role} if role else {})
    await rig.put(name, labels=labels, podIP=f"10.0.0.{number}", **changes)


async def faults(rig: Rig, *options: str) -> list[str]:
    """Return the findings; the exit code must fit them."""
    code, out, err = await rig.kvroute(*CHECK, "--json", *options)
    assert code in (0, 1), err
    report = json.loads(out)
    assert (code == 0) == report["ok"] == (not report["faults"])
    found: list[str] = report["faults"]
    return found


def test_the_report_has_the_engines_that_a_picker_discovers(tmp_path: Path) -> None:
    """Two ports of each pod, roles by labels, a pod without a role, one that is not ready, one that is no member."""

    async def scenario(rig: Rig) -> None:
        await install(rig.client)
        await rig.client.must("POST", "/api/v1/nodes", created(node_document("w", {"nvidia.com/rack": "r"})))
        await rig.client.must("POST", SERVICES, _service({"port": 9002, "targetPort": 9003}))
        await pool(rig, 8000, 8001, endpointPickerRef=REFERENCE | {"failureMode": "FailOpen"})
        await member(rig, "p", 1, "prefill", node="w")
        await member(rig, "d", 2, "decode", node="w")
        await member(rig, "e", 3, "decode", node="w", ready=False)
        await member(rig, "b", 4, node="w", container={"image": "example.com/engine:1", "command": ["x"], "args": []})
        await rig.put("other", labels={"kvroute.io/role": "decode"}, podIP="10.0.0.5")
        code, out, err = await rig.kvroute(*CHECK)
        assert "InferencePool:   llm/a\n" in out, err
        assert "selector:        app=vllm (4 pods)\n" in out
        assert "target ports:    8000, 8001\n" in out
        assert "endpoint picker: Service epp, port 9002 (target port 9003), FailOpen\n" in out
        assert "endpoints:       6 of 8 ready: 2 both, 2 decode, 2 prefill\n" in out
        assert (code, "No findings." in out) == (0, True)
        code, out, err = await rig.kvroute(*CHECK, "--json")
        document = json.loads(out)
        assert document["pool"] == {
            "name": "llm/a",
            "selector": "app=vllm",
            "target_ports": [8000, 8001],
            "picker": {
                "kind": "Service",
                "name": "epp",
                "port": 9002,
                "target_port": 9003,
                "failure_mode": "FailOpen",
            },
            "pods": 4,
        }
        options = DiscoverySpec("llm")
        source = PoolDiscovery(Access(rig.folder / "kubeconfig"), options, "a")
        following = asyncio.create_task(source.run(rig.report))
        await until(lambda: bool(rig.reports) and len(rig.reports[-1]) == 8)
        assert document["engines"] == json.loads(msgspec.json.encode(rig.reports[-1]))
        following.cancel()

    play(scenario, tmp_path)


def _service(*ports: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "epp"}, "spec": {"selector": {"app": "epp"}, "ports": list(ports), **spec}}


def test_what_is_missing_is_one_sentence_each(tmp_path: Path) -> None:
    """Pods, partners, the Service of the picker, and an engine that Envoy cannot reach."""

    async def scenario(rig: Rig) -> None:
        await install(rig.client)
        await pool(rig, endpointPickerRef=REFERENCE)
        no_pod = (
            "InferencePool llm/a: spec.selector: no pod has the labels app=vllm; label the engines' pods, "
            "or change matchLabels"
        )
        no_service = "InferencePool llm/a: spec.endpointPickerRef.name: there is no Service 'epp'; create it"
        assert await faults(rig) == [no_service, no_pod]
        await rig.client.must("POST", SERVICES, _service({"port": 80}))
        no_port = "InferencePool llm/a: spec.endpointPickerRef.port: the Service epp has no port 9002; its ports: 80"
        assert await faults(rig) == [no_port, no_pod]
        await member(rig, "none", 1, "none")
        assert (await faults(rig))[1].startswith(
            "InferencePool llm/a: spec.selector: none of its 1 pods is an engine; see docs"
        )
        await member(rig, "p", 2, "prefill")
        assert await faults(rig) == [no_port, "llm.p: no decode engine has its model and protocol"]
        await member(rig, "d", 3, "decode")
        assert await faults(rig) == [no_port]
        assert await faults(rig, "--constraint", "rack:required") == [
            no_port,
            "node node-1: it has no rack, so rack:required excludes its engines; "
            "label it with kvroute.io/rack, nvidia.com/rack or another label of the rack",
        ]
        args = ["meta-llama/Llama-3.1-8B", "--ssl-keyfile", "key.pem"]
        await member(rig, "t", 4, "both", args=args)
        tls = "engine llm.t: endpoint: Envoy needs an IP address in the endpoint, which is https://10.0.0.4:8000; "
        assert await faults(rig) == [no_port, tls + "start it without TLS; Envoy adds TLS to engines itself"]

    play(scenario, tmp_path)


def test_a_pool_that_cannot_be_used_is_a_finding(tmp_path: Path) -> None:
    """With the field; no engine is reported, and the pods are not blamed."""

    async def scenario(rig: Rig) -> None:
        await install(rig.client)
        await pool(rig, appProtocol="kubernetes.io/h2c")
        await member(rig, "d", 1, "decode")
        what = "kvroute does not speak kubernetes.io/h2c with engines; use http, which is HTTP/1.1"
        assert await faults(rig) == [f"InferencePool llm/a: spec.appProtocol: {what}"]
        _, out, _ = await rig.kvroute(*CHECK)
        assert "endpoint picker: none, so gateways ask no picker\n" in out

    play(scenario, tmp_path)


@pytest.mark.parametrize(
    ("options", "token", "error"),
    [
        ((), "admin", "there is no InferencePool llm/a; create it, or give another one"),
        ((), "stranger", "the API server refuses to list"),
        (("--selector", "app=x"), "admin", "--pool and --selector exclude each other"),
        (("--all-namespaces",), "admin", "an InferencePool is in one namespace"),
        (("--namespace", "other"), "admin", "--pool names namespace llm, and --namespace other"),
        (("--pool", "A/b"), "admin", "'A/b' is not the name of an InferencePool"),
        (("--pool", "lmm/a"), "admin", "there is no namespace 'lmm'"),
    ],
)
def test_a_wrong_option_is_one_sentence(tmp_path: Path, options: tuple[str, ...], token: str, error: str) -> None:
    """Exit code 2."""

    async def scenario(rig: Rig) -> None:
        await install(rig.client)
        kubeconfig(rig.folder, rig.server.url, {"token": token})
        code, out, err = await rig.kvroute(*CHECK, *options)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert error in err

    play(scenario, tmp_path)


def test_a_server_that_knows_no_pools_is_one_sentence(tmp_path: Path) -> None:
    """It says what to install."""

    async def scenario(rig: Rig) -> None:
        code, _, err = await rig.kvroute(*CHECK)
        assert code == 2
        assert "the API server has no InferencePool of inference.networking.k8s.io/v1; install the definitions" in err

    play(scenario, tmp_path)
