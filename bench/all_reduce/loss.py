"""Aggregations through `kvroute switch` on wires that lose packets: every sum is checked, with both data planes.

`python -m bench.all_reduce.loss [--rounds 10000]` as root. Three workers in network namespaces sum tensors of 1 to
2,000 values of float32 at each loss. The switch and the wires are those of `bench.all_reduce.star`. It is an error if a
sum is wrong, if results differ between workers or data planes, or if a worker does not end.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass

from bench.all_reduce.star import PORT, Star, star, start, switch, xdp
from rich.console import Console
from rich.table import Table

LOSSES = (0.0, 0.01, 0.05)
WORKERS = 3
TIMEOUT_S = 3_600.0


@dataclass(frozen=True)
class Outcome:
    """One data plane at one loss."""

    data_plane: str
    loss: float
    rounds: int
    seconds: float
    lost: int
    """Packets that the wires dropped."""
    sent_again: int
    """Packets that the workers sent again."""
    digest: str
    """Hash of all results, equal on all workers."""


def outcome(found: Star, options: tuple[str, ...], loss: float, rounds: int) -> Outcome:
    """Sum `rounds` tensors on every worker.

    Raises:
        SystemExit: a worker failed, or the workers' results differ.
    """
    before = found.lost
    with switch(found, *options) as (_, data_plane):
        began = time.perf_counter()
        workers = [
            start(
                found.host(worker),
                *("-m", "bench.all_reduce.sums", "--switch", f"{found.switch_address(worker)}:{PORT}"),
                *("--worker", str(worker), "--workers", str(found.workers), "--rounds", str(rounds)),
            )
            for worker in range(found.workers)
        ]
        done = []
        for process in workers:
            printed, error = process.communicate(timeout=TIMEOUT_S)
            if process.returncode != 0:
                sys.exit(f"{data_plane}, loss {loss:.0%}: {error.strip()}")
            done.append(json.loads(printed.splitlines()[-1]))
        seconds = time.perf_counter() - began
    digests = {outcome["hash"] for outcome in done}
    if len(digests) != 1 or any(outcome["attempts"] != 1 for outcome in done):
        sys.exit(f"{data_plane}, loss {loss:.0%}: the workers' results differ, or a worker joined again")
    again = sum(outcome["sent_again"] for outcome in done)
    return Outcome(data_plane, loss, rounds, seconds, found.lost - before, again, digests.pop())


def main() -> None:
    """Print a line for each data plane and loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10_000, help="aggregations in each case")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    given = parser.parse_args()
    outcomes = []
    with star(WORKERS) as found:
        for loss in LOSSES:
            found.lose(loss)
            outcomes += [outcome(found, options, loss, given.rounds) for options in (tuple(xdp(found)), ())]
    if len({trial.digest for trial in outcomes}) != 1:
        sys.exit("the results of the data planes, or of the losses, differ")
    if given.json:
        print(json.dumps([asdict(trial) for trial in outcomes], indent=1))
        return
    drawn = Table("data plane", "loss", "aggregations", "seconds", "packets lost", "packets sent again")
    for trial in outcomes:
        numbers = (f"{trial.rounds:,}", f"{trial.seconds:.0f}", f"{trial.lost:,}", f"{trial.sent_again:,}")
        drawn.add_row(trial.data_plane, f"{trial.loss:.0%}", *numbers)
    Console().print(drawn)


if __name__ == "__main__":
    main()
