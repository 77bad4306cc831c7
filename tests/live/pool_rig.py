"""A picker of an InferencePool and a real Envoy in front of the pods of `kubernetes_rig`, all in processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from tests.kube.client import MERGE, ApiClient
from tests.kube.deploy.deployed import DEPLOY, read, rules
from tests.kube.inference_pool import POOLS, install, pool_document
from tests.live.envoy import running_envoy, with_patient_health_check
from tests.live.kubernetes_rig import Rig, kvroute
from tests.live.services import free_port
from tests.waiting import until

POOL, PORT = "engines", 8000


def granted() -> list[dict[str, Any]]:
    """Return the rights that the manifests have for a picker."""
    base = read(DEPLOY / "kustomize/base/kvroute.yaml")
    return [*rules(base, "ClusterRole", "kvroute-picker"), *rules(base, "ClusterRole", "kvroute-gateway-nodes")]


@dataclass(slots=True)
class PoolFront:
    """See `Front`: Envoy with the configuration that `kvroute epp --kubernetes --pool` writes."""

    labels: Mapping[str, str]
    """Selector of the pool."""
    rules: Sequence[Mapping[str, Any]] = field(default_factory=granted)
    envoy_admin: str = ""
    """URL of Envoy's admin interface."""

    async def prepare(self, client: ApiClient) -> None:
        """See `Front`."""
        await install(client)
        await client.must("POST", POOLS, pool_document(POOL, self.labels, (PORT,)))

    def run(self, folder: Path, config: Path) -> AbstractAsyncContextManager[tuple[str, str]]:
        """See `Front`."""
        return self._run(folder, config)

    @asynccontextmanager
    async def _run(self, folder: Path, config: Path) -> AsyncIterator[tuple[str, str]]:
        listen, admin = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        self.envoy_admin = f"http://{admin}"
        cluster = folder / "cluster.yaml"
        cluster.write_text(cluster.read_text() + "  policy: foresight\n")  # a pair for every request
        file = folder / "envoy.json"
        arguments = ["epp", str(folder / "cluster.yaml"), "--kubernetes", "--pool", f"llm/{POOL}"]
        arguments += ["--kubeconfig", str(config), "--envoy-config", str(file)]
        arguments += ["--envoy-listen", listen, "--envoy-admin", admin]
        async with kvroute(folder, arguments) as found:
            file.write_text(json.dumps(with_patient_health_check(json.loads(file.read_text()))))
            async with running_envoy(file, folder / "envoy.log"):
                await self._up()
                yield f"http://{listen}", found["admin"]

    async def _up(self) -> None:
        up = False

        async def poll() -> None:
            nonlocal up
            async with aiohttp.ClientSession() as session:
                while not up:
                    with suppress(aiohttp.ClientError):
                        async with session.get(f"{self.envoy_admin}/ready") as response:
                            up = response.status == 200
                    await asyncio.sleep(0.05)

        polling = asyncio.create_task(poll())
        try:
            await until(lambda: up)
        finally:
            polling.cancel()

    async def serves(self, rig: Rig) -> None:
        """Wait until a request gets through Envoy. Its counters are ahead of what its workers know."""
        while True:
            async with rig.session.get(f"{rig.url}/v1/models") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.05)


async def change_pool(rig: Rig, **spec: Any) -> None:
    """Change the specification of the pool."""
    await rig.client.must("PATCH", f"{POOLS}/{POOL}", {"spec": spec}, MERGE)


async def delete_pool(rig: Rig) -> None:
    """Delete the pool."""
    await rig.client.must("DELETE", f"{POOLS}/{POOL}", {})


async def create_pool(rig: Rig, labels: Mapping[str, str]) -> None:
    """Create the pool."""
    await rig.client.must("POST", POOLS, pool_document(POOL, labels, (PORT,)))
