"""Which instances have served each session last."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvroute.control.booking import Booking
from kvroute.control.offers import BOTH_LEGS, Feature, Leg, Offer, Placed
from kvroute.types import FloatArray, Request

SESSIONS_MAX = 1 << 16
"""Number of sessions that are remembered; beyond it the one that was served longest ago is forgotten."""


class Sessions(Feature[None]):
    """The last instance of each session, for prefill and for decode."""

    legs = BOTH_LEGS
    __slots__ = ("_last", "bonus_s")

    def __init__(self, bonus_s: float) -> None:
        """Args: `bonus_s`: seconds by which that instance may cost more than another one and is still chosen."""
        self.bonus_s = bonus_s
        self._last: dict[int, dict[Leg, str]] = {}

    def __len__(self) -> int:
        """Number of sessions that are remembered."""
        return len(self._last)

    def offer(self, offer: Offer) -> None:
        """Let the instance that prefilled for the request's session last cost more than another one."""
        term_s = self.term_s(offer.booking.request.session, "prefill", offer.candidates.names)
        if term_s is not None:
            offer.further_s["session_s"] = term_s

    def decode_term(self, request: Request, names: Sequence[str]) -> tuple[str, FloatArray] | None:
        """Return minus the bonus of the instance that decoded for the request's session last, as `session_s`."""
        term_s = self.term_s(request.session, "decode", names) if request.session else None
        return None if term_s is None else ("session_s", term_s)

    def attach(self, booking: Booking, placed: Placed, offered: None) -> None:
        """See Feature."""
        self.served(booking.request.session, placed.leg, placed.instance)

    def take_over(self, old: Sessions) -> None:
        """Continue with the sessions of the cluster before. Args: `old`: they are not used any more."""
        self._last = old._last

    def served(self, session: int, leg: Leg, instance: str) -> None:
        """Record that an instance was chosen for a leg of a request of this session (0: none)."""
        if not session or not self.bonus_s:
            return
        last = self._last.pop(session, None) or {}
        last[leg] = instance
        self._last[session] = last
        if len(self._last) > SESSIONS_MAX:
            del self._last[next(iter(self._last))]

    def learn(self, session: int, prefill: str, decode: str) -> None:
        """Record where a session was served by others; nothing if it is known already. Args: empty names: none."""
        if session not in self._last:
            if prefill:
                self.served(session, "prefill", prefill)
            if decode:
                self.served(session, "decode", decode)

    def known(self) -> list[tuple[int, str, str]]:
        """Return each session with its last instances for prefill and decode (empty: none), the last served one at the
        end."""
        return [(session, last.get("prefill", ""), last.get("decode", "")) for session, last in self._last.items()]

    def term_s(self, session: int, leg: Leg, names: Sequence[str]) -> FloatArray | None:
        """Return minus the bonus for the session's last instance and 0 for the others; None if there is none among
        them."""
        instance = self._last.get(session, {}).get(leg)
        if instance is None or instance not in names:
            return None
        term_s = np.zeros(len(names))
        term_s[names.index(instance)] = -self.bonus_s
        return term_s
