"""Simulated requests per CPU-second and peak memory: `python -m bench.simulate [--json]`, with Dynamo's Rust replay.

The simulation sends the Mooncake conversation trace through a fat tree with per-link contention and policy netkv. CPU
time is counted from the trace's file to the result (reading, building, loop, summary). Memory is that of the whole
process, including imports.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.measurement import ROOT, Failed, Row, fresh, median, process_figures, show
from bench.peers.environment import QUIET, dynamo_python

if TYPE_CHECKING:
    from kvroute.sim.workload import Trace
    from kvroute.topology import Cluster

REQUESTS, RATE_PER_S = 12_031, 3.4
TRACE = ROOT.parent / "shared" / "data" / "mooncake" / "conversation_trace.jsonl.zst"
WARM_REQUESTS = 200


@dataclass(frozen=True, slots=True)
class Size:
    """One of our clusters, the nearest one of the peer, and our target."""

    instances: int
    prefill: int
    decode: int
    peer_prefill: int
    peer_decode: int
    speedup: float
    requests_per_cpu_s: float
    rss_mb: float | None


SIZES = {
    "small": Size(16, 4, 12, 4, 4, 1.0, 2_500.0, 600.0),
    "large": Size(1_024, 256, 768, 512, 512, 64.0, 800.0, None),
}


def cluster_of(size: Size) -> Cluster:
    """Return the published 16 instances, or the given number with 100G NICs and with 50G rack and 25G pod uplinks."""
    from kvroute.topology import InstanceCounts, build, fat_tree, load

    if size.instances == 16:
        return load(ROOT / "examples" / "fat-tree-64gpu.yaml")
    counts = InstanceCounts(prefill=size.prefill, decode=size.decode, placement="spread")
    return build(fat_tree(pods=8, racks_per_pod=8, nodes_per_rack=8, oversubscription=(2.0, 4.0), instances=counts))


def trace_of(path: str, speedup: float) -> Trace:
    """Return the trace of a file or, without one, a generated trace of the same size and rate."""
    from kvroute.sim.workload import generate, read, rescale

    trace = read(path) if path else generate(REQUESTS, rate_per_s=RATE_PER_S, seed=0)
    return rescale(trace, trace.rate_per_s * speedup) if speedup != 1 else trace


def run_once(size: Size, path: str) -> dict[str, float]:
    """Return the figures of one simulation in this process, after a short one that loads compiled code."""
    from kvroute.control import ControlSpec
    from kvroute.sim.run import simulate
    from kvroute.sim.settings import SimSpec
    from kvroute.sim.workload import take

    spec, settings, cluster = ControlSpec(decode="netkv"), SimSpec(), cluster_of(size)
    simulate(cluster, take(trace_of(path, size.speedup), WARM_REQUESTS), spec, settings)
    cpu_s = time.process_time()
    trace = trace_of(path, size.speedup)
    run = simulate(cluster, trace, spec, settings)
    cpu_s = time.process_time() - cpu_s
    counts = run.summary.requests
    return {
        "requests": len(trace.requests),
        "rejected": counts.rejected,
        "cpu_s": cpu_s,
        "loop_cpu_s": run.summary.cpu_s,
        "requests_per_cpu_s": len(trace.requests) / cpu_s,
        "ttft_mean_s": run.summary.ttft_s.mean or 0.0,
        **process_figures(),
    }


def write_plain(path: str, target: str) -> dict[str, float]:
    """Write the same trace uncompressed, the only form that the peer reads."""
    from kvroute.sim.workload import write

    trace = trace_of(path, 1.0)
    write(trace, target)
    return {"requests": len(trace.requests)}


def rows(names: list[str], repeats: int, peer: bool, trace: Path) -> list[Row]:
    """Return medians of ours and the peer's, measured in turn, each in a fresh process, `repeats` times."""
    path = str(trace) if trace.exists() else ""
    source = f"trace: {trace.name}" if path else f"{trace} is not there: the trace is kvroute's own generated one"
    all_rows = []
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.jsonl"
        if peer:
            fresh("bench.simulate", "--write", plain, "--trace", path)
        for name in names:
            size, ours, theirs, reason = SIZES[name], [], [], "" if peer else "not requested"
            for _ in range(repeats):
                ours.append(fresh("bench.simulate", "--one", name, "--trace", path))
                if not reason:
                    try:
                        theirs.append(_peer_once(size, plain))
                    except Failed as failed:
                        reason = str(failed)
            all_rows += _rows(size, ours, theirs, reason, source)
    return all_rows


def _peer_once(size: Size, plain: Path) -> dict[str, float]:
    options = ["--prefill", size.peer_prefill, "--decode", size.peer_decode, "--speedup", size.speedup]
    figures: dict[str, float] = fresh("bench.peers.dynamo_replay", plain, *options, python=dynamo_python(), env=QUIET)
    return {**figures, "requests_per_cpu_s": figures["requests"] / figures["cpu_s"]}


def _rows(
    size: Size, ours: list[dict[str, float]], theirs: list[dict[str, float]], reason: str, source: str
) -> list[Row]:
    where = f"{size.prefill}P + {size.decode}D"
    peer_name = f"Dynamo {size.peer_prefill}P + {size.peer_decode}D" if theirs else "not available"
    note = f"{peer_name}: {reason}" if reason else source
    loop_s, whole_s = median(ours, "loop_cpu_s"), median(ours, "process_cpu_s")
    spent = f"{where}: median CPU {loop_s:.2f} s in the loop alone, {whole_s:.2f} s in the whole process; {source}"
    return [
        Row(
            measure=f"simulated requests, {where}, arrivals x{size.speedup:g}",
            unit="per CPU-second",
            better="higher",
            ours=median(ours, "requests_per_cpu_s"),
            peer=median(theirs, "requests_per_cpu_s"),
            peer_name=peer_name,
            target=size.requests_per_cpu_s,
            note=spent,
        ),
        Row(
            measure=f"peak memory of that run, {where}",
            unit="MB",
            better="lower",
            ours=median(ours, "rss_mb"),
            peer=median(theirs, "rss_mb"),
            peer_name=peer_name,
            target=size.rss_mb,
            note=note,
        ),
    ]


def main() -> None:
    """Print the rows, or the figures of one run for the parent process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--size", choices=SIZES, action="append", help="which cluster; repeat; default all")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-peer", action="store_true", help="leave Dynamo out")
    parser.add_argument("--trace", default=str(TRACE), help="a Mooncake trace; without the file one is generated")
    parser.add_argument("--one", choices=SIZES, help=argparse.SUPPRESS)
    parser.add_argument("--write", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(run_once(SIZES[given.one], given.trace)))
    elif given.write:
        print(json.dumps(write_plain(given.trace, given.write)))
    else:
        show(rows(given.size or list(SIZES), given.repeats, not given.no_peer, Path(given.trace)), given.json)


if __name__ == "__main__":
    main()
