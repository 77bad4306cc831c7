"""Scraping: pages parsed as by Prometheus's own parser, counters converted to transfers, a scraper on real sockets."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from tests.waiting import HANGS_S

from kvroute.http.client.poller import PollSpec
from kvroute.http.client.pool import UpstreamPool
from kvroute.serve.engines.servers import Servers
from kvroute.serve.observe.metrics.prometheus_text import LINE_BYTES_MAX, SERIES_MAX, PageError
from kvroute.serve.telemetry.connector_counters import TransferTotals
from kvroute.serve.telemetry.metrics_page import Adapters, EngineMetrics, metrics_in, read_metrics
from kvroute.serve.telemetry.scrape import Scraper, TransferCounters
from kvroute.types import Event, InstanceMeasured, KvCleared, TransferMeasured

VLLM = """\
# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 10442.0
# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.76376123456e+09
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_running{engine="1",model_name="tiny"} 4.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 1.0
vllm:num_requests_waiting{engine="1",model_name="tiny"} 0.0
# HELP vllm:num_requests_waiting_by_reason Waiting requests by reason.
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 77.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 0.75
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",num_gpu_blocks="512",sliding_window="None"} 1.0
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="1",num_gpu_blocks="512",sliding_window="None"} 1.0
# HELP kvroute:kv_transfer_bytes_total KV bytes pulled.
# TYPE kvroute:kv_transfer_bytes_total counter
kvroute:kv_transfer_bytes_total{source="prefill0"} 3e+08
kvroute:kv_transfer_bytes_total{source="pre\\"fill\\\\1}"} 5.0
# HELP kvroute:kv_transfer_seconds_total Seconds pulled.
# TYPE kvroute:kv_transfer_seconds_total counter
kvroute:kv_transfer_seconds_total{source="prefill0"} 1.5
# HELP kvroute:kv_transfers_total Transfers.
# TYPE kvroute:kv_transfers_total counter
kvroute:kv_transfers_total{source="prefill0"} 6.0
"""


def test_a_metrics_page_of_vllm_is_parsed() -> None:
    """With two data-parallel ranks, counts are summed, shares averaged, and names with the same prefix ignored."""
    assert read_metrics(VLLM.encode()) == EngineMetrics(
        running=7,
        waiting=1,
        kv_used_share=0.5,
        block_tokens=32,
        kv_blocks=1024,
        started_s=1.76376123456e9,
        transfers={"prefill0": TransferTotals(3e8, 1.5, 6), 'pre"fill\\1}': TransferTotals(5.0, 0.0, 0)},
    )


def test_metrics_pages_of_other_engines_are_parsed() -> None:
    """The pages use SGLang's names, an older vLLM's names, or none."""
    sglang = b'sglang:num_running_reqs{model_name="m"} 5\nsglang:num_queue_reqs 2\nsglang:token_usage 0.125\n'
    assert read_metrics(sglang) == EngineMetrics(running=5, waiting=2, kv_used_share=0.125)
    old = b"vllm:num_requests_running 1\nvllm:num_requests_waiting 2\nvllm:gpu_cache_usage_perc 0.5"
    assert read_metrics(old) == EngineMetrics(running=1, waiting=2, kv_used_share=0.5)
    assert read_metrics(b"<html>no such page</html>").running is None


@pytest.mark.parametrize(
    ("line", "running"),
    [
        (b"vllm:num_requests_running 3 1763761234000", 3),
        (b'vllm:num_requests_running{a="}"} 3.0 # {trace_id="x"} 9.0 1763761234.0', 3),
        (b'vllm:num_requests_running { a="# {" , } \t 3', 3),
        (b"vllm:num_requests_running NaN", None),
        (b"vllm:num_requests_running +Inf", None),
        (b"vllm:num_requests_running -2", 0),
        (b"vllm:num_requests_running{a=", None),
        (b"vllm:num_requests_running three", None),
        (b"vllm:num_requests_running", None),
        (b"xvllm:num_requests_running 4", None),
    ],
    ids=["timestamp", "exemplar", "spaces", "nan", "inf", "negative", "cut", "word", "bare", "prefix"],
)
def test_unusual_lines_are_parsed_or_skipped(line: bytes, running: int | None) -> None:
    assert read_metrics(line + b"\nother 1\n").running == running


LOADED = b"vllm:num_requests_running 1\n"


def test_implausible_numbers_are_skipped() -> None:
    """Such numbers would overflow in the counters, and Python cannot convert a number of too many digits."""
    digits = b"1" * 5000
    config = b'vllm:cache_config_info{block_size="%b",num_gpu_blocks="%b"} 1\n' % (digits, digits)
    page = LOADED + b"vllm:num_requests_waiting %b\nkvroute:kv_transfers_total 1e308\n" % digits + config
    assert read_metrics(page) == EngineMetrics(running=1, waiting=0, kv_used_share=None)
    many = read_metrics(b"vllm:num_requests_running 1e18\n" * 100 + b"vllm:kv_cache_usage_perc -1e300\n")
    assert (many.running, many.kv_used_share) == (2**31 - 1, None)


LORA = 'vllm:lora_requests_info{{max_lora="{}",running_lora_adapters="{}",waiting_lora_adapters="{}"}} {}\n'


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], None),
        ([("4", "", "", 1.5e9)], Adapters((), 4)),
        (
            [("4", "sql", "", 2.0), ("4", "sql,chat", "poet", 3.0), ("4", "", "", 1.0)],
            Adapters(("sql", "chat", "poet"), 4),
        ),
        ([("4", "sql", "sql", 2.0)], Adapters(("sql",), 4)),
        ([("many", "sql, chat", "", 2.0)], Adapters(("sql", "chat"), 0)),
    ],
    ids=["none", "idle", "latest", "both", "spaces"],
)
def test_the_adapters_of_the_latest_sample_are_read(rows: list[tuple[Any, ...]], expected: Adapters | None) -> None:
    """Each combination of adapters has a series of its own, whose value is the time at which it was set."""
    page = LOADED + "".join(LORA.format(*row) for row in rows).encode()
    read = read_metrics(page)
    assert read.adapters == expected
    assert read_metrics(page, read).adapters is read.adapters


def test_too_many_combinations_of_adapters_hide_only_the_adapters() -> None:
    """Load is still read."""
    page = LOADED + "".join(LORA.format(4, f"a{number}", "", number) for number in range(5_000)).encode()
    read = read_metrics(page)
    assert (read.running, read.adapters) == (1, None)


def test_a_line_that_is_too_long_is_skipped() -> None:
    long = b'vllm:num_requests_running{a="%b"} 5\n' % (b"a" * LINE_BYTES_MAX)
    assert read_metrics(long).running is None
    assert read_metrics(long + LOADED).running == 1
    assert read_metrics(LOADED + long[:-1]).running == 1


def test_a_page_is_read_in_slices_and_its_series_are_bounded() -> None:
    """For any number of series, other tasks get a turn after every 16 KiB."""

    def page(series: int) -> bytes:
        return LOADED + b"".join(
            b'kvroute:kv_transfer_bytes_total{source="%b%d"} 1\n' % (b"p" * 100, n) for n in range(series)
        )

    turns = []
    for series in (10, 1000, SERIES_MAX - 1):
        turns.append(sum(1 for _ in metrics_in(page(series))))
        assert len(read_metrics(page(series)).transfers) == series
    assert turns[0] == 0
    assert turns[1] >= 2 * 1000 * 100 // 16384
    assert turns[2] >= 2 * (SERIES_MAX - 1) * 100 // 16384
    with pytest.raises(PageError, match="too many series"):
        read_metrics(page(SERIES_MAX))


LABEL_VALUES = st.text(st.sampled_from('ab"\\\n{},= #'), max_size=6)
NAMES = st.sampled_from(
    [
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:num_requests_waiting_by_reason",
        "vllm:kv_cache_usage_perc",
        "kvroute:kv_transfer_bytes_total",
        "kvroute:kv_transfer_seconds_total",
        "kvroute:kv_transfers_total",
        "process_start_time_seconds",
        "other_total",
    ]
)
NUMBERS = st.floats(0, 1e6) | st.integers(0, 10**12) | st.just(math.nan)


def page_of(rows: list[tuple[str, str, float]]) -> str:
    def escaped(value: str) -> str:
        return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    lines = [f'{name}{{source="{escaped(label)}",engine="0"}} {value}' for name, label, value in rows]
    return "\n".join(["# TYPE vllm:num_requests_running gauge", *lines, ""])


@given(st.lists(st.tuples(NAMES, LABEL_VALUES, NUMBERS), max_size=12, unique_by=lambda row: row[:2]))
def test_pages_are_read_as_prometheus_reads_them(rows: list[tuple[str, str, float]]) -> None:
    """A page has one sample of each series, as Prometheus requires."""
    page = page_of(rows)
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]

    def values(name: str) -> list[float]:
        return [sample.value for sample in samples if sample.name == name and not math.isnan(sample.value)]

    def by_source(name: str) -> dict[str, float]:
        sums: dict[str, float] = {}
        for sample in samples:
            if sample.name == name and not math.isnan(sample.value):
                source = sample.labels["source"]
                sums[source] = sums.get(source, 0.0) + sample.value
        return sums

    read = read_metrics(page.encode())
    if any(name == "vllm:num_requests_running" for name, _, _ in rows):
        running = values("vllm:num_requests_running")
        assert read.running == (min(round(sum(running)), 2**31 - 1) if running else None)
        assert read.waiting == min(round(sum(values("vllm:num_requests_waiting"))), 2**31 - 1)
    assert read.started_s == next(iter(values("process_start_time_seconds")), None)
    kv_bytes, seconds = by_source("kvroute:kv_transfer_bytes_total"), by_source("kvroute:kv_transfer_seconds_total")
    assert {source: total.kv_bytes for source, total in read.transfers.items()} == kv_bytes
    assert {source: total.seconds for source, total in read.transfers.items()} == {
        source: seconds.get(source, 0.0) for source in kv_bytes
    }


ROWS = st.lists(st.tuples(NAMES, LABEL_VALUES, NUMBERS), max_size=12)


@given(ROWS, ROWS, st.booleans())
def test_the_previous_page_does_not_affect_the_result(
    first: list[tuple[str, str, float]], second: list[tuple[str, str, float]], again: bool
) -> None:
    before, page = read_metrics(page_of(first).encode()), page_of(first + second if again else second).encode()
    assert read_metrics(page, before) == read_metrics(page)
    assert read_metrics(page_of(first).encode(), before).transfers is before.transfers


@given(st.binary(max_size=200))
def test_any_bytes_can_be_parsed_as_a_page(noise: bytes) -> None:
    read_metrics(noise)
    read_metrics(b"vllm:num_requests_running" + noise)
    assert read_metrics(b"\n".join([b"vllm:num_requests_running 2", noise.replace(b"vllm:", b"")])).running == 2


GROWTH = st.lists(
    st.tuples(
        st.sampled_from(["p0", "p1"]), st.integers(1, 10**6), st.integers(1, 100), st.integers(1, 5), st.booleans()
    ),
    max_size=20,
)


@given(GROWTH)
def test_differences_of_pages_add_up_to_the_transfers(growth: list[tuple[str, int, int, int, bool]]) -> None:
    """If the engine restarts between two pages, no later transfer is lost or counted twice."""
    counters = TransferCounters("d0")
    assert counters.measured(0.0, {}) == []
    totals: dict[str, TransferTotals] = {}
    expected: dict[str, list[float]] = {}
    reported: dict[str, list[float]] = {}
    for source, kv_bytes, seconds, transfers, restarts in growth:
        # A difference cannot reveal a restart after which the counts are already higher; real counters start low.
        if restarts and source in totals and totals[source].kv_bytes > kv_bytes:
            totals = {}
        old = totals.get(source, TransferTotals())
        totals[source] = TransferTotals(old.kv_bytes + kv_bytes, old.seconds + seconds, old.transfers + transfers)
        sums = expected.setdefault(source, [0, 0, 0])
        expected[source] = [sums[0] + kv_bytes, sums[1] + seconds, sums[2] + transfers]
        for event in counters.measured(1.0, dict(totals)):
            assert event.target == "d0"
            sums = reported.setdefault(event.source, [0, 0, 0])
            reported[event.source] = [sums[0] + event.kv_bytes, sums[1] + event.seconds, sums[2] + event.transfers]
    assert reported == expected


def test_the_first_page_is_only_the_baseline() -> None:
    counters = TransferCounters("d0")
    assert counters.measured(1.0, {"p0": TransferTotals(100.0, 2.0, 4)}) == []
    assert counters.measured(2.0, {"p0": TransferTotals(100.0, 2.0, 4)}) == []
    assert counters.measured(3.0, {"p0": TransferTotals(160.0, 3.0, 5)}) == [
        TransferMeasured(3.0, "p0", "d0", 60.0, 1.0, 1, "kvroute")
    ]


class Engine:
    """A server with one page; it counts the requests and the highest number at the same time."""

    def __init__(self) -> None:
        self.page: bytes | None = b"vllm:num_requests_running 1\n"
        self.status = 200
        self.request_count = 0
        self.at_once = 0
        self.at_once_max = 0
        self.responding = asyncio.Event()
        self.responding.set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                self.request_count += 1
                self.at_once += 1
                self.at_once_max = max(self.at_once_max, self.at_once)
                await self.responding.wait()
                self.at_once -= 1
                body = self.page or b""
                head = f"HTTP/1.1 {self.status} X\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
                writer.write(head.encode() + body)
                break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


class EventRecorder:
    """Collects the emitted events and waits for more."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._more = asyncio.Event()

    def emit(self, event: Event) -> None:
        self.events.append(event)
        self._more.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._more.clear()
            await self._more.wait()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(HANGS_S):
            await scenario()

    uvloop.run(bounded())


def polls(timeout_s: float = 30.0, body_max_bytes: int = 4_000_000) -> PollSpec:
    """Return settings that poll often."""
    return PollSpec(path="/metrics", interval_s=0.01, timeout_s=timeout_s, body_max_bytes=body_max_bytes)


def loaded(running: int, transferred: int, started: int = 1) -> bytes:
    return (
        f"vllm:num_requests_running {running}\nvllm:num_requests_waiting 2\nvllm:kv_cache_usage_perc 0.5\n"
        f"process_start_time_seconds {started}\n"
        f'kvroute:kv_transfer_bytes_total{{source="p0"}} {1000 * transferred}\n'
        f'kvroute:kv_transfer_bytes_total{{source="stranger"}} {1000 * transferred}\n'
        f'kvroute:kv_transfer_seconds_total{{source="p0"}} {transferred}\n'
        f'kvroute:kv_transfer_seconds_total{{source="stranger"}} {transferred}\n'
        f'kvroute:kv_transfers_total{{source="p0"}} {transferred}\n'
        f'kvroute:kv_transfers_total{{source="stranger"}} {transferred}\n'
    ).encode()


def test_a_scraper_emits_load_transfers_and_restarts() -> None:
    """After a failure it emits nothing until the engine can be read again."""

    async def scenario() -> None:
        engine, recorder, restarts = Engine(), EventRecorder(), []

        def restarted(name: str, started_s: float | None) -> bool:
            restarts.append((name, started_s))
            return len(restarts) > 1

        await engine.start()
        engine.page = loaded(3, 0)
        pool = UpstreamPool(f"http://127.0.0.1:{engine.port}")
        scraper = Scraper(
            Servers.without_ranks(["d0", "p0"]),
            {"d0": pool, "p0": None}.get,
            recorder.emit,
            lambda: 4.0,
            polls(),
            on_restart=restarted,
        )
        assert scraper.age_s("d0") is None
        scraper.start()
        await recorder.until(lambda: bool(recorder.events))
        assert recorder.events[0] == InstanceMeasured(4.0, "d0", 3, 2, 0.5)
        assert (scraper.age_s("d0"), scraper.age_s("p0")) == (0.0, None)
        engine.page = loaded(3, 5)
        transfer = TransferMeasured(4.0, "p0", "d0", 5000.0, 5.0, 5, "kvroute")
        await recorder.until(lambda: transfer in recorder.events)
        engine.page = loaded(3, 5, started=2)
        await recorder.until(lambda: KvCleared(4.0, "d0") in recorder.events)
        engine.page = loaded(3, 5, started=3)
        await recorder.until(lambda: len(restarts) == 2)
        engine.page = b"nothing here"
        before = engine.request_count
        while engine.request_count < before + 3:
            await asyncio.sleep(0.001)
        engine.page = loaded(9, 5, started=3)
        await recorder.until(lambda: InstanceMeasured(4.0, "d0", 9, 2, 0.5) in recorder.events)
        scraper.close()
        pool.close()
        await engine.stop()
        assert restarts == [("d0", 2.0), ("d0", 3.0)]
        reported = [event for event in recorder.events if not isinstance(event, InstanceMeasured)]
        assert reported == [transfer, KvCleared(4.0, "d0")]

    run(scenario)


@pytest.mark.parametrize(
    ("more", "body_max_bytes", "why"),
    [
        (b"#" * 100_000, 100_000, "the response is longer than 100000 bytes"),
        (b"#" * 90_000, 100_000, ""),
        (b"vllm:num_requests_waiting 1\n" * 5000, 1_000_000, "the page has too many series"),
    ],
    ids=["size", "fine", "series"],
)
def test_a_page_beyond_its_limits_is_a_failed_scrape(more: bytes, body_max_bytes: int, why: str) -> None:
    async def scenario() -> None:
        engine, recorder = Engine(), EventRecorder()
        await engine.start()
        engine.page = LOADED + more
        pool = UpstreamPool(f"http://127.0.0.1:{engine.port}")
        scraper = Scraper(
            Servers.without_ranks(["a"]),
            {"a": pool}.get,
            recorder.emit,
            lambda: 0.0,
            polls(body_max_bytes=body_max_bytes),
        )
        scraper.start()
        while not (scraper.failure("a") or recorder.events):
            await asyncio.sleep(0.001)
        assert scraper.failure("a").startswith(why)
        assert bool(recorder.events) == (not why)
        scraper.close()
        pool.close()
        await engine.stop()

    run(scenario)


def test_a_slow_engine_gets_one_scrape_at_a_time_and_delays_no_other() -> None:
    async def scenario() -> None:
        slow, quick, recorder = Engine(), Engine(), EventRecorder()
        for engine in (slow, quick):
            await engine.start()
        slow.responding.clear()
        pools = {
            "a": UpstreamPool(f"http://127.0.0.1:{slow.port}"),
            "b": UpstreamPool(f"http://127.0.0.1:{quick.port}"),
        }
        scraper = Scraper(Servers.without_ranks(["a", "b"]), pools.get, recorder.emit, lambda: 0.0, polls())
        scraper.start()
        await recorder.until(lambda: len(recorder.events) >= 5)
        assert {event.instance for event in recorder.events if isinstance(event, InstanceMeasured)} == {"b"}
        assert (slow.request_count, slow.at_once_max) == (1, 1)
        slow.responding.set()
        await recorder.until(
            lambda: any(isinstance(e, InstanceMeasured) and e.instance == "a" for e in recorder.events)
        )
        scraper.close()
        for pool in pools.values():
            pool.close()
        for engine in (slow, quick):
            await engine.stop()

    run(scenario)


@pytest.mark.parametrize("fault", ["silent", "endless", "refused", "status"])
def test_an_engine_that_recovers_is_scraped_again(fault: str) -> None:
    """If it was gone and does not report its start time, its cache counts as empty; if only its page failed, the cache
    is kept."""

    async def scenario() -> None:
        engine, recorder = Engine(), EventRecorder()
        await engine.start()
        pool = UpstreamPool(f"http://127.0.0.1:{engine.port}")
        scraper = Scraper(
            Servers.without_ranks(["a"]), {"a": pool}.get, recorder.emit, lambda: 0.0, polls(timeout_s=0.05)
        )
        scraper.start()
        await recorder.until(lambda: bool(recorder.events))
        good = engine.page
        if fault == "silent":
            engine.responding.clear()
        elif fault == "endless":
            engine.page = b"#" * (9 << 20)
        elif fault == "status":
            engine.status = 503
        else:
            await engine.stop()
        while scraper.failure("a") == "":
            await asyncio.sleep(0.001)
        engine.status, engine.page = 200, good
        engine.responding.set()
        if fault == "refused":
            await engine.start()
        reported = len(recorder.events)
        await recorder.until(
            lambda: len(recorder.events) > reported and isinstance(recorder.events[-1], InstanceMeasured)
        )
        assert (KvCleared(0.0, "a") in recorder.events) == (fault == "refused")
        assert scraper.failure("a") == ""
        scraper.close()
        pool.close()
        await engine.stop()

    run(scenario)
