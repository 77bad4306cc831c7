"""A feature of the dispatcher: what it may change before an instance is chosen, and what it may add afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Generic, Literal, TypeAlias, TypeVar

import msgspec

from kvroute.control.booking import Booking
from kvroute.policies import PrefillCandidates, preferred
from kvroute.types import (
    BoolArray,
    Candidates,
    Choice,
    Decision,
    Decode,
    FloatArray,
    IntArray,
    Prefill,
    Reject,
    Request,
)

Leg: TypeAlias = Literal["prefill", "decode"]
PREFILL: tuple[Leg, ...] = ("prefill",)
BOTH_LEGS: tuple[Leg, ...] = ("prefill", "decode")


class DecodePick(msgspec.Struct, frozen=True, gc=False):
    """A chosen decode instance, and the candidates it was chosen from."""

    choice: Choice
    candidates: Candidates
    tier: int
    usable: BoolArray | None = None
    """Instances that were up and not to be avoided; None: all."""


class Offer(msgspec.Struct, gc=False):
    """The prefill instances that are offered to a request. Features change it in turn, before the choice."""

    booking: Booking
    at: float
    candidates: PrefillCandidates
    """With what the features before have added to their times and cached tokens."""
    layerwise: bool
    """Whether the KV cache will be sent layer by layer while the prefill runs."""
    without_fetches: PrefillCandidates | None = None
    """The candidates without the prefixes that they would fetch from others; None: they would fetch none."""
    stored_tokens: IntArray | None = None
    """Cached tokens that each candidate would read from the store; None: none would."""
    copy_source: int = -1
    """Index in the cluster of the instance whose longer prefix is copied from another site; -1: no copy."""
    prefix_tokens: int = 0
    """Tokens that are cached once that copy is complete."""
    further_s: dict[str, FloatArray] = {}
    """Seconds by which a candidate counts as slower or faster beyond the policy's cost, by name of the term."""

    def preferred(self, choice: Choice) -> Choice:
        """Return the choice of a policy with those of the terms `further_s` that the policy has not used itself."""
        further_s = {name: term_s for name, term_s in self.further_s.items() if name not in choice.terms.parts}
        return preferred(choice, further_s) if further_s else choice


class Placed(msgspec.Struct, gc=False):
    """A leg whose instance has been chosen. Features complete its decision."""

    at: float
    leg: Leg
    position: int
    """Position of the instance in its pool."""
    instance: str
    hit_tokens: int
    """Tokens of the prompt that are cached there, or will be when the prefill begins."""
    decision: Prefill | Decode
    offer: Offer | None = None
    """What the instance was chosen from; None: a decode instance, or one that serves an aggregated request."""
    pick: DecodePick | Reject | None = None
    """The decode instance that is chosen together with a prefill; None: it is chosen after the prefill."""
    due_later: bool = False
    """Whether the decision about `pick` is due after the prefill."""
    further: tuple[Decision, ...] = ()
    """Decisions that follow that of a prefill."""

    def add_term(self, name: str, term_s: FloatArray) -> None:
        """Add a term to the decision, if that has terms. Only some candidates are in them, in another order, if both
        legs were chosen at once. Args: `term_s`: of every candidate of the offer."""
        terms = self.decision.terms
        if terms is not None and self.offer is not None:
            position = {instance: number for number, instance in enumerate(self.offer.candidates.names)}
            term_s = term_s[[position[instance] for instance in terms.names]]
            terms = msgspec.structs.replace(terms, parts=terms.parts | {name: term_s})
            self.decision = msgspec.structs.replace(self.decision, terms=terms)


Offered = TypeVar("Offered")


class Feature(Generic[Offered]):
    """Something that changes where requests are sent, and that keeps its own account of it.

    `features_of` has the list. Before a prefill instance is chosen, `offer` of each feature is called in the order of
    the list; afterwards `attach` of each, in the opposite order. Decode instances, and instances that serve a request
    alone, are not offered through features, but `decode_term` and `attach` are called for them, too. A method that a
    feature does not define does nothing.
    """

    __slots__ = ()
    legs: ClassVar[tuple[Leg, ...]] = PREFILL
    """The legs that it attaches to: a prefill, or both."""

    def offer(self, offer: Offer) -> Offered | None:
        """Change what is offered to a request. Return what `attach` needs for this request; None: nothing."""
        return None

    def decode_term(self, request: Request, names: Sequence[str]) -> tuple[str, FloatArray] | None:
        """Return a term and its seconds for each decode instance, by which it counts as slower or faster beyond the
        policy's cost; None: there is none. Only features of both legs are asked."""
        return None

    def attach(self, booking: Booking, placed: Placed, offered: Offered | None) -> Reject | None:
        """Record a leg, and complete its decision. A prefill that was offered is not booked yet, so this may still
        reject it; features that do so are at the end of the list, before the others have recorded anything.

        Args:
            booking: the request.
            placed: the leg and its instance.
            offered: what `offer` has returned; None, too, if `placed.offer` is None.
        """
        return None

    def release(self, booking: Booking, at: float) -> None:
        """End what the prefill of a request waits for: it has finished or failed, or the request has left."""
