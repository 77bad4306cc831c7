"""One metrics page from those of all workers: counters and histograms are added, gauges as their tables say."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition as openmetrics_exposition
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as plain_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

Page: TypeAlias = Sequence[Metric]
_Key: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]

ADDED = frozenset(
    {
        "kvroute_requests_in_flight",
        "kvroute_requests_queued",
        "kvroute_placement_queue_requests",
        "kvroute_deferred_requests",
        "kvroute_client_connections",
        "kvroute_forwarded_streams",
        "kvroute_transfers_in_flight",
        "kvroute_instance_requests",
        "kvroute_storage_queue_seconds",
        "process_virtual_memory_bytes",
        "process_resident_memory_bytes",
        "process_open_fds",
    }
)
"""Gauges of what each worker has itself: the sum of all."""
LEAST = frozenset(
    {
        "kvroute_ready",
        "kvroute_replication_gateways",
        "kvroute_instance_up",
        "process_start_time_seconds",
        "process_max_fds",
        "kvroute_scrape_age_seconds",
        "kvroute_slowest_path_ratio",
    }
)
"""Gauges of which the lowest counts. For all others it is the highest: ages, states of breakers, what is learned."""
READ_BY_ALL = frozenset({"kvroute_engine_transfer_failures", "kvroute_engine_kv_expired"})
"""Counters of what engines count, which every worker reads: the highest counts, as a later worker has missed some."""


def read(text: str, *, openmetrics: bool) -> Page:
    """Return the families of a worker's page."""
    return list((openmetrics_families if openmetrics else plain_families)(text))


def merged(pages: Sequence[Page], ended: Page = ()) -> Page:
    """Return one page.

    Args:
        pages: those of the workers that run.
        ended: sums of the workers that have ended (`counts`), so that counters do not go back.
    """
    families: dict[str, Metric] = {}
    values: dict[str, dict[_Key, Sample]] = {}
    for family in [family for page in (*pages, ended) for family in page]:
        families.setdefault(family.name, family)
        known, combine = values.setdefault(family.name, {}), _rule(family)
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            before = known.get(key)
            known[key] = sample if before is None else _combined(before, sample, combine)
    return [_with(family, values[name].values()) for name, family in families.items()]


def counts(page: Page) -> Page:
    """Return the counters and histograms of a page."""
    return [family for family in page if family.type in ("counter", "histogram")]


def text(page: Page, *, openmetrics: bool) -> tuple[str, Iterator[str]]:
    """Return content type and text, family by family."""
    if openmetrics:
        return openmetrics_exposition.CONTENT_TYPE_LATEST, _openmetrics(page)
    return CONTENT_TYPE_PLAIN_0_0_4, (generate_latest(_registry([family])).decode() for family in page)


def _openmetrics(page: Page) -> Iterator[str]:
    end = "# EOF\n"
    for family in page:
        page_bytes: bytes = openmetrics_exposition.generate_latest(_registry([family]))  # type: ignore[no-untyped-call]
        yield page_bytes.decode().removesuffix(end)
    yield end


def _rule(family: Metric) -> Callable[[float, float], float]:
    if family.name in READ_BY_ALL:
        return max
    if family.type in ("counter", "histogram") or family.name in ADDED:
        return operator.add
    return min if family.name in LEAST else max


def _combined(one: Sample, other: Sample, combine: Callable[[float, float], float]) -> Sample:
    return one._replace(value=combine(one.value, other.value), exemplar=other.exemplar or one.exemplar)


def _with(family: Metric, samples: Iterable[Sample]) -> Metric:
    whole = Metric(family.name, family.documentation, family.type)
    whole.samples = list(samples)
    return whole


class _Families(Collector):
    """A collector of given families."""

    def __init__(self, page: Page) -> None:
        self._page = page

    def collect(self) -> Iterable[Metric]:
        return self._page


def _registry(page: Page) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(_Families(page))
    return registry
