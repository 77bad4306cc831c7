"""Block hashes in event logs: hashed again with a new key per log, so that a reader cannot test guesses of a prompt.

Equal hashes stay equal and different hashes stay different, so a log replays as it was recorded. Nothing else can be
derived from them without the key. The function is SipHash-2-4 (Aumasson and Bernstein 2012) with a 128-bit key, applied
to each 64-bit hash.
"""

from __future__ import annotations

import secrets

import msgspec
import numpy as np
import numpy.typing as npt

from kvroute.compiled import compiled
from kvroute.types import (
    Arrived,
    CopyPrefix,
    Decision,
    Event,
    KvEvicted,
    KvStored,
    PeerBooking,
    PeerEvent,
    PeerReported,
    SessionsServed,
)

Hashes = npt.NDArray[np.uint64]

KEY_BYTES = 16
_INITIAL = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)
_LENGTH_BLOCK = np.uint64(8 << 56)
"""The last block of a message of eight bytes."""
_FINAL = np.uint64(0xFF)
_13, _16, _17, _21, _32 = (np.uint64(bits) for bits in (13, 16, 17, 21, 32))
_51, _48, _47, _43 = (np.uint64(64 - bits) for bits in (13, 16, 17, 21))


@compiled
def _siphash(messages: Hashes, start: Hashes, out: Hashes) -> None:
    """Fill `out` [n] with the SipHash-2-4 of each of `messages` [n]. `start` [4] is the initial state from the key."""
    for i in range(len(messages)):
        message = messages[i]
        v0, v1, v2, v3 = start[0], start[1], start[2], start[3] ^ message
        for step in range(8):
            if step == 2:
                v0 ^= message
                v3 ^= _LENGTH_BLOCK
            elif step == 4:
                v0 ^= _LENGTH_BLOCK
                v2 ^= _FINAL
            v0 += v1
            v1 = ((v1 << _13) | (v1 >> _51)) ^ v0
            v0 = (v0 << _32) | (v0 >> _32)
            v2 += v3
            v3 = ((v3 << _16) | (v3 >> _48)) ^ v2
            v0 += v3
            v3 = ((v3 << _21) | (v3 >> _43)) ^ v0
            v2 += v1
            v1 = ((v1 << _17) | (v1 >> _47)) ^ v2
            v2 = (v2 << _32) | (v2 >> _32)
        out[i] = v0 ^ v1 ^ v2 ^ v3


class LogHashing:
    """Rewrites the block hashes in logged events and decisions with one key, which is stored nowhere else."""

    def __init__(self, key: bytes | None = None) -> None:
        """Args: `key` of KEY_BYTES bytes; None: a random key."""
        key = secrets.token_bytes(KEY_BYTES) if key is None else key
        assert len(key) == KEY_BYTES
        words = np.frombuffer(key, dtype="<u8").astype(np.uint64)
        self._start: Hashes = np.array(_INITIAL, dtype=np.uint64) ^ np.array([*words, *words], dtype=np.uint64)

    def blocks(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        """Hash each unsigned 64-bit number."""
        if not blocks:
            return blocks
        out: Hashes = np.empty(len(blocks), dtype=np.uint64)
        _siphash(np.array(blocks, dtype=np.uint64), self._start, out)
        return tuple(out.tolist())

    def event(self, event: Event) -> Event:
        """The event with its block hashes rewritten."""
        match event:
            case Arrived(request=request):
                session = self.blocks((request.session,))[0] if request.session else 0
                keyed = msgspec.structs.replace(request, blocks=self.blocks(request.blocks), session=session)
                return msgspec.structs.replace(event, request=keyed)
            case KvStored() | KvEvicted():
                return msgspec.structs.replace(event, blocks=self.blocks(event.blocks))
            case SessionsServed():
                return self._sessions(event)
            case PeerReported(report=report):
                keyed_events = tuple([self._peer_event(event) for event in report.events])
                bookings = tuple([self._booking(booking) for booking in report.bookings])
                keyed_report = msgspec.structs.replace(report, events=keyed_events, bookings=bookings)
                return msgspec.structs.replace(event, report=keyed_report)
            case _:
                return event

    def _peer_event(self, event: PeerEvent) -> PeerEvent:
        match event:
            case KvStored():
                return msgspec.structs.replace(event, blocks=self.blocks(event.blocks))
            case SessionsServed():
                return self._sessions(event)
            case _:
                return event

    def _booking(self, booking: PeerBooking) -> PeerBooking:
        if not booking.session:
            return booking
        return msgspec.structs.replace(booking, session=self.blocks((booking.session,))[0])

    def _sessions(self, event: SessionsServed) -> SessionsServed:
        keyed = self.blocks(tuple([session for session, *_ in event.sessions]))
        sessions = tuple([(key, *names) for key, (_, *names) in zip(keyed, event.sessions, strict=True)])
        return msgspec.structs.replace(event, sessions=sessions)

    def decisions(self, decisions: tuple[Decision, ...]) -> tuple[Decision, ...]:
        """The decisions with their block hashes rewritten."""
        if not any(isinstance(decision, CopyPrefix) for decision in decisions):
            return decisions
        return tuple(
            msgspec.structs.replace(decision, blocks=self.blocks(decision.blocks))
            if isinstance(decision, CopyPrefix)
            else decision
            for decision in decisions
        )
