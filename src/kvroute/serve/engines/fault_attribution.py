"""Decides whether a failure is the engine's fault or the request's, so that a poison request opens no circuit breaker.

An engine that cannot be reached or times out has failed. An error response (5xx), a connection that the engine drops
after the request was sent, and an invalid or empty response may also be the fault of the request. That verdict is
pending until another attempt of the same request decides it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from kvroute.serve.engines.availability import NOT_COUNTED

if TYPE_CHECKING:
    from kvroute.serve.engines.availability import Availability
    from kvroute.serve.engines.breaker import Attempt, Cause

LegName: TypeAlias = Literal["copy", "prefill", "decode", "passthrough"]

_CLIENT_GONE = 499


class FaultAttribution:
    """The failures of one request, from the first one on. All of them together count at most once.

    Only the first failure can count. If the request may have caused it, it counts as its `proven` cause once a later
    attempt succeeds. It does not count if a second instance fails in such a way too, or if the request turns out to be
    the client's error (4xx). If the request ends without either, for example because it must not be retried, the
    failure counts as `unexplained`.
    """

    __slots__ = ("_attempt", "_availability", "_failed_elsewhere", "_leg", "_new", "_proven")

    def __init__(self) -> None:
        self._new = True
        self._availability: Availability | None = None
        """The instance, or the path between datacenters, whose verdict is pending."""
        self._attempt: Attempt = NOT_COUNTED
        self._leg: LegName = "prefill"
        self._proven: Cause = "error"
        self._failed_elsewhere = False

    def failed(
        self,
        availability: Availability,
        attempt: Attempt,
        leg: LegName,
        now: float,
        *,
        uncertain: bool,
        proven: Cause = "error",
    ) -> None:
        """Report a failed attempt, which ends it.

        Args:
            availability: availability of the instance or path that has failed.
            attempt: number that `availability` gave to the attempt.
            leg: the leg that failed.
            now: the time.
            uncertain: whether the request may have caused the failure.
            proven: the cause as which such a failure counts once a later attempt succeeds.
        """
        if not self._new:
            availability.cancelled(attempt, now)
            if uncertain and availability is not self._availability:
                self._failed_elsewhere = True
            return
        self._new = False
        if uncertain:
            self._availability, self._attempt, self._leg, self._proven = availability, attempt, leg, proven
        else:
            availability.failed(attempt, now)

    def answered(self, leg: LegName, now: float) -> None:
        """Report a later attempt that has succeeded. A prefill proves nothing about a failed decode leg."""
        availability = self._availability
        if availability is not None and not (self._leg == "decode" and leg == "prefill"):
            self._availability = None
            availability.failed(self._attempt, now, self._proven)

    def ended(self, status: int, now: float) -> None:
        """Report the end of the request, with its status for the client."""
        availability, self._availability = self._availability, None
        if availability is None:
            return
        if status < 400:
            availability.failed(self._attempt, now, self._proven)
        elif self._failed_elsewhere or (400 <= status < 500 and status != _CLIENT_GONE):
            availability.discount_failure(self._attempt, now)
        elif status == _CLIENT_GONE:
            availability.cancelled(self._attempt, now)
        else:
            availability.failed(self._attempt, now, "unexplained")
