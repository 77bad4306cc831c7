"""Requests in order of arrival, and their statistics. This module neither reads files nor draws random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import numpy as np

from kvroute.types import FloatArray, IntArray


class TracedRequest(msgspec.Struct, frozen=True):
    """One request of a trace: arrival time, prompt and output lengths, and prefix blocks of the prompt."""

    at_s: float
    input_tokens: int
    """Prompt length, 1 or more."""
    output_tokens: int
    """Output length, 0 or more; unknown to a router in advance."""
    blocks: tuple[int, ...]
    """Block ids; equal ids mean equal prompts up to and including that block. Empty: the content is unknown.

    As in Mooncake's traces the last block may be partial: ceil or floor of input_tokens / block_tokens ids.
    """
    block_tokens: int
    group: int | None = None
    """Group with which the request shares a prefix, if `share_prefixes` drew one."""


class LengthStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of prompts or of outputs; percentiles are interpolated linearly."""

    mean: float
    min: int
    p5: float
    p25: float
    p50: float
    p75: float
    p90: float
    p95: float
    p99: float
    max: int


class TraceStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a trace. Shares are in [0, 1]; reuse is the hit rate of an infinite prefix cache."""

    name: str
    requests: int
    duration_s: float
    rate_per_s: float
    input_tokens: LengthStatistics | None
    """Prompt lengths; None for a trace without requests, as for `output_tokens`."""
    output_tokens: LengthStatistics | None
    distinct_arrivals: int
    batch_mean: float
    """Mean number of requests that arrive at exactly the same time, over all arrival times."""
    batch_p95: float
    batch_max: int
    gap_p50_s: float
    """Median gap between distinct arrival times."""
    gap_cv: float
    """Coefficient of variation of all inter-arrival times, zeros included: 1 for a Poisson process."""
    block_tokens: int
    """Largest block size of the trace; 0 if no request has blocks."""
    blocks: int
    unique_blocks: int
    reused_block_share: float
    """Share of blocks that belong to the longest prefix seen before."""
    reused_token_share: float
    """Share of input tokens that belong to that prefix."""
    reusing_request_share: float
    """Share of requests with at least one such block."""


@dataclass(frozen=True, slots=True)
class Loop:
    """A closed loop over a trace's requests, by their positions: some requests start after others have ended."""

    after: tuple[tuple[int, ...], ...]
    """[n] Requests whose end each request waits for; all are earlier in the trace. A rejection counts as an end."""
    think_s: tuple[float, ...]
    """[n] Time from the last of these ends to the request; from time 0 for a request that waits for none."""
    until_s: tuple[float, ...]
    """[n] Latest start: a later request is dropped, and so is every request that waits for it; infinity: no limit."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests ascending by arrival time; requests of equal time keep the order of their source."""

    name: str
    requests: tuple[TracedRequest, ...]
    remarks: tuple[str, ...] = field(default=(), compare=False)
    """Corrections made when the trace was read, in sentences for the user."""
    loop: Loop | None = None
    """None: an open loop, in which requests arrive at their times. In a closed loop the times assume outputs of zero
    duration."""

    def __post_init__(self) -> None:
        assert all(a.at_s <= b.at_s for a, b in pairwise(self.requests)), "requests must ascend by time"
        if self.loop is not None:
            assert all(max(after, default=-1) < place for place, after in enumerate(self.loop.after)), (
                "a request waits only for earlier ones"
            )

    @property
    def duration_s(self) -> float:
        """Time from the first to the last arrival; 0 for less than two requests."""
        return self.requests[-1].at_s - self.requests[0].at_s if self.requests else 0.0

    @property
    def rate_per_s(self) -> float:
        """Requests / duration_s; 0 if all arrive at one time."""
        return len(self.requests) / self.duration_s if self.duration_s else 0.0

    def statistics(self) -> TraceStatistics:
        """Return counts, quantiles, batches and reuse; zeros if there is nothing to count."""
        at_s = np.array([request.at_s for request in self.requests])
        times, batches = np.unique(at_s, return_counts=True)
        reuse = _Reuse.of(self.requests)
        return TraceStatistics(
            name=self.name,
            requests=len(self.requests),
            duration_s=self.duration_s,
            rate_per_s=self.rate_per_s,
            input_tokens=_lengths(np.array([request.input_tokens for request in self.requests], dtype=np.int64)),
            output_tokens=_lengths(np.array([request.output_tokens for request in self.requests], dtype=np.int64)),
            distinct_arrivals=len(times),
            batch_mean=float(batches.mean()) if len(batches) else 0.0,
            batch_p95=float(np.percentile(batches, 95)) if len(batches) else 0.0,
            batch_max=int(batches.max(initial=0)),
            gap_p50_s=float(np.median(np.diff(times))) if len(times) > 1 else 0.0,
            gap_cv=_variation(np.diff(at_s)),
            block_tokens=max((request.block_tokens for request in self.requests if request.blocks), default=0),
            blocks=reuse.blocks,
            unique_blocks=reuse.unique_blocks,
            reused_block_share=reuse.reused_blocks / max(reuse.blocks, 1),
            reused_token_share=reuse.reused_tokens / max(sum(request.input_tokens for request in self.requests), 1),
            reusing_request_share=reuse.requests / max(len(self.requests), 1),
        )


@dataclass(frozen=True, slots=True)
class _Reuse:
    blocks: int
    unique_blocks: int
    reused_blocks: int
    reused_tokens: int
    requests: int

    @classmethod
    def of(cls, requests: Sequence[TracedRequest]) -> _Reuse:
        seen: set[int] = set()
        blocks = reused_blocks = reused_tokens = reusing = 0
        for request in requests:
            hit = next((depth for depth, block in enumerate(request.blocks) if block not in seen), len(request.blocks))
            seen.update(request.blocks)
            blocks += len(request.blocks)
            reused_blocks += hit
            reused_tokens += min(hit * request.block_tokens, request.input_tokens)
            reusing += hit > 0
        return cls(blocks, len(seen), reused_blocks, reused_tokens, reusing)


def _lengths(tokens: IntArray) -> LengthStatistics | None:
    if not len(tokens):
        return None
    p5, p25, p50, p75, p90, p95, p99 = np.percentile(tokens, [5, 25, 50, 75, 90, 95, 99]).tolist()
    return LengthStatistics(
        mean=float(tokens.mean()), min=int(tokens.min()), max=int(tokens.max()),
        p5=p5, p25=p25, p50=p50, p75=p75, p90=p90, p95=p95, p99=p99,
    )  # fmt: skip


def _variation(gaps_s: FloatArray) -> float:
    mean_s = float(gaps_s.mean()) if len(gaps_s) else 0.0
    return float(gaps_s.std()) / mean_s if mean_s > 0 else 0.0
