"""Memory of a gateway that reloads its cluster file repeatedly under load: it must not grow.

`python -m bench.gateway.reloads`. An embedded gateway with four instances serves a closed loop of requests, and gets a
SIGHUP as soon as the previous reload is done. Growth is measured after a tenth of the reloads, when caches are warm.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop
from bench.gateway.load import Loop, Plan, Tally, bodies
from bench.gateway.program import Program
from bench.measurement import Failed, Row, show

from kvroute.load import LoadClient
from kvroute.types import InputError

CLUSTER = """\
name: reloads
nodes: [{name: node0, gpus: 4}]
timing: {default: {prefill: {kind: linear, per_token: 1 us, base: 1 ms}, decode: {base: 2 ms, per_request: 10 us}}}
defaults: {model: llama-3-70b, kv_capacity: 60 GB}
instances:
  - {name: prefill0, role: prefill, gpus: "node0:0"}
  - {name: prefill1, role: prefill, gpus: "node0:1"}
  - {name: decode0, role: decode, gpus: "node0:2"}
  - {name: decode1, role: decode, gpus: "node0:3"}
"""
MIB = 2**20
WARM_SHARE = 0.1
"""Share of the reloads that warm the process up; memory growth is measured after them."""
PER_RELOAD_MIB = 0.1
"""Growth per reload that is not a leak: memory that the allocator keeps."""
TAKEN = re.compile(rb'^kvroute_reloads_total\{outcome="taken"\} (\d+)', re.MULTILINE)
TAKEN_S = 30.0


@dataclass(frozen=True, slots=True)
class Course:
    """Load and reloads of the gateway."""

    reloads: int = 400
    connections: int = 16
    prompt_chars: int = 2_000
    stream_tokens: int = 16
    section: str = ""
    """Lines for the `gateway:` section."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Memory of the gateway's own process by reload, and the clients' results."""

    rss_mib: tuple[float, ...]
    answers: int
    failed: dict[str, int]
    seconds: float

    @property
    def warm_mib(self) -> float:
        """Memory when the measurement of growth starts."""
        return self.rss_mib[int(len(self.rss_mib) * WARM_SHARE)]

    @property
    def per_reload_mib(self) -> float:
        """Growth per reload from then on."""
        return (self.rss_mib[-1] - self.warm_mib) / max(len(self.rss_mib) * (1.0 - WARM_SHARE), 1.0)


def course_of(course: Course) -> Outcome:
    """Start the gateway, reload it and measure its memory. Raises Failed if it does not start or does not reload."""
    with tempfile.TemporaryDirectory(prefix="kvroute-") as folder:
        file = Path(folder, "cluster.yaml")
        section = "gateway:\n  listen: {port: 0}\n  admin: {port: 0}\n" + course.section
        file.write_text(CLUSTER + section, encoding="utf-8")
        ready = Path(folder, "ready.json")
        command = [
            sys.executable,
            "-m",
            "kvroute.cli.app",
            "serve",
            str(file),
            "--embedded",
            "--ready-file",
            str(ready),
        ]
        with Program(command, name="kvroute") as program:
            addresses = _ready(program, ready)
            return uvloop.run(_drive(program, addresses["url"], addresses["admin"], course))


async def _drive(program: Program, url: str, admin: str, course: Course) -> Outcome:
    plan = Plan(connections=course.connections, stream_tokens=course.stream_tokens, prompt_chars=course.prompt_chars)
    client, tally, requests = LoadClient(url), Tally(), bodies(plan)
    began = time.monotonic()
    load = [
        asyncio.create_task(Loop(client, plan, requests, number).run(tally, float("inf")))
        for number in range(plan.connections)
    ]
    try:
        rss_mib = [program.own_rss_bytes() / MIB]
        for number in range(1, course.reloads + 1):
            program.send_signal(signal.SIGHUP)
            await _taken(program, admin, number)
            rss_mib.append(program.own_rss_bytes() / MIB)
    finally:
        for task in load:
            task.cancel()
        await asyncio.gather(*load, return_exceptions=True)
        client.close()
    return Outcome(tuple(rss_mib), len(tally.answer_ns), tally.failed, time.monotonic() - began)


async def _taken(program: Program, admin: str, number: int) -> None:
    deadline = time.monotonic() + TAKEN_S
    while time.monotonic() < deadline and program.alive:
        page = await asyncio.to_thread(_page, f"{admin}/metrics")
        match = TAKEN.search(page)
        if match is not None and int(match[1]) >= number:
            return
    raise Failed(f"reload {number} was not taken: {program.errors()}")


def _page(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=TAKEN_S) as answer:
        page: bytes = answer.read()
        return page


def _ready(program: Program, ready: Path, timeout_s: float = 120.0) -> dict[str, str]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and program.alive:
        if ready.exists() and (text := ready.read_bytes()).endswith(b"}"):
            addresses: dict[str, str] = json.loads(text)
            return addresses
        time.sleep(0.05)
    raise Failed(f"the gateway did not start: {program.errors()}")


def rows_of(outcome: Outcome) -> list[Row]:
    """Return the rows."""
    reloads = len(outcome.rss_mib) - 1
    note = (
        f"{reloads} reloads in {outcome.seconds:.0f} s beside {outcome.answers:,} answers; gateway's own process: "
        f"{outcome.rss_mib[0]:.0f} MiB at the start, {outcome.warm_mib:.0f} MiB after a tenth of the reloads, "
        f"{outcome.rss_mib[-1]:.0f} MiB at the end"
    )
    return [
        Row(
            measure="memory that a reload leaves behind",
            unit="MiB",
            better="lower",
            ours=round(outcome.per_reload_mib, 4),
            target=PER_RELOAD_MIB,
            note=note,
        ),
        Row(
            measure="requests that failed during the reloads",
            unit="requests",
            better="lower",
            ours=float(sum(outcome.failed.values())),
            target=0.0,
            note="; ".join(f"{count} x {why}" for why, count in sorted(outcome.failed.items())),
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--reloads", type=int, default=400)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--section", default="", help="lines for the gateway section of the cluster file")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    course = Course(reloads=options.reloads, connections=options.connections, section=options.section)
    try:
        outcome = course_of(course)
    except (Failed, InputError) as error:
        print(f"gateway.reloads: {error}", file=sys.stderr)
        return 1
    show(rows_of(outcome), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
