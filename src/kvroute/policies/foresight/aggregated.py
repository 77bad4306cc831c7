"""Prices an aggregated request, which one instance serves, in the seconds in which pairs are priced. It is pure.

A decode instance computes a prompt in chunks beside decode steps. This saves the transfer and the queue of a prefill
instance, uses the prefix cached there, and delays the requests that decode there. A prefill instance can go on to
decode the request: this saves the transfer, and from then on its prompts are computed in chunks beside the steps.
"""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import NamedTuple

import numpy as np

from kvroute.policies.foresight.aggregated_pricing import (
    COST,
    MISSES,
    NO_CANDIDATE,
    ROWS,
    SESSION_S,
    least_delay_s,
    price_aggregated,
)
from kvroute.policies.foresight.policy import Foresight
from kvroute.policies.foresight.spec import ForesightSpec
from kvroute.types import BoolArray, Candidates, Choice, FloatArray, IntArray, Terms


class AggregatedCandidates(NamedTuple):
    """Decode or prefill instances of one protocol that may serve an aggregated request, n of them."""

    candidates: Candidates
    """`hit_tokens`: prefix that they need not compute; `kv_bytes`: 0, because nothing is transferred."""
    prompts_s: FloatArray
    """Seconds until the prompts that are booked on each instance are complete, [n]."""
    prefill_s: FloatArray
    """Seconds to compute this prompt, given its cached prefix, without decode steps between its chunks, [n]."""
    chunks: IntArray
    """Number of iterations over which the prompt is divided beside a batch, [n]."""
    delayed: IntArray
    """Requests on each instance that are delayed by one more prompt, [n]."""
    share: FloatArray
    """Share of the time that each instance spends on prompts, [n]."""
    stretch_s: FloatArray
    """Seconds by which the steps of one response beside its chunks make this prompt longer, [n]."""
    kept: bool = False
    """Whether they are prefill instances, which go on to decode."""
    session_s: FloatArray | None = None
    """Minus the bonus of the instance that served the request's session last, else 0, [n]; None: there is none."""


class AggregatedOffer(NamedTuple):
    """What the choice between a pair and aggregated serving depends on, beside the pair."""

    pools: tuple[AggregatedCandidates, ...]
    """The candidates, by protocol and role."""
    waiting: IntArray
    """Requests that wait for or are in prefill on each prefill instance, [prefill instances]."""
    decoding: IntArray
    """Requests that decode on each prefill instance, [prefill instances]."""
    busy: float
    """Share of their time that prefill instances would need to compute all prompts of the model, 0 to 1."""
    output_tokens: float
    """Mean length of a response."""
    short_tokens: float = 1.0
    """Length that nearly all responses exceed."""
    waits_factor: float = 1.0
    """Observed over predicted waits for prefill."""
    transfers_factor: float = 1.0
    """Observed over predicted times of transfers."""
    layerwise: bool = False
    """Whether the KV cache of a pair is sent while it is computed."""


class AggregatedChoice(NamedTuple):
    """An instance that computes the prompt and decodes."""

    pool: int
    """Index into `AggregatedOffer.pools`."""
    decode: Choice
    """Index into the candidates of that pool, and their terms."""
    compared: Terms
    """See `cheapest_aggregated`."""


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
    """Delay of the response by later prompts on the decode instance, and between its transfer and later ones."""
    reserve_s: float
    """0: the prefill instance does not decode."""
    batch_s: float
    """Response time of a request in this batch, and delay of the others by its part of their steps."""
    beyond_s: float
    """0: no prompt is computed beside the response."""
    session_s: float
    """Minus the bonus if its prefill instance served the session last."""
    hit_tokens: float
    misses: int = 0
    """Number of targets that it would miss."""

    @property
    def ttft_s(self) -> float:
        """Predicted time to the first token."""
        return self.wait_s + self.prefill_s + self.transfer_s + self.steps_s

    @property
    def cost(self) -> float:
        """Sum of the parts."""
        seconds: tuple[float, ...] = self[1:-2]
        return reduce(add, seconds)  # Python's `sum` rounds in another way from 3.12 on, and logs must replay

    @property
    def parts(self) -> tuple[float, ...]:
        """The parts in the order of the rows of `price_aggregated`."""
        *seconds, session_s, hit_tokens = self[1:-1]
        return (*seconds, hit_tokens, session_s)


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
    "beyond_s",
    "hit_tokens",
)
"""Columns of the terms, beside `session_s` if an instance served the session last. The sum of all in seconds is the
cost. They are the first rows of the `terms` of `price_aggregated`."""
_NOTHING: FloatArray = np.zeros(0)


class LoadPrices(NamedTuple):
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


def load_of(spec: ForesightSpec, candidates: Candidates, output_tokens: float) -> LoadPrices:
    """Return the price of the load of each candidate."""
    wait_s, step_s, slot_s = Foresight(spec).load_s(candidates, output_tokens)
    response_s = output_tokens * step_s
    others_s = output_tokens * candidates.iteration_per_request_s * (candidates.batch + candidates.queued)
    return LoadPrices(spec.wait_weight * wait_s, step_s, slot_s, response_s, response_s + spec.delay_weight * others_s)


def cheapest_aggregated(
    spec: ForesightSpec, offer: AggregatedOffer, loads: list[LoadPrices], pair: PairPrice | None
) -> tuple[AggregatedChoice | None, Terms]:
    """Return the candidate that misses the fewest targets, of these the cheapest one, the first of equals; None if no
    instance has room. Also return the terms of the candidates of all pools, and last of the pair, if there is one.

    The batch of an instance makes a step beside each chunk. The end of the prompt gives the first token. While a
    prefill instance decodes, later prompts go to instances where they delay others, or they delay its response.
    Nothing is lost by that while a decode instance is idle, or if a transfer costs more.

    Args:
        spec: weights.
        offer: the candidates.
        loads: the price of the load of each pool's candidates.
        pair: the price of the best pair, for the terms; None: there is no pair.
    """
    loss_s, delay_price = 0.0, 0.0
    if pair is not None:
        loss_s = max(_beside_s(offer) - pair.transfer_s, 0.0)
        delay_price = float(spec.token_delay_price)
    names = tuple([name for pool in offer.pools for name in pool.candidates.names])
    feasible, terms = np.ones(len(names) + (pair is not None), dtype=np.bool_), np.empty((ROWS, len(names) + 1))
    found: tuple[int, int, slice] | None = None
    best, end, targets = (np.inf, np.inf), 0, targets_of(spec, offer)
    for number, (pool, load) in enumerate(zip(offer.pools, loads, strict=True)):
        own = slice(end, end + len(pool.candidates.names))
        end = own.stop
        index = _price(spec, pool, load, offer, (loss_s, delay_price, targets), feasible[own], terms[:, own])
        if index != NO_CANDIDATE and (terms[MISSES, own][index], terms[COST, own][index]) < best:
            best, found = (terms[MISSES, own][index], terms[COST, own][index]), (number, index, own)
    if pair is not None:
        names, terms[:, -1] = (*names, pair.name), (*pair.parts, pair.misses, pair.cost)
    terms = terms[:, : len(names)]
    sessions = any(pool.session_s is not None for pool in offer.pools) or bool(pair is not None and pair.session_s)
    compared = _terms(spec, names, feasible, terms, sessions=sessions)
    if found is None:
        return None, compared
    number, index, own = found
    chosen = _terms(spec, names[own], feasible[own], terms[:, own], sessions=sessions)
    return AggregatedChoice(number, Choice(index, chosen), compared), compared


def targets_of(spec: ForesightSpec, offer: AggregatedOffer) -> FloatArray:
    """Return the targets for `misses`."""
    return np.array((spec.tpot or np.inf, spec.ttft or np.inf, offer.short_tokens))


def _beside_s(offer: AggregatedOffer) -> float:
    """Return the least delay that a prompt like this one imposes on a decode instance."""
    known = ((pool.candidates, pool) for pool in offer.pools if not pool.kept)
    each_s = (
        least_delay_s(candidates.need_bytes, candidates.free_kv_bytes, pool.delayed, pool.prefill_s)
        for candidates, pool in known
    )
    least_s = min(each_s, default=np.inf)
    return least_s if least_s < np.inf else 0.0


def _price(
    spec: ForesightSpec,
    pool: AggregatedCandidates,
    load: LoadPrices,
    offer: AggregatedOffer,
    against: tuple[float, float, FloatArray],
    feasible: BoolArray,
    terms: FloatArray,
) -> int:
    """Call `price_aggregated` for a pool. Args: `against`: `loss_s`, `delay_price` and `targets`, the same for all
    pools."""
    loss_s, delay_price, targets = against
    candidates = pool.candidates
    return price_aggregated(
        candidates.need_bytes,
        candidates.free_kv_bytes,
        candidates.batch,
        candidates.iteration_base_s,
        candidates.iteration_per_request_s,
        candidates.hit_tokens,
        pool.prompts_s,
        pool.prefill_s,
        pool.chunks,
        pool.delayed,
        pool.share,
        pool.stretch_s,
        _NOTHING if pool.session_s is None else pool.session_s,
        load.wait_s,
        load.slot_s,
        load.response_s,
        load.batch_s,
        pool.kept,
        offer.busy,
        loss_s,
        float(spec.delay_weight),
        float(spec.step_floor_s),
        float(spec.token_delay_max),
        delay_price,
        float(offer.output_tokens),
        targets,
        feasible,
        terms,
    )


def _terms(
    spec: ForesightSpec, names: tuple[str, ...], feasible: BoolArray, terms: FloatArray, *, sessions: bool
) -> Terms:
    columns = dict(zip(PARTS, terms, strict=False))
    if sessions:
        columns["session_s"] = terms[SESSION_S]
    if spec.has_targets:
        columns["misses"] = terms[MISSES]
    return Terms(names, terms[COST], feasible, columns)
