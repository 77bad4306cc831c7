"""Cells that are spread evenly over networks, sizes, prompts and loads, as data: clusters as `kvroute topology new`
writes them, also in several racks and with NICs of two speeds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import msgspec
import numpy as np

from kvroute.llm import model
from kvroute.sim.workload import Trace, TracedRequest
from kvroute.topology import Cluster, build, parse
from kvroute.topology.drafts.draft import KV_BYTES_PER_GPU, draft, scaled_times
from kvroute.topology.schema import ClusterFile, LinearPrefillEntry, Node, Rack, Uplinks
from kvroute_engine.files.units import Bandwidth, bandwidth_bytes_per_s

MODEL = "llama-3-70b"
CELLS, _DESIGN_SEED = 120, 41
NIC_GBPS = (1.0, 400.0)
UPLINK_SHARE = (0.1, 1.0)
"""Capacity of a rack's uplinks as a share of that of its nodes' NICs."""
SLOW_SHARE = (1.0, 1.0, 0.25, 0.1)
"""Speed of every second node's NIC as a share of the others'."""
RACKS = (1, 1, 2, 4)
INSTANCES = (2, 64)
PREFILL_PER_DECODE = (1 / 7, 7.0)
PROMPT_TOKENS = (100.0, 64_000.0)
"""Mean of a cell; lengths are lognormal up to `PROMPT_MAX`."""
OUTPUT_TOKENS = (30.0, 600.0)
LOAD = (0.2, 1.5)
PROMPT_MAX, SIGMA = 128_000, 0.8
_TP_4_FROM = 5_000.0
"""Mean prompt tokens from which an instance has four GPUs, so that its memory holds several requests."""
_BATCH = 48.0
"""Size of a decode batch at 100 % load, if memory has room for it."""
_PREFILL_SHARE, _DECODE_SHARE = 0.8, 0.5
"""Share of the time that prefill and decode instances are busy at 100 % load."""


@dataclass(frozen=True, slots=True)
class NetworkCase:
    """One cell: a cluster of one switch or of several racks, and its requests."""

    number: int
    nic_gbps: float
    slow_share: float
    racks: int
    uplink_share: float
    prefill: int
    decode: int
    prompt_tokens: float
    output_tokens: float
    load: float

    @property
    def name(self) -> str:
        """The cell's name; the argument of `--profile`."""
        network = f"{self.nic_gbps:g}G"
        if self.slow_share < 1:
            network += f"+{self.nic_gbps * self.slow_share:g}G"
        if self.racks > 1:
            network += f" {self.racks} racks x{self.uplink_share:g}"
        return (
            f"network/{self.number} {network} {self.prefill}:{self.decode} "
            f"{self.prompt_tokens:.0f}+{self.output_tokens:.0f} load={self.load:g}"
        )

    @property
    def tp(self) -> int:
        """GPUs of an instance."""
        return 4 if self.prompt_tokens >= _TP_4_FROM else 1

    @property
    def requests(self) -> int:
        """Number of requests; more for larger clusters, whose queues take longer to build up."""
        return 250 + 15 * (self.prefill + self.decode)


def _spread(cells: int, dimensions: int) -> list[list[float]]:
    """Return points in [0, 1), [cells][dimensions]: a Latin hypercube, in which each of `cells` equal parts of every
    dimension has one point."""
    parts = np.tile((np.arange(cells) + 0.5) / cells, (dimensions, 1))
    points: list[list[float]] = np.random.default_rng(_DESIGN_SEED).permuted(parts, axis=1).T.tolist()
    return points


def _between(share: float, bounds: tuple[float, float]) -> float:
    """Return a value of two significant digits between the bounds, even on a logarithmic scale."""
    low, high = bounds
    return float(f"{low * (high / low) ** share:.2g}")


def _case(number: int, point: list[float]) -> NetworkCase:
    nic, slow, racks, uplink, size, ratio, prompt, output, load = point
    instances = round(INSTANCES[0] * (INSTANCES[1] / INSTANCES[0]) ** size)
    per_decode = _between(ratio, PREFILL_PER_DECODE)
    prefill = min(max(round(instances * per_decode / (1 + per_decode)), 1), instances - 1)
    return NetworkCase(
        number=number,
        nic_gbps=_between(nic, NIC_GBPS),
        slow_share=SLOW_SHARE[int(slow * len(SLOW_SHARE))],
        racks=min(RACKS[int(racks * len(RACKS))], instances),
        uplink_share=_between(uplink, UPLINK_SHARE),
        prefill=prefill,
        decode=instances - prefill,
        prompt_tokens=_between(prompt, PROMPT_TOKENS),
        output_tokens=_between(output, OUTPUT_TOKENS),
        load=float(f"{LOAD[0] + load * (LOAD[1] - LOAD[0]):.2g}"),
    )


_FOUND = [_case(number, point) for number, point in enumerate(_spread(CELLS, 9))]
NETWORK_CASES: dict[str, NetworkCase] = {case.name: case for case in _FOUND}
"""Every cell by name."""


def network_cluster(case: NetworkCase) -> Cluster:
    """Return the cluster of a cell: one host for each instance; prefill and decode are spread over racks and speeds."""
    text = draft(
        "network",
        [f"http://p{i}:8000" for i in range(case.prefill)],
        [f"http://d{i}:8000" for i in range(case.decode)],
        model=MODEL,
        tp=case.tp,
        nic_bytes_per_s=bandwidth_bytes_per_s(f"{case.nic_gbps:g} Gbps"),
    )
    cluster = parse(text)
    if case.racks == 1 and case.slow_share == 1:
        return cluster
    return build(_in_racks(cluster.file, case))


def _in_racks(file: ClusterFile, case: NetworkCase) -> ClusterFile:
    """Deal the nodes out to racks in turn, and slow down the NICs of every second node of a rack."""
    nodes = [_placed(node, position, case) for position, node in enumerate(file.nodes)]
    racks = []
    for number in range(case.racks):
        total = sum(_nic_bytes_per_s(node) for node in nodes[number :: case.racks])
        uplinks = Uplinks(bytes_per_s=Bandwidth(case.uplink_share * total)) if case.racks > 1 else None
        racks.append(Rack(name=f"rack{number}", uplinks=uplinks))
    return msgspec.structs.replace(file, racks=racks, nodes=nodes)


def _placed(node: Node, position: int, case: NetworkCase) -> Node:
    slow = (position // case.racks) % 2 == 1
    nic = node.nics.compute
    assert nic is not None
    rate = nic.bytes_per_s * (case.slow_share if slow else 1.0)
    nics = msgspec.structs.replace(node.nics, compute=msgspec.structs.replace(nic, bytes_per_s=Bandwidth(rate)))
    return msgspec.structs.replace(node, rack=f"rack{position % case.racks}", nics=nics)


def _nic_bytes_per_s(node: Node) -> float:
    assert node.nics.compute is not None
    return node.nics.compute.count * float(node.nics.compute.bytes_per_s)


def network_rate_per_s(case: NetworkCase) -> float:
    """Return the requests per second of a cell: its load times what the prefill instances or the decode instances have
    time for, the lower of both."""
    times = scaled_times(case.tp)
    assert isinstance(times.prefill, LinearPrefillEntry)
    prefill_s = times.prefill.base_s + times.prefill.per_token_s * case.prompt_tokens
    kv_bytes = model(MODEL).kv_bytes_per_token * (case.prompt_tokens + case.output_tokens)
    batch = max(min(_BATCH, KV_BYTES_PER_GPU * case.tp / kv_bytes), 1.0)
    response_s = case.output_tokens * (times.decode.base_s + times.decode.per_request_s * batch)
    return case.load * min(_PREFILL_SHARE * case.prefill / prefill_s, _DECODE_SHARE * batch * case.decode / response_s)


@lru_cache(maxsize=8)
def network_trace(case: NetworkCase, seed: int) -> Trace:
    """Return Poisson arrivals with lognormal lengths and without common prefixes."""
    draw = np.random.default_rng([seed, case.number])

    def lengths(mean: float, most: int) -> list[int]:
        drawn = draw.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, case.requests)
        return [int(length) for length in np.clip(drawn, 4, most)]

    at_s = np.cumsum(draw.exponential(1 / network_rate_per_s(case), case.requests)).tolist()
    prompts, outputs = lengths(case.prompt_tokens, PROMPT_MAX), lengths(case.output_tokens, 4_000)
    rows = [TracedRequest(at, tokens, out, (), 16) for at, tokens, out in zip(at_s, prompts, outputs, strict=True)]
    return Trace(case.name, tuple(rows))
