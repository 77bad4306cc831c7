"""Engines' own metrics: load, memory and KV transfers, read from their `/metrics` pages into Control's events.

A page has hundreds of series of which three matter: names are looked for in the bytes, and only their lines are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvroute.gateway.callbacks import weakly
from kvroute.gateway.kv_links import LinkSeen, LinkTotals, LinkWatch, link_lines, read_links
from kvroute.gateway.logs import note
from kvroute.gateway.polling import Answer, Poller
from kvroute.gateway.pool import Pool
from kvroute.gateway.samples import labels_of, lines_between, samples, values
from kvroute.types import Event, InstanceMeasured, KvCleared, TransferMeasured

_VLLM = (b"vllm:num_requests_running", b"vllm:num_requests_waiting", b"vllm:kv_cache_usage_perc")
_SGLANG = (b"sglang:num_running_reqs", b"sglang:num_queue_reqs", b"sglang:token_usage")
_OLD_USAGE = b"vllm:gpu_cache_usage_perc"
_CACHE_CONFIG = b"vllm:cache_config_info"
_STARTED = b"process_start_time_seconds"
_TRANSFER = b"\nkvroute:kv_transfer"
_TRANSFERS = (b"kvroute:kv_transfer_bytes_total", b"kvroute:kv_transfer_seconds_total", b"kvroute:kv_transfers_total")


@dataclass(frozen=True, slots=True)
class TransferTotals:
    """What an engine has pulled from one source since it started."""

    kv_bytes: float = 0.0
    seconds: float = 0.0
    transfers: int = 0


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """One page. Where it has several engines (data-parallel ranks), counts are summed and shares averaged."""

    running: int | None
    """None: the page is not one of an engine that is known here."""
    waiting: int
    kv_used_share: float | None
    """In [0, 1]; None: it does not say."""
    block_tokens: int | None = None
    kv_blocks: int | None = None
    started_s: float | None = None
    """When its process started, seconds since 1970."""
    transfers: Mapping[str, TransferTotals] = field(default_factory=dict)
    """By source instance."""
    transfer_lines: bytes = field(default=b"", compare=False, repr=False)
    """Where they stand on the page."""
    links: Mapping[str, LinkTotals] = field(default_factory=dict)
    """Connections that its KV leaves by, by target."""
    link_lines: bytes = field(default=b"", compare=False, repr=False)


def read_metrics(page: bytes, before: EngineMetrics | None = None) -> EngineMetrics:
    """What matters of a Prometheus text page of vLLM or SGLang; a value that is not a finite number is passed by.

    `before` is what the same engine's last page said: an engine has three lines for each source, and mostly all of them
    stand there again.
    """
    page = b"\n" + page
    names = _VLLM if page.find(b"\n" + _VLLM[0]) >= 0 else _SGLANG
    running, waiting, shares = (values(page, name) for name in names)
    if not shares and names is _VLLM:
        shares = values(page, _OLD_USAGE)
    block_tokens, kv_blocks = _cache_config(page)
    started = values(page, _STARTED)
    transfer_lines = lines_between(page, _TRANSFER)
    if before is not None and before.transfer_lines == transfer_lines:
        transfers = before.transfers
    else:
        transfers = _transfers(transfer_lines)
    about_links = link_lines(page)
    unchanged = before is not None and before.link_lines == about_links
    links = before.links if before is not None and unchanged else read_links(about_links)
    return EngineMetrics(
        running=round(max(sum(running), 0.0)) if running else None,
        waiting=round(max(sum(waiting), 0.0)),
        kv_used_share=min(max(sum(shares) / len(shares), 0.0), 1.0) if shares else None,
        block_tokens=block_tokens,
        kv_blocks=kv_blocks,
        started_s=started[0] if started else None,
        transfers=transfers,
        transfer_lines=transfer_lines,
        links=links,
        link_lines=about_links,
    )


def _cache_config(page: bytes) -> tuple[int | None, int | None]:
    """Tokens of a block, and blocks of all engines of the page."""
    block_tokens, kv_blocks = None, 0
    for text, _ in samples(page, _CACHE_CONFIG):
        labels = labels_of(text)
        if labels.get("block_size", "").isdecimal():
            block_tokens = int(labels["block_size"])
        if labels.get("num_gpu_blocks", "").isdecimal():
            kv_blocks += int(labels["num_gpu_blocks"])
    return block_tokens, kv_blocks or None


def _transfers(page: bytes) -> dict[str, TransferTotals]:
    kv_bytes, seconds, counts = (_by_source(page, name) for name in _TRANSFERS)
    return {
        source: TransferTotals(total, seconds.get(source, 0.0), round(counts.get(source, 0.0)))
        for source, total in kv_bytes.items()
    }


def _by_source(page: bytes, name: bytes) -> dict[str, float]:
    totals: dict[str, float] = {}
    for text, value in samples(page, name):
        source = labels_of(text).get("source", "")
        totals[source] = totals.get(source, 0.0) + value
    return totals


class TransferCounters:
    """Differences between one engine's pages. The first page only says where to count from."""

    __slots__ = ("_before", "target")

    def __init__(self, target: str) -> None:
        self.target = target
        self._before: Mapping[str, TransferTotals] | None = None

    def measured(self, at: float, totals: Mapping[str, TransferTotals]) -> list[TransferMeasured]:
        """What has been transferred since the last page, by source in their order by name.

        A counter that has fallen was reset: all that it shows is new.
        """
        before, self._before = self._before, totals
        if before is None or before is totals:
            return []
        events = []
        for source in sorted(totals):
            new, old = totals[source], before.get(source, TransferTotals())
            if new.kv_bytes < old.kv_bytes or new.seconds < old.seconds or new.transfers < old.transfers:
                old = TransferTotals()
            kv_bytes, seconds = new.kv_bytes - old.kv_bytes, new.seconds - old.seconds
            transfers = new.transfers - old.transfers
            if transfers > 0 and kv_bytes > 0 and seconds > 0:
                events.append(TransferMeasured(at, source, self.target, kv_bytes, seconds, transfers))
        return events


class Scraper:
    """Scrapes all engines once an interval and emits what they say.

    After a failure it keeps quiet: Control goes on with what it knew, and `age_s` tells how old that is.
    """

    def __init__(
        self,
        names: Sequence[str],
        pool_of: Callable[[str], Pool | None],
        emit: Callable[[Event], None],
        now: Callable[[], float],
        *,
        on_restart: Callable[[str, float | None], bool] | None = None,
        on_links: Callable[[str, Sequence[LinkSeen]], None] | None = None,
        path: str = "/metrics",
        interval_s: float = 1.0,
        timeout_s: float = 1.0,
    ) -> None:
        """
        Args:
            names, pool_of, path, interval_s, timeout_s: see `Poller`.
            emit: takes InstanceMeasured, TransferMeasured and KvCleared.
            now: their clock.
            on_restart: (instance, when its new process started) -> whether the asked one looks after what that engine
                holds, as `KvEvents.restarted` does; else KvCleared is emitted here.
            on_links: (source instance, how its KV has left for others since its last page), for pages that tell; of
                one that cannot be read, nothing.
        """
        self.metrics: dict[str, EngineMetrics] = {}
        """The last good page of each."""
        self._names = frozenset(names)
        self._emit = emit
        self._now = now
        self._on_restart = on_restart
        self._on_links = on_links
        self._links = {name: LinkWatch() for name in names}
        self._counters = {name: TransferCounters(name) for name in names}
        self._measured_at: dict[str, float] = {}
        self._failures: dict[str, str] = {}
        self._gone: set[str] = set()
        """Nobody listened there since the last good page."""
        self._strangers: set[str] = set()
        self._poller = Poller(
            names, pool_of, path.encode(), weakly(self._answered), interval_s=interval_s, timeout_s=timeout_s
        )

    def start(self) -> None:
        """Begin, from within the loop."""
        self._poller.start()

    def close(self) -> None:
        """Scrape no more."""
        self._poller.close()

    def age_s(self, name: str) -> float | None:
        """Of the last good page; None before the first."""
        measured_at = self._measured_at.get(name)
        return None if measured_at is None else self._now() - measured_at

    def failure(self, name: str) -> str:
        """Why the last page was not good; empty if it was, or none has come."""
        return self._failures.get(name, "")

    def _answered(self, name: str, answer: Answer) -> None:
        metrics = read_metrics(answer.body, self.metrics.get(name)) if answer.status == 200 else None
        if metrics is None or metrics.running is None:
            if answer.refused:
                self._gone.add(name)
            self._failed(name, answer)
            return
        if self._failures.pop(name, ""):
            note("info", "metrics_readable", instance=name)
        self._tell(name, metrics)

    def _failed(self, name: str, answer: Answer) -> None:
        wrong = f"HTTP status {answer.status}" if answer.status != 200 else "no metrics of vLLM or SGLang"
        if name not in self._failures:
            note("warning", "metrics_unreadable", instance=name, reason=answer.failure or wrong)
        self._failures[name] = answer.failure or wrong
        if self._on_links is not None and self._links[name].forget():
            self._on_links(name, ())

    def _tell(self, name: str, metrics: EngineMetrics) -> None:
        at = self._now()
        before = self.metrics.get(name)
        if before is not None and self._restarted(name, before, metrics):
            looked_after = self._on_restart is not None and self._on_restart(name, metrics.started_s)
            if not looked_after:
                self._emit(KvCleared(at, name))
        self._gone.discard(name)
        self.metrics[name] = metrics
        self._measured_at[name] = at
        assert metrics.running is not None
        self._emit(InstanceMeasured(at, name, metrics.running, metrics.waiting, metrics.kv_used_share))
        for event in self._counters[name].measured(at, metrics.transfers):
            if event.source in self._names:
                self._emit(event)
            elif event.source not in self._strangers:
                self._strangers.add(event.source)
                note("warning", "kv_transfers_from_stranger", instance=name, source=event.source)
        seen = self._links[name].seen(metrics.links)
        if seen is not None and self._on_links is not None:
            self._on_links(name, seen)

    def _restarted(self, name: str, before: EngineMetrics, metrics: EngineMetrics) -> bool:
        """By the process's own word; without it, by its having been gone."""
        if before.started_s is not None and metrics.started_s is not None:
            return before.started_s != metrics.started_s
        return name in self._gone
