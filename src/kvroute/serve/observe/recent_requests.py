"""The requests of the last minute: percentiles of their TTFT and its parts, and their KV transfers by tier.

A ring of rows: adding one takes about a microsecond, and everything else is computed on demand.
"""

from __future__ import annotations

from array import array

import numpy as np

from kvroute.serve.observe.decision_view import short
from kvroute.serve.observe.distribution import counts_of
from kvroute.serve.observe.view import Split, TtftBreakdown
from kvroute.types import TIER_COUNT, FloatArray

WINDOW_S = 60.0
"""TTFT and tier split cover requests whose first token, or whole response, came within this time."""
REQUESTS_MOST = 4096
"""Maximum number of requests kept; above 68 per second the window is shorter than WINDOW_S."""
SPLITS_S = 1.0
"""Maximum age of the percentiles: computing them takes a millisecond, during which the event loop is blocked."""
PARTS = ("queue", "prefill", "transfer", "first_step")
"""Parts of a TTFT."""
_COLUMNS = 4 + len(PARTS)
_UNSEEN = -1.0
"""Replaces the first part of a TTFT that could not be observed."""


class RecentRequests:
    """The last requests, each with the policy that has placed it."""

    def __init__(self) -> None:
        self.count = 0
        """Number of requests that were added."""
        self._policies: list[str] = []
        self._rows = array("d", bytes(8 * _COLUMNS * REQUESTS_MOST))
        self._splits_at = -SPLITS_S
        self._last_splits: tuple[Split, ...] = ()

    def first_token(self, ttft: TtftBreakdown, at: float, policy: str, *, tier: int | None, kv_bytes: float) -> None:
        """Add a request whose first token was seen. Args: `tier` None: prefill and decode on one instance."""
        start = self._row(at, tier, kv_bytes, policy)
        rows = self._rows
        rows[start + 4] = ttft.queue_s
        rows[start + 5] = ttft.prefill_s
        rows[start + 6] = ttft.transfer_s
        rows[start + 7] = ttft.first_step_s

    def whole_answer(self, at: float, policy: str, *, tier: int | None, kv_bytes: float) -> None:
        """Add a request whose first token cannot be observed."""
        self._rows[self._row(at, tier, kv_bytes, policy) + 4] = _UNSEEN

    def newest(self, after: int) -> tuple[FloatArray, FloatArray]:
        """Return the TTFT of the requests that were added since `count` was `after`, of those whose first token was
        seen, and the KV bytes of all of them."""
        known = min(self.count - after, REQUESTS_MOST)
        places = np.arange(self.count - known, self.count) % REQUESTS_MOST
        rows = np.frombuffer(self._rows).reshape(REQUESTS_MOST, _COLUMNS)[places]
        return rows[rows[:, 4] != _UNSEEN, 4:].sum(axis=1), rows[:, 3]

    def splits(self, at: float) -> tuple[Split, ...]:
        """Return what the requests of the last `WINDOW_S` took, by policy; computed once in `SPLITS_S`."""
        if not 0 <= at - self._splits_at < SPLITS_S:
            self._splits_at = at
            self._last_splits = tuple([_split(policy, rows) for policy, rows in self._recent(at)])
        return self._last_splits

    def forget_splits(self) -> None:
        """Discard the stored splits, so that the next call of `splits` computes them."""
        self._splits_at = -SPLITS_S

    def distributions(self, at: float) -> dict[str, tuple[bytes, ...]]:
        """Return the distribution of TTFT and of each of its parts, by policy."""
        return {policy: tuple(map(counts_of, _times_s(rows))) for policy, rows in self._recent(at)}

    def _row(self, at: float, tier: int | None, kv_bytes: float, policy: str) -> int:
        start = (self.count % REQUESTS_MOST) * _COLUMNS
        self.count += 1
        rows = self._rows
        rows[start] = at
        rows[start + 1] = self._policy_number(policy)
        rows[start + 2] = -1.0 if tier is None else tier
        rows[start + 3] = kv_bytes
        return start

    def _policy_number(self, policy: str) -> int:
        if policy not in self._policies:
            self._policies.append(policy)
        return self._policies.index(policy)

    def _recent(self, at: float) -> list[tuple[str, FloatArray]]:
        """Return the rows of the last `WINDOW_S`, by policy."""
        rows = np.frombuffer(self._rows).reshape(REQUESTS_MOST, _COLUMNS)[: min(self.count, REQUESTS_MOST)]
        rows = rows[rows[:, 0] >= at - WINDOW_S]
        by_policy = ((policy, rows[rows[:, 1] == number]) for number, policy in enumerate(self._policies))
        return [(policy, some) for policy, some in by_policy if len(some)]


def _quantiles_s(ordered: FloatArray, share: float) -> list[float]:
    """Interpolate a quantile of each row; numpy's own function imports a module for 100 ms on its first call."""
    place = share * (ordered.shape[1] - 1)
    low = int(place)
    high = min(low + 1, ordered.shape[1] - 1)
    return [short(value) for value in ordered[:, low] + (place - low) * (ordered[:, high] - ordered[:, low])]


def _times_s(rows: FloatArray) -> FloatArray:
    """Return TTFT and its parts, in this order, of each observed first token. Shape: `(1 + len(PARTS), streams)`."""
    seen = rows[rows[:, 4] != _UNSEEN]
    columns = np.empty((1 + len(PARTS), len(seen)))
    columns[1:] = seen[:, 4:].T
    columns[0] = columns[1:].sum(axis=0)
    return columns


def _split(policy: str, rows: FloatArray) -> Split:
    columns = _times_s(rows)
    streams = columns.shape[1]
    if not streams:
        columns = np.zeros((1 + len(PARTS), 1))
    mean_s = [short(value) for value in columns[1:].mean(axis=1)]
    columns.sort(axis=1)
    p50_s, p90_s = _quantiles_s(columns, 0.5), _quantiles_s(columns, 0.9)
    tiers = rows[:, 2]
    moved = tiers >= 0
    numbers = tiers[moved].astype(np.int64)
    return Split(
        policy=policy,
        requests=len(rows),
        streams=streams,
        ttft_p50_s=p50_s[0],
        ttft_p90_s=p90_s[0],
        part_mean_s=dict(zip(PARTS, mean_s, strict=True)),
        part_p50_s=dict(zip(PARTS, p50_s[1:], strict=True)),
        part_p90_s=dict(zip(PARTS, p90_s[1:], strict=True)),
        tier_requests=tuple(np.bincount(numbers, minlength=TIER_COUNT).tolist()),
        tier_bytes=tuple(np.bincount(numbers, rows[moved, 3], minlength=TIER_COUNT).tolist()),
        local=int((~moved).sum()),
    )
