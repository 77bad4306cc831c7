"""Predicted and measured TTFT, TPOT and throughput of real vLLM: `python -m bench.fidelity.vllm`.

A prefill and a decode server on CPUs, each on a core of its own, with kvroute's connector over TCP. `kvroute timing
measure` measures them, the result goes into a cluster file, and one trace is sent through `kvroute serve` at 30, 60 and
90 % of the rate that the simulator finds for this file. The simulator has the same trace with the same arrival times.
The engines slow each other, because they share the memory and the caches of one machine. Therefore each is measured
twice, while the other one is idle and while it is busy, and the simulated times are means of both, weighted by the
simulated share of the time in which the other one computes. Two corrections come from measurements of the machine, not
of the result: the same prompts and decode batch are timed around the measurement and around each load, because the
speed of a shared machine changes by the minute; and gateway and client take a share of the prefill server's core, as
the kernel counts their CPU time. The remarks have the errors without the corrections.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from bench.measurement import Failed, Row, show
from tests.live.vllm.conftest import BIN, make_model
from tests.live.vllm.timed_pair import (
    PROMPT_MEDIAN,
    STEP_TOKENS,
    Probe,
    TimedPair,
    Times,
    Timing,
    between,
    busy,
    capacity_per_s,
    cluster_text,
    gateway_of,
    mean_probe,
    measured_link,
    measured_timing,
    on_core,
    pinned,
    predicted,
    prefer,
    scaled,
    send_trace,
    trace_of,
)

from kvroute.sim.workload import Trace
from kvroute.types import FloatArray

LOADS = (0.3, 0.6, 0.9)
WIDTH, LAYERS = 768, 8
"""Size of the model. A decode step takes about 8 ms, most of it in the model and not in vLLM's own processes."""
WITHIN = 15.0
"""Target of the error of a median, in percent."""
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Load:
    """One trace, measured and predicted."""

    share: float
    trace: Trace
    measured: Times
    simulated: Times
    uncorrected: Times
    """Simulated with the times as they were measured before the load."""
    without: Times
    """Simulated without `scheduler` in the timing: one prompt after the other, and no time besides steps."""
    alone: Times
    """Simulated with the times of each server while the other one was idle."""
    slowed: Times
    """Simulated with the times of each server while the other one was busy."""
    taken: float
    """Share of a core that gateway and client took."""
    drift: Probe
    """Times of the same work around this load, divided by those around the measurement of the timing."""
    others: float
    """Cores that other programs used."""
    same_share: float
    """Load, as a share of the simulated capacity, at which the simulated median TTFT is the measured one."""


@dataclass(frozen=True)
class Processes:
    """CPU seconds so far: of this session, of the servers, and of the machine."""

    own_s: float
    servers_s: float
    all_s: float

    @classmethod
    def now(cls, servers: Sequence[int]) -> Processes:
        """Read the kernel's counters. Args: `servers` are the sessions of the servers."""
        by_session: dict[int, float] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            session = int(fields[3])
            by_session[session] = by_session.get(session, 0.0) + (int(fields[11]) + int(fields[12])) / _TICKS
        busy = [int(word) for word in Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
        all_s = (sum(busy) - busy[3] - busy[4]) / _TICKS
        own_s = by_session.get(os.getsid(0), 0.0)
        return cls(own_s, sum(by_session.get(server, 0.0) for server in servers), all_s)


def measured_loads(requests: int, loads: Sequence[float], seed: int, nice: int) -> tuple[list[Load], str]:
    """Measure and simulate every load. Return also the timing with its remarks.

    Raises:
        Failed: vLLM is not installed.
    """
    if not (BIN / "vllm").exists():
        raise Failed("vLLM is not installed: run `make vllm`")
    with tempfile.TemporaryDirectory() as name, _pair(Path(name), nice) as pair:
        options = ["--max-prompt-tokens", "1536", "--max-batch", "16", "--step-tokens", str(STEP_TOKENS)]
        probes = [Probe.of(pair)]
        timings = [measured_timing(pair, *options, both_busy=both_busy) for both_busy in (False, True)]
        probes.append(Probe.of(pair))
        with busy(pair.decode, 6, 64, 200), busy(pair.prefill, 1, PROMPT_MEDIAN, 1):
            link = measured_link(pair)
        file = partial(cluster_text, pair, link=link)
        idle, loaded = (timing for timing, _ in timings)
        capacity = capacity_per_s(file(loaded))
        model = Model(file, idle, loaded, partial(trace_of, requests, seed=seed), capacity)
        with gateway_of(file(loaded), Path(name)) as url:
            found = []
            for index, share in enumerate(loads):
                first = seed + 10_000 * (index + 1)
                found.append(_load(pair, url, model, share, first, mean_probe(probes)))
    rate = f"{link.bytes_per_s / 1e9:.3g} GB/s and {link.latency_s * 1e3:.3g} ms"
    head = f"KV transfers: {rate}; simulated capacity {capacity:.3g} requests/s"
    names = ("other server idle", "other server busy")
    texts = [f"{name}\n{remarks.strip()}\n{timing}" for name, (timing, remarks) in zip(names, timings, strict=True)]
    return found, "\n".join([*texts, head])


@contextmanager
def _pair(folder: Path, nice: int) -> Iterator[TimedPair]:
    with pinned(make_model(folder, WIDTH, LAYERS), folder) as pair, on_core(0):
        if nice:
            prefer(pair.servers, nice)
        yield pair


@dataclass(frozen=True)
class Model:
    """The pair and its requests as the simulator knows them."""

    file: Callable[[Timing], str]
    """Makes a cluster file."""
    idle: Timing
    """Timing of each server while the other one was idle."""
    loaded: Timing
    """Timing of each server while the other one was busy."""
    trace_of: Callable[[float], Trace]
    """Makes the requests of a rate per second."""
    capacity_per_s: float

    def trace(self, share: float) -> Trace:
        """Return the requests of a load, a share of the capacity."""
        return self.trace_of(share * self.capacity_per_s)

    def scaled(self, probe: Probe) -> Model:
        """Return the model with other times. Args: `probe`: their factors."""
        idle, loaded = (scaled(times, probe.prefill_s, probe.decode_s) for times in (self.idle, self.loaded))
        return replace(self, idle=idle, loaded=loaded)

    def predictions(self, trace: Trace) -> dict[str, Times]:
        """Return the simulated times of a trace with several timings, by the fields of `Load`."""
        alone, slowed = (predicted(self.file(timing), trace) for timing in (self.idle, self.loaded))
        mixed = between(self.idle, self.loaded, slowed.busy_shares)
        plain = {part: value for part, value in mixed.items() if part != "scheduler"}
        simulated, without = (predicted(self.file(timing), trace) for timing in (mixed, plain))
        return {"simulated": simulated, "without": without, "alone": alone, "slowed": slowed}

    def median_ttft_s(self, share: float) -> float:
        """Return the simulated median TTFT of a load."""
        trace = self.trace(share)
        mixed = between(self.idle, self.loaded, predicted(self.file(self.loaded), trace).busy_shares)
        return float(np.median(predicted(self.file(mixed), trace).ttft_s))


def _load(pair: TimedPair, url: str, model: Model, share: float, seed: int, reference: Probe) -> Load:
    """Measure and simulate a load.

    Args:
        pair: the servers.
        url: of the gateway.
        model: with the times as they were measured.
        share: the load.
        seed: for the prompts.
        reference: the probe that belongs to these times.
    """
    trace = model.trace(share)
    sessions, first = [server.process.pid for server in pair.servers], Probe.of(pair)
    before, began_s = Processes.now(sessions), time.monotonic()
    measured = send_trace(url, trace, seed)
    after, seconds = Processes.now(sessions), time.monotonic() - began_s
    now = mean_probe([first, Probe.of(pair)])
    drift = Probe(now.prefill_s / reference.prefill_s, now.decode_s / reference.decode_s)
    own_s, servers_s = after.own_s - before.own_s, after.servers_s - before.servers_s
    others, taken = (after.all_s - before.all_s - own_s - servers_s) / seconds, own_s / seconds
    corrected = model.scaled(Probe(drift.prefill_s / (1 - taken), drift.decode_s))
    found = corrected.predictions(trace) | {"uncorrected": model.predictions(trace)["simulated"]}
    same = share_of(float(np.median(measured.ttft_s)), corrected.median_ttft_s)
    return Load(share, trace, measured, **found, taken=taken, drift=drift, others=others, same_share=same)


def share_of(ttft_s: float, simulated_s: Callable[[float], float]) -> float:
    """Return the load, 0.01 to 1.5, at which the simulated median TTFT is `ttft_s`, within 0.002; the end of this range
    if there is none. The TTFT rises with the load."""
    low, high = 0.01, 1.5
    while high - low > 0.002:
        middle = (low + high) / 2
        low, high = (middle, high) if simulated_s(middle) < ttft_s else (low, middle)
    return (low + high) / 2


def rows(found: Sequence[Load]) -> list[Row]:
    """Return medians, 95th percentiles and throughput of each load, measured and simulated, and errors of medians."""
    made = []
    for load in found:
        at = f"at {load.share:.0%} load, {len(load.trace.requests)} requests"
        for what, unit, of in (("TTFT", "s", ttft_s), ("TPOT", "s", tpot_s)):
            live, model = of(load.measured), of(load.simulated)
            for name, share in (("median", 50.0), ("p95", 95.0)):
                ours, peer = (float(np.percentile(samples, share)) for samples in (live, model))
                made.append(_row(f"{name} {what} {at}", unit, ours, peer))
                if name == "median":
                    error = 100 * abs(peer / ours - 1)
                    made.append(
                        Row(
                            measure=f"median {what} {at}: error",
                            unit="%",
                            better="lower",
                            ours=error,
                            target=WITHIN,
                            note=_distribution(what, load, of),
                        )
                    )
        made.append(_row(f"output tokens/s {at}", "/s", load.measured.tokens_per_s, load.simulated.tokens_per_s))
        made.append(_row(f"load with the measured median TTFT {at}", "%", 100 * load.share, 100 * load.same_share))
    return made


def _row(measure: str, unit: str, ours: float, peer: float) -> Row:
    return Row(measure=measure, unit=unit, better="lower", ours=ours, peer=peer, peer_name="simulated")


def ttft_s(times: Times) -> FloatArray:
    """Return the TTFT of each request."""
    return times.ttft_s


def tpot_s(times: Times) -> FloatArray:
    """Return the TPOT of each request with two output tokens or more."""
    tpot: FloatArray = times.tpot_s[np.isfinite(times.tpot_s)]
    return tpot


def _distribution(what: str, load: Load, of: Callable[[Times], FloatArray]) -> str:
    live = of(load.measured)

    def off(times: Times) -> str:
        error = of(times) / live - 1
        shift = float(np.median(of(times))) / float(np.median(live)) - 1
        middle, high = np.percentile(np.abs(error), (50, 95))
        return f"median {shift:+.1%}, each request {middle:.1%} (median) and {high:.1%} (p95)"

    rest = {
        "as measured before": load.uncorrected,
        "without `scheduler`": load.without,
        "other server idle": load.alone,
        "other server busy": load.slowed,
    }
    return (
        f"{what} at {load.share:.0%}: simulated {off(load.simulated)}; "
        + "; ".join(f"{name}: {off(times)}" for name, times in rest.items())
        + f"; the same work took {load.drift.prefill_s:.2f} (prefill) and {load.drift.decode_s:.2f} times (decode) as "
        f"long as before; gateway and client used {load.taken:.2f} of a core, other programs {load.others:.2f}; "
        f"the client was at most {load.measured.worst_late_s * 1e3:.0f} ms late"
    )


def main() -> None:
    """Measure, simulate and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--requests", type=int, default=200, help="of each load")
    parser.add_argument("--load", type=float, action="append", help=f"repeat; default {', '.join(map(str, LOADS))}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nice", type=int, default=0, help="of this session and of the servers' (root)")
    given = parser.parse_args()
    try:
        found, text = measured_loads(given.requests, given.load or LOADS, given.seed, given.nice)
    except Failed as failed:
        sys.exit(str(failed))
    show(rows(found), given.json, {"timing": text})


if __name__ == "__main__":
    main()
