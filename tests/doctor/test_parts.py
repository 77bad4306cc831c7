"""Parts of an examination separately: clocks, counters, the choice of pairs, and the interpretation of responses."""

from __future__ import annotations

import math
from email.utils import formatdate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.doctor.rig import HEAD, cluster_text

from kvroute import llm, topology
from kvroute.doctor.clock import OFFSET_MAX_S, Offset, from_date, from_timestamp, narrowest, wrong
from kvroute.doctor.counters import PageCounters, external_tokens, failures, movement, read_counters
from kvroute.doctor.pairs import chosen_pairs, possible_pairs
from kvroute.doctor.probe import Outcome
from kvroute.doctor.report import ClockReport, EngineReport, PairReport
from kvroute.doctor.verdict import bytes_text, engine_findings, judge, pair_findings, rates_text, seconds_text
from kvroute.serve.config.settings import GatewaySettings
from kvroute.serve.telemetry.metrics_page import series_missing
from kvroute.topology import Cluster
from kvroute.types import Endpoint

MODEL = llm.model("llama-3-70b")
offsets = st.floats(-1e5, 1e5)
moments = st.floats(1.5e9, 2e9)
short = st.floats(0.0, 10.0)


# Clocks


@given(offset_s=offsets, made_s=moments, before_s=short, after_s=short, stale_s=st.floats(0.0, 0.99))
def test_a_date_header_bounds_the_clock(
    offset_s: float, made_s: float, before_s: float, after_s: float, stale_s: float
) -> None:
    """The bounds hold for any clock, any delay in each direction, and a Date header that the server reuses for up to a
    second."""
    date = formatdate(math.floor(made_s + offset_s - stale_s), usegmt=True)
    bounds = from_date(date, made_s - before_s, made_s + after_s)
    assert bounds.least_s - 1e-5 <= offset_s <= bounds.most_s + 1e-5


@given(offset_s=offsets, made_s=moments, before_s=short, after_s=short)
def test_a_timestamp_bounds_the_clock(offset_s: float, made_s: float, before_s: float, after_s: float) -> None:
    bounds = from_timestamp(made_s + offset_s, made_s - before_s, made_s + after_s)
    assert bounds.least_s - 1e-5 <= offset_s <= bounds.most_s + 1e-5


@given(offset_s=offsets, widths=st.lists(st.tuples(short, short), min_size=1))
def test_combined_bounds_contain_the_clock_error(offset_s: float, widths: list[tuple[float, float]]) -> None:
    each = [Offset(offset_s - below, offset_s + above) for below, above in widths]
    together = narrowest(each)
    assert together.least_s <= offset_s <= together.most_s
    assert together.most_s - together.least_s <= min(offset.most_s - offset.least_s for offset in each)


def test_an_invalid_date_gives_no_bounds() -> None:
    assert from_date("yesterday", 0.0, 1.0).report() is None


@pytest.mark.parametrize(
    ("offset_s", "error_s", "is_wrong"),
    [(0.0, 0.5, False), (1.4, 0.5, False), (-1.4, 0.5, False), (35.0, 1.0, True), (-35.0, 1.0, True)],
)
def test_a_clock_is_wrong_only_if_its_bounds_exclude_zero(offset_s: float, error_s: float, is_wrong: bool) -> None:
    clock = ClockReport(offset_s, error_s)
    assert wrong(clock) is is_wrong
    report = EngineReport(name="p", role="prefill", protocol="vllm", url="", tp=1, model="m", health="ok", clock=clock)
    sentences = [finding.sentence for finding in engine_findings(report, GatewaySettings())]
    assert len(sentences) == is_wrong
    if is_wrong:
        assert ("behind" if offset_s < 0 else "ahead of") in sentences[0]
        assert abs(offset_s) > OFFSET_MAX_S


@pytest.mark.parametrize(
    ("health", "hint"),
    [
        ("cannot connect to 10.0.0.1:40103 (Connect call failed)", "start the engine"),
        ("HTTP status 500", "start the engine"),
        ("HTTP status 401 for /v1/models", "--key-env"),
        ("HTTP status 403", "--key-env"),
    ],
)
def test_only_a_rejected_key_is_reported_as_one(health: str, hint: str) -> None:
    """A port may contain the digits of a status."""
    report = EngineReport(name="p", role="prefill", protocol="vllm", url="", tp=1, model="m", health=health)
    (finding,) = engine_findings(report, GatewaySettings())
    assert hint in finding.hint


# Counters

NIXL = b"""# TYPE vllm:nixl_bytes_transferred histogram
vllm:nixl_bytes_transferred_sum{engine="0"} %d
vllm:nixl_bytes_transferred_count{engine="0"} %d
vllm:nixl_xfer_time_seconds_sum{engine="0"} %f
vllm:nixl_num_failed_transfers_total{engine="0"} %d
"""
SGLANG = b"""sglang:kv_transfer_total_mb_sum{} %d
sglang:kv_transfer_total_mb_count{} %d
sglang:kv_transfer_latency_ms_sum{} %d
"""
KVROUTE = b"""# TYPE kvroute:kv_transfers counter
kvroute:kv_transfers_total{source="p0"} %d
kvroute:kv_transfer_bytes_total{source="p0"} %d
kvroute:kv_transfer_seconds_total{source="p0"} %f
"""


@pytest.mark.parametrize(
    ("before", "after", "source", "nbytes", "seconds"),
    [
        (NIXL % (0, 0, 0.0, 0), NIXL % (4000, 4, 2.0, 0), "", 4000.0, 0.5),
        (SGLANG % (1, 1, 10), SGLANG % (3, 2, 40), "", 2e6, 0.03),
        (KVROUTE % (1, 100, 1.0), KVROUTE % (3, 700, 2.0), "p0", 600.0, 0.5),
        (b"# TYPE kvroute:kv_transfers counter\n", KVROUTE % (1, 100, 1.0), "p0", 100.0, 1.0),
    ],
    ids=["nixl of four ranks at once", "sglang", "kvroute of two ranks at once", "kvroute, first transfer"],
)
def test_the_counters_of_each_connector_are_read(
    before: bytes, after: bytes, source: str, nbytes: float, seconds: float
) -> None:
    moved = movement(read_counters(before), read_counters(after))
    assert moved is not None
    assert (moved.source, moved.totals.kv_bytes) == (source, nbytes)
    assert moved.seconds == pytest.approx(seconds)
    assert movement(read_counters(after), read_counters(after)) is None


def test_failed_transfers_are_reported_with_their_reason() -> None:
    page = b'kvroute:kv_transfer_failures_total{source="p0",reason="%b"} %d\n'
    before, after = (
        read_counters(page % (b"timeout", 2)),
        read_counters(page % (b"timeout", 2) + page % (b"refused", 1)),
    )
    assert failures(before, after) == ["refused"]
    assert failures(read_counters(NIXL % (0, 0, 0, 1)), read_counters(NIXL % (0, 0, 0, 2))) == ["nixl transfer failed"]


def test_prompt_tokens_from_a_connector_are_counted() -> None:
    page = b'vllm:external_prefix_cache_hits_total{engine="0"} %d\n'
    assert external_tokens(read_counters(page % 100), read_counters(page % 612)) == 512.0
    assert external_tokens(PageCounters(), PageCounters()) is None


@pytest.mark.parametrize(
    ("page", "missing"),
    [
        (b"vllm:num_requests_running 1\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc{} 0\n", ()),
        (b"vllm:num_requests_running 1\nvllm:num_requests_waiting 0\nvllm:gpu_cache_usage_perc 0\n", ()),
        (b"vllm:num_requests_running 1\nvllm:num_requests_waiting_by_reason 0\n", (1, 2)),
        (b"sglang:num_running_reqs 1\nsglang:token_usage 0.5\n", ("sglang:num_queue_reqs",)),
        (b"python_gc_objects_collected_total 1\n", (0, 1, 2)),
    ],
)
def test_missing_metrics_are_named(page: bytes, missing: tuple[str | int, ...]) -> None:
    vllm = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    assert series_missing(page) == tuple(vllm[series] if isinstance(series, int) else series for series in missing)


# Verdicts


def pair_report() -> PairReport:
    expected = float(MODEL.kv_bytes(1000))
    return PairReport(
        prefill="p",
        decode="d",
        tier=1,
        tier_name="same rack",
        promised_bytes_per_s=1e9,
        promised_latency_s=0.0,
        prompt_tokens=1000,
        expected_bytes=expected,
    )


@pytest.mark.parametrize(
    ("outcome", "moved", "evidence"),
    [
        (Outcome(moved_tokens=960.0, first_token_s=0.1), "yes", "prefix counters"),
        (Outcome(moved_tokens=0.0, first_token_s=0.1), "no", "prefix counters"),
        (Outcome(moved_tokens=100.0, first_token_s=0.1), "no", "prefix counters"),
        (Outcome(counted=True, prefill_s=1.0, first_token_s=0.1), "no", "counters"),
        (Outcome(failed=["timeout"], prefill_s=1.0, first_token_s=0.1), "no", "counters"),
        (Outcome(prefill_s=1.0, first_token_s=0.1), "likely", "time"),
        (Outcome(prefill_s=1.0, first_token_s=0.9), "unknown", "time"),
        (Outcome(first_token_s=0.9), "likely", "answer"),
    ],
)
def test_a_verdict_states_its_evidence(outcome: Outcome, moved: str, evidence: str) -> None:
    pair = pair_report()
    judge(pair, outcome, MODEL)
    assert (pair.moved, pair.evidence) == (moved, evidence)
    findings = [finding.what for finding in pair_findings(pair, outcome)]
    assert len(findings) == (moved == "no")
    if outcome.failed:
        assert "timeout" in findings[0]


@pytest.mark.parametrize(
    ("measured", "promised", "text"),
    [(12.5e9, 12.5e9, "100 / 100 Gbps"), (1e8, 9e11, "0.0008 / 7.2 Tbps"), (None, 125e6, "- / 1 Gbps")],
)
def test_rates_have_one_unit(measured: float | None, promised: float, text: str) -> None:
    assert rates_text(measured, promised) == text


def test_numbers_have_readable_units() -> None:
    assert [bytes_text(n) for n in (0.0, 999.0, 671_088_640.0, 999.6e6)] == ["0 B", "999 B", "671 MB", "1 GB"]
    assert [seconds_text(s) for s in (2.5, 0.0537, 2e-6)] == ["2.5 s", "53.7 ms", "2 us"]


# Pairs


def cluster_of(prefills: int, decodes: int, gpus: int = 8) -> Cluster:
    names = [f"prefill{n}" for n in range(prefills)] + [f"decode{n}" for n in range(decodes)]
    endpoints = {name: Endpoint(url=f"http://127.0.0.1:{port}") for port, name in enumerate(names, start=1)}
    return topology.parse(cluster_text(endpoints, head=HEAD.replace("gpus: 8", f"gpus: {gpus}"), tp=1))


@given(prefills=st.integers(1, 8), decodes=st.integers(1, 8), most=st.integers(0, 70) | st.none())
def test_pairs_are_chosen_once_each_and_cover_the_engines(prefills: int, decodes: int, most: int | None) -> None:
    cluster = cluster_of(prefills, decodes)
    chosen = chosen_pairs(cluster, most)
    count = prefills * decodes if most is None else min(most, prefills * decodes)
    assert possible_pairs(cluster) == prefills * decodes
    assert len({(pair.prefill, pair.decode) for pair in chosen}) == len(chosen) == count
    assert len({pair.prefill for pair in chosen}) == min(prefills, count)
    assert len({pair.decode for pair in chosen}) == min(decodes, count)


def test_all_pairs_of_a_large_cluster_are_chosen_once_each() -> None:
    """There are more pairs than are ranked."""
    chosen = chosen_pairs(cluster_of(26, 26, gpus=32), None)
    assert len({(pair.prefill, pair.decode) for pair in chosen}) == len(chosen) == 676


def test_the_first_pairs_cover_all_tiers() -> None:
    cluster = topology.load(topology_example())
    first = chosen_pairs(cluster, 16)
    every = chosen_pairs(cluster, None)
    assert {pair.tier for pair in first} == {pair.tier for pair in every}


def topology_example() -> Path:
    return Path(__file__).parents[2] / "examples" / "fat-tree-64gpu.yaml"
