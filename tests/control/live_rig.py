"""Clusters and requests for tests of the core with live engines."""

from __future__ import annotations

from typing import Any

from kvroute.topology import Cluster, parse
from kvroute.types import (
    Request,
)

HEAD = """
name: live
pods: [{name: pod0, uplinks: {count: 2, capacity: 50 Gbps}}]
racks:
  - {name: rack0, pod: pod0, uplinks: {count: 2, capacity: 50 Gbps}}
  - {name: rack1, pod: pod0, uplinks: {count: 2, capacity: 50 Gbps}}
nodes:
  - {name: node0, rack: rack0, gpus: 16, nics: {compute: {count: 4, capacity: 100 Gbps}}}
  - {name: node1, rack: rack1, gpus: 16, nics: {compute: {count: 4, capacity: 100 Gbps}}}
  - {name: node2, gpus: 16, nics: {compute: {count: 4, capacity: 100 Gbps}}}
  - {name: node3, gpus: 16, nics: {compute: {count: 4, capacity: 100 Gbps}}}
network: {tier_bandwidth: {pod: 50 Gbps}}
timing:
  default: {prefill: {kind: linear, per_token: 100 us, base: 10 ms}, decode: {base: 10 ms, per_request: 1 ms}}
defaults: {model: llama-3-70b, tp: 2, batch_max: 2, kv_capacity: 4 GB}
instances:
"""
PROTOCOLS = {"v": "vllm", "m": "mooncake", "s": "sglang"}
ROLES = {"p": "prefill", "d": "decode", "b": "both"}
TOKEN_BYTES = 327_680.0
BLOCK_TOKENS = 16


def cluster_of(*names: str, **limits: str) -> Cluster:
    """Return a cluster with these instances. `vd1b` is the second (b) instance on node1 that uses vLLM's protocol and
    decodes. `limits` are further keys of one instance."""
    lines, used = [], dict.fromkeys("0123", 0)
    for name in names:
        node = name[2]
        endpoint = f"{{url: 'http://{name}:80', protocol: {PROTOCOLS[name[0]]}, bootstrap: '{name}:81'}}"
        more = f", {limits[name]}" if name in limits else ""
        gpus = f"node{node}:{used[node]}-{used[node] + 1}"
        used[node] += 2
        lines.append(f"  - {{name: {name}, role: {ROLES[name[1]]}, gpus: '{gpus}', endpoint: {endpoint}{more}}}\n")
    return parse(HEAD + "".join(lines))


def request(number: int, tokens: int = 1_000, answer: int = 0, **more: Any) -> Request:
    """Return a request, by default with unknown content."""
    return Request(id=number, input_tokens=tokens, max_output_tokens=answer, block_tokens=BLOCK_TOKENS, **more)
