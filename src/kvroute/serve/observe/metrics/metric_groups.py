"""Metrics of what not every gateway has: service classes, and the stream that several gateways share."""

from __future__ import annotations

from bisect import bisect_left
from typing import Literal

from kvroute.serve.observe.metrics.exposition import LAG_S, REQUEST_S, Counter, Histogram

_RATIO = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
_PREDICTED_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_PREDICTED_LABELS = (*(f"to {bound:g} s" for bound in _PREDICTED_S), f"above {_PREDICTED_S[-1]:g} s")


class ClassMetrics:
    """Counts the requests that are placed in their turn or by their SLO: their waits, and predicted and actual TTFT."""

    def __init__(self) -> None:
        self._class_wait_s = Histogram(
            "kvroute_class_wait_seconds", "From a prompt read to its placement, by class.", REQUEST_S, ("class",)
        )
        self._class_work_s = Counter(
            "kvroute_class_work_seconds_total", "Predicted work of placed requests, with `fair_queue`.", ("class",)
        )
        self._class_ttft_s = Histogram(
            "kvroute_class_ttft_seconds", "From request read to first byte sent, for streams.", REQUEST_S, ("class",)
        )
        self._prediction_ratio = Histogram(
            "kvroute_ttft_prediction_ratio", "Actual over predicted TTFT of streams.", _RATIO
        )
        bucket = ("bucket",)
        self._predictions = Counter(
            "kvroute_ttft_predictions_total", "Streams with a predicted TTFT, by the bucket of the prediction.", bucket
        )
        self._predicted_s = Counter("kvroute_ttft_predicted_seconds_total", "Sum of their predictions.", bucket)
        self._actual_s = Counter("kvroute_ttft_actual_seconds_total", "Sum of their actual TTFT.", bucket)

    def placed(self, name: str, wait_s: float, work_s: float) -> None:
        """Count a request that is placed. Args: `name`: of its service class."""
        self._class_wait_s.observe((name,), wait_s)
        self._class_work_s.add((name,), work_s)

    def first_token(self, name: str, ttft_s: float) -> None:
        """Observe the first byte of a stream. Args: `name`: of its service class."""
        self._class_ttft_s.observe((name,), ttft_s)

    def predicted(self, predicted_s: float, actual_s: float) -> None:
        """Observe the predicted and the actual TTFT of a stream, from its placement on."""
        bucket = (_PREDICTED_LABELS[bisect_left(_PREDICTED_S, predicted_s)],)
        self._predictions.add(bucket)
        self._predicted_s.add(bucket, predicted_s)
        self._actual_s.add(bucket, actual_s)
        if predicted_s > 0:
            self._prediction_ratio.observe((), actual_s / predicted_s)


class ReplicationMetrics:
    """Counts the entries of the stream that one gateway writes and reads."""

    def __init__(self) -> None:
        self._replicated = Counter(
            "kvroute_replication_entries_total", "Entries of the gateways' stream.", ("direction",)
        )
        self._replicated_bytes = Counter("kvroute_replication_bytes_total", "Bytes of these entries.", ("direction",))
        self._entries_refused = Counter("kvroute_replication_refused_total", "Entries that could not be applied.")
        self._replication_lag_s = Histogram(
            "kvroute_replication_lag_seconds", "From an entry written to the same entry read.", LAG_S
        )
        self._peers_lost = Counter("kvroute_replication_lost_total", "Gateways whose bookings were released.")

    def replicated(self, direction: Literal["read", "written"], nbytes: int) -> None:
        """Count an entry of the stream that the gateways share."""
        self._replicated.add((direction,))
        self._replicated_bytes.add((direction,), nbytes)

    def entry_refused(self) -> None:
        """Count an entry that is damaged or impossible."""
        self._entries_refused.add()

    def lag(self, seconds: float) -> None:
        """Record the time from writing an own entry to reading it."""
        self._replication_lag_s.observe((), seconds)

    def peer_lost(self) -> None:
        """Count another gateway whose lease has expired."""
        self._peers_lost.add()
