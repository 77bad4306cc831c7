"""Compiles the kernels that most tests use into their cache, on two cores; `make test` does so once.

Usage: python -m tests.kernels

A kernel that has changed since is compiled by the first test that uses it.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

from tests.examples import EXAMPLES

from kvroute.control import ControlSpec
from kvroute.http.forwarding.stream_forwarder import StreamForwarder
from kvroute.planner.comparison.cells import Cell
from kvroute.policies import DECODE_POLICIES
from kvroute.topology import parse
from kvroute_studies.dualpath.run import run_cell

SMALL = EXAMPLES / "small.yaml"


def decide() -> None:
    """Compile what decides, what forwards streams, and the simulation of transfers."""
    cluster = parse(SMALL.read_text(encoding="utf-8"))
    for policy in DECODE_POLICIES:
        ControlSpec(decode=policy).warm_up(cluster)
    asyncio.run(_forward())
    command = [sys.executable, "-m", "kvroute.cli.app", "simulate", str(SMALL), "--requests", "20", "--seeds", "1"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


async def _forward() -> None:
    forwarder = StreamForwarder()
    forwarder.start()
    forwarder.close()


def read_storage(profile: str) -> None:
    """Compile the simulation of reads from storage for a model: one with sparse attention, or one with dense."""
    cell = Cell(
        experiment="dualpath-ablation",
        reading="paper",
        profile=profile,
        settings={"agents": 8},
        policy="scheduling",
        seed=0,
    )
    run_cell("", cell)


if __name__ == "__main__":
    with ProcessPoolExecutor(2) as processes:
        begun = [processes.submit(read_storage, "ds-660b"), processes.submit(decide)]
        begun.append(processes.submit(read_storage, "qwen-32b"))
        for task in begun:
            task.result()
