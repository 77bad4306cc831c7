"""Time saved by sending during the prefill: TTFT of prompts prefilled in another datacenter, layer by layer and serial.

`python -m bench.gateway.layerwise` starts the embedded two-datacenter example twice, with a link about as slow as the
prefill, and sends one prompt after the other. Nothing queues, so TTFT is only prefill and transfer. Each mode is
compared with the simulator's prediction for the same file and trace. `--speed` divides every time of the example.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
from bench.gateway import lone_prompts
from bench.gateway.two_datacenters import faster
from bench.measurement import Failed, Row, show

from kvroute import topology
from kvroute.sim.workload import Trace, TracedRequest
from kvroute.testbed.live import Comparison, LiveComparisonSpec, playable
from kvroute_engine.files.units import Bandwidth

Mode = Literal["serial", "layerwise"]
MODES: tuple[Mode, ...] = ("serial", "layerwise")
TOKENS = (8_192, 32_768, 65_536, 131_072)
BLOCK_TOKENS = 16
GBPS = 2.5
"""About the rate at which a fast instance produces KV cache (PrfaaS table 3)."""
SLOWEST_S, PAUSE_S = 20.0, 1.0
"""Time for the longest prompt, prefilled and then sent, at speed 1; and a pause between prompts."""
WITHIN = 0.10


@dataclass(frozen=True, slots=True)
class Course:
    """The load and the link."""

    rounds: int = 2
    gbps: float = GBPS
    speed: float = 1.0


def file_of(course: Course, mode: Mode, folder: Path) -> Path:
    """Write the example with a slow link and with every prompt offloaded; nothing else changes."""
    path = folder / f"{mode}.yaml"
    file, replace = topology.load(faster(course.speed, folder)).file, msgspec.structs.replace
    wan = [replace(link, bytes_per_s=Bandwidth(course.gbps * course.speed * 1e9 / 8)) for link in file.wan]
    offload = {
        "threshold": "1K tokens",
        "layerwise": mode == "layerwise",
        "short_term": {"enabled": False},
        "long_term": {"requests_min": 1_000_000},
    }
    path.write_text(replace(file, wan=wan, gateway={"offload": offload}).to_yaml(), encoding="utf-8")
    return path


def trace_of(course: Course) -> Trace:
    """Return a trace with every length once per round; each prompt starts long after the previous response."""
    at_s, requests = 0.0, list[TracedRequest]()
    for tokens in TOKENS * course.rounds:
        requests.append(TracedRequest(at_s, tokens, 2, (), BLOCK_TOKENS))
        at_s += SLOWEST_S * tokens / TOKENS[-1] / course.speed + PAUSE_S
    return playable(Trace("one after the other", tuple(requests)), 2)


def compared(course: Course, mode: Mode, folder: Path) -> Comparison:
    """Compare one mode, live and predicted. Raises Failed if the gateway did not start, or a response is missing."""
    live_spec = LiveComparisonSpec(file_of(course, mode, folder), trace_of(course), "netkv", "cache-aware", 0)
    return lone_prompts.compared(live_spec, mode)[0]


def by_length(ttft_s: Sequence[float | None]) -> list[float]:
    """Return the median of every length, in the order of TOKENS."""
    return [
        statistics.median(seconds for seconds in ttft_s[k :: len(TOKENS)] if seconds is not None)
        for k in range(len(TOKENS))
    ]


def rows(comparisons: dict[Mode, Comparison], course: Course) -> list[Row]:
    """Return the times of both modes by length, live and simulated, and their ratio."""
    live, simulated = (
        {mode: by_length(getattr(comparison, half).ttft_s) for mode, comparison in comparisons.items()}
        for half in ("live", "predicted")
    )
    made = []
    for k, tokens in enumerate(TOKENS):
        for mode in MODES:
            ours, peer = live[mode][k] * course.speed, simulated[mode][k] * course.speed
            made.append(lone_prompts.ttft_row(f"{tokens:,} tokens, {mode}", ours, peer))
    ratios = [live["layerwise"][k] / live["serial"][k] for k in range(len(TOKENS))]
    due = [simulated["layerwise"][k] / simulated["serial"][k] for k in range(len(TOKENS))]
    each = ", ".join(f"{tokens // 1024}K {ratio:.2f}" for tokens, ratio in zip(TOKENS, ratios, strict=True))
    made.append(
        Row(
            measure="TTFT, layer-wise over serial (median of the lengths)",
            unit="",
            better="lower",
            ours=statistics.median(ratios),
            peer=statistics.median(due),
            peer_name="simulated",
            note=f"{each}; link {course.gbps:g} Gbps; all times of the example / {course.speed:g}",
        )
    )
    off = max(abs(first / other - 1.0) for first, other in zip(ratios, due, strict=True))
    worst = "the ratio live against simulated: off by at most"
    made.append(Row(measure=worst, unit="%", better="lower", ours=100 * off, target=100 * WITHIN))
    return made


def main() -> None:
    """Run both modes; print rows or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    course = Course()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=course.rounds)
    parser.add_argument("--gbps", type=float, default=course.gbps, help="rate of the link at speed 1")
    parser.add_argument("--speed", type=float, default=course.speed)
    given = parser.parse_args()
    course = Course(given.rounds, given.gbps, given.speed)
    try:
        with tempfile.TemporaryDirectory() as folder:
            comparisons = {mode: compared(course, mode, Path(folder)) for mode in MODES}
    except Failed as failed:
        sys.exit(str(failed))
    show(rows(comparisons, course), given.json)


if __name__ == "__main__":
    main()
