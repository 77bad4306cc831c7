"""An API server with everything that deploy/kustomize installs, and operators that run against it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx2
from tests.kube.apiserver.access import ADMIN, service_account
from tests.kube.apiserver.server import Server, Settings
from tests.kube.deploy.deployed import DEPLOY, read
from tests.kube.resources.router_examples import Manifest
from tests.waiting import PATIENCE_S

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

NAMESPACE = "kvroute-system"
GATEWAY_TOKEN = "gateway"
"""Token of the service account of the gateway of the KvRouter `chat`."""
NAMESPACES = ResourceKind("v1", "Namespace", "namespaces", namespaced=False)
CRDS = ResourceKind(
    "apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions", namespaced=False
)
ROLES = ResourceKind("rbac.authorization.k8s.io/v1", "Role", "roles")
CLUSTER_ROLES = ResourceKind("rbac.authorization.k8s.io/v1", "ClusterRole", "clusterroles", namespaced=False)
KINDS = {
    kind.kind: kind
    for kind in (
        *(NAMESPACES, CRDS, ROLES, CLUSTER_ROLES, BINDINGS, EVENTS, LEASES, MUTATING, NODES),
        *(PODS, ROUTERS, SECRETS, TOPOLOGIES, VALIDATING, *OWNED),
    )
}
TIMING = Timing(watch_s=5.0, retry_first_s=0.02, retry_max_s=0.2)


@dataclass
class Rig:
    """One API server and a client with all rights."""

    server: Server
    admin: httpx2.AsyncClient
    sent: list[str] = field(default_factory=list)
    """Path of each request that was sent by `connect_as`."""

    def connect_as(self, token: str) -> Callable[[], httpx2.AsyncClient]:
        """Return a function that opens connections of one user."""
        headers = {"Authorization": f"Bearer {token}", "User-Agent": token}

        async def note(request: httpx2.Request) -> None:
            self.sent.append(request.url.path)

        hooks = {"request": [note]}
        return lambda: httpx2.AsyncClient(base_url=self.server.url, headers=headers, event_hooks=hooks, verify=False)

    async def create(self, obj: Manifest, **parameters: str) -> httpx2.Response:
        """Create an object, as a user does. Args: `parameters` of the request."""
        kind = KINDS[obj["kind"]]
        return await self.admin.post(kind.path(obj["metadata"].get("namespace", "")), json=obj, params=parameters)

    async def make(self, obj: Manifest) -> None:
        """Create an object that must be accepted."""
        response = await self.create(obj)
        assert response.status_code == 201, response.text

    async def get(self, kind: str, name: str, namespace: str = "serving") -> Manifest | None:
        """Return an object, or None."""
        response = await self.admin.get(KINDS[kind].path(namespace, name))
        if response.status_code != 200:
            return None
        found: Manifest = response.json()
        return found

    async def list(self, kind: str, namespace: str = "serving") -> list[Manifest]:
        """Return all objects of a kind in a namespace."""
        response = await self.admin.get(KINDS[kind].path(namespace))
        assert response.status_code == 200, response.text
        found: list[Manifest] = response.json()["items"]
        return found

    async def patch(self, kind: str, name: str, change: Manifest, sub: str = "", namespace: str = "serving") -> None:
        """Change an object by a merge patch."""
        headers = {"Content-Type": "application/merge-patch+json"}
        path = KINDS[kind].path(namespace, name, sub)
        response = await self.admin.patch(path, json=change, headers=headers)
        assert response.status_code == 200, response.text

    async def delete(self, kind: str, name: str, namespace: str = "serving") -> httpx2.Response:
        """Delete an object."""
        return await self.admin.delete(KINDS[kind].path(namespace, name))

    async def schedule(self, pod: Manifest, node: str) -> None:
        """Create a pod, bind it to a node, and report it ready."""
        await self.make(pod)
        name = pod["metadata"]["name"]
        await self.bind(name, node, pod["metadata"]["namespace"])
        await self.patch("Pod", name, {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}, "status")

    async def bind(self, name: str, node: str, namespace: str = "serving") -> None:
        """Bind a pod to a node."""
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}}
        binding["target"] = {"kind": "Node", "name": node}
        response = await self.admin.post(PODS.path(namespace, name, "binding"), json=binding)
        assert response.status_code == 201, response.text

    async def until(self, holds: Callable[[], Any]) -> None:
        """Wait until an async condition holds."""
        async with asyncio.timeout(PATIENCE_S):
            while not await holds():
                await asyncio.sleep(0.02)

    @contextlib.asynccontextmanager
    async def operator(self, identity: str = "one", **settings: Any) -> AsyncIterator[OperatorDriver]:
        """Run an operator with the rights of deploy/kustomize."""
        given: dict[str, Any] = {"port": None, "renew_s": 0.1, "resync_s": 0.5, "quiet_s": 0.01, "absent_s": 0.5}
        given |= {"timing": TIMING} | settings
        image = OperatorSpec(image="registry.example/kvroute:1", namespace=NAMESPACE)
        driver = OperatorDriver(
            self.connect_as("operator"), OperatorDriverSpec(operator=image, identity=identity, **given)
        )
        running = asyncio.create_task(driver.run())
        try:
            yield driver
        finally:
            running.cancel()
            await asyncio.wait([running])
            if not running.cancelled():
                running.result()


@contextlib.asynccontextmanager
async def installed(**settings: Any) -> AsyncIterator[Rig]:
    """Start a server, and install what a user installs, without pods. Args: `settings` of the server."""
    tokens = {
        "admin": ADMIN,
        "operator": service_account(NAMESPACE, "kvroute-operator"),
        GATEWAY_TOKEN: service_account("serving", "chat"),
    }
    server = Server(Settings(tokens=tokens, **settings))
    await server.start()
    headers = {"Authorization": "Bearer admin"}
    # The server has no TLS, and every client would read the system's certificates, which takes 50 ms.
    async with httpx2.AsyncClient(base_url=server.url, headers=headers, timeout=60.0, verify=False) as admin:
        rig = Rig(server, admin)
        try:
            for name in (NAMESPACE, "serving"):
                await rig.make({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
                default = {"name": "default", "namespace": name}
                await rig.make({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": default})
            for path in sorted((DEPLOY / "crds").glob("*.kvroute.io.yaml")):
                await rig.make(read(path)[0])
            await rig.make(open_definition("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies"))
            for kind in (ROUTERS, TOPOLOGIES, KINDS["NetworkPolicy"]):
                await rig.until(partial(_served, rig, kind))
            for obj in read(DEPLOY / "kustomize/base/kvroute.yaml"):
                if obj["kind"] not in ("Deployment", "NetworkPolicy") and not obj["kind"].endswith("Configuration"):
                    await rig.make(obj)
            yield rig
        finally:
            await server.stop()


async def add_webhooks(rig: Rig, port: int) -> None:
    """Install the webhook configurations, with the address of an operator on this machine."""
    for obj in read(DEPLOY / "kustomize/base/kvroute.yaml"):
        if obj["kind"].endswith("WebhookConfiguration"):
            for webhook in obj["webhooks"]:
                path = webhook["clientConfig"]["service"]["path"]
                webhook["clientConfig"] = {"url": f"https://localhost:{port}{path}"}
                webhook["failurePolicy"] = "Fail"
            await rig.make(obj)


def plain(obj: Manifest) -> Manifest:
    """Return an object as a user sends it, without the fields that the server chooses."""
    kept = {key: value for key, value in obj["metadata"].items() if key not in ("uid", "generation")}
    return obj | {"metadata": kept}


def monitors() -> Manifest:
    """Return the definition of ServiceMonitors, without their schema."""
    return open_definition("monitoring.coreos.com", "v1", "ServiceMonitor")


def open_definition(group: str, version: str, kind: str, plural: str = "", scope: str = "Namespaced") -> Manifest:
    """Return the definition of a custom resource that may have any field."""
    plural = plural or f"{kind.lower()}s"
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    served = {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"kind": kind, "plural": plural, "singular": kind.lower()}
    annotations = {"api-approved.kubernetes.io": "https://github.com/kubernetes/kubernetes/pull/1"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}", "annotations": annotations},
        "spec": {"group": group, "scope": scope, "names": names, "versions": [served]},
    }


async def _served(rig: Rig, kind: ResourceKind) -> bool:
    return (await rig.admin.get(kind.path())).status_code == 200
