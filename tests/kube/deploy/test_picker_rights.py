"""The rights of an endpoint picker: the roles that the manifests have are enough, and it uses every verb of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.kube.deploy.deployed import DEPLOY, read
from tests.kube.inference_pool import POOLS, install, pool_document
from tests.kube.kubeconfigs import kubeconfig
from tests.serve.discovery.kubernetes_rig import Rig, play
from tests.waiting import until

from kvroute.serve.discovery.kubernetes_pods import KubernetesPods
from kvroute.serve.discovery.sources import check_source
from kvroute.topology.schema import Discovery, KubernetesEntry
from kvroute.types import OwnPicker

USER = "stranger"
PICKER, NODES = "kvroute-picker", "kvroute-gateway-nodes"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
NOT_GRANTED = ("get", "namespaces")
"""Asked at the start, where a refusal is no fault."""


async def bind(rig: Rig) -> dict[tuple[str, str], set[str]]:
    """Create both roles of the manifests, bind them to the user, and return their verbs by group and resource."""
    granted: dict[tuple[str, str], set[str]] = {}
    base = read(DEPLOY / "kustomize/base/kvroute.yaml")
    for name, bindings, kind in (
        (PICKER, f"{RBAC}/namespaces/llm/rolebindings", "RoleBinding"),
        (NODES, f"{RBAC}/clusterrolebindings", "ClusterRoleBinding"),
    ):
        [role] = [obj for obj in base if (obj["kind"], obj["metadata"]["name"]) == ("ClusterRole", name)]
        await rig.client.must("POST", f"{RBAC}/clusterroles", role)
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name}
        subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": USER}
        document = {"kind": kind, "metadata": {"name": name}, "roleRef": reference, "subjects": [subject]}
        await rig.client.must("POST", bindings, document)
        for rule in role["rules"]:
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    granted.setdefault((group, resource), set()).update(rule["verbs"])
    return granted


def test_a_picker_uses_exactly_the_rights_of_its_roles(tmp_path: Path) -> None:
    """By the server's records of a start and of discovery with a pool whose Service exists."""

    async def scenario(rig: Rig) -> None:
        granted = await bind(rig)
        await install(rig.client)
        service = {"metadata": {"name": "epp"}, "spec": {"ports": [{"port": 9002, "targetPort": 1}]}}
        await rig.client.must("POST", "/api/v1/namespaces/llm/services", service)
        reference = {"name": "epp", "port": {"number": 9002}}
        await rig.client.must("POST", POOLS, pool_document("a", {"app": "x"}, endpointPickerRef=reference))
        await rig.put("p", labels={"kvroute.io/role": "decode", "app": "x"})
        kubeconfig(rig.folder, rig.server.url, {"token": USER})
        section = KubernetesEntry(pool="a", kubeconfig="kubeconfig")
        await asyncio.to_thread(check_source, Discovery(kubernetes=section), rig.folder)
        source = KubernetesPods(section, rig.folder, OwnPicker(9002))

        async def used() -> dict[str, set[str]]:
            found = await rig.client.must("GET", "/_control/audit")
            verbs: dict[str, set[str]] = {}
            for request in found["requests"]:
                if request["user"] == USER:
                    verbs.setdefault(request["resource"], set()).add(request["verb"])
            return verbs

        async with asyncio.TaskGroup() as group:
            task = group.create_task(source.run(rig.report))
            await until(lambda: rig.names == ["llm.p"] and source.findings["warning"] == 1)
            wanted = {resource: verbs for (_, resource), verbs in granted.items()}
            wanted |= {NOT_GRANTED[1]: {NOT_GRANTED[0]}}
            while await used() != wanted:
                assert (await used()).keys() <= wanted.keys()
                await asyncio.sleep(0.01)
            assert source.failures == ()
            assert rig.reports[-1][0].place.node == "node-1"
            task.cancel()

    play(scenario, tmp_path)
