"""A picker whose engines are those of an InferencePool."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest
from tests.commands import kvroute_command
from tests.epp.envoy_rig import PickerRig, address, alone, completion_body, picking
from tests.kube.client import MERGE
from tests.kube.inference_pool import POOLS, install, pool_document
from tests.kube.kubeconfigs import kubeconfig
from tests.serve.discovery.kubernetes_rig import Rig, play
from tests.serve.stub_engines import Engine, Gate, listening, tokens
from tests.waiting import until

from kvroute.epp.server import PickerSpec
from kvroute.serve.lifecycle.deployment import Deployment

CLUSTER = """
name: live
timing:
  default: {prefill: {kind: linear, per_token: 1 us, base: 1 ms}, decode: {base: 2 ms, per_request: 10 us}}
defaults: {model: llama-3-70b, kv_capacity: 60 GB}
discovery:
  kubernetes: {kubeconfig: kubeconfig, pool: a}
  node: {gpus: 8, nics: {compute: {count: 8, capacity: 100 Gbps}}}
gateway:
  listen: {port: 0}
  admin: {port: 0}
  health: {interval: 200 ms}
"""


def deployed(rig: Rig) -> Deployment:
    """Return the cluster whose engines are those of the pool."""
    return Deployment.of(CLUSTER, str(rig.folder / "cluster.yaml"))


async def targets(rig: Rig, *engines: Engine) -> None:
    """Make these engines the target ports of the pool."""
    ports = [{"number": engine.port} for engine in engines]
    await rig.client.must("PATCH", f"{POOLS}/a", {"spec": {"targetPorts": ports}}, MERGE)


async def pod(rig: Rig) -> None:
    """Create the only pod of the pool, on this machine."""
    await rig.put("p", labels={"app": "x"}, container={"args": ["llama-3-70b"]}, podIP="127.0.0.1")


def up_of(picker: PickerRig) -> set[str]:
    """Return the names of the engines that take requests."""
    return {name for name, engine in picker.gateway.runtime.engines.items() if engine.availability.up}


async def picked(picker: PickerRig, count: int) -> set[str]:
    """Return the first endpoints of so many requests that are in progress at the same time."""
    streams = [picker.stream() for _ in range(count)]
    found = [(await stream.ask(completion_body(user=str(n)))).endpoints[0] for n, stream in enumerate(streams)]
    for stream in streams:
        stream.call.cancel()
    return set(found)


def test_each_target_port_of_a_pod_is_an_instance(tmp_path: Path) -> None:
    """Its ranks get requests each on its own, and other ports take their place while the picker runs."""

    async def scenario(rig: Rig) -> None:
        engines = alone(3)
        await install(rig.client)
        async with listening(engines):
            await rig.client.must(
                "POST", POOLS, pool_document("a", {"app": "x"}, [engine.port for engine in engines[:2]])
            )
            await pod(rig)
            async with picking(deployed(rig)) as picker:
                await until(lambda: up_of(picker) == {f"llm.p_{engine.port}" for engine in engines[:2]})
                assert await picked(picker, 6) == {address(engine) for engine in engines[:2]}
                await targets(rig, *engines[1:])
                await until(lambda: up_of(picker) == {f"llm.p_{engine.port}" for engine in engines[1:]})
                assert await picked(picker, 6) == {address(engine) for engine in engines[1:]}
                assert await picker.becomes_idle()

    play(scenario, tmp_path)


def test_the_only_port_of_a_pod_changes_when_its_requests_have_ended(tmp_path: Path) -> None:
    """The engine keeps its name. It gets no requests meanwhile, and the one in progress is not disturbed."""

    async def scenario(rig: Rig) -> None:
        engines, gate = alone(2), Gate()
        engines[0].serve = gate.before(tokens)
        await install(rig.client)
        async with listening(engines):
            await rig.client.must("POST", POOLS, pool_document("a", {"app": "x"}, [engines[0].port]))
            await pod(rig)
            async with picking(deployed(rig)) as picker:
                await until(lambda: up_of(picker) == {"llm.p"})
                running = asyncio.create_task(picker.through({"model": "llama-3-70b", "prompt": "a", "max_tokens": 3}))
                await gate.entered.wait()
                await targets(rig, engines[1])
                await until(lambda: up_of(picker) == set())
                assert (await picker.stream().ask(completion_body())).status == 503
                gate.open.set()
                assert (await running)[0] == 200
                await until(lambda: up_of(picker) == {"llm.p"})
                assert await picked(picker, 2) == {address(engines[1])}
                assert await picker.becomes_idle()

    play(scenario, tmp_path)


def test_a_deleted_pool_is_answered_with_one_sentence(tmp_path: Path) -> None:
    """The picker goes on without engines, and is not ready."""

    async def scenario(rig: Rig) -> None:
        engines = alone(1)
        await install(rig.client)
        async with listening(engines):
            await rig.client.must("POST", POOLS, pool_document("a", {"app": "x"}, [engines[0].port]))
            await pod(rig)
            async with picking(deployed(rig)) as picker:
                await until(lambda: up_of(picker) == {"llm.p"})
                await rig.client.must("DELETE", f"{POOLS}/a", {})
                await until(lambda: not picker.gateway.runtime.engines)
                for path in ("/v1/completions", "/v1/embeddings"):
                    answer = await picker.stream().ask(completion_body(), path=path)
                    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
                    assert b'"no instance is up"' in answer.body
                assert picker.gateway.ready() == "no prefill instance is up"
                assert "kvroute_discovery_failing 0\n" in await picker.metrics()
                assert 'kvroute_discovery_findings{effect="left_out"} 1\n' in await picker.metrics()

    play(scenario, tmp_path)


def test_the_picker_says_that_the_pool_names_another_port(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It knows the port that the system has chosen for it, and how the configuration fails that it has written."""

    async def scenario(rig: Rig) -> None:
        await install(rig.client)
        service = {"metadata": {"name": "epp"}, "spec": {"ports": [{"port": 9002, "targetPort": 1}]}}
        await rig.client.must("POST", "/api/v1/namespaces/llm/services", service)
        reference = {"name": "epp", "port": {"number": 9002}, "failureMode": "FailOpen"}
        await rig.client.must("POST", POOLS, pool_document("a", {"app": "x"}, endpointPickerRef=reference))
        async with picking(deployed(rig), PickerSpec(fails_open=False)) as picker:
            reasons: set[str] = set()

            def logged() -> bool:
                found = [record for record in caplog.records if record.message == "discovery_finding"]
                reasons.update(record.__dict__["fields"]["reason"] for record in found)
                return len(reasons) == 2

            await until(logged)
            port = f"leads to port 1, and this picker listens on {picker.gateway.port}"
            assert [port in reason or "use --fail open" in reason for reason in reasons] == [True, True]

    play(scenario, tmp_path)


def test_a_pool_that_does_not_exist_ends_the_start(tmp_path: Path) -> None:
    """One sentence and exit code 2; so does a server that does not know the kind."""

    async def started(rig: Rig) -> tuple[int, str]:
        config = kubeconfig(rig.folder, rig.server.url, {"token": "admin"})
        command = kvroute_command("epp", "--kubernetes", "--pool", "llm/a")
        command += ["--kubeconfig", str(config), "--port", "0", "--admin-port", "0"]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
        return done.returncode, done.stderr.strip()

    async def scenario(rig: Rig) -> None:
        code, errors = await started(rig)
        known = "the API server has no InferencePool of inference.networking.k8s.io/v1; install the definitions of the "
        known += "Gateway API inference extension, or list the engines in a cluster file"
        assert (code, errors.endswith(known), len(errors.splitlines())) == (2, True, 1), errors
        await install(rig.client)
        code, errors = await started(rig)
        known = "there is no InferencePool llm/a; create it, or give another one"
        assert (code, errors.endswith(known), len(errors.splitlines())) == (2, True, 1), errors

    play(scenario, tmp_path)
