"""The metrics page of a server with data-parallel ranks, divided by rank.

vLLM labels the series of each rank with `engine`. Behind a hybrid load balancer the labels of a node do not begin at 0,
so the rank that a request's header selects is the position of its label.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvroute.gateway.http.slices import Slices
from kvroute.gateway.observe.prometheus_text import Budget, PageError

_LINE = re.compile(
    rb"^(?:vllm:(?:num_requests_running|num_requests_waiting|kv_cache_usage_perc|gpu_cache_usage_perc|cache_config_info"
    rb"|lora_requests_info|nixl_)|kvroute:kv_|process_start_time_seconds)[^\n]*",
    re.MULTILINE,
)
"""A sample that the reader of a page needs."""
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


def _page(lines: list[bytes]) -> bytes:
    """Return the page of one rank. With several API servers, vLLM's page has the load of a rank only once it has had a
    request; before that the rank is idle."""
    if any(line.startswith(b"vllm:cache_config") for line in lines) and not any(_RUNNING in line for line in lines):
        lines = [*lines, _RUNNING + b" 0"]
    return b"\n".join([*lines, b""])
