"""A second decode policy beside the acting one: it gets the same inputs, and its choices are only reported.

It never acts: transfers, load and caches are those of the acting policy's choices.
"""

from __future__ import annotations

import msgspec

from kvroute.control.choice.decode_choice import DecodeChoice
from kvroute.control.offers import DecodePick
from kvroute.control.view import PoolKey
from kvroute.policies import DecodePolicy
from kvroute.types import Choice, Decode, Reject, Request, Shadowed, Terms


class ShadowPolicy:
    """Evaluates the shadow policy for every decode decision of the acting policy."""

    def __init__(self, choice: DecodeChoice, policy: DecodePolicy) -> None:
        self._choice, self._policy = choice, policy

    def evaluate(self, request: Request, key: PoolKey, source: int, pick: DecodePick, at: float) -> Shadowed:
        """Return the shadow policy's choice at the moment of `pick`. Call it before that choice is booked."""
        choice = self._choice.by_policy(self._policy, request, key, source, pick.candidates, at, pick.usable)
        if isinstance(choice, Reject):
            return Shadowed("")
        acting = pick.choice
        return Shadowed(
            acting.terms.names[choice.index],
            loss_s=_more_s(acting.terms, choice, acting),
            gain_s=_more_s(choice.terms, acting, choice),
        )


class ShadowTally(msgspec.Struct):
    """How often the shadow policy would have chosen differently, and by how many predicted seconds."""

    policy: str
    decisions: int = 0
    """Number of decode decisions that the shadow policy evaluated."""
    differ: int = 0
    """Number of decisions where it would have chosen another instance or rejected the request."""
    refused: int = 0
    loss_s: float = 0.0
    """Sum of the extra cost of its choices by the acting policy's terms; 0 if these are not in seconds."""
    gain_s: float = 0.0
    """Sum of the cost that its choices save by its own terms."""

    def decided(self, decision: Decode) -> None:
        """Count one more decision. Does nothing if it was made without a shadow policy."""
        shadow = decision.shadow
        if shadow is None:
            return
        self.decisions += 1
        self.refused += not shadow.target
        if shadow.target != decision.target:
            self.differ += 1
            self.loss_s += shadow.loss_s or 0.0
            self.gain_s += shadow.gain_s or 0.0


def _more_s(terms: Terms, one: Choice, other: Choice) -> float | None:
    """Seconds by which the terms price `one` above `other`; None if they are not in seconds."""
    if terms.unit != "s":
        return None
    return float(terms.cost[one.index] - terms.cost[other.index])
