"""What gateways in front of one cluster tell each other about their bookings."""

from __future__ import annotations

import msgspec


class PeerBooking(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """All that a gateway has booked for one of its requests at one time. Names that are empty: nothing of this kind.

    It is a state and not a change, so a repeated one has no effect and the latest one is sufficient.
    """

    request_id: int
    prefill: str = ""
    """Instance where the prefill is in progress."""
    prefill_s: float = 0.0
    """Prefill time booked there, in seconds."""
    target: str = ""
    """Instance that decodes."""
    need_bytes: float = 0.0
    """KV memory booked there."""
    admitted: bool = False
    """Whether the request is part of the batch there."""
    source: str = ""
    """Instance from which the KV cache is in transfer to `target`."""
    kv_bytes: float = 0.0
    """KV bytes of this transfer."""
    session: int = 0
    """Hash of the client's session; 0: none, or sessions have no affinity."""

    @property
    def empty(self) -> bool:
        """Whether nothing is booked: the request has ended."""
        return not (self.prefill or self.target)


class AdmissionCounts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Requests that a gateway counts against the limits of admission."""

    group: str = ""
    """Gateways of the same group count each other's requests in another way: the workers of one machine."""
    in_flight: int = 0
    """Requests that were admitted and are not over."""
    queued: int = 0
    """Requests that wait."""
    keys: dict[str, int] = {}
    """Requests in flight and waiting of each API key whose number has changed since the report before; in a whole
    report, of every key that has some."""


class UsageCounts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a gateway has charged to API keys whose rates are limited."""

    group: str = ""
    """See `AdmissionCounts`."""
    keys: dict[str, tuple[int, int]] = {}
    """Requests and tokens charged since its start, by the names of the keys whose charges have changed since the report
    before; in a whole report, of every key."""
