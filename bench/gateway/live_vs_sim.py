"""The simulator's word against the clock: the same trace, cluster, policy and seed, predicted and live.

`python -m bench.gateway.live_vs_sim` starts `kvroute serve --embedded`, plays the trace in real time, and compares TTFT
request by request with `simulate`'s. What the two do not share: the live router hears of cached blocks, landed
transfers and queues over sockets, and every step costs it real time.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from bench.gateway.contenders import ask
from bench.gateway.program import Program
from bench.measurement import ROOT, Failed, Row, show

from kvroute.control import ControlSpec
from kvroute.emulator.player import Answer, play, plays, prompt_tokens
from kvroute.experiments.simulation import Workload
from kvroute.prefix import block_hashes
from kvroute.sim.run import Run, simulate
from kvroute.sim.settings import SimSettings
from kvroute.sim.workload import Trace, TracedRequest
from kvroute.topology import load

CLUSTER = ROOT / "examples" / "fat-tree-64gpu.yaml"
POLICIES = ("round-robin", "netkv")
BLOCK_TOKENS = 16
"""Of the emulated engines; the trace's own blocks are cut into these for both sides."""
OUTPUT_MAX = 64
"""Longer answers only make the bench longer: TTFT feels the batch, not the length."""
WITHIN = 0.10
READY_S = 60.0
PARTS = {"prefill": ("prefill_wait", "prefill"), "transfer": ("transfer", "queue"), "first_step": ("first_step",)}
"""Parts as the gateway measures them, and those of the simulator that they are made of."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is played and predicted."""

    cluster: Path
    requests: int
    rate_per_s: float
    profile: str
    p_share: float
    prefill: str
    seed: int

    def trace(self) -> Trace:
        """The requests, their prompts in the engines' blocks."""
        workload = Workload(
            generated_requests=self.requests, profile=self.profile, rate_per_s=self.rate_per_s, p_share=self.p_share
        )
        wanted, made = workload.of_seed(self.seed), list[TracedRequest]()
        for request in wanted.requests:
            if not request.output_tokens:
                continue
            blocks = block_hashes(prompt_tokens(request, len(made)), BLOCK_TOKENS)
            output = min(request.output_tokens, OUTPUT_MAX)
            made.append(
                msgspec.structs.replace(request, blocks=blocks, block_tokens=BLOCK_TOKENS, output_tokens=output)
            )
        return Trace(wanted.name, tuple(made))


def predicted(question: Question, trace: Trace, policy: str) -> Run:
    """The simulator's run: no telemetry, since the live gateway has none either."""
    spec = ControlSpec(decode=policy, prefill=question.prefill)
    return simulate(load(question.cluster), trace, spec, SimSettings(telemetry="none"), seed=question.seed)


def live(question: Question, trace: Trace, policy: str) -> tuple[list[Answer], dict[str, float]]:
    """Answers in the trace's order, and the gateway's own mean seconds of each part of TTFT."""
    with tempfile.TemporaryDirectory() as scratch:
        ready, file = Path(scratch, "ready.json"), Path(scratch, "cluster.yaml")
        # Prompts are token ids, so the engines' events tell all: nothing is guessed, as in the simulator.
        file.write_text(f"{question.cluster.read_text()}\ngateway: {{prefix: events}}\n")
        command = [str(Path(sys.executable).with_name("kvroute")), "serve", "--embedded", str(file)]
        command += ["--policy", policy, "--prefill", question.prefill, "--seed", str(question.seed)]
        with Program([*command, "--port", "0", "--admin-port", "0", "--ready-file", str(ready)]) as gateway:
            addresses = _addresses(ready, gateway)
            model = json.loads(ask(addresses["url"] + "/v1/models"))["data"][0]["id"]
            answers = uvloop.run(play(addresses["url"], plays(trace.requests, model)))
            return answers, parts(ask(addresses["admin"] + "/metrics").decode())


def _addresses(ready: Path, gateway: Program) -> dict[str, str]:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and gateway.alive:
        if ready.exists() and (text := ready.read_text()):
            addresses: dict[str, str] = json.loads(text)
            return addresses
        time.sleep(0.05)
    raise Failed(f"the gateway is not ready: {gateway.errors()}")


def parts(page: str) -> dict[str, float]:
    """Mean seconds by part, from the sums and counts of the metrics page."""
    found: dict[str, dict[str, float]] = {"sum": {}, "count": {}}
    for which, part, value in re.findall(r'^kvroute_ttft_part_seconds_(sum|count)\{part="(\w+)"\} (\S+)', page, re.M):
        found[which][part] = float(value)
    return {part: total / found["count"][part] for part, total in found["sum"].items() if found["count"].get(part)}


def compared(question: Question, policy: str, trace: Trace) -> dict[str, Any]:
    """One policy: both medians, the ratio of each request, the parts, and what went wrong live."""
    run = predicted(question, trace, policy)
    answers, live_parts = live(question, trace, policy)
    expected = run.outcomes.ttft_s.tolist()
    pairs = [(a.ttft_s, e) for a, e in zip(answers, expected, strict=True) if a.ok and a.ttft_s is not None and e == e]
    if not pairs:
        raise Failed(f"no answer under {policy}: {answers[0].error if answers else 'no request'}")
    simulated = msgspec.to_builtins(run.summary.ttft_parts_s)
    late = [a.sent_s - a.due_s for a in answers if a.sent_s is not None]
    return {
        "policy": policy,
        "requests": len(trace.requests),
        "answered": len(pairs),
        "errors": sorted({a.error for a in answers if a.error})[:3],
        "live_p50_s": statistics.median(one for one, _ in pairs),
        "simulated_p50_s": statistics.median(one for _, one in pairs),
        "ratio_p50": statistics.median(a / e for a, e in pairs),
        "apart_p50": statistics.median(abs(a / e - 1) for a, e in pairs),
        "live_parts_s": live_parts,
        "simulated_parts_s": {name: sum(simulated[part] or 0.0 for part in of) for name, of in PARTS.items()},
        "sent_late_p50_s": statistics.median(late),
    }


def rows(found: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Live beside predicted, policy by policy; the target is how far apart the medians may be."""
    made = []
    for one in found:
        apart = abs(one["live_p50_s"] / one["simulated_p50_s"] - 1)
        title = f"median TTFT, {one['policy']}, {one['requests']} requests"
        note = (
            f"{one['policy']}: {one['answered']} answered; a request's own TTFT is {100 * one['apart_p50']:.1f} % off"
        )
        made.append(
            Row(
                measure=title + ": live",
                unit="s",
                better="lower",
                ours=one["live_p50_s"],
                peer=one["simulated_p50_s"],
                peer_name="simulated",
                note=note + " in the median",
            )
        )
        off = Row(measure=title + ": off by", unit="%", better="lower", ours=100 * apart, target=100 * WITHIN)
        made.append(off)
    if len(found) > 1:
        first, last = found[0], found[-1]
        made.append(
            Row(
                measure=f"median TTFT, {last['policy']} over {first['policy']}: live",
                unit="",
                better="lower",
                ours=last["live_p50_s"] / first["live_p50_s"],
                peer=last["simulated_p50_s"] / first["simulated_p50_s"],
                peer_name="simulated",
            )
        )
    return made


def main() -> None:
    """Predict, play, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--cluster", type=Path, default=CLUSTER)
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second")
    parser.add_argument("--profile", default="rag")
    parser.add_argument("--p-share", type=float, default=0.7)
    parser.add_argument("--prefill", default="cache-aware", help="prefill policy of both sides")
    parser.add_argument("--policy", action="append", help=f"repeat; default {', '.join(POLICIES)}")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    question = Question(
        given.cluster, given.requests, given.rate, given.profile, given.p_share, given.prefill, given.seed
    )
    trace = question.trace()
    try:
        found = [compared(question, policy, trace) for policy in given.policy or POLICIES]
    except Failed as failed:
        sys.exit(str(failed))
    show(rows(found), given.json, {one["policy"]: json.dumps(one) for one in found})


if __name__ == "__main__":
    main()
