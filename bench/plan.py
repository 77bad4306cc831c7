"""Seconds to plan the PrfaaS case study, compared with a limit of one second: `python -m bench.plan`.

The timed part runs in a fresh process, after the imports: reading the file and planning the three deployments; then the
whole plan with its sensitivity. The command's start-up is a separate row, because Python's imports are most of it.
"""

from __future__ import annotations

import argparse
import json
import time

from bench.measurement import ROOT, Row, fresh, median, process_figures, show

SPEC = ROOT / "examples" / "prfaas-case-study.yaml"
REPEATS = 5
BOUND_S = 1.0


def figures() -> dict[str, float]:
    """Make one plan in this process; return wall seconds of the optimum and of all, and the process's CPU seconds."""
    from kvroute.planner.throughput.plan import make_plan
    from kvroute.planner.throughput.problem import read_problem
    from kvroute.planner.throughput.search import KINDS, deployment, find

    start_s = time.perf_counter()
    problem = read_problem(SPEC)
    deployments = [deployment(find(problem, kind), kind) for kind in KINDS]
    optimum_s = time.perf_counter() - start_s
    assert all(planned.lambda_max_per_s > 0 for planned in deployments)
    start_s = time.perf_counter()
    make_plan(problem)
    return {"optimum_s": optimum_s, "plan_s": time.perf_counter() - start_s, **process_figures()}


def rows(repeats: int) -> list[Row]:
    """Return medians over fresh processes."""
    taken = [fresh("bench.plan", "--one") for _ in range(repeats)]

    def row(measure: str, field: str, target: float | None = None) -> Row:
        return Row(
            measure=measure,
            unit="s",
            better="lower",
            ours=median(taken, field),
            peer=target,
            peer_name="the bound" if target else "",
            target=target,
        )

    return [
        row("plan of the PrfaaS case study, file to optimum, wall", "optimum_s", BOUND_S),
        row("plan of the PrfaaS case study, with all sensitivity, wall", "plan_s"),
        row("plan of the PrfaaS case study, whole process, CPU", "process_cpu_s"),
    ]


def main() -> None:
    """Print the rows, or the figures of one process for the parent process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="fresh processes")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(figures()))
        return
    show(rows(given.repeats), given.json)


if __name__ == "__main__":
    main()
