"""Prompt lengths as a plan's file gives them: a distribution, a constant, a table or a trace."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvroute.planner.throughput.lengths import Lengths, grouped, incremental, log_normal
from kvroute.planner.throughput.schema import (
    ConstantLengths,
    LengthsEntry,
    LogNormalLengths,
    TableLengths,
    TraceLengths,
)
from kvroute.sim.workload import read


def traffic_lengths(entry: LengthsEntry, step_tokens: int, folder: Path) -> tuple[Lengths, tuple[str, ...]]:
    """Return the lengths in groups of `step_tokens` tokens, and remarks on the trace that they come from.

    Args:
        entry: the lengths as the file gives them.
        step_tokens: width of a group.
        folder: folder of the file, to which the path of a trace is relative.

    Raises:
        InputError: a distribution without mass, a table of unequal columns, or a trace that cannot be read.
    """
    match entry:
        case LogNormalLengths(mu=mu, sigma=sigma, least=least, most=most):
            return log_normal(mu, sigma, least, most, step_tokens), ()
        case ConstantLengths(tokens=tokens):
            about = f"every prompt has {tokens:,} tokens"
            return grouped(np.array([float(tokens)]), np.ones(1), step_tokens, about), ()
        case TableLengths(tokens=counts, shares=shares):
            about = f"a table of {len(counts)} lengths"
            return grouped(np.array(counts, dtype=np.float64), np.array(shares), step_tokens, about), ()
        case TraceLengths():
            return _of_trace(entry, step_tokens, folder)


def _of_trace(entry: TraceLengths, step_tokens: int, folder: Path) -> tuple[Lengths, tuple[str, ...]]:
    trace = read(folder / entry.file, block_tokens=entry.block_tokens)
    limits = {"infinite": None, "none": 0}
    tokens, cached = incremental(trace, limits[entry.cache] if isinstance(entry.cache, str) else entry.cache)
    cache = f"a cache of {entry.cache:,} tokens" if isinstance(entry.cache, int) else f"cache: {entry.cache}"
    about = f"{len(tokens):,} requests of {trace.name}, {cached:.1%} of their prompt tokens cached ({cache})"
    return grouped(tokens, np.ones_like(tokens), step_tokens, about), trace.remarks
