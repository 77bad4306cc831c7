"""Engine metrics: load, memory and KV transfers, scraped from `/metrics` pages and emitted as events for `Control`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from kvroute.http.client.callbacks import weakly
from kvroute.http.client.poller import Poller, PollResult, PollSpec
from kvroute.http.client.pool import UpstreamPool
from kvroute.http.slices import Slices
from kvroute.serve.engines.servers import Servers
from kvroute.serve.observe.logs import log_event
from kvroute.serve.observe.metrics.prometheus_text import SERIES_MAX, PageError
from kvroute.serve.proxy.own_transfers import Counted
from kvroute.serve.telemetry.connector_counters import ConnectorCounters, TransferTotals
from kvroute.serve.telemetry.metrics_page import EngineMetrics, metrics_in
from kvroute.serve.telemetry.rank_pages import pages_by_rank
from kvroute.serve.wan.tcp_links import TcpDelta, TcpSample
from kvroute.types import AdaptersMeasured, Event, InstanceMeasured, KvCleared, MeasuredBy, TransferMeasured

SERIES_PER_INSTANCE = 64
"""Series per instance of the cluster that a page may have in addition to SERIES_MAX."""
_STRANGERS_MAX = 64
"""Maximum number of unknown sources that are logged."""
_SECONDS_MIN = 1e-6
"""Transfers whose total duration is shorter are not measured."""
_MEASURED_BY: Mapping[str, MeasuredBy] = {"nixl": "nixl", "sglang": "sglang"}
Attribute: TypeAlias = Callable[[float, str, Counted], list[TransferMeasured]]
"""(time, engine, transfers) -> measurements by pair; see `OwnTransfers.measured`."""


class CounterDeltas:
    """Differences between consecutive pages of one engine, by key. The first page only sets the baseline."""

    __slots__ = ("_before",)

    def __init__(self) -> None:
        self._before: Mapping[str, TransferTotals] | None = None

    def since_last(self, totals: Mapping[str, TransferTotals]) -> list[tuple[str, TransferTotals]]:
        """Return the transfers since the last page, in the order of the keys.

        A counter that has decreased was reset: its whole value is new.
        """
        before, self._before = self._before, totals
        if before is None or before is totals:
            return []
        found = []
        for key in sorted(totals):
            new, old = totals[key], before.get(key, TransferTotals())
            if new.kv_bytes < old.kv_bytes or new.seconds < old.seconds or new.transfers < old.transfers:
                old = TransferTotals()
            kv_bytes, seconds = new.kv_bytes - old.kv_bytes, new.seconds - old.seconds
            transfers = new.transfers - old.transfers
            if transfers > 0 and kv_bytes > 0 and seconds >= _SECONDS_MIN:
                found.append((key, TransferTotals(kv_bytes, seconds, transfers)))
        return found


class TransferCounters:
    """Transfers of one engine since its last page, as its connectors have counted them."""

    __slots__ = ("_attribute", "_by_connector", "_by_source", "target")

    def __init__(self, target: str, attribute: Attribute | None = None) -> None:
        """Args:

        target: name of the engine.
        attribute: returns the measurements of the pairs of instances to which transfers belong whose counters do not
            name the other instance; None: they are not measured.
        """
        self.target, self._attribute = target, attribute
        self._by_source, self._by_connector = CounterDeltas(), CounterDeltas()

    def measured(
        self, at: float, by_source: Mapping[str, TransferTotals], connectors: ConnectorCounters | None = None
    ) -> list[TransferMeasured]:
        """Return the transfers since the last page. Args: see `EngineMetrics`."""
        events = [
            TransferMeasured(at, source, self.target, new.kv_bytes, new.seconds, new.transfers, "kvroute")
            for source, new in self._by_source.since_last(by_source)
        ]
        for name, new in self._by_connector.since_last(connectors.moved if connectors is not None else {}):
            if self._attribute is not None:
                counted = Counted(_MEASURED_BY[name], new.kv_bytes, new.seconds, new.transfers)
                events += self._attribute(at, self.target, counted)
        return events


class Scraper:
    """Scrapes all engines once per interval and emits their metrics as events.

    After a failure it emits nothing: Control keeps the last values, and `age_s` returns their age.
    """

    def __init__(
        self,
        servers: Servers,
        pool_of: Callable[[str], UpstreamPool | None],
        emit: Callable[[Event], None],
        now: Callable[[], float],
        settings: PollSpec,
        *,
        on_restart: Callable[[str, float | None], bool] | None = None,
        on_links: Callable[[str, Sequence[TcpSample]], None] | None = None,
        attribute: Attribute | None = None,
        on_losses: Callable[[str, int, int], None] | None = None,
    ) -> None:
        """
        Args:
            servers: whose pages are scraped, each for all of its instances; the caller changes them.
            pool_of: returns the connection pool of a server, see `Poller`.
            settings: see `Poller`.
            emit: receives InstanceMeasured, AdaptersMeasured, TransferMeasured and KvCleared.
            now: clock of these events, in seconds.
            on_restart: called with (instance, start of its new process); returns whether it handles the loss of that
                engine's cache, as `KvEvents.restarted` does; if not, KvCleared is emitted here.
            on_links: called with (source instance, samples of its outgoing KV connections since its last page), for
                pages that have them; the samples are empty if the page cannot be read.
            attribute: see `TransferCounters`.
            on_losses: called with (instance, failed transfers, requests whose KV has expired) when its connector has
                counted any since its last page.
        """
        self.metrics: dict[str, EngineMetrics] = {}
        """The last good page of each engine."""
        self._servers, self._names = servers, frozenset(servers.names)
        self._emit = emit
        self._now = now
        self._on_restart = on_restart
        self._on_links = on_links
        self._attribute, self._on_losses = attribute, on_losses
        self._links = {name: TcpDelta() for name in self._names}
        self._counters = {name: TransferCounters(name, attribute) for name in self._names}
        self._measured_at: dict[str, float] = {}
        self._failures: dict[str, str] = {}
        self._gone: set[str] = set()
        """Instances whose port has refused a connection since the last good page."""
        self._strangers: set[str] = set()
        self._series_max = SERIES_MAX + SERIES_PER_INSTANCE * len(self._names)
        self._readings: dict[str, asyncio.Handle] = {}
        """Pages that are being parsed in slices, by server."""
        self._poller = Poller(tuple(servers), pool_of, weakly(self._answered), settings)

    def add(self, name: str) -> None:
        """Scrape for another instance from now on, the first time at once if it is the first one of its server."""
        self._names |= {name}
        self._links[name], self._counters[name] = TcpDelta(), TransferCounters(name, self._attribute)
        self._series_max = SERIES_MAX + SERIES_PER_INSTANCE * len(self._names)
        server = self._servers.of(name)
        if len(self._servers.instances(server)) == 1:
            self._poller.add(server)

    def remove(self, name: str) -> None:
        """Scrape for an instance no more, and forget it; call it before the instance leaves its server."""
        server = self._servers.of(name)
        if len(self._servers.instances(server)) == 1:
            self._poller.remove(server)
        reading = self._readings.pop(server, None)
        if reading is not None:
            reading.cancel()
        self._names -= {name}
        del self._links[name], self._counters[name]
        for known in (self.metrics, self._measured_at, self._failures):
            known.pop(name, None)
        self._gone.discard(name)

    def start(self) -> None:
        """Start, from within the loop."""
        self._poller.start()

    def close(self) -> None:
        """Stop scraping."""
        self._poller.close()
        for handle in self._readings.values():
            handle.cancel()
        self._readings.clear()

    def age_s(self, name: str) -> float | None:
        """Return the age of the last good page; None before the first."""
        measured_at = self._measured_at.get(name)
        return None if measured_at is None else self._now() - measured_at

    def failure(self, name: str) -> str:
        """Return the error of the last page; empty if the page was good, or none has come."""
        return self._failures.get(name, "")

    def _answered(self, server: str, answer: PollResult) -> None:
        if server in self._readings:  # the last page takes longer than an interval; skip this one
            return
        if answer.status == 200:
            self._read(server, self._metrics_of(server, answer.body))
            return
        if answer.refused:
            self._gone.update(self._servers.instances(server))
        self._failed(server, answer.failure or f"HTTP status {answer.status}")

    def _metrics_of(self, server: str, page: bytes) -> Slices[dict[str, EngineMetrics]]:
        """Parse the page of a server for each of its instances."""
        pages = {server: page}
        if server not in self._names:  # its instances are data-parallel ranks
            pages = yield from pages_by_rank(page, self._servers.instances(server))
        found = {}
        for name, part in pages.items():
            found[name] = yield from metrics_in(part, self.metrics.get(name), self._series_max)
        return found

    def _read(self, server: str, slices: Slices[dict[str, EngineMetrics]]) -> None:
        """Parse one slice of a page."""
        self._readings.pop(server, None)
        try:
            next(slices)
        except StopIteration as end:
            self._read_whole(server, end.value)
        except PageError as error:
            self._failed(server, str(error))
        else:
            self._readings[server] = asyncio.get_running_loop().call_soon(self._read, server, slices)

    def _read_whole(self, server: str, found: Mapping[str, EngineMetrics]) -> None:
        if any(metrics.running is None for metrics in found.values()):
            self._failed(server, "the page has no metrics of vLLM or SGLang")
            return
        failures = [self._failures.pop(name, "") for name in found]
        if any(failures):
            log_event("info", "metrics_readable", instance=server)
        for name, metrics in found.items():
            self._tell(name, metrics)

    def _failed(self, server: str, why: str) -> None:
        names = tuple(self._servers.instances(server))
        if not all(name in self._failures for name in names):
            log_event("warning", "metrics_unreadable", instance=server, reason=why)
        for name in names:
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
        adapters = metrics.adapters
        if adapters is not None and (before is None or before.adapters != adapters):
            self._emit(AdaptersMeasured(at, name, adapters.in_use, adapters.slots))
        if before is not None:
            self._count_losses(name, before.connectors, metrics.connectors)
        for event in self._counters[name].measured(at, metrics.transfers, metrics.connectors):
            if event.source in self._names and event.target in self._names:
                self._emit(event)
            elif event.source not in self._strangers and len(self._strangers) < _STRANGERS_MAX:
                self._strangers.add(event.source)
                log_event("warning", "kv_transfers_from_unknown_peer", instance=name, source=event.source)
        seen = self._links[name].seen(metrics.links)
        if seen is not None and self._on_links is not None:
            self._on_links(name, seen)

    def _count_losses(self, name: str, before: ConnectorCounters, now: ConnectorCounters) -> None:
        failed, expired = _increase(before.failed, now.failed), _increase(before.expired, now.expired)
        if self._on_losses is not None and (failed or expired):
            self._on_losses(name, failed, expired)

    def _restarted(self, name: str, before: EngineMetrics, metrics: EngineMetrics) -> bool:
        """Whether the process has restarted: by its start time, or if that is missing, by a refused connection."""
        if before.started_s is not None and metrics.started_s is not None:
            return before.started_s != metrics.started_s
        return name in self._gone


def _increase(before: int | None, now: int | None) -> int:
    """Return by how much a counter has grown; a counter that has decreased was reset."""
    if now is None:
        return 0
    return now - before if before is not None and now >= before else now
