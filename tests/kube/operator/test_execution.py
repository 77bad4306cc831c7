"""Execution of actions against the API server: a stale write is refused, and nothing else is done about that object."""

from __future__ import annotations

import asyncio

from tests.kube.apiserver.faults import Fault
from tests.kube.operator.cluster_examples import node, pod
from tests.kube.operator.operator_rig import installed, plain
from tests.kube.resources.router_examples import router

from kvroute.kube.operator.actions import Action, Delete, Emit, PatchMetadata, SetStatus
from kvroute.kube.operator.api_calls import ApiCalls
from kvroute.kube.operator.execution import Execution
from kvroute.kube.operator.observed import Ref, ref_of

CLOCK_S = 1.8e9


def test_a_stale_write_is_refused_and_its_event_is_not_recorded() -> None:
    """Between snapshot and write somebody else has changed the pod; other objects are not affected."""

    async def run() -> None:
        async with installed() as rig:
            await rig.make(node("n1"))
            for name in ("a", "b"):
                await rig.schedule(pod(name), "n1")
            seen = {name: await rig.get("Pod", name) or {} for name in ("a", "b")}
            await rig.patch("Pod", "a", {"metadata": {"labels": {"other": "1"}}})
            actions: list[PatchMetadata | Emit] = []
            for obj in seen.values():
                ref, version = ref_of({"apiVersion": "v1", "kind": "Pod"} | obj), obj["metadata"]["resourceVersion"]
                actions.append(PatchMetadata(ref, version, labels={"kvroute.io/topology.rack": "r1"}))
                actions.append(Emit(ref, obj["metadata"]["uid"], "Normal", "RoleChanged", "It is done."))
            calls = ApiCalls(rig.connect_as("operator"))
            execution = Execution(calls, "me", CLOCK_S)
            await execution.run(actions)
            assert execution.failures == 1
            labelled = [found_pod["metadata"]["name"] for found_pod in await rig.list("Pod") if _labelled(found_pod)]
            assert labelled == ["b"]
            events = [event for event in await rig.list("Event") if event["reason"] == "RoleChanged"]
            assert [event["involvedObject"]["name"] for event in events] == ["b"]
            await calls.close()

    def _labelled(obj: dict[str, dict[str, dict[str, str]]]) -> bool:
        return "kvroute.io/topology.rack" in obj["metadata"]["labels"]

    asyncio.run(run())


def test_actions_on_what_has_gone_are_no_failures() -> None:
    """A pod that is deleted between snapshot and write needs no label; an object with another UID is not deleted."""

    async def run() -> None:
        async with installed() as rig:
            metadata = {"name": "x", "namespace": "serving"}
            spec = {"maxUnavailable": 1, "selector": {"matchLabels": {"a": "b"}}}
            budget = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata, "spec": spec}
            await rig.make(budget)
            calls = ApiCalls(rig.connect_as("operator"))
            execution = Execution(calls, "me", CLOCK_S)
            gone, kept = Ref("v1", "Pod", "serving", "none"), Ref("policy/v1", "PodDisruptionBudget", "serving", "x")
            await execution.run([PatchMetadata(gone, "1", labels={"a": "b"}), Delete(kept, "another")])
            assert execution.failures == 0
            assert await rig.get("PodDisruptionBudget", "x") is not None
            await calls.close()

    asyncio.run(run())


def test_an_operator_that_does_not_lead_any_more_stops() -> None:
    async def run() -> None:
        async with installed() as rig:
            calls = ApiCalls(rig.connect_as("operator"))
            execution = Execution(calls, "me", CLOCK_S, lambda: False)
            await execution.run([Emit(Ref("v1", "Pod", "serving", "a"), "1", "Normal", "RoleChanged", "It is done.")])
            assert await rig.list("Event") == []
            await calls.close()

    asyncio.run(run())


def test_a_status_does_not_wait_for_an_event_that_is_never_accepted() -> None:
    """Events of a namespace that does not exist, or that ends, are refused for good; one that fails otherwise comes
    again."""

    async def run() -> None:
        async with installed() as rig:
            await rig.make(plain(router()))
            found = await rig.get("KvRouter", "chat") or {}
            ref, uid = ref_of(found), found["metadata"]["uid"]
            actions: list[Action] = [
                Emit(ref, uid, "Normal", "Serving", "It serves."),
                SetStatus(ref, {"readyReplicas": 3}),
            ]
            for code, failures, replicas in ((500, 1, None), (403, 0, 3)):
                rig.server.faults.waiting.append(Fault(verbs=["create"], resource="events", code=code))
                calls = ApiCalls(rig.connect_as("operator"))
                execution = Execution(calls, "me", CLOCK_S)
                await execution.run(actions)
                now = await rig.get("KvRouter", "chat") or {}
                assert (execution.failures, now.get("status", {}).get("readyReplicas")) == (failures, replicas)
                await calls.close()

    asyncio.run(run())
