"""Metrics: Prometheus' own parsers read the page, counts match the events, and every name is documented."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_plain

from kvroute.policies import TierLearned
from kvroute.serve.observe.metrics.exposition import KEYS_MOST, Counter, Histogram, MetricFamily, lines
from kvroute.serve.observe.metrics.load_gauges import TIER_LABELS
from kvroute.serve.observe.metrics.metrics import Metrics
from kvroute.serve.observe.metrics.offload_gauges import offload_gauges
from kvroute.serve.observe.view import (
    ForesightLoad,
    GatewayStatus,
    InstanceLoad,
    OffloadLoad,
    OracleLoad,
    ReviewLoad,
    RoleSwitchLoad,
    SiteLoad,
    TtftBreakdown,
)
from kvroute.types import Decode, Offload, Prefill, Reject, SwitchRole

ROOT = Path(__file__).parents[3]
OPENMETRICS = "application/openmetrics-text; version=1.0.0; q=0.5, text/plain;version=0.0.4;q=0.2"
BOUNDS = (0.01, 0.1, 1.0)
label_values = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
amounts = st.floats(0, 1e12)


OFFLOAD = OffloadLoad(
    sites=(
        SiteLoad(
            name="far",
            threshold_tokens=24_000.0,
            base_tokens=19_400.0,
            open=True,
            wan_path="half-open",
            utilisation=0.5,
            others=0.25,
            bytes_per_s=1e9,
            backlog_bytes=2e9,
            backlog_s=2.5,
        ),
    ),
    switches_roles=True,
    role_switches=(RoleSwitchLoad(instance="decode0", role="prefill", stage="hook"),),
    roles={"decode1": "prefill"},
    review=ReviewLoad(
        at=1.0,
        verdict="switch_role",
        rate_per_s=3.0,
        lambda_max_per_s=2.5,
        best_per_s=3.25,
        gain=0.25,
        binding="pd_p",
        n_prefill=(3,),
        n_decode=(5,),
    ),
)


def _load() -> GatewayStatus:
    return GatewayStatus(
        offload=OFFLOAD,
        in_flight=3,
        queued=2,
        connections=7,
        oracle=OracleLoad(source="push", age_s=1.5, congestion=(0.0, 0.1, 0.2, 0.3, 0.4), learned_ratio=(None,) * 5),
        instances=(
            InstanceLoad(name="decode0", requests=4, running=5, waiting=1, kv_used_share=0.25, scrape_age_s=0.5),
            InstanceLoad(name="prefill0", up=False, breaker="open", prefill_pending_s=0.75),
        ),
    )


def _metrics() -> Metrics:
    return Metrics(_load, {"prefill0": "prefill", "decode0": "decode"}, version="1.2", policy="netkv")


def _read(text: str, openmetrics: bool) -> list[Metric]:
    """Parse the text with Prometheus' own parser of the format."""
    read = read_openmetrics if openmetrics else read_plain
    return list(read(text))


def _samples(metrics: Metrics, accept: str = "") -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    _, page = metrics.page(accept)
    families = _read("".join(page), openmetrics=bool(accept))
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def _value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return _samples(metrics).get((name, frozenset(labels.items())))


def _one_request(metrics: Metrics) -> None:
    metrics.prompt_read(1000)
    metrics.decided(Prefill(1, "prefill0", 640), 30e-6)
    metrics.prefill_answered(0.2, ("trace_id", "4bf92f3577b34da6a3ce929d0e0e4736"))
    metrics.decided(Decode(1, "prefill0", "decode0", 2, 3e8, 3e8, 16), 40e-6)
    metrics.transfer_started(2)
    metrics.transfer_ended(2, 3e8, True, 0.05)
    metrics.decode_answered(0.07)
    metrics.first_token("vllm", TtftBreakdown(0.01, 0.2, 0.05, 0.02), ("trace_id", "4bf92f3577b34da6a3ce929d0e0e4736"))
    metrics.finished("/v1/completions", 200, 1.5, 4096)


@given(st.lists(st.tuples(label_values, label_values, amounts), max_size=20))
def test_a_counter_is_read_back_with_any_labels(counted: list[tuple[str, str, float]]) -> None:
    """Both parsers find each label set once, with its sum."""
    counter = Counter("kvroute_things_total", "Things.", ("a", "b"))
    expected: dict[tuple[str, str], float] = {}
    for a, b, amount in counted:
        counter.add((a, b), amount)
        expected[a, b] = expected.get((a, b), 0) + amount
    for openmetrics, end in ((False, ""), (True, "# EOF\n")):
        [family] = _read(counter.text(openmetrics) + end, openmetrics)
        assert family.type == "counter"
        assert {(s.labels["a"], s.labels["b"]): s.value for s in family.samples} == expected


@given(st.lists(st.floats(0, 10), max_size=40), label_values)
def test_a_histogram_counts_each_value_once(values: list[float], label: str) -> None:
    """Buckets are cumulative, the last one is the count, and each one is the number of values at or below its bound."""
    histogram = Histogram("kvroute_time_seconds", "Time.", BOUNDS, ("a",))
    for value in values:
        histogram.observe((label,), value)
    assert histogram.count((label,)) == len(values)
    for openmetrics, end in ((False, ""), (True, "# EOF\n")):
        [family] = _read(histogram.text(openmetrics) + end, openmetrics)
        samples = {(s.name.removeprefix("kvroute_time_seconds"), s.labels.get("le")): s.value for s in family.samples}
        if not values:
            assert samples == {}
            continue
        assert samples["_count", None] == samples["_bucket", "+Inf"] == len(values)
        assert samples["_sum", None] == pytest.approx(sum(values))
        for bound in BOUNDS:
            assert samples["_bucket", str(bound)] == sum(value <= bound for value in values)


def test_openmetrics_has_the_latest_exemplar_of_each_bucket() -> None:
    """The plain format has no exemplars; a long ID is cut to the length that the format allows."""
    histogram = Histogram("kvroute_time_seconds", "Time.", BOUNDS)
    histogram.observe((), 0.5, ("request_id", "first"))
    histogram.observe((), 0.6, ("request_id", "second"))
    histogram.observe((), 0.05, ("request_id", 'x"\n' * 100))
    assert "first" not in histogram.text(True)
    assert "request_id" not in histogram.text(False)
    [family] = _read(histogram.text(True) + "# EOF\n", openmetrics=True)
    shown = {s.labels["le"]: s.exemplar for s in family.samples if s.exemplar}
    assert shown["1.0"].labels == {"request_id": "second"}
    assert shown["1.0"].value == 0.6
    assert len(shown["0.1"].labels["request_id"]) == 128 - len("request_id")


def test_label_sets_are_bounded() -> None:
    """Label sets beyond the bound are counted in one label set called `other`."""
    counter = Counter("kvroute_things_total", "Things.", ("a",))
    for number in range(KEYS_MOST + 500):
        counter.add((str(number),))
    [family] = _read(counter.text(False), openmetrics=False)
    assert len(family.samples) == KEYS_MOST + 1
    assert {s.labels["a"]: s.value for s in family.samples}["other"] == 500


def test_numbers_have_the_spelling_of_prometheus() -> None:
    """Infinite, missing and whole values have Prometheus' spelling."""
    family = MetricFamily("gauge", "kvroute_x", "X.", ("a",))
    text = lines(family, [(("1",), float("inf")), (("2",), float("nan")), (("3",), -float("inf")), (("4",), 12)], False)
    assert re.findall(r"} (\S+)", text) == ["+Inf", "NaN", "-Inf", "12"]


def test_all_metrics_of_one_request() -> None:
    """All samples of one request are read back by Prometheus' parser."""
    metrics = _metrics()
    _one_request(metrics)
    expected: list[tuple[float, str, dict[str, str]]] = [
        (1, "kvroute_requests_total", {"endpoint": "/v1/completions", "code": "200"}),
        (1, "kvroute_decisions_total", {"kind": "decode", "engine": "decode0"}),
        (640, "kvroute_prefix_hit_tokens_total", {"leg": "prefill"}),
        (1000, "kvroute_prompt_tokens_total", {}),
        (3e8, "kvroute_transfer_bytes_total", {"tier": "pod"}),
        (0, "kvroute_transfers_in_flight", {"tier": "pod"}),
        (0.28, "kvroute_ttft_seconds_sum", {"protocol": "vllm"}),
        (0.2, "kvroute_ttft_part_seconds_sum", {"part": "prefill"}),
        (4096, "kvroute_relayed_bytes_total", {}),
        (1, "kvroute_request_seconds_count", {"endpoint": "/v1/completions"}),
        (1, "kvroute_decode_first_byte_seconds_count", {}),
    ]
    samples = _samples(metrics)
    for value, name, labels in expected:
        assert samples[name, frozenset(labels.items())] == pytest.approx(value), name


def test_only_completed_transfers_count_as_bytes() -> None:
    """Bytes are counted when a transfer is complete; the gauge decreases for completed and lost transfers."""
    metrics = _metrics()
    metrics.transfer_started(1)
    assert _value(metrics, "kvroute_transfers_in_flight", tier="rack") == 1
    metrics.transfer_ended(1, 1e9, False)
    assert _value(metrics, "kvroute_transfers_in_flight", tier="rack") == 0
    assert _value(metrics, "kvroute_transfer_bytes_total", tier="rack") is None


def test_a_transfer_without_a_measured_time_counts_as_bytes_only() -> None:
    """An expected time is not a measurement."""
    metrics = _metrics()
    metrics.transfer_started(1)
    metrics.transfer_ended(1, 1e9, True)
    assert _value(metrics, "kvroute_transfer_bytes_total", tier="rack") == 1e9
    assert _value(metrics, "kvroute_transfer_seconds_count", tier="rack") is None


def test_rejections_failures_and_retries_are_counted() -> None:
    """Rejections, failures, retries and clients that left are counted."""
    metrics = _metrics()
    metrics.decided(Reject(1, "no room"), 1e-5)
    metrics.rejected("queue_full")
    metrics.leg_failed("decode", "decode0", "reset")
    metrics.retried("decode")
    metrics.retry_refused("prefill")
    metrics.client_gone()
    metrics.stream_failed()
    metrics.kv_events("decode0", 3)
    metrics.kv_gap("decode0")
    metrics.kv_lost("prefill0", 0, 2)
    metrics.kv_lost("decode0", 3, 0)
    metrics.logged(100)
    metrics.reloaded("refused")
    assert _value(metrics, "kvroute_decisions_total", kind="reject", engine="") == 1
    assert _value(metrics, "kvroute_rejects_total", reason="queue_full") == 1
    assert _value(metrics, "kvroute_leg_failures_total", leg="decode", engine="decode0", kind="reset") == 1
    assert _value(metrics, "kvroute_retries_total", leg="decode") == 1
    assert _value(metrics, "kvroute_retries_refused_total", leg="prefill") == 1
    assert _value(metrics, "kvroute_client_disconnects_total") == 1
    assert _value(metrics, "kvroute_stream_errors_total") == 1
    assert _value(metrics, "kvroute_kv_events_total", engine="decode0") == 3
    assert _value(metrics, "kvroute_kv_event_gaps_total", engine="decode0") == 1
    assert _value(metrics, "kvroute_engine_kv_expired_total", engine="prefill0") == 2
    assert _value(metrics, "kvroute_engine_transfer_failures_total", engine="decode0") == 3
    assert _value(metrics, "kvroute_log_bytes_total") == 100
    assert _value(metrics, "kvroute_reloads_total", outcome="refused") == 1


def test_prefill_across_datacenters_is_counted() -> None:
    """The metrics show the destination and reason of prefills, the outcome of role switches, and the utilisation of
    each WAN path."""
    metrics = _metrics()
    for reason in ("long", "long", "home_down"):
        metrics.decided(Prefill(1, "prefill0", offload=Offload("far", reason)), 1e-5)
    metrics.decided(Prefill(1, "prefill0"), 1e-5)
    metrics.decided(SwitchRole("decode0", "prefill"), 1e-5)
    metrics.reviewed("switch_role")
    metrics.role_switch_ended("failed")
    expected: list[tuple[float, str, dict[str, str]]] = [
        (2, "kvroute_offload_decisions_total", {"site": "far", "reason": "long"}),
        (1, "kvroute_offload_decisions_total", {"site": "far", "reason": "home_down"}),
        (1, "kvroute_decisions_total", {"kind": "switch_role", "engine": "decode0"}),
        (1, "kvroute_reviews_total", {"verdict": "switch_role"}),
        (1, "kvroute_role_switches_total", {"outcome": "failed"}),
        (24_000, "kvroute_offload_threshold_tokens", {"site": "far"}),
        (19_400, "kvroute_offload_base_tokens", {"site": "far"}),
        (0.5, "kvroute_egress_used_ratio", {"site": "far"}),
        (2e9, "kvroute_egress_backlog_bytes", {"site": "far"}),
        (2.5, "kvroute_egress_backlog_seconds", {"site": "far"}),
        (1, "kvroute_wan_path_state", {"site": "far"}),
        (1, "kvroute_role_switches_in_progress", {}),
        (2.5, "kvroute_review_requests_per_second", {"split": "present", "binding": "pd_p"}),
        (3.25, "kvroute_review_requests_per_second", {"split": "best", "binding": "pd_p"}),
        (0.25, "kvroute_review_gain_ratio", {}),
    ]
    samples = _samples(metrics)
    assert [(samples.get((name, frozenset(labels.items()))), name) for _, name, labels in expected] == [
        (value, name) for value, name, _ in expected
    ]


def test_a_gateway_of_one_datacenter_has_no_offload_samples() -> None:
    """The metric families exist without samples."""
    metrics = Metrics(GatewayStatus, {}, version="1", policy="netkv")
    names = ("offload", "egress", "wan_path", "review", "role_switch")
    assert [sample for sample in _samples(metrics) if any(f"kvroute_{name}" in sample[0] for name in names)] == []


def test_gauges_show_the_current_load() -> None:
    """An unknown value has no sample: without a scrape there is no age."""
    metrics = _metrics()
    assert _value(metrics, "kvroute_info", version="1.2", policy="netkv") == 1
    assert _value(metrics, "kvroute_requests_in_flight") == 3
    assert _value(metrics, "kvroute_requests_queued") == 2
    assert _value(metrics, "kvroute_client_connections") == 7
    assert _value(metrics, "kvroute_ready") == 1
    assert _value(metrics, "kvroute_instance_up", engine="prefill0", role="prefill") == 0
    assert _value(metrics, "kvroute_breaker_state", engine="prefill0") == 2
    assert _value(metrics, "kvroute_instance_requests", engine="decode0", role="decode") == 4
    assert _value(metrics, "kvroute_instance_running", engine="decode0") == 5
    assert _value(metrics, "kvroute_instance_running", engine="prefill0") is None
    assert _value(metrics, "kvroute_instance_kv_used_ratio", engine="decode0") == 0.25
    assert _value(metrics, "kvroute_prefill_pending_seconds", engine="prefill0") == 0.75
    assert _value(metrics, "kvroute_oracle_age_seconds", source="push") == 1.5
    assert _value(metrics, "kvroute_oracle_congestion_ratio", tier="datacenter") == 0.3
    assert _value(metrics, "kvroute_learned_bandwidth_ratio", tier="datacenter") is None


def test_learned_values_of_foresight_are_gauges() -> None:
    """Samples exist for the tiers that teach and that the cluster has; there are none without the foresight policy."""
    rest = TierLearned(factor=1.0, weight=0.0, transfers=0, age_s=None, bytes_per_s=1e10)
    pod = TierLearned(factor=0.8, weight=1e-9, transfers=3, age_s=900.0, bytes_per_s=8e9)
    far = TierLearned(factor=0.5, weight=7.25, transfers=40, age_s=2.0, bytes_per_s=1e9)
    nowhere = TierLearned(factor=0.9, weight=0.0, transfers=0, age_s=None)
    load = GatewayStatus(foresight=ForesightLoad(policy="foresight-joint", tiers=(rest, rest, pod, nowhere, far)))
    samples = _samples(Metrics(lambda: load, {}, version="1", policy="netkv"))
    learned = {
        (name.removeprefix("kvroute_foresight_"), dict(labels)["policy"], dict(labels)["tier"]): value
        for (name, labels), value in samples.items()
        if name.startswith("kvroute_foresight_")
    }
    expected = {
        "learned_ratio": (1.0, 0.8, 0.5),
        "bytes_per_second": (1e10, 8e9, 1e9),
        "learned_transfers": (0.0, 0.0, 7.25),
    }
    assert learned == {
        (name, "foresight-joint", tier): value
        for name, values in expected.items()
        for tier, value in zip(("rack", "pod", "cross_datacenter"), values, strict=True)
    }
    nothing = _samples(Metrics(GatewayStatus, {}, version="1", policy="netkv"))
    assert not [name for name, _ in nothing if name.startswith("kvroute_foresight_")]


def test_openmetrics_has_the_same_content_as_the_plain_format() -> None:
    """The whole pages are compared, process metrics and the closing line included."""
    metrics = _metrics()
    _one_request(metrics)
    plain, openmetrics = _samples(metrics), _samples(metrics, OPENMETRICS)
    kinds = [metrics.page(accept)[0].split(";")[0] for accept in ("", OPENMETRICS)]
    assert kinds == ["text/plain", "application/openmetrics-text"]
    ours = {key: value for key, value in plain.items() if key[0].startswith("kvroute_")}
    assert len(ours) > 60
    assert ours == {key: value for key, value in openmetrics.items() if key[0].startswith("kvroute_")}
    assert any(name == "process_cpu_seconds_total" for name, _ in openmetrics)
    exemplars = [line for line in "".join(metrics.page(OPENMETRICS)[1]).splitlines() if " # {" in line]
    assert [line.split("{")[0] for line in exemplars] == [
        "kvroute_ttft_seconds_bucket",
        "kvroute_prefill_leg_seconds_bucket",
    ]


def _families() -> set[str]:
    return set(re.findall(r"^# TYPE (kvroute_\w+)", "".join(_metrics().page()[1]), re.MULTILINE))


def test_exactly_the_metrics_of_the_page_are_documented() -> None:
    """docs/metrics.md lists exactly the metric families of the page."""
    documented = re.findall(r"^\| `(kvroute_\w+)", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    assert len(documented) == len(set(documented))
    assert set(documented) == _families()


def test_the_grafana_dashboard_queries_existing_metrics() -> None:
    """Every metric in every query of the dashboard file is on the page, and every panel has a query."""
    dashboard = json.loads((ROOT / "deploy/grafana/kvroute.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len(panels) >= 12
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    queries += [
        variable["query"]["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"
    ]
    assert all(panel["targets"] for panel in panels)
    queried = {name for query in queries for name in re.findall(r"\bkvroute_\w+", query)}
    known = _families() | {f"{name}{end}" for name in _families() for end in ("_bucket", "_sum", "_count")}
    assert queried
    assert queried <= known
    [errors] = [panel for panel in panels if panel["title"] == "Errors"]
    assert "kvroute_stream_errors_total" in errors["targets"][0]["expr"], "a broken stream's code is 200"
    identifiers = [panel["id"] for panel in dashboard["panels"]]
    assert len(identifiers) == len(set(identifiers))


def _labels() -> dict[str, set[str]]:
    """Return the labels of each metric family, as documented in docs/metrics.md."""
    rows = re.findall(r"^\| `(kvroute_\w+)` \|[^|]*\|([^|]*)\|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    return {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}


def test_alert_rules_use_existing_metrics_and_labels() -> None:
    """Every metric and label in an expression is on the page; a text uses only labels of its expression."""
    groups = yaml.safe_load((ROOT / "deploy/prometheus/kvroute-alerts.yml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) >= 15
    documented = _labels()
    for rule in rules:
        queried = re.findall(r"\b(kvroute_\w+?)(?:_bucket|_sum|_count)?\b(?:\{([^}]*)\})?", rule["expr"])
        assert queried or rule["alert"] == "KvrouteDown"
        for name, matchers in queried:
            assert name in _families(), rule["alert"]
            assert set(re.findall(r"(\w+)=", matchers)) <= documented[name], rule["alert"]
        known = {"instance", "job"}.union(*(documented[name] for name, _ in queried))
        grouped = re.findall(r"\bby \(([^)]*)\)", rule["expr"])
        if grouped:
            known &= set(re.findall(r"\w+", grouped[0]))
        named = re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values()))
        assert set(named) <= known, rule["alert"]


def test_alert_texts_name_existing_metrics() -> None:
    """The texts give the metrics in backquotes."""
    texts = (ROOT / "deploy/prometheus/kvroute-alerts.yml").read_text()
    named = re.findall(r"`(kvroute_\w+)`", texts)
    assert named
    assert set(named) <= _families()


def test_each_tier_has_one_label() -> None:
    """Each tier has one label that can be used in a query."""
    assert len(set(TIER_LABELS)) == 5
    assert all(re.fullmatch("[a-z_]+", label) for label in TIER_LABELS)


def test_a_decaying_share_reaches_zero() -> None:
    """A mean that halves repeatedly is shown as 0, not as 5e-56."""
    idle = msgspec.structs.replace(OFFLOAD, sites=(msgspec.structs.replace(OFFLOAD.sites[0], utilisation=5.17e-56),))
    samples = {family.name: list(values) for family, values in offload_gauges(idle)}
    assert samples["kvroute_egress_used_ratio"] == [(("far",), 0.0)]
