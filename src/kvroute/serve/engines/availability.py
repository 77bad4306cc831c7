"""Availability of one instance or WAN path: health checks, circuit breaker and administrative holds together."""

from __future__ import annotations

from collections.abc import Callable

from kvroute.serve.engines.breaker import Attempt, Breaker, Cause

NOT_COUNTED: Attempt = -1
"""The attempt of a request that has failed before: no breaker counts it, and it is not a half-open probe."""


class Availability:
    """Availability of an instance: health checks, circuit breaker, and holds (other reasons to send nothing).

    `on_change` is called at every change; a half-open breaker lets one request through and blocks others meanwhile.
    """

    def __init__(
        self,
        name: str,
        breaker: Breaker,
        on_change: Callable[[str, bool, float], None],
        *,
        up: bool = True,
        sharers: list[Availability] | None = None,
    ) -> None:
        """Args:

        name: of the instance.
        breaker: counts its failures; data-parallel ranks of one server have the same.
        on_change: called with (name, whether it is up, time).
        up: whether it takes requests before its first health check.
        sharers: the availabilities that use this breaker; this one is appended. None: no other does.
        """
        self.name, self.breaker, self.healthy = name, breaker, up
        self._sharers = sharers
        if sharers is not None:
            sharers.append(self)
        self.up = up
        self.present = up
        """False: no process listens there, or none has passed a health check yet."""
        self.ignored = False
        """Whether health checks and breaker are ignored because of a panic."""
        self.on_available: Callable[[float], None] | None = None
        """Called with the time at every change of `available` or `counted`."""
        self._seen = (up, up)
        self._held: set[str] = set()
        self._tried = False
        """Whether its breaker is not closed, so that every outcome may change the state."""
        self._on_change = on_change

    def started(self, now: float) -> Attempt:
        """Record that a request is being sent; its outcome is reported with the returned attempt."""
        attempt = self.breaker.started(now)
        if self._tried:
            self.refresh(now)
        return attempt

    def succeeded(self, attempt: Attempt, now: float) -> None:
        """Record a response, which may be a client error."""
        self.breaker.succeeded(attempt, now)
        if self._tried:
            self.refresh(now)

    def failed(self, attempt: Attempt, now: float, cause: Cause = "no_answer") -> None:
        """Record a failure."""
        self.breaker.failed(attempt, now, cause)
        self.refresh(now)

    def discount_failure(self, attempt: Attempt, now: float) -> None:
        """Record an error response that is the fault of the request."""
        self.breaker.discount_failure(attempt, now)
        if self._tried:
            self.refresh(now)

    def late_failure(self, now: float) -> Attempt:
        """Start an attempt for a request that fails after its success was reported; it is not a half-open probe."""
        return self.breaker.started(now) if self.breaker.state(now) == "closed" else NOT_COUNTED

    def cancelled(self, attempt: Attempt, now: float) -> None:
        """Record that the response was not needed any more."""
        self.breaker.cancelled(attempt, now)
        if self._tried:
            self.refresh(now)

    def set_healthy(self, healthy: bool, now: float, *, present: bool = True) -> None:
        """Set the result of the health checks; see `present`."""
        self.healthy, self.present = healthy, present
        self.refresh(now)

    def ignore_checks(self, ignored: bool, now: float) -> None:
        """Set whether health checks and breaker are ignored."""
        if ignored != self.ignored:
            self.ignored = ignored
            self.refresh(now)

    @property
    def available(self) -> bool:
        """Whether health checks and a closed breaker allow requests, and nothing holds the instance."""
        return self.healthy and not self._held and not self._tried

    @property
    def counted(self) -> bool:
        """Whether it counts for the panic threshold: it is not administratively down, and its process accepts
        connections."""
        return not self._held and (self.present or self.healthy)

    def hold(self, why: str, now: float) -> None:
        """Stop requests to the instance for this reason, possibly among others, until `release`."""
        self._held.add(why)
        self.refresh(now)

    def release(self, why: str, now: float) -> None:
        """Remove this reason, if present."""
        self._held.discard(why)
        self.refresh(now)

    @property
    def reason(self) -> str:
        """Why it gets no requests; empty: only its breaker may prevent them."""
        return ", ".join(["unhealthy"] * (not self.healthy) + sorted(self._held))

    def refresh(self, now: float) -> None:
        """Update the state and report changes; also called periodically, since an open breaker later allows a probe."""
        tried = self._tried
        self._update(now)
        if self._sharers and (tried or self._tried):
            for other in tuple(self._sharers):
                if other is not self:
                    other._update(now)

    def close(self) -> None:
        """Leave the other users of its breaker: the instance is gone."""
        if self._sharers is not None and self in self._sharers:
            self._sharers.remove(self)

    def _update(self, now: float) -> None:
        self._tried = self.breaker.state(now) != "closed"
        seen = self.available, self.counted
        if seen != self._seen:
            self._seen = seen
            if self.on_available is not None:
                self.on_available(now)  # before the change is reported: a panic may keep this instance up
        well = self.healthy and (not self._tried or self.breaker.allows(now))
        up = not self._held and (well or (self.ignored and self.present))
        if up != self.up:
            self.up = up
            self._on_change(self.name, up, now)
