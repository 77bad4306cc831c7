"""Counters of KV transfers on engines' metrics pages, and their difference between two pages.

Four kinds are supported, the most exact first: kvroute's connector (`kvroute:kv_transfer*`, by source), vLLM's NIXL
connector (`vllm:nixl_*`), SGLang (`sglang:kv_transfer_*`), and vLLM's count of prompt tokens that any connector has
transferred.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvroute.http.slices import whole
from kvroute.serve.observe.metrics.prometheus_text import Budget, PageError, labels_of, samples, values
from kvroute.serve.telemetry.connector_counters import SERIES, TransferTotals, histogram_totals
from kvroute.serve.telemetry.metrics_page import read_metrics

_KVROUTE = b"kvroute:kv_transfer"
_KVROUTE_FAILURES = b"kvroute:kv_transfer_failures_total"
_EXTERNAL_TOKENS = b"vllm:external_prefix_cache_hits_total"


@dataclass(frozen=True, slots=True)
class PageCounters:
    """Counters of one metrics page."""

    by_source: Mapping[str, TransferTotals] = field(default_factory=dict)
    """Transfers that kvroute's connector counts, by source."""
    histograms: Mapping[str, TransferTotals] = field(default_factory=dict)
    """Transfers that NIXL and SGLang count, by the short name of the histogram; only those on the page."""
    failures: Mapping[str, float] = field(default_factory=dict)
    """Failed transfers, by reason."""
    external_tokens: float | None = None
    """Prompt tokens whose KV a connector has transferred; None: not on the page."""
    kinds: frozenset[str] = frozenset()
    """Connectors whose counters the page has."""


@dataclass(frozen=True, slots=True)
class Movement:
    """Data moved by one transfer, or by several of one request."""

    source: str
    """Name of the source in the decode engine's counters; empty: not given."""
    totals: TransferTotals

    @property
    def seconds(self) -> float:
        """Duration in seconds. The ranks of an engine transfer at the same time, and each counts its own share."""
        return self.totals.seconds / max(1, self.totals.transfers)


def read_counters(page: bytes) -> PageCounters:
    """Return the counters of a page; none if the page cannot be read."""
    try:
        return _read(page)
    except PageError:
        return PageCounters()


def _read(page: bytes) -> PageCounters:
    lines, budget = b"\n" + page, Budget()
    by_source = read_metrics(page).transfers
    failures: dict[str, float] = {}
    for text, value in whole(samples(lines, _KVROUTE_FAILURES, budget)):
        reason = labels_of(text).get("reason", "")
        failures[reason] = failures.get(reason, 0.0) + value
    histograms = {}
    for name, series in SERIES.items():
        totals = whole(histogram_totals(lines, series, budget))
        if totals is not None:
            histograms[name] = totals
        if failed := whole(values(lines, series.failures, budget)):
            failures[f"{name} transfer failed"] = sum(failed)
    tokens = whole(values(lines, _EXTERNAL_TOKENS, budget))
    kinds = frozenset(histograms) | (frozenset({"kvroute"}) if _KVROUTE in page else frozenset())
    return PageCounters(by_source, histograms, failures, sum(tokens) if tokens else None, kinds)


def movement(before: PageCounters, after: PageCounters) -> Movement | None:
    """Return the transfers between two pages of one engine, by its most exact counters; None: no transfer."""
    for source in sorted(after.by_source):
        totals = _less(after.by_source[source], before.by_source.get(source, TransferTotals()))
        if totals.transfers > 0:
            return Movement(source, totals)
    for name in SERIES:
        if name in after.histograms:
            totals = _less(after.histograms[name], before.histograms.get(name, TransferTotals()))
            if totals.transfers > 0:
                return Movement("", totals)
    return None


def external_tokens(before: PageCounters, after: PageCounters) -> float | None:
    """Return the prompt tokens that a connector has transferred between two pages; None: not reported."""
    if after.external_tokens is None:
        return None
    return max(0.0, after.external_tokens - (before.external_tokens or 0.0))


def failures(before: PageCounters, after: PageCounters) -> list[str]:
    """Return the reasons of the transfers that have failed between two pages."""
    return sorted(reason for reason, count in after.failures.items() if count > before.failures.get(reason, 0.0))


def _less(new: TransferTotals, old: TransferTotals) -> TransferTotals:
    return TransferTotals(new.kv_bytes - old.kv_bytes, new.seconds - old.seconds, new.transfers - old.transfers)
