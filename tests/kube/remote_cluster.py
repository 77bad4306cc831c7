"""An API server that is not the tests' own: objects that a check makes there, and their removal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from tests.kube.deploy.deployed import DEPLOY, read
from tests.kube.kubeconfigs import kubeconfig
from tests.kube.kubelet import running
from tests.kube.resources.router_examples import Manifest

from kvroute.kube.api.informer import Timing
from kvroute.kube.operator.driver import OperatorDriver, OperatorDriverSpec
from kvroute.kube.operator.observed import OperatorSpec
from kvroute.kube.operator.rights import (
    BINDINGS,
    EVENTS,
    LEASES,
    MUTATING,
    NODES,
    OWNED,
    PODS,
    ROUTERS,
    SECRETS,
    TOPOLOGIES,
    VALIDATING,
    ResourceKind,
)

NAMESPACES = ResourceKind("v1", "Namespace", "namespaces", namespaced=False)
DEFINITIONS = ResourceKind(
    "apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions", namespaced=False
)
ROLES = ResourceKind("rbac.authorization.k8s.io/v1", "Role", "roles")
CLUSTER_ROLES = ResourceKind("rbac.authorization.k8s.io/v1", "ClusterRole", "clusterroles", namespaced=False)
REVIEWS = ResourceKind(
    "authorization.k8s.io/v1", "SelfSubjectAccessReview", "selfsubjectaccessreviews", namespaced=False
)
KINDS = {
    kind.kind: kind
    for kind in (
        *(NAMESPACES, DEFINITIONS, ROLES, CLUSTER_ROLES, BINDINGS, EVENTS, LEASES, MUTATING, NODES, REVIEWS),
        *(PODS, ROUTERS, SECRETS, TOPOLOGIES, VALIDATING, *OWNED),
    )
}
PATIENCE_S = 60.0
MERGE = {"Content-Type": "application/merge-patch+json"}
_NOT_INSTALLED = ("Deployment", "PodDisruptionBudget")
"""Objects of deploy/kustomize that need controllers, which a bare API server does not have."""


class Failed(Exception):
    """A check has found something else than it should."""


@dataclass
class RemoteCluster:
    """An API server, as an administrator sees it."""

    url: str
    token: str
    namespace: str
    insecure: bool = False
    """Whether any certificate is accepted."""
    ca: Path | None = None
    """PEM file with the CAs that are trusted; None: those of the machine."""
    admin: httpx2.AsyncClient = field(init=False)
    made: list[tuple[ResourceKind, str, str]] = field(default_factory=list)
    """Kind, namespace and name of everything that was made, in order."""

    def __post_init__(self) -> None:
        self.admin = self.connect()

    def connect(self, user: str = "") -> httpx2.AsyncClient:
        """Open a connection. Args: `user`: a service account `namespace:name` to act as, with its rights only."""
        headers = {"Authorization": f"Bearer {self.token}"}
        if user:
            headers["Impersonate-User"] = f"system:serviceaccount:{user}"
        verify = False if self.insecure else ssl.create_default_context(cafile=self.ca) if self.ca else True
        return httpx2.AsyncClient(base_url=self.url, headers=headers, verify=verify, timeout=30.0)

    def kubeconfig(self, folder: Path) -> Path:
        """Write a kubeconfig for the administrator."""
        trust: Manifest = {"insecure-skip-tls-verify": True} if self.insecure else {}
        trust |= {"certificate-authority": str(self.ca)} if self.ca else {}
        path = kubeconfig(folder, self.url, {"token": self.token})
        document = json.loads(path.read_text())
        document["clusters"][0]["cluster"] |= trust
        path.write_text(json.dumps(document))
        return path

    def connect_as(self, user: str) -> Callable[[], httpx2.AsyncClient]:
        """Return a function that opens connections of a service account."""
        return lambda: self.connect(user)

    async def create(self, obj: Manifest) -> httpx2.Response:
        """Create an object as a user does; note it for the removal."""
        kind, metadata = KINDS[obj["kind"]], obj["metadata"]
        response = await self.admin.post(kind.path(metadata.get("namespace", "")), json=obj)
        if response.status_code == 201:
            self.made.append((kind, metadata.get("namespace", ""), metadata["name"]))
        return response

    async def make(self, obj: Manifest) -> None:
        """Create an object that must be accepted."""
        response = await self.create(obj)
        if response.status_code != 201:
            raise Failed(f"{obj['kind']} {obj['metadata']['name']}: {response.status_code} {response.text}")

    async def get(self, kind: str, name: str, namespace: str | None = None) -> Manifest:
        """Return an object; empty if it does not exist."""
        place = self.namespace if namespace is None else namespace
        response = await self.admin.get(KINDS[kind].path(place, name))
        found: Manifest = response.json() if response.status_code == 200 else {}
        return found

    async def listed(self, kind: str) -> list[Manifest]:
        """Return all objects of a kind in the namespace."""
        response = await self.admin.get(KINDS[kind].path(self.namespace))
        found: list[Manifest] = response.json()["items"]
        return found

    async def patch(self, kind: str, name: str, change: Manifest, sub: str = "", namespace: str | None = None) -> None:
        """Change an object by a merge patch."""
        place = self.namespace if namespace is None else namespace
        response = await self.admin.patch(KINDS[kind].path(place, name, sub), json=change, headers=MERGE)
        if response.status_code != 200:
            raise Failed(f"patch of {kind} {name}: {response.status_code} {response.text}")

    async def delete(self, kind: ResourceKind, namespace: str, name: str) -> httpx2.Response:
        """Delete an object at once."""
        return await self.admin.delete(kind.path(namespace, name), params={"gracePeriodSeconds": "0"})

    async def start(self, pod: Manifest, node: str, address: str) -> None:
        """Create a pod, bind it to a node, and report it ready, as scheduler and kubelet do."""
        await self.make(pod)
        name = pod["metadata"]["name"]
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}}
        binding |= {"target": {"kind": "Node", "name": node}}
        response = await self.admin.post(PODS.path(self.namespace, name, "binding"), json=binding)
        if response.status_code != 201:
            raise Failed(f"binding of {name}: {response.status_code} {response.text}")
        status = running(await self.get("Pod", name), address, ready=True)
        await self.patch("Pod", name, {"status": status}, "status")

    async def until(self, what: str, holds: Callable[[], Awaitable[Any]]) -> None:
        """Wait until a condition holds; raise Failed with `what` at the limit."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not await holds():
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise Failed(f"not within {PATIENCE_S:.0f} s: {what}") from None

    async def may(self, user: str, verb: str, group: str, resource: str, name: str = "", namespace: str = "") -> bool:
        """Return whether a service account may do something."""
        plural, _, sub = resource.partition("/")
        asked = {"verb": verb, "group": group, "resource": plural, "name": name, "namespace": namespace}
        asked |= {"subresource": sub} if sub else {}
        review = {"apiVersion": REVIEWS.api_version, "kind": REVIEWS.kind, "spec": {"resourceAttributes": asked}}
        async with self.connect(user) as client:
            response = await client.post(REVIEWS.path(), json=review)
        return bool(response.json()["status"]["allowed"])

    @contextlib.asynccontextmanager
    async def operator(self, identity: str, **settings: Any) -> AsyncIterator[OperatorDriver]:
        """Run an operator with the rights of deploy/kustomize and no others."""
        timing = Timing(watch_s=20.0, retry_first_s=0.05, retry_max_s=0.5)
        given = {"port": None, "renew_s": 0.2, "resync_s": 1.0, "quiet_s": 0.02, "timing": timing} | settings
        image = OperatorSpec(image="registry.example/kvroute:1", namespace=self.namespace)
        connect = self.connect_as(f"{self.namespace}:kvroute-operator")
        driver = OperatorDriver(connect, OperatorDriverSpec(operator=image, identity=identity, **given))
        task = asyncio.create_task(driver.run())
        try:
            yield driver
        finally:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()

    def manifests(self) -> list[Manifest]:
        """Return what deploy/kustomize installs before the webhooks, for this namespace."""
        return [
            _moved(obj, self.namespace)
            for obj in read(DEPLOY / "kustomize/base/kvroute.yaml")
            if obj["kind"] not in _NOT_INSTALLED and not obj["kind"].endswith("Configuration")
        ]

    async def remove(self) -> list[str]:
        """Remove everything that was made, latest first; return what has remained."""
        for kind in (*OWNED, PODS, EVENTS, LEASES):
            path = kind.path(self.namespace)
            if (await self.admin.delete(path)).status_code == 405:
                for obj in (await self.admin.get(path)).json().get("items", []):
                    await self.delete(kind, self.namespace, obj["metadata"]["name"])
        await self.delete(BINDINGS, "", "kvroute-gateways")
        for kind, namespace, name in reversed(self.made):
            if kind == NAMESPACES:
                await self._remove_namespace(name)
            elif kind == ROUTERS:
                await self.admin.patch(
                    kind.path(namespace, name), json={"metadata": {"finalizers": None}}, headers=MERGE
                )
            await self.delete(kind, namespace, name)
        with contextlib.suppress(Failed):  # definitions and namespaces are gone only when their content is
            await self.until("everything is gone", self._gone)
        return await self._left()

    async def _gone(self) -> bool:
        return not await self._left()

    async def _left(self) -> list[str]:
        """Return what was made and still exists."""
        found = [(made, await self.admin.get(made[0].path(*made[1:]))) for made in self.made]
        return [f"{kind.kind} {name}" for (kind, _, name), response in found if response.status_code == 200]

    async def _remove_namespace(self, name: str) -> None:
        """Delete a namespace, also where no controller ends it."""
        await self.delete(NAMESPACES, "", name)
        path = NAMESPACES.path("", name)
        found = await self.admin.get(path)
        if found.status_code == 200:
            body = found.json() | {"spec": {"finalizers": []}}
            await self.admin.put(f"{path}/finalize", json=body)


def _moved(obj: Manifest, namespace: str) -> Manifest:
    """Return an object of deploy/kustomize in another namespace."""
    metadata = obj["metadata"] | ({"namespace": namespace} if "namespace" in obj["metadata"] else {})
    moved = obj | {"metadata": metadata}
    if "subjects" in obj:
        moved["subjects"] = [subject | {"namespace": namespace} for subject in obj["subjects"]]
    return moved
