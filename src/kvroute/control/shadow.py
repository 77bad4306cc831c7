"""A second decode policy beside the one that acts: it sees what that one saw, and what it would have done is reported.

It never acts: transfers, load and caches remain those of the acting policy's choices.
"""

from __future__ import annotations

import msgspec

from kvroute.control.view import DecodePick, PoolKey, View
from kvroute.policies import DecodePolicy
from kvroute.types import Choice, Decode, Reject, Request, Shadowed, Terms


class Shadow:
    """Asks a policy about every decode decision that another one has made."""

    def __init__(self, view: View, policy: DecodePolicy) -> None:
        self._view, self._policy = view, policy

    def beside(self, request: Request, key: PoolKey, source: int, pick: DecodePick, at: float) -> Shadowed:
        """What it would have chosen at the moment of `pick`; call it before that choice is booked."""
        choice = self._view.decode_choice(self._policy, request, key, source, pick.candidates, at, pick.usable)
        if isinstance(choice, Reject):
            return Shadowed("")
        acting = pick.choice
        return Shadowed(
            acting.terms.names[choice.index],
            loss_s=_more_s(acting.terms, choice, acting),
            gain_s=_more_s(choice.terms, acting, choice),
        )


class ShadowTally(msgspec.Struct):
    """How often a policy in the shadow would have chosen otherwise, and by how many predicted seconds."""

    policy: str
    decisions: int = 0
    """Decode decisions that it was asked about."""
    differ: int = 0
    """Where it would have chosen another instance, or nobody."""
    refused: int = 0
    loss_s: float = 0.0
    """Sum over those: what its choices cost more by the acting policy's terms; 0 where these are not in seconds."""
    gain_s: float = 0.0
    """What they cost less by its own."""

    def decided(self, decision: Decode) -> None:
        """One more decision; nothing where it was made without a shadow."""
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
    """Seconds by which these terms price one choice above another; None where they are not in seconds."""
    if terms.unit != "s":
        return None
    return float(terms.cost[one.index] - terms.cost[other.index])
