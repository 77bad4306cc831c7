"""The metrics page of all workers: that of one gateway which has seen everything."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from kvroute.serve.observe.metrics.metrics import Metrics
from kvroute.serve.observe.view import GatewayStatus, InstanceLoad, ReplicationLoad, TtftBreakdown
from kvroute.serve.workers.merged_metrics import ADDED, LEAST, Page, counts, merged, read, text

OPENMETRICS = "application/openmetrics-text"
seen = st.lists(
    st.tuples(st.sampled_from(["finished", "rejected", "first token"]), st.sampled_from([0.003, 0.2, 400.0]))
)


def load(in_flight: int = 1, *, up: bool = True) -> GatewayStatus:
    return GatewayStatus(in_flight=in_flight, instances=(InstanceLoad(name="decode0", up=up, requests=in_flight),))


def metrics(status: GatewayStatus) -> Metrics:
    return Metrics(lambda: status, {"decode0": "decode"}, version="1", policy="netkv")


def happen(where: Metrics, event: tuple[str, float]) -> None:
    kind, seconds = event
    if kind == "finished":
        where.finished("chat", 200, seconds, relayed_bytes=3)
    elif kind == "rejected":
        where.rejected("queue_full")
    else:
        where.first_token("vllm", TtftBreakdown(0.0, seconds, 0.0), ("trace_id", f"t{seconds}"))


def page_of(where: Metrics, *, openmetrics: bool = False) -> Page:
    return read("".join(where.page(OPENMETRICS if openmetrics else "")[1]), openmetrics=openmetrics)


def samples(page: Page, *kinds: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Samples of the families of these kinds that kvroute counts itself."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in page
        if family.type in kinds and family.name.startswith("kvroute_")
        for sample in family.samples
    }


@settings(max_examples=25, deadline=None)
@given(st.lists(seen, min_size=1, max_size=3), seen, st.booleans())
def test_counters_are_those_of_one_gateway(
    workers: list[list[tuple[str, float]]], ended: list[tuple[str, float]], openmetrics: bool
) -> None:
    """Also with a worker that has ended; the text is read back as it was."""
    whole, parts, gone = metrics(load()), [metrics(load()) for _ in workers], metrics(load())
    for part, events in [*zip(parts, workers, strict=True), (gone, ended)]:
        for event in events:
            happen(part, event)
            happen(whole, event)
    page = merged([page_of(part, openmetrics=openmetrics) for part in parts], counts(page_of(gone)))
    _, families = text(page, openmetrics=openmetrics)
    again = read("".join(families), openmetrics=openmetrics)
    assert samples(again, "counter", "histogram") == pytest.approx(
        samples(page_of(whole, openmetrics=openmetrics), "counter", "histogram")
    )


def test_gauges_are_added_or_the_worst_counts() -> None:
    """An instance is up if all workers say so; requests in flight are added."""
    page = merged([page_of(metrics(load(2))), page_of(metrics(load(3, up=False)))])
    values = {name: value for (name, _), value in samples(page, "gauge").items()}
    assert values["kvroute_requests_in_flight"] == values["kvroute_instance_requests"] == 5
    assert (values["kvroute_instance_up"], values["kvroute_info"], values["kvroute_ready"]) == (0, 1, 1)


def test_what_engines_count_is_not_counted_by_each_worker() -> None:
    """All workers read the same counters of connectors. One that has started later has seen less, and one that has
    ended is not added to those that run."""
    parts = [metrics(load()) for _ in range(3)]
    for part, failed in zip(parts, (5, 5, 2), strict=True):
        part.kv_lost("decode0", failed, 2 * failed)
    *running, ended = map(page_of, parts)
    expected = {"kvroute_engine_transfer_failures_total": 5, "kvroute_engine_kv_expired_total": 10}
    for pages, gone in (((running[0], ended), counts(running[1])), (running, counts(ended))):
        values = {name: value for (name, _), value in samples(merged(pages, gone), "counter").items()}
        assert {name: values[name] for name in expected} == expected


def test_the_slowest_path_of_any_worker_counts() -> None:
    pages = [page_of(metrics(GatewayStatus(path_ratios=(None, ratio)))) for ratio in (0.9, 0.2)]
    values = {name: value for (name, _), value in samples(merged(pages), "gauge").items()}
    assert values["kvroute_slowest_path_ratio"] == 0.2


def test_both_formats_have_their_end_and_exemplars() -> None:
    part = metrics(load())
    happen(part, ("first token", 0.2))
    kind, families = text(merged([page_of(part, openmetrics=True)]), openmetrics=True)
    written = "".join(families)
    assert written.endswith("# EOF\n")
    assert written.count("# EOF") == 1
    assert '# {trace_id="t0.2"} 0.2' in written
    assert kind.startswith(OPENMETRICS)
    assert "text/plain" in text((), openmetrics=False)[0]


def test_the_tables_name_gauges_that_exist() -> None:
    """A gauge that is renamed must be renamed there."""
    every = InstanceLoad(name="d", scrape_age_s=1.0, storage_queue_s=1.0, kv_used_share=0.5)
    shared = ReplicationLoad(gateway="g", state="in_sync", gateways=1)
    page = page_of(metrics(GatewayStatus(instances=(every,), replication=shared, path_ratios=(0.5,))))
    gauges = {family.name for family in page if family.type == "gauge"}
    assert gauges >= ADDED | LEAST


def test_families_keep_their_help() -> None:
    """And their type, so that Prometheus shows both."""
    _, families = text(merged([page_of(metrics(load()))]), openmetrics=False)
    first: Metric = next(iter(text_string_to_metric_families("".join(families))))
    assert (first.name, first.type) == ("kvroute_requests", "counter")
    assert first.documentation == "Requests answered, by endpoint and status."
