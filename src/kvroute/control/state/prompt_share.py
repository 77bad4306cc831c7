"""The share of its time that each instance spends on prompts, from the prompts booked there."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from kvroute.policies.foresight.sight import RECENT_S, recent_s
from kvroute.types import FloatArray, IntArray

_MOST = 0.9
"""Upper bound of a share: with more, decodes beside the prompts would hardly advance."""


@dataclass(slots=True)
class PromptShare:
    """Booked seconds of n instances, fading exponentially, as a share of the time in which they fade."""

    work_s: FloatArray
    since_s: float = -1.0
    """Time of the first prompt; below 0: there was none."""
    at_s: FloatArray = field(init=False)
    """Time at which each `work_s` was booked last."""

    def __post_init__(self) -> None:
        self.at_s = np.zeros(len(self.work_s))

    def add(self, position: int, at: float, seconds: float) -> None:
        """Count a prompt that is booked on an instance."""
        if self.since_s < 0:
            self.since_s = at
        faded = math.exp(min(float(self.at_s[position]) - at, 0.0) / RECENT_S)
        self.work_s[position] = float(self.work_s[position]) * faded + seconds
        self.at_s[position] = at

    def share(self, at: float) -> FloatArray:
        """Return the share of each instance, 0 to 0.9, [n]. Changes nothing."""
        faded: FloatArray = self.work_s * np.exp(np.minimum(self.at_s - at, 0.0) / RECENT_S)
        faded /= recent_s(self.since_s, at)
        return np.minimum(faded, _MOST)

    def take_over(self, old: PromptShare, here: IntArray, there: IntArray) -> None:
        """Continue with the shares of the instances that stay: at `there` before, at `here` now."""
        self.work_s[here], self.at_s[here] = old.work_s[there], old.at_s[there]
        self.since_s = old.since_s
