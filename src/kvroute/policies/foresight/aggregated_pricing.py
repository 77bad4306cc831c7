"""Compiled kernels: the price of every instance that may serve an aggregated request.

The functions take only arrays and numbers; `kvroute.policies.foresight.aggregated` explains their meaning.
"""

from __future__ import annotations

import numpy as np

from kvroute.compiled import compiled, compiled_in_place
from kvroute.types import BoolArray, FloatArray, IntArray

WAIT_S, PREFILL_S, TRANSFER_S, STEPS_S, SLOT_S, DELAY_S, LATER_S, RESERVE_S, BATCH_S, BEYOND_S = range(10)
"""The cost is the sum of these rows of `terms` and of SESSION_S."""
HIT_TOKENS, SESSION_S, MISSES, COST = range(BEYOND_S + 1, BEYOND_S + 5)
ROWS = COST + 1
NO_CANDIDATE = -1
_BUSY_MAX = 0.9
"""Upper bound of the share of time on prompts in `stretched_s`, as the pools have it."""
_FEW = 0.2
"""Expected number of responses that a prompt may delay while none is there, at which it counts as delaying none."""


@compiled_in_place
def later_s(delay_weight: float, response_s: float, share: float) -> float:
    """Return the delay of a response by later prompts on its instance, which take this share of the time."""
    return delay_weight * response_s * share / (1.0 - share)


@compiled_in_place
def stretched_s(response_s: float, share: float, batch: int, prefill_s: float, stretch_s: float) -> float:
    """Return the delay of later prompts by the steps of one more response on their instance.

    While it decodes, prompts of `later_s` seconds come, each of them longer by the same share. Beside n other responses
    only the time counts by which it is expected to end last: 1 / (n + 1) of its own.

    Args:
        response_s: its duration without prompts in between.
        share: of the time that instances spend on prompts.
        batch: number of other responses there.
        prefill_s: time of a prompt.
        stretch_s: time by which a step beside each chunk makes it longer; below 0: steps save more than they take.
    """
    if stretch_s <= 0.0:
        return 0.0
    longer = stretch_s / (prefill_s + stretch_s)
    return later_s(longer, response_s, min(share, _BUSY_MAX)) / (batch + 1)


@compiled_in_place
def beyond_s(delay_max: float, response_s: float, prompt_s: float, own_s: float) -> float:
    """Return the delay of responses on one instance beyond the share `delay_max` of a mean response.

    Later prompts delay every response there by `own_s`; the others are also delayed by this prompt.

    Args:
        delay_max: `ForesightSpec.token_delay_max`.
        response_s: duration of a mean response.
        prompt_s: time of the prompt; 0: there is no other response.
        own_s: delay of a response by later prompts.
    """
    free_s = delay_max * response_s
    others_s = min(max(prompt_s + own_s - free_s, 0.0), prompt_s)
    return others_s + max(own_s - free_s, 0.0)


@compiled_in_place
def misses(ttft_s: float, step_s: float, share: float, prompt_s: float, targets: FloatArray) -> int:
    """Return the number of targets that one more request would miss, of its own or of the responses beside its prompt.

    Args:
        ttft_s: its predicted time to the first token.
        step_s: decode step of its batch.
        share: of the time that its instance spends on prompts, which come on top of the steps.
        prompt_s: time for which its prompt delays one response; 0: it delays none.
        targets: TPOT, TTFT (inf: none), and the length of a short response, in which a prompt's time counts most.
    """
    tpot_s = step_s / (1.0 - share) + prompt_s / targets[2]
    return int(tpot_s > targets[0]) + int(ttft_s > targets[1])


@compiled
def least_delay_s(need_bytes: FloatArray, free_kv_bytes: FloatArray, delayed: IntArray, prefill_s: FloatArray) -> float:
    """Return the least delay that a prompt imposes on an instance with room, over n instances; inf if none has."""
    least_s = np.inf
    for i in range(len(delayed)):
        if need_bytes[i] <= free_kv_bytes[i]:
            least_s = min(least_s, delayed[i] * prefill_s[i])
    return least_s


@compiled
def price_aggregated(
    need_bytes: FloatArray,
    free_kv_bytes: FloatArray,
    batch: IntArray,
    base_s: FloatArray,
    per_request_s: FloatArray,
    hit_tokens: IntArray,
    prompts_s: FloatArray,
    prefill_s: FloatArray,
    chunks: IntArray,
    delayed: IntArray,
    share: FloatArray,
    stretch_s: FloatArray,
    session_s: FloatArray,
    wait_s: FloatArray,
    slot_s: FloatArray,
    response_s: FloatArray,
    batch_s: FloatArray,
    kept: bool,
    busy: float,
    loss_s: float,
    delay_weight: float,
    floor_s: float,
    delay_max: float,
    delay_price: float,
    output_tokens: float,
    targets: FloatArray,
    feasible: BoolArray,
    terms: FloatArray,
) -> int:
    """Fill `feasible` and `terms` [ROWS] of n candidates; both may have more columns. Return the feasible candidate
    that misses the fewest targets, of these the one of least cost, the first of equals; or NO_CANDIDATE.

    Args:
        need_bytes to hit_tokens: see `Candidates`.
        prompts_s to session_s: see `AggregatedCandidates`; an empty `session_s` stands for zeros.
        wait_s to batch_s: see `Load`.
        kept: see `AggregatedCandidates`.
        busy: see `AggregatedOffer`.
        loss_s: what a later prompt like this one loses if it must avoid a prefill instance that decodes.
        delay_weight: see `ForesightSpec`.
        floor_s: least time of a prompt by which `reserve_s` is divided.
        delay_max: `ForesightSpec.token_delay_max`.
        delay_price: `ForesightSpec.token_delay_price`; 0 if there is no pair.
        output_tokens: mean length of a response.
        targets: see `misses`.
        feasible: whether a candidate has room.
        terms: the parts of the price.
    """
    best, others = NO_CANDIDATE, 0.0
    for i in range(len(batch)):
        others += delayed[i] / len(batch)
    for i in range(len(batch)):
        feasible[i] = need_bytes[i] <= free_kv_bytes[i]
        terms[WAIT_S, i] = max(wait_s[i], prompts_s[i])
        terms[PREFILL_S, i] = prefill_s[i]
        terms[TRANSFER_S, i] = 0.0
        terms[STEPS_S, i] = chunks[i] * (base_s[i] + per_request_s[i] * batch[i]) if batch[i] > 0 else 0.0
        terms[SLOT_S, i] = slot_s[i]
        terms[DELAY_S, i] = delay_weight * delayed[i] * prefill_s[i]
        terms[LATER_S, i] = later_s(delay_weight, response_s[i], share[i])
        terms[RESERVE_S, i] = 0.0
        if kept:
            # Later prompts go elsewhere, or they delay this response here.
            lost_s = busy * min(loss_s, prefill_s[i])
            terms[RESERVE_S, i] = delay_weight * response_s[i] / max(prefill_s[i], floor_s) * lost_s
            longer_s = stretched_s(response_s[i], busy, batch[i], prefill_s[i], stretch_s[i])
            terms[RESERVE_S, i] += delay_weight * longer_s
        terms[BATCH_S, i] = batch_s[i]
        prompt_s = prefill_s[i] if delayed[i] > 0 else 0.0
        own_s = later_s(1.0, response_s[i], share[i])
        terms[BEYOND_S, i] = delay_price * beyond_s(delay_max, response_s[i], prompt_s, own_s)
        cost_s = 0.0
        for row in range(BEYOND_S + 1):
            cost_s += terms[row, i]
        terms[HIT_TOKENS, i] = hit_tokens[i]
        terms[SESSION_S, i] = session_s[i] if len(session_s) else 0.0
        terms[COST, i] = cost_s + terms[SESSION_S, i]
        ttft_s = terms[WAIT_S, i] + prefill_s[i] + terms[STEPS_S, i]
        step_s = response_s[i] / output_tokens
        # Responses that come to an idle instance during its prompt are delayed, too: by Little's law, the mean number
        # of responses on an instance, times the prompt's time over that of a response. If only TPOT has a target, one
        # is expected in all cases, because the first prompts arrive before any response is there.
        delays = delayed[i] > 0 or targets[1] == np.inf or others * prefill_s[i] > _FEW * response_s[i]
        terms[MISSES, i] = misses(ttft_s, step_s, share[i], prefill_s[i] if delays else 0.0, targets)
        if not feasible[i]:
            continue
        fewer = best == NO_CANDIDATE or terms[MISSES, i] < terms[MISSES, best]
        if fewer or (terms[MISSES, i] == terms[MISSES, best] and terms[COST, i] < terms[COST, best]):
            best = i
    return best
