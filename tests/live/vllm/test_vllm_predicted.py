"""Live: TTFT and TPOT of real vLLM behind the gateway, as the simulator predicts them from a timing measured before.

Other programs may slow any part of a measurement, so the bounds are generous and there are several attempts. A wrong
model violates them: so do times that are twice or half of those measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.live.vllm.timed_pair import (
    TimedPair,
    Times,
    Timing,
    capacity_per_s,
    cluster_text,
    gateway_of,
    measured_link,
    measured_timing,
    played,
    predicted,
    trace_of,
)

from kvroute.topology.units import duration_s

if TYPE_CHECKING:
    from tests.live.vllm.conftest import Pair

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

ATTEMPTS = 4
REQUESTS = 40
TTFT_RANGE, TPOT_RANGE = (0.5, 1.6), (1 / 1.5, 1.5)
"""Bounds of the ratio of the predicted to the measured median."""
STEP_TOKENS = 2048
"""Of the servers of this session."""


def ratios(model: Times, live: Times) -> tuple[float, float]:
    """Return predicted to measured median of TTFT and of TPOT."""
    ttft = float(np.median(model.ttft_s) / np.median(live.ttft_s))
    return ttft, float(np.nanmedian(model.tpot_s) / np.nanmedian(live.tpot_s))


def agree(found: tuple[float, float]) -> bool:
    """Return whether both are within their bounds."""
    return all(low <= ratio <= high for ratio, (low, high) in zip(found, (TTFT_RANGE, TPOT_RANGE), strict=True))


def scaled(timing: Timing, factor: float) -> Timing:
    """Return a timing whose durations are `factor` times as long."""

    def of(value: Any) -> Any:
        if isinstance(value, str) and value[0].isdigit():
            return f"{duration_s(value) * factor * 1e6:.9g} us"
        return value

    return {part: {name: of(value) for name, value in entries.items()} for part, entries in timing.items()}


def test_predicted_times_agree_with_measured_ones(pair: Pair, tmp_path: Path) -> None:
    """One load, half of the simulated capacity: right within the bounds, and not with times of another size."""
    timed, seen = TimedPair(pair.model, pair.prefill, pair.decode), []
    options = ("--max-prompt-tokens", "1500", "--max-batch", "8", "--step-tokens", str(STEP_TOKENS))
    for attempt in range(ATTEMPTS):
        timing, _ = measured_timing(timed, *options, "--repeats", "2", both_busy=False)
        link = measured_link(timed, repeats=1)
        text = cluster_text(timed, timing, link)
        trace = trace_of(REQUESTS, capacity_per_s(text) / 2, seed=attempt)
        folder = tmp_path / str(attempt)
        folder.mkdir()
        with gateway_of(text, folder) as url:
            live = played(url, trace, seed=100_000 + 1_000 * attempt)
        seen.append(ratios(predicted(text, trace), live))
        wrong = [ratios(predicted(cluster_text(timed, scaled(timing, by), link), trace), live) for by in (2.0, 0.5)]
        if agree(seen[-1]) and not any(map(agree, wrong)):
            return
    pytest.fail(f"predicted to measured medians of TTFT and TPOT, by attempt: {seen}")
