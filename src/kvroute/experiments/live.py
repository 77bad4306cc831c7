"""The simulator's word against the clock: one trace, played at a live gateway and predicted for the same cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from kvroute.control import ControlSpec
from kvroute.emulator.player import Answer, prompt_tokens
from kvroute.prefix import block_hashes
from kvroute.sim.run import Run, simulate
from kvroute.sim.settings import SimSettings
from kvroute.sim.workload import Trace, TracedRequest
from kvroute.topology import Cluster
from kvroute.types import TIER_COUNT

BLOCK_TOKENS = 16
"""Of emulated engines; a trace's own blocks are cut into these for both sides."""


class Half(msgspec.Struct, frozen=True, kw_only=True):
    """TTFT and transfers of one trace under one policy, live or predicted."""

    answered: int
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_mean_s: float
    tier_share: tuple[float, ...]
    """Of the transfers, by tier, [TIER_COUNT]."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both halves of one policy."""

    policy: str
    live: Half
    predicted: Half

    @property
    def off(self) -> float:
        """How far the live median is from the predicted one, as a share of it."""
        return self.live.ttft_p50_s / self.predicted.ttft_p50_s - 1.0


def playable(trace: Trace, output_max: int) -> Trace:
    """The trace as both sides take it: prompts in the engines' blocks, answers of 1 to `output_max` tokens."""
    made: list[TracedRequest] = []
    for request in trace.requests:
        if request.output_tokens:
            made.append(
                msgspec.structs.replace(
                    request,
                    blocks=block_hashes(prompt_tokens(request, len(made)), BLOCK_TOKENS),
                    block_tokens=BLOCK_TOKENS,
                    output_tokens=min(request.output_tokens, output_max),
                )
            )
    return Trace(trace.name, tuple(made))


def predict(cluster: Cluster, trace: Trace, policy: str, prefill: str, seed: int) -> Half:
    """What the simulator says, without telemetry, as a gateway with a static oracle has none."""
    spec = ControlSpec(decode=policy, prefill=prefill)
    run: Run = simulate(cluster, trace, spec, SimSettings(telemetry="none"), seed=seed)
    ttft_s = run.outcomes.ttft_s
    tiers = run.outcomes.tier
    return _half(ttft_s[np.isfinite(ttft_s)], np.bincount(tiers[tiers >= 0], minlength=TIER_COUNT))


def observed(answers: Sequence[Answer], transfers: Mapping[int, float]) -> Half:
    """What clients saw; `transfers` by tier, as the gateway counted them."""
    ttft_s = np.array([answer.ttft_s for answer in answers if answer.ok and answer.ttft_s is not None])
    return _half(ttft_s, np.array([transfers.get(tier, 0.0) for tier in range(TIER_COUNT)]))


def _half(
    ttft_s: np.ndarray[tuple[int], np.dtype[np.float64]], tiers: np.ndarray[tuple[int], np.dtype[np.generic]]
) -> Half:
    counts = tiers.astype(np.float64)
    p50_s, p90_s = np.percentile(ttft_s, (50, 90)).tolist() if len(ttft_s) else (0.0, 0.0)
    return Half(
        answered=len(ttft_s),
        ttft_p50_s=p50_s,
        ttft_p90_s=p90_s,
        ttft_mean_s=float(ttft_s.mean()) if len(ttft_s) else 0.0,
        tier_share=tuple((counts / max(counts.sum(), 1.0)).tolist()),
    )
