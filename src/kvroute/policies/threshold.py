"""What is measured on a link between datacenters moves: the routing threshold and whether bandwidth is scarce.

The short-term half of PrfaaS 3.4.3: state machines that see a link's utilisation and its queues, and own no clock.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from kvroute.types import InputError

Rule = Literal["auto", "scarce", "abundant"]

_RESOLUTION = 1.02
"""Thresholds nearer to each other than this factor route alike: too near for another step."""
_PATIENCE_MAX = 16
"""A mistake that repeats itself is remembered for so many times `remember_s` at most."""


class ShortTerm(msgspec.Struct, frozen=True, kw_only=True):
    """How the routing threshold follows what is measured."""

    enabled: bool = True
    """False: the threshold stays at its base."""
    utilisation_high: float = 0.95
    """Egress utilisation from which the threshold rises."""
    utilisation_low: float = 0.8
    """Egress utilisation up to which it may fall back."""
    queue_high_s: float = 5.0
    """Seconds of work that wait at the PrfaaS site, for prefill or for egress, from which the threshold rises."""
    queue_low_s: float = 1.0
    """Seconds of work up to which it may fall back."""
    step: float = 1.1
    """Factor of one move."""
    dwell_s: float = 2.0
    """Shortest time between two moves: what one move does must show in the measurements before the next."""
    remember_s: float = 60.0
    """A fall that the high-water mark answers within this time was a mistake; it is not repeated for this time, twice
    as long when it was a mistake again, and so on."""
    threshold_min_tokens: float = 1_000.0
    threshold_max_tokens: float = 1_000_000.0

    def __post_init__(self) -> None:
        check_band("offload.short_term.utilisation", self.utilisation_low, self.utilisation_high, 1.0)
        check_band("offload.short_term.queue", self.queue_low_s, self.queue_high_s, math.inf, unit="_s")
        if not 1.0 < self.step < math.inf:
            raise InputError(f"{self.step} is no factor above 1", where="offload.short_term.step", mend="try 1.1")
        for name, value_s in (("dwell_s", self.dwell_s), ("remember_s", self.remember_s)):
            if not 0.0 <= value_s < math.inf:
                what = f"{value_s} is no time of zero or more"
                raise InputError(what, where=f"offload.short_term.{name}", mend="give seconds")
        if not 0.0 < self.threshold_min_tokens <= self.threshold_max_tokens < math.inf:
            what = f"thresholds from {self.threshold_min_tokens} to {self.threshold_max_tokens} are no range above 0"
            mend = "use 0 < threshold_min_tokens <= threshold_max_tokens"
            raise InputError(what, where="offload.short_term", mend=mend)

    def clamp(self, tokens: float) -> float:
        """The nearest threshold within the bounds."""
        return min(max(tokens, self.threshold_min_tokens), self.threshold_max_tokens)


def check_band(where: str, low: float, high: float, most: float, *, unit: str = "") -> None:
    """Raises InputError unless 0 <= low < high <= most and high is finite: without a gap there is no hysteresis."""
    if not (0.0 <= low < high <= most and high < math.inf):
        upper = f" <= {most:g}" if most < math.inf else ""
        mend = f"use 0 <= low < high{upper}"
        raise InputError(f"low{unit} {low} and high{unit} {high} leave no band between them", where=where, mend=mend)


class Threshold:
    """The routing threshold of one PrfaaS site, tokens: requests with a longer uncached part may go there.

    It rises by `step` when the link or the site's queue reaches a high-water mark, and falls back to its base when both
    are at a low-water mark or below. In between it holds. Four rules beyond the publication keep it from doing harm:

    - it does not rise where the home has a queue above its low-water mark, and falls when that surges: a long prompt
      takes the home longest, so that an overload of everything would else be made worse (with `home_queue_s` left at
      0 neither ever happens);
    - while the home surges it falls on, below its base, and returns when the home is quiet: as far as it can where the
      site is quiet, for a home has a backlog after an outage that only the site can take new work from; else as far as
      `keep_tokens`, for in an overload of everything somebody will not be answered in time, better few than many;
    - it rises no further than `limit` says: more would be more than the home keeps up with;
    - where traffic is so lumpy that one step jumps over the whole band, a step down that proved wrong is taken back
      and remembered: the gap is halved instead (in the logarithm), and at last left alone for a while.
    """

    __slots__ = (
        "_base",
        "_fell_at",
        "_fell_from",
        "_limit",
        "_mistake",
        "_mistake_at",
        "_moved_at",
        "_patience",
        "_spec",
        "tokens",
        "up",
    )

    def __init__(self, spec: ShortTerm, base_tokens: float) -> None:
        self._spec = spec
        self._base = spec.clamp(base_tokens)
        self.tokens = self._base
        """The threshold now. Read it; `observe`, `rebase` and `set_up` change it."""
        self.up = True
        """Whether the link carries anything; while it does not, everything stays at home and nothing is learned."""
        self._limit = math.inf
        self._moved_at: float | None = None
        self._fell_at: float | None = None
        self._fell_from = self._base
        self._mistake = 0.0  # a threshold that proved too low; 0: none did
        self._mistake_at = 0.0
        self._patience = 1

    @property
    def base_tokens(self) -> float:
        """The searched threshold, where it returns when all is quiet."""
        return self._base

    def observe(
        self,
        at: float,
        utilisation: float,
        queue_s: float,
        home_queue_s: float = 0.0,
        keep_tokens: float = math.inf,
    ) -> float:
        """Take note of one measurement; the threshold from now on.

        Args:
            at: seconds, never falling.
            utilisation: of the site's egress, 0 to about 1.
            queue_s: work that waits at the site, for prefill or for egress.
            home_queue_s: prefill work that waits at home; 0 follows the publication.
            keep_tokens: prompts up to here shall be answered in time even in an overload of everything.
        """
        if self.up and self._spec.enabled and (self._moved_at is None or at - self._moved_at >= self._spec.dwell_s):
            surges, quiet = self._surges(utilisation, queue_s), self._quiet(utilisation, queue_s)
            home_quiet = home_queue_s <= self._spec.queue_low_s
            if home_queue_s >= self._spec.queue_high_s:
                self._relieve(at, self._spec.clamp(0.0 if quiet else min(self._base, keep_tokens)), surges)
            elif self.tokens < self._base:
                if home_quiet:
                    self._move(at, min(self.tokens * self._spec.step, self._base))
            elif surges and home_quiet:
                self._rise(at)
            elif quiet:
                self._fall(at)
        return self.tokens

    def limit(self, tokens: float) -> None:
        """It rises no further from now on, but for its base; one that stands higher stays."""
        self._limit = tokens

    def rebase(self, tokens: float) -> float:
        """A new search has found this base; the threshold from now on.

        A threshold that stood at its base follows it; one that had risen, or fallen below, stays where it is, but for
        a base beyond it.
        """
        before, self._base = self._base, self._spec.clamp(tokens)
        if self.tokens == before:
            self.tokens = self._base
        else:
            self.tokens = (min if self.tokens < before else max)(self.tokens, self._base)
        if max(self._base, before) >= _RESOLUTION * min(self._base, before):
            self._mistake, self._patience = 0.0, 1
        return self.tokens

    def resume(self, tokens: float, base_tokens: float | None) -> None:
        """Go on where another one was: at `tokens`, with its base or, None, with the own one."""
        if base_tokens is not None:
            self._base = self._spec.clamp(base_tokens)
        self.tokens = max(self._spec.clamp(tokens), self._base)

    def set_up(self, up: bool) -> None:
        """The link or the site is down, or back: then it starts again from its base."""
        if up and not self.up:
            self.tokens = self._base
            self._forget()
        self.up = up

    def _surges(self, utilisation: float, queue_s: float) -> bool:
        return utilisation >= self._spec.utilisation_high or queue_s >= self._spec.queue_high_s

    def _quiet(self, utilisation: float, queue_s: float) -> bool:
        return utilisation <= self._spec.utilisation_low and queue_s <= self._spec.queue_low_s

    def _relieve(self, at: float, floor: float, surges: bool) -> None:
        """The home surges: down to the base, on to `floor`, and back there where the site surges, too."""
        if self.tokens > self._base:
            self._fall(at)
        elif self.tokens > floor:
            self._move(at, max(self.tokens / self._spec.step, floor))
        elif surges:
            self._move(at, min(self.tokens * self._spec.step, floor))

    def _rise(self, at: float) -> None:
        target = self.tokens * self._spec.step
        fell = self._fell_at is not None and at - self._fell_at <= self._spec.remember_s
        if fell and self._fell_from > self.tokens:
            target = self._fell_from
            self._patience = min(2 * self._patience, _PATIENCE_MAX) if self._mistake else 1
            self._mistake, self._mistake_at = self.tokens, at
        self._fell_at = None
        self._move(at, max(min(self._spec.clamp(target), max(self._limit, self._base)), self.tokens))

    def _fall(self, at: float) -> None:
        target = max(self._base, self.tokens / self._spec.step)
        if self.tokens <= self._mistake:
            self._mistake, self._patience = 0.0, 1  # times have changed: where it was a mistake to be, it is quiet
        if target <= self._mistake:
            if at - self._mistake_at >= self._spec.remember_s * self._patience:
                target = max(self._base, self._mistake)
            else:
                target = math.sqrt(self._mistake * self.tokens)
                if self.tokens < _RESOLUTION * target:
                    return
        if target < self.tokens:
            self._fell_at, self._fell_from = at, self.tokens
            self._move(at, target)

    def _move(self, at: float, tokens: float) -> None:
        if tokens != self.tokens:
            self.tokens, self._moved_at = tokens, at

    def _forget(self) -> None:
        self._moved_at = self._fell_at = None
        self._mistake, self._patience = 0.0, 1


class Scarcity:
    """Whether a link's bandwidth is scarce, with hysteresis; scarce until something is measured."""

    __slots__ = ("_abundant_below", "_rule", "_scarce_above", "scarce")

    def __init__(self, rule: Rule, scarce_above: float, abundant_below: float) -> None:
        self._rule, self._scarce_above, self._abundant_below = rule, scarce_above, abundant_below
        self.scarce = rule != "abundant"
        """Read it; `observe` changes it."""

    def observe(self, utilisation: float) -> bool:
        """Take note of the link's utilisation, 0 to about 1; whether bandwidth is scarce from now on."""
        if self._rule == "auto":
            mark = self._abundant_below if self.scarce else self._scarce_above
            self.scarce = utilisation > mark
        return self.scarce
