"""Prices a request that one instance serves alone, in the seconds in which pairs are priced. It is pure.

A decode instance computes a prompt in chunks beside decode steps. This saves the transfer and the queue of a prefill
instance, uses the prefix cached there, and delays the requests that decode there. A prefill instance can go on to
decode the request: this saves the transfer, and the decode waits for other prompts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvroute.policies.foresight import Foresight
from kvroute.policies.foresight_spec import ForesightSpec
from kvroute.types import BoolArray, Candidates, Choice, FloatArray, IntArray, Terms


class AloneCandidates(NamedTuple):
    """Decode or prefill instances of one protocol that may serve a request alone, n of them."""

    candidates: Candidates
    """`hit_tokens`: prefix that they need not compute; `kv_bytes`: 0, because nothing is transferred."""
    prompts_s: FloatArray
    """Seconds until the prompts that are booked on each instance are complete, [n]."""
    prefill_s: FloatArray
    """Seconds to compute this prompt on an instance that does nothing else, given its cached prefix, [n]."""
    chunks: IntArray
    """Number of iterations over which the prompt is divided, [n]; of no meaning with `stays`."""
    delayed: IntArray
    """Requests on each instance that are delayed by one more prompt, [n]."""
    share: FloatArray
    """Share of the time that each instance spends on prompts, [n]."""
    stays: bool = False
    """Whether they are prefill instances, which compute prompts first and go on to decode."""
    session_s: FloatArray | None = None
    """Minus the bonus of the instance that served the request's session last, else 0, [n]; None: there is none."""


class AloneOffer(NamedTuple):
    """What the choice between a pair and a decode instance alone depends on, beside the pair."""

    pools: tuple[AloneCandidates, ...]
    """The candidates, by protocol and role."""
    waiting: IntArray
    """Requests that wait for or are in prefill on each prefill instance, [prefill instances]."""
    decoding: IntArray
    """Requests that decode on each prefill instance, [prefill instances]."""
    busy: float
    """Share of their time that prefill instances would need to compute all prompts of the model, 0 to 1."""
    output_tokens: float
    """Mean length of a response."""
    layerwise: bool = False
    """Whether the KV cache of a pair is sent while it is computed."""


class Alone(NamedTuple):
    """An instance that computes the prompt and decodes."""

    pool: int
    """Index into `AloneOffer.pools`."""
    decode: Choice
    """Index into the candidates of that pool. The last row of the terms is the best pair, if there is one."""


class PairPrice(NamedTuple):
    """The parts of a pair's price, in seconds."""

    name: str
    """Both instances, for displays."""
    wait_s: float
    """Work ahead on the prefill instance, and wait for a decode slot after the transfer."""
    prefill_s: float
    transfer_s: float
    """Time of the transfer after the prefill, and its delay of others."""
    steps_s: float
    """First decode step."""
    slot_s: float
    delay_s: float
    """Delay of other requests by the prompt."""
    later_s: float
    """Delay of the response by later prompts on the decode instance."""
    reserve_s: float
    """0: the prefill instance does not decode."""
    batch_s: float
    """Response time of a request in this batch, and delay of the others by its part of their steps."""
    session_s: float
    """Minus the bonus if its prefill instance served the session last."""
    hit_tokens: float

    @property
    def cost(self) -> float:
        """Sum of the parts."""
        seconds: tuple[float, ...] = self[1:-1]
        return sum(seconds)


PARTS = (
    "wait_s",
    "prefill_s",
    "transfer_s",
    "steps_s",
    "slot_s",
    "delay_s",
    "later_s",
    "reserve_s",
    "batch_s",
    "hit_tokens",
)
"""Columns of the terms, beside `session_s` if an instance served the session last. The sum of all in seconds is the
cost."""


class Load(NamedTuple):
    """Prices of the load of n decode instances, without a transfer, in seconds."""

    wait_s: FloatArray
    """Wait for a slot."""
    step_s: FloatArray
    """First step of a request that joins the batch."""
    slot_s: FloatArray
    """Price of a slot."""
    response_s: FloatArray
    """Duration of a response without prompts in between."""
    batch_s: FloatArray
    """The same, and the time by which it makes the steps of the others longer."""


def load_of(spec: ForesightSpec, candidates: Candidates, output_tokens: float) -> Load:
    """Return the price of the load of each candidate."""
    wait_s, step_s, slot_s = Foresight(spec).load_s(candidates, output_tokens)
    response_s = output_tokens * step_s
    others_s = output_tokens * candidates.iteration_per_request_s * (candidates.batch + candidates.queued)
    return Load(spec.wait_weight * wait_s, step_s, slot_s, response_s, response_s + spec.delay_weight * others_s)


def later_s(spec: ForesightSpec, response_s: FloatArray, share: FloatArray) -> FloatArray:
    """Return the delay of a response by later prompts on its instance, which take this share of the time, [n]."""
    return spec.delay_weight * response_s * share / (1.0 - share)


def cheapest_alone(spec: ForesightSpec, offer: AloneOffer, loads: list[Load], pair: PairPrice | None) -> Alone | None:
    """Return the cheapest candidate, the first of equals; None if no instance has room.

    Args:
        spec: weights.
        offer: the candidates.
        loads: the price of the load of each pool's candidates.
        pair: the price of the best pair, for the terms; None: there is no pair.
    """
    found: Alone | None = None
    best_s, beside_s = np.inf, _beside_s(offer)
    for number, (pool, load) in enumerate(zip(offer.pools, loads, strict=True)):
        candidates = pool.candidates
        feasible: BoolArray = candidates.need_bytes <= candidates.free_kv_bytes
        if pair is not None:
            feasible &= _keeps_pace(spec, pool, load)
        later_loss_s = max(beside_s - pair.transfer_s, 0.0) if pair is not None else 0.0
        parts = _parts(spec, pool, load, offer.busy * later_loss_s)
        cost: FloatArray = np.sum(parts[:-1], axis=0)
        if pool.session_s is not None:
            cost += pool.session_s
        masked = np.where(feasible, cost, np.inf)
        index = int(masked.argmin()) if len(masked) else -1
        if index >= 0 and masked[index] < best_s:
            best_s = float(masked[index])
            found = Alone(number, Choice(index, _terms(pool, cost, feasible, parts, pair)))
    return found


def _keeps_pace(spec: ForesightSpec, pool: AloneCandidates, load: Load) -> BoolArray:
    """Return on which candidates neither the responses in progress nor this one are delayed by more than the bound,
    [n]."""
    most_s = spec.token_delay_max * load.response_s
    others: BoolArray = (pool.delayed == 0) | (pool.prefill_s <= most_s)
    own: BoolArray = load.response_s * pool.share <= most_s * (1.0 - pool.share)
    return others & own


def _beside_s(offer: AloneOffer) -> float:
    """Return the least delay that a prompt like this one imposes on a decode instance."""
    least_s = np.inf
    for pool in offer.pools:
        candidates = pool.candidates
        feasible = candidates.need_bytes <= candidates.free_kv_bytes
        if not pool.stays and feasible.any():
            least_s = min(least_s, float((pool.delayed * pool.prefill_s)[feasible].min()))
    return least_s if least_s < np.inf else 0.0


def _parts(spec: ForesightSpec, pool: AloneCandidates, load: Load, loss_s: float) -> tuple[FloatArray, ...]:
    """Return the columns of `PARTS`. Args: `loss_s`: see `_reserve_s`.

    On a decode instance the batch makes a step beside each chunk. The end of the prompt gives the first token.
    """
    candidates = pool.candidates
    step_s = candidates.iteration_base_s + candidates.iteration_per_request_s * candidates.batch
    steps_s = np.where((candidates.batch > 0) & (not pool.stays), pool.chunks * step_s, 0.0)
    return (
        np.maximum(load.wait_s, pool.prompts_s),
        pool.prefill_s,
        np.zeros(len(step_s)),
        steps_s,
        load.slot_s,
        spec.delay_weight * pool.delayed * pool.prefill_s,
        later_s(spec, load.response_s, pool.share),
        _reserve_s(spec, pool, load, loss_s) if pool.stays else np.zeros(len(step_s)),
        load.batch_s,
        candidates.hit_tokens.astype(np.float64),
    )


def _reserve_s(spec: ForesightSpec, pool: AloneCandidates, load: Load, loss_s: float) -> FloatArray:
    """Return what later prompts lose during a response because a prefill instance decodes it, [n].

    While it decodes, later prompts go to instances where they delay others, which costs `loss_s` in the time of one
    prompt. Nothing is lost while a decode instance is idle, or if a transfer costs more.
    """
    return spec.delay_weight * load.response_s / np.maximum(pool.prefill_s, spec.step_floor_s) * loss_s


def _terms(
    pool: AloneCandidates,
    cost: FloatArray,
    feasible: BoolArray,
    parts: tuple[FloatArray, ...],
    pair: PairPrice | None,
) -> Terms:
    columns, names = dict(zip(PARTS, parts, strict=True)), pool.candidates.names
    if pool.session_s is not None:
        columns["session_s"] = pool.session_s
    elif pair is not None and pair.session_s:
        columns["session_s"] = np.zeros(len(names))
    if pair is None:
        return Terms(names, cost, feasible, columns)
    columns = {name: np.append(column, getattr(pair, name)) for name, column in columns.items()}
    return Terms((*names, pair.name), np.append(cost, pair.cost), np.append(feasible, True), columns)
