"""The operator against an API server: real HTTP, watches, conflicts, admission calls, and only the rights it needs."""

from __future__ import annotations

import base64
from functools import partial
from typing import Any

from tests.kube.apiserver.faults import Fault
from tests.kube.event_loop import scenario
from tests.kube.operator.cluster_examples import gateway_pod, node, pod
from tests.kube.operator.operator_rig import NAMESPACE, Rig, add_webhooks, installed, monitors, plain
from tests.kube.resources.router_examples import Manifest, constrained, router, topology

from kvroute.kube.admission.certificates import read_secret
from kvroute.kube.operator.rights import RIGHTS

LABELS = {"kvroute.io/topology.zone": "z1", "kvroute.io/topology.rack": "r1"}


async def cluster(rig: Rig, *objects: Manifest) -> None:
    """Create a topology, a node, a KvRouter and one engine of each phase."""
    for obj in (topology(), node("n1", zone="z1", rack="r1"), constrained(), *objects):
        await rig.make(plain(obj))
    for role in ("prefill", "decode"):
        await rig.schedule(plain(pod(f"{role}-0", role)), "n1")


async def labelled(rig: Rig) -> bool:
    """Return True if both engines have their labels."""
    engines = [await rig.get("Pod", f"{role}-0") or {} for role in ("prefill", "decode")]
    return all(engine and LABELS.items() <= engine["metadata"]["labels"].items() for engine in engines)


async def condition(rig: Rig, name: str = "Ready") -> tuple[str, str]:
    """Return status and reason of a condition of the KvRouter."""
    found = await rig.get("KvRouter", "chat") or {}
    for reported in (found.get("status") or {}).get("conditions") or ():
        if reported["type"] == name:
            return reported["status"], reported["reason"]
    return "", ""


async def start_gateway(rig: Rig) -> None:
    """Start a pod of the gateway when its Deployment exists, as the controllers do."""
    if await rig.get("Deployment", "chat") is not None and await rig.get("Pod", "chat-gateway") is None:
        await rig.schedule(plain(gateway_pod("chat")), "n1")


async def serves(rig: Rig) -> bool:
    """Return True if everything about the KvRouter is as it should be; starts a gateway."""
    await start_gateway(rig)
    return await labelled(rig) and await condition(rig) == ("True", "Serving")


def test_a_gateway_from_a_router() -> None:
    """Labels, objects, conditions and Events; the operator sends nothing that its role does not allow."""

    async def run() -> None:
        async with installed() as rig:
            rig.server.audit.clear()
            async with rig.operator():
                await cluster(rig)
                await rig.until(lambda: serves(rig))
                for kind in ("ConfigMap", "ServiceAccount", "RoleBinding", "Service", "PodDisruptionBudget"):
                    owners = [obj["metadata"].get("ownerReferences", []) for obj in await rig.list(kind)]
                    assert [owner[0]["kind"] for owner in owners if owner] == ["KvRouter"], kind
                [events] = [{event["reason"] for event in await rig.list("Event")}]
                assert {"Serving", "Resolved", "Labelled"} <= events
                assert await rig.get("ClusterRoleBinding", "kvroute-gateways", "")
            calls = [call for call in rig.server.audit if "kvroute-operator" in call["user"]]
            used = {((call["group"], call["resource"]), call["verb"]) for call in calls}
            assert used <= {(key, verb) for key, verbs in RIGHTS.items() for verb in verbs}
            assert {(("", "pods"), "patch"), (("kvroute.io", "kvrouters/status"), "patch")} <= used

    scenario(run())


def test_silence_when_nothing_changes() -> None:
    """A cluster in its final state gets no more writes."""

    async def run() -> None:
        async with installed() as rig, rig.operator():
            await cluster(rig)
            await rig.until(lambda: serves(rig))
            await rig.until(lambda: _reads(rig, 2))
            rig.server.audit.clear()
            await rig.until(lambda: _reads(rig, 4))
            writes = [
                call
                for call in rig.server.audit
                if "kvroute-operator" in call["user"]
                and call["verb"] in ("create", "patch", "update", "delete")
                and call["resource"] != "leases"
            ]
            assert writes == []

    async def _reads(rig: Rig, count: int) -> bool:
        reads = [call for call in rig.server.audit if (call["verb"], call["resource"]) == ("get", "configmaps")]
        return len(reads) >= count

    scenario(run())


def test_what_is_deleted_and_changed() -> None:
    """Labels go with the KvRouter; a ServiceMonitor comes with its definition."""

    async def run() -> None:
        async with installed() as rig, rig.operator():
            await cluster(rig)
            await rig.until(lambda: serves(rig))
            await rig.make(monitors())
            await rig.until(lambda: rig.get("ServiceMonitor", "chat"))
            await rig.patch("KvRouter", "chat", {"spec": {"monitoring": False, "replicas": 1}})

            async def pruned() -> bool:
                return not await rig.list("ServiceMonitor") and not await rig.list("PodDisruptionBudget")

            await rig.until(pruned)
            await rig.delete("KvRouter", "chat")

            async def unlabelled() -> bool:
                gone = await rig.get("KvRouter", "chat") is None
                pods = await rig.list("Pod")
                return gone and not any(LABELS.keys() & pod["metadata"]["labels"].keys() for pod in pods)

            await rig.until(unlabelled)

    scenario(run())


def test_faults_of_the_server_are_retried() -> None:
    """Conflicts, overload, errors, lost answers and dropped watches end in the same state."""

    async def run() -> None:
        async with installed() as rig, rig.operator():
            for fault in (
                Fault(verbs=["patch"], resource="pods", code=409),
                Fault(verbs=["patch"], resource="pods", code=500, after=True),
                Fault(verbs=["patch"], resource="deployments", code=429, text=True),
                Fault(verbs=["patch"], resource="configmaps", drop=True),
                Fault(verbs=["patch"], resource="kvrouters", code=503),
                Fault(verbs=["get"], resource="services", code=500),
                Fault(verbs=["update"], resource="leases", code=500),
                Fault(verbs=["create"], resource="events", code=500),
            ):
                rig.server.faults.waiting.append(fault)
            await cluster(rig)
            await rig.admin.post("_control/drop-watches")
            await rig.until(lambda: serves(rig))
            assert len(await rig.list("Service")) == 1

    scenario(run())


def test_killed_operators_leave_no_trace() -> None:
    """An operator that ends after any number of its calls is followed by one that finishes the work."""

    async def run() -> None:
        async with installed() as rig:
            await cluster(rig)
            for calls in (1, 5, 12, 20, 26):
                rig.server.audit.clear()
                async with rig.operator(f"dies-{calls}"):
                    await rig.until(partial(_writes, rig, calls))
            async with rig.operator("last"):
                await rig.until(lambda: serves(rig))
                names = [event["metadata"]["name"] for event in await rig.list("Event")]
                assert len(names) == len(set(names))

    async def _writes(rig: Rig, count: int) -> bool:
        made = sum(call["verb"] in ("patch", "create") for call in rig.server.audit if "operator" in call["user"])
        return made >= count or await serves(rig)

    scenario(run())


def test_one_of_two_operators_leads() -> None:
    """The other one takes over when the leader has ended, and never acts before."""

    async def run() -> None:
        async with installed() as rig:
            async with rig.operator("one") as one:
                await rig.until(lambda: _true(one.leads))
                async with rig.operator("two") as two:
                    await cluster(rig)
                    await rig.until(lambda: serves(rig))
                    assert (one.leads, two.leads) == (True, False)
                    lease = await rig.get("Lease", "kvroute-operator", NAMESPACE) or {}
                    assert lease["spec"]["holderIdentity"] == "one"
            async with rig.operator("three") as three:
                await rig.until(lambda: _true(three.leads))
                lease = await rig.get("Lease", "kvroute-operator", NAMESPACE) or {}
                assert lease["spec"]["leaseTransitions"] >= 1

    async def _true(value: bool) -> bool:
        return value

    scenario(run())


def test_the_webhook_answers_the_server() -> None:
    """The operator makes its certificate; the server trusts it by the CA bundle that the operator has patched in."""

    async def run() -> None:
        async with (
            installed() as rig,
            rig.operator(port=0, host="127.0.0.1", names=("localhost",), certificates_s=0.1) as driver,
        ):
            await rig.until(lambda: _listens(driver))
            await add_webhooks(rig, driver.webhook_port)
            await rig.until(lambda: _trusted(rig))
            await rig.make(plain(topology()))
            await rig.make(plain(node("n1", zone="z1", rack="r1")))
            await rig.until(lambda: _refused(rig, constrained("rak"), "did you mean 'rack'?"))
            await rig.make(plain(constrained()))
            await rig.until(lambda: _injected(rig))
            await rig.until(lambda: _kept(rig))

    async def _listens(driver: Any) -> bool:
        return bool(driver.webhook_port > 0)

    async def _trusted(rig: Rig) -> bool:
        secret = await rig.get("Secret", "kvroute-webhook", NAMESPACE) or {}
        stored = read_secret(secret.get("data") or {})
        assert stored is not None
        bundle = base64.b64encode(stored.ca_bundle).decode()
        kinds = ("ValidatingWebhookConfiguration", "MutatingWebhookConfiguration")
        found = [await rig.get(kind, "kvroute", "") or {} for kind in kinds]
        return all(
            hook["clientConfig"].get("caBundle") == bundle
            for configuration in found
            for hook in configuration["webhooks"]
        )

    async def _refused(rig: Rig, obj: Manifest, sentence: str) -> bool:
        response = await rig.create(plain(obj))
        return response.status_code == 422 and sentence in response.json()["message"]

    async def _injected(rig: Rig) -> bool:
        """Create pods until the webhook knows the KvRouter."""
        name = f"prefill-{len(await rig.list('Pod'))}"
        await rig.schedule(plain(pod(name)), "n1")
        made = await rig.get("Pod", name) or {}
        return "kvroute-topology" in [volume["name"] for volume in made["spec"].get("volumes", [])]

    async def _kept(rig: Rig) -> bool:
        response = await rig.delete("ClusterTopology", "cluster")
        assert response.status_code == 422
        return "the KvRouter 'serving/chat' uses the level 'rack'" in response.json()["message"]

    scenario(run())


def test_a_router_of_another_namespace_name_is_not_taken_over() -> None:
    """An object that exists with the name of a wanted one stays as its owner has made it."""

    async def run() -> None:
        service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "chat", "namespace": "serving"}}
        service["spec"] = {"ports": [{"port": 1}]}
        async with installed() as rig, rig.operator():
            await rig.make(service)
            await rig.make(plain(router()))
            await rig.until(lambda: _is(rig, ("False", "NameTaken")))
            found = await rig.get("Service", "chat") or {}
            assert [port["port"] for port in found["spec"]["ports"]] == [1]

    async def _is(rig: Rig, wanted: tuple[str, str]) -> bool:
        return await condition(rig) == wanted

    scenario(run())
