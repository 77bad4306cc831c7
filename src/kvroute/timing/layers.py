"""Steps added up from measured times of a model's layers, in the tables that LLMServingSim publishes.

A folder has for each tensor-parallel degree N `tpN_dense.csv` (layer, tokens, time_us), `tpN_per_sequence.csv` (layer,
sequences, time_us), `tpN_attention.csv` (prefill_chunk, kv_prefill, n_decode, kv_decode, time_us) and, for a mixture of
experts, `tpN_moe.csv` (tokens, activated_experts, time_us); also as `tpN/dense.csv`, and compressed (`.csv.gz`).
"""

from __future__ import annotations

import csv
import gzip
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np

from kvroute.timing.profile import Profile
from kvroute.timing.steps import StepWork
from kvroute.types import InputError

Curve: TypeAlias = list[tuple[float, float]]
"""Measured points (x, microseconds), ascending."""
ONCE = ("embedding", "final_layernorm")
"""Dense operations that a step has once; the others are those of one layer."""
TWICE = ("layernorm",)
"""Operations that a layer has twice."""
_MEAN_TOKENS, _COMPUTED_TOKENS = 8, 16
"""Contexts are rounded to these, so that most steps are computed once."""


@dataclass(frozen=True, slots=True)
class LayerTables:
    """The tables of one model on one GPU and tensor-parallel degree."""

    dense: dict[str, Curve]
    per_sequence: dict[str, Curve]
    attention: dict[tuple[int, int, int, int], float]
    """Microseconds by (tokens of the prompt, tokens before them, requests that decode, mean of their contexts)."""
    experts: dict[int, Curve]
    """By the number of experts that are used, microseconds for a number of tokens."""

    @classmethod
    def read(cls, folder: Path, tp: int) -> LayerTables:
        """Read a folder.

        Raises:
            InputError: a table is missing, or a line of it is not as expected.
        """
        dense, per_sequence = (_curves(folder, tp, *of) for of in (("dense", "tokens"), ("per_sequence", "sequences")))
        axes = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
        attention = {
            (int(chunk), int(before), int(decoding), int(context)): time_us
            for _, (chunk, before, decoding, context, time_us) in _rows(folder, tp, "attention", (*axes, "time_us"))
        }
        experts: dict[int, Curve] = {}
        if _path(folder, tp, "moe") is not None:
            for _, (used, tokens, time_us) in _rows(folder, tp, "moe", ("activated_experts", "tokens", "time_us")):
                experts.setdefault(int(used), []).append((tokens, time_us))
        for curve in experts.values():
            curve.sort()
        return cls(dense, per_sequence, attention, experts)


@dataclass(frozen=True, slots=True)
class AllReduceLink:
    """Two all-reduces of a layer between the ranks of a tensor-parallel group, or the exchange between experts."""

    bytes_per_s: float
    latency_s: float
    token_bytes: float
    """Bytes of a token between two layers."""


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Experts of a layer, and the ranks over which they are spread."""

    experts: int
    per_token: int
    ranks: int = 1


@dataclass(frozen=True)
class LayerSteps:
    """Steps of a model of `layers` equal layers."""

    tables: LayerTables
    layers: int
    tp: int = 1
    link: AllReduceLink | None = None
    """None: the GPUs' exchange takes no time, or there is one GPU."""
    experts: ExpertShape | None = None
    step_s: float = 0.0
    """Time of a step besides its layers: launches of kernels and the engine's own work."""
    _dense_us: dict[int, float] = field(default_factory=dict, repr=False, compare=False)
    _attention_us: dict[tuple[int, int, int, int], float] = field(default_factory=dict, repr=False, compare=False)

    def __call__(self, work: StepWork) -> float:
        """Return the seconds of a step of one rank, or of a tensor-parallel group."""
        exchange_s = self._exchange_s(work.tokens, 2 * (self.tp - 1) / self.tp) if self.tp > 1 else 0.0
        return self._own_s(work) + 1e-6 * self.layers * self._experts_us(work.tokens) + exchange_s + self.step_s

    def together(self, works: Sequence[StepWork]) -> float:
        """Return the seconds of a step of data-parallel ranks that share the experts: all wait for the slowest, and
        exchange their tokens before and after the experts of each layer. A rank without requests computes one token."""
        tokens = [work.tokens or 1 for work in works]
        experts_s = 1e-6 * self.layers * self._experts_us(sum(tokens) / len(works))
        slowest_s = max(self._own_s(work) if work.tokens else 0.0 for work in works)
        return slowest_s + experts_s + self._exchange_s(max(tokens), 1.0) + self.step_s

    def profile(self, name: str) -> Profile:
        """Return the times of whole prompts in one step, and of steps of a batch, at the points of the tables."""
        lengths = [chunk for chunk in self._axes[0] if chunk]
        batches = [(n, context) for n in self._axes[2] if n for context in self._axes[3] if context]
        return Profile(
            where=name,
            tokens=np.array(lengths, np.float64),
            prefill_s=np.array([self(StepWork(((0, tokens),))) for tokens in lengths]),
            batch=np.array([n for n, _ in batches], np.float64),
            context_tokens=np.array([n * context for n, context in batches], np.float64),
            iteration_s=np.array([self(StepWork((), n, n * context)) for n, context in batches]),
        )

    @cached_property
    def _axes(self) -> tuple[list[int], ...]:
        """The values of each of the four quantities that the time of attention depends on: 0, and those that double.

        All combinations of these are measured; further points of the tables are not.
        """
        return tuple(_doubling({point[axis] for point in self.tables.attention}) for axis in range(4))

    def _own_s(self, work: StepWork) -> float:
        """Return the seconds of everything but experts and the exchange between GPUs."""
        prompt_tokens, decoding = work.prompt_tokens, work.decoding
        tokens = prompt_tokens + decoding
        if tokens not in self._dense_us:
            self._dense_us[tokens] = self._dense(tokens)
        mean = round(work.context_tokens / decoding / _MEAN_TOKENS) * _MEAN_TOKENS if decoding else 0
        before = 0
        if prompt_tokens:
            before = round(sum(new * computed for computed, new in work.prompts) / prompt_tokens / _COMPUTED_TOKENS)
        point = (prompt_tokens, before * _COMPUTED_TOKENS, decoding, mean)
        if point not in self._attention_us:
            self._attention_us[point] = self._attention(*point)
        sequences = decoding + len(work.prompts)
        once_us = sum(_at(curve, sequences) for curve in self.tables.per_sequence.values())
        return 1e-6 * (self._dense_us[tokens] + self.layers * self._attention_us[point] + once_us)

    def _dense(self, tokens: int) -> float:
        total_us = 0.0
        for name, curve in self.tables.dense.items():
            times = 1 if name in ONCE else self.layers * (2 if name in TWICE else 1)
            total_us += times * _at(curve, tokens)
        return total_us

    def _attention(self, chunk: int, before: int, decoding: int, mean: int) -> float:
        """Interpolate between the measured points, linear in each quantity, and constant beyond the last point."""
        chunks, befores, batches, contexts = self._axes
        total_us = 0.0
        for c, c_share in _around(chunks, chunk):
            for b, b_share in _around(befores, before) if c else [(0, 1.0)]:
                for n, n_share in _around(batches, decoding):
                    for m, m_share in _around(contexts[1:], mean) if n else [(0, 1.0)]:
                        if (share := c_share * b_share * n_share * m_share) and (c or n):
                            total_us += share * self._measured(c, b, n, m)
        return total_us

    def _measured(self, chunk: int, before: int, decoding: int, mean: int) -> float:
        """Return a point; a batch beside a prompt that was not measured is computed from half of it."""
        point = self.tables.attention.get((chunk, before, decoding, mean))
        if point is not None:
            return point
        if decoding <= 1:
            return 0.0
        alone = self.tables.attention.get((chunk, before, 0, 0), 0.0)
        return 2 * self._measured(chunk, before, decoding // 2, mean) - alone

    def _experts_us(self, tokens: float) -> float:
        """Return the microseconds of the experts of one rank and layer, if `tokens` tokens come from each rank.

        Each token draws its experts at random; the time depends on how many are used, whose weights are read, and on
        the tokens that they compute.
        """
        if self.experts is None or not self.tables.experts:
            return 0.0
        shape = self.experts
        unused = (1 - shape.per_token / shape.experts) ** (tokens * shape.ranks)
        counts = sorted(self.tables.experts)
        used = shape.experts / shape.ranks * (1 - unused)
        return sum(share * _at(self.tables.experts[n], max(tokens, 1)) for n, share in _around(counts, used))

    def _exchange_s(self, tokens: int, share: float) -> float:
        """Return the time of two exchanges of each layer; each GPU sends `share` of the bytes of the tokens."""
        if self.link is None:
            return 0.0
        sent_s = share * tokens * self.link.token_bytes / self.link.bytes_per_s
        return 2 * self.layers * (self.link.latency_s + sent_s)


def _doubling(values: set[int]) -> list[int]:
    found = [0, min(value for value in values if value)]
    while 2 * found[-1] in values:
        found.append(2 * found[-1])
    return found


def _around(axis: Sequence[int], value: float) -> list[tuple[int, float]]:
    """Return the two points of an axis around a value, with their shares."""
    if len(axis) == 1:
        return [(axis[0], 1.0)]
    value = min(max(value, axis[0]), axis[-1])
    below = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
    share = (value - axis[below]) / (axis[below + 1] - axis[below])
    return [(axis[below], 1 - share), (axis[below + 1], share)]


def _at(curve: Curve, x: float) -> float:
    """Interpolate in a curve, and extrapolate at its ends."""
    if len(curve) == 1:
        return curve[0][1]
    above = min(max(bisect_right(curve, (x, float("inf"))), 1), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[above - 1], curve[above]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _path(folder: Path, tp: int, name: str) -> Path | None:
    places = (folder / f"tp{tp}{between}{name}.csv{ending}" for between in ("_", "/") for ending in ("", ".gz"))
    return next((path for path in places if path.is_file()), None)


def _curves(folder: Path, tp: int, name: str, axis: str) -> dict[str, Curve]:
    found: dict[str, Curve] = {}
    for layer, (at, time_us) in _rows(folder, tp, name, (axis, "time_us")):
        found.setdefault(layer, []).append((at, time_us))
    for curve in found.values():
        curve.sort()
    return found


def _rows(folder: Path, tp: int, name: str, columns: tuple[str, ...]) -> Iterator[tuple[str, list[float]]]:
    """Yield the layer of each line, if it has one, and the numbers in the columns."""
    path = _path(folder, tp, name)
    if path is None:
        hint = "give the folder of one model and GPU as LLMServingSim's profiler writes it, and a degree that it has"
        raise InputError(f"there is no table tp{tp}_{name}.csv", where=str(folder), hint=hint)
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open(newline="") as lines:
        table = csv.DictReader(lines)
        if missing := [column for column in columns if column not in (table.fieldnames or ())]:
            hint = f"its columns are {', '.join(columns)}"
            raise InputError(f"the column {missing[0]} is missing", where=str(path), hint=hint)
        for row in table:
            try:
                numbers = [float(row[column]) for column in columns]
            except (TypeError, ValueError):
                what = f"line {table.line_num} has no number in one of {', '.join(columns)}"
                raise InputError(what, where=str(path), hint="correct or remove it") from None
            yield row.get("layer") or "", numbers
