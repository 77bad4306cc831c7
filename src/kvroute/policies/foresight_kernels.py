"""foresight's arithmetic, compiled: the closed form of every candidate, and the fluid what-if of the best of them.

The rates come from `flows.kernels`; there is no second solver. The functions take only arrays and numbers;
`kvroute.policies.foresight` explains their meaning.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from kvroute.compiled import compiled
from kvroute.flows import kernels as flows
from kvroute.flows.kernels import State
from kvroute.types import (
    CROSS_DATACENTER,
    SAME_DATACENTER,
    SAME_NODE,
    SAME_POD,
    SAME_RACK,
    BoolArray,
    FloatArray,
    IntArray,
    TierArray,
)

TRANSFER_S, IMPOSED_S, WAIT_S, STEP_S, SLOT_S, PACE, PLAYED, BOUND, COST = range(9)
"""Rows of `terms`; BOUND is a lower bound of a candidate's cost, for internal use."""
ROWS = COST + 1
NOBODY = -1
HOPS_MAX = 8
"""Maximum number of links of a path, including the private link that holds the ceiling."""
NIC_UP, NIC_DOWN, RACK_UP, RACK_DOWN, POD_UP, POD_DOWN, SITE = range(7)
"""Same values as in `foresight_links`, defined again because numba reads a kernel's globals only at compile time."""
TAIL = 1e-9
"""Tail probability at which the number of rivals on a cable is cut off; also the tolerance for rounding."""


class Fabric(NamedTuple):
    """The aggregated links and their load: `LinkModel` after congestion, and the table of transfers."""

    ways: IntArray
    wan: IntArray
    cable: FloatArray
    """Bandwidth of one cable that other traffic leaves free, bytes per second, [m]."""
    cables: IntArray
    crowd: IntArray
    """Own transfers on each link, [m]."""
    hashed: int
    rivals: float
    """Weighted number of flows of another transfer."""
    siblings: float
    """Weighted number of other flows of the same transfer."""
    mean: float
    """Mean model rate of a hashed path."""
    factor: FloatArray
    """Measured over nominal capacity, by tier."""
    tier_bytes_per_s: FloatArray
    """Bandwidth of a tier that other traffic leaves free."""


class Asked(NamedTuple):
    """The candidates and what the request needs of them (`Candidates`, and their positions in the network)."""

    kv_bytes: FloatArray
    batch: IntArray
    queued: IntArray
    batch_max: IntArray
    base_s: FloatArray
    per_request_s: FloatArray
    tier: TierArray
    latency_s: FloatArray
    """Latency of each candidate's tier, [n]."""
    source: int
    targets: IntArray
    starts_s: float
    numbers: FloatArray
    """imposed_weight, wait_weight, slot_weight, landing_weight, answer_weight, answer_transfers, load_weight,
    step_floor_s, output_tokens."""


@compiled
def path_of(source: int, target: int, tier: int, ways: IntArray, wan: IntArray, path: IntArray) -> int:
    """Fill `path` with the links from `source` to `target` and return their number; 0 inside a node."""
    count = 0
    if tier > SAME_NODE:
        path[0], path[1] = ways[source, NIC_UP], ways[target, NIC_DOWN]
        count = 2
    if tier >= SAME_POD:
        path[count], path[count + 1] = ways[source, RACK_UP], ways[target, RACK_DOWN]
        count += 2
    if tier >= SAME_DATACENTER:
        path[count], path[count + 1] = ways[source, POD_UP], ways[target, POD_DOWN]
        count += 2
    if tier >= CROSS_DATACENTER:
        path[count] = wan[ways[source, SITE], ways[target, SITE]]
        count += 1
    kept = 0
    for k in range(count):
        if path[k] >= 0:
            path[kept] = path[k]
            kept += 1
    return kept


@compiled
def collided(cable_bytes_per_s: float, rivals: float, hashed_paths: int, mean_bytes_per_s: float) -> float:
    """Rate of a transfer of `hashed_paths` equal parts if each part draws a cable at random, bytes per second.

    The number of other flows on a cable is Poisson distributed with mean `rivals`. Each part gets a fair share or, if
    that is more, what the rivals do not use. The part on the fullest cable sets the pace: h / E[1 / share(max of h
    draws)].
    """
    if rivals <= 0.0:
        alone: float = hashed_paths * cable_bytes_per_s
        return alone
    x = 0
    if rivals > 30.0:
        x = max(int(rivals - 7.0 * math.sqrt(rivals)), 0)
    mass = math.exp(x * math.log(rivals) - rivals - math.lgamma(x + 1.0))
    below, before, seconds = 0.0, 0.0, 0.0
    while True:
        share = max(cable_bytes_per_s / (1.0 + x), cable_bytes_per_s - x * mean_bytes_per_s)
        below += mass
        if below >= 1.0 - TAIL or x > rivals + 12.0 * math.sqrt(rivals) + 12.0:
            in_parts: float = hashed_paths / (seconds + (1.0 - before) / share)
            return in_parts
        reached = below**hashed_paths
        seconds += (reached - before) / share
        before = reached
        x += 1
        mass *= rivals / x


@compiled
def _drawn(up: int, down: int, otherwise: float, fabric: Fabric) -> float:
    """Capacity of the hashed paths over one group up and one down; `otherwise` if both are unknown.

    Other flows of the same transfer may draw the same cable; they are assumed to use all that they can get.
    """
    width, rivals, siblings = np.inf, 0.0, 0.0
    for link in (up, down):
        if link >= 0:
            width = min(width, fabric.cable[link])
            if fabric.cables[link] > 1:
                rivals += fabric.rivals * fabric.crowd[link] / fabric.cables[link]
                siblings += fabric.siblings / fabric.cables[link]
    if width == np.inf:
        return otherwise
    both = rivals + siblings
    mean = (rivals * fabric.mean + siblings * width) / both if both > 0.0 else 0.0
    return collided(width, both, fabric.hashed, mean)


@compiled
def _ceiling(source: int, target: int, tier: int, fabric: Fabric) -> float:
    far, ways = fabric.tier_bytes_per_s[tier], fabric.ways
    if tier <= SAME_NODE:
        inside: float = far
        return inside
    if tier == SAME_RACK:
        return np.inf
    ceiling = _drawn(ways[source, RACK_UP], ways[target, RACK_DOWN], far, fabric)
    if tier >= SAME_DATACENTER:
        ceiling = min(ceiling, _drawn(ways[source, POD_UP], ways[target, POD_DOWN], far, fabric))
    if tier >= CROSS_DATACENTER:
        ceiling = min(ceiling, _drawn(fabric.wan[ways[source, SITE], ways[target, SITE]], -1, far, fabric))
    learned: float = fabric.factor[tier] * ceiling
    return learned


@compiled
def ceiling_of(
    source: int,
    target: int,
    tier: int,
    ways: IntArray,
    wan: IntArray,
    cable: FloatArray,
    cables: IntArray,
    crowd: IntArray,
    hashed: int,
    rivals: float,
    siblings: float,
    mean: float,
    factor: FloatArray,
    tier_bytes_per_s: FloatArray,
) -> float:
    """Rate limit of the hashed paths of a tier for one more transfer, with the learned factor; inf in a rack, where
    only the NICs limit.

    The arguments after `tier` are those of `Fabric`.
    """
    fabric = Fabric(ways, wan, cable, cables, crowd, hashed, rivals, siblings, mean, factor, tier_bytes_per_s)
    return _ceiling(source, target, tier, fabric)


@compiled
def pass_time(
    now: float,
    floor_share: float,
    flow: FloatArray,
    link: FloatArray,
    lists: IntArray,
    counts: IntArray,
    predicted: FloatArray,
    limited: FloatArray,
) -> float:
    """Move the transfers in flight at their rates until `now`; return the sum of the rates.

    `predicted` grows by the bytes that the model sends, `limited` by those sent at the path's ceiling (ignored for a
    transfer without a ceiling). No transfer ends here: ends are observed, not predicted.
    """
    first_private, total = link.shape[0] - flow.shape[0], 0.0
    for k in range(counts[flows.ACTIVE]):
        slot = lists[flows.ORDER, k]
        rate = flow[slot, flows.RATE]
        total += rate
        sent = rate * (now - flow[slot, flows.SINCE])
        if sent <= 0.0:
            continue
        predicted[slot] += sent
        if rate >= (1.0 - TAIL) * link[first_private + slot, flows.CAPACITY]:
            limited[slot] += sent
        left = max(flow[slot, flows.LEFT] - sent, floor_share * flow[slot, flows.SIZE])
        flow[slot, flows.LEFT], flow[slot, flows.SINCE] = left, now
        flow[slot, flows.FINISH] = now + left / rate
    return total


@compiled
def set_off(
    now: float,
    slot: int,
    source: int,
    target: int,
    tier: int,
    kv_bytes: float,
    ways: IntArray,
    wan: IntArray,
    cable: FloatArray,
    cables: IntArray,
    crowd: IntArray,
    hashed: int,
    rivals: float,
    siblings: float,
    mean: float,
    factor: FloatArray,
    tier_bytes_per_s: FloatArray,
    flow: FloatArray,
    flow_int: IntArray,
    link: FloatArray,
    link_int: IntArray,
    hop: IntArray,
    lists: IntArray,
    counts: IntArray,
    predicted: FloatArray,
    limited: FloatArray,
    path: IntArray,
    out: IntArray,
) -> int:
    """Start a transfer of `kv_bytes` in a free slot of the live state, and recompute the max-min fair rates.

    Adds the transfer to `crowd`, fills `path` with its links and returns their number. The ceiling of its hashed paths,
    given the other transfers, becomes the capacity of a private link at the end of the path.
    """
    fabric = Fabric(ways, wan, cable, cables, crowd, hashed, rivals, siblings, mean, factor, tier_bytes_per_s)
    ceiling = _ceiling(source, target, tier, fabric)
    count = hops = path_of(source, target, tier, ways, wan, path)
    ints = np.empty(3 + HOPS_MAX, np.int64)
    for k in range(count):
        crowd[path[k]] += 1
        ints[2 + k] = path[k]
    if ceiling < np.inf:
        private = link.shape[0] - flow.shape[0] + slot
        link[private, flows.CAPACITY] = ceiling
        ints[2 + hops] = private
        hops += 1
    ints[0], ints[1] = slot, hops
    predicted[slot] = limited[slot] = 0.0
    staged, floats = ints[: 2 + hops], np.array([kv_bytes, 1.0])
    flows.drive(now, -np.inf, flow, flow_int, link, link_int, hop, lists, counts, staged, floats, out)
    return count


@compiled
def _near(
    path: IntArray, near_max: int, live: State, links: IntArray, link_at: IntArray, slots: IntArray, slot_at: IntArray
) -> tuple[int, int]:
    """Find the transfers nearest to a path by shared links, at most `near_max`, and all their links; return both
    counts.

    `link_at` and `slot_at` give the position of each in `links` and `slots`; the path's own links come first.
    """
    longest = live.hop.shape[0] // live.flow.shape[0]
    n_links = n_slots = at = 0
    for link in path:
        link_at[link], links[n_links] = n_links, link
        n_links += 1
    while at < n_links and n_slots < near_max:
        hop = live.link_int[links[at], flows.HEAD]
        at += 1
        while hop >= 0 and n_slots < near_max:
            slot = live.hop[hop, flows.SLOT]
            hop = live.hop[hop, flows.NEXT]
            if slot_at[slot] >= 0:
                continue
            slot_at[slot], slots[n_slots] = n_slots, slot
            n_slots += 1
            for other in range(slot * longest, slot * longest + live.flow_int[slot, flows.HOPS]):
                link = live.hop[other, flows.LINK]
                if link_at[link] < 0:
                    link_at[link], links[n_links] = n_links, link
                    n_links += 1
    return n_links, n_slots


@compiled
def _room(link: int, slot_at: IntArray, live: State) -> float:
    """Capacity of a link minus the present rates of the transfers that are not simulated."""
    capacity = live.link[link, flows.CAPACITY]
    room = capacity
    hop = live.link_int[link, flows.HEAD]
    while hop >= 0:
        slot = live.hop[hop, flows.SLOT]
        hop = live.hop[hop, flows.NEXT]
        if slot_at[slot] < 0:
            room -= live.flow[slot, flows.RATE]
    left: float = max(room, 1e-6 * capacity)
    return left


@compiled
def _idle(slots: int, links: int) -> State:
    net = State(
        np.zeros((slots, 8)),
        np.zeros((slots, 3), np.int64),
        np.zeros((links, 6)),
        np.zeros((links, 6), np.int64),
        np.full((slots * HOPS_MAX, 4), -1, np.int64),
        np.zeros((4, max(slots, links)), np.int64),
        np.zeros(3, np.int64),
    )
    net.link_int[:, flows.HEAD] = -1
    return net


@compiled
def _run(now: float, to: float, net: State, ints: IntArray, floats: FloatArray) -> None:
    """Start the staged flows at `now` and advance the network to `to`; a flow that has ended keeps its finish time."""
    out = np.empty(net.flow.shape[0], np.int64)
    flows.drive(
        now, to, net.flow, net.flow_int, net.link, net.link_int, net.hop, net.lists, net.counts, ints, floats, out
    )


@compiled
def _excerpt(path: IntArray, near_max: int, ceiling: float, live: State) -> State:
    """A network of only the nearest transfers and their links, with a free slot and, last, the newcomer's ceiling."""
    near_max = min(near_max, live.counts[flows.ACTIVE])
    links = np.empty(len(path) + near_max * HOPS_MAX, np.int64)
    link_at = np.full(live.link.shape[0], -1, np.int64)
    slots = np.empty(near_max, np.int64)
    slot_at = np.full(live.flow.shape[0], -1, np.int64)
    n_links, n_slots = _near(path, near_max, live, links, link_at, slots, slot_at)
    net = _idle(n_slots + 1, n_links + 1)
    for k in range(n_links):
        net.link[k, flows.CAPACITY] = _room(links[k], slot_at, live)
    net.link[n_links, flows.CAPACITY] = ceiling
    longest = live.hop.shape[0] // live.flow.shape[0]
    ints, floats = np.empty(n_slots * (HOPS_MAX + 2), np.int64), np.empty(2 * n_slots)
    at = 0
    for k in range(n_slots):
        slot = slots[k]
        hops = live.flow_int[slot, flows.HOPS]
        ints[at], ints[at + 1] = k, hops
        for j in range(hops):
            ints[at + 2 + j] = link_at[live.hop[slot * longest + j, flows.LINK]]
        at += 2 + hops
        floats[2 * k], floats[2 * k + 1] = live.flow[slot, flows.LEFT], live.flow[slot, flows.WEIGHT]
    _run(0.0, -np.inf, net, ints[:at], floats)
    return net


@compiled
def _copied(net: State) -> State:
    return State(
        net.flow.copy(),
        net.flow_int.copy(),
        net.link.copy(),
        net.link_int.copy(),
        net.hop.copy(),
        net.lists.copy(),
        net.counts.copy(),
    )


@compiled
def played(
    kv_bytes: float, starts_s: float, path: IntArray, ceiling: float, near_max: int, imposed: bool, live: State
) -> tuple[float, float]:
    """Simulate a transfer that starts `starts_s` from now; return its seconds and the total delay of the others.

    The live state is not changed and must hold the remaining bytes at this time. The simulation starts no other
    transfers, and only the `near_max` nearest ones change their rates.
    """
    net = _excerpt(path, near_max, ceiling, live)
    slot, own = net.flow.shape[0] - 1, net.link.shape[0] - 1
    nothing, none = np.empty(0, np.int64), np.empty(0)
    if starts_s > 0.0:
        _run(0.0, starts_s, net, nothing, none)
    rest = _copied(net) if imposed else net
    ints = np.empty(2 + HOPS_MAX, np.int64)
    hops = len(path)
    for k in range(hops):
        ints[2 + k] = k
    if ceiling < np.inf:
        ints[2 + hops] = own
        hops += 1
    ints[0], ints[1] = slot, hops
    _run(starts_s, np.inf, net, ints[: 2 + hops], np.array([kv_bytes, 1.0]))
    delay_s = 0.0
    if imposed:
        _run(starts_s, np.inf, rest, nothing, none)
        for k in range(slot):
            delay_s += net.flow[k, flows.FINISH] - rest.flow[k, flows.FINISH]
    return net.flow[slot, flows.FINISH] - starts_s, max(delay_s, 0.0)


@compiled
def _price(i: int, transfer_s: float, imposed_s: float, asked: Asked, terms: FloatArray) -> float:
    """Fill candidate i's terms and return its cost. All but the transfer and its imposed delay depend on the load.

    Queued requests count as part of the batch: they are in it by the time that this one decodes.
    """
    imposed_weight, wait_weight, slot_weight, landing, answers, transfers, load_weight, floor_s, output_tokens = (
        asked.numbers
    )
    base_s, per_request_s, batch_max = asked.base_s[i], asked.per_request_s[i], asked.batch_max[i]
    load = asked.batch[i] + asked.queued[i]
    gap_s = output_tokens * max(base_s + per_request_s * min(load, batch_max), floor_s) / batch_max
    wait_s = max(max(load + 1 - batch_max, 0) * gap_s - asked.starts_s - transfer_s, 0.0)
    step_s = max(base_s + per_request_s * min(load + 1, batch_max), floor_s)
    taken = (load + 1) / batch_max
    slowed_s = per_request_s * load  # cost of one more request for all others together, per step
    answers_s = min(answers * slowed_s * output_tokens, transfers * transfer_s)
    slot_s = slot_weight * gap_s * taken * taken + landing * slowed_s + answers_s
    terms[TRANSFER_S, i], terms[IMPOSED_S, i], terms[WAIT_S, i] = transfer_s, imposed_s, wait_s
    terms[STEP_S, i], terms[SLOT_S, i] = step_s, slot_s
    cost: float = transfer_s + imposed_weight * imposed_s + load_weight * (wait_weight * wait_s + step_s + slot_s)
    terms[COST, i] = cost
    return cost


@compiled
def _shared(
    source: int, target: int, tier: int, fabric: Fabric, link: FloatArray, path: IntArray
) -> tuple[float, float, float]:
    """Limits of the links that `target` shares with its rack: the ceiling of the hashed paths for one more transfer,
    the minimum of it and the link capacities, and the minimum of it and an even share of each link."""
    ceiling = _ceiling(source, target, tier, fabric)
    own = fabric.ways[target, NIC_DOWN]
    alone = pace = ceiling
    for k in range(path_of(source, target, tier, fabric.ways, fabric.wan, path)):
        if path[k] != own:
            capacity = link[path[k], flows.CAPACITY]
            alone = min(alone, capacity)
            pace = min(pace, capacity / (1.0 + fabric.crowd[path[k]]))
    return ceiling, alone, pace


@compiled
def _closed(asked: Asked, fabric: Fabric, link: FloatArray, ceilings: FloatArray, terms: FloatArray) -> None:
    """Price all candidates in closed form: the path's ceiling, or an even share of its most crowded link if slower.

    The links that instances of a rack share are evaluated once per rack; each instance has its own NIC.
    """
    path, known = np.empty(HOPS_MAX, np.int64), np.empty((len(fabric.crowd), 3))
    known_tier = np.full(len(fabric.crowd), -1, np.int64)
    for i in range(len(asked.tier)):
        tier, target = asked.tier[i], asked.targets[i]
        rack, own = fabric.ways[target, RACK_DOWN], fabric.ways[target, NIC_DOWN]
        if rack >= 0 and known_tier[rack] == tier:
            ceilings[i], alone, pace = known[rack, 0], known[rack, 1], known[rack, 2]
        else:
            ceilings[i], alone, pace = _shared(asked.source, target, tier, fabric, link, path)
            if rack >= 0:
                known[rack, 0], known[rack, 1], known[rack, 2] = ceilings[i], alone, pace
                known_tier[rack] = tier
        if own >= 0 and tier > SAME_NODE:
            capacity = link[own, flows.CAPACITY]
            alone, pace = min(alone, capacity), min(pace, capacity / (1.0 + fabric.crowd[own]))
        latency_s, bound_s = asked.latency_s[i], -1.0
        if alone != pace:
            bound_s = _price(i, asked.kv_bytes[i] / alone + latency_s, 0.0, asked, terms)
        cost_s = _price(i, asked.kv_bytes[i] / pace + latency_s, 0.0, asked, terms)
        terms[PACE, i], terms[PLAYED, i], terms[BOUND, i] = pace, 0.0, cost_s if alone == pace else bound_s


@compiled
def _play(i: int, asked: Asked, fabric: Fabric, ceiling: float, near_max: int, live: State, terms: FloatArray) -> float:
    """Replace candidate i's closed form by the result of the fluid simulation; return its cost."""
    path = np.empty(HOPS_MAX, np.int64)
    hops = path_of(asked.source, asked.targets[i], asked.tier[i], fabric.ways, fabric.wan, path)
    seconds, imposed_s = asked.kv_bytes[i] / ceiling, 0.0
    if hops > 0 and asked.kv_bytes[i] > 0.0:
        imposed = asked.numbers[0] > 0.0
        seconds, imposed_s = played(asked.kv_bytes[i], asked.starts_s, path[:hops], ceiling, near_max, imposed, live)
    if seconds > 0.0:
        terms[PACE, i] = asked.kv_bytes[i] / seconds
    terms[PLAYED, i] = 1.0
    return _price(i, seconds + asked.latency_s[i], imposed_s, asked, terms)


@compiled
def _first_least(cost: FloatArray, among: BoolArray) -> int:
    best = NOBODY
    for i in range(len(cost)):
        if among[i] and (best == NOBODY or cost[i] < cost[best]):
            best = i
    return best


@compiled
def _play_best(
    asked: Asked,
    fabric: Fabric,
    ceilings: FloatArray,
    width: int,
    near_max: int,
    live: State,
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
        if i == NOBODY or runs == width:
            break
        going[i] = False
        bound_s, closed_s = terms[BOUND, i], terms[COST, i]
        if bound_s >= best_s:
            continue
        cost = _play(i, asked, fabric, ceilings[i], near_max, live, terms)
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
    tier: TierArray,
    tier_latency_s: FloatArray,
    source: int,
    targets: IntArray,
    starts_s: float,
    numbers: FloatArray,
    ways: IntArray,
    wan: IntArray,
    cable: FloatArray,
    cables: IntArray,
    crowd: IntArray,
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
    NOBODY.

    Takes the arrays of `Asked`, `Fabric` and `State` one by one: a call costs half as much as with tuples.
    """
    latency_s = tier_latency_s[tier]
    asked = Asked(
        kv_bytes, batch, queued, batch_max, base_s, per_request_s, tier, latency_s, source, targets, starts_s, numbers
    )
    fabric = Fabric(ways, wan, cable, cables, crowd, hashed, rivals, siblings, mean, factor, tier_bytes_per_s)
    for i in range(len(tier)):
        feasible[i] = need_bytes[i] <= free_kv_bytes[i]
    ceilings = np.empty(len(tier))
    _closed(asked, fabric, link, ceilings, terms)
    if width > 0:
        live = State(flow, flow_int, link, link_int, hop, lists, counts)
        _play_best(asked, fabric, ceilings, width, near_max, live, feasible, terms)
    return _first_least(terms[COST], feasible)


@compiled
def price_all(
    transfer_s: FloatArray,
    batch: IntArray,
    queued: IntArray,
    batch_max: IntArray,
    base_s: FloatArray,
    per_request_s: FloatArray,
    tier: TierArray,
    starts_s: float,
    numbers: FloatArray,
    terms: FloatArray,
) -> None:
    """Fill `terms` [ROWS, n] for given transfer times, [n]."""
    nobody = np.empty(0, np.int64)
    asked = Asked(
        transfer_s, batch, queued, batch_max, base_s, per_request_s, tier, transfer_s, 0, nobody, starts_s, numbers
    )
    for i in range(len(tier)):
        terms[BOUND, i] = _price(i, transfer_s[i], 0.0, asked, terms)
        terms[PLAYED, i] = 0.0
