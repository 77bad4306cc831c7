"""Chooses the decode instance when a request arrives: for its prefill instance, or both at once. It books nothing."""

from __future__ import annotations

import numpy as np

from kvroute.control.booking import Booking
from kvroute.control.choice.decode_choice import DecodeChoice
from kvroute.control.offers import DecodePick, Feature, Offer, Placed
from kvroute.control.view import ClusterView
from kvroute.types import Choice, Reject, Terms

_JOINT_WIDTH = 4
"""Number of prefill instances whose decode instances are priced when both legs are chosen at once."""


class Partners:
    """Decode instances for the prefill instances of a view."""

    def __init__(self, view: ClusterView, decodes: DecodeChoice) -> None:
        self._view, self._decodes = view, decodes

    def partner(self, booking: Booking, at: float, position: int, *, early: bool = False) -> DecodePick | Reject | None:
        """The decode instance for this prefill instance. None if it decodes itself, or if the decode leg is decided
        later and not `early`."""
        index = int(self._view.prefill[booking.model].ids[position])
        instance = self._view.cluster.instances[index]
        if instance.role == "both" or not (instance.traits.concurrent_legs or booking.both_on_arrival or early):
            return None
        return self._decodes.choose(booking.request, (booking.model, instance.protocol), index, at, booking.avoid)

    def choose_both(self, offer: Offer, choice: Choice) -> tuple[Choice, DecodePick | Reject | None]:
        """Choose both legs at once.

        If both policies price in seconds, the choice is, of the few cheapest prefill instances, the one with the
        shortest total time. Otherwise it is the cheapest prefill instance with its best decode instance. A prefill
        instance is skipped if no decode instance has room for its request. One whose decode leg is decided later has no
        total price, so it is taken only if no other one can be.
        """
        booking, candidates, terms = offer.booking, offer.candidates, choice.terms
        usable: list[tuple[int, DecodePick]] = []
        later: Choice | None = None
        refused: Reject | None = None
        in_seconds = terms.unit == "s"
        for i in terms.cost.argsort(kind="stable").tolist():
            if not terms.feasible[i]:
                continue
            pick = self.partner(booking, offer.at, i)
            if isinstance(pick, Reject):
                refused = refused or pick
                continue
            if pick is None:
                later = later or Choice(i, terms)
                continue
            usable.append((i, pick))
            in_seconds = in_seconds and pick.choice.terms.unit == "s"
            if len(usable) == (_JOINT_WIDTH if in_seconds else 1):
                break
        if not usable:
            return (later, None) if later else (choice, refused)
        if not in_seconds:
            return Choice(usable[0][0], terms), usable[0][1]
        decode_s = [float(pick.choice.terms.cost[pick.choice.index]) for _, pick in usable]
        prefill_s = [float(candidates.pending_s[i] + candidates.prefill_s[i]) for i, _ in usable]
        if "session_s" in terms.parts:
            prefill_s = [
                seconds + float(terms.parts["session_s"][i]) for seconds, (i, _) in zip(prefill_s, usable, strict=True)
            ]
        whole_s = np.array(prefill_s) + np.array(decode_s)
        best = int(whole_s.argmin())
        parts = {"finish_s": np.array(prefill_s), "decode_path_s": np.array(decode_s)}
        names = tuple(candidates.names[i] for i, _ in usable)
        both = Terms(names, whole_s, np.ones(len(usable), dtype=np.bool_), parts)
        return Choice(usable[best][0], both), usable[best][1]


class LayerwiseTransfers(Feature[None]):
    """The feature that sends a KV cache layer by layer during the prefill: the decode instance is chosen on arrival.

    `Offer.layerwise` is set by the options and by the choice of another datacenter.
    """

    def __init__(self, partners: Partners) -> None:
        self._partners = partners

    def attach(self, booking: Booking, placed: Placed, offered: None) -> None:
        """See Feature. Without room on any decode instance now, one is chosen when the prefill is over."""
        if placed.offer is not None and placed.offer.layerwise:
            booking.early = True
            pick = self._partners.partner(booking, placed.at, placed.position, early=True)
            placed.pick = None if isinstance(pick, Reject) else pick
