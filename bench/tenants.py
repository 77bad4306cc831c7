"""What turns and deadlines change at overload, simulated: `python -m bench.tenants [--json]`.

Prompts have no common prefix, arrivals are Poisson. Load 1 is the rate at which the prefill instances are just busy.
The first comparison has two tenants: one sends `FLOOD` of that rate, the other `OTHER`. In the second one a single
tenant has a limit on the time to the first token.
"""

from __future__ import annotations

import argparse
import statistics
from concurrent.futures import ProcessPoolExecutor
from typing import Literal, NamedTuple

import numpy as np
from bench.measurement import ROOT, Row, show

from kvroute.control import ControlSpec
from kvroute.sim.placement import SimulatedTenancy, Tenant
from kvroute.sim.run import Run, simulate
from kvroute.sim.settings import SimSpec
from kvroute.sim.workload import Trace, TracedRequest
from kvroute.topology import load

CLUSTER = ROOT / "examples" / "fat-tree-64gpu.yaml"
FLOOD, OTHER = 1.4, 0.1
LOADS = (0.8, 1.2)
SLO_S, WORK_S, SECONDS = 2.0, 1.0, 120.0
OUTPUT_TOKENS = 100


class Stream(NamedTuple):
    """Requests of one tenant."""

    load: float
    prompt_tokens: int
    """Median; the lengths are log-normal."""


TWO = (Stream(FLOOD, 8_000), Stream(OTHER, 2_000))


class Cell(NamedTuple):
    """One simulation."""

    streams: tuple[Stream, ...]
    fair: bool
    slo: bool
    seed: int


class Found(NamedTuple):
    """What it showed."""

    ttft_p50_s: float
    """Median TTFT of the last tenant."""
    ttft_p99_s: float
    finished_per_s: float
    """Responses per second of all tenants, up to the last response."""
    good_per_s: float
    """Requests whose first token came within SLO_S, of all tenants, while requests arrived."""
    refused: float
    """Share of all requests."""


def arrivals(streams: tuple[Stream, ...], seed: int) -> tuple[Trace, list[int]]:
    """Return the requests in the order of their arrival, and the tenant of each."""
    draw, cluster = np.random.default_rng(seed), load(CLUSTER)
    prefills = sum(instance.role == "prefill" for instance in cluster.instances)
    found: list[tuple[float, int, int]] = []
    for tenant, stream in enumerate(streams):
        spread = 0.6
        mean_s = 0.020 + 90e-6 * stream.prompt_tokens * float(np.exp(spread**2 / 2))
        rate_per_s = stream.load * prefills / mean_s
        count = int(draw.poisson(rate_per_s * SECONDS))
        at_s = draw.uniform(0.0, SECONDS, count).tolist()
        tokens = np.rint(draw.lognormal(np.log(stream.prompt_tokens), spread, count)).astype(int).tolist()
        found += [(at, tenant, max(length, 1)) for at, length in zip(at_s, tokens, strict=True)]
    found.sort()
    requests = tuple(TracedRequest(at, length, OUTPUT_TOKENS, (), 16) for at, _, length in found)
    return Trace("tenants", requests), [tenant for _, tenant, _ in found]


def simulated(cell: Cell) -> Found:
    """Return the result of one simulation."""
    trace, of_request = arrivals(cell.streams, cell.seed)
    most_s = SLO_S if cell.slo else None
    tenants = tuple([Tenant(f"tenant{number}", ttft_max_s=most_s) for number in range(len(cell.streams))])
    tenancy = SimulatedTenancy(tenants, of_request, work_s=WORK_S if cell.fair else None)
    spec = ControlSpec(decode="foresight")
    run: Run = simulate(load(CLUSTER), trace, spec, SimSpec(), seed=cell.seed, tenancy=tenancy)
    ttft_s, last = run.outcomes.ttft_s, np.array(of_request) == len(cell.streams) - 1
    p50_s, p99_s = np.nanquantile(ttft_s[last], (0.5, 0.99)).tolist()
    done = run.summary.requests
    return Found(
        p50_s,
        p99_s,
        done.finished / float(np.nanmax(run.outcomes.finished_s)),
        float((ttft_s <= SLO_S).sum()) / SECONDS,
        done.rejected / done.arrived,
    )


def measured(seeds: int, workers: int | None) -> dict[tuple[tuple[Stream, ...], bool, bool], Found]:
    """Return the mean over the seeds of each kind of simulation."""
    kinds = [(TWO, False, False), (TWO, True, False), (TWO[1:], False, False)]
    kinds += [((Stream(load, 8_000),), False, slo) for load in LOADS for slo in (False, True)]
    kinds += [((Stream(LOADS[-1], 8_000),), True, False)]
    cells = [Cell(*kind, seed) for kind in kinds for seed in range(seeds)]
    with ProcessPoolExecutor(max_workers=workers) as pool:
        found = dict(zip(cells, pool.map(simulated, cells), strict=True))
    return {
        kind: Found(*map(statistics.mean, zip(*(found[Cell(*kind, seed)] for seed in range(seeds)), strict=True)))
        for kind in kinds
    }


def compared(found: dict[tuple[tuple[Stream, ...], bool, bool], Found]) -> list[Row]:
    """Return each result beside the same without turns and deadlines."""
    made = [
        Row(
            measure="p99 TTFT of the small tenant beside the flood, fair queue",
            unit="s",
            better="lower",
            ours=found[TWO, True, False].ttft_p99_s,
            peer=found[TWO[1:], False, False].ttft_p99_s,
            peer_name="alone in the cluster",
        )
    ]
    for (streams, fair, slo), ours in found.items():
        if not (fair or slo):
            continue
        peer = found[streams, False, False]
        what = " + ".join(f"load {stream.load:g} of {stream.prompt_tokens:,} tokens" for stream in streams)
        what += (", fair queue" if fair else "") + (f", SLO {SLO_S:g} s" if slo else "")
        figures: tuple[tuple[str, str, Literal["higher", "lower"], float, float], ...] = (
            ("p50 TTFT of the last tenant", "s", "lower", ours.ttft_p50_s, peer.ttft_p50_s),
            ("p99 TTFT of the last tenant", "s", "lower", ours.ttft_p99_s, peer.ttft_p99_s),
            ("responses", "1/s", "higher", ours.finished_per_s, peer.finished_per_s),
            (f"first tokens within {SLO_S:g} s", "1/s", "higher", ours.good_per_s, peer.good_per_s),
            ("refused", "share", "lower", ours.refused, peer.refused),
        )
        made += [
            Row(
                measure=f"{what}: {name}",
                unit=unit,
                better=better,
                ours=value,
                peer=other,
                peer_name="as they arrive",
                note=f"{SECONDS:g} s of arrivals, {CLUSTER.name}",
            )
            for name, unit, better, value, other in figures
        ]
    return made


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    show(compared(measured(options.seeds, options.workers)), options.json)


if __name__ == "__main__":
    main()
