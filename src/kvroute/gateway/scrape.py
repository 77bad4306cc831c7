"""Engines' own metrics: load, memory and KV transfers, scraped from their `/metrics` pages into Control's events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from kvroute.gateway.callbacks import weakly
from kvroute.gateway.kv_links import LinkSeen, LinkWatch
from kvroute.gateway.logs import note
from kvroute.gateway.metrics_page import EngineMetrics, TransferTotals, metrics_in
from kvroute.gateway.polling import Answer, Poller
from kvroute.gateway.pool import Pool
from kvroute.gateway.samples import SERIES_MAX, PageError
from kvroute.gateway.slices import Slices
from kvroute.types import Event, InstanceMeasured, KvCleared, TransferMeasured

SERIES_PER_INSTANCE = 64
"""Series that a page may have for each instance of the cluster, beyond SERIES_MAX."""
_STRANGERS_MAX = 64
"""Unknown sources that are told of in the log."""
_SECONDS_MIN = 1e-6
"""Transfers that took less in all are not measured."""


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
            if transfers > 0 and kv_bytes > 0 and seconds >= _SECONDS_MIN:
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
        body_max_bytes: int = 4_000_000,
    ) -> None:
        """
        Args:
            names, pool_of, path, interval_s, timeout_s, body_max_bytes: see `Poller`.
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
        self._series_max = SERIES_MAX + SERIES_PER_INSTANCE * len(names)
        self._readings: dict[str, asyncio.Handle] = {}
        """Pages that are being read, in slices."""
        self._poller = Poller(
            names,
            pool_of,
            path.encode(),
            weakly(self._answered),
            interval_s=interval_s,
            timeout_s=timeout_s,
            body_max_bytes=body_max_bytes,
        )

    def start(self) -> None:
        """Begin, from within the loop."""
        self._poller.start()

    def close(self) -> None:
        """Scrape no more."""
        self._poller.close()
        for handle in self._readings.values():
            handle.cancel()
        self._readings.clear()

    def age_s(self, name: str) -> float | None:
        """Of the last good page; None before the first."""
        measured_at = self._measured_at.get(name)
        return None if measured_at is None else self._now() - measured_at

    def failure(self, name: str) -> str:
        """Why the last page was not good; empty if it was, or none has come."""
        return self._failures.get(name, "")

    def _answered(self, name: str, answer: Answer) -> None:
        if name in self._readings:  # the last page takes longer than an interval; this one is as good as the next
            return
        if answer.status == 200:
            self._read(name, metrics_in(answer.body, self.metrics.get(name), self._series_max))
            return
        if answer.refused:
            self._gone.add(name)
        self._failed(name, answer.failure or f"HTTP status {answer.status}")

    def _read(self, name: str, slices: Slices[EngineMetrics]) -> None:
        """One slice of a page."""
        self._readings.pop(name, None)
        try:
            next(slices)
        except StopIteration as end:
            self._read_whole(name, end.value)
        except PageError as error:
            self._failed(name, str(error))
        else:
            self._readings[name] = asyncio.get_running_loop().call_soon(self._read, name, slices)

    def _read_whole(self, name: str, metrics: EngineMetrics) -> None:
        if metrics.running is None:
            self._failed(name, "no metrics of vLLM or SGLang")
            return
        if self._failures.pop(name, ""):
            note("info", "metrics_readable", instance=name)
        self._tell(name, metrics)

    def _failed(self, name: str, why: str) -> None:
        if name not in self._failures:
            note("warning", "metrics_unreadable", instance=name, reason=why)
        self._failures[name] = why
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
            elif event.source not in self._strangers and len(self._strangers) < _STRANGERS_MAX:
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
