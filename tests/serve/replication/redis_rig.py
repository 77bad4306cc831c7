"""A Redis server, and several gateways in front of the same emulated engines that share its stream."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
from tests.live.services import free_port, required
from tests.serve.rig import CLUSTER, RunningGateway
from tests.waiting import becomes_true

from kvroute import topology
from kvroute.emulator import EmulatedCluster, EmulatedClusterSpec
from kvroute.serve.assembly import Deployment, Gateway


class RedisServer:
    """A server on a port that stays the same over restarts; it keeps nothing on disk."""

    def __init__(self, folder: Path, *options: str) -> None:
        program = required("redis-server", "redis-server")
        self.port = free_port()
        at = ("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "", *options)
        self._command = [program, *at]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """URL of the server."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start the server; it is empty."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def section(url: str, lease: str = "4 s") -> str:
    """The settings of a gateway that shares the stream of a server."""
    return f"  replication: {{redis: '{url}', lease: {lease}, flush: 2 ms}}\n"


@asynccontextmanager
async def replicated(count: int, more: str, text: str = CLUSTER) -> AsyncIterator[list[RunningGateway]]:
    """Run `count` gateways with `more` in their settings in front of the same emulated engines."""
    async with EmulatedCluster(topology.parse(text), EmulatedClusterSpec()) as fleet, AsyncExitStack() as stack:
        endpoints = fleet.ready().instances
        found: list[RunningGateway] = []
        for number in range(count):
            gateway = Gateway(Deployment.of(text + more, "test.yaml", endpoints=endpoints), seed=number)
            stack.push_async_callback(gateway.close)
            await gateway.start()
            found.append(RunningGateway(gateway, await stack.enter_async_context(aiohttp.ClientSession())))
        yield found


def state(gateway: RunningGateway) -> str:
    """Whether a gateway is in sync with the others."""
    replication = gateway.gateway.replication
    return replication.load.state if replication is not None else ""


async def in_sync(gateways: list[RunningGateway]) -> bool:
    """Wait until each gateway is in sync with all others."""

    def synced() -> bool:
        loads = [gateway.gateway.replication.load for gateway in gateways if gateway.gateway.replication is not None]
        return all(load.state == "in_sync" and load.gateways == len(gateways) - 1 for load in loads)

    return await becomes_true(synced)
