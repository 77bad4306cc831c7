"""Tables, figures and pages: what they say of hand-made runs, and that they stand everything a run can give."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvroute.experiments.cells import Cell, Experiment, Record
from kvroute.experiments.netkv import EXPERIMENTS
from kvroute.sim.metrics import Counts, LinkLoad, Spread, Summary, Timeline, TtftParts

BASE_S = {"round-robin": 1.6, "load-aware": 1.5, "cache-aware": 1.42, "cla": 1.3, "netkv-topo": 1.15}
BASE_S |= {"netkv-static": 1.1, "netkv": 1.05}


def summary(policy: str, seed: int, ttft_s: float | None, **changes: Any) -> Summary:
    """A run whose parts add up to the given mean TTFT; None: nothing got a first token."""
    if ttft_s is None:
        parts, spread = TtftParts(), Spread()
    else:
        parts = TtftParts(
            prefill_wait=0.1 * ttft_s,
            prefill=0.4 * ttft_s,
            transfer=0.35 * ttft_s,
            queue=0.14 * ttft_s,
            first_step=0.01 * ttft_s,
        )
        spread = Spread(mean=ttft_s, p50=0.8 * ttft_s, p95=2.1 * ttft_s, p99=3.3 * ttft_s)
    near = 0.5 if policy.startswith("netkv") else 0.08
    made = Summary(
        policy=policy,
        seed=seed,
        requests=Counts(arrived=1000, finished=990, rejected=6, in_flight=4),
        measured=900,
        ttft_s=spread,
        ttft_parts_s=parts,
        transfer_s=Spread() if ttft_s is None else Spread(mean=0.35 * ttft_s, p50=0.3, p95=0.8, p99=1.2),
        tbt_s=Spread() if ttft_s is None else Spread(mean=0.0142, p50=0.014, p95=0.016, p99=0.017),
        tpot_s=Spread() if ttft_s is None else Spread(mean=0.0156, p50=0.015, p95=0.018, p99=0.019),
        slo_attainment=None if ttft_s is None else float(np.clip(1.25 - 0.2 * ttft_s, 0, 1)),
        goodput_per_s=None if ttft_s is None else 6.1 * float(np.clip(1.25 - 0.2 * ttft_s, 0, 1)),
        throughput_per_s=6.1,
        tier_share={"0": 0.02, "1": near, "2": 0.18, "3": 0.8 - near} if ttft_s else dict.fromkeys("0123", 0.0),
        cache_hit=0.31,
        prefill_cache_hit=0.22,
        kv_bytes=1e12,
        link_load={"1": LinkLoad(mean=0.1, busiest=0.3, busiest_link="rack0->pod0")},
        wall_s=1.0,
        cpu_s=1.0,
    )
    return msgspec.structs.replace(made, **changes)


def timeline(seed: int, samples: int = 1000) -> Timeline:
    """Bursty traffic on three of five tiers."""
    at_s = np.arange(samples) * 0.1
    draw = np.random.default_rng(seed)
    wave = 0.3 + 0.2 * np.sin(at_s / 7 + seed) + 0.08 * draw.standard_normal(samples)
    tier = {
        str(name): tuple(np.clip(wave * factor, 0, 1).tolist()) for name, factor in enumerate((0, 0.4, 0.8, 1.2, 0))
    }
    return Timeline(at_s=tuple(at_s.tolist()), tier=tier)


def record(policy: str, seed: int, ttft_s: float | None, *, samples: int = 0, **cell: Any) -> Record:
    made = Cell(
        policy=policy, seed=seed, **({"experiment": "simulate", "reading": "", "profile": "", "settings": {}} | cell)
    )
    run = summary(policy, seed, ttft_s)
    lines = timeline(len(policy), samples) if samples else None
    return Record(
        key=made.key, cell=made, config={"reading": {"ecmp": "flow"}, "rate": 6.09}, summary=run, timeline=lines
    )


def comparison(policies: Sequence[str] = ("round-robin", "cla", "netkv"), seeds: int = 5) -> list[Record]:
    draw = np.random.default_rng(1)
    return [
        record(policy, seed, BASE_S.get(policy, 1.7) * (1 + 0.03 * float(draw.standard_normal())), samples=1000)
        for policy in policies
        for seed in range(seeds)
    ]


def sweep(experiment: Experiment, seeds: int = 3, profiles: Sequence[str] = ()) -> list[Record]:
    """A plausible sweep: TTFT grows along every axis, and netkv's lead with it."""
    draw = np.random.default_rng(7)
    records = []
    for profile, point in product(profiles or experiment.profiles, product(*experiment.axes.values())):
        place = [
            values.index(value) / (len(values) - 1)
            for values, value in zip(experiment.axes.values(), point, strict=True)
        ]
        level = {"chatbot": 0.4, "rag": 1.0, "long-context": 4.0}[profile] * (1 + 1.5 * sum(place))
        for seed in range(seeds):
            common = 1 + 0.04 * float(draw.standard_normal())
            for policy in experiment.policies:
                lead = 1 - (1.3 - BASE_S[policy]) / 1.3 * (0.1 + 0.9 * float(np.mean(place or [1.0])))
                ttft_s = level * common * lead * (1 + 0.015 * float(draw.standard_normal()))
                settings = dict(zip(experiment.axes, map(float, point), strict=True))
                cell = {"experiment": experiment.name, "reading": "paper", "profile": profile, "settings": settings}
                records.append(record(policy, seed, ttft_s, **cell))
    return records
