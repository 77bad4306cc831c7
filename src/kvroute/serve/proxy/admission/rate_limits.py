"""Rate limits of API keys: token buckets for requests and for tokens. Pure: the caller passes the time.

A bucket holds the amount of one minute and is refilled steadily. A request is charged when it arrives, with its prompt
and a reserve for its output; what it has not used is given back when it ends. What other processes charge is taken from
the own buckets, so that all of them together keep to the rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

WAIT_MAX_S = 3_600
"""Longest time that a rejected client is asked to wait."""
_MINUTE_S = 60.0
_TOLERANCE = 1e-6
"""Rounding error of a bucket's level that counts as nothing."""
Limited: TypeAlias = Literal["requests", "tokens"]


class KeyRates(NamedTuple):
    """Limits of one key, per minute; None: no limit."""

    requests: int | None = None
    tokens: int | None = None


class KeyCharges(NamedTuple):
    """What the requests of one key have been charged, after refunds."""

    requests: int = 0
    tokens: int = 0


class OtherUsage(Protocol):
    """What other processes charge against the same limits."""

    def used_by(self, key: str) -> KeyCharges:
        """Return what the others have charged to a key since this process knows them; refunds reduce it."""
        ...

    def known_keys(self) -> Iterable[str]:
        """Return the keys to which the others charge something."""
        ...

    def write_used(self, key: str, used: KeyCharges) -> None:
        """Publish what this process has charged to a key since its start."""
        ...


class NoOthers:
    """An `OtherUsage` without other processes."""

    def used_by(self, key: str) -> KeyCharges:
        """See OtherUsage."""
        return _NOTHING

    def known_keys(self) -> Iterable[str]:
        """See OtherUsage."""
        return ()

    def write_used(self, key: str, used: KeyCharges) -> None:
        """See OtherUsage."""


_NOTHING: Final = KeyCharges()


@dataclass(frozen=True, slots=True)
class RateExceeded:
    """The request is rejected and not charged."""

    limited: Limited
    reason: str
    retry_after_s: int | None
    """Time after which the same request may be charged; None: its limit is too low for it at any time."""


class RateState(NamedTuple):
    """One bucket, for the headers of a response."""

    limited: Limited
    limit: int
    remaining: int
    reset_s: float
    """Time until the bucket is full."""


class TokenBucket:
    """An amount that is refilled at a constant rate up to one minute's worth. It may be in debt."""

    __slots__ = ("_at", "_level", "per_minute")

    def __init__(self, per_minute: int, now: float) -> None:
        """Start full."""
        self.per_minute = per_minute
        self._level, self._at = float(per_minute), now

    def level(self, now: float) -> float:
        """Return the amount at a time; a time before the last one counts as the last one."""
        if now > self._at:
            self._level = min(self._level + (now - self._at) * self.per_minute / _MINUTE_S, float(self.per_minute))
            self._at = now
        return self._level

    def take(self, amount: float, now: float) -> None:
        """Remove an amount; a negative one is given back, and what does not fit is lost."""
        self._level = min(self.level(now) - amount, float(self.per_minute))

    def wait_s(self, amount: float, now: float) -> float:
        """Return the time until the bucket has this amount, in seconds; 0.0 if it has it now."""
        lacks = amount - self.level(now)
        return lacks * _MINUTE_S / self.per_minute if lacks > _TOLERANCE else 0.0


class _KeyState:
    """The buckets of one key."""

    __slots__ = ("own", "requests", "seen", "tokens")

    def __init__(self, rates: KeyRates, seen: KeyCharges, now: float) -> None:
        self.requests = TokenBucket(rates.requests, now) if rates.requests is not None else None
        self.tokens = TokenBucket(rates.tokens, now) if rates.tokens is not None else None
        self.own, self.seen = _NOTHING, seen

    def take(self, requests: int, tokens: int, now: float) -> None:
        if self.requests is not None:
            self.requests.take(requests, now)
        if self.tokens is not None:
            self.tokens.take(tokens, now)


class RateLimiter:
    """The buckets of all keys. Keys are those of the settings, so their number is bounded."""

    def __init__(self, rates_of: Callable[[str], KeyRates], others: OtherUsage | None = None) -> None:
        """
        Args:
            rates_of: returns the limits of a key.
            others: what other processes charge against the same limits; None: there are none.
        """
        self._rates_of = rates_of
        self._others: OtherUsage = others if others is not None else NoOthers()
        self._keys: dict[str, _KeyState] = {}

    def change(self, rates_of: Callable[[str], KeyRates]) -> None:
        """Use new limits. The buckets of a key whose limits have changed are full again."""
        old, self._rates_of = self._rates_of, rates_of
        for key, state in self._keys.items():
            rates = rates_of(key)
            if rates != old(key):
                fresh = _KeyState(rates, state.seen, 0.0)
                state.requests, state.tokens = fresh.requests, fresh.tokens

    def observe(self, now: float) -> None:
        """Take what others have charged from the own buckets; to be called some times per second, so that a key that is
        used here for the first time is not charged for what others have used long ago."""
        for key in self._others.known_keys():
            self._state(key, now)

    def exhausted(self, key: str, now: float) -> RateExceeded | None:
        """Return the rejection of any request of a key, however short; None if its buckets are not empty."""
        return self._exceeded(self._state(key, now), 1, now)

    def charge(self, key: str, tokens: int, now: float) -> RateExceeded | None:
        """Charge one request with these tokens, or return why it is rejected. `settle` or `refund` follows a charge."""
        state = self._state(key, now)
        exceeded = self._exceeded(state, tokens, now)
        if exceeded is None:
            self._take(key, state, 1, tokens, now)
        return exceeded

    def settle(self, key: str, charged_tokens: int, used_tokens: int, now: float) -> None:
        """Replace the tokens that a request was charged by those that it has used."""
        if used_tokens != charged_tokens:
            self._take(key, self._state(key, now), 0, used_tokens - charged_tokens, now)

    def refund(self, key: str, charged_tokens: int, now: float) -> None:
        """Take back the charge of a request that no engine has served."""
        self._take(key, self._state(key, now), -1, -charged_tokens, now)

    def states(self, key: str, now: float) -> tuple[RateState, ...]:
        """Return the buckets of a key, for the headers of a response."""
        state = self._state(key, now)
        named: tuple[tuple[Limited, TokenBucket | None], ...] = (
            ("requests", state.requests),
            ("tokens", state.tokens),
        )
        return tuple(
            [
                RateState(
                    limited,
                    bucket.per_minute,
                    max(math.floor(bucket.level(now) + _TOLERANCE), 0),
                    bucket.wait_s(bucket.per_minute, now),
                )
                for limited, bucket in named
                if bucket is not None
            ]
        )

    def _exceeded(self, state: _KeyState, tokens: int, now: float) -> RateExceeded | None:
        if state.tokens is not None and tokens > (most := state.tokens.per_minute):
            reason = f"the request may use {tokens} tokens, and the limit of this key is {most} per minute"
            return RateExceeded("tokens", f"{reason}: shorten the prompt, or allow fewer output tokens", None)
        if state.requests is not None and (wait_s := state.requests.wait_s(1.0, now)):
            reason = f"this key has used its {state.requests.per_minute} requests per minute"
            return RateExceeded("requests", reason, _whole_s(wait_s))
        if state.tokens is not None and (wait_s := state.tokens.wait_s(tokens, now)):
            left, most = max(math.floor(state.tokens.level(now) + _TOLERANCE), 0), state.tokens.per_minute
            reason = f"the request may use {tokens} tokens, and {left} of the {most} per minute of this key are left"
            return RateExceeded("tokens", reason, _whole_s(wait_s))
        return None

    def _take(self, key: str, state: _KeyState, requests: int, tokens: int, now: float) -> None:
        state.take(requests, tokens, now)
        state.own = KeyCharges(state.own.requests + requests, state.own.tokens + tokens)
        self._others.write_used(key, state.own)

    def _state(self, key: str, now: float) -> _KeyState:
        """Return the buckets of a key after what others have charged since the last call."""
        used = self._others.used_by(key)
        state = self._keys.get(key)
        if state is None:
            state = self._keys[key] = _KeyState(self._rates_of(key), _NOTHING, now)
        if used != state.seen:
            state.take(used.requests - state.seen.requests, used.tokens - state.seen.tokens, now)
            state.seen = used
        return state


def _whole_s(wait_s: float) -> int:
    return min(max(math.ceil(wait_s), 1), WAIT_MAX_S)
