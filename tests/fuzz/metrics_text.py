"""Fuzzing target: two `/metrics` pages of one engine, through `gateway.metrics_page`, counters and TCP statistics."""

from __future__ import annotations

import math

import msgspec
from tests.examples import EXAMPLES
from tests.fuzz.cuts import bounded

from kvroute.control import ControlSpec
from kvroute.serve.proxy.own_transfers import Counted, OwnTransfers
from kvroute.serve.telemetry.metrics_page import EngineMetrics, read_metrics
from kvroute.serve.telemetry.scrape import TransferCounters
from kvroute.serve.wan.tcp_links import TcpDelta
from kvroute.topology import load
from kvroute.types import Decode, InstanceMeasured, TransferMeasured

INSTRUMENTED = (
    "kvroute.serve.observe.metrics.prometheus_text",
    "kvroute.serve.telemetry.connector_counters",
    "kvroute.serve.telemetry.metrics_page",
    "kvroute.serve.wan.tcp_links",
)
RUNS = 20_000
_SEPARATOR = b"\n\n--\n\n"
_CLUSTER = load(EXAMPLES / "small.yaml")
_CONTROL = ControlSpec().build(_CLUSTER)
_NAMES = [instance.name for instance in _CLUSTER.instances]
_COUNT_MAX = 2**31 - 1


def check(data: bytes) -> str:
    """Every number is finite and within bounds, whatever the other lines contain. A second page gives events that a
    real core accepts and that can be logged."""
    first, _, second = data.partition(_SEPARATOR)
    before = bounded(lambda: read_metrics(first), 2_000 + 20 * len(first))
    page = read_metrics(second, before)
    assert page == read_metrics(second)
    commented = b"\n".join(line + b"\n# HELP x y" for line in second.split(b"\n"))
    assert read_metrics(commented) == page
    for metrics in (before, page):
        _check(metrics)

    target, counters, watch = _NAMES[-1], TransferCounters(_NAMES[-1], _attributed), TcpDelta()
    counters.measured(1.0, before.transfers, before.connectors)
    for event in counters.measured(2.0, page.transfers, page.connectors):
        assert all(map(_valid, (event.kv_bytes, event.seconds, event.kv_bytes / event.seconds)))
        assert msgspec.json.decode(msgspec.json.encode(event), type=TransferMeasured) == event
        if event.source in _NAMES and event.source != target:
            _CONTROL.handle(event)
    watch.seen(before.links)
    for seen in watch.seen(page.links) or ():
        assert all(
            map(_valid, (seen.seconds, seen.arrived_bytes, seen.queue_delay_s, seen.stalled_s, seen.bytes_per_s))
        )
        assert 0.0 <= seen.again_share < math.inf
    if page.running is not None:
        _CONTROL.handle(InstanceMeasured(2.0, target, page.running, page.waiting, page.kv_used_share))
    return "refused" if page.running is None else "accepted"


def _attributed(at: float, engine: str, counted: Counted) -> list[TransferMeasured]:
    """Attribute to the only own transfer, of all ranks that the engine has counted."""
    own = OwnTransfers(lambda _tier, nbytes: nbytes / 1e9, lambda _name: counted.transfers)
    own.started(Decode(1, _NAMES[0], engine, 0, 1e9, 1e9, 0))
    return own.measured(at, engine, counted)


def _valid(value: float) -> bool:
    return math.isfinite(value) and value >= 0.0


def _check(metrics: EngineMetrics) -> None:
    for count in (metrics.running, metrics.waiting, metrics.kv_blocks, metrics.block_tokens):
        assert count is None or 0 <= count <= _COUNT_MAX
    assert metrics.kv_used_share is None or 0.0 <= metrics.kv_used_share <= 1.0
    assert metrics.started_s is None or math.isfinite(metrics.started_s)
    for count in (metrics.connectors.failed, metrics.connectors.expired):
        assert count is None or 0 <= count <= _COUNT_MAX
    for totals in (*metrics.transfers.values(), *metrics.connectors.moved.values()):
        assert math.isfinite(totals.kv_bytes)
        assert math.isfinite(totals.seconds)
        assert 0 <= totals.transfers <= _COUNT_MAX
    for link in metrics.links.values():
        assert all(math.isfinite(getattr(link, name)) for name in link.__slots__)
