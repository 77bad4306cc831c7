"""Clusters for tests of scheduler and agents."""

from __future__ import annotations

from pathlib import Path

from kvroute.topology import Cluster, parse

TIMING = """
timing:
  default:
    prefill: {kind: linear, per_token: 90 us, base: 20 ms}
    decode: {base: 12.5 ms, per_request: 0.1 ms}
"""


def cluster_text(servers: int = 3, groups: int = 1, *, slots: int = 512, aggregation: bool = True) -> str:
    """Return a rack of servers with four GPUs and NICs; each group has as many GPUs on every server."""
    each = 4 // groups
    nodes = "\n".join(
        f"  - {{name: a{server}, rack: access, gpus: 4, nvlink: 300 GB/s, "
        "nics: {compute: {count: 4, capacity: 100 Gbps}}}"
        for server in range(servers)
    )
    instances = "\n".join(
        f'  - {{name: decode-{group}, role: both, gpus: "'
        + ",".join(f"a{server}:{group * each}-{group * each + each - 1}" for server in range(servers))
        + '"}'
        for group in range(groups)
    )
    section = (
        f"collectives: {{aggregation: {{levels: [rack], slots: {slots}, packet: 1024 B, wire: fp16, time: 1 us}}}}"
    )
    return f"""
name: rack-of-{servers}
racks: [{{name: access}}]
nodes:
{nodes}
{section if aggregation else ""}
{TIMING}
defaults: {{model: llama-3-70b, tp: {servers * each}, kv_capacity: 180 GB}}
instances:
{instances}
"""


def cluster_of(servers: int = 3, groups: int = 1, *, slots: int = 512, aggregation: bool = True) -> Cluster:
    return parse(cluster_text(servers, groups, slots=slots, aggregation=aggregation))


def write_cluster(folder: Path, servers: int = 3, groups: int = 1, *, slots: int = 512) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(cluster_text(servers, groups, slots=slots))
    return path
