"""Runs agents that read their cached KV from storage, on thousands of GPUs (fast mode).

Storage NICs serve first in, first out; the compute network is not a bottleneck (see docs/fidelity.md). The policy
functions are those of `kvroute.policies.storage.dualpath_kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvroute.sim.storage.loop import run_events
from kvroute.sim.storage.setup import rules_of, state_of
from kvroute.sim.storage.spec import AgentRun
from kvroute.sim.storage.state import StorageState
from kvroute.types import FloatArray


@dataclass(frozen=True, slots=True)
class Phases:
    """Mean time of a turn in each phase, in seconds."""

    scheduling_s: float
    """Until prefill and decode engine are chosen."""
    allocation_s: float
    """Until the buffers are reserved."""
    reading_s: float
    """Until the cached KV is read."""
    prefill_s: float
    """Until the first token: queue and forward passes."""
    decode_s: float
    """Until the last token."""


@dataclass(frozen=True, slots=True)
class StorageResult:
    """Result of a run."""

    end_s: float
    """Time of the last event: the job completion time if all agents have ended, in seconds."""
    turns: int
    """Turns that have ended."""
    agents: int
    """Agents that have ended."""
    events: int
    phases: Phases
    ttft_s: FloatArray
    """Time to first token of each ended turn, in the order of the ends, [turns]."""
    ttst_s: FloatArray
    """Time from first to second token, [turns]; NaN for a turn with one token."""
    tpot_s: FloatArray
    """Time per token after the first, [turns]; NaN for a turn with one token."""
    arrived_s: FloatArray
    """Arrival of these turns, [turns]."""
    agent_s: FloatArray
    """Time from start to end of each agent, [agents]; infinite if it has not ended."""
    read_bytes: FloatArray
    """Bytes read through each node's storage NIC, prefill nodes first, [nodes]."""
    written_bytes: FloatArray
    """Bytes written by each node, [nodes]."""
    window_s: float
    storage_balance: float
    """Maximum bytes of a storage NIC divided by the mean, in a window of `window_s`; mean over the windows until half
    of the agents have ended."""
    attention_balance: float
    """Maximum attention time of an engine of a group divided by the mean, mean over the forward passes until half of
    the agents have ended."""


def run_agents(run: AgentRun) -> StorageResult:
    """Simulate the agents of a run. The same run gives the same result to the last bit."""
    state = state_of(run)
    run_events(rules_of(run), state)
    return _result(run, state)


def _result(run: AgentRun, state: StorageState) -> StorageResult:
    measured = state.measured
    turns = int(measured.counts[0])
    second = measured.tpot_s[:turns] > 0
    passes = max(measured.attention[3], 1.0)
    return StorageResult(
        end_s=float(measured.times[0]),
        turns=turns,
        agents=int(measured.counts[1]),
        events=int(measured.counts[2]),
        phases=Phases(*(measured.phase_s / max(turns, 1)).tolist()),
        ttft_s=measured.ttft_s[:turns],
        ttst_s=np.where(second, measured.ttst_s[:turns], np.nan),
        tpot_s=np.where(second, measured.tpot_s[:turns], np.nan),
        arrived_s=measured.arrived_s[:turns],
        agent_s=measured.agent_end_s - run.start_s,
        read_bytes=state.nodes.read_bytes,
        written_bytes=state.nodes.written_bytes,
        window_s=run.window_s,
        storage_balance=_balance(state.nodes.window_bytes[:, : int(measured.times[1] / run.window_s)]),
        attention_balance=float(measured.attention[2] / passes),
    )


def _balance(window_bytes: FloatArray) -> float:
    """Return the mean over the windows with traffic, [nodes, windows], of the maximum divided by the mean."""
    total = window_bytes.sum(axis=0)
    used = total > 0
    if not used.any():
        return 0.0
    return float((window_bytes[:, used].max(axis=0) * len(window_bytes) / total[used]).mean())
