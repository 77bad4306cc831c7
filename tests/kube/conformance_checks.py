"""The checks of `tests.kube.conformance`, in the order in which they run; each one relies on those before it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
from tests.kube.conformance_operator import (
    NODE,
    deletion,
    election,
    engine_pod,
    labels,
    placed,
    role_switch,
    silence,
    webhook,
)
from tests.kube.deploy.deployed import DEPLOY, read
from tests.kube.operator.cluster_examples import node
from tests.kube.remote_cluster import DEFINITIONS, Failed, RemoteCluster
from tests.kube.resources.router_examples import Manifest, constrained, router, topology

from kvroute.kube.api.client import Access
from kvroute.kube.api.requests import ApiRefused
from kvroute.kube.discovery.engines import DiscoverySpec, KubernetesDiscovery
from kvroute.kube.operator.api_calls import ApiCalls
from kvroute.kube.operator.rights import NAMED, PODS, RIGHTS, ROUTERS
from kvroute.types import Discovered

Check = Callable[[RemoteCluster, str], Awaitable[None]]
WRONG: tuple[tuple[Manifest, str], ...] = (
    (constrained(label="x/y"), "exclude each other"),
    (constrained(kvTransferWeight=-1), "kvTransferWeight"),
    (constrained(mismatchPolicy="faill"), "faill"),
    (router(defaults={"timing": "slow"}), "add the entry"),
    (router(timing={"default": {"prefill": {}, "decode": {"base": "1 ms"}}}), "needs perToken"),
    (router(ports={"client": 9090}), "choose two ports"),
    (router("2chat"), "begin it with a letter"),
    (router(polcy="netkv"), 'unknown field "spec.polcy"'),
)


async def definitions(cluster: RemoteCluster, _: str) -> None:
    """The server accepts both definitions with their CEL rules and defaults, and serves them."""
    await cluster.make({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": cluster.namespace}})
    account = {"name": "default", "namespace": cluster.namespace}
    await cluster.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account})
    for path in sorted((DEPLOY / "crds").glob("*.kvroute.io.yaml")):
        [definition] = read(path)
        await cluster.make(definition)
        await cluster.until("Established", partial(_established, cluster, definition["metadata"]["name"]))
    await cluster.until("kvrouters are served", partial(_served, cluster))


async def _served(cluster: RemoteCluster) -> bool:
    return (await cluster.admin.get(ROUTERS.path())).status_code == 200


async def _established(cluster: RemoteCluster, name: str) -> bool:
    found = (await cluster.admin.get(DEFINITIONS.path("", name))).json()
    conditions = (found.get("status") or {}).get("conditions") or ()
    return any((condition["type"], condition["status"]) == ("Established", "True") for condition in conditions)


async def refusals(cluster: RemoteCluster, _: str) -> None:
    """What the schema and its rules refuse, and what each message says."""
    for manifest, text in WRONG:
        obj = placed(cluster, manifest)
        path = ROUTERS.path(cluster.namespace)
        response = await cluster.admin.post(path, json=obj, params={"fieldValidation": "Strict", "dryRun": "All"})
        if response.status_code not in (400, 422) or text not in response.json()["message"]:
            raise Failed(f"{text!r} is not in {response.status_code} {response.text}")


async def defaults(cluster: RemoteCluster, _: str) -> None:
    """The server fills in defaults, down to those of nested fields, and prints the columns."""
    path = ROUTERS.path(cluster.namespace)
    response = await cluster.admin.post(path, json=placed(cluster, router()), params={"dryRun": "All"})
    spec = response.json()["spec"]
    assert spec["network"]["node"]["nics"]["compute"]["capacity"] == "400 Gbps", spec["network"]
    assert spec["timing"]["default"]["prefill"]["kind"] == "linear", spec["timing"]
    assert spec["defaults"]["kvCapacity"] == "60 GB", spec["defaults"]
    accept = {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}
    table = (await cluster.admin.get(path, headers=accept)).json()
    names = [column["name"] for column in table["columnDefinitions"]]
    assert names[:6] == ["Name", "Ready", "Gateways", "Prefill", "Decode", "Level"], names


async def rights(cluster: RemoteCluster, _: str) -> None:
    """The roles of deploy/kustomize give the operator every verb that it uses, and none more."""
    for obj in cluster.manifests():
        await cluster.make(obj)
    user = f"{cluster.namespace}:kvroute-operator"
    for (group, resource), verbs in RIGHTS.items():
        for verb in verbs:
            name = NAMED.get((group, resource), ("",))[0] if verb != "create" else ""
            allowed = partial(cluster.may, user, verb, group, resource, name, cluster.namespace)
            await cluster.until(f"{user} may {verb} {resource}.{group}", allowed)
    for verb, group, resource in (("list", "", "secrets"), ("delete", "", "pods"), ("get", "", "secrets")):
        assert not await cluster.may(user, verb, group, resource, "x", cluster.namespace), (verb, resource)


async def conflicts(cluster: RemoteCluster, _: str) -> None:
    """A metadata patch with an old resourceVersion is refused with 409, and changes nothing."""
    await cluster.make(placed(cluster, topology("conformance")) | {"spec": topology()["spec"]})
    await cluster.make(placed(cluster, node(NODE, zone="z1", rack="r1")))
    await cluster.start(engine_pod(cluster, "prefill-0", "prefill"), NODE, "10.99.0.1")
    old = (await cluster.get("Pod", "prefill-0"))["metadata"]["resourceVersion"]
    await cluster.patch("Pod", "prefill-0", {"metadata": {"annotations": {"changed": "1"}}})
    calls = ApiCalls(cluster.connect_as(f"{cluster.namespace}:kvroute-operator"))
    try:
        change = {"metadata": {"resourceVersion": old, "labels": {"stale": "1"}}}
        with pytest.raises(ApiRefused) as refused:
            await calls.patch(PODS, cluster.namespace, "prefill-0", change)
        assert refused.value.status == 409
    finally:
        await calls.close()
    assert "stale" not in (await cluster.get("Pod", "prefill-0"))["metadata"]["labels"]


async def gateway_rights(cluster: RemoteCluster, _: str) -> None:
    """What the operator has bound lets the gateway follow pods and nodes, and nothing else."""
    user = f"{cluster.namespace}:chat"
    for verb in ("list", "watch"):
        for resource in ("pods", "nodes"):
            allowed = partial(
                cluster.may, user, verb, "", resource, "", cluster.namespace if resource == "pods" else ""
            )
            await cluster.until(f"{user} may {verb} {resource}", allowed)
    assert not await cluster.may(user, "list", "", "secrets", "", cluster.namespace)
    assert not await cluster.may(user, "list", "", "pods", "", "default")


async def discovery(cluster: RemoteCluster, _: str) -> None:
    """Discovery reports engines and their places, and follows what changes."""
    reports: list[tuple[Discovered, ...]] = []

    def report(engines: tuple[Discovered, ...]) -> None:
        reports.append(engines)

    with tempfile.TemporaryDirectory() as folder:
        access = Access(cluster.kubeconfig(Path(folder)))
        source = KubernetesDiscovery(access, DiscoverySpec(cluster.namespace, "app=engine"))
        running = asyncio.create_task(source.run(report))
        try:
            await _followed(cluster, reports)
        finally:
            running.cancel()
            await asyncio.wait([running])


async def _followed(cluster: RemoteCluster, reports: list[tuple[Discovered, ...]]) -> None:
    await cluster.until("four engines", partial(_last, reports, lambda engines: len(engines) == 4))
    assert {(report.place.node, report.place.rack) for report in reports[-1]} == {(NODE, "z1._.r1")}, reports[-1]
    await cluster.patch("Node", NODE, {"metadata": {"labels": {"kvroute.io/rack": "r2"}}}, namespace="")
    moved = partial(_last, reports, lambda engines: {engine.place.rack for engine in engines} == {"z1._.r2"})
    await cluster.until("the node's new rack", moved)
    await cluster.delete(PODS, cluster.namespace, "decode-1")
    await cluster.until("three engines", partial(_last, reports, lambda engines: len(engines) == 3))


async def _last(reports: list[tuple[Discovered, ...]], holds: Callable[[tuple[Discovered, ...]], bool]) -> bool:
    return bool(reports) and holds(reports[-1])


CHECKS: tuple[tuple[str, Check], ...] = (
    ("definitions are accepted, established and served", definitions),
    ("schema and CEL rules refuse wrong KvRouters", refusals),
    ("defaults are filled in, and columns are printed", defaults),
    ("the operator's roles give what it uses, and no more", rights),
    ("a stale metadata patch gets 409", conflicts),
    ("the operator labels engines, makes objects, writes status and Events", labels),
    ("an operator that starts anew changes nothing", silence),
    ("the gateway's rights are bound", gateway_rights),
    ("an engine switches its role", role_switch),
    ("one of two operators leads, and hands over", election),
    ("the webhook refuses, injects and renews its CA bundle", webhook),
    ("discovery follows pods and nodes", discovery),
    ("a deleted KvRouter leaves no labels and no finalizer", deletion),
)
