"""A gateway in front of emulated engines, all in one event loop, and a client for both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from tests.waiting import becomes_true

from kvroute import topology
from kvroute.emulator import EmulatedCluster, EmulatedClusterSpec
from kvroute.serve.assembly import Deployment, Gateway
from kvroute.serve.proxy.completion.request import ProxiedRequest

CLUSTER = """
name: test
pods: [{name: pod0, uplinks: {count: 4, capacity: 100 Gbps}}, {name: pod1, uplinks: {count: 4, capacity: 100 Gbps}}]
racks:
  - {name: rack0, pod: pod0, uplinks: {count: 4, capacity: 100 Gbps}}
  - {name: rack1, pod: pod1, uplinks: {count: 4, capacity: 100 Gbps}}
nodes:
  - {name: node0, rack: rack0, gpus: 8, nics: {compute: {count: 8, capacity: 100 Gbps}}}
  - {name: node1, rack: rack1, gpus: 8, nics: {compute: {count: 8, capacity: 100 Gbps}}}
timing:
  default: {prefill: {kind: linear, per_token: 1 us, base: 1 ms}, decode: {base: 2 ms, per_request: 10 us}}
defaults: {model: llama-3-70b, tp: 2, kv_capacity: 60 GB}
instances:
  - {name: prefill0, role: prefill, gpus: "node0:0-1"}
  - {name: prefill1, role: prefill, gpus: "node1:0-1"}
  - {name: decode0, role: decode, gpus: "node0:2-3"}
  - {name: decode1, role: decode, gpus: "node1:2-3"}
gateway:
  listen: {port: 0}
  admin: {port: 0}
  policy: foresight
"""
"""Its policy chooses a pair of instances for every request. The default lets one instance serve most of them, because
the cluster is idle."""
MODEL = "llama-3-70b"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(slots=True)
class GatewayResponse:
    """A response that a client received."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, decoded from JSON."""
        return msgspec.json.decode(self.body)

    @property
    def events(self) -> list[Any]:
        """The events of the stream, without `[DONE]`."""
        data = [line[6:] for line in self.body.split(b"\n\n") if line.startswith(b"data: ")]
        return [msgspec.json.decode(event) for event in data if event != b"[DONE]"]

    @property
    def text(self) -> str:
        """The generated text of a stream or of a non-streaming response."""
        documents = self.events or [self.json]
        return "".join(choice["text"] for document in documents for choice in document["choices"])


@dataclass(slots=True)
class RunningGateway:
    """A running gateway and a client of it."""

    gateway: Gateway
    session: aiohttp.ClientSession

    @property
    def url(self) -> str:
        """URL of the gateway."""
        return f"http://127.0.0.1:{self.gateway.port}"

    @property
    def admin(self) -> str:
        """URL of the admin port of the gateway."""
        return f"http://127.0.0.1:{self.gateway.admin_port}"

    async def post(self, body: Any, path: str = COMPLETIONS, headers: dict[str, str] | None = None) -> GatewayResponse:
        """Send one request to the gateway and read the response to its end."""
        async with self.session.post(self.url + path, json=body, headers=headers) as response:
            return GatewayResponse(
                response.status,
                {name.lower(): value for name, value in response.headers.items()},
                await response.read(),
            )

    async def get(self, path: str) -> GatewayResponse:
        """Get one page of the gateway."""
        async with self.session.get(self.url + path) as response:
            return GatewayResponse(
                response.status,
                {name.lower(): value for name, value in response.headers.items()},
                await response.read(),
            )

    @property
    def requests(self) -> list[ProxiedRequest]:
        """The requests in progress."""
        return [request for request in self.gateway.runtime.requests.values() if isinstance(request, ProxiedRequest)]

    async def metrics(self) -> str:
        """Get the metrics page from the admin port."""
        async with self.session.get(f"{self.admin}/metrics") as response:
            return await response.text()

    async def ask(self, prompt: Any = "What is a KV cache? " * 20, *, tokens: int = 4, **more: Any) -> GatewayResponse:
        """Request a completion."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **more}
        return await self.post(body)

    def held_resources(self) -> dict[str, int]:
        """Return the number of resources that requests hold now, by kind."""
        runtime = self.gateway.runtime
        return {
            "core": runtime.control.in_flight,
            "requests": len(runtime.requests),
            "legs": sum(engine.in_flight for engine in runtime.engines.values()),
            "calls": sum(engine.pool.busy for engine in runtime.engines.values()),
            "slots": sum(load.queued for load in runtime.control.loads(runtime.now()).values()),
        }

    def counted_loads(self, fleet: EmulatedCluster) -> list[float]:
        """Return all counts of requests in the gateway's views and in the engines; all are zero without a request."""
        now, runtime = self.gateway.now(), self.gateway.runtime
        tick = self.gateway.state.tick(now)
        load, loads = tick.load, runtime.control.loads(now).values()
        return [
            *(load.connections, load.in_flight, load.queued, tick.transfers_in_flight),
            *(tile.requests for tile in tick.instances),
            *(load.pending_s + load.queued for load in loads),
            *(server.engine.running + server.engine.waiting for server in fleet.servers.values()),
        ]

    async def becomes_idle(self) -> bool:
        """Return whether all resources are released within the time limit; scrapes and health checks may continue."""
        return await becomes_true(lambda: not any(self.held_resources().values()))

    async def becomes(self, name: str, up: bool) -> bool:
        """Return whether the gateway marks the instance as up or down within the time limit."""
        return await becomes_true(lambda: self.gateway.runtime.engines[name].availability.up is up)


@dataclass(slots=True)
class Rig(RunningGateway):
    """A running gateway with emulated engines behind it, and a client."""

    fleet: EmulatedCluster

    async def direct(self, name: str, prompt: Any, tokens: int = 4) -> str:
        """Return the text that one engine generates without the gateway."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        async with self.session.post(self.fleet.ready().instances[name].url + COMPLETIONS, json=body) as response:
            return str(msgspec.json.decode(await response.read())["choices"][0]["text"])

    def slow(self, factor: float) -> None:
        """Multiply the time of all work that the engines start from now on by `factor`; 1 is normal speed."""
        for server in self.fleet.servers.values():
            server.engine.slow(factor)

    async def stop_engine(self, name: str) -> None:
        """Stop an engine until `restart_engine`."""
        await self.command(name, "restart", down_s=3600)

    async def restart_engine(self, name: str) -> None:
        """Let a stopped engine listen again, with an empty cache."""
        await self.fleet.servers[name].come_back()

    async def command(self, name: str, path: str = "fault", **fault: Any) -> None:
        """Send a command to an emulated engine: a fault, a slowdown, a restart or the state of its WAN path."""
        url = f"{self.fleet.ready().instances[name].url}/emulator/{path}"
        async with self.session.post(url, json=fault) as response:
            assert response.status == 200, await response.text()


def with_section(section: str, text: str = CLUSTER) -> str:
    """Return a cluster file with more settings of its gateway, which comes last in it. A policy among them replaces the
    file's."""
    if section.startswith("  policy:") or "\n  policy:" in section:
        text = text.replace("  policy: foresight\n", "")
    return text + section


@asynccontextmanager
async def rig(section: str = "", text: str = CLUSTER) -> AsyncIterator[Rig]:
    """Run emulated engines of `text` and a gateway with `section` added to its settings."""
    cluster = topology.parse(text)
    async with EmulatedCluster(cluster, EmulatedClusterSpec()) as fleet:
        deployment = Deployment.of(with_section(section, text), "test.yaml", endpoints=fleet.ready().instances)
        gateway = Gateway(deployment, seed=1)
        try:
            await gateway.start()
            async with aiohttp.ClientSession() as session:
                yield Rig(gateway, session, fleet)
        finally:
            await gateway.close()
