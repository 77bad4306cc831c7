"""Seconds and memory to plan placements of growing clusters, compared with limits, and one plan beside a peer's:
`python -m bench.placement`.

Each plan runs in a fresh process: reading the file and the search, without the simulation. The limits are
five minutes and 4 GB for 9,600 GPUs, and ten seconds for the testbed of the publication.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from bench.measurement import ROOT, Failed, Row, fresh, median, process_figures, show
from bench.peers.environment import programs

EXAMPLES = ROOT / "examples"
TESTBED, LARGE = EXAMPLES / "heroserve-testbed.yaml", EXAMPLES / "heroserve-2tracks.yaml"
RACKS = (2, 20, 200)
"""Racks of 48 GPUs in the file of the large cluster."""
REPEATS = 3
TESTBED_S, LARGE_S, LARGE_BYTES = 10.0, 300.0, 4e9
SHARED_MODEL, SHARED_TOKENS, SHARED_LIMITS_S = "llama-3.1-70b", (500, 200), (2.5, 0.06)
SHARED = """name: two-servers
fabric:
  kind: fat-tree
  pods: 1
  racks_per_pod: 1
  nodes_per_rack: 2
  gpus_per_node: 8
  nvlink: 450 GB/s
  nics: {compute: {count: 8, capacity: 400 Gbps}}
placement:
  gpus: {h100: {memory: 80 GB, tflops: 989, memory_bandwidth: 3350 GB/s}}
  traffic: {lengths: {kind: constant, tokens: 500}, output_tokens: 200}
"""
"""The question that is also put to the peer: 16 H100 on two servers."""


def figures(path: Path, model: str, ttft_s: float, tpot_s: float, method: str) -> dict[str, float]:
    """Plan once in this process; return wall seconds, the rate, and the process's figures."""
    from kvroute.planner.placement.problem import Objective, read_placement
    from kvroute.planner.placement.search import search

    start_s = time.perf_counter()
    found = search(read_placement(path, model, Objective(ttft_s, tpot_s)), "greedy" if method == "greedy" else "milp")
    return {"plan_s": time.perf_counter() - start_s, "rate_per_s": found.best.rate_per_s, **process_figures()}


def answer(path: Path) -> dict[str, float | str]:
    """Plan the shared question once in this process; return wall seconds, the rate and the parallelism."""
    from kvroute.planner.placement.problem import Objective, read_placement
    from kvroute.planner.placement.search import search

    start_s = time.perf_counter()
    best = search(read_placement(path, SHARED_MODEL, Objective(*SHARED_LIMITS_S))).best
    plan_s = time.perf_counter() - start_s
    sides = (f"{len(side)} x TP{side[0].split.tp} PP{side[0].split.pp}" for side in (best.prefill, best.decode))
    return {"plan_s": plan_s, "rate_per_s": best.rate_per_s, "answer": " : ".join(sides)}


def beside_the_peer() -> list[Row]:
    """Return the time and the rate of the shared question, ours and aiconfigurator's."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "two-servers.yaml"
        path.write_text(SHARED)
        ours = fresh("bench.placement", "--shared", path)
    peer, note = dict[str, float | str](), ""
    try:
        python = str(programs("aiconfigurator") / "python")
        question = ("meta-llama/Meta-Llama-3.1-70B", "h100_sxm", 16, *SHARED_TOKENS, *SHARED_LIMITS_S)
        peer = fresh("bench.peers.planner", *question, python=python)
        note = f"aiconfigurator chooses {peer['answer']}, kvroute {ours['answer']} (prefill : decode)"
    except Failed as error:
        note = f"aiconfigurator: {error}"
    name = "placement, Llama-3.1-70B on 16 H100, 500 and 200 tokens"
    searched = Row(measure=f"{name}, search, wall", unit="s", better="lower", ours=ours["plan_s"], note=note)
    rate = Row(measure=f"{name}, rate", unit="requests/s", better="higher", ours=ours["rate_per_s"], note=note)
    if not peer:
        return [searched, rate]
    return [
        msgspec.structs.replace(row, peer=float(peer[field]), peer_name="aiconfigurator")
        for row, field in ((searched, "plan_s"), (rate, "rate_per_s"))
    ]


def rows(repeats: int) -> list[Row]:
    """Return medians over fresh processes."""
    found = [_row("testbed, 16 GPUs, OPT-66B", TESTBED, "opt-66b", (2.5, 0.15), repeats, TESTBED_S)]
    with TemporaryDirectory() as folder:
        for racks in RACKS:
            path = Path(folder) / f"{racks}.yaml"
            path.write_text(LARGE.read_text().replace("racks_per_pod: 200", f"racks_per_pod: {racks}"))
            limit_s = LARGE_S if racks == RACKS[-1] else None
            taken = [fresh("bench.placement", "--one", path, "opt-175b", 4.0, 0.2, "milp") for _ in range(repeats)]
            name = f"{racks * 48:,} GPUs, OPT-175B"
            found.append(_seconds(name, taken, limit_s))
            if limit_s is not None:
                peak = _gigabytes(taken)
                found.append(
                    Row(
                        measure=f"placement, {name}, peak memory",
                        unit="GB",
                        better="lower",
                        ours=peak,
                        peer=LARGE_BYTES / 1e9,
                        peer_name="the bound",
                        target=LARGE_BYTES / 1e9,
                    )
                )
        small = Path(folder) / f"{RACKS[0]}.yaml"
        greedy = [fresh("bench.placement", "--one", small, "opt-175b", 4.0, 0.2, "greedy") for _ in range(repeats)]
        exact = [fresh("bench.placement", "--one", small, "opt-175b", 4.0, 0.2, "milp") for _ in range(repeats)]
        found.append(
            Row(
                measure=f"placement, {RACKS[0] * 48} GPUs, rate with the integer program over greedy",
                unit="requests/s",
                better="higher",
                ours=median(exact, "rate_per_s"),
                peer=median(greedy, "rate_per_s"),
                peer_name="greedy groups",
            )
        )
    return found


def _gigabytes(taken: list[dict[str, float]]) -> float | None:
    peak = median(taken, "rss_mb")
    return None if peak is None else peak / 1e3


def _row(name: str, path: Path, model: str, limits_s: tuple[float, float], repeats: int, limit_s: float) -> Row:
    taken = [fresh("bench.placement", "--one", path, model, *limits_s, "milp") for _ in range(repeats)]
    return _seconds(name, taken, limit_s)


def _seconds(name: str, taken: list[dict[str, float]], limit_s: float | None) -> Row:
    return Row(
        measure=f"placement, {name}, file to best placement, wall",
        unit="s",
        better="lower",
        ours=median(taken, "plan_s"),
        peer=limit_s,
        peer_name="the bound" if limit_s else "",
        target=limit_s,
    )


def main() -> None:
    """Print the rows, or the figures of one process for the parent process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="fresh processes")
    parser.add_argument("--no-peer", action="store_true", help="do not install and run aiconfigurator")
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--shared", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.shared:
        print(json.dumps(answer(given.shared)))
        return
    if given.one:
        path, model, ttft_s, tpot_s, method = given.one
        print(json.dumps(figures(Path(path), model, float(ttft_s), float(tpot_s), method)))
        return
    found = rows(given.repeats)
    show(found if given.no_peer else [*found, *beside_the_peer()], given.json)


if __name__ == "__main__":
    main()
