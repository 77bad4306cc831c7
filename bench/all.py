"""Runs all benches and prints one table with peers of the same run: `make bench` or `python -m bench.all [NAME ...]`.

A missed target is a "no" in the table and never a failure. The exit code is 1 only if a bench fails to run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

import msgspec
from bench.measurement import CHILD_S, ROOT, Row, show
from bench.quoted import QUOTED, write

BENCHES = (
    *("simulate", "decision", "foresight", "arrival", "flows", "prefix", "store", "evaluation", "plan", "placement"),
    *("storage", "switch", "gateways", "tenants", "cheap_transfers"),
    *(
        "gateway.routers",
        "gateway.start_up",
        "gateway.workers",
        "gateway.chaos",
        "gateway.poison",
        "gateway.panic",
        "gateway.scale",
        "gateway.live_vs_sim",
        "gateway.storage",
        "gateway.two_datacenters",
    ),
    "gateway.layerwise",
    "gateway.prefix_copies",
    "gateway.large_prompts",
    "gateway.reloads",
    "gateway.discovery",
    "kube.discovery",
    "gateway.replication",
    "gateway.envoy",
    *("wan.connections", "wan.layerwise", "testbed.transfers", "testbed.policies"),
    *("storage_nics.emulated", "storage_nics.vllm"),
    "all_reduce.truth",
    "data_planes",
    *("fidelity.vllm", "fidelity.gpu", "fidelity.published"),
)
PEERED = (
    "simulate",
    "decision",
    "gateway.routers",
    "gateway.start_up",
    "gateway.workers",
    "placement",
    "kube.discovery",
)
MAYBE_PLAIN = ("flows", "prefix", "evaluation")
"""Benches that run again without --json if they fail with it."""
QUICK = {
    "simulate": ["--repeats", "1"],
    "decision": ["--calls", "300"],
    "plan": ["--repeats", "1"],
    "placement": ["--repeats", "1"],
    "switch": ["--repeats", "1"],
    "storage": ["--repeats", "1"],
    "gateway.start_up": ["--rounds", "1"],
    "gateway.routers": ["--rounds", "1", "--seconds", "2"],
    "gateway.workers": ["--rounds", "1", "--seconds", "2"],
    "gateway.chaos": ["--requests", "1000", "--calm-s", "0"],
    "data_planes": ["--rounds", "1"],
    "gateway.poison": ["--poison-per-s", "10", "--seconds", "4"],
    "gateway.panic": ["--fail-s", "4"],
    "gateway.scale": ["--seconds", "5"],
    "gateway.live_vs_sim": ["--requests", "50"],
    "gateway.storage": ["--agents", "12", "--turns", "2"],
    "gateway.two_datacenters": ["--speed", "8"],
    "gateway.layerwise": ["--rounds", "1", "--speed", "4"],
    "gateway.prefix_copies": ["--rounds", "1", "--speed", "4"],
    "gateway.large_prompts": ["3 MB"],
    "gateway.reloads": ["--reloads", "50"],
    "gateway.envoy": ["--rounds", "1", "--seconds", "2"],
    "gateway.discovery": ["--engines", "500", "--changes", "3"],
    "kube.discovery": ["--pods", "500", "--nodes", "100", "--rounds", "1"],
    "wan.connections": ["--rounds", "1"],
    "wan.layerwise": ["--rounds", "1"],
    "testbed.transfers": ["--rounds", "1"],
    "testbed.policies": ["--rounds", "1", "--requests", "40"],
    "storage_nics.emulated": ["--agents", "12", "--turns", "2"],
    "storage_nics.vllm": ["--rounds", "1"],
    "fidelity.vllm": ["--requests", "60", "--load", "0.6"],
    "all_reduce.truth": ["--rounds", "1", "--sizes", "2"],
}


def options(name: str, quick: bool, no_peer: bool) -> list[str]:
    """Return a bench's options besides --json; the kernels' benches have none."""
    return [*(QUICK.get(name, []) if quick else []), *(["--no-peer"] if no_peer and name in PEERED else [])]


def run(name: str, arguments: list[str]) -> tuple[list[Row], str, bool]:
    """Return the rows of a bench, its output if it prints no rows, and whether it ran to its end."""
    printed = _run(name, [*arguments, "--json"])
    if printed.returncode == 0:
        try:
            return _rows(json.loads(printed.stdout)), "", True
        except (ValueError, TypeError, KeyError):
            return [], printed.stdout.strip(), True
    if name in MAYBE_PLAIN:
        printed = _run(name, arguments)
        if printed.returncode == 0:
            return [], printed.stdout.strip(), True
    return [], (printed.stderr.strip().splitlines() or ["it ended without a message"])[-1], False


def _run(name: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"bench.{name}", *arguments]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=4 * CHILD_S)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no end within {4 * CHILD_S} s")


def _rows(document: dict[str, list[dict[str, Any]]]) -> list[Row]:
    """Return the rows of our JSON document, or build them from the sizes of the flow bench."""
    if "flows" in document:
        return [_flow_row(size) for size in document["flows"]]
    follows = ("ratio", "met")
    plain = [{field: value for field, value in entry.items() if field not in follows} for entry in document["rows"]]
    return [msgspec.convert(entry, Row) for entry in plain]


def _flow_row(size: dict[str, float]) -> Row:
    return Row(
        measure=f"max-min rates recomputed, {size['instances']:,} instances, {size['flows']:,} flows",
        unit="events per CPU-s",
        better="higher",
        ours=size["events_per_s"],
        peer=size["plain_per_s"],
        peer_name="plain Python",
    )


def main() -> int:
    """Run the selected benches one after the other, because they share the cores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which; default all: {', '.join(BENCHES)}")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--quick", action="store_true", help="one repeat, fewer decisions and requests")
    parser.add_argument("--no-peer", action="store_true", help="leave the peers out; nothing is installed")
    parser.add_argument("--write", action="store_true", help="write what the pages quote to bench/results/")
    given = parser.parse_args()
    if given.write and given.quick:
        parser.error("--write and --quick exclude each other: quick figures are not quoted")
    unknown = [name for name in given.names if name not in BENCHES]
    if unknown:
        parser.error(f"there is no bench {unknown[0]!r}; choose from {', '.join(BENCHES)}")
    rows: list[Row] = []
    texts: dict[str, str] = {}
    broken = False
    for name in given.names or BENCHES:
        if not (ROOT / "bench" / f"{name.replace('.', '/')}.py").exists():
            texts[name] = "not there"
            continue
        print(f"bench {name} ...", file=sys.stderr, flush=True)
        bench_rows, text, ended = run(name, options(name, given.quick, given.no_peer))
        rows += bench_rows
        if text:
            texts[name] = text
        broken = broken or not ended
        if given.write and ended and name in QUOTED:
            print(f"written: {write(name, bench_rows)}", file=sys.stderr)
    show(rows, given.json, texts)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
