"""Gauges of prefill across datacenters: thresholds, WAN paths, the last review, role switches in progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from kvroute.serve.observe.metrics.exposition import Key, MetricFamily
from kvroute.serve.observe.view import BreakerState, OffloadLoad, SiteLoad

_WAN_PATH_STATE: dict[BreakerState, int] = {"closed": 0, "half-open": 1, "open": 2}
_SWITCHING = MetricFamily("gauge", "kvroute_role_switches_in_progress", "Instances that are switching their role.")
_LAMBDA = MetricFamily(
    "gauge",
    "kvroute_review_requests_per_second",
    "Throughput of the present and the best split by the last review; binding: limit of the present one.",
    ("split", "binding"),
)
_GAIN = MetricFamily(
    "gauge", "kvroute_review_gain_ratio", "Share of the best split's throughput that the present split misses."
)
_SITE_GAUGES: tuple[tuple[MetricFamily, Callable[[SiteLoad], float | None]], ...] = (
    (
        MetricFamily(
            "gauge", "kvroute_offload_threshold_tokens", "Longer prompts are prefilled at the site.", ("site",)
        ),
        lambda site: site.threshold_tokens,
    ),
    (
        MetricFamily(
            "gauge", "kvroute_offload_base_tokens", "Threshold without short-term changes, as searched.", ("site",)
        ),
        lambda site: site.base_tokens,
    ),
    (
        MetricFamily(
            "gauge", "kvroute_egress_used_ratio", "Used share of the WAN path, by own and other traffic.", ("site",)
        ),
        lambda site: round(site.utilisation, 6),  # a value that decays ends at 0
    ),
    (
        MetricFamily("gauge", "kvroute_egress_backlog_bytes", "Own KV bytes in flight on the WAN path.", ("site",)),
        lambda site: site.backlog_bytes,
    ),
    (
        MetricFamily(
            "gauge", "kvroute_egress_backlog_seconds", "Time that the WAN path needs for the backlog.", ("site",)
        ),
        lambda site: site.backlog_s,
    ),
    (
        MetricFamily(
            "gauge", "kvroute_wan_path_other_traffic_ratio", "Share of the WAN path that other traffic uses.", ("site",)
        ),
        lambda site: site.others,
    ),
    (
        MetricFamily(
            "gauge",
            "kvroute_wan_path_sent_bytes_per_second",
            "Rate of own KV on the WAN path, from the kernels.",
            ("site",),
        ),
        lambda site: site.sent_bytes_per_s,
    ),
    (
        MetricFamily(
            "gauge", "kvroute_wan_path_retransmit_ratio", "Share of the sent bytes that was retransmitted.", ("site",)
        ),
        lambda site: site.sent_again_ratio,
    ),
    (
        MetricFamily(
            "gauge", "kvroute_wan_path_queue_delay_seconds", "Round-trip time above the shortest one.", ("site",)
        ),
        lambda site: site.queue_delay_s,
    ),
    (
        MetricFamily("gauge", "kvroute_wan_path_state", "WAN path: 0 in use, 1 being probed, 2 closed.", ("site",)),
        lambda site: _WAN_PATH_STATE[site.wan_path],
    ),
)


def offload_gauges(offload: OffloadLoad | None) -> Iterator[tuple[MetricFamily, Iterable[tuple[Key, float]]]]:
    """Yield families with their samples; no samples if the settings have no `offload` section."""
    sites = offload.sites if offload is not None else ()
    for family, value in _SITE_GAUGES:
        samples = [(site.name, value(site)) for site in sites]
        yield family, [((name,), sample) for name, sample in samples if sample is not None]
    yield _SWITCHING, [((), len(offload.role_switches))] if offload is not None else []
    review = offload.review if offload is not None else None
    limits = [] if review is None else [("present", review.lambda_max_per_s), ("best", review.best_per_s)]
    yield _LAMBDA, [((split, review.binding), limit) for split, limit in limits if review is not None]
    yield _GAIN, [((), review.gain)] if review is not None else []
