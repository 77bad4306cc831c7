"""Laws of the choice between a pair and one instance alone: no small change of the input makes a price jump."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvroute.control import ControlSpec
from kvroute.policies.foresight.aggregated import PARTS as PRICED
from kvroute.policies.foresight.aggregated import (
    AggregatedCandidates,
    AggregatedOffer,
    PairPrice,
    cheapest_aggregated,
    load_of,
)
from kvroute.policies.foresight.spec import ForesightSpec
from kvroute.topology import Cluster, parse
from kvroute.topology.drafts.draft import draft
from kvroute.types import Admitted, Arrived, Candidates, Decode, Prefill, Request, Terms

OUTPUT_TOKENS = 256.0
PARTS = dict.fromkeys((*PRICED, "session_s"), 0.0)


class Situation(NamedTuple):
    """One instance that may serve a request aggregated, and a pair, by numbers that may change a little."""

    prefill_s: float
    share: float
    stretch_s: float
    base_s: float
    per_request_s: float
    prompts_s: float
    pair_transfer_s: float


situations = st.builds(
    Situation,
    prefill_s=st.floats(0.001, 20.0),
    share=st.floats(0.0, 0.89),
    stretch_s=st.floats(-0.1, 2.0),
    base_s=st.floats(0.001, 0.1),
    per_request_s=st.floats(0.0, 0.002),
    prompts_s=st.floats(0.0, 20.0),
    pair_transfer_s=st.floats(0.0, 50.0),
)
counts = st.integers(0, 40)


def price(now: Situation, batch: int, delayed: int, busy: float, *, kept: bool, room: bool = True) -> Terms:
    """Return the terms of the one instance and the pair."""
    candidates = Candidates(
        names=("one",),
        batch=np.array([batch]),
        queued=np.zeros(1, dtype=np.int64),
        batch_max=np.array([64]),
        free_kv_bytes=np.array([1e9]),
        hit_tokens=np.zeros(1, dtype=np.int64),
        kv_bytes=np.zeros(1),
        need_bytes=np.array([1e9 if room else 2e9]),
        iteration_base_s=np.array([now.base_s]),
        iteration_per_request_s=np.array([now.per_request_s]),
    )
    pool = AggregatedCandidates(
        candidates,
        prompts_s=np.array([now.prompts_s]),
        prefill_s=np.array([now.prefill_s]),
        chunks=np.array([3]),
        delayed=np.array([delayed]),
        share=np.array([now.share]),
        stretch_s=np.array([now.stretch_s]),
        kept=kept,
    )
    spec, nothing = ForesightSpec(), np.zeros(1, dtype=np.int64)
    offer = AggregatedOffer((pool,), waiting=nothing, decoding=nothing, busy=busy, output_tokens=OUTPUT_TOKENS)
    pair = PairPrice("pair", misses=0, **PARTS)._replace(transfer_s=now.pair_transfer_s)
    found, compared = cheapest_aggregated(spec, offer, [load_of(spec, candidates, OUTPUT_TOKENS)], pair)
    assert (found is not None) == room
    return compared


@given(
    before=situations,
    batch=counts,
    delayed=counts,
    busy=st.floats(0.0, 1.0),
    kept=st.booleans(),
    which=st.integers(0, 6),
)
def test_a_small_change_never_makes_a_price_jump(
    before: Situation, batch: int, delayed: int, busy: float, kept: bool, which: int
) -> None:
    """A change of one input by a part in a million changes the price by less than a part in ten thousand."""
    name = before._fields[which]
    after = before._replace(**{name: getattr(before, name) * (1 + 1e-6)})
    first = price(before, batch, delayed, busy, kept=kept)
    second = price(after, batch, delayed, busy, kept=kept)
    assert abs(second.cost[0] - first.cost[0]) <= 1e-4 * first.cost[0]


@given(now=situations, batch=counts, delayed=counts, kept=st.booleans(), room=st.booleans())
def test_only_room_excludes_an_instance(now: Situation, batch: int, delayed: int, kept: bool, room: bool) -> None:
    """However much an instance alone would delay others, it has a price; `price` checks that it is a candidate."""
    terms = price(now, batch, delayed, 0.5, kept=kept, room=room)
    assert terms.feasible.tolist() == [room, True]
    assert np.isfinite(terms.cost).all()


def cluster(nic_gbps: float) -> Cluster:
    """Return one prefill and one decode instance behind NICs of this speed."""
    text = draft(
        "pair", ["http://p0:8000"], ["http://d0:8000"], model="llama-3-70b", nic_bytes_per_s=nic_gbps * 1e9 / 8
    )
    return parse(text)


def prices(nic_gbps: float, running: int, tokens: int) -> tuple[float, float]:
    """Return the price of the pair and of the best instance alone, with `running` requests on the decode instance."""
    control = ControlSpec().build(cluster(nic_gbps))
    for number in range(1, running + 1):
        request = Request(id=number, input_tokens=1, max_output_tokens=10, one_leg=True)
        control.handle(Arrived(0.0, request, only=("decode0",)))
        control.handle(Admitted(0.0, number))
    decisions = control.handle(Arrived(0.0, Request(id=0, input_tokens=tokens, max_output_tokens=10)))
    terms = decisions[0].terms
    assert terms is not None
    if isinstance(decisions[-1], Prefill):
        return float(terms.parts["pair_s"].max()), float(terms.parts["aggregated_s"][0])
    assert isinstance(decisions[-1], Decode)
    return float(terms.cost[-1]), float(terms.cost[:-1].min())


@given(nic_gbps=st.floats(1.0, 400.0), running=st.integers(0, 20), tokens=st.integers(100, 100_000))
def test_prices_are_continuous_in_bandwidth_and_length(nic_gbps: float, running: int, tokens: int) -> None:
    """One part in a thousand of bandwidth, or one token, never changes a price by more than a hundredth; more bandwidth
    never makes a pair dearer, and does not change the price of an instance alone."""
    pair_s, aggregated_s = prices(nic_gbps, running, tokens)
    faster_s, same_s = prices(nic_gbps * 1.001, running, tokens)
    assert 0.99 * pair_s <= faster_s <= pair_s * (1 + 1e-9)
    assert abs(same_s - aggregated_s) <= 0.01 * aggregated_s
    for one_s, more_s in zip((pair_s, aggregated_s), prices(nic_gbps, running, tokens + 1), strict=True):
        assert abs(more_s - one_s) <= 0.01 * one_s
