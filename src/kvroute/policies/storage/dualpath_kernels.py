"""DualPath's decisions, compiled: prefill engine, decode group and engine, read side, and the tokens of a forward pass.

The functions take only arrays and numbers and change none of them, so the simulator's compiled loop, the control core
and tests call the same code. Of equal candidates the first wins.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvroute.compiled import compiled_in_place
from kvroute.policies.storage.dualpath import ReadSide
from kvroute.types import FloatArray, IntArray

NO_ENGINE = -1
NO_READS, PREFILL_READS, ALTERNATING_READS, SHORTER_READS, SPLIT_READS = range(5)
READS: dict[ReadSide, int] = {
    "none": NO_READS,
    "prefill": PREFILL_READS,
    "alternating": ALTERNATING_READS,
    "shorter": SHORTER_READS,
    "split": SPLIT_READS,
}
BALANCE = 1.05
"""Factor on the mean token count above which a decode engine counts as loaded (DualPath 6.1, phase 2)."""


class AttentionCost(NamedTuple):
    """Time of the attention layers of one forward pass on one GPU, in seconds per token that is computed."""

    token_s: float
    """Part that does not depend on the context."""
    context_s: float
    """Per token of context."""
    attended_s: float
    """Per token of context that sparse attention selects."""
    attended_tokens: float
    """Maximum number of selected tokens; infinite for dense attention."""


@compiled_in_place
def prefill_engine(
    tokens: FloatArray, queued_tokens: FloatArray, node: IntArray, first: int, last: int, alpha: float, beta: float
) -> int:
    """Return the prefill engine for the next request, or NO_ENGINE if all are overloaded (DualPath algorithm 1).

    An engine with more than `beta` tokens is overloaded. Engines on nodes with a short storage queue come first, then
    the others; among each the one with the fewest tokens.

    Args:
        tokens: tokens of the unfinished requests of each engine, [engines].
        queued_tokens: tokens in the storage read queue of each node, [nodes].
        node: node of each engine, [engines].
        first, last: the engines of the group, `last` excluded.
        alpha: maximum length of a short storage queue, in tokens.
        beta: maximum tokens of an engine that takes more requests.
    """
    best, best_is_short = NO_ENGINE, False
    for engine in range(first, last):
        if tokens[engine] > beta:
            continue
        short = queued_tokens[node[engine]] <= alpha
        if best == NO_ENGINE or (short and not best_is_short):
            best, best_is_short = engine, short
        elif short == best_is_short and tokens[engine] < tokens[best]:
            best = engine
    return best


@compiled_in_place
def least(values: FloatArray) -> int:
    """Return the index of the smallest value, [n] with n > 0; for decode groups by their tokens (DualPath 6.1,
    phase 1)."""
    best = 0
    for i in range(1, len(values)):
        if values[i] < values[best]:
            best = i
    return best


@compiled_in_place
def fitting_requests(lengths: FloatArray, free_tokens: float) -> int:
    """Return how many requests of a queue fit into the group's free memory, from its head on and without fragmentation
    (set R of DualPath 6.1, phase 2).

    Args:
        lengths: tokens of each request, [requests] in the queue's order.
        free_tokens: free KV memory of all engines of the group, in tokens.
    """
    for count in range(len(lengths)):
        free_tokens -= lengths[count]
        if free_tokens < 0.0:
            return count
    return len(lengths)


@compiled_in_place
def token_limit(fitting_tokens: float, assigned_tokens: float, engines: int) -> float:
    """Return the token count above which a decode engine counts as loaded (Z of DualPath 6.1, phase 2)."""
    return BALANCE * (fitting_tokens + assigned_tokens) / engines


@compiled_in_place
def decode_engine(
    tokens: FloatArray,
    sequences: IntArray,
    free_tokens: FloatArray,
    length: float,
    limit: float,
    first: int,
    last: int,
) -> int:
    """Return the decode engine for a request, or NO_ENGINE if it fits in none (DualPath 6.1, phase 2).

    Of the engines that stay within `limit` tokens with this request, the one with the fewest sequences; without such an
    engine, the one with the fewest tokens.

    Args:
        tokens: tokens of the unfinished requests of each engine, [engines].
        sequences: number of these requests, [engines].
        free_tokens: free KV memory of each engine, in tokens, [engines].
        length: tokens of the request.
        limit: see `token_limit`.
        first, last: the engines of the group, `last` excluded.
    """
    best, best_is_light = NO_ENGINE, False
    for engine in range(first, last):
        if free_tokens[engine] < length:
            continue
        light = tokens[engine] + length <= limit
        if best == NO_ENGINE or (light and not best_is_light):
            best, best_is_light = engine, light
        elif light == best_is_light and (
            sequences[engine] < sequences[best] if light else tokens[engine] < tokens[best]
        ):
            best = engine
    return best


@compiled_in_place
def prefill_blocks(
    blocks: int, prefill_s: float, decode_s: float, prefill_block_s: float, decode_block_s: float
) -> int:
    """Return how many of a request's blocks the prefill node reads so that both sides finish as early as possible.

    Water-filling over both storage queues: the shorter one is filled first, the rest is divided. Of two equal numbers
    the larger one is returned, because the KV that prefill nodes read crosses the compute network once less.

    Args:
        blocks: blocks to read, 0 or more.
        prefill_s, decode_s: time until the storage queue of each side is empty, in seconds.
        prefill_block_s, decode_block_s: time to read a block on each side, in seconds, greater than 0.
    """
    level = (blocks * decode_block_s + decode_s - prefill_s) / (prefill_block_s + decode_block_s)
    low = min(max(int(np.floor(level)), 0), blocks)
    high = min(low + 1, blocks)
    low_s = max(
        prefill_s + low * prefill_block_s if low else 0.0,
        decode_s + (blocks - low) * decode_block_s if low < blocks else 0.0,
    )
    high_s = max(
        prefill_s + high * prefill_block_s if high else 0.0,
        decode_s + (blocks - high) * decode_block_s if high < blocks else 0.0,
    )
    return high if high_s <= low_s else low


@compiled_in_place
def prefill_read_tokens(
    reads: int,
    tokens: int,
    block_tokens: int,
    prefill_queue_s: float,
    decode_queue_s: float,
    prefill_token_s: float,
    decode_token_s: float,
    turn: int,
) -> int:
    """Return how many of a request's cached tokens the prefill node reads; the decode node reads the rest.

    Args:
        reads: a value of `READS`.
        tokens: tokens to read.
        block_tokens: tokens of a block.
        prefill_queue_s, decode_queue_s: time until the storage queue of each side is empty, in seconds.
        prefill_token_s, decode_token_s: time to read a token on each side, in seconds, greater than 0.
        turn: number of the request, for alternating reads; the prefill node reads if it is odd.
    """
    if reads == ALTERNATING_READS:
        return tokens if turn % 2 else 0
    if reads == SHORTER_READS:
        prefill_s, decode_s = prefill_queue_s + tokens * prefill_token_s, decode_queue_s + tokens * decode_token_s
        return tokens if prefill_s <= decode_s else 0
    if reads == SPLIT_READS:
        blocks = prefill_blocks(
            tokens // block_tokens,
            prefill_queue_s,
            decode_queue_s,
            prefill_token_s * block_tokens,
            decode_token_s * block_tokens,
        )
        return blocks * block_tokens
    return tokens


@compiled_in_place
def attention_s(cached: float, new: float, cost: AttentionCost) -> float:
    """Return the time of the attention layers for `new` tokens after `cached` ones, in seconds.

    Token i has a context of cached + i + 1/2 tokens on average, so the sum over the tokens is in closed form.
    """
    dense = min(max(cost.attended_tokens - cached, 0.0), new)
    attended = dense * (cached + 0.5 * dense)
    if new > dense:
        attended += (new - dense) * cost.attended_tokens
    return new * cost.token_s + new * (cached + 0.5 * new) * cost.context_s + attended * cost.attended_s


@compiled_in_place
def quota_tokens(cached: int, new: int, quota_s: float, cost: AttentionCost) -> int:
    """Return the largest number of tokens, up to `new`, whose attention takes at most `quota_s` (DualPath 6.2: binary
    search on the size of the chunk)."""
    if attention_s(cached, new, cost) <= quota_s:
        return new
    low, high = 0, new
    while high - low > 1:
        middle = (low + high) // 2
        if attention_s(cached, middle, cost) <= quota_s:
            low = middle
        else:
            high = middle
    return low
