"""Requests of one model in a window of time: rate with its trend, and costs, for `policies.fleet.replicas`.

Times must not decrease. Memory is bounded: prefill times are in bins of an eighth of an octave, with exact means.
"""

from __future__ import annotations

import math

import numpy as np

from kvroute.control.state.traffic import Tally
from kvroute.policies.fleet.replicas import Demand
from kvroute.types import FloatArray

_PER_OCTAVE, _SHORTEST_S, _BINS = 8, 1e-4, 192
"""Bins of prefill times: from 0.1 ms to 28 minutes."""
_PARTS = 8
"""Number of parts of the window of a `Tally`."""
_COUNT, _SERVICE_S, _SENT = 0, _BINS, 2 * _BINS
"""First columns by bin: requests, prefill time, bytes sent."""
_ARRIVALS, _FOREIGN, _GAP_S, _GAP_S2, _GAPS, _HELD, _HELD2, _PROMPT, _ANSWERS, _TOKENS = range(10)
"""Columns of the sums over all requests."""
_CV2_MOST = 25.0
"""Largest squared coefficient of variation that is believed."""


class DemandWindow:
    """Arrivals and responses of the last `window_s` seconds."""

    __slots__ = ("_began", "_bins", "_last", "_part_s", "_sums", "_window_s")

    def __init__(self, window_s: float) -> None:
        self._window_s, self._part_s = window_s, window_s / _PARTS
        self._bins, self._sums = Tally(window_s, 3 * _BINS), Tally(window_s, 10)
        self._began: float | None = None
        self._last: float | None = None

    def arrived(self, at: float, service_s: float, prompt_tokens: int, kv_bytes: float) -> None:
        """Count a request: the time of its prefill, and the tokens and KV bytes of its prompt."""
        self._start(at)
        column = _bin(service_s)
        self._bins.add_one(at, _COUNT + column, 1.0)
        self._bins.add_one(at, _SERVICE_S + column, service_s)
        self._bins.add_one(at, _SENT + column, kv_bytes)
        gap_s, gaps = (at - self._last, 1.0) if self._last is not None else (0.0, 0.0)
        amounts = (1.0, 0.0, gap_s, gap_s**2, gaps, kv_bytes, kv_bytes**2, prompt_tokens, 0.0, 0.0)
        self._sums.add(at, np.array(amounts))
        self._last = at

    def arrived_elsewhere(self, at: float, requests: int) -> None:
        """Count requests of other gateways; they are assumed to be like the own ones."""
        self._start(at)
        self._sums.add_one(at, _FOREIGN, float(requests))

    def answered(self, at: float, output_tokens: int) -> None:
        """Count a response."""
        self._start(at)
        self._sums.add_one(at, _ANSWERS, 1.0)
        self._sums.add_one(at, _TOKENS, float(output_tokens))

    def seen_s(self, at: float) -> float:
        """Length of the window so far: at most the time since the first event."""
        return 0.0 if self._began is None else min(at - self._began, self._window_s)

    def demand(self, at: float, ahead_s: float, bytes_per_token: float) -> Demand | None:
        """Return the demand that is expected `ahead_s` seconds from now; None without requests.

        Args:
            at: now.
            ahead_s: a rising rate is extrapolated so far. A falling one is not.
            bytes_per_token: KV bytes of a generated token.
        """
        sums, bins = self._sums.window(at), self._bins.window(at)
        count = bins[_COUNT:_SERVICE_S]
        kinds = np.flatnonzero(count > 0.0)
        if not len(kinds):
            return None
        arrivals, requests = float(sums[_ARRIVALS]), count[kinds]
        outputs = float(sums[_TOKENS] / sums[_ANSWERS]) if sums[_ANSWERS] and sums[_TOKENS] else 1.0
        grown_bytes = outputs * bytes_per_token
        held_bytes = float(sums[_HELD]) / arrivals
        cv2 = _cv2(float(sums[_GAPS]), float(sums[_GAP_S]), float(sums[_GAP_S2]))
        return Demand(
            rate_per_s=self._rate_per_s(at, ahead_s, sums, cv2),
            service_s=bins[_SERVICE_S:_SENT][kinds] / requests,
            sent_bytes=bins[_SENT:][kinds] / requests,
            share=requests / float(requests.sum()),
            output_tokens=max(outputs, 1.0),
            context_tokens=float(sums[_PROMPT]) / arrivals + outputs / 2.0,
            held_bytes=held_bytes + grown_bytes,
            held_bytes2=float(sums[_HELD2]) / arrivals + 2.0 * held_bytes * grown_bytes + grown_bytes**2,
            arrival_cv2=cv2,
        )

    def _rate_per_s(self, at: float, ahead_s: float, sums: FloatArray, cv2: float) -> float:
        """Return the highest of: the window's mean, the rate of its last two parts, and its trend `ahead_s` from now.
        The latter two count without one standard error, so that noise is no growth."""
        seen_s = max(self.seen_s(at), self._part_s)
        mean_per_s = float(sums[_ARRIVALS] + sums[_FOREIGN]) / seen_s
        assert self._began is not None
        late_s = max(at - max((math.floor(at / self._part_s) - 1) * self._part_s, self._began), self._part_s)
        recent = self._sums.recent(at)
        requests = float(recent[_ARRIVALS] + recent[_FOREIGN])
        recent_per_s = (requests - math.sqrt(requests * cv2)) / late_s
        return max(mean_per_s, recent_per_s, self._trend_per_s(at, ahead_s, cv2))

    def _trend_per_s(self, at: float, ahead_s: float, cv2: float) -> float:
        assert self._began is not None
        parts = self._sums.parts(at)[:, [_ARRIVALS, _FOREIGN]].sum(axis=1)
        ends = (math.floor(at / self._part_s) - np.arange(len(parts) - 1, -1, -1)) * self._part_s
        whole = ends - self._part_s >= self._began
        if int(whole.sum()) < 3:
            return 0.0
        rates, middles = parts[whole] / self._part_s, ends[whole] - self._part_s / 2.0
        spread = middles - middles.mean()
        square = float(spread @ spread)
        error = math.sqrt(max(float(rates.mean()), 0.0) * cv2 / self._part_s / square)
        slope = max(float(spread @ rates) / square - error, 0.0)
        return float(rates.mean()) + slope * (at + ahead_s - float(middles.mean()))

    def _start(self, at: float) -> None:
        if self._began is None:
            self._began = at


def _bin(service_s: float) -> int:
    return min(max(math.ceil(math.log2(max(service_s, _SHORTEST_S) / _SHORTEST_S) * _PER_OCTAVE), 0), _BINS - 1)


def _cv2(gaps: float, sum_s: float, sum_s2: float) -> float:
    """Squared coefficient of variation of the times between arrivals, at least that of Poisson arrivals."""
    if gaps < 2.0 or sum_s <= 0.0:
        return 1.0
    mean_s = sum_s / gaps
    return min(max(sum_s2 / gaps / mean_s**2 - 1.0, 1.0), _CV2_MOST)
