"""An API server in the loop of a test, with the namespace llm and one node."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.commands import kvroute_command
from tests.kube.apiserver.access import ADMIN
from tests.kube.apiserver.requests import User
from tests.kube.apiserver.server import Server, Settings
from tests.kube.client import ApiClient
from tests.kube.kubeconfigs import kubeconfig
from tests.kube.manifests import node_document, pod_document
from tests.waiting import HANGS_S

from kvroute.types import Discovered

PODS = "/api/v1/namespaces/llm/pods"


@dataclass
class Rig:
    """A server, a client of it, and the folder with its kubeconfig."""

    server: Server
    client: ApiClient
    folder: Path
    reports: list[tuple[Discovered, ...]] = field(default_factory=list)

    def report(self, engines: tuple[Discovered, ...]) -> None:
        """Take a report."""
        self.reports.append(engines)

    @property
    def names(self) -> list[str]:
        """Names in the last report."""
        return [engine.name for engine in self.reports[-1]] if self.reports else []

    async def put(self, name: str, **changes: Any) -> None:
        """Create a pod and its status."""
        document = created(pod_document(name, **changes))
        status = document.pop("status")
        await self.client.must("POST", PODS, document)
        media = "application/merge-patch+json"
        await self.client.must("PATCH", f"{PODS}/{name}/status", {"status": status}, media)

    async def kvroute(self, *arguments: str) -> tuple[int, str, str]:
        """Run `kvroute` in the folder; return exit code, stdout and stderr."""
        command = kvroute_command(*arguments)
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, cwd=self.folder)
        return done.returncode, done.stdout, done.stderr


def created(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document without what the server sets."""
    metadata = {key: value for key, value in document["metadata"].items() if key not in ("uid", "resourceVersion")}
    return document | {"metadata": metadata}


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Rig]:
    """Run a server with the namespace llm and node-1; the kubeconfig is that of an administrator."""
    server = Server(Settings(tokens={"admin": ADMIN, "stranger": User("stranger", groups=("system:authenticated",))}))
    url = await server.start()
    try:
        async with ApiClient(url) as client:
            kubeconfig(folder, url, {"token": "admin"})
            await client.must("POST", "/api/v1/namespaces", {"metadata": {"name": "llm"}})
            await client.must("POST", "/api/v1/nodes", created(node_document("node-1", {"example.com/row": "r1"})))
            await client.must("POST", "/api/v1/namespaces/llm/serviceaccounts", {"metadata": {"name": "default"}})
            yield Rig(server, client, folder)
    finally:
        await server.stop()


def play(scenario: Callable[[Rig], Awaitable[None]], folder: Path) -> None:
    """Run a scenario, within a limit."""

    async def bounded() -> None:
        async with asyncio.timeout(HANGS_S), serving(folder) as rig:
            await scenario(rig)

    asyncio.run(bounded())
