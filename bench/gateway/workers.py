"""Two workers compared with one and with the Rust router on as many threads: `python -m bench.gateway.workers`.

Proxy, engines and clients share all cores of the machine, so that a proxy with two cores takes them from the others.
CPU times per answer say what a second worker costs; the rates say what a full machine achieves.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from bench.gateway.contenders import Command, Place, answering, kvroute
from bench.gateway.program import Program
from bench.measurement import Failed, Row, show
from bench.peers.routers import sglang_router

ROUNDS, SECONDS, WORKERS, INSTANCES = 5, 4.0, 2, 8
LOADS = {
    "requests": ["--connections", "32"],
    "streams": ["--connections", "64", "--stream-tokens", "300"],
}
ONE, SEVERAL, PEER = "kvroute", f"kvroute, {WORKERS} workers", f"sglang-router, {WORKERS} threads"


def contenders() -> dict[str, Command]:
    """Return the commands of the compared routers."""
    alone = kvroute()
    return {
        ONE: alone,
        SEVERAL: lambda place: [*alone(place), "--workers", str(WORKERS)],
        PEER: lambda place: [
            "env",
            f"TOKIO_WORKER_THREADS={WORKERS}",
            *sglang_router(place.port, place.second_port, place.prefill, place.decode),
        ],
    }


def trial(name: str, command: Command, engines: Mapping[str, Any], seconds: float, folder: Path) -> dict[str, Any]:
    """Run one contender from start to end; return the figures of each load."""
    place = Place.of(engines, folder)
    figures = {}
    with answering(command(place), name, place, cpus=()) as proxy:
        for load, options in LOADS.items():
            client = [sys.executable, "-m", "bench.gateway.load", f"http://127.0.0.1:{place.port}"]
            client += ["--seconds", str(seconds), *options, "--weigh", str(proxy.pid)]
            with Program(client) as loading:
                figures[load] = loading.document(timeout_s=seconds + 60)
    return figures


def trials(names: Sequence[str], rounds: int, seconds: float) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Run every contender once per round, in rotated order; return figures, and reasons for missing ones."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    missing: dict[str, str] = {}
    engines = [sys.executable, "-m", "bench.gateway.mock_worker", "--tick-ms", "5"]
    engines += ["--prefill", str(INSTANCES), "--decode", str(INSTANCES)]
    with tempfile.TemporaryDirectory() as folder, Program(engines) as mock:
        places = mock.document()
        for number in range(rounds):
            for name in (*names[number % len(names) :], *names[: number % len(names)]):
                if name in missing:
                    continue
                print(f"round {number + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
                try:
                    results[name].append(trial(name, contenders()[name], places, seconds, Path(folder)))
                except Failed as failed:
                    missing[name] = str(failed)
    return results, missing


MEASURES: dict[str, tuple[str, Literal["higher", "lower"], Callable[[Mapping[str, Any]], float]]] = {
    "requests/s, 32 connections": ("1/s", "higher", lambda result: result["requests"]["answers_per_s"]),
    "chunks/s, 64 streams": ("1/s", "higher", lambda result: result["streams"]["chunks_per_s"]),
    "CPU per request, 32 connections": ("us", "lower", lambda result: result["requests"]["cpu_us_per_answer"]),
    "CPU of a streamed answer": ("us", "lower", lambda result: result["streams"]["cpu_us_per_answer"]),
}


def rows(results: Mapping[str, Sequence[Mapping[str, Any]]], missing: Mapping[str, str]) -> list[Row]:
    """Return a row for each measure and peer of the workers."""
    made = []
    for measure, (unit, better, value) in MEASURES.items():
        for peer in (ONE, PEER):
            ours = [value(result) for result in results.get(SEVERAL, ())]
            theirs = [value(result) for result in results.get(peer, ())]
            made.append(
                Row(
                    measure=f"{measure}, {WORKERS} workers",
                    unit=unit,
                    better=better,
                    ours=statistics.median(ours) if ours else None,
                    peer=statistics.median(theirs) if theirs else None,
                    peer_name=peer if theirs else "not available",
                    target=None,
                    note="; ".join(f"{name}: {missing[name]}" for name in (SEVERAL, peer) if name in missing),
                )
            )
    return made


def main() -> None:
    """Run the rounds, print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each load in a trial")
    parser.add_argument("--no-peer", action="store_true", help="leave the Rust router out; nothing is installed")
    given = parser.parse_args()
    names = [ONE, SEVERAL] if given.no_peer else [ONE, SEVERAL, PEER]
    results, missing = trials(names, given.rounds, given.seconds)
    show(rows(results, missing), given.json, {"every trial": json.dumps(results)})


if __name__ == "__main__":
    main()
