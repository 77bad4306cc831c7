"""State that follows measurements of a link between datacenters: the routing threshold and the scarcity of bandwidth.

The short-term part of PrfaaS 3.4.3: state machines without a clock, driven by a link's utilisation and queues.
"""

from __future__ import annotations

import math

from kvroute.policies.fleet.offload import OffloadSpec
from kvroute.policies.fleet.short_term import Rule, ShortTerm

_RESOLUTION = 1.02
"""Thresholds that differ by less than this factor route alike, so no further step is made between them."""
_PATIENCE_MAX = 16
"""Maximum multiple of `remember_s` for which a repeated mistake is remembered."""


def threshold_of(spec: OffloadSpec) -> Threshold:
    """Return a new threshold for one PrfaaS site. If none is given, it starts at the upper bound: no request is
    offloaded before a search has seen `start_requests` requests."""
    given = spec.threshold_tokens
    return Threshold(spec.short_term, spec.short_term.threshold_max_tokens if given is None else given)


def scarcity_of(spec: OffloadSpec) -> Scarcity:
    """Return a new scarcity state for the bandwidth of one PrfaaS site."""
    return Scarcity(spec.rule, spec.scarce_above, spec.abundant_below)


class Threshold:
    """The routing threshold of one PrfaaS site, in tokens: requests with a longer uncached part may be prefilled there.

    It rises by `step` when the link or the site's queue reaches a high-water mark, and falls back to its base when both
    are at a low-water mark or below. In between it does not change. Four rules beyond the publication:

    - It does not rise while the home's queue is above its low-water mark, and falls when that queue reaches its
      high-water mark (the home surges). A long prompt takes longest at home, so a rise would make a general overload
      worse. With `home_queue_s` of 0 neither happens.
    - While the home surges it falls further, below its base, and returns when the home is quiet. If the site is quiet,
      it falls as far as it can: after an outage the home has a backlog, and only the site can take new work. Otherwise
      it falls to `keep_tokens`: in a general overload some requests are late in any case, and this keeps them few.
    - It rises no further than `limit`: above that, the home cannot keep up.
    - If traffic is so uneven that one step jumps over the whole band, a step down that proved wrong is reversed and
      remembered. The next steps halve the gap (in the logarithm), and then stop for a while.
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
        """The present threshold. Read only; `observe`, `rebase` and `set_up` change it."""
        self.up = True
        """Whether the link works. While it does not, all requests stay at home and the threshold does not change."""
        self._limit = math.inf
        self._moved_at: float | None = None
        self._fell_at: float | None = None
        self._fell_from = self._base
        self._mistake = 0.0  # a threshold that proved too low; 0: none
        self._mistake_at = 0.0
        self._patience = 1

    @property
    def base_tokens(self) -> float:
        """The searched threshold, to which `tokens` returns when load is low."""
        return self._base

    def observe(
        self,
        at: float,
        utilisation: float,
        queue_s: float,
        home_queue_s: float = 0.0,
        keep_tokens: float = math.inf,
    ) -> float:
        """Process one measurement and return the new threshold.

        Args:
            at: time in seconds, never decreasing.
            utilisation: of the site's egress, 0 to about 1.
            queue_s: queued work at the site, for prefill or for egress.
            home_queue_s: queued prefill work at home; 0 gives the behaviour of the publication.
            keep_tokens: prompts up to this length are to be answered in time even in a general overload.
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
        """Set the maximum for further rises. The base and a threshold that is already higher are not limited."""
        self._limit = tokens

    def rebase(self, tokens: float) -> float:
        """Set the base that a new search has found; return the new threshold.

        A threshold equal to the old base follows it. One that has risen above it, or fallen below, is kept unless the
        new base is beyond it.
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
        """Restore another instance's threshold `tokens`, with its base or, if None, with the own base."""
        if base_tokens is not None:
            self._base = self._spec.clamp(base_tokens)
        self.tokens = max(self._spec.clamp(tokens), self._base)

    def set_up(self, up: bool) -> None:
        """Set whether link and site are up. When they come back, the threshold starts again from its base."""
        if up and not self.up:
            self.tokens = self._base
            self._forget()
        self.up = up

    def _surges(self, utilisation: float, queue_s: float) -> bool:
        return utilisation >= self._spec.utilisation_high or queue_s >= self._spec.queue_high_s

    def _quiet(self, utilisation: float, queue_s: float) -> bool:
        return utilisation <= self._spec.utilisation_low and queue_s <= self._spec.queue_low_s

    def _relieve(self, at: float, floor: float, surges: bool) -> None:
        """The home surges: fall to the base, then to `floor`; rise back to `floor` if the site surges too."""
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
            self._mistake, self._patience = 0.0, 1  # the former mistake is now quiet: traffic has changed
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
    """Whether a link's bandwidth is scarce, with hysteresis; scarce until the first measurement."""

    __slots__ = ("_abundant_below", "_rule", "_scarce_above", "scarce")

    def __init__(self, rule: Rule, scarce_above: float, abundant_below: float) -> None:
        self._rule, self._scarce_above, self._abundant_below = rule, scarce_above, abundant_below
        self.scarce = rule != "abundant"
        """Read only; `observe` changes it."""

    def observe(self, utilisation: float) -> bool:
        """Process the link's utilisation, 0 to about 1; return whether bandwidth is scarce from now on."""
        if self._rule == "auto":
            mark = self._abundant_below if self.scarce else self._scarce_above
            self.scarce = utilisation > mark
        return self.scarce
