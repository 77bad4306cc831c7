"""Compiled kernels: the cost of every candidate in closed form, and of the best of them by the fluid what-if.

The functions take only arrays and numbers; `kvroute.policies.foresight.policy` explains their meaning.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvroute.compiled import compiled, compiled_in_place
from kvroute.flows import state as flows
from kvroute.flows.state import FlowState
from kvroute.policies.foresight.paths import (
    HOPS_MAX,
    NIC_DOWN,
    RACK_DOWN,
    AggregatedLinks,
    path_ceiling,
    path_of,
)
from kvroute.policies.foresight.whatif import simulate_transfer
from kvroute.types import SAME_NODE, BoolArray, FloatArray, IntArray, TierArray

TRANSFER_S, IMPOSED_S, PROMPTS_S, WAIT_S, STEP_S, SLOT_S, PACE, PLAYED, TIER, BOUND, COST = range(11)
"""Rows of `terms`; BOUND is a lower bound of a candidate's cost, for internal use."""
ROWS = COST + 1
PARTS = (
    "transfer_s",
    "imposed_s",
    "prompts_s",
    "wait_s",
    "step_s",
    "slot_s",
    "pace_bytes_per_s",
    "simulated",
    "tier",
)
"""Names of the first rows, in their order."""
NO_CANDIDATE = -1


class PricedCandidates(NamedTuple):
    """The candidates and what the request needs of them (`Candidates`, and their positions in the network)."""

    kv_bytes: FloatArray
    batch: IntArray
    queued: IntArray
    batch_max: IntArray
    base_s: FloatArray
    per_request_s: FloatArray
    prompts_s: FloatArray
    """See `Candidates`; empty: there are none."""
    tier: TierArray
    latency_s: FloatArray
    """Latency by tier, [TIER_COUNT]."""
    source: int
    targets: IntArray
    starts_s: float
    weights: FloatArray
    """imposed_weight, wait_weight, slot_weight, step_weight, answer_weight, answer_transfers, load_weight,
    step_floor_s, output_tokens."""


@compiled_in_place
def _price(i: int, transfer_s: float, imposed_s: float, candidates: PricedCandidates, terms: FloatArray) -> float:
    """Fill candidate i's terms and return its cost. All but the transfer and its imposed delay depend on the load.

    Queued requests count as part of the batch: they are in it by the time that this one decodes. The first token waits
    for the prompts that the candidate still computes when the transfer has ended.
    """
    imposed_weight, wait_weight, slot_weight, joining, answers, transfers, load_weight, floor_s, output_tokens = (
        candidates.weights
    )
    base_s, per_request_s, batch_max = candidates.base_s[i], candidates.per_request_s[i], candidates.batch_max[i]
    load = candidates.batch[i] + candidates.queued[i]
    gap_s = output_tokens * max(base_s + per_request_s * min(load, batch_max), floor_s) / batch_max
    wait_s = max(max(load + 1 - batch_max, 0) * gap_s - candidates.starts_s - transfer_s, 0.0)
    step_s = max(base_s + per_request_s * min(load + 1, batch_max), floor_s)
    taken = (load + 1) / batch_max
    slowed_s = per_request_s * load  # cost of one more request for all others together, per step
    answers_s = min(answers * slowed_s * output_tokens, transfers * transfer_s)
    slot_s = slot_weight * gap_s * taken * taken + joining * slowed_s + answers_s
    terms[TRANSFER_S, i], terms[IMPOSED_S, i], terms[WAIT_S, i] = transfer_s, imposed_s, wait_s
    terms[STEP_S, i], terms[SLOT_S, i] = step_s, slot_s
    prompts_s = 0.0
    if len(candidates.prompts_s):
        prompts_s = max(candidates.prompts_s[i] - candidates.starts_s - transfer_s, 0.0)
    terms[PROMPTS_S, i] = prompts_s
    load_s = wait_weight * wait_s + step_s + slot_s
    cost: float = transfer_s + imposed_weight * imposed_s + prompts_s + load_weight * load_s
    terms[COST, i] = cost
    return cost


@compiled_in_place
def _shared(
    source: int, target: int, tier: int, fabric: AggregatedLinks, link: FloatArray, path: IntArray
) -> tuple[float, float, float]:
    """Limits of the links that `target` shares with its rack: the ceiling of the hashed paths for one more transfer,
    the minimum of it and the link capacities, and the minimum of it and an even share of each link."""
    ceiling = path_ceiling(source, target, tier, fabric)
    own = fabric.attached[target, NIC_DOWN]
    uncontended = pace = ceiling
    for k in range(path_of(source, target, tier, fabric.attached, fabric.wan, path)):
        if path[k] != own:
            capacity = link[path[k], flows.CAPACITY]
            uncontended = min(uncontended, capacity)
            pace = min(pace, capacity / (1.0 + fabric.flows_per_link[path[k]]))
    return ceiling, uncontended, pace


@compiled
def _closed(
    candidates: PricedCandidates,
    fabric: AggregatedLinks,
    capacity: FloatArray,
    link: FloatArray,
    ceilings: FloatArray,
    terms: FloatArray,
) -> None:
    """Price all candidates in closed form: the path's ceiling, or an even share of its most crowded link if slower.

    The links that instances of a rack share are evaluated once per rack; each instance has its own NIC. `capacity` [m]
    repeats a column of `link`: it fits in a sixth of the cache lines.
    """
    path, known = np.empty(HOPS_MAX, np.int64), np.empty((len(fabric.flows_per_link), 3))
    known_tier = np.full(len(fabric.flows_per_link), -1, np.int64)
    for i in range(len(candidates.tier)):
        tier, target = candidates.tier[i], candidates.targets[i]
        rack, own = fabric.attached[target, RACK_DOWN], fabric.attached[target, NIC_DOWN]
        if rack >= 0 and known_tier[rack] == tier:
            ceilings[i], uncontended, pace = known[rack, 0], known[rack, 1], known[rack, 2]
        else:
            ceilings[i], uncontended, pace = _shared(candidates.source, target, tier, fabric, link, path)
            if rack >= 0:
                known[rack, 0], known[rack, 1], known[rack, 2] = ceilings[i], uncontended, pace
                known_tier[rack] = tier
        if own >= 0 and tier > SAME_NODE:
            uncontended, pace = (
                min(uncontended, capacity[own]),
                min(pace, capacity[own] / (1.0 + fabric.flows_per_link[own])),
            )
        latency_s, bound_s = candidates.latency_s[tier], -1.0
        if uncontended != pace:
            bound_s = _price(i, candidates.kv_bytes[i] / uncontended + latency_s, 0.0, candidates, terms)
        cost_s = _price(i, candidates.kv_bytes[i] / pace + latency_s, 0.0, candidates, terms)
        terms[PACE, i], terms[PLAYED, i], terms[TIER, i] = pace, 0.0, tier
        terms[BOUND, i] = cost_s if uncontended == pace else bound_s


@compiled
def _play(
    i: int,
    candidates: PricedCandidates,
    fabric: AggregatedLinks,
    ceiling: float,
    near_max: int,
    live: FlowState,
    terms: FloatArray,
) -> float:
    """Replace candidate i's closed form by the result of the fluid simulation; return its cost."""
    path = np.empty(HOPS_MAX, np.int64)
    hops = path_of(candidates.source, candidates.targets[i], candidates.tier[i], fabric.attached, fabric.wan, path)
    seconds, imposed_s = candidates.kv_bytes[i] / ceiling, 0.0
    if hops > 0 and candidates.kv_bytes[i] > 0.0:
        imposed = candidates.weights[0] > 0.0
        seconds, imposed_s = simulate_transfer(
            candidates.kv_bytes[i], candidates.starts_s, path[:hops], ceiling, near_max, imposed, live
        )
    if seconds > 0.0:
        terms[PACE, i] = candidates.kv_bytes[i] / seconds
    terms[PLAYED, i] = 1.0
    return _price(i, seconds + candidates.latency_s[candidates.tier[i]], imposed_s, candidates, terms)


@compiled_in_place
def _first_least(cost: FloatArray, among: BoolArray) -> int:
    best = NO_CANDIDATE
    for i in range(len(cost)):
        if among[i] and (best == NO_CANDIDATE or cost[i] < cost[best]):
            best = i
    return best


@compiled
def _play_best(
    candidates: PricedCandidates,
    fabric: AggregatedLinks,
    ceilings: FloatArray,
    width: int,
    near_max: int,
    live: FlowState,
    feasible: BoolArray,
    terms: FloatArray,
) -> None:
    """Simulate the best candidates by the closed form; the others keep their order and rank behind them.

    A candidate that could not win even alone on the network is skipped. The cost of each candidate that is not
    simulated is raised by the largest increase among the simulated ones, which keeps the order of the rest.
    """
    going = feasible.copy()
    best_s, shift_s, runs = np.inf, 0.0, 0
    for _ in range(2 * width):
        i = _first_least(terms[COST], going)
        if i == NO_CANDIDATE or runs == width:
            break
        going[i] = False
        bound_s, closed_s = terms[BOUND, i], terms[COST, i]
        if bound_s >= best_s:
            continue
        cost = _play(i, candidates, fabric, ceilings[i], near_max, live, terms)
        runs += 1
        best_s, shift_s = min(best_s, cost), max(shift_s, cost - closed_s)
    for i in range(len(feasible)):
        if terms[PLAYED, i] == 0.0:
            terms[COST, i] = max(terms[COST, i] + shift_s, terms[BOUND, i])


@compiled
def foresee(
    need_bytes: FloatArray,
    free_kv_bytes: FloatArray,
    kv_bytes: FloatArray,
    batch: IntArray,
    queued: IntArray,
    batch_max: IntArray,
    base_s: FloatArray,
    per_request_s: FloatArray,
    prompts_s: FloatArray,
    tier: TierArray,
    tier_latency_s: FloatArray,
    source: int,
    targets: IntArray,
    starts_s: float,
    weights: FloatArray,
    attached: IntArray,
    wan: IntArray,
    cable: FloatArray,
    cables: IntArray,
    flows_per_link: IntArray,
    capacity: FloatArray,
    hashed: int,
    rivals: float,
    siblings: float,
    mean: float,
    factor: FloatArray,
    tier_bytes_per_s: FloatArray,
    width: int,
    near_max: int,
    flow: FloatArray,
    flow_int: IntArray,
    link: FloatArray,
    link_int: IntArray,
    hop: IntArray,
    lists: IntArray,
    counts: IntArray,
    feasible: BoolArray,
    terms: FloatArray,
) -> int:
    """Fill `feasible` [n] and `terms` [ROWS, n]. Return the feasible candidate of least cost, the first of equals, or
    NO_CANDIDATE.

    Takes the arrays of `PricedCandidates`, `AggregatedLinks` and `FlowState` one by one: a call costs half as much as
    with tuples.
    """
    candidates = PricedCandidates(
        kv_bytes,
        batch,
        queued,
        batch_max,
        base_s,
        per_request_s,
        prompts_s,
        tier,
        tier_latency_s,
        source,
        targets,
        starts_s,
        weights,
    )
    fabric = AggregatedLinks(
        attached, wan, cable, cables, flows_per_link, hashed, rivals, siblings, mean, factor, tier_bytes_per_s
    )
    for i in range(len(tier)):
        feasible[i] = need_bytes[i] <= free_kv_bytes[i]
    ceilings = np.empty(len(tier))
    _closed(candidates, fabric, capacity, link, ceilings, terms)
    if width > 0:
        live = FlowState(flow, flow_int, link, link_int, hop, lists, counts)
        _play_best(candidates, fabric, ceilings, width, near_max, live, feasible, terms)
    return _first_least(terms[COST], feasible)


@compiled
def price_all(
    transfer_s: FloatArray,
    batch: IntArray,
    queued: IntArray,
    batch_max: IntArray,
    base_s: FloatArray,
    per_request_s: FloatArray,
    prompts_s: FloatArray,
    tier: TierArray,
    starts_s: float,
    weights: FloatArray,
    terms: FloatArray,
) -> None:
    """Fill `terms` [ROWS, n] for given transfer times, [n]."""
    no_indices = np.empty(0, np.int64)
    candidates = PricedCandidates(
        transfer_s,
        batch,
        queued,
        batch_max,
        base_s,
        per_request_s,
        prompts_s,
        tier,
        transfer_s,
        0,
        no_indices,
        starts_s,
        weights,
    )
    for i in range(len(tier)):
        terms[BOUND, i] = _price(i, transfer_s[i], 0.0, candidates, terms)
        terms[PLAYED, i], terms[TIER, i] = 0.0, tier[i]
