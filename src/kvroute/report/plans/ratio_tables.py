"""The cache-compute ratio of several models and lengths as one grid."""

from __future__ import annotations

from collections.abc import Sequence

from kvroute.llm import Model
from kvroute.planner.throughput.cache_compute import CacheCompute
from kvroute.report.grid import Grid, GridEntry, Heading


def ratio_grid(rows: Sequence[tuple[Model, Sequence[CacheCompute]]]) -> Grid:
    """Return one row per model, with a column for each number of cached tokens. All rows have the same lengths."""
    lengths = rows[0][1]
    headings = (
        Heading("model"),
        Heading("active B", "Parameters by which each prompt token is multiplied, in billions", drop=2),
        Heading("KV B/token", "Bytes of KV per token of a long context", drop=3),
        *(
            Heading(f"GFLOP/token at {length.cached_tokens:,}", "Operations for one appended token", drop=1)
            for length in lengths
        ),
        *(Heading(f"GB/PFLOP at {length.cached_tokens:,}", "KV to read per operation") for length in lengths),
    )
    texts = tuple(
        tuple(
            map(
                GridEntry,
                (
                    model.name,
                    f"{model.compute.active_parameters / 1e9:,.3g}" if model.compute else "",
                    f"{model.kv_bytes_per_token:,.0f}",
                    *(f"{row.token_flop / 1e9:,.4g}" for row in found),
                    *(f"{row.cached_bytes_per_flop * 1e6:,.3g}" for row in found),
                ),
            )
        )
        for model, found in rows
    )
    title = f"KV to read per PFLOP of prefill, {lengths[0].appended_tokens:,} appended tokens"
    return Grid(title, headings, texts)
