"""Counters of engines' own KV connectors on a metrics page. They are sums over all transfers of an engine: they do not
name the other instance of a transfer, as those of kvroute's connector do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvroute.http.slices import Slices
from kvroute.serve.observe.metrics.prometheus_text import Budget, values
from kvroute.serve.telemetry.rank_pages import values_by_rank

COUNT_MAX = 2**31 - 1
"""Larger counts are cut to this one."""
_MEGABYTE = 1e6
_KVROUTE_FAILURES = b"kvroute:kv_transfer_failures_total"
_KVROUTE_EXPIRED = b"kvroute:kv_expired_total"


@dataclass(frozen=True, slots=True)
class TransferTotals:
    """Totals of the transfers that an engine has counted since it started."""

    kv_bytes: float = 0.0
    seconds: float = 0.0
    transfers: int = 0


@dataclass(frozen=True, slots=True)
class Series:
    """Names of one connector's series (sums of bytes and seconds, observations, failures) and factors to SI units."""

    prefix: bytes
    nbytes: bytes
    seconds: bytes
    transfers: bytes
    failures: bytes
    expired: bytes = b""
    """Requests whose KV no engine has fetched in time; empty: not counted."""
    to_bytes: float = 1.0
    to_seconds: float = 1.0


SERIES: Mapping[str, Series] = {
    "nixl": Series(
        b"vllm:nixl_",
        b"vllm:nixl_bytes_transferred_sum",
        b"vllm:nixl_xfer_time_seconds_sum",
        b"vllm:nixl_bytes_transferred_count",
        b"vllm:nixl_num_failed_transfers_total",
        b"vllm:nixl_num_kv_expired_reqs_total",
    ),
    "sglang": Series(
        b"sglang:",
        b"sglang:kv_transfer_total_mb_sum",
        b"sglang:kv_transfer_latency_ms_sum",
        b"sglang:kv_transfer_total_mb_count",
        b"sglang:num_transfer_failed_reqs_total",
        to_bytes=_MEGABYTE,
        to_seconds=1e-3,
    ),
}
"""By the short name of the connector, the most exact first."""


@dataclass(frozen=True, slots=True)
class ConnectorCounters:
    """What the connectors of one engine have counted since it started."""

    moved: Mapping[str, TransferTotals] = field(default_factory=dict)
    """By the short name of a connector that does not name the other instance; only those on the page."""
    failed: int | None = None
    """Failed transfers of all connectors; None: not on the page."""
    expired: int | None = None
    """Requests whose KV no engine has fetched in time; None: not on the page."""


def connector_counters(page: bytes, budget: Budget) -> Slices[ConnectorCounters]:
    """Return the counters of a page, which starts with a line feed.

    Raises:
        PageError: the page has more samples than the budget allows.
    """
    moved: dict[str, TransferTotals] = {}
    failed: list[float] = []
    expired: list[float] = []
    for name, series in SERIES.items():
        if page.find(b"\n" + series.prefix) < 0:
            continue
        totals = yield from histogram_totals(page, series, budget)
        if totals is not None:
            moved[name] = totals
        failed += yield from values_by_rank(page, series.failures, budget)
        if series.expired:
            expired += yield from values_by_rank(page, series.expired, budget)
    if page.find(b"\nkvroute:kv_") >= 0:
        failed += yield from values(page, _KVROUTE_FAILURES, budget)
        expired += yield from values(page, _KVROUTE_EXPIRED, budget)
    return ConnectorCounters(moved, count(sum(failed)) if failed else None, count(sum(expired)) if expired else None)


def histogram_totals(page: bytes, series: Series, budget: Budget) -> Slices[TransferTotals | None]:
    """Return the totals of one connector; None if the page does not have them."""
    counts = yield from values_by_rank(page, series.transfers, budget)
    if not counts:
        return None
    nbytes = yield from values_by_rank(page, series.nbytes, budget)
    seconds = yield from values_by_rank(page, series.seconds, budget)
    return TransferTotals(sum(nbytes) * series.to_bytes, sum(seconds) * series.to_seconds, count(sum(counts)))


def count(value: float) -> int:
    """Return a count from a page as an integer from 0 to COUNT_MAX."""
    return round(min(max(value, 0.0), COUNT_MAX))
