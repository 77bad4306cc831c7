"""Profiles of operators: known times are recovered, drafts shorten the time per token."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from kvroute.measurements.aiconfigurator import ModelledEngine, operator_profile
from kvroute.timing import fit_profile
from kvroute.types import InputError, LinearPrefill

ENGINE = ModelledEngine("h200_sxm", "vllm", "Qwen3-32B")


@dataclass
class LinearTimes:
    """Times in milliseconds, up to a longest prompt."""

    longest: int = 1_000_000

    def predict_prefill_latency(self, bs: int, isl: int, prefix: int = 0) -> float:
        """Return 20 ms and 0.03 ms per token."""
        if isl > self.longest:
            raise RuntimeError(f"perf database error: no data for {isl} at /usr/lib/data")
        return 20 + 0.03 * bs * (isl - prefix)

    def predict_decode_latency(self, bs: int, isl: int, osl: int = 2) -> float:
        """Return 8 ms, 0.2 ms per request and 15 ns per token of context."""
        return (osl - 1) * (8 + 0.2 * bs + 1.5e-5 * bs * isl)


def test_known_times_are_recovered() -> None:
    profile = operator_profile(ENGINE, LinearTimes(), 10_000, 100)
    assert profile.tokens.tolist() == [128, 256, 512, 1024, 2048, 4096, 8192, 10_000]
    assert np.unique(profile.batch).tolist() == [1, 2, 4, 8, 16, 32, 64, 100]
    prefill, decode = fit_profile(profile)
    assert prefill is not None
    assert decode is not None
    assert isinstance(prefill.spec, LinearPrefill)
    assert (prefill.spec.base_s, prefill.spec.per_token_s) == pytest.approx((0.02, 3e-5))
    found = (decode.spec.base_s, decode.spec.per_request_s, decode.spec.per_context_token_s)
    assert found == pytest.approx((8e-3, 2e-4, 1.5e-8))


def test_accepted_drafts_shorten_the_time_per_token() -> None:
    """Three drafts of which each is accepted with 0.5 give 1 + 0.5 + 0.25 + 0.125 tokens."""
    drafting = replace(ENGINE, drafts=3, acceptance=0.5)
    slow, fast = (operator_profile(engine, LinearTimes(), 1000, 4) for engine in (ENGINE, drafting))
    assert (slow.iteration_s / fast.iteration_s).tolist() == pytest.approx([1.875] * len(slow.iteration_s))
    assert fast.decode_remarks == ("steps with 3 drafts give 1.88 tokens",)


def test_a_size_without_times_is_one_sentence_without_paths() -> None:
    with pytest.raises(InputError, match=r"no times for this engine \(perf database error: no data for 8192\)"):
        operator_profile(ENGINE, LinearTimes(longest=5000), 10_000, 4)
