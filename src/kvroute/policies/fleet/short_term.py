"""How the routing threshold follows measurements of a link: the settings of the short-term part of PrfaaS 3.4.3."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from kvroute.types import InputError

Rule = Literal["auto", "scarce", "abundant"]


class ShortTerm(msgspec.Struct, frozen=True, kw_only=True):
    """How the routing threshold follows measurements."""

    enabled: bool = True
    """False: the threshold stays at its base."""
    utilisation_high: float = 0.95
    """Egress utilisation at or above which the threshold rises."""
    utilisation_low: float = 0.8
    """Egress utilisation at or below which it may fall back."""
    queue_high_s: float = 5.0
    """Seconds of queued work at the PrfaaS site, for prefill or for egress, at or above which the threshold rises."""
    queue_low_s: float = 1.0
    """Seconds of queued work at or below which it may fall back."""
    step: float = 1.1
    """Factor of one step."""
    dwell_s: float = 2.0
    """Minimum time between two steps: the effect of one step must show in the measurements before the next."""
    remember_s: float = 60.0
    """A step down is a mistake if the threshold has to rise again within this time. It is not repeated for this time,
    which doubles with each further mistake."""
    threshold_min_tokens: float = 1_000.0
    threshold_max_tokens: float = 1_000_000.0

    def __post_init__(self) -> None:
        check_band("offload.short_term.utilisation", self.utilisation_low, self.utilisation_high, 1.0)
        check_band("offload.short_term.queue", self.queue_low_s, self.queue_high_s, math.inf, unit="_s")
        if not 1.0 < self.step < math.inf:
            raise InputError(f"{self.step} is not a factor above 1", where="offload.short_term.step", hint="try 1.1")
        for name, value_s in (("dwell_s", self.dwell_s), ("remember_s", self.remember_s)):
            if not 0.0 <= value_s < math.inf:
                what = f"{value_s} is not a time of 0 or more"
                raise InputError(what, where=f"offload.short_term.{name}", hint="give seconds")
        if not 0.0 < self.threshold_min_tokens <= self.threshold_max_tokens < math.inf:
            what = f"thresholds from {self.threshold_min_tokens} to {self.threshold_max_tokens} are not a valid range"
            hint = "use 0 < threshold_min_tokens <= threshold_max_tokens"
            raise InputError(what, where="offload.short_term", hint=hint)

    def clamp(self, tokens: float) -> float:
        """The nearest threshold within the bounds."""
        return min(max(tokens, self.threshold_min_tokens), self.threshold_max_tokens)


def check_band(where: str, low: float, high: float, most: float, *, unit: str = "") -> None:
    """Raises InputError unless 0 <= low < high <= most and high is finite: without a gap there is no hysteresis."""
    if not (0.0 <= low < high <= most and high < math.inf):
        upper = f" <= {most:g}" if most < math.inf else ""
        hint = f"use 0 <= low < high{upper}"
        raise InputError(f"low{unit} {low} and high{unit} {high} leave no gap between them", where=where, hint=hint)
