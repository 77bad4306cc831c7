"""Time saved by a copied prefix: TTFT of long prompts prefilled in another datacenter, with and without a copy of the
prefix that is cached at home.

`python -m bench.gateway.prefix_copies` starts the embedded two-datacenter example twice, and sends pairs one after the
other: a prompt that stays, then a longer one with the same beginning that is offloaded. Nothing queues, so TTFT is only
copy, prefill and transfer. Each is compared with the simulator's prediction for the same file and trace.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from bench.gateway import lone_prompts
from bench.gateway.two_datacenters import faster
from bench.measurement import Failed, Row, show

from kvroute import topology
from kvroute.sim.workload import Trace, TracedRequest
from kvroute.testbed.live import Comparison, LiveComparisonSpec, playable

Mode = Literal["computed", "copied"]
MODES: tuple[Mode, ...] = ("computed", "copied")
RULES: dict[Mode, dict[str, Any]] = {"computed": {"rule": "scarce"}, "copied": {"rule": "abundant", "copy": {}}}
PREFIXES = (8_192, 16_384, 32_768)
"""Tokens of the first prompt of each pair."""
MORE_TOKENS = 36_864
"""Additional tokens of the second prompt."""
BLOCK_TOKENS = 16
SLOWEST_S = 15.0
"""Time for each prompt of a pair at speed 1, including a pause."""
WITHIN = 0.10


@dataclass(frozen=True, slots=True)
class Course:
    """Number of rounds, and speed."""

    rounds: int = 2
    speed: float = 1.0


def file_of(course: Course, mode: Mode, folder: Path) -> Path:
    """Write the example with a threshold between the two prompts of every pair."""
    path, file = folder / f"{mode}.yaml", topology.load(faster(course.speed, folder)).file
    fixed = {"short_term": {"enabled": False}, "long_term": {"requests_min": 1_000_000}}
    offload = {"threshold": MORE_TOKENS - BLOCK_TOKENS, **RULES[mode], **fixed}
    path.write_text(msgspec.structs.replace(file, gateway={"offload": offload}).to_yaml(), encoding="utf-8")
    return path


def trace_of(course: Course) -> Trace:
    """Return a trace with every pair once per round; no two pairs have the same beginning."""
    requests: list[TracedRequest] = []
    for number, tokens in enumerate(PREFIXES * course.rounds):
        for part, length in enumerate((tokens, tokens + MORE_TOKENS)):
            blocks = tuple(range(number * 1_000_000, number * 1_000_000 + length // BLOCK_TOKENS))
            at_s = (2 * number + part) * SLOWEST_S / course.speed
            requests.append(TracedRequest(at_s, length, 2, blocks, BLOCK_TOKENS))
    return playable(Trace("pairs", tuple(requests)), 2)


def compared(course: Course, mode: Mode, folder: Path) -> Comparison:
    """Compare one mode, live and predicted. Raises Failed if the gateway did not start, if a response is missing, or if
    the number of copied prefixes differs from the number of pairs."""
    live_spec = LiveComparisonSpec(file_of(course, mode, folder), trace_of(course), "netkv", "cache-aware", 0)
    comparison, page = lone_prompts.compared(live_spec, mode)
    due = len(live_spec.trace.requests) // 2 if mode == "copied" else 0
    landed = [line for line in page.splitlines() if line.startswith('kvroute_copies_total{outcome="landed"}')]
    if sum(float(line.rpartition(" ")[2]) for line in landed) != due:
        raise Failed(f"{mode}: {'; '.join(landed) or 'no prefix was copied'}, and {due} pairs were sent")
    return comparison


def by_length(ttft_s: Sequence[float | None]) -> list[float]:
    """Return the median of the second prompts of every length, in the order of PREFIXES."""
    second, step = ttft_s[1::2], len(PREFIXES)
    return [statistics.median(seconds for seconds in second[k::step] if seconds is not None) for k in range(step)]


def rows(comparisons: dict[Mode, Comparison], course: Course) -> list[Row]:
    """Return the times of both modes by length, live and simulated, and the time saved."""
    live, simulated = (
        {mode: by_length(getattr(comparison, half).ttft_s) for mode, comparison in comparisons.items()}
        for half in ("live", "predicted")
    )
    made = []
    for k, tokens in enumerate(PREFIXES):
        for mode in MODES:
            ours, peer = live[mode][k] * course.speed, simulated[mode][k] * course.speed
            what = f"{tokens:,} of {tokens + MORE_TOKENS:,} tokens cached at home, {mode}"
            made.append(lone_prompts.ttft_row(what, ours, peer))
    pairs = [(live, simulated, k) for k in range(len(PREFIXES))]
    saved, due = (
        [1.0 - half["copied"][k] / half["computed"][k] for k in range(len(PREFIXES))] for half in (live, simulated)
    )
    each = ", ".join(f"{tokens // 1024}K {100 * share:.0f} %" for tokens, share in zip(PREFIXES, saved, strict=True))
    made.append(
        Row(
            measure="TTFT saved by the copy (median of the lengths)",
            unit="%",
            better="higher",
            ours=100 * statistics.median(saved),
            peer=100 * statistics.median(due),
            peer_name="simulated",
            note=f"{each}; all times of the example / {course.speed:g}",
        )
    )
    off = max(abs(ours[mode][k] / peer[mode][k] - 1.0) for ours, peer, k in pairs for mode in MODES)
    worst = "a TTFT live against simulated: off by at most"
    made.append(Row(measure=worst, unit="%", better="lower", ours=100 * off, target=100 * WITHIN))
    return made


def main() -> None:
    """Run both modes; print rows or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    course = Course()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=course.rounds)
    parser.add_argument("--speed", type=float, default=course.speed)
    given = parser.parse_args()
    course = Course(given.rounds, given.speed)
    try:
        with tempfile.TemporaryDirectory() as folder:
            comparisons = {mode: compared(course, mode, Path(folder)) for mode in MODES}
    except Failed as failed:
        sys.exit(str(failed))
    show(rows(comparisons, course), given.json)


if __name__ == "__main__":
    main()
