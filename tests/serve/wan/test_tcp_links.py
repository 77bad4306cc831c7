"""TCP statistics of KV transfers: pages are parsed as Prometheus parses them, two samples give an observation,
observations give the state of a WAN path. The whole gateway is tested while a link between datacenters is cut, slow or
at full speed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import fields, replace

import numpy as np
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from tests.serve.rig import Rig
from tests.serve.two_sites import (
    AWAY,
    HOME,
    LONG,
    OFFLOAD,
    TEXT,
    metric,
    two_sites,
    wait_for_metric,
)
from tests.waiting import until

from kvroute.http.slices import whole
from kvroute.serve.observe.metrics.prometheus_text import Budget
from kvroute.serve.wan.path_telemetry import OTHERS_MAX, PathTelemetry
from kvroute.serve.wan.tcp_links import (
    TcpCounters,
    TcpDelta,
    TcpSample,
    between,
    link_lines,
    read_links,
)
from kvroute.topology import parse
from kvroute.types import CongestionMeasured, Event, TransferMeasured

NAMES = {
    "kvroute:kv_sent_bytes_total": "sent_bytes",
    "kvroute:kv_sent_again_bytes_total": "again_bytes",
    "kvroute:kv_sent_busy_seconds_total": "busy_s",
    "kvroute:kv_link_connections": "connections",
    "kvroute:kv_link_rtt_seconds": "rtt_s",
    "kvroute:kv_link_min_rtt_seconds": "min_rtt_s",
    "kvroute:kv_link_queue_bytes": "queue_bytes",
    "kvroute:kv_link_unsent_bytes": "unsent_bytes",
    "kvroute:kv_link_looked_seconds": "looked_s",
}
LONGEST = {"rtt_s", "min_rtt_s", "looked_s"}
OTHER_NAMES = ["kvroute:kv_link_cwnd_bytes", "kvroute:kv_sent_segments_total", "vllm:num_requests_running"]
ROWS = st.lists(
    st.tuples(
        st.sampled_from([*NAMES, *OTHER_NAMES]),
        st.sampled_from(["d0", 'd"1', "d\\2"]),
        st.integers(0, 1),
        st.floats(0, 1e9),
    ),
    max_size=24,
    unique_by=lambda row: row[:3],
)


@given(ROWS)
def test_pages_are_read_as_prometheus_reads_them(rows: list[tuple[str, str, int, float]]) -> None:
    """Values of the ranks of an engine are summed, except times: there the longest one counts."""

    def escaped(text: str) -> str:
        return text.replace("\\", r"\\").replace('"', r"\"")

    lines = [f'{name}{{engine="{rank}",target="{escaped(target)}"}} {value!r}' for name, target, rank, value in rows]
    page = "\n".join([*lines, ""])
    expected: dict[str, dict[str, float]] = {}
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    for sample in samples if any(sample.name.startswith("kvroute:kv_link") for sample in samples) else []:
        field = NAMES.get(sample.name)
        if field is not None:
            totals = expected.setdefault(sample.labels["target"], {})
            before = totals.get(field, 0.0)
            totals[field] = max(before, sample.value) if field in LONGEST else before + sample.value
    assert whole(read_links(link_lines(b"\n" + page.encode()), Budget())) == {
        target: TcpCounters(**totals) for target, totals in expected.items()
    }


AMOUNTS = st.floats(0.0, 1e12)
TOTALS = st.builds(TcpCounters, **{field.name: AMOUNTS for field in fields(TcpCounters)})


@given(TOTALS, TOTALS, st.floats(0, 100))
def test_two_samples_give_one_observation_or_none(old: TcpCounters, new: TcpCounters, stalled_s: float) -> None:
    """For any pages, an observation covers a positive time, and its bytes and shares are within bounds. There is none
    if a counter decreased or if the page is not newer."""
    seen = between("d0", old, new, stalled_s)
    fell = any(getattr(new, name) < getattr(old, name) for name in ("sent_bytes", "again_bytes", "busy_s"))
    assert (seen is None) == (fell or new.looked_s <= old.looked_s)
    if seen is None:
        return
    assert seen.seconds == new.looked_s - old.looked_s > 0
    assert 0.0 <= seen.arrived_bytes <= new.sent_bytes - old.sent_bytes
    assert seen.queue_delay_s >= 0.0
    assert seen.backlogged >= seen.congested
    assert seen.stalled_s in (0.0, stalled_s + seen.seconds)
    assert not (seen.stalled_s and seen.arrived_bytes)
    assert seen.bytes_per_s * seen.seconds == pytest.approx(seen.arrived_bytes)


BUSY = TcpCounters(
    sent_bytes=1e9,
    busy_s=4.0,
    connections=4,
    rtt_s=0.04,
    min_rtt_s=0.02,
    queue_bytes=4e6,
    unsent_bytes=1e6,
    looked_s=1.0,
)
LATER = replace(BUSY, sent_bytes=1.5e9, busy_s=8.0, looked_s=2.0)


@pytest.mark.parametrize(
    ("changed", "backlogged", "congested"),
    [
        ({}, True, True),
        ({"unsent_bytes": 0.0}, False, False),
        ({"unsent_bytes": 1e5}, False, False),
        ({"connections": 8, "unsent_bytes": 2e6}, False, False),
        ({"busy_s": 6.0}, False, False),
        ({"rtt_s": 0.025}, True, False),
        ({"min_rtt_s": 0.0}, True, False),
        ({"rtt_s": 0.0009, "min_rtt_s": 0.0001}, True, False),
        ({"rtt_s": 0.025, "again_bytes": 0.5e6}, True, False),
        ({"rtt_s": 0.025, "again_bytes": 10e6}, True, True),
    ],
    ids=[
        "queue",
        "nothing-waits",
        "little-waits",
        "others-join",
        "pauses",
        "no-queue",
        "no-shortest",
        "short-queue",
        "line-loss",
        "overflow",
    ],
)
def test_a_full_link_is_recognised(changed: dict[str, float], backlogged: bool, congested: bool) -> None:
    """Four connections had data in flight all the time and more to send; a queue has built up on the path, or has
    overflowed."""
    seen = between("d0", BUSY, replace(LATER, **changed), 0.0)
    assert seen is not None
    assert (seen.backlogged, seen.congested) == (backlogged, congested)
    assert seen.bytes_per_s == 5e8 - changed.get("again_bytes", 0.0)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.sampled_from([0.0, 0.5, 1.0])), max_size=20))
def test_a_monitor_reports_each_byte_once_and_the_time_of_a_stall(steps: list[tuple[int, bool, float]]) -> None:
    """Pages may repeat: the bytes add up to those sent after the first page. A stall is measured in the engine's own
    time and restarts whenever any byte is sent."""
    watch, link, stalled_s = TcpDelta(), replace(BUSY, looked_s=1.0), 0.0
    assert watch.seen({"d0": link}) is None
    first, arrived = link, 0.0
    for sent, again, seconds in steps:
        if seconds:
            more = sent * 1000.0
            extra = 10.0 if again else 0.0
            link = replace(
                link,
                sent_bytes=link.sent_bytes + more + extra,
                again_bytes=link.again_bytes + extra,
                looked_s=link.looked_s + seconds,
            )
            stalled_s = 0.0 if more else stalled_s + seconds
        seen = watch.seen({"d0": link})
        assert (seen is None) == (seconds == 0.0)
        for sample in seen or ():
            arrived += sample.arrived_bytes
            assert sample.stalled_s == stalled_s
    assert arrived == link.sent_bytes - link.again_bytes - first.sent_bytes + first.again_bytes
    assert watch.forget()
    assert not watch.forget()
    assert watch.seen({"d0": link}) is None


def test_samples_without_a_time_give_no_observation() -> None:
    """The values may be of any time, because an engine without work does not sample."""
    watch, old = TcpDelta(), replace(BUSY, looked_s=0.0)
    assert watch.seen({}) is None
    assert watch.seen({"d0": old}) is None
    assert watch.seen({"d0": replace(old, sent_bytes=2e9)}) is None


SITES = parse(TEXT)
CAPACITY = 5e9


def seen(bytes_per_s: float, *, target: str = "decode0", full: bool = False, stalled_s: float = 0.0) -> TcpSample:
    """Return an observation of one second of one target."""
    return TcpSample(target, 1.0, bytes_per_s, 0.0, 0.01 if full else 0.0, full or bool(stalled_s), full, stalled_s)


def signals() -> PathTelemetry:
    return PathTelemetry(SITES, stalled_s=2.0, fresh_s=3.0)


OWN_CAPACITY = 2e9
NARROW_SITES = replace(SITES, tier_bytes_per_s=np.array([9e11, 9e11, 9e11, 9e11, OWN_CAPACITY]))
"""A single transfer cannot fill the path."""


TARGETS = ("decode0", "decode1", "prefill0", "far1", "x")
SEEN = st.builds(
    seen,
    st.sampled_from([0.0, 1e9, 2e9, 6e9]),
    target=st.sampled_from(TARGETS),
    full=st.booleans(),
    stalled_s=st.sampled_from([0.0, 1.0, 2.0]),
)
PAGES = st.dictionaries(st.sampled_from(["far0", "far1", "prefill0"]), st.lists(SEEN, max_size=3))


@given(PAGES, st.floats(0, 10))
def test_the_state_of_a_path_is_within_bounds_and_expires(pages: Mapping[str, list[TcpSample]], age_s: float) -> None:
    """Only transfers between the sites count; a path with any progress is not stalled; the missing throughput is
    attributed to other traffic."""
    path = signals()
    for source, links in pages.items():
        path.record(source, links, 0.0)
    state = path.sample(AWAY, age_s)
    between_sites = [
        link
        for source, links in pages.items()
        if source != "prefill0"
        for link in links
        if link.target in ("decode0", "decode1", "prefill0")
    ]
    assert (state is None) == (not between_sites or age_s > 3.0)
    if state is None:
        return
    assert state.bytes_per_s == sum(site.arrived_bytes for site in between_sites)
    assert state.stalled == (not state.bytes_per_s and any(site.stalled_s == 2.0 for site in between_sites))
    assert (state.others is None) == (state.bytes_per_s == 0.0)
    assert 0.0 <= (state.others or 0.0) <= OTHERS_MAX
    if not any(site.congested for site in between_sites):
        assert not state.others


@given(
    st.lists(
        st.tuples(st.sampled_from(["far0", "far1"]), st.sampled_from(["decode0", "decode1", "decode2"])), min_size=1
    ),
    st.floats(0.1, 1.0),
)
def test_missing_throughput_of_a_full_path_counts_as_other_traffic(ends: list[tuple[str, str]], share: float) -> None:
    """The path may be full with any number of pairs; a limit of the senders' or receivers' own network interface is no
    evidence."""
    path, pairs = PathTelemetry(NARROW_SITES, stalled_s=2.0, fresh_s=3.0), sorted(set(ends))
    for sender in ("far0", "far1"):
        bytes_per_s = share * CAPACITY / len(pairs)
        path.record(
            sender, [seen(bytes_per_s, target=target, full=True) for source, target in pairs if source == sender], 0.0
        )
    state = path.sample(AWAY, 0.0)
    assert state is not None
    parallel_transfers = min(len({source for source, _ in pairs}), len({target for _, target in pairs}))
    path_bytes_per_s = min(CAPACITY, parallel_transfers * OWN_CAPACITY)
    assert state.others == pytest.approx(max(min(1.0 - share * CAPACITY / path_bytes_per_s, OTHERS_MAX), 0.0), abs=1e-9)
    assert not math.isnan(state.queue_delay_s)


WATCHED = OFFLOAD.replace(
    "wan_path: {failures: 2, open: 200 ms}", "wan_path: {failures: 2, open: 200 ms, stalled_after: 300 ms}"
)
SCRAPED = "  scrape: {interval: 50 ms}\n"
LONG_TIMEOUT_S = 60.0
VERY_LONG = LONG * 4
"""3.6 GB of KV: 0.7 seconds on the path, alone and at full capacity."""


def record_events(gate: Rig) -> list[Event]:
    """Record the events that collectors send to the core from now on."""
    events: list[Event] = []
    runtime = gate.gateway.runtime
    notify = runtime.notify

    def record(event: Event) -> None:
        events.append(event)
        notify(event)

    runtime.notify = record  # type: ignore[method-assign]
    return events


@pytest.mark.parametrize("layerwise", [False, True], ids=["serial", "layerwise"])
def test_a_cut_path_is_closed_before_any_engine_times_out(layerwise: bool) -> None:
    """Stalled bytes are the signal: engines would wait for a minute and no leg has failed, but new requests are
    prefilled at home. When the path moves again it is opened, and the waiting transfers complete."""
    section = WATCHED + ("    layerwise: true\n" if layerwise else "") + SCRAPED

    async def main() -> None:
        async with two_sites(section, kv_timeout_s=LONG_TIMEOUT_S) as gate:
            assert (await gate.ask(LONG)).status == 200
            await gate.command("far0", "wan", share=0)
            waiting = [asyncio.create_task(gate.ask(f"{n} {LONG}", stream=True)) for n in range(2)]
            await wait_for_metric(gate, "kvroute_wan_path_state", 2, site=AWAY)
            assert (await gate.ask(f"later {LONG}", stream=True)).status == 200
            assert await metric(gate, "kvroute_offload_decisions_total", site=HOME, reason="away_down") == 1
            assert not any(task.done() for task in waiting)
            assert "kvroute_leg_failures_total{" not in (await gate.get("/metrics")).body.decode()
            await gate.command("far0", "wan", share=1)
            await wait_for_metric(gate, "kvroute_wan_path_state", 0, site=AWAY)
            assert [response.status for response in await asyncio.gather(*waiting)] == [200] * 2
            assert (await gate.ask(f"last {LONG}", stream=True)).status == 200
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(main())


def test_a_slow_path_counts_as_other_traffic_until_it_recovers() -> None:
    """Half of the path is gone: the core receives it as the share of other traffic, with the pair's own throughput; the
    short-term loop gets the utilisation. Once the path is at full speed and idle, no such measurement remains."""
    half = 0.5

    async def main() -> None:
        async with two_sites(WATCHED + SCRAPED, kv_timeout_s=LONG_TIMEOUT_S) as gate:
            events = record_events(gate)
            await gate.command("far0", "wan", share=half)
            requests = [asyncio.create_task(gate.ask(f"{n} {VERY_LONG}", stream=True)) for n in range(2)]
            await until(lambda: any(isinstance(event, CongestionMeasured) for event in events))
            await until(lambda: any(isinstance(event, TransferMeasured) for event in events))
            first = next(event for event in events if isinstance(event, CongestionMeasured))
            assert first.per_tier[:4] == (0.0,) * 4
            offloading = gate.gateway.runtime.control.offloading
            assert offloading is not None
            others, _ = offloading.utilisation(0, gate.gateway.runtime.now())
            assert others > 0.0
            assert (await metric(gate, "kvroute_wan_path_other_traffic_ratio", site=AWAY) or 0.0) > 0.0
            assert [response.status for response in await asyncio.gather(*requests)] == [200] * 2
            shares = [event.per_tier[4] for event in events if isinstance(event, CongestionMeasured)]
            assert sorted(shares)[len(shares) // 2] == pytest.approx(half, abs=0.1)
            rates = [e.kv_bytes / e.seconds for e in events if isinstance(e, TransferMeasured) and e.transfers == 1]
            assert all(0 < rate <= 1.01 * half * CAPACITY for rate in rates)

    uvloop.run(main())


def test_a_path_full_of_own_traffic_has_no_other_traffic() -> None:
    """Several senders share the whole path: it is full, and the share attributed to other traffic is near zero."""

    async def main() -> None:
        async with two_sites(WATCHED + SCRAPED, kv_timeout_s=LONG_TIMEOUT_S) as gate:
            events = record_events(gate)
            requests = [asyncio.create_task(gate.ask(f"{n} {VERY_LONG}", stream=True)) for n in range(4)]
            await until(lambda: any(isinstance(event, TransferMeasured) for event in events))
            assert [response.status for response in await asyncio.gather(*requests)] == [200] * 4
            shares = sorted(event.per_tier[4] for event in events if isinstance(event, CongestionMeasured))
            assert not shares or shares[len(shares) // 2] < 0.1

    uvloop.run(main())
