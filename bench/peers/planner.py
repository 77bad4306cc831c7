"""Runs one search of NVIDIA's aiconfigurator: TP x PP and replicas of a disaggregated deployment under SLOs.

It prints one JSON line. It runs in aiconfigurator's environment, offline: its wheel contains the measured times of
operations. It knows no network beyond a bandwidth inside a node and one between nodes.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from aiconfigurator.cli import cli_default  # type: ignore[import-not-found]

BACKEND = "vllm"


def figures(model: str, system: str, gpus: int, tokens: tuple[int, int], limits_s: tuple[float, float]) -> Any:
    """Search once; return wall seconds, the rate of the best disaggregated deployment, and its parallelism."""
    start_s = time.perf_counter()
    found = cli_default(
        model_path=model,
        total_gpus=gpus,
        system=system,
        backend=BACKEND,
        isl=tokens[0],
        osl=tokens[1],
        ttft=1e3 * limits_s[0],
        tpot=1e3 * limits_s[1],
        strict_sla=True,
        top_n=1,
    )
    plan_s = time.perf_counter() - start_s
    best = found.best_configs["disagg"].iloc[0]
    sides = (f"{best[f'({side})workers']:g} x TP{best[f'({side})tp']:g} PP{best[f'({side})pp']:g}" for side in "pd")
    return {"plan_s": plan_s, "rate_per_s": float(best["seq/s"]), "answer": " : ".join(sides)}


def main() -> None:
    """Print the figures of one search."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a model whose configuration is in the wheel")
    parser.add_argument("system", help="GPU type, such as h100_sxm")
    parser.add_argument("gpus", type=int)
    parser.add_argument("tokens", type=int, nargs=2, help="tokens of a prompt and of an output")
    parser.add_argument("limits_s", type=float, nargs=2, help="TTFT and TPOT")
    given = parser.parse_args()
    print(json.dumps(figures(given.model, given.system, given.gpus, tuple(given.tokens), tuple(given.limits_s))))


if __name__ == "__main__":
    main()
