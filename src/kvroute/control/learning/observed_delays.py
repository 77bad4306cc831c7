"""How much longer or shorter recent delays of one kind were than predicted."""

from __future__ import annotations

from dataclasses import dataclass

_KEPT = 0.97
"""Share of the sums that remains after the next delay: about the last thirty count."""
_PRIOR_S = 2.0
"""Seconds that count as predicted correctly at the start."""


@dataclass(slots=True)
class ObservedDelays:
    """Fading sums of observed and of predicted seconds.

    Delays in progress count as soon as they are longer, in the mean, than those that have ended. Otherwise a network
    that becomes slow would be noticed only when the first slow transfer ends.
    """

    least: float
    most: float
    """Bounds of the factor."""
    observed_s: float = _PRIOR_S
    predicted_s: float = _PRIOR_S
    """Sums over the delays that have ended."""
    running: int = 0
    """Number of delays in progress."""
    began_s: float = 0.0
    """Sum of the times at which they began."""
    running_s: float = 0.0
    """Sum of their predictions."""

    def factor(self, at: float) -> float:
        """Return observed over predicted delays. Changes nothing."""
        factor = self.observed_s / self.predicted_s
        if self.running:
            factor = max(factor, (self.running * at - self.began_s) / (self.running_s + _PRIOR_S))
        return min(max(factor, self.least), self.most)

    def begin(self, at: float, predicted_s: float) -> None:
        """Count a delay in progress; it must end or be dropped. A prediction of 0 means that there is none: such a
        delay teaches nothing."""
        if predicted_s > 0.0:
            self._run(1, at, predicted_s)

    def drop(self, began_s: float, predicted_s: float) -> None:
        """Forget a delay in progress. Args: as given to `begin`."""
        if predicted_s > 0.0:
            self._run(-1, -began_s, -predicted_s)
            if not self.running:
                self.began_s = self.running_s = 0.0  # no rounding errors remain

    def end(self, at: float, began_s: float, predicted_s: float) -> None:
        """Learn from a delay in progress that has ended. Args: `began_s` and `predicted_s` as given to `begin`."""
        if predicted_s > 0.0:
            self.drop(began_s, predicted_s)
            self.learn(at - began_s, predicted_s)

    def learn(self, observed_s: float, predicted_s: float) -> None:
        """Learn from a delay that has ended and was not counted in progress."""
        if predicted_s > 0.0:
            self.observed_s = _KEPT * self.observed_s + max(observed_s, 0.0)
            self.predicted_s = _KEPT * self.predicted_s + predicted_s

    def _run(self, count: int, began_s: float, predicted_s: float) -> None:
        self.running += count
        self.began_s += began_s
        self.running_s += predicted_s
