"""Emulated engines on free ports, and the cluster file that names them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import msgspec

from kvroute import topology
from kvroute.doctor import ExaminationReport, ExaminationSpec, examine
from kvroute.emulator import EmulatedCluster, EmulatedClusterSpec
from kvroute.serve.lifecycle.deployment import Deployment
from kvroute.types import Endpoint, KvProtocol

HEAD = """
name: clinic
racks: [{name: rack0, uplinks: {count: 1, capacity: 100 Gbps}}]
nodes:
  - {name: node0, rack: rack0, gpus: 8, nics: {compute: {count: 8, capacity: 1 Gbps}}}
  - {name: node1, rack: rack0, gpus: 8, nics: {compute: {count: 8, capacity: 1 Gbps}}}
timing:
  default: {prefill: {kind: linear, per_token: 1 us, base: 1 ms}, decode: {base: 2 ms, per_request: 10 us}}
defaults: {model: llama-3-70b, tp: 2, kv_capacity: 60 GB}
instances:
"""
"""Every pair uses the rack's link at 2 Gbps, so that a transfer takes much longer than the delays of a busy machine."""
MODEL = "llama-3-70b"
NAMES = ("prefill0", "prefill1", "decode0", "decode1")
TOKENS = 256
OPTIONS = ExaminationSpec(prompt_tokens=TOKENS, timeout_s=200.0, seed=1)


def role_of(name: str) -> str:
    """Return the role by the beginning of the name."""
    return name.rstrip("0123456789")


def cluster_text(endpoints: Mapping[str, Endpoint], *, head: str = HEAD, gateway: str = "", tp: int = 2) -> str:
    """Return a cluster file with prefill engines on node0 and the others on node1."""
    lines = []
    next_gpus = {"node0": 0, "node1": 0}
    for name, endpoint in endpoints.items():
        node = "node0" if role_of(name) == "prefill" else "node1"
        first = next_gpus[node]
        next_gpus[node] += tp
        address = msgspec.json.encode(endpoint).decode()
        gpus = f'"{node}:{first}-{first + tp - 1}"' if tp > 1 else f'"{node}:{first}"'
        lines.append(f"  - {{name: {name}, role: {role_of(name)}, tp: {tp}, gpus: {gpus}, endpoint: {address}}}\n")
    return head + "".join(lines) + gateway


@dataclass(slots=True)
class DoctorRig:
    """Running engines."""

    fleet: EmulatedCluster
    endpoints: dict[str, Endpoint]

    def change(self, name: str, **changes: str) -> None:
        """Change an address in the cluster file."""
        self.endpoints[name] = msgspec.structs.replace(self.endpoints[name], **changes)

    async def order(self, name: str, **fault: object) -> None:
        """Order a fault in an engine."""
        url = f"{self.fleet.ready().instances[name].url}/emulator/fault"
        async with aiohttp.ClientSession() as session, session.post(url, json=fault) as answer:
            assert answer.status == 200, await answer.text()

    def deployment(self, *, head: str = HEAD, gateway: str = "", tp: int = 2) -> Deployment:
        """Return the deployment of the cluster file."""
        return Deployment.of(cluster_text(self.endpoints, head=head, gateway=gateway, tp=tp), "clinic.yaml")

    async def examine(self, options: ExaminationSpec = OPTIONS, **file: str) -> ExaminationReport:
        """Examine the cluster file that `deployment` returns."""
        return await examine(self.deployment(**file), options)  # type: ignore[arg-type]


@asynccontextmanager
async def running_rig(
    protocol: KvProtocol = "vllm",
    names: Sequence[str] = NAMES,
    head: str = HEAD,
    settings: EmulatedClusterSpec | None = None,
) -> AsyncIterator[DoctorRig]:
    """Run engines of this protocol; `head` is the network that they really have."""
    placeholders = {
        name: Endpoint(url=f"http://127.0.0.1:{port}", protocol=protocol, bootstrap=f"127.0.0.1:{port}")
        for port, name in enumerate(names, start=1)
    }
    cluster = topology.parse(cluster_text(placeholders, head=head))
    async with EmulatedCluster(cluster, settings or EmulatedClusterSpec()) as fleet:
        yield DoctorRig(fleet, dict(fleet.ready().instances))
