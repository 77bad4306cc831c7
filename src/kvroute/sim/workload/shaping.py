"""Derive traces from traces: another rate, a slice, other lengths, drawn prefixes. The input trace is never changed.

In a closed loop only lengths and prefixes can be changed: requests depend on each other, and have no fixed times.
"""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

import msgspec
import numpy as np
import numpy.typing as npt

from kvroute.sim.workload.trace import Trace, TracedRequest
from kvroute.types import InputError, IntArray

_OWNER_BITS = 24
"""Bits of an id that number the blocks of one owner (a group or a request): 2^24 blocks, longer than any prompt."""
_RESIZED = -1
"""Used instead of a seed, so that no id equals one of `share_prefixes`."""


def rescale(trace: Trace, rate_per_s: float) -> Trace:
    """Scale all arrival times by one factor, so that requests / duration is `rate_per_s` (NetKV VI-A).

    Batches stay together and move closer together or further apart.

    Raises:
        InputError: a rate that is not positive and finite, or a trace whose requests all arrive at one time.
    """
    _check_open(trace)
    _check_rate(rate_per_s)
    if not trace.rate_per_s:
        raise InputError(
            f"all {len(trace.requests)} requests arrive at the same time, so there is no rate to change",
            where=trace.name,
            hint="use more requests",
        )
    factor = trace.rate_per_s / rate_per_s
    return _mapped(trace, [msgspec.structs.replace(request, at_s=request.at_s * factor) for request in trace.requests])


def rescale_if_spread(trace: Trace, rate_per_s: float) -> Trace:
    """Rescale as `rescale` does; if all requests arrive at one time, leave them and add a remark.

    Raises:
        InputError: a rate that is not positive and finite, or a trace without requests.
    """
    if trace.rate_per_s or not trace.requests:
        return rescale(trace, rate_per_s)
    _check_open(trace)
    _check_rate(rate_per_s)
    if len(trace.requests) == 1:
        return trace
    what = f"all {len(trace.requests)} requests arrive at the same time, so the rate has no effect; use more requests"
    return replace(trace, remarks=(*trace.remarks, what))


def window(trace: Trace, from_s: float, to_s: float) -> Trace:
    """Return requests with from_s <= at_s < to_s, times relative to `from_s`. May be empty; windows partition a
    trace."""
    _check_open(trace)
    if not (isfinite(from_s) and from_s <= to_s):
        raise InputError(
            f"the window from {from_s} s to {to_s} s is empty", where="window", hint="give an end after the start"
        )
    inside = [request for request in trace.requests if from_s <= request.at_s < to_s]
    return _mapped(trace, [msgspec.structs.replace(request, at_s=request.at_s - from_s) for request in inside])


def take(trace: Trace, n: int) -> Trace:
    """Return the first `n` requests, or all if there are fewer."""
    _check_open(trace)
    if n < 0:
        raise InputError(f"{n} requests", where="take", hint="give 0 or more")
    return _mapped(trace, list(trace.requests[:n]))


def filter_lengths(trace: Trace, low: int, high: int | None = None) -> Trace:
    """Return requests with low <= input_tokens <= high (None: no bound). Raises InputError if none is left."""
    _check_open(trace)
    kept = [r for r in trace.requests if low <= r.input_tokens and (high is None or r.input_tokens <= high)]
    if not kept:
        span = f"{low} tokens or more" if high is None else f"{low} to {high} tokens"
        raise InputError(f"no request has a prompt of {span}", where=trace.name, hint="use a longer or another trace")
    return _mapped(trace, kept)


def with_lengths(trace: Trace, *, input_tokens: int | None = None, output_tokens: int | None = None) -> Trace:
    """Return the same arrivals with one length for every prompt, every output or both.

    A shorter prompt keeps its first blocks; a longer one keeps its full blocks and gets new, unshared ones.
    """
    for name, tokens, least in (("input_tokens", input_tokens, 1), ("output_tokens", output_tokens, 0)):
        if tokens is not None and tokens < least:
            raise InputError(f"a length of {tokens} tokens", where=name, hint=f"give {least} or more")
    resized = []
    for owner, request in enumerate(trace.requests):
        prompt = request.input_tokens if input_tokens is None else input_tokens
        answer = request.output_tokens if output_tokens is None else output_tokens
        blocks = _resized(request, prompt, owner)
        resized.append(msgspec.structs.replace(request, input_tokens=prompt, output_tokens=answer, blocks=blocks))
    return _mapped(trace, resized)


def share_prefixes(
    trace: Trace, p_share: float, *, groups: int = 40, shared: float = 0.5, block_tokens: int = 16, seed: int
) -> Trace:
    """Replace the trace's prefixes by prefixes drawn per group: our reading of NetKV's p_share, which VI-A leaves open.

    With probability `p_share` a request belongs to one of `groups` equally likely groups. Members share the first
    floor(shared * input_tokens / block_tokens) blocks with their group, as far as both prompts reach; every other block
    is unique. Only full blocks of `block_tokens` count. Lengths and times stay. With the same seed, a larger `p_share`
    adds members and keeps the existing ones in their groups.

    Raises:
        InputError: a share outside [0, 1], less than one group or token, a negative seed.
    """
    for name, share in (("p_share", p_share), ("shared", shared)):
        if not 0 <= share <= 1:
            raise InputError(f"{share} is not a share", where=name, hint="give 0 to 1")
    for name, count, least in (("groups", groups, 1), ("block_tokens", block_tokens, 1), ("seed", seed, 0)):
        if count < least:
            raise InputError(f"{count} is too small", where=name, hint=f"give {least} or more")
    draw = np.random.default_rng(seed)
    member = draw.random(len(trace.requests)) < p_share
    group_of = draw.integers(groups, size=len(trace.requests))
    grouped = []
    for number, request in enumerate(trace.requests):
        group = int(group_of[number]) if member[number] else None
        full = request.input_tokens // block_tokens
        common = min(int(shared * request.input_tokens / block_tokens), full) if group is not None else 0
        chain = [] if group is None else own_ids(group, 0, common, seed)
        chain += own_ids(groups + number, common, full, seed)
        grouped.append(msgspec.structs.replace(request, blocks=tuple(chain), block_tokens=block_tokens, group=group))
    return _mapped(trace, grouped)


def _mapped(trace: Trace, requests: list[TracedRequest]) -> Trace:
    return replace(trace, requests=tuple(requests))


def _check_rate(rate_per_s: float) -> None:
    if not (isfinite(rate_per_s) and rate_per_s > 0):
        raise InputError(f"a rate of {rate_per_s} requests per second", where="rate_per_s", hint="give more than 0")


def _check_open(trace: Trace) -> None:
    if trace.loop is not None:
        what = "in a closed loop requests arrive after earlier responses, not at times of the trace"
        raise InputError(what, where=trace.name, hint="set number and rate where the sessions are played")


def _resized(request: TracedRequest, input_tokens: int, owner: int) -> tuple[int, ...]:
    if not request.blocks or input_tokens == request.input_tokens:
        return request.blocks
    full, due = request.input_tokens // request.block_tokens, -(-input_tokens // request.block_tokens)
    if input_tokens < request.input_tokens:
        return request.blocks[:due]
    return request.blocks[:full] + tuple(own_ids(owner, full, due, _RESIZED))


def own_ids(owner: int, start: int, stop: int, seed: int) -> list[int]:
    """Return the ids of an owner's blocks start..stop-1: 64-bit numbers that look like hashes.

    Distinct (owner, position) give distinct ids: the mix is a bijection (splitmix64's finaliser).
    """
    positions: IntArray = np.arange(start, stop, dtype=np.int64)
    mixed: npt.NDArray[np.uint64] = positions.astype(np.uint64) + np.uint64(owner << _OWNER_BITS)
    mixed += np.uint64((seed + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    ids: list[int] = (mixed ^ (mixed >> np.uint64(31))).tolist()
    return ids
