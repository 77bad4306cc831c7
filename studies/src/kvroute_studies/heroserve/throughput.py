"""`heroserve-ina-throughput` and `heroserve-ina-loss`: all-reduces by scheme and size, by the model of flows, and
aggregation under packet loss, by the state machines of the switch in virtual time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from kvroute.collectives import INA_SCHEMES, Aggregation, AllReduce, all_seconds
from kvroute.planner.comparison.cells import Cell, Record
from kvroute.sim.groups.switch_network import SwitchLinks, SwitchNetwork, random_values
from kvroute.topology import Cluster, parse
from kvroute.topology.schema import WireType
from kvroute_engine.agent.schemes import SCHEMES, Scheme
from kvroute_engine.switch.wire import CHUNK_VALUES, DATA_BYTES
from kvroute_studies.heroserve.setup import no_requests
from kvroute_studies.shared.cells import Experiment
from kvroute_studies.shared.heroserve_baselines import BASELINES, HERO, RETRY_S, WITHOUT

ELEMENT_BYTES = 2
LATENCY_S, SWITCH_S = 3e-6, 1e-6
NIC_BYTES_PER_S = 12.5e9
CHUNK_BYTES = 4 * CHUNK_VALUES
FRAME_BYTES = DATA_BYTES + 66
"""Packet on the link: Ethernet with preamble and gap (38), IPv4 (20) and UDP (8)."""
CHUNKS = 2048
"""Packets of each worker in `heroserve-ina-loss`: 2 MiB."""


@dataclass(frozen=True, slots=True)
class Wire:
    """What switches can do in a profile."""

    type: WireType
    slots: int


WIRES = {
    "fp16-512": Wire("fp16", 512),
    "int32-512": Wire("int32", 512),
    "fp16-32": Wire("fp16", 32),
    "int32-32": Wire("int32", 32),
}
"""By profile: type of the elements in packets, and slots for each NIC."""

THROUGHPUT = Experiment(
    name="heroserve-ina-throughput",
    title="All-reduces by scheme and size",
    source="HeroServe V, aggregation throughput",
    axes={"span": (2.0, 4.0, 8.0), "gpus": (1.0, 4.0), "kib": (64.0, 512.0, 4096.0, 32768.0)},
    policies=tuple(BASELINES),
    profiles=tuple(WIRES),
    expectation="hierarchical aggregation reduces more bytes per second than every baseline at every size",
    versus=(HERO, WITHOUT),
    certain=tuple(WIRES),
)
LOSS = Experiment(
    name="heroserve-ina-loss",
    title="Aggregation under packet loss",
    source="none: the protocol of kvroute's switch",
    axes={"workers": (2.0, 4.0, 8.0), "slots": (32.0, 128.0, 512.0), "loss": (0.0, 0.001, 0.01)},
    policies=tuple(RETRY_S),
    profiles=("int32-100g",),
    expectation="without loss the protocol reaches the model's rate; with loss, windows wait for retransmissions",
    versus=("retry-100us", "retry-1ms"),
)


@lru_cache(maxsize=16)
def servers(count: int, gpus: int) -> Cluster:
    """Return servers below one switch: GPUs with NVLink of 300 GB/s and a NIC of 100 Gbps each."""
    nodes = "\n".join(
        f"  - {{name: s{number}, rack: access, gpus: {gpus}, nvlink: 300 GB/s, "
        f"nics: {{compute: {{count: {gpus}, capacity: 100 Gbps}}}}}}"
        for number in range(count)
    )
    text = f"""name: servers
racks: [{{name: access}}]
nodes:
{nodes}
network: {{latency: {{node: 1 us, rack: 3 us}}}}
timing: {{default: {{prefill: {{kind: linear, per_token: 1 us}}, decode: {{base: 1 ms}}}}}}
defaults: {{model: opt-66b, kv_capacity: 10 GB}}
instances: [{{name: unused, role: both, gpus: "s0:0"}}]
"""
    return parse(text)


def run_throughput(cell: Cell) -> Record:
    """Compute the time of one all-reduce on idle links; HeroServe uses the fastest scheme."""
    settings, wire, baseline = cell.settings, WIRES[cell.profile], BASELINES[cell.policy]
    cluster, gpus = servers(int(settings["span"]), int(settings["gpus"])), int(settings["gpus"])
    nbytes = 1024.0 * settings["kib"]
    group = tuple((node, gpu) for node in range(int(settings["span"])) for gpu in range(gpus))
    aggregation = Aggregation(slots=wire.slots, wire=wire.type, fallback_share=baseline.fallback_share)
    schemes: tuple[Scheme, ...] = SCHEMES if baseline.scheme is None else (baseline.scheme,)
    times = all_seconds(AllReduce(group, nbytes, ELEMENT_BYTES), cluster, aggregation, schemes)
    scheme = min(times, key=lambda name: times[name])
    figures = {
        "time_us": 1e6 * times[scheme],
        "gb_per_s": nbytes / times[scheme] / 1e9,
        "aggregated_share": float(scheme in INA_SCHEMES),
    }
    config = {"scheme": scheme, "wire": wire.type, "slots": wire.slots, "nic_bytes_per_s": NIC_BYTES_PER_S}
    return Record(key=cell.key, cell=cell, config=config, summary=no_requests(cell), figures=figures)


def run_loss(cell: Cell) -> Record:
    """Run workers and a switch over links that lose packets, packet by packet."""
    workers, slots = int(cell.settings["workers"]), int(cell.settings["slots"])
    links = SwitchLinks(NIC_BYTES_PER_S, LATENCY_S, cell.settings["loss"], FRAME_BYTES, SWITCH_S)
    values = random_values(workers, CHUNKS, cell.seed)
    run = SwitchNetwork(links, workers, slots, RETRY_S[cell.policy], cell.seed).run(values)
    nbytes = CHUNKS * CHUNK_BYTES
    figures = {
        "gb_per_s": nbytes / run.seconds / 1e9,
        "model_gb_per_s": model_bytes_per_s(slots) / 1e9,
        "time_us": 1e6 * run.seconds,
        "sent_again_share": run.sent_again / (workers * CHUNKS),
    }
    config = {"chunks": CHUNKS, "chunk_bytes": CHUNK_BYTES, "frame_bytes": FRAME_BYTES, "latency_s": LATENCY_S}
    config |= {"nic_bytes_per_s": NIC_BYTES_PER_S, "switch_s": SWITCH_S, "retry_s": RETRY_S[cell.policy]}
    return Record(key=cell.key, cell=cell, config=config, summary=no_requests(cell), figures=figures)


def model_bytes_per_s(slots: int) -> float:
    """Return the rate of the model of flows without latency: that of the NIC without headers, or of the slots."""
    return min(NIC_BYTES_PER_S * CHUNK_BYTES / FRAME_BYTES, slots * CHUNK_BYTES / (2.0 * LATENCY_S + SWITCH_S))
