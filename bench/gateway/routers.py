"""kvroute compared with the Rust routers, on the same engines, in turn: `python -m bench.gateway.routers`.

A trial starts one proxy on its own core and applies three loads from the other core, where the engines also run: one
connection at a fixed rate, many as fast as possible, and 64 streams. Every round runs each contender once, in rotated
order; results are medians over rounds. CPU time is that of the proxy's processes, including background work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gateway.contenders import CONTENDERS, OTHER_CPUS, Place, legs, started
from bench.gateway.program import Program
from bench.gateway.tokenizer import write_tokenizer
from bench.measurement import Failed, Row, show

ROUNDS, SECONDS, IDLE_S = 5, 4.0, 2.0
INSTANCES = 8
"""Number of instances of each role."""
LOADS = {
    "paced": ["--connections", "1", "--rate", "150"],
    "closed": ["--connections", "32"],
    "streams": ["--connections", "64", "--stream-tokens", "300"],
}
TICK_MS = 5.0
CHUNK_TARGET_MS = 0.3
OURS, VLLM, SGLANG = "kvroute", "vllm-router", "sglang-router"
VARIANTS = tuple(name for name in CONTENDERS if name.startswith("kvroute,"))

Trial = Mapping[str, Any]
"""Figures by load, and `idle_share`."""


def loaded(url: str, seconds: float, weigh: int) -> dict[str, Any]:
    """Apply the three loads one after the other, each from a fresh process on the other core."""
    figures = {}
    for name, options in LOADS.items():
        command = [sys.executable, "-m", "bench.gateway.load", url, "--seconds", str(seconds), *options]
        with Program([*command, "--weigh", str(weigh)], cpus=OTHER_CPUS) as client:
            figures[name] = client.document(timeout_s=seconds + 60)
    return figures


def trial(name: str, workers: Mapping[str, Any], seconds: float, folder: Path) -> Trial:
    """Run one contender from start to end; "direct" is a decode engine without a proxy."""
    if name == "direct":
        return {**loaded(f"http://127.0.0.1:{workers['decode'][0]}", seconds, 0), "idle_share": None}
    place = Place.of(workers, folder)
    with started(name, place) as proxy:
        before_s = proxy.cpu_s()
        time.sleep(IDLE_S)
        idle = (proxy.cpu_s() - before_s) / IDLE_S
        return {**loaded(f"http://127.0.0.1:{place.port}", seconds, proxy.pid), "idle_share": idle}


def trials(names: Sequence[str], rounds: int, seconds: float) -> tuple[dict[str, list[Trial]], dict[str, str]]:
    """Run every contender once per round, in rotated order; return figures, and reasons for missing ones."""
    results: dict[str, list[Trial]] = {name: [] for name in names}
    missing: dict[str, str] = {}
    worker = [sys.executable, "-m", "bench.gateway.mock_worker", "--tick-ms", str(TICK_MS)]
    worker += ["--prefill", str(INSTANCES), "--decode", str(INSTANCES)]
    with tempfile.TemporaryDirectory() as scratch, Program(worker, cpus=OTHER_CPUS) as mock:
        folder = Path(scratch)
        write_tokenizer(folder / "tokenizer.json")
        workers = mock.document()
        for number in range(rounds):
            for name in (*names[number % len(names) :], *names[: number % len(names)]):
                if name in missing:
                    continue
                print(f"round {number + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
                try:
                    results[name].append(trial(name, workers, seconds, folder))
                except Failed as failed:
                    missing[name] = str(failed)
    return results, missing


def described(names: Sequence[str]) -> dict[str, str]:
    """Return how each contender splits a request, as seen by the engines, or why this is unknown."""
    splits = {}
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            write_tokenizer(Path(scratch) / "tokenizer.json")
            try:
                splits[name] = legs(name, Path(scratch))
            except Failed as failed:
                splits[name] = f"not seen: {failed}"
    return splits


def figure(trials_: Sequence[Trial], load: str, *path: str) -> list[float]:
    """Return one figure of all trials, without those that lack it."""
    values = []
    for trial in trials_:
        value: Any = trial[load]
        for key in path:
            value = value[key] if value is not None else None
        if value is not None:
            values.append(float(value))
    return values


def added_us(results: Mapping[str, Sequence[Trial]], name: str) -> list[float]:
    """Return the median response time through the proxy minus the one without it, by round."""
    through, direct = (figure(results[contender], "paced", "answer_us", "p50") for contender in (name, "direct"))
    return [a - b for a, b in zip(through, direct, strict=False)]


def _thousandths(values: Sequence[float]) -> list[float]:
    return [value / 1e3 for value in values]


MEASURES: dict[str, tuple[str, Any]] = {
    "CPU per request, 32 connections": ("us", lambda f, n: figure(f[n], "closed", "cpu_us_per_answer")),
    "CPU per request, 150 requests/s": ("us", lambda f, n: figure(f[n], "paced", "cpu_us_per_answer")),
    "added latency, median": ("us", added_us),
    "delay of a streamed chunk, median": ("ms", lambda f, n: _thousandths(figure(f[n], "streams", "chunk_us", "p50"))),
    "CPU of a streamed answer": ("us", lambda f, n: figure(f[n], "streams", "cpu_us_per_answer")),
    "CPU per streamed chunk": ("us", lambda f, n: figure(f[n], "streams", "cpu_us_per_chunk")),
    "requests/s, one core, 32 connections": ("1/s", lambda f, n: figure(f[n], "closed", "answers_per_s")),
    "CPU share without requests": ("%", lambda f, n: [100 * share for share in figure(f[n], "idle_share")]),
}
COMPARED = {
    "CPU per request, 32 connections": (VLLM, SGLANG),
    "CPU per request, 150 requests/s": (VLLM, SGLANG),
    "added latency, median": (VLLM, SGLANG),
    "delay of a streamed chunk, median": (VLLM, SGLANG),
    "CPU of a streamed answer": (VLLM, SGLANG),
    "requests/s, one core, 32 connections": (VLLM, SGLANG),
}


def rows(results: Mapping[str, Sequence[Trial]], missing: Mapping[str, str]) -> list[Row]:
    """Return rows of ours with each peer, then rows of our other set-ups."""
    made = [_row(results, missing, measure, OURS, peer) for measure, peers in COMPARED.items() for peer in peers]
    for name in VARIANTS:
        if name in results:
            peer = SGLANG if "SGLang" in name else ""
            made.append(_row(results, missing, "CPU per request, 32 connections", name, peer))
            made.append(_row(results, missing, "added latency, median", name, peer))
    return made


def _row(results: Mapping[str, Sequence[Trial]], missing: Mapping[str, str], measure: str, name: str, peer: str) -> Row:
    unit, values = MEASURES[measure]
    ours, theirs = values(results, name), values(results, peer) if peer in results else []
    bound = statistics.median(theirs) if theirs else None
    if measure.startswith("delay"):
        target: float | None = CHUNK_TARGET_MS
    else:
        target = bound if name == OURS and not measure.startswith("requests/s") else None
    return Row(
        measure=measure + name.removeprefix(OURS),
        unit=unit,
        better="higher" if measure.startswith("requests/s") else "lower",
        ours=statistics.median(ours) if ours else None,
        peer=bound,
        peer_name=(peer if theirs else "not available") if peer else "",
        target=target,
        note="; ".join(f"{contender}: {missing[contender]}" for contender in (name, peer) if contender in missing),
    )


def ranges(results: Mapping[str, Sequence[Trial]], splits: Mapping[str, str]) -> str:
    """Return every measure of every contender: median and range over the trials, and failed responses if any."""
    lines = [f"{name}: {detail}" for name, detail in splits.items()]
    for measure, (unit, values) in MEASURES.items():
        lines.append(f"{measure}, {unit}")
        for name in results:
            series = [] if name == "direct" and measure.startswith(("CPU", "added")) else values(results, name)
            if series:
                middle, low, high = statistics.median(series), min(series), max(series)
                lines.append(f"  {name:20} {middle:9.4g}   {low:.4g} to {high:.4g}   n={len(series)}")
    failed = [(name, load, result[load]["failed"]) for name in results for result in results[name] for load in LOADS]
    lines += [f"{name}, {load}: failed {detail}" for name, load, detail in failed if detail]
    return "\n".join(lines)


def main() -> None:
    """Run the rounds, print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each load in a trial")
    parser.add_argument("--only", action="append", metavar="NAME", help="contenders, with `direct`; default all")
    parser.add_argument("--no-peer", action="store_true", help="leave the Rust routers out; nothing is installed")
    parser.add_argument("--raw", type=Path, help="file for every trial's figures, JSON")
    given = parser.parse_args()
    names = [name for name in CONTENDERS if not (given.no_peer and name in (VLLM, SGLANG))]
    names = ["direct", *(given.only or names)]
    if unknown := [name for name in names[1:] if name not in CONTENDERS]:
        parser.error(f"there is no contender {unknown[0]!r}; choose from {', '.join(CONTENDERS)}")
    splits = described(names[1:])
    results, missing = trials(names, given.rounds, given.seconds)
    if given.raw:
        given.raw.write_text(json.dumps(results, indent=1))
    results = {OURS: [], **results}
    show(rows(results, missing), given.json, {"every trial": ranges(results, splits)})


if __name__ == "__main__":
    main()
