"""The three workload profiles of NetKV VI-A, selected by prompt length; shared prefixes are drawn in
`share_prefixes`."""

from __future__ import annotations

from dataclasses import dataclass

from kvroute.sim.workload.shaping import filter_lengths
from kvroute.sim.workload.trace import Trace


@dataclass(frozen=True, slots=True)
class LengthProfile:
    """Bounds of the prompt length (inclusive), and the parameters that NetKV sets for this profile."""

    min_tokens: int
    max_tokens: int | None
    p_share: float
    """Probability that a request shares its prefix (`share_prefixes`)."""
    ttft_slo_s: float
    """TTFT limit of a good request, in seconds."""


PROFILES = {
    "chatbot": LengthProfile(min_tokens=1, max_tokens=8_192, p_share=0.3, ttft_slo_s=2.0),
    "rag": LengthProfile(min_tokens=4_096, max_tokens=65_536, p_share=0.7, ttft_slo_s=5.0),
    "long-context": LengthProfile(min_tokens=16_385, max_tokens=None, p_share=0.1, ttft_slo_s=10.0),
}


def apply_profile(trace: Trace, profile: LengthProfile) -> Trace:
    """Return the requests whose prompts fit; lengths, times and prefixes stay. Raises InputError if none fits."""
    return filter_lengths(trace, profile.min_tokens, profile.max_tokens)
