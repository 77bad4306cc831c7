"""Counters and histograms for one thread, and their text for Prometheus; without locks and without a server.

prometheus_client takes 30 to 50 ms to write the 6,000 lines of 500 instances, which would block every stream, and locks
on each observation. Here a page is written family by family. The tests check the text with the parsers of
prometheus_client.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Literal, TypeAlias

Key: TypeAlias = tuple[str, ...]
"""Label values in the order of the family's labels."""
Exemplar: TypeAlias = tuple[str, str]
"""Label name and value that identify an example, e.g. ("trace_id", "4bf9...")."""
Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Amount: TypeAlias = int | float
"""Both types, because they are written differently; `float` alone would convert integers in compiled code."""

KEYS_MOST = 16_384
"""Largest number of label sets of one family. Labels come from the cluster file, from discovered engines and from this
program. If a bug makes them unbounded, memory stays bounded and further label sets are counted as `other`."""
_OTHER = "other"
_ODD = re.compile(r"[^0-9A-Za-z_.:/+=-]")

REQUEST_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0),
)
"""Bounds of histograms of times of requests, in seconds."""
LAG_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Bounds of histograms of delays, in seconds."""


class MetricFamily:
    """Name, help and labels of one metric; the name of a counter ends in `_total`."""

    __slots__ = ("help", "kind", "labels", "name")

    def __init__(self, kind: Kind, name: str, help: str, labels: Key = ()) -> None:
        assert (kind == "counter") == name.endswith("_total"), name
        self.kind, self.name, self.help, self.labels = kind, name, help, labels

    def head(self, openmetrics: bool) -> str:
        """Return the HELP and TYPE lines; OpenMetrics names a counter's family without `_total`."""
        name = self.name.removesuffix("_total") if openmetrics else self.name
        return f"# HELP {name} {self.help}\n# TYPE {name} {self.kind}\n"

    def pairs(self, key: Key) -> str:
        """Return label pairs such as `a="1",b="2"`, escaped."""
        return ",".join(f'{label}="{escaped(value)}"' for label, value in zip(self.labels, key, strict=True))


class Counter(MetricFamily):
    """A sum that only grows, per label set."""

    __slots__ = ("values",)

    def __init__(self, name: str, help: str, labels: Key = ()) -> None:
        super().__init__("counter", name, help, labels)
        self.values: dict[Key, Amount] = {} if labels else {(): 0}

    def add(self, key: Key = (), amount: Amount = 1) -> None:
        """Add to the sum; `amount` is zero or more."""
        try:
            self.values[key] += amount
        except KeyError:
            if len(self.values) >= KEYS_MOST:
                key = (_OTHER,) * len(key)
            self.values[key] = self.values.get(key, 0) + amount

    def forget(self, label: str, value: str) -> None:
        """Drop the sums with this value of a label. Does nothing without that label."""
        if label in self.labels:
            place = self.labels.index(label)
            for key in [key for key in self.values if key[place] == value]:
                del self.values[key]

    def text(self, openmetrics: bool) -> str:
        """Return all lines of the family."""
        return lines(self, self.values.items(), openmetrics)


class _Series:
    __slots__ = ("counts", "exemplars", "sum")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets
        self.exemplars: list[tuple[float, Exemplar] | None] = [None] * buckets
        self.sum = 0.0


class Histogram(MetricFamily):
    """Counts per bucket, with the last exemplar of each bucket, per label set."""

    __slots__ = ("_bounds", "_les", "_series")

    def __init__(self, name: str, help: str, bounds: tuple[float, ...], labels: Key = ()) -> None:
        super().__init__("histogram", name, help, labels)
        assert list(bounds) == sorted(set(bounds)), name
        assert all(map(math.isfinite, bounds)), name
        self._bounds = bounds
        self._les = (*(number(float(bound)) for bound in bounds), "+Inf")
        self._series: dict[Key, _Series] = {} if labels else {(): _Series(len(bounds) + 1)}

    def observe(self, key: Key, value: float, exemplar: Exemplar | None = None) -> None:
        """Count `value` in the first bucket whose upper bound is not below it."""
        series = self._series.get(key) or self._new(key)
        slot = bisect_left(self._bounds, value)
        series.counts[slot] += 1
        series.sum += value
        if exemplar is not None:
            series.exemplars[slot] = (value, exemplar)

    def count(self, key: Key = ()) -> int:
        """Return the number of observations of one label set."""
        series = self._series.get(key)
        return sum(series.counts) if series else 0

    def _new(self, key: Key) -> _Series:
        if len(self._series) >= KEYS_MOST:
            key = (_OTHER,) * len(key)
        return self._series.setdefault(key, _Series(len(self._bounds) + 1))

    def text(self, openmetrics: bool) -> str:
        """Return all lines of the family; exemplars only in OpenMetrics, as the other format has none."""
        parts = [self.head(openmetrics)]
        for key, series in self._series.items():
            pairs = self.pairs(key)
            start = f"{self.name}_bucket{{{pairs}{',' if pairs else ''}le="
            total = 0
            for le, count, exemplar in zip(self._les, series.counts, series.exemplars, strict=True):
                total += count
                parts.append(f'{start}"{le}"}} {total}{_exemplar_text(exemplar) if openmetrics else ""}\n')
            labels = f"{{{pairs}}}" if pairs else ""
            parts.append(f"{self.name}_count{labels} {total}\n{self.name}_sum{labels} {number(series.sum)}\n")
        return "".join(parts)


def lines(family: MetricFamily, samples: Iterable[tuple[Key, Amount]], openmetrics: bool) -> str:
    """Return the text of a counter or gauge from its samples."""
    parts = [family.head(openmetrics)]
    for key, value in samples:
        pairs = family.pairs(key)
        parts.append(f"{family.name}{{{pairs}}} {number(value)}\n" if pairs else f"{family.name} {number(value)}\n")
    return "".join(parts)


def page(families: Iterable[Counter | Histogram], openmetrics: bool) -> Iterator[str]:
    """Yield one text per family, so that other tasks can run in between; the caller adds the final `# EOF`."""
    for family in families:
        yield family.text(openmetrics)


def number(value: Amount) -> str:
    """Return a number in the form that both formats share; a `float` beyond 2^53 is not exact."""
    if isinstance(value, int):
        return str(value)
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def escaped(text: str) -> str:
    """Return a label value, escaped for double quotes."""
    if "\\" in text or '"' in text or "\n" in text:
        return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return text


def _exemplar_text(exemplar: tuple[float, Exemplar] | None) -> str:
    if exemplar is None:
        return ""
    value, (label, text) = exemplar
    # OpenMetrics allows 128 characters for all labels of an exemplar, names included. An id from a client may contain
    # quotes, and some parsers in use fail on them even when they are escaped.
    plain = _ODD.sub("_", text[: 128 - len(label)])
    return f' # {{{label}="{plain}"}} {number(value)}'
