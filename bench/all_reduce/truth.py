"""Measured time of all-reduces over shaped links, compared with the cost model: `python -m bench.all_reduce.truth`.

Ranks are processes of PyTorch's backend `kvroute` in network namespaces, one namespace for each server. The model is
`kvroute.collectives` on a cluster file of the same network. Needs root and `make vllm`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench.all_reduce.star import KV_PORT, ROOT, Star, star, start_rank, switch, xdp
from bench.measurement import Row, show

from kvroute.collectives import Aggregation, AllReduce, CollectiveFlow, all_reduce, seconds
from kvroute.topology import Cluster, parse
from kvroute.topology.gpu_paths import GpuPaths
from kvroute_engine.agent.schemes import Scheme

TORCH = ROOT / ".venv-vllm" / "bin" / "python"
BITS_PER_S = 10e6
"""Rate of every link in each direction. Two cores keep up with eight ranks at this rate."""
TCP_SHARE = 1448 / (1514 + 66 / 2)
"""Payload of a full TCP segment in the bytes that a link counts: the segment, and the acknowledgements of the other
direction, one for every two segments."""
SWITCH_SHARE = 1024 / 1092
"""Values in a packet to the switch."""
SIZES = (64 * 1024, 512 * 1024, 4 * 2**20)
ROUNDS = 3
LATENCY_S = 150e-6
"""Time of a message between two processes on an idle wire, wake-ups included."""
_KV = """
import socket, sys, time
if sys.argv[1] == "sink":
    server = socket.create_server(("0.0.0.0", int(sys.argv[2])))
    connection, _ = server.accept()
    while connection.recv(1 << 16):
        pass
else:
    while True:
        try:
            connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), 10)
            break
        except ConnectionRefusedError:  # The sink does not listen yet.
            time.sleep(0.05)
    connection.settimeout(None)
    while True:
        connection.sendall(bytes(1 << 16))
"""


@dataclass(frozen=True)
class Case:
    """One group and scheme."""

    scheme: Scheme
    servers: int
    gpus: int = 1
    plane: str = "python"
    kv: bool = False
    """Whether a KV transfer from the first to the second server competes."""

    @property
    def name(self) -> str:
        """Text for tables."""
        plane = f", {self.plane}" if "ina" in self.scheme else ""
        return f"{self.scheme}{plane}, {self.servers} x {self.gpus}{', beside a KV transfer' if self.kv else ''}"


_GROUPS = (
    *(Case("ring", servers) for servers in (2, 4, 8)),
    *(Case("hierarchical-ring", servers, 2) for servers in (2, 4)),
    *(Case("ina", servers, plane=plane) for servers in (2, 4, 8) for plane in ("python", "xdp")),
    Case("hierarchical-ina", 4, 2, "xdp"),
)
CASES = tuple(replace(case, kv=kv) for kv in (False, True) for case in _GROUPS)


@dataclass(frozen=True)
class Cell:
    """One size of a case."""

    case: Case
    nbytes: int
    measured_s: float
    model_s: float

    @property
    def error(self) -> float:
        """Relative error of the model."""
        return abs(self.model_s / self.measured_s - 1)


def cluster_of(case: Case, share: float) -> Cluster:
    """Return the cluster of a case. `share`: payload in the bytes of a link."""
    nic = f"{{count: 1, capacity: {BITS_PER_S * share * 1e-6:.6f} Mbps}}"
    nodes = "".join(
        f"  - {{name: s{n}, rack: r, gpus: {case.gpus}, nvlink: 1 GB/s, nics: {{compute: {nic}}}}}\n"
        for n in range(case.servers)
    )
    return parse(f"""
name: star
racks: [{{name: r}}]
nodes:
{nodes}
network: {{latency: {{node: 50 us, rack: {LATENCY_S * 1e6:.0f} us}}}}
timing: {{default: {{prefill: {{kind: linear, per_token: 1 us}}, decode: {{base: 1 ms}}}}}}
defaults: {{model: llama-3-70b, kv_capacity: 10 GB}}
instances: [{{name: i0, role: both, gpus: "s0:0"}}]
""")


def model_s(case: Case, nbytes: int) -> float:
    """Return the time by the cost model. Fixed point adds a reduction of one exponent for 256 values."""
    switched = "ina" in case.scheme
    cluster = cluster_of(case, SWITCH_SHARE if switched else TCP_SHARE)
    gpus = tuple((node, gpu) for node in range(case.servers) for gpu in range(case.gpus))
    aggregation = Aggregation(slots=128, packet_bytes=1024, wire="int32", switch_s=LATENCY_S)
    others = []
    if case.kv:
        paths = GpuPaths(cluster, gpus)
        others = [CollectiveFlow(paths.between((0, 0), (1, 0)), 1e15)]
    total = 0.0
    for size in (nbytes, nbytes / 256) if switched else (nbytes,):
        found = all_reduce(case.scheme, AllReduce(gpus, size, element_bytes=4), cluster, aggregation)
        assert found is not None, "the group can use the scheme"
        total += seconds(found, cluster.capacity_bytes_per_s, others)
    return total


def cells(case: Case, sizes: tuple[int, ...] = SIZES, rounds: int = ROUNDS) -> list[Cell]:
    """Measure a case."""
    options = {"ring": "", "hierarchical-ring": ""}.get(case.scheme, "switch")
    with star(case.servers, BITS_PER_S) as found, tempfile.TemporaryDirectory() as folder:
        if options:
            with switch(found, *(xdp(found) if case.plane == "xdp" else ())) as (_, plane):
                assert plane == case.plane
                measured = _measure(found, case, Path(folder), sizes, rounds)
        else:
            measured = _measure(found, case, Path(folder), sizes, rounds)
    return [Cell(case, size, measured[size], model_s(case, size)) for size in sizes]


def _measure(found: Star, case: Case, folder: Path, sizes: tuple[int, ...], rounds: int) -> dict[int, float]:
    """Return the median over rounds of the time of the slowest rank, by size."""
    ranks = []
    with _kv_transfer(found) if case.kv else _nothing():
        for rank in range(case.servers * case.gpus):
            server = rank // case.gpus
            servers = ", ".join([str(case.gpus)] * case.servers)
            text = (
                f"ranks_per_server: [{servers}]\nschemes: [{{scheme: {case.scheme}}}]\ntimeout: 60 s\nswitch: SWITCH\n"
            )
            given = (rank, case.servers * case.gpus, found.address(0), rounds, *sizes)
            command: list[str | Path] = [TORCH, Path(__file__).with_name("rank.py"), *map(str, given)]
            ranks.append(start_rank(found, server, command, folder / f"{rank}.yaml", text))
        outputs = [process.communicate(timeout=570) for process in ranks]
    for process, (_, error) in zip(ranks, outputs, strict=True):
        assert process.returncode == 0, error
    results = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    assert all(set(result["calls"]) == {case.scheme} for result in results), "no rank fell back"
    slowest = {size: zip(*(result["seconds"][str(size)] for result in results), strict=True) for size in sizes}
    return {size: statistics.median(max(seconds) for seconds in times) for size, times in slowest.items()}


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _kv_transfer(found: Star) -> Iterator[None]:
    """A TCP connection from the first server to the second that always has bytes to send."""
    inside = ["ip", "netns", "exec"]
    sink = subprocess.Popen([*inside, found.host(1), sys.executable, "-c", _KV, "sink", str(KV_PORT)])
    source = subprocess.Popen([*inside, found.host(0), sys.executable, "-c", _KV, found.address(1), str(KV_PORT)])
    try:
        yield
    finally:
        for process in (source, sink):
            process.kill()
            process.wait()


def rows(done: Sequence[Cell]) -> list[Row]:
    """Return the median errors alone and beside a KV transfer, with the largest error of each scheme in the note."""
    result = []
    for kv, target in ((False, 10.0), (True, 15.0)):
        found = [cell for cell in done if cell.case.kv == kv]
        if found:
            largest = {cell.case.scheme: 0.0 for cell in found}
            for cell in found:
                largest[cell.case.scheme] = max(largest[cell.case.scheme], cell.error)
            where = "beside a KV transfer" if kv else "alone"
            result.append(
                Row(
                    measure=f"time of an all-reduce, {where}: median error of the model, {len(found)} cells",
                    unit="%",
                    better="lower",
                    ours=100 * statistics.median(cell.error for cell in found),
                    target=target,
                    note=f"largest errors {where}: "
                    + ", ".join(f"{scheme} {100 * error:.0f} %" for scheme, error in largest.items()),
                )
            )
    return result


def main() -> None:
    """Print every cell on standard error, and the median errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="measure only this many sizes, from the smallest")
    given = parser.parse_args()
    done: list[Cell] = []
    for case in CASES:
        if given.only in case.name:
            for cell in cells(case, SIZES[: given.sizes], given.rounds):
                done.append(cell)
                times = f"{cell.measured_s * 1e3:9.1f} ms, model {cell.model_s * 1e3:9.1f} ms"
                line = f"{case.name:60} {cell.nbytes >> 10:>5} KiB {times} {100 * cell.error:5.1f} %"
                print(line, file=sys.stderr, flush=True)
    show(rows(done), given.json)


if __name__ == "__main__":
    main()
