"""The order of decode policies on the kernel's network and in the simulator, with the same requests for each.

`python -m bench.testbed.policies` (root). A child process builds one testbed for a reading and a seed and plays the
seed's requests through a live gateway under one policy after the other. Engines clear their caches in between, and the
first policy rotates. The same is simulated. Differences are paired by request. Their standard errors come from blocks
of consecutive requests, because waiting times of neighbouring requests are correlated.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
from bench.measurement import ROOT, Failed, Row, fresh, show

from kvroute.planner.comparison.requests import Workload
from kvroute.testbed import Build, NamedTestbed, namespaces
from kvroute.testbed.live import Half, LiveComparisonSpec, playable
from kvroute.testbed.namespaces import Unavailable
from kvroute.testbed.queues import Discipline
from kvroute.testbed.rounds import POLICIES, Round, course, predict
from kvroute.types import InputError

READINGS = {name: ROOT / "examples" / f"testbed-{name}.yaml" for name in ("literal", "paper")}
PREFILL = "least-loaded"
DRAWS = 8
BLOCK = 10
"""Number of requests in a block."""
APART = 2.0
"""Number of standard errors from which on two policies count as different."""


class Trial(msgspec.Struct, frozen=True):
    """The rounds of one testbed, as stored."""

    reading: str
    seed: int
    options: list[str]
    rounds: tuple[Round, ...]


def trial(given: argparse.Namespace) -> list[Round]:
    """Play all policies on one testbed; return them in the order of POLICIES, whichever was first."""
    workload = Workload(
        generated_requests=given.requests, profile=given.profile, rate_per_s=given.rate, p_share=given.p_share
    )
    trace = playable(workload.of_seed(given.seed), given.output_max)
    build = Build(queues=given.queues, seed=given.seed)
    first = given.seed % len(POLICIES)
    with course(NamedTestbed(f"p{os.getpid() % 10**7}"), READINGS[given.reading], build) as up:
        rounds = {name: up.play(name, PREFILL, trace) for name in (*POLICIES[first:], *POLICIES[:first])}
    live_specs = [LiveComparisonSpec(READINGS[given.reading], trace, name, PREFILL, given.seed) for name in POLICIES]
    return [msgspec.structs.replace(rounds[spec.policy], simulated=simulated(spec)) for spec in live_specs]


def simulated(live_spec: LiveComparisonSpec) -> Half:
    """Return the mean over several random uplink choices; with few uplinks, the kernel's choice has a large effect."""
    drawn = [predict(replace(live_spec, seed=live_spec.seed + 1000 * k), Build().background) for k in range(DRAWS)]

    def mean(values: Iterable[float | None]) -> float:
        return statistics.mean(value for value in values if value is not None)

    first = drawn[0]
    return msgspec.structs.replace(
        first,
        ttft_p50_s=mean(half.ttft_p50_s for half in drawn),
        ttft_p90_s=mean(half.ttft_p90_s for half in drawn),
        ttft_mean_s=mean(half.ttft_mean_s for half in drawn),
        parts_s={part: mean(half.parts_s[part] for half in drawn) for part in first.parts_s},
        tier_share=tuple(mean(shares) for shares in zip(*(half.tier_share for half in drawn), strict=True)),
        ttft_s=tuple(mean(times) for times in zip(*(half.ttft_s for half in drawn), strict=True)),
    )


def difference(one: Sequence[Half], other: Sequence[Half]) -> tuple[float, float]:
    """Return mean and standard error of TTFT under one policy minus that of the other, by request and seed."""
    blocks = []
    for a, b in zip(one, other, strict=True):
        paired = [x - y for x, y in zip(a.ttft_s, b.ttft_s, strict=True) if x is not None and y is not None]
        blocks += [statistics.mean(paired[at : at + BLOCK]) for at in range(0, len(paired), BLOCK)]
    error = statistics.stdev(blocks) / len(blocks) ** 0.5 if len(blocks) > 1 else float("inf")
    return statistics.mean(blocks), error


def rows(what: str, trials: Sequence[Sequence[Round]]) -> list[Row]:
    """Return the rows of one reading: mean TTFT by policy, and the pairs of policies in the simulated order."""
    by_policy = {name: [rounds[at] for rounds in trials] for at, name in enumerate(POLICIES)}
    made = []
    for name, rounds in by_policy.items():
        kernel, simulated = ([half(comparison) for comparison in rounds] for half in (_kernel, _simulated))
        answered, sent = sum(half.answered for half in kernel), sum(len(half.ttft_s) for half in kernel)
        cpu = statistics.mean(comparison.cpu_share for comparison in rounds)
        transfer = [statistics.mean(half.parts_s["transfer"] for half in halves) for halves in (kernel, simulated)]
        made.append(
            Row(
                measure=f"{what}, {name}: mean TTFT on the kernel's network",
                unit="s",
                better="lower",
                ours=statistics.mean(half.ttft_mean_s for half in kernel),
                peer=statistics.mean(half.ttft_mean_s for half in simulated),
                peer_name="simulated",
                note=f"{what}, {name}: {answered} of {sent} answered, transfers {transfer[0]:.3f} s (simulated "
                f"{transfer[1]:.3f}), engines and gateway used {cpu:.0%} of the cores",
            )
        )
    return [*made, *order(what, by_policy)]


def order(what: str, by_policy: Mapping[str, Sequence[Round]]) -> list[Row]:
    """Return the pairs that differ in the simulator, and how many have the same sign on the kernel's network."""
    remarks, same, against = [], 0, 0
    for first, other in combinations(by_policy, 2):
        simulated, kernel = (
            difference(
                [half(comparison) for comparison in by_policy[first]],
                [half(comparison) for comparison in by_policy[other]],
            )
            for half in (_simulated, _kernel)
        )
        if abs(simulated[0]) > APART * simulated[1]:
            same += np.sign(kernel[0]) == np.sign(simulated[0])
            against += np.sign(kernel[0]) != np.sign(simulated[0]) and abs(kernel[0]) > APART * kernel[1]
        remarks.append(
            f"{first} - {other} {1e3 * kernel[0]:+.0f} ± {1e3 * kernel[1]:.0f} ms (simulated "
            f"{1e3 * simulated[0]:+.0f} ± {1e3 * simulated[1]:.0f})"
        )
    apart = sum(
        abs(mean) > APART * error
        for mean, error in (
            difference(
                [comparison.simulated for comparison in by_policy[a]],
                [comparison.simulated for comparison in by_policy[b]],
            )
            for a, b in combinations(by_policy, 2)
        )
    )
    note = f"{what}: " + "; ".join(remarks)
    return [
        Row(
            measure=f"{what}: pairs of policies in the simulator's order, of {apart} that differ there",
            unit="",
            better="higher",
            ours=float(same),
            target=float(apart),
            note=note,
        ),
        Row(
            measure=f"{what}: of those, in the opposite order by {APART:g} standard errors",
            unit="",
            better="lower",
            ours=float(against),
            target=0.0,
        ),
    ]


def _kernel(one: Round) -> Half:
    return one.kernel


def _simulated(one: Round) -> Half:
    return one.simulated


def _kept(raw: Path | None) -> list[Trial]:
    if raw is None or not raw.exists():
        return []
    return [msgspec.json.decode(line, type=Trial) for line in raw.read_bytes().splitlines()]


def _keep(raw: Path | None, trial: Trial) -> None:
    if raw is not None:
        with raw.open("ab") as file:
            file.write(msgspec.json.encode(trial) + b"\n")


def main() -> int:
    """Run one process per reading and seed, readings in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reading", choices=READINGS, action="append", help="repeat; default both")
    parser.add_argument("--rounds", type=int, default=3, help="seeds")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--rate", type=float, default=4.5, help="requests per second")
    parser.add_argument("--profile", default="chatbot")
    parser.add_argument("--p-share", type=float, default=0.3)
    parser.add_argument("--output-max", type=int, default=32)
    parser.add_argument("--queues", choices=get_args(Discipline), default="fair")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--raw", type=Path, help="keep every testbed's rounds here, and go on from what is kept")
    parser.add_argument("--trial", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    readings = given.reading or list(READINGS)
    if given.trial:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        given.reading = readings[0]
        print(msgspec.json.encode(trial(given)).decode())
        return 0
    names = ("requests", "rate", "profile", "p_share", "output_max", "queues")
    options = [str(argument) for name in names for argument in (f"--{name.replace('_', '-')}", getattr(given, name))]
    trials: dict[str, list[Sequence[Round]]] = {reading: [] for reading in readings}
    done = {(trial.reading, trial.seed): trial for trial in _kept(given.raw)}
    if any(trial.options != options for trial in done.values()):
        parser.error(f"{given.raw} is of other options; name another file")
    try:
        namespaces.check()
        for seed in range(given.seed, given.seed + given.rounds):
            for reading in readings:
                if (reading, seed) not in done:
                    more = ["--reading", reading, "--seed", seed, "--trial"]
                    rounds = msgspec.convert(fresh("bench.testbed.policies", *options, *more), tuple[Round, ...])
                    done[reading, seed] = Trial(reading, seed, options, rounds)
                    _keep(given.raw, done[reading, seed])
                trials[reading].append(done[reading, seed].rounds)
    except (Unavailable, Failed, InputError) as error:
        what = "policies on a testbed, beside the simulator"
        show([Row(measure=what, unit="", better="higher", ours=None, note=str(error))], given.json)
        return 0 if isinstance(error, Unavailable) else 1
    show([row for reading in readings for row in rows(f"{reading}, {given.queues}", trials[reading])], given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
