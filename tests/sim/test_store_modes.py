"""Two simulations of agents with a store: flows through the control core, and the fast one for thousands of GPUs."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from kvroute.control import ControlSpec
from kvroute.llm import model
from kvroute.policies.storage.dualpath import ABLATION
from kvroute.policies.storage.dualpath_kernels import AttentionCost
from kvroute.sim.run import simulate
from kvroute.sim.settings import SimSpec
from kvroute.sim.storage.run import run_agents
from kvroute.sim.storage.spec import AgentRun, ServedModel, StorageCluster
from kvroute.sim.workload import Loop, Trace, TracedRequest
from kvroute.sim.workload.trajectories import Trajectories
from kvroute.topology import parse

BLOCK, CONTEXT, APPENDED, OUTPUT, THINK_S = 64, 16_000, 160, 16, 1.0
COMPUTE_GBPS, TOKEN_S, FORWARD_S, SEQUENCE_S = 800, 90e-6, 5e-3, 1e-4
TEXT = """
name: modes
racks: [{name: rack0}]
storage: {reads: READS, buffer: 200 GB}
nodes:
  - {name: node0, rack: rack0, gpus: 1, nics: {compute: {capacity: 800 Gbps}, storage: {capacity: RATE}}}
  - {name: node1, rack: rack0, gpus: 1, nics: {compute: {capacity: 800 Gbps}, storage: {capacity: RATE}}}
  - {name: node2, rack: rack0, gpus: 1, nics: {compute: {capacity: 800 Gbps}, storage: {capacity: RATE}}}
timing: {default: {prefill: {kind: linear, per_token: 90 us, base: 5 ms}, decode: {base: 5 ms, per_request: 0.1 ms}}}
defaults: {model: deepseek-v3.2, tp: 1, kv_capacity: 1.6 GB}
instances:
  - {name: prefill0, role: prefill, gpus: "node0:0"}
  - {name: decode0, role: decode, gpus: "node1:0", kv_capacity: 60 GB}
  - {name: decode1, role: decode, gpus: "node2:0", kv_capacity: 60 GB}
"""
READS = {
    "prefill": ABLATION["layerwise"],
    "alternating": ABLATION["dual-path"],
    "shorter": msgspec.structs.replace(ABLATION["scheduling"], quota_s=None),
    "split": msgspec.structs.replace(ABLATION["split-reads"], quota_s=None),
}
"""Read paths of the cluster file, and the same as settings of the fast simulation. The compute quota belongs to the
engine, so it is off."""


def by_flows(reads: str, agents: int, turns: int, nic_gbps: int) -> float:
    """Return the job completion time in seconds, with every byte as a flow."""
    requests, after = [], []
    for turn in range(turns):
        tokens = CONTEXT + turn * (APPENDED + OUTPUT)
        for agent in range(agents):
            blocks = tuple((agent << 32) + number for number in range(tokens // BLOCK))
            requests.append(TracedRequest(0.0, tokens, OUTPUT, blocks, BLOCK))
            after.append((agent + (turn - 1) * agents,) if turn else ())
    think_s = tuple(THINK_S if earlier else 0.0 for earlier in after)
    trace = Trace("agents", tuple(requests), loop=Loop(tuple(after), think_s, (math.inf,) * len(requests)))
    cluster = parse(TEXT.replace("READS", reads).replace("RATE", f"{nic_gbps} Gbps"))
    done = simulate(cluster, trace, ControlSpec(prefill="cache-aware"), SimSpec())
    return float(done.outcomes.finished_s.max())


def by_queues(reads: str, agents: int, turns: int, nic_gbps: int) -> float:
    """Return the same of the fast simulation."""
    served = ServedModel(
        name="modes",
        kv_bytes=float(model("deepseek-v3.2").kv_bytes_per_token),
        attention=AttentionCost(TOKEN_S, 0.0, 0.0, math.inf),
        dense_token_s=0.0,
        forward_s=FORWARD_S,
        step_s=FORWARD_S,
        sequence_s=SEQUENCE_S,
        prefill_kv_tokens=10**7,
        decode_kv_tokens=10**7,
        block_tokens=BLOCK,
    )
    cluster = StorageCluster(
        prefill_nodes=1,
        decode_nodes=2,
        gpus=1,
        prefill_group=1,
        decode_group=1,
        storage_bytes_per_s=nic_gbps * 1e9 / 8,
        compute_bytes_per_s=COMPUTE_GBPS * 1e9 / 8,
        buffer_bytes=200e9,
    )
    appended = np.array([CONTEXT] + [APPENDED] * (turns - 1))
    turns_of_one = Trajectories.growing(appended, np.full(turns, OUTPUT), np.array([0, turns]))
    pauses = np.array([0.0] + [THINK_S] * (turns - 1))
    run = AgentRun(
        cluster=cluster,
        model=served,
        policy=READS[reads],
        trajectories=replace(turns_of_one, think_s=pauses),
        trajectory=np.zeros(agents, dtype=np.int64),
        start_s=np.zeros(agents),
    )
    return float(run_agents(run).end_s)


@pytest.mark.parametrize(("agents", "turns", "nic_gbps"), [(24, 8, 20), (48, 6, 20), (24, 6, 200)])
def test_both_agree_on_the_job_completion_time_and_on_the_order(agents: int, turns: int, nic_gbps: int) -> None:
    """Storage is the limit of the first two, compute of the third. A context fits in the memory of the prefill instance
    once, so nearly every turn reads its context, as in the fast simulation, which knows no other way."""
    flows, queues = ({reads: mode(reads, agents, turns, nic_gbps) for reads in READS} for mode in (by_flows, by_queues))
    assert queues == pytest.approx(flows, rel=0.05)
    if nic_gbps == 20:
        assert sorted(READS, key=flows.__getitem__) == sorted(READS, key=queues.__getitem__)
        assert flows["prefill"] > 1.4 * flows["shorter"]
