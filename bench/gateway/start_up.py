"""Start of a gateway beside the Rust routers, and CPU time of help pages: `python -m bench.gateway.start_up`.

Every proxy starts in front of the same 16 fake engines, in turn, and answers one request. CPU time counts until then.
The memory is the resident one of all its processes some seconds later; the process that compiles kernels has ended.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import typer
from bench.gateway.contenders import CONTENDERS, OTHER_CPUS, Place, answering, kvroute
from bench.gateway.program import Program
from bench.measurement import Failed, Row, show
from typer.core import TyperGroup

from kvroute.cli.app import app
from kvroute.policies import DEFAULT_DECODE_POLICY

ROUNDS, IDLE_S = 3, 5.0
INSTANCES = 8
"""Number of instances of each role."""
MEMORY_MB, HELP_S = 150.0, 0.4
OURS, COMPILED, VLLM, SGLANG = "kvroute", "kvroute, empty kernel cache", "vllm-router", "sglang-router"
Figures = dict[str, list[float]]


def commands(words: tuple[str, ...], command: object) -> Iterator[tuple[str, ...]]:
    """Yield the words of a command and of those below it."""
    yield words
    if isinstance(command, TyperGroup):
        context = typer.Context(command)
        for name in command.list_commands(context):
            yield from commands((*words, name), command.get_command(context, name))


def help_cpu_s(words: tuple[str, ...]) -> float:
    """Return the CPU seconds that a process takes to print a help page."""
    program = str(Path(sys.executable).with_name("kvroute"))
    child = subprocess.Popen([program, *words, "--help"], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime


def started(name: str, place: Place) -> tuple[float, float]:
    """Start a proxy; return the CPU seconds until it has answered a request, and its memory at rest in MB."""
    made = CONTENDERS[name] if name in (VLLM, SGLANG) else kvroute({"policy": DEFAULT_DECODE_POLICY})
    command = made(place)
    if name == COMPILED:
        command = ["env", f"NUMBA_CACHE_DIR={place.folder / str(place.port)}", *command]
    with answering(command, name, place) as proxy:
        cpu_s = proxy.cpu_s()
        time.sleep(IDLE_S)
        return cpu_s, proxy.rss_bytes() / 1e6


def measured(names: list[str], rounds: int) -> tuple[Figures, Figures, dict[str, str]]:
    """Start each proxy once per round, in rotated order; return CPU seconds, MB, and reasons for missing figures."""
    cpu: Figures = {name: [] for name in names}
    memory: Figures = {name: [] for name in names}
    missing: dict[str, str] = {}
    worker = [sys.executable, "-m", "bench.gateway.mock_worker", "--prefill", str(INSTANCES)]
    with (
        tempfile.TemporaryDirectory() as folder,
        Program([*worker, "--decode", str(INSTANCES)], cpus=OTHER_CPUS) as mock,
    ):
        workers = mock.document()
        for number in range(rounds):
            for name in (*names[number % len(names) :], *names[: number % len(names)]):
                try:
                    cpu_s, rest_mb = started(name, Place.of(workers, Path(folder)))
                except Failed as failed:
                    missing[name] = str(failed)
                    continue
                cpu[name].append(cpu_s)
                memory[name].append(rest_mb)
    return cpu, memory, missing


def _row(measure: str, unit: str, found: Figures, name: str, peer: str, target: float | None, note: str) -> Row:
    ours, theirs = found.get(name), found.get(peer)
    return Row(
        measure=measure + name.removeprefix(OURS),
        unit=unit,
        better="lower",
        ours=statistics.median(ours) if ours else None,
        peer=statistics.median(theirs) if theirs else None,
        peer_name=peer if theirs else f"{peer} not available",
        target=target,
        note=note,
    )


def main() -> None:
    """Run the rounds, print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--no-peer", action="store_true", help="leave the Rust routers out; nothing is installed")
    given = parser.parse_args()
    peers = [] if given.no_peer else [VLLM, SGLANG]
    cpu, memory, missing = measured([OURS, COMPILED, *peers], given.rounds)
    note = "; ".join(f"{name}: {why}" for name, why in missing.items())
    rows = [
        _row("memory at rest", "MB", memory, name, peer, MEMORY_MB, note)
        for name in (OURS, COMPILED)
        for peer in peers or [VLLM]
    ]
    rows += [_row("CPU until the first response", "s", cpu, OURS, peer, None, note) for peer in peers or [VLLM]]
    pages = {
        words: statistics.median(help_cpu_s(words) for _ in range(given.rounds))
        for words in commands((), typer.main.get_command(app))
    }
    slowest = max((words for words in pages if words), key=lambda words: pages[words])
    for title, words in (("--help", ()), ("the slowest --help of a command", slowest)):
        remark = f"the slowest help page is that of `kvroute {' '.join(slowest)}`"
        rows.append(
            Row(measure=f"CPU of {title}", unit="s", better="lower", ours=pages[words], target=HELP_S, note=remark)
        )
    show(rows, given.json, {"every start": json.dumps({"MB": memory, "CPU seconds": cpu}, indent=1)})


if __name__ == "__main__":
    main()
