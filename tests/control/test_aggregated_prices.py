"""The compiled price of instances that may serve a request aggregated, beside a slow version in plain Python."""

from __future__ import annotations

import math
from functools import reduce
from operator import add
from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvroute.policies.foresight.aggregated import (
    PARTS,
    AggregatedCandidates,
    AggregatedOffer,
    LoadPrices,
    PairPrice,
    cheapest_aggregated,
    load_of,
)
from kvroute.policies.foresight.spec import NO_BOUND, ForesightSpec
from kvroute.types import Candidates

OUTPUT_TOKENS = 200.0
seconds = st.floats(0.0, 5.0)
counts = st.integers(0, 12)


class Instance(NamedTuple):
    """One instance that may serve the request."""

    batch: int
    queued: int
    room: float
    """Bytes that are free beyond those the request needs; below 0: it has no room."""
    prompts_s: float
    prefill_s: float
    chunks: int
    delayed: int
    share: float
    stretch_s: float
    session_s: float


instances = st.builds(
    Instance,
    batch=counts,
    queued=counts,
    room=st.sampled_from((-1.0, 0.0, 1e9)),
    prompts_s=seconds,
    prefill_s=seconds,
    chunks=st.integers(1, 9),
    delayed=counts,
    share=st.floats(0.0, 0.9),
    stretch_s=st.floats(-0.1, 2.0),
    session_s=st.floats(-1.0, 0.0),
)
pools = st.lists(st.tuples(st.lists(instances, min_size=1, max_size=5), st.booleans()), min_size=1, max_size=2)
pairs = st.none() | st.builds(
    PairPrice,
    name=st.just("p0 and d0"),
    **dict.fromkeys(PARTS, seconds),
    session_s=st.floats(-1.0, 0.0),
)


def pool_of(members: list[Instance], *, kept: bool, sessions: bool) -> AggregatedCandidates:
    count = len(members)

    def column(name: str) -> np.ndarray:
        return np.array([getattr(member, name) for member in members])

    candidates = Candidates(
        names=tuple(f"{'p' if kept else 'd'}{index}" for index in range(count)),
        batch=column("batch"),
        queued=column("queued"),
        batch_max=np.full(count, 16),
        free_kv_bytes=1e9 + column("room"),
        hit_tokens=column("chunks") * 16,
        kv_bytes=np.zeros(count),
        need_bytes=np.full(count, 1e9),
        iteration_base_s=np.full(count, 0.01),
        iteration_per_request_s=np.full(count, 0.0005),
    )
    return AggregatedCandidates(
        candidates,
        column("prompts_s"),
        column("prefill_s"),
        column("chunks"),
        column("delayed"),
        column("share"),
        column("stretch_s"),
        kept,
        column("session_s") if sessions else None,
    )


def parts_of(
    spec: ForesightSpec, member: Instance, load: LoadPrices, index: int, kept: bool, busy: float, loss_s: float | None
) -> list[float]:
    """The columns of docs/policies.md, one instance at a time. `loss_s` None: there is no pair."""
    response_s = float(load.response_s[index])
    step_s = 0.01 + 0.0005 * member.batch
    own_s, free_s = response_s * member.share / (1 - member.share), spec.token_delay_max * response_s
    others_s = max(member.prefill_s + own_s - free_s, 0.0) if member.delayed else 0.0
    beyond_s = min(others_s, member.prefill_s) + max(own_s - free_s, 0.0)
    lost_s = busy * min(loss_s or 0.0, member.prefill_s)
    reserve_s = spec.delay_weight * response_s / max(member.prefill_s, spec.step_floor_s) * lost_s
    stretch_s, most = max(member.stretch_s, 0.0), min(busy, 0.9)
    longer = stretch_s / (member.prefill_s + stretch_s) if stretch_s else 0.0
    reserve_s += spec.delay_weight * (longer * response_s * most / (1 - most) / (member.batch + 1))
    return [
        max(float(load.wait_s[index]), member.prompts_s),
        member.prefill_s,
        0.0,
        member.chunks * step_s if member.batch else 0.0,
        float(load.slot_s[index]),
        spec.delay_weight * member.delayed * member.prefill_s,
        spec.delay_weight * response_s * member.share / (1 - member.share),
        reserve_s if kept else 0.0,
        float(load.batch_s[index]),
        0.0 if loss_s is None else spec.token_delay_price * beyond_s,
    ]


def missed_by(spec: ForesightSpec, members: list[Instance], load: LoadPrices, index: int, kept: bool) -> int:
    """The number of targets missed, by docs/policies.md."""
    member, others = members[index], reduce(add, (delayed.delayed / len(members) for delayed in members), 0.0)
    steps_s = member.chunks * (0.01 + 0.0005 * member.batch) if member.batch else 0.0
    ttft_s = max(float(load.wait_s[index]), member.prompts_s) + member.prefill_s + steps_s
    tpot_s = float(load.response_s[index]) / OUTPUT_TOKENS / (1 - member.share)
    delays = member.delayed or not spec.ttft or others * member.prefill_s > 0.2 * float(load.response_s[index])
    tpot_s += member.prefill_s / 20.0 if delays else 0.0
    return (tpot_s > (spec.tpot or math.inf)) + (ttft_s > (spec.ttft or math.inf))


@given(
    given_pools=pools,
    pair=pairs,
    sessions=st.booleans(),
    busy=st.floats(0.0, 1.0),
    delay_weight=st.floats(0.0, 3.0),
    token_delay_max=st.sampled_from((0.0, 0.05, 1.0, NO_BOUND)),
    token_delay_price=st.sampled_from((0.0, 0.5, 1e9)),
    tpot=st.sampled_from((0.0, 0.015, 0.05)),
    ttft=st.sampled_from((0.0, 2.0)),
)
def test_the_cheapest_instance_and_its_parts_are_those_of_the_slow_version(
    given_pools: list[tuple[list[Instance], bool]],
    pair: PairPrice | None,
    sessions: bool,
    busy: float,
    delay_weight: float,
    token_delay_max: float,
    token_delay_price: float,
    tpot: float,
    ttft: float,
) -> None:
    """Every part, the sum and the first of equals; without a pair, delays have no price beyond `token_delay_max`. A
    candidate that misses fewer targets is preferred whatever it costs."""
    spec = ForesightSpec(
        delay_weight=delay_weight,
        token_delay_max=token_delay_max,
        token_delay_price=token_delay_price,
        tpot=tpot,
        ttft=ttft,
    )
    offered = tuple(pool_of(members, kept=kept, sessions=sessions) for members, kept in given_pools)
    nothing = np.zeros(1, dtype=np.int64)
    offer = AggregatedOffer(
        offered, waiting=nothing, decoding=nothing, busy=busy, output_tokens=OUTPUT_TOKENS, short_tokens=20.0
    )
    loads = [load_of(spec, pool.candidates, OUTPUT_TOKENS) for pool in offered]

    beside = [
        member.delayed * member.prefill_s
        for members, kept in given_pools
        for member in members
        if not kept and member.room >= 0
    ]
    loss_s = max(min(beside, default=0.0) - pair.transfer_s, 0.0) if pair is not None else None
    best, expected = None, (math.inf, math.inf)
    for number, (members, kept) in enumerate(given_pools):
        for index, member in enumerate(members):
            cost_s = reduce(add, parts_of(spec, member, loads[number], index, kept, busy, loss_s))
            cost_s += member.session_s if sessions else 0.0
            missed = missed_by(spec, members, loads[number], index, kept)
            if member.room >= 0 and (missed, cost_s) < expected:
                best, expected = (number, index), (missed, cost_s)

    found, compared = cheapest_aggregated(spec, offer, loads, pair)
    assert len(compared.names) == sum(len(members) for members, _ in given_pools) + (pair is not None)
    assert compared.feasible.tolist() == [
        *(member.room >= 0 for members, _ in given_pools for member in members),
        *[True] * (pair is not None),
    ]

    assert (found is None) == (best is None)
    if found is None or best is None:
        return
    assert (found.pool, found.decode.index) == best
    terms, (number, _) = found.decode.terms, best
    members, kept = given_pools[number]
    assert len(terms.names) == len(terms.cost) == len(members)
    for index, member in enumerate(members):
        parts = parts_of(spec, member, loads[number], index, kept, busy, loss_s)
        assert [float(terms.parts[part][index]) for part in PARTS] == [*parts, member.chunks * 16]
        assert terms.cost[index] == reduce(add, parts) + (member.session_s if sessions else 0.0)
    if pair is not None:
        assert [float(compared.parts[part][-1]) for part in PARTS] == [getattr(pair, part) for part in PARTS]
        assert compared.cost[-1] == pair.cost
    assert ("misses" in terms.parts) == bool(tpot or ttft)
    if tpot or ttft:
        assert terms.parts["misses"][: len(members)].tolist() == [
            missed_by(spec, members, loads[number], index, kept) for index in range(len(members))
        ]
    priced = sessions or bool(pair is not None and pair.session_s)
    assert ("session_s" in terms.parts) == priced
