"""Discovered engines and a base cluster for tests of changes of the cluster."""

from __future__ import annotations

from collections.abc import Iterable

from kvroute.control import Control
from kvroute.topology import Cluster, parse
from kvroute.topology.reading.discovery import admitted
from kvroute.types import ClusterChanged, Discovered, Endpoint, InstanceUp, Joined, Place, Role

BASE = """
name: churn
timing:
  default: {prefill: {kind: linear, per_token: 100 us, base: 10 ms}, decode: {base: 10 ms, per_request: 1 ms}}
defaults: {model: llama-3-70b, tp: 2, batch_max: 4, kv_capacity: 80 GB}
discovery:
  file: engines.yaml
  node: {gpus: 16, nics: {compute: {count: 4, capacity: 100 Gbps}}}
  rack: {uplinks: {count: 2, capacity: 50 Gbps}}
"""


def base() -> Cluster:
    """Return the cluster of a file that lists no instances."""
    return parse(BASE)


def engine(name: str, role: Role = "decode", node: int = 0, uid: str = "1") -> Discovered:
    """Return an engine on one of the nodes; two nodes share a rack."""
    endpoint = Endpoint(url=f"http://{name}-{uid}:8000")
    return Discovered(
        name=name,
        uid=uid,
        role=role,
        endpoint=endpoint,
        place=Place(node=f"node{node}", rack=f"rack{node // 2}", pod="pod0"),
    )


def joining(control: Control, engines: Iterable[Discovered], cluster: Cluster | None = None) -> tuple[Joined, ...]:
    """Return the engines with their GPUs, as they can join the cluster of a core now."""
    found = sorted(engines, key=lambda engine: engine.name)
    joined, refused = admitted(cluster or base(), control.members, found)
    assert not refused, refused
    return joined


def join(control: Control, at: float, *engines: Discovered) -> None:
    """Let engines join and bring them up."""
    control.handle(ClusterChanged(at, joining(control, engines)))
    for engine in engines:
        control.handle(InstanceUp(at, engine.name))
