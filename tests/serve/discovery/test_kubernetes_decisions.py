"""Labels of Kubernetes nodes in decisions: the tier of each candidate, and the speed that the file declares for it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import aiohttp
import pytest
from tests.commands import kvroute_command
from tests.kube.manifests import node_document
from tests.serve.discovery.kubernetes_rig import Rig, created, play
from tests.serve.lifecycle.membership_rig import fleet_text
from tests.serve.rig import MODEL, RunningGateway
from tests.waiting import until

from kvroute import topology
from kvroute.emulator import EmulatedCluster, EmulatedClusterSpec
from kvroute.serve.assembly import Deployment, Gateway
from kvroute.topology.drafts.kubernetes_overlay import KubernetesOverlay
from kvroute.topology.schema import KubernetesEntry

CLUSTER = """
name: live
defaults: {tp: 2}
network: {tier_bandwidth: {node: 200 GB/s, rack: 200 Gbps, pod: 80 Gbps, datacenter: 40 Gbps, wan: 8 Gbps}}
gateway: {listen: {port: 0}, admin: {port: 0}, policy: POLICY, log: {events: events.log}}
"""
LABELS = [
    {"zone": "z", "block": "b", "rack": "r"},
    {"zone": "z", "block": "b", "rack": "r"},
    {"zone": "z", "block": "b", "rack": "s"},
    {"zone": "z", "block": "c", "rack": "r"},
    {"zone": "y", "block": "b", "rack": "r"},
]
"""Labels of the nodes n0 to n4: `decodeN` is on node N, in tier N from `prefill0` on n0."""
BYTES_PER_S = [200e9, 25e9, 10e9, 5e9, 1e9]


async def prepare(rig: Rig, fleet: EmulatedCluster) -> None:
    """Create the nodes, and a pod for each engine."""
    for number, labels in enumerate(LABELS):
        full = {f"topology.kubernetes.io/{level}": value for level, value in labels.items()}
        await rig.client.must("POST", "/api/v1/nodes", created(node_document(f"n{number}", full)))
    for name, server in fleet.servers.items():
        role, number = name.rstrip("0123456789"), int(name.lstrip("a-zdecoprfil"))
        labels = {"kvroute.io/role": role, "kvroute.io/port": str(server.port), "kvroute.io/model": MODEL}
        labels |= {"kvroute.io/tp": "2"}
        await rig.put(name, labels=labels, node=f"n{number}", podIP="127.0.0.1", container={"command": [], "args": []})


@pytest.mark.parametrize("policy", ["netkv", "foresight"])
def test_tiers_and_their_speeds_reach_decisions(policy: str, tmp_path: Path) -> None:
    """As `kvroute explain` shows them for a request."""

    async def scenario(rig: Rig) -> None:
        overlay = KubernetesOverlay(KubernetesEntry(kubeconfig="kubeconfig"))
        text = CLUSTER.replace("POLICY", policy)
        async with EmulatedCluster(topology.parse(fleet_text(1, 5)), EmulatedClusterSpec()) as fleet:
            await prepare(rig, fleet)
            gateway = Gateway(Deployment.of(text, str(rig.folder / "cluster.yaml"), overlay=overlay), seed=1)
            try:
                await gateway.start()
                async with aiohttp.ClientSession() as session:
                    await until(lambda: not gateway.ready() and len(gateway.runtime.engines) == 6)
                    engines = gateway.runtime.engines.values()
                    await until(lambda: all(engine.availability.up for engine in engines))
                    response = await RunningGateway(gateway, session).ask("word " * 400, tokens=2)
                    assert response.status == 200
            finally:
                await gateway.close()

    play(scenario, tmp_path)
    command = kvroute_command("explain", str(tmp_path / "events.log"), "0", "--json")
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    [decision] = [made for made in json.loads(out)["decisions"] if made["kind"] == "decode"]
    found = {candidate["name"]: candidate for candidate in decision["candidates"]}
    assert [found[f"llm.decode{tier}"]["tier"] for tier in range(5)] == [0, 1, 2, 3, 4]
    pace, share = ("effective_bytes_per_s", 1e-6) if policy == "netkv" else ("pace_bytes_per_s", 0.1)
    # foresight expects that two flows of a transfer sometimes draw the same uplink
    assert [found[f"llm.decode{tier}"][pace] for tier in range(5)] == pytest.approx(BYTES_PER_S, rel=share)
    costs = [found[f"llm.decode{tier}"]["cost"] for tier in range(5)]
    assert costs == sorted(costs)
    assert decision["chosen"] == "llm.decode0"
