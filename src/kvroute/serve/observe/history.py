"""The last 15 minutes on the dashboard: one point every 5 seconds, in bounded memory."""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np

from kvroute.serve.observe.distribution import counts_of
from kvroute.types import FloatArray

STEP_S = 5.0
"""Time that a point covers; after a pause of the gateway it is longer."""
POINTS_MOST = 180
"""15 minutes."""


class HistoryPoint(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Values of one step; sent as a list to save space."""

    at: float
    """End of the step."""
    requests_per_s: float
    """Requests that arrived."""
    ttft_p50_s: float | None
    """Median time to first token of the streams that began; None: no stream began."""
    ttft_p95_s: float | None
    kv_bytes_per_s: float
    """KV bytes of the requests whose first token, or whole response, came."""


class History:
    """A ring of points. `at` never decreases; totals are counted from the start of the gateway."""

    def __init__(self) -> None:
        self._points: deque[HistoryPoint] = deque(maxlen=POINTS_MOST)
        self._distributions: deque[bytes] = deque(maxlen=POINTS_MOST)
        self._since_s, self._arrivals, self._answers = 0.0, 0.0, 0

    @property
    def points(self) -> tuple[HistoryPoint, ...]:
        """All points, oldest first."""
        return tuple(self._points)

    @property
    def distributions(self) -> tuple[bytes, ...]:
        """Times to first token of each point, as `counts_of` returns them."""
        return tuple(self._distributions)

    @property
    def newest(self) -> HistoryPoint | None:
        """The newest point; None before the first step has ended."""
        return self._points[-1] if self._points else None

    @property
    def answers(self) -> int:
        """Total of answers at the end of the newest step."""
        return self._answers

    def is_due(self, at: float) -> bool:
        """Return whether the current step has ended."""
        return at - self._since_s >= STEP_S

    def add(self, at: float, *, arrivals: float, answers: int, ttft_s: FloatArray, kv_bytes: FloatArray) -> None:
        """End the current step.

        Args:
            at: end of the step, after the end of the one before.
            arrivals: total of requests that have arrived.
            answers: total of requests whose first token, or whole response, has come.
            ttft_s: times to first token of the step's streams.
            kv_bytes: KV bytes of the step's answers; if only some of the answers are known, the sum is scaled up.
        """
        elapsed_s = at - self._since_s
        counted = answers - self._answers
        scale = counted / len(kv_bytes) if len(kv_bytes) else 0.0
        p50_s, p95_s = _percentiles(ttft_s)
        self._points.append(
            HistoryPoint(
                at=round(at, 2),
                requests_per_s=round((arrivals - self._arrivals) / elapsed_s, 3),
                ttft_p50_s=p50_s,
                ttft_p95_s=p95_s,
                kv_bytes_per_s=round(float(kv_bytes.sum()) * scale / elapsed_s),
            )
        )
        self._distributions.append(counts_of(ttft_s))
        self._since_s, self._arrivals, self._answers = at, arrivals, answers


def _percentiles(times_s: FloatArray) -> tuple[float | None, float | None]:
    """Return P50 and P95 as the nearest values above; numpy's own function imports a module for 100 ms at first."""
    if not len(times_s):
        return None, None
    ordered = np.sort(times_s)
    p50_s, p95_s = (float(ordered[int(np.ceil(share * len(ordered))) - 1]) for share in (0.5, 0.95))
    return round(p50_s, 6), round(p95_s, 6)
