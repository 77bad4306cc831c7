"""Envoy with kvroute's picker, beside kvroute's gateway, on the same engines: `python -m bench.gateway.envoy`.

Envoy and picker, or the gateway, have one core; engines and clients have the other. CPU time is that of each program.
Two loads: 32 connections as fast as possible, and 64 streams of 300 chunks. The bound of the picker is one that only
names the engines in turn (`bench.peers.bare_picker`), behind the same Envoy. Needs requirements/live.txt for Envoy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from bench.gateway.clusters import served, write
from bench.gateway.contenders import OTHER_CPUS, PROXY_CPUS, Place, answering, kvroute
from bench.gateway.program import Program
from bench.gateway.routers import LOADS, TICK_MS
from bench.measurement import Failed, Row, show

ROUNDS, SECONDS = 3, 4.0
INSTANCES = 8
"""Number of instances of each role."""
GATEWAY, SPLIT, ALONE, BARE = "gateway", "Envoy, prefill and decode", "Envoy, one leg", "Envoy, bare picker"


@dataclass(frozen=True, slots=True)
class Running:
    """A proxy that serves, and the programs whose CPU time counts."""

    url: str
    programs: tuple[Program, ...]


@contextmanager
def gateway(place: Place) -> Iterator[Running]:
    """Run `kvroute serve`."""
    with answering(kvroute()(place), GATEWAY, place) as program:
        yield Running(f"http://127.0.0.1:{place.port}", (program,))


def cluster_of(place: Place, *, split: bool) -> Path:
    """Write the cluster file. Args: `split`: prefill and decode; else decode instances that do both."""
    section = {"policy": "netkv", "listen": {"port": place.second_port}, "admin": {"port": 0}}
    file = served(place.prefill, place.decode, section)
    assert isinstance(file.instances, list)
    if not split:
        rest = [instance for instance in file.instances if instance.role != "prefill"]
        both = [msgspec.structs.replace(instance, role="both") for instance in rest]
        file = msgspec.structs.replace(file, instances=both)
    return write(file, place.folder)


def program(name: str) -> str:
    """Return the path of a program of this environment."""
    found = Path(sys.executable).with_name(name)
    if not found.exists():
        raise Failed(f"there is no {name}; install requirements/live.txt")
    return str(found)


@contextmanager
def behind_envoy(place: Place, picker: Sequence[str], config: Path) -> Iterator[Running]:
    """Run a picker and Envoy. Args: `picker`: its command; `config`: Envoy's configuration, ready with the picker."""
    with Program(picker, cpus=PROXY_CPUS) as picking:
        picking.listens(place.second_port)
        envoy = [program("envoy"), "-c", str(config), "--concurrency", "1", "--use-dynamic-base-id", "-l", "error"]
        with answering(envoy, "envoy", place) as proxy:
            yield Running(f"http://127.0.0.1:{place.port}", (proxy, picking))


def picked(*, split: bool) -> Callable[[Place], Any]:
    """Return a contender with kvroute's picker. Args: `split`: see `cluster_of`."""

    def run(place: Place) -> Any:
        config, listen = place.folder / "envoy.json", f"127.0.0.1:{place.port}"
        command = [program("kvroute"), "epp", str(cluster_of(place, split=split)), "--envoy-config", str(config)]
        return behind_envoy(place, [*command, "--envoy-listen", listen], config)

    return run


def bare(place: Place) -> Any:
    """Run the picker that only names the engines in turn, behind the same Envoy."""
    config, listen = place.folder / "envoy.json", f"127.0.0.1:{place.port}"
    command = [program("kvroute"), "epp", str(cluster_of(place, split=False)), "--print-envoy-config"]
    printed = subprocess.run([*command, "--envoy-listen", listen], check=True, capture_output=True)
    config.write_bytes(printed.stdout)
    engines = [f"127.0.0.1:{port}" for port in place.decode]
    picker = [sys.executable, "-m", "bench.peers.bare_picker", str(place.second_port), *engines]
    return behind_envoy(place, picker, config)


CONTENDERS: dict[str, Callable[[Place], Any]] = {
    GATEWAY: gateway,
    SPLIT: picked(split=True),
    ALONE: picked(split=False),
    BARE: bare,
}


def loaded(running: Running, seconds: float) -> dict[str, Any]:
    """Apply the two loads one after the other."""
    figures = {}
    weighed = [option for program in running.programs for option in ("--weigh", str(program.pid))]
    for name in ("closed", "streams"):
        command = [sys.executable, "-m", "bench.gateway.load", running.url, "--seconds", str(seconds), *LOADS[name]]
        with Program([*command, *weighed], cpus=OTHER_CPUS) as client:
            figures[name] = client.document(timeout_s=seconds + 60)
            if figures[name]["failed"]:
                raise Failed(f"{name}: {figures[name]['failed']}")
    return figures


def trials(rounds: int, seconds: float) -> dict[str, list[Mapping[str, Any]]]:
    """Run every contender once per round, in rotated order."""
    results: dict[str, list[Mapping[str, Any]]] = {name: [] for name in CONTENDERS}
    names = list(CONTENDERS)
    worker = [sys.executable, "-m", "bench.gateway.mock_worker", "--tick-ms", str(TICK_MS)]
    worker += ["--prefill", str(INSTANCES), "--decode", str(INSTANCES)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = stack.enter_context(Program(worker, cpus=OTHER_CPUS)).document()
        for number in range(rounds):
            for name in (*names[number % len(names) :], *names[: number % len(names)]):
                print(f"round {number + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
                with CONTENDERS[name](Place.of(workers, folder)) as running:
                    results[name].append(loaded(running, seconds))
    return results


def _median(results: Sequence[Mapping[str, Any]], value: Callable[[Mapping[str, Any]], float]) -> float:
    return statistics.median(value(result) for result in results)


def rows(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Row]:
    """Return the rows of the table."""
    made = []
    bare_us = _median(results[BARE], _picker_us)
    for name in (ALONE, SPLIT):
        picker_us = _median(results[name], _picker_us)
        envoy_us = _median(results[name], lambda result: result["closed"]["cpu_us_of_each"][0])
        made += [
            Row(
                measure=f"choices/s, one core with Envoy: {name}",
                unit="1/s",
                better="higher",
                ours=_median(results[name], lambda result: result["closed"]["answers_per_s"]),
                peer=_median(results[GATEWAY], lambda result: result["closed"]["answers_per_s"]),
                peer_name="kvroute's gateway, requests/s",
            ),
            Row(
                measure=f"choices per second of the picker's CPU: {name}",
                unit="1/s",
                better="higher",
                ours=1e6 / picker_us,
                peer=1e6 / bare_us,
                peer_name="bare picker",
                note=f"{name}: CPU per request {envoy_us:.0f} us of Envoy, {picker_us:.0f} us of the picker",
            ),
            Row(
                measure=f"CPU per request: {name}",
                unit="us",
                better="lower",
                ours=_median(results[name], lambda result: result["closed"]["cpu_us_per_answer"]),
                peer=_median(results[GATEWAY], lambda result: result["closed"]["cpu_us_per_answer"]),
                peer_name="kvroute's gateway",
            ),
        ]
    made.append(
        Row(
            measure="CPU per streamed chunk: Envoy and picker",
            unit="us",
            better="lower",
            ours=_median(results[SPLIT], lambda result: result["streams"]["cpu_us_per_chunk"]),
            peer=_median(results[GATEWAY], lambda result: result["streams"]["cpu_us_per_chunk"]),
            peer_name="kvroute's gateway",
            note=f"picker alone: {_median(results[SPLIT], _picker_us_per_chunk):.2f} us",
        )
    )
    return made


def _picker_us(one: Mapping[str, Any]) -> float:
    return float(one["closed"]["cpu_us_of_each"][1])


def _picker_us_per_chunk(one: Mapping[str, Any]) -> float:
    streams = one["streams"]
    share = float(streams["cpu_us_of_each"][1] / sum(streams["cpu_us_of_each"]))
    return float(streams["cpu_us_per_chunk"]) * share


def main() -> None:
    """Run the rounds, print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each load in a trial")
    given = parser.parse_args()
    results = trials(given.rounds, given.seconds)
    show(rows(results), given.json, {"every trial": json.dumps(results)})


if __name__ == "__main__":
    main()
