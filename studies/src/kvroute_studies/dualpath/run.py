"""DualPath's evaluations: agents that read cached KV from storage through prefill nodes, or through both sides."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvroute.planner.comparison.cells import Cell, Record
from kvroute.policies.storage.dualpath import ABLATION
from kvroute.sim.metrics import RequestCounts, Spread, Summary, TtftParts
from kvroute.sim.storage.run import StorageResult, run_agents
from kvroute.sim.storage.spec import AgentRun
from kvroute.sim.workload import Agents, fingerprint, read_any
from kvroute.sim.workload.trajectories import TABLE_2, Trajectories, generate_trajectories
from kvroute.types import InputError
from kvroute_studies.dualpath.setup import (
    DUALPATH_PROFILES,
    DualPathAssumptions,
    served_model,
    storage_cluster,
)
from kvroute_studies.shared.cells import Experiment

ASSUMED = DualPathAssumptions()
BASIC, DUAL_PATH, SPLIT, ORACLE = "basic", "scheduling", "split-reads", "oracle"
TTFT_MAX_S, TPOT_MAX_S = 4.0, 0.05
"""Limits of the mean TTFT and TPOT in `dualpath-online` (DualPath 7.4)."""
ONLINE_WARMUP_S, ONLINE_END_S = 1500.0, 3000.0
_SYSTEMS = (BASIC, DUAL_PATH, SPLIT, ORACLE)
_PROFILES = tuple(DUALPATH_PROFILES)
_CONTEXT_MAX, _OUTPUT_MAX = 163_840, 32_768
"""Longest prompt of a recorded session, and room for its output, in tokens."""
_FASTER = "both sides are faster than prefill nodes alone, and no reads at all are the bound"


def _sweep(name: str, title: str, source: str, axes: dict[str, tuple[float, ...]], **others: object) -> Experiment:
    """Return an experiment of DS 660B and four systems, unless others are given."""
    given: dict[str, object] = {
        "policies": _SYSTEMS,
        "profiles": ("ds-660b",),
        "expectation": _FASTER,
        "versus": (DUAL_PATH, BASIC),
    }
    return Experiment(name=name, title=title, source=source, axes=axes, **given | others)  # type: ignore[arg-type]


EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        _sweep(
            "dualpath-offline",
            "Offline batch: agents and lengths",
            "DualPath figure 7",
            {"length": (32, 48, 64), "agents": (512, 1024, 2048)},
            profiles=_PROFILES,
        ),
        _sweep(
            "dualpath-ablation",
            "Offline batch: one technique after the other",
            "DualPath figure 12",
            {"agents": (1024, 2048)},
            policies=tuple(ABLATION),
            expectation="each technique makes the job faster",
        ),
        _sweep(
            "dualpath-ratio",
            "Offline batch: prefill and decode nodes",
            "DualPath figure 8",
            {"prefill": (1, 2), "decode": (1, 2), "agents": (1024,)},
            profiles=("ds-27b",),
            expectation="systems with equal bandwidth of the storage NICs that they use are equally fast",
        ),
        _sweep(
            "dualpath-append",
            "Offline batch: appended and generated tokens",
            "DualPath figure 9",
            {"append": (0.5, 1, 2, 4), "generate": (0.5, 1, 2), "agents": (1024,)},
            expectation="the gain falls with more appended tokens, which take compute",
        ),
        _sweep(
            "dualpath-online",
            "Online: agents per second within the SLOs",
            "DualPath figures 10 and 11",
            {"length": (32, 48, 64)},
            profiles=("ds-27b", "ds-660b"),
            expectation="both sides sustain more agents per second",
        ),
        _sweep(
            "dualpath-balance",
            "Balance of storage NICs and of attention times",
            "DualPath figures 13 and 14",
            {"window": (0.5, 1, 5), "agents": (1024,)},
            policies=("dual-path", DUAL_PATH, SPLIT),
            expectation="scheduling balances better than alternating sides",
            versus=(DUAL_PATH, "dual-path"),
        ),
        _sweep(
            "dualpath-assumptions",
            "What the results depend on",
            "none: kvroute's assumptions",
            {"mfu": (0.1, 0.2, 0.4), "buffer": (40, 80, 320), "storage": (0.5, 0.9), "quota": (0.1, 0.3, 1)},
            policies=tuple(ABLATION),
            expectation="the order of the techniques does not depend on the assumptions",
        ),
        _sweep(
            "dualpath-scale",
            "Large clusters",
            "DualPath section 7.6",
            {"prefill": (2, 6, 12, 24, 48)},
            expectation="job completion time stays the same if nodes and agents grow together",
        ),
    )
}


AGENTS = _sweep(
    "dualpath-agents",
    "Recorded sessions of coding agents",
    "none: your sessions",
    {"agents": (16, 128, 1024), "think": (0, 60)},
    profiles=_PROFILES,
    policies=tuple(ABLATION),
    expectation="the gain depends on how many tokens the turns compute for each token that they read",
)
"""Needs a file with sessions."""
EXPERIMENTS[AGENTS.name] = AGENTS


def run_cell(sessions: str, cell: Cell) -> Record:
    """Run a cell. `sessions` is the file of `dualpath-agents`, otherwise empty."""
    run = sessions_run(sessions, cell) if cell.experiment == AGENTS.name else run_of(cell)
    figures: dict[str, float] = {}
    series: dict[str, tuple[tuple[float, float], ...]] = {}
    if cell.experiment == "dualpath-online":
        rate, tried = capacity(cell)
        figures["capacity_per_s"] = rate
        series = {name: tuple((at, point[name]) for at, point in tried) for name in ("ttft_s", "tpot_s", "agent_s")}
        run = run_of(cell, rate)
    result = run_agents(run)
    config: dict[str, Any] = {
        "assumptions": msgspec.to_builtins(ASSUMED),
        "policy": msgspec.to_builtins(run.policy),
    }
    if cell.experiment == AGENTS.name:
        config |= sessions_config(sessions)
    return Record(
        key=cell.key,
        cell=cell,
        config=config,
        summary=_summary(cell, run, result),
        figures=figures | figures_of(run, result),
        series=series,
    )


def run_of(cell: Cell, agents_per_s: float = math.nan) -> AgentRun:
    """Return the run of a cell; for `dualpath-online` agents arrive at this rate (Poisson)."""
    settings, profile, assumed, policy = cell.settings, DUALPATH_PROFILES[cell.profile], ASSUMED, ABLATION[cell.policy]
    if "mfu" in settings:
        profile = replace(profile, mfu=settings["mfu"], buffer_bytes=1e9 * settings["buffer"])
        assumed = msgspec.structs.replace(assumed, storage_share=settings["storage"])
        policy = policy if policy.quota_s is None else msgspec.structs.replace(policy, quota_s=settings["quota"])
    prefill = int(settings.get("prefill", profile.prefill_nodes))
    decode = int(settings.get("decode", prefill * profile.decode_nodes // profile.prefill_nodes))
    length = f"{settings.get('length', 64):g}K"
    trajectories = trajectories_of(length, cell.seed, settings.get("append", 1.0), settings.get("generate", 1.0))
    generator = np.random.default_rng([cell.seed, 1])
    end_s = math.inf
    if math.isnan(agents_per_s):
        start_s = np.zeros(int(settings.get("agents", 1000 * prefill)))
    else:
        end_s = ONLINE_END_S
        start_s = np.cumsum(generator.exponential(1 / agents_per_s, int(end_s * agents_per_s * 1.2) + 20))
    return AgentRun(
        cluster=storage_cluster(profile, assumed, prefill, decode),
        model=served_model(profile, assumed),
        policy=policy,
        trajectories=trajectories,
        trajectory=generator.integers(0, len(trajectories), len(start_s)),
        start_s=start_s,
        end_s=end_s,
        window_s=settings.get("window", 1.0),
    )


@lru_cache(maxsize=8)
def trajectories_of(length: str, seed: int, append: float, generate: float) -> Trajectories:
    """Return the published trace of a maximum length, with appended and generated tokens times these factors."""
    trajectories = generate_trajectories(TABLE_2[length], seed)
    if append == generate == 1.0:
        return trajectories
    return trajectories.scaled(append, generate, TABLE_2[length].tokens_max)


def sessions_run(sessions: str, cell: Cell) -> AgentRun:
    """Return the run of recorded sessions, each up to its first prompt that does not fit in a GPU or the published
    model's context; agents start within the first minute and play one session each. Raises InputError for a file
    without sessions."""
    profile = DUALPATH_PROFILES[cell.profile]
    model = served_model(profile, ASSUMED)
    agents = agents_of(sessions).within(min(model.decode_kv_tokens - _OUTPUT_MAX, _CONTEXT_MAX))
    trajectories = Trajectories.of_sessions(agents, cell.settings["think"])
    generator = np.random.default_rng([cell.seed, 2])
    count = int(cell.settings["agents"])
    return AgentRun(
        cluster=storage_cluster(profile, ASSUMED, profile.prefill_nodes, profile.decode_nodes),
        model=model,
        policy=ABLATION[cell.policy],
        trajectories=trajectories,
        trajectory=generator.integers(0, len(trajectories), count),
        start_s=np.sort(generator.uniform(0.0, 60.0, count)),
    )


@lru_cache(maxsize=2)
def agents_of(sessions: str) -> Agents:
    """Read sessions. Raises InputError if the file has none."""
    found = read_any(sessions)
    if not isinstance(found, Agents):
        hint = "give recorded sessions of agents, see docs/workloads.md"
        raise InputError("the file has requests without sessions", where=sessions, hint=hint)
    return found


def sessions_config(sessions: str) -> dict[str, Any]:
    """Return what identifies a file of sessions in the config of its records."""
    return {"sessions": f"{Path(sessions).name}, XXH64 {fingerprint(Path(sessions))}"}


def capacity(cell: Cell) -> tuple[float, list[tuple[float, dict[str, float]]]]:
    """Return the highest rate of agents per second with a mean TTFT of at most 4 s and a mean TPOT of at most 50 ms, to
    2 %, and the measured means at all tried rates in ascending order; the rate is 0 if even the lowest one is too
    high."""
    tried: dict[float, dict[str, float]] = {}

    def sustains(rate: float) -> bool:
        tried[rate] = online_means(run_agents(run_of(cell, rate)))
        return tried[rate]["ttft_s"] <= TTFT_MAX_S and tried[rate]["tpot_s"] <= TPOT_MAX_S

    low, high = 0.0, 0.05
    while sustains(high) and high < 100.0:
        low, high = high, 2.0 * high
    while low and high - low > 0.02 * high:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if sustains(middle) else (low, middle)
    return low, sorted(tried.items())


def online_means(result: StorageResult) -> dict[str, float]:
    """Return mean TTFT and TPOT of the turns, and mean time of the agents, after the warm-up; infinite if no turn has
    ended."""
    counted = result.arrived_s >= ONLINE_WARMUP_S
    tpot_s = result.tpot_s[counted & np.isfinite(result.tpot_s)]
    done_s = result.agent_s[np.isfinite(result.agent_s)]
    if not len(tpot_s) or not len(done_s):
        return {"ttft_s": math.inf, "tpot_s": math.inf, "agent_s": math.inf}
    means = result.ttft_s[counted].mean(), tpot_s.mean(), done_s.mean()
    return dict(zip(("ttft_s", "tpot_s", "agent_s"), map(float, means), strict=True))


def figures_of(run: AgentRun, result: StorageResult) -> dict[str, float]:
    """Return the numbers of a run by name and unit."""
    prefill = run.cluster.prefill_nodes
    read = result.read_bytes
    seconds = max(result.end_s, 1e-9)
    nodes_gb_per_s = read / seconds / 1e9
    return {
        "end_s": result.end_s,
        "agents": float(result.agents),
        "turns": float(result.turns),
        "events": float(result.events),
        "storage_balance": result.storage_balance,
        "attention_balance": result.attention_balance,
        "cached_share": float(run.trajectories.cached.sum() / run.trajectories.prompt.sum()),
        "prefill_read_share": float(read[:prefill].sum() / read.sum()) if read.sum() else 0.0,
        "prefill_storage_gb_per_s": float(nodes_gb_per_s[:prefill].mean()),
        "decode_storage_gb_per_s": float(nodes_gb_per_s[prefill:].mean()),
        "scheduling_s": result.phases.scheduling_s,
        "allocation_s": result.phases.allocation_s,
        "reading_s": result.phases.reading_s,
        "prefill_s": result.phases.prefill_s,
        "decode_s": result.phases.decode_s,
    }


def _summary(cell: Cell, run: AgentRun, result: StorageResult) -> Summary:
    """Return the general numbers; what the storage simulation does not have is None or empty."""
    total = int(np.diff(run.trajectories.start)[run.trajectory].sum())
    return Summary(
        policy=cell.policy,
        seed=cell.seed,
        requests=RequestCounts(arrived=total, finished=result.turns, rejected=0, in_flight=total - result.turns),
        measured=result.turns,
        ttft_s=Spread.of(result.ttft_s.astype(float)),
        ttft_parts_s=TtftParts(),
        transfer_s=Spread(),
        tbt_s=Spread(),
        tpot_s=Spread.of(result.tpot_s.astype(float)),
        slo_attainment=None,
        goodput_per_s=None,
        throughput_per_s=result.turns / result.end_s if result.end_s else None,
        tier_share={},
        cache_hit=None,
        prefill_cache_hit=None,
        kv_bytes=float(result.read_bytes.sum()),
        link_load={},
        wall_s=0.0,
        cpu_s=0.0,
    )
