"""The metrics page of a server with data-parallel ranks, divided by rank.

vLLM labels the series of each rank with `engine`. Behind a hybrid load balancer the labels of a node do not begin at 0,
so the rank that a request's header selects is the position of its label. SGLang may also export the metrics of each
tensor-, pipeline-, expert- and context-parallel rank; all of them count the same requests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvroute.http.slices import Slices
from kvroute.serve.observe.metrics.prometheus_text import Budget, PageError, labels_of, samples

_LINE = re.compile(
    rb"^(?:vllm:(?:num_requests_running|num_requests_waiting|kv_cache_usage_perc|gpu_cache_usage_perc|cache_config_info"
    rb"|lora_requests_info|nixl_)|kvroute:kv_|process_start_time_seconds)[^\n]*",
    re.MULTILINE,
)
"""A sample that the reader of a page needs."""
_DATA_PARALLEL = "dp_rank"
_RUNNING = b"vllm:num_requests_running"
_ENGINE = re.compile(rb'[{,]engine="(\d{1,9})"')


def pages_by_rank(page: bytes, ranks: Mapping[str, int]) -> Slices[dict[str, bytes]]:
    """Return the samples of each rank on a page, and those of no rank, by name of the instance.

    Args:
        page: the whole page.
        ranks: data-parallel rank of each instance of the server.

    Raises:
        PageError: the page lacks a rank.
    """
    meter = Budget()
    of_all: list[bytes] = []
    by_label: dict[int, list[bytes]] = {}
    for found in _LINE.finditer(page):
        line = found[0]
        if meter.spend(len(line)):
            yield
        label = _ENGINE.search(line)
        (of_all if label is None else by_label.setdefault(int(label[1]), [])).append(line)
    labels, wanted = sorted(by_label), max(ranks.values()) + 1
    if labels and len(labels) < wanted:
        what = f"the page has metrics of {len(labels)} data-parallel ranks, not of {wanted}"
        raise PageError(f"{what}: correct `dp`, or start the engine with --data-parallel-size {wanted}")
    return {name: _page([*of_all, *(by_label[labels[rank]] if labels else ())]) for name, rank in ranks.items()}


def values_by_rank(page: bytes, name: bytes, budget: Budget) -> Slices[list[float]]:
    """Return one value of each data-parallel rank: the largest over its other ranks.

    Args:
        page: starts with a line feed.
        name: of a series.

    Raises:
        PageError: there are more samples than the budget allows.
    """
    found = yield from samples(page, name, budget)
    if len(found) == 1:
        return [found[0][1]]
    by_rank: dict[tuple[tuple[str, str], ...], float] = {}
    for text, value in found:
        if budget.spend(len(text)):
            yield
        labels = labels_of(text).items()
        rank = tuple([label for label in labels if label[0] == _DATA_PARALLEL or not label[0].endswith("_rank")])
        by_rank[rank] = max(value, by_rank.get(rank, value))
    return list(by_rank.values())


def _page(lines: list[bytes]) -> bytes:
    """Return the page of one rank. With several API servers, vLLM's page has the load of a rank only once it has had a
    request; before that the rank is idle."""
    if any(line.startswith(b"vllm:cache_config") for line in lines) and not any(_RUNNING in line for line in lines):
        lines = [*lines, _RUNNING + b" 0"]
    return b"\n".join([*lines, b""])
