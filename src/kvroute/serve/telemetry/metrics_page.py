"""One `/metrics` page of an engine: load, KV memory, and the transfer counters of its connector.

A page has hundreds of series of which three are needed: names are searched in the bytes, and only their lines are
parsed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvroute.http.slices import Slices, whole
from kvroute.serve.observe.metrics.prometheus_text import (
    SERIES_MAX,
    Budget,
    PageError,
    labels_of,
    lines_between,
    samples,
    values,
)
from kvroute.serve.telemetry.connector_counters import (
    COUNT_MAX,
    ConnectorCounters,
    TransferTotals,
    connector_counters,
    count,
)
from kvroute.serve.telemetry.rank_pages import values_by_rank
from kvroute.serve.wan.tcp_links import TcpCounters, link_lines, read_links

_VLLM = (b"vllm:num_requests_running", b"vllm:num_requests_waiting", b"vllm:kv_cache_usage_perc")
_SGLANG = (b"sglang:num_running_reqs", b"sglang:num_queue_reqs", b"sglang:token_usage")
_OLD_USAGE = b"vllm:gpu_cache_usage_perc"
_CACHE_CONFIG = b"vllm:cache_config_info"
_STARTED = b"process_start_time_seconds"
_TRANSFER = b"\nkvroute:kv_transfer"
_ADAPTERS = b"vllm:lora_requests_info"
_ADAPTER_SERIES_MAX = 4096
"""An engine adds a series for each combination of adapters in use; with more of them none is read."""
_DIGITS_MAX = 9
_TRANSFERS = (b"kvroute:kv_transfer_bytes_total", b"kvroute:kv_transfer_seconds_total", b"kvroute:kv_transfers_total")


class Adapters(NamedTuple):
    """LoRA adapters of an engine."""

    in_use: tuple[str, ...]
    """Names of those that requests in progress use, in the engine's order."""
    slots: int
    """Number for which it has room in GPU memory; 0: not known."""


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """One page. If it covers several engines (data-parallel ranks), counts are summed and shares averaged."""

    running: int | None
    """None: the page is not from a known engine."""
    waiting: int
    kv_used_share: float | None
    """In [0, 1]; None: the page does not contain it."""
    block_tokens: int | None = None
    kv_blocks: int | None = None
    started_s: float | None = None
    """Start of its process, in seconds since 1970."""
    adapters: Adapters | None = None
    """None: the page does not tell."""
    adapter_lines: bytes = field(default=b"", compare=False, repr=False)
    transfers: Mapping[str, TransferTotals] = field(default_factory=dict)
    """Totals of kvroute's connector, by source instance."""
    connectors: ConnectorCounters = field(default_factory=ConnectorCounters)
    """What other connectors have counted, and the failures of all of them."""
    transfer_lines: bytes = field(default=b"", compare=False, repr=False)
    """The part of the page that holds them."""
    links: Mapping[str, TcpCounters] = field(default_factory=dict)
    """Outgoing KV connections, by target."""
    link_lines: bytes = field(default=b"", compare=False, repr=False)


def read_metrics(page: bytes, before: EngineMetrics | None = None) -> EngineMetrics:
    """Run `metrics_in` without a break."""
    return whole(metrics_in(page, before))


def metrics_in(page: bytes, before: EngineMetrics | None = None, series_max: int = SERIES_MAX) -> Slices[EngineMetrics]:
    """Parse the needed series of a Prometheus text page of vLLM or SGLang; a value that is not finite is skipped.

    Args:
        page: the whole page.
        before: result of the same engine's last page: an engine has three lines for each source, and most of them do
            not change.
        series_max: maximum number of samples read.

    Raises:
        PageError: the page has more samples.
    """
    page = b"\n" + page
    budget = Budget(series_max)
    names = _VLLM if page.find(b"\n" + _VLLM[0]) >= 0 else _SGLANG
    running = yield from values_by_rank(page, names[0], budget)
    waiting = yield from values_by_rank(page, names[1], budget)
    shares = yield from values_by_rank(page, names[2], budget)
    if not shares and names is _VLLM:
        shares = yield from values_by_rank(page, _OLD_USAGE, budget)
    block_tokens, kv_blocks = yield from _cache_config(page, budget)
    started = yield from values(page, _STARTED, budget)
    adapter_lines = lines_between(page, b"\n" + _ADAPTERS)
    if before is not None and before.adapter_lines == adapter_lines:
        adapters = before.adapters
    else:
        adapters = yield from _adapters(adapter_lines)
    transfer_lines = lines_between(page, _TRANSFER)
    if before is not None and before.transfer_lines == transfer_lines:
        transfers = before.transfers
    else:
        transfers = yield from _transfers(transfer_lines, budget)
    connectors = yield from connector_counters(page, budget)
    about_links = link_lines(page)
    if before is not None and before.link_lines == about_links:
        links = before.links
    else:
        links = yield from read_links(about_links, budget)
    return EngineMetrics(
        running=count(sum(running)) if running else None,
        waiting=count(sum(waiting)),
        kv_used_share=min(max(sum(shares) / len(shares), 0.0), 1.0) if shares else None,
        block_tokens=block_tokens,
        kv_blocks=kv_blocks,
        started_s=started[0] if started else None,
        adapters=adapters,
        adapter_lines=adapter_lines,
        transfers=transfers,
        connectors=connectors,
        transfer_lines=transfer_lines,
        links=links,
        link_lines=about_links,
    )


def series_missing(page: bytes) -> tuple[str, ...]:
    """Return the names of the load and memory series that `metrics_in` reads and the page lacks; all of vLLM's if the
    page is not from a known engine."""
    lines = b"\n" + page
    names = _SGLANG if lines.find(b"\n" + _SGLANG[0]) >= 0 else _VLLM
    others = {_VLLM[2]: _OLD_USAGE}
    return tuple(
        name.decode()
        for name in names
        if not any(
            b"\n" + family + end in lines for family in {name, others.get(name, name)} for end in (b"{", b" ", b"\t")
        )
    )


def _cache_config(page: bytes, budget: Budget) -> Slices[tuple[int | None, int | None]]:
    """Return the tokens per block, and the number of blocks of all engines of the page."""
    block_tokens, kv_blocks = None, 0
    for text, _ in (yield from samples(page, _CACHE_CONFIG, budget)):
        if budget.spend(len(text)):
            yield
        labels = labels_of(text)
        block_tokens = _whole_number(labels.get("block_size", "")) or block_tokens
        kv_blocks += _whole_number(labels.get("num_gpu_blocks", "")) or 0
    return block_tokens, min(kv_blocks, COUNT_MAX) or None


def _adapters(page: bytes) -> Slices[Adapters | None]:
    """Return the adapters of the last sample by its value, which is the time when the engine has set it."""
    try:
        found = yield from samples(page, _ADAPTERS, Budget(_ADAPTER_SERIES_MAX))
    except PageError:
        return None
    if not found:
        return None
    labels = labels_of(max(found, key=lambda sample: sample[1])[0])
    texts = (labels.get("running_lora_adapters", ""), labels.get("waiting_lora_adapters", ""))
    names = [name.strip() for text in texts for name in text.split(",")]
    return Adapters(tuple(dict.fromkeys(filter(None, names))), _whole_number(labels.get("max_lora", "")) or 0)


def _whole_number(text: str) -> int | None:
    return int(text) if len(text) <= _DIGITS_MAX and text.isascii() and text.isdecimal() else None


def _transfers(page: bytes, budget: Budget) -> Slices[dict[str, TransferTotals]]:
    kv_bytes = yield from _by_source(page, _TRANSFERS[0], budget)
    seconds = yield from _by_source(page, _TRANSFERS[1], budget)
    counts = yield from _by_source(page, _TRANSFERS[2], budget)
    return {
        source: TransferTotals(total, seconds.get(source, 0.0), count(counts.get(source, 0.0)))
        for source, total in kv_bytes.items()
    }


def _by_source(page: bytes, name: bytes, budget: Budget) -> Slices[dict[str, float]]:
    totals: dict[str, float] = {}
    for text, value in (yield from samples(page, name, budget)):
        if budget.spend(len(text)):
            yield
        source = labels_of(text).get("source", "")
        totals[source] = totals.get(source, 0.0) + value
    return totals
