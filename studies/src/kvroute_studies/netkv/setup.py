"""Builds the run of a cell: cluster, requests, policies and assumptions, from a reading and the settings of a sweep."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from kvroute.control import ControlSpec
from kvroute.planner.comparison.cells import Cell, Record
from kvroute.sim.run import Run, simulate
from kvroute.sim.settings import Background, SimSpec, Slo
from kvroute.sim.workload import (
    PROFILES,
    Trace,
    apply_profile,
    generate,
    read,
    rescale,
    share_prefixes,
    window,
    with_lengths,
)
from kvroute.topology import Cluster, build
from kvroute.topology.drafts.builders import LLAMA_70B_TP4, fat_tree
from kvroute.topology.schema import (
    DecodeEntry,
    InstanceDefaults,
    InstanceEntry,
    LinearPrefillEntry,
    Network,
    TierBandwidth,
    TierLatency,
    TimingEntry,
)
from kvroute.types import Role
from kvroute_engine.files.units import Bandwidth, Duration, Latency, bandwidth_bytes_per_s
from kvroute_studies.netkv.readings import Reading

GPUS_PER_GROUP = 64
"""GPUs of NetKV's cluster: two pods of two racks of two servers of eight GPUs. Larger clusters repeat it."""
PREFILL_PER_GROUP, INSTANCES_PER_RACK = 4, 4
RAG_RATE_PER_S = 6.09
"""RAG requests per second at 100 % load on 64 GPUs."""
WARMUP_S, MEASURE_S, WINDOW_START_S = 5.0, 15.0, 55.0
TUNING_START_S, TUNING_S, TUNING_LOAD = 0.0, 30.0, 0.8
GENERATED_REQUESTS, GENERATED_RATE_PER_S, GENERATOR_SEED = 12_031, 3.401, 2025


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """CLA* weights tuned for one profile."""

    cache: float = 1.0
    load: float = 1.0


@dataclass(frozen=True, slots=True)
class Study:
    """Settings common to all cells of a results folder."""

    reading: Reading
    trace: str = ""
    """Path of a Mooncake trace; empty for the generated one."""
    weights: tuple[tuple[str, Weights], ...] = ()
    """Tuned CLA* weights by profile."""
    tuning: bool = False
    """True to run on the tuning slice instead of the measurement window."""
    warmup_s: float = WARMUP_S
    measure_s: float = MEASURE_S
    engine: InstanceDefaults = LLAMA_70B_TP4
    """Model and memory of every instance."""

    def weights_of(self, profile: str) -> Weights:
        """Return the tuned weights, or (1, 1)."""
        return dict(self.weights).get(profile, Weights())


def check_trace(study: Study) -> None:
    """Read the study's trace before any cell runs; raises InputError if it is invalid."""
    _whole_trace(study.trace)


def config_of(study: Study) -> dict[str, Any]:
    """Return the configuration, with reading and trace, that all records of a results folder share."""
    return {"reading": msgspec.to_builtins(study.reading), "trace": _trace_name(study.trace)}


@lru_cache(maxsize=4)
def _trace_name(path: str) -> str:
    if not path:
        return f"generated, seed {GENERATOR_SEED}"
    return f"{Path(path).name}, XXH64 {xxhash.xxh64_hexdigest(Path(path).read_bytes())}"


def run_cell(study: Study, cell: Cell) -> Record:
    """Run one cell. It is picklable together with its study, for processes and Ray."""
    run = run_of(study, cell)
    weights = study.weights_of(cell.profile)
    config = config_of(study) | {
        "rate_per_s": rate_per_s(study, cell),
        "cla_weights": [weights.cache, weights.load] if cell.policy == "cla" else None,
        "tuning_slice": study.tuning,
    }
    return Record(key=cell.key, cell=cell, config=config, summary=run.summary, timeline=run.timeline)


def run_of(study: Study, cell: Cell) -> Run:
    """Return the run behind a cell, with the times of every request."""
    reading, profile = study.reading, PROFILES[cell.profile]
    settings = SimSpec(
        prefill_queueing=reading.prefill_queueing,
        background=Background.uniform(cell.settings.get("background", reading.background)),
        oracle_refresh_s=cell.settings.get("refresh_s", 1.0),
        slo=Slo(ttft_s=profile.ttft_slo_s),
        warmup_s=0.0 if study.tuning else study.warmup_s,
        measure_s=TUNING_S if study.tuning else study.measure_s,
    )
    weights = study.weights_of(cell.profile)
    parameters = {"cache_weight": weights.cache, "load_weight": weights.load} if cell.policy == "cla" else {}
    spec = ControlSpec(
        decode=cell.policy,
        parameters=parameters,
        prefill=reading.prefill_policy,
        prefill_cache=reading.prefill_cache,
    )
    return simulate(cluster_of(reading, cell, study.engine), requests_of(study, cell), spec, settings, seed=cell.seed)


def cluster_of(reading: Reading, cell: Cell, engine: InstanceDefaults = LLAMA_70B_TP4) -> Cluster:
    """Return the fat tree of a reading at a cell's size and oversubscription."""
    gpus = int(cell.settings.get("gpus", GPUS_PER_GROUP))
    return _cluster(reading, gpus // GPUS_PER_GROUP, cell.settings.get("oversubscription", 4.0), engine)


@lru_cache(maxsize=16)
def _cluster(reading: Reading, groups: int, oversubscription: float, engine: InstanceDefaults) -> Cluster:
    """Build the fat tree with B1 = 100 Gbps, B3 = B1 / oversubscription, and B2 = B1 / 2, but never below B3."""
    nic = bandwidth_bytes_per_s("100 Gbps")
    pod_bytes_per_s = nic / oversubscription
    rack_bytes_per_s = max(nic / 2, pod_bytes_per_s)
    file = fat_tree(
        f"netkv-{groups * GPUS_PER_GROUP}",
        pods=2 * groups,
        racks_per_pod=2,
        nodes_per_rack=2,
        nic_bytes_per_s=bandwidth_bytes_per_s(reading.nic_bandwidth),
        nics_per_node=1 if reading.nic_scope == "server" else None,
        nic_scope=reading.nic_scope,
        rack_uplinks=(reading.rack_uplinks, rack_bytes_per_s),
        pod_uplinks=(reading.pod_uplinks, pod_bytes_per_s),
        instances=_instances(reading, groups),
        network=Network(
            ecmp=reading.ecmp,
            latency=TierLatency(
                node_s=Latency(1e-6), rack_s=Latency(3e-6), pod_s=Latency(8e-6), datacenter_s=Latency(15e-6)
            ),
            tier_bandwidth=TierBandwidth(
                node_bytes_per_s=Bandwidth(450e9),
                rack_bytes_per_s=Bandwidth(nic),
                pod_bytes_per_s=Bandwidth(rack_bytes_per_s),
                datacenter_bytes_per_s=Bandwidth(pod_bytes_per_s),
            ),
        ),
        timing={"default": _timing(reading)},
        defaults=engine,
    )
    return build(file)


def _timing(reading: Reading) -> TimingEntry:
    prefill = LinearPrefillEntry(
        per_token_s=Duration(reading.times.prefill_per_token_s), base_s=Duration(reading.times.prefill_base_s)
    )
    decode = DecodeEntry(
        base_s=Duration(reading.times.decode_base_s), per_request_s=Duration(reading.times.decode_per_request_s)
    )
    return TimingEntry(prefill=prefill, decode=decode)


def _instances(reading: Reading, groups: int) -> list[InstanceEntry]:
    """Return four prefill and twelve decode instances per group of four racks.

    Decode names alternate between the racks. Ties go to the first name, and so do not favour near instances.
    """
    width = len(str(8 * groups - 1))
    prefill: list[str] = []
    decode: list[str] = []
    for group in range(groups):
        racks = [[_slot(8 * group + 2 * rack, part, width) for part in range(4)] for rack in range(4)]
        if reading.placement == "rack":
            prefill += racks.pop(0)
        elif reading.placement == "node":
            prefill += [rack.pop(0) for rack in (racks[0], racks[0], racks[2], racks[2])]
        else:
            prefill += [rack.pop(0) for rack in racks]
        decode += [slot for level in zip_longest(*racks) for slot in level if slot is not None]
    roles: tuple[tuple[Role, list[str]], ...] = (("prefill", prefill), ("decode", decode))
    return [
        InstanceEntry(name=f"{role}{number:04}", role=role, gpus=slot)
        for role, slots in roles
        for number, slot in enumerate(slots)
    ]


def _slot(first_node: int, part: int, width: int) -> str:
    """Return the GPUs of part 0 to 3 of a rack with two eight-GPU nodes."""
    node, half = first_node + part // 2, part % 2
    return f"node{node:0{width}}:{4 * half}-{4 * half + 3}"


def rate_per_s(study: Study, cell: Cell) -> float:
    """Return the requests per second: load times capacity, in proportion to the number of GPUs."""
    load = cell.settings.get("load", TUNING_LOAD if study.tuning else 1.0)
    groups = cell.settings.get("gpus", GPUS_PER_GROUP) / GPUS_PER_GROUP
    return load * groups * capacity_per_s(study, cell.profile)


def capacity_per_s(study: Study, profile: str) -> float:
    """Return the requests per second of 100 % load on 64 GPUs (`Reading.capacity`)."""
    mean_tokens = _mean_tokens(study.trace, profile)
    if study.reading.capacity == "network":
        return RAG_RATE_PER_S * _mean_tokens(study.trace, "rag") / mean_tokens
    prefill_s = study.reading.times.prefill_per_token_s * mean_tokens + study.reading.times.prefill_base_s
    return 0.8 * PREFILL_PER_GROUP / prefill_s


@lru_cache(maxsize=16)
def _mean_tokens(trace: str, profile: str) -> float:
    return float(np.mean([request.input_tokens for request in _profile_trace(trace, profile).requests]))


@lru_cache(maxsize=4)
def _whole_trace(path: str) -> Trace:
    if path:
        return read(Path(path))
    return generate(GENERATED_REQUESTS, rate_per_s=GENERATED_RATE_PER_S, seed=GENERATOR_SEED)


@lru_cache(maxsize=16)
def _profile_trace(path: str, profile: str) -> Trace:
    return apply_profile(_whole_trace(path), PROFILES[profile])


def requests_of(study: Study, cell: Cell) -> Trace:
    """Return the cell's requests, from time 0, the same for every policy of a seed."""
    profile, rate = PROFILES[cell.profile], rate_per_s(study, cell)
    needed_s = WINDOW_START_S + study.warmup_s + study.measure_s
    trace = rescale(_long_enough(_profile_trace(study.trace, cell.profile), needed_s * 1.1 * rate), rate)
    start_s, length_s = _slice(study, cell, trace)
    trace = window(trace, start_s, start_s + length_s)
    tokens = cell.settings.get("tokens")
    if tokens is not None:
        trace = with_lengths(trace, input_tokens=int(tokens))
    p_share = cell.settings.get("p_share")
    if p_share is not None or tokens is not None or study.reading.prefixes == "groups":
        share = profile.p_share if p_share is None else p_share
        trace = share_prefixes(trace, share, seed=cell.seed)
    return trace


def _long_enough(trace: Trace, needed: float) -> Trace:
    """Repeat the trace until it has as many requests as needed; copies share no blocks."""
    copies = int(np.ceil(needed / len(trace.requests)))
    if copies <= 1:
        return trace
    period_s = trace.duration_s + 1 / trace.rate_per_s
    requests = [
        msgspec.structs.replace(
            request,
            at_s=request.at_s + copy * period_s,
            blocks=tuple(block + (copy << 60) for block in request.blocks),
        )
        for copy in range(copies)
        for request in trace.requests
    ]
    return Trace(trace.name, tuple(requests))


def _slice(study: Study, cell: Cell, trace: Trace) -> tuple[float, float]:
    if study.tuning:
        return TUNING_START_S, TUNING_S
    length_s = study.warmup_s + study.measure_s
    if study.reading.request_set == "window":
        return WINDOW_START_S, length_s
    # No seed's window contains the tuning slice.
    first_s, last_s = TUNING_S, max(trace.requests[-1].at_s - length_s, TUNING_S)
    return first_s + (last_s - first_s) * ((cell.seed * 0.6180339887) % 1.0), length_s
