"""Cluster files and problems of the placement tests."""

from __future__ import annotations

from pathlib import Path

from kvroute.planner.placement.problem import Objective, PlacementProblem, read_placement

TESTBED = Path("examples/heroserve-testbed.yaml")


def cluster_text(
    racks: int = 1,
    servers: int = 2,
    gpus: int = 4,
    *,
    nvlink: str = "300 GB/s",
    nic: str = "100 Gbps",
    oversubscription: float = 1.0,
    role: str = "both",
    memory: str = "80 GB",
    prompt_tokens: int = 500,
    output_tokens: int = 100,
    aggregation: str = "{levels: [rack]}",
) -> str:
    """Return a cluster of equal racks without instances, with a section `placement`."""
    return f"""
name: small
fabric:
  kind: fat-tree
  pods: 1
  racks_per_pod: {racks}
  nodes_per_rack: {servers}
  gpus_per_node: {gpus}
  nvlink: {nvlink}
  nics: {{compute: {{count: {gpus}, capacity: {nic}}}}}
  oversubscription: {{rack: {oversubscription}}}
network:
  latency: {{node: 1 us, rack: 3 us, pod: 6 us}}
collectives:
  aggregation: {aggregation}
placement:
  gpus:
    a100: {{memory: {memory}, tflops: 312, memory_bandwidth: 2039 GB/s, role: {role}}}
  traffic:
    lengths: {{kind: constant, tokens: {prompt_tokens}}}
    output_tokens: {output_tokens}
"""


def problem_of(
    folder: Path, text: str, model: str = "llama-3-8b", ttft_s: float = 1.0, tpot_s: float = 0.1
) -> PlacementProblem:
    """Return the problem of a cluster file's text."""
    path = folder / "cluster.yaml"
    path.write_text(text)
    return read_placement(path, model, Objective(ttft_s, tpot_s))
