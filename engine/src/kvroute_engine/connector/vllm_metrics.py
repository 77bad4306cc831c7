"""The connector's counters in vLLM's classes, for its log and its own metrics page. Imports vllm."""

from __future__ import annotations

from typing import Any, cast

from kvroute_engine.connector.stats import TransferCounts, add, is_empty, link, no_counts, summary

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (  # type: ignore[import-not-found]
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
except ModuleNotFoundError as error:
    raise ImportError(
        f"kvroute_engine.connector.vllm_metrics needs vLLM (0.32): {error.name} is not installed here"
    ) from None


class KvrouteStats(KVConnectorStats):  # type: ignore[misc]
    """`stats.Counts` in the class that vLLM requires."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or dict(no_counts()))

    @property
    def counts(self) -> TransferCounts:
        """The data with its actual type."""
        return cast(TransferCounts, self.data)

    def reset(self) -> None:
        """Reset all counts."""
        self.data = dict(no_counts())

    def aggregate(self, other: KVConnectorStats) -> KvrouteStats:
        """Add the counts of another worker or step."""
        add(self.counts, KvrouteStats(other.data).counts)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return a summary for vLLM's log line."""
        return summary(self.counts)

    def is_empty(self) -> bool:
        """Return whether there is nothing to report."""
        return is_empty(self.counts)


class KvrouteMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The counters on vLLM's own /metrics page."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._transfers = self._counter("kv_transfers", "KV transfers pulled, by source instance", "source")
        self._bytes = self._counter("kv_transfer_bytes", "Bytes of KV pulled, by source instance", "source")
        self._seconds = self._counter("kv_transfer_seconds", "Seconds that transfers took", "source")
        self._failures = self._counter("kv_transfer_failures", "KV transfers that failed", "source", "reason")
        self._expired = self._counter("kv_expired", "Requests whose KV expired before it was fetched")
        self._early = self._counter("kv_early", "KV transfers that began before their prompt was computed", "source")
        self._early_bytes = self._counter(
            "kv_early_bytes", "Bytes of KV pulled by transfers that began before their prompt was computed", "source"
        )
        self._nixl_bytes = self._counter("kv_nixl_bytes", "Bytes of KV read from the source's memory by NIXL", "source")
        self._sent = {
            field: self._counter(f"kv_{name}", text, "target")
            for field, name, text in (
                ("nbytes", "sent_bytes", "Bytes sent to decode instances, including retransmitted bytes"),
                (
                    "segments",
                    "sent_segments",
                    "TCP segments sent to decode instances, including retransmitted segments",
                ),
                ("again_bytes", "sent_again_bytes", "Bytes retransmitted to decode instances"),
                ("again_segments", "sent_again_segments", "TCP segments retransmitted to decode instances"),
                (
                    "busy_us",
                    "sent_busy_seconds",
                    "Time with data in flight to decode instances, summed over connections",
                ),
            )
        }
        self._links = {
            field: self._gauge(f"kv_link_{name}", text, "target")
            for field, name, text in (
                ("connections", "connections", "Connections to a decode instance that are transferring"),
                ("rtt_s", "rtt_seconds", "Mean smoothed round-trip time of these connections"),
                ("min_rtt_s", "min_rtt_seconds", "Shortest round-trip time of these connections"),
                ("cwnd_bytes", "cwnd_bytes", "Sum of the congestion windows of these connections"),
                ("queue_bytes", "queue_bytes", "Unacknowledged bytes in the send queues of these connections"),
                ("delivery_bytes_per_s", "delivery_bytes_per_second", "Sum of the delivery rates of these connections"),
                ("unsent_bytes", "unsent_bytes", "Unsent bytes in the send queues of these connections"),
                ("looked_s", "looked_seconds", "Time of the last reading from the kernel, by the engine's own clock"),
            )
        }

    def _gauge(self, name: str, text: str, *labels: str) -> Any:
        names = [*self._labelnames, *labels]
        return self._gauge_cls(
            name=f"kvroute:{name}", documentation=text, labelnames=names, multiprocess_mode="mostrecent"
        )

    def _counter(self, name: str, text: str, *labels: str) -> Any:
        return self._counter_cls(name=f"kvroute:{name}", documentation=text, labelnames=[*self._labelnames, *labels])

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's counts."""
        counts = KvrouteStats(transfer_stats_data).counts
        engine = self.per_engine_labelvalues[engine_idx]
        for source, transfers in counts["transfers"].items():
            self._transfers.labels(*engine, source).inc(transfers)
            self._bytes.labels(*engine, source).inc(counts["nbytes"][source])
            self._seconds.labels(*engine, source).inc(counts["seconds"][source])
        for source, reasons in counts["failures"].items():
            for reason, failures in reasons.items():
                self._failures.labels(*engine, source, reason).inc(failures)
        self._expired.labels(*engine).inc(counts["expired"])
        for source, transfers in counts["early"].items():
            self._early.labels(*engine, source).inc(transfers)
            self._early_bytes.labels(*engine, source).inc(counts["early_bytes"][source])
        for source, nbytes in counts["nixl_bytes"].items():
            self._nixl_bytes.labels(*engine, source).inc(nbytes)
        for target, fields in counts["sent"].items():
            for field, number in fields.items():
                self._sent[field].labels(*engine, target).inc(number / 1e6 if field == "busy_us" else number)
        for target, ranks in counts["links"].items():
            now = link(ranks)
            for field, gauge in self._links.items():
                gauge.labels(*engine, target).set(getattr(now, field))
