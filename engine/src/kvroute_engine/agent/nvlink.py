"""Rates of NVLink from the Prometheus page of dcgm-exporter."""

from __future__ import annotations

import math
import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

_OUT, _IN = "DCGM_FI_PROF_NVLINK_TX_BYTES", "DCGM_FI_PROF_NVLINK_RX_BYTES"
"""Bytes per second of each GPU (DCGM fields 1011 and 1012)."""
_TIMEOUT_S = 2.0
_PAGE_MAX = 4 * 2**20


def nvlink_rates(page: str) -> dict[int, tuple[float, float]]:
    """Return the bytes per second out and in of each GPU that the page has both of."""
    found: dict[str, dict[int, float]] = {_OUT: {}, _IN: {}}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            gpu = sample.labels.get("gpu", "")
            name = sample.name.removesuffix("_total")  # the parser's names of counters
            if name in found and gpu.isdecimal() and math.isfinite(sample.value) and sample.value >= 0:
                found[name][int(gpu)] = sample.value
    return {gpu: (found[_OUT][gpu], found[_IN][gpu]) for gpu in sorted(found[_OUT].keys() & found[_IN].keys())}


def fetch_rates(url: str) -> dict[int, tuple[float, float]] | None:
    """Return the rates on the page at a URL; None if it cannot be fetched or read."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            return nvlink_rates(answer.read(_PAGE_MAX).decode())
    except (OSError, ValueError, urllib.error.URLError):
        return None
