"""Laws of foresight: its table equals a slow reference, its what-if equals the fluid model, and its choice equals that
of `cla` where the network sets no limit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import fields, replace

from kvroute.control.learning.learned_capacity import LearnedCapacity
from kvroute.control.state.transfer_table import InFlight
from kvroute.flows import fill_to_the_end, max_min_rates
from kvroute.flows.state import CAPACITY
from kvroute.policies import CacheAndLoadAware
from kvroute.policies.foresight.joint import ForesightJoint, JointPath, Pair
from kvroute.policies.foresight.links import LinkModel
from kvroute.policies.foresight.paths import collided
from kvroute.policies.foresight.policy import Foresight
from kvroute.policies.foresight.spec import ForesightSpec
from kvroute.policies.prefill import PrefillCandidates
from kvroute.types import Candidates, Choice, FloatArray, IntArray, NetworkCosts, Reject, Request, TierArray

N = 12
"""Number of instances: two per rack, four per pod, the last pod in another datacenter; 0 and 1 share a node."""
NIC, CABLE, CABLES = 12.5e9, 10e9, 3
LATENCY_S = np.array([1e-6, 3e-6, 8e-6, 15e-6, 1e-3])
LATENCY_S.flags.writeable = False  # as an oracle's: kernels would be compiled for another type of array
ALL: IntArray = np.arange(N)
REQUEST = Request(id=1, input_tokens=10_000)


def fabric(hashed_paths: int = 1, scale: float = 1.0, uplinks: bool = True) -> LinkModel:
    """Return a small fabric with every tier, with links as in a cluster or with NICs only."""
    tier: TierArray = np.full((N, N), 4, dtype=np.int8)
    for a in range(N):
        for b in range(N):
            level = [a == b or a + b == 1, a // 2 == b // 2, a // 4 == b // 4, (a < 8) == (b < 8)]
            tier[a, b] = level.index(True) if True in level else 4
    bytes_per_s = np.array([1e11, NIC, CABLE, CABLE, 2e9]) * scale
    if not uplinks:
        return LinkModel.of_tiers(tier, bytes_per_s, hashed_paths=hashed_paths)
    rows: list[tuple[float, float, int, int]] = [(NIC, NIC, 1, 1)] * (2 * N)
    attached: IntArray = np.full((N, 7), -1, dtype=np.int64)
    for a in range(N):
        attached[a] = (
            2 * a,
            2 * a + 1,
            24 + 2 * (a // 2),
            25 + 2 * (a // 2),
            36 + 2 * (a // 4),
            37 + 2 * (a // 4),
            a // 8,
        )
    rows += [(CABLES * CABLE, CABLE, CABLES, 2)] * 12 + [(2 * CABLE, CABLE, 2, 3)] * 6 + [(2e9, 2e9, 1, 4)] * 2
    table = np.array(rows)
    return LinkModel(
        tier=tier,
        tier_bytes_per_s=bytes_per_s,
        attached=np.asfortranarray(attached),  # as `LinkModel.of` makes it
        wan=np.array([[-1, 42], [43, -1]], dtype=np.int64),
        capacity_bytes_per_s=table[:, 0] * scale,
        cable_bytes_per_s=table[:, 1] * scale,
        cables=table[:, 2].astype(np.int64),
        link_tier=table[:, 3].astype(np.int64),
        hashed_paths=hashed_paths,
    )


def path_of(links: LinkModel, source: int, target: int) -> list[int]:
    """Return the path by its definition: up to the switch that joins the two instances, and down."""
    tier, here, there = (
        int(links.tier[source, target]),
        links.attached[source].tolist(),
        links.attached[target].tolist(),
    )
    path = [here[0], there[1]] if tier >= 1 else []
    path += [here[2], there[3]] if tier >= 2 else []
    path += [here[4], there[5]] if tier >= 3 else []
    path += [int(links.wan[here[6], there[6]])] if tier >= 4 else []
    return [link for link in path if link >= 0]


def hashed_bytes_per_s(cable: float, rivals: float, hashed: int, mean: float) -> float:
    """Return h / E[1 / share(M)] by a sum over the Poisson distribution, far beyond its mean."""
    mass, below, total = math.exp(-rivals), 0.0, 0.0
    for x in range(600):
        before, below = below, below + mass
        total += float(below**hashed - before**hashed) / max(cable / (1 + x), cable - x * mean)
        mass *= rivals / (x + 1)
    return float(hashed / total)


@dataclass
class ReferenceTable:
    """The table by its definition, with lists, and with rates from progressive filling."""

    links: LinkModel
    spec: ForesightSpec
    now: float = 0.0
    left: dict[int, float] = field(default_factory=dict)
    size: dict[int, float] = field(default_factory=dict)
    sent: dict[int, float] = field(default_factory=dict)
    limited: dict[int, float] = field(default_factory=dict)
    paths: dict[int, list[int]] = field(default_factory=dict)
    tiers: dict[int, int] = field(default_factory=dict)
    ceilings: dict[int, float] = field(default_factory=dict)
    assumed_factors: dict[int, float] = field(default_factory=dict)
    starts: dict[int, float] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)
    congestion: FloatArray = field(default_factory=lambda: np.zeros(5))
    learned: LearnedCapacity = field(default_factory=lambda: LearnedCapacity(ForesightSpec()))

    def advance(self, at: float) -> None:
        for number, rate in self.rates.items():
            sent = rate * (at - self.now)
            self.sent[number] += sent
            self.limited[number] += sent if rate >= self.ceilings[number] * (1 - 1e-9) else 0.0
            self.left[number] = max(self.left[number] - sent, self.spec.left_floor_share * self.size[number])
        self.now = at
        self.learned.grown_old(at)
        self.solve()

    def solve(self) -> None:
        nics = np.where(self.links.link_tier == 1, self.learned.factor[1], 1.0)
        capacity = (self.links.capacities(self.congestion) * nics).tolist()
        order = list(self.left)
        paths, held = [self.paths[number] for number in order], [self.ceilings[number] for number in order]
        self.rates = dict(zip(order, max_min_rates(paths, [1.0] * len(order), capacity, held), strict=True))

    def flows_per_link(self, link: int) -> int:
        return sum(link in path for path in self.paths.values())

    def ceiling(self, source: int, target: int) -> float:
        links, tier = self.links, int(self.links.tier[source, target])
        if tier == 1:
            return math.inf
        h = links.hashed_paths
        mean = sum(self.rates.values()) / (len(self.rates) * h) if self.rates else 0.0
        here, there = links.attached[source].tolist(), links.attached[target].tolist()
        groups = [(here[2], there[3]), (here[4], there[5]), (int(links.wan[here[6], there[6]]),)][: tier - 1]
        limits = []
        for group in groups:
            cables = [link for link in group if link >= 0]
            if not cables:
                limits.append(float(links.tier_bytes_per_s[tier]) * (1 - self.congestion[tier]))
                continue
            hashed_onto = [k for k in cables if links.cables[k] > 1]
            rivals = sum(h * self.flows_per_link(k) / int(links.cables[k]) for k in hashed_onto)
            siblings = sum((h - 1) / int(links.cables[k]) for k in hashed_onto)
            least = min(float(links.cable_bytes_per_s[k]) * (1 - self.congestion[links.link_tier[k]]) for k in cables)
            both = rivals + siblings
            rival_bytes_per_s = (rivals * mean + siblings * least) / both if both else 0.0
            limits.append(hashed_bytes_per_s(least, both, h, rival_bytes_per_s))
        return float(self.learned.factor[tier] * min(limits))

    def start(self, at: float, each: int, source: int, target: int, size: float) -> None:
        if not self.links.tier[source, target]:
            return
        self.advance(at)
        self.ceilings[each] = self.ceiling(source, target)
        self.tiers[each] = int(self.links.tier[source, target])
        self.assumed_factors[each] = float(self.learned.factor[self.tiers[each]])
        self.paths[each] = path_of(self.links, source, target)
        self.left[each] = self.size[each] = size
        self.sent[each] = self.limited[each] = 0.0
        self.starts[each] = at
        self.solve()

    def end(self, at: float, each: int, *, landed: bool) -> None:
        if each not in self.left:
            return
        self.advance(at)
        if landed:
            sent, lasted_s = (self.sent[each], self.limited[each]), at - self.starts[each]
            self.learned.ended(self.tiers[each], self.size[each], *sent, self.assumed_factors[each], lasted_s)
        for kept in (self.left, self.size, self.paths, self.ceilings, self.rates, self.tiers):
            del kept[each]
        self.solve()


pairs = st.tuples(st.integers(0, N - 1), st.integers(0, N - 1))
sizes = st.floats(1e8, 2e10)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("start"), pairs, sizes, st.floats(0, 0.5)),
        st.tuples(st.just("end"), st.integers(0, 30), st.booleans(), st.floats(0, 0.5)),
        st.tuples(st.just("congestion"), st.integers(0, 9), st.just(0), st.floats(0, 0.5)),
    ),
    max_size=25,
)


@given(steps, st.sampled_from([1, 4]), st.booleans())
def test_the_transfer_table_equals_a_simple_reference(
    actions: list[tuple[str, object, object, float]], hashed: int, uplinks: bool
) -> None:
    """After any sequence of calls, remaining bytes, rates and learned factors are equal."""
    links = fabric(hashed, uplinks=uplinks)
    table, slow = InFlight(links), ReferenceTable(links, ForesightSpec())
    now, started = 0.0, 0
    for kind, what, more, pause_s in actions:
        now += pause_s
        match kind, what, more:
            case "start", (int(source), int(target)), float(size):
                table.started(now, started, source, target, size)
                slow.start(now, started, source, target, size)
                started += 1
            case "end", int(each), bool(landed):
                table.finished(now, each, landed=landed)
                slow.end(now, each, landed=landed)
            case _, int(tenths), _:
                congestion = np.array([0.0, 0.0, 0.05, 0.1, 0.02]) * tenths
                table.congested(now, congestion)
                slow.advance(now)
                slow.congestion = congestion
                slow.solve()
        assert table.rates_bytes_per_s == pytest.approx(slow.rates, rel=1e-6)
        slow.advance(now)
        assert table.left_bytes(now) == pytest.approx(slow.left, rel=1e-6)
        assert table.learned.factor == pytest.approx(slow.learned.factor, rel=1e-5)
        check_capacities(table)


def check_capacities(table: InFlight) -> None:
    """The capacities that a decision reads are those of the flow model."""
    network_view = table.network_view(table.now, 0, np.arange(N))
    links = len(network_view.capacity_bytes_per_s)
    assert network_view.capacity_bytes_per_s.tolist() == network_view.state.link[:links, CAPACITY].tolist()


@given(st.integers(0, 9), st.booleans())
def test_a_table_that_takes_over_has_the_capacities_of_the_one_before(tenths: int, uplinks: bool) -> None:
    links = fabric(4, uplinks=uplinks)
    before, after = InFlight(links), InFlight(links)
    before.congested(1.0, np.array([0.0, 0.0, 0.05, 0.1, 0.02]) * tenths)
    after.take_over(before, np.arange(len(links.capacity_bytes_per_s)))
    check_capacities(after)
    left, expected = (table.network_view(1.0, 0, np.arange(N)).capacity_bytes_per_s for table in (after, before))
    assert left.tolist() == expected.tolist()


@st.composite
def tables(draw: st.DrawFn) -> tuple[InFlight, ReferenceTable]:
    """Draw a table with up to 16 transfers in flight, and the slow reference."""
    links = fabric(draw(st.sampled_from([1, 4])), uplinks=draw(st.booleans()))
    table, slow = InFlight(links), ReferenceTable(links, ForesightSpec())
    for number, ((source, target), size) in enumerate(draw(st.lists(st.tuples(pairs, sizes), max_size=16))):
        table.started(number * 0.01, number, source, target, size)
        slow.start(number * 0.01, number, source, target, size)
    slow.advance(table.now)
    return table, slow


@st.composite
def candidate_sets(draw: st.DrawFn, alike: bool = False) -> Candidates:
    """Draw one candidate on each of the N instances; values have few levels, so that ties are common."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    hit_tokens = random.choice([0, 0, 5_000, 10_000], N) * (not alike)
    batch_max = np.full(N, 8) if alike else random.choice([1, 8, 64], N)
    return Candidates(
        names=tuple(f"decode{index:02}" for index in range(N)),
        batch=random.integers(0, batch_max + 1),
        queued=random.integers(0, 3, N),
        batch_max=batch_max,
        free_kv_bytes=random.choice([1e9, 200e9, 200e9], N),
        hit_tokens=hit_tokens,
        kv_bytes=327_680.0 * (10_000 - hit_tokens),
        need_bytes=np.full(N, 3.2768e9),
        iteration_base_s=np.full(N, 0.0125) if alike else random.choice([0.0, 0.0125], N),
        iteration_per_request_s=np.full(N, 1e-4) if alike else random.choice([0.0, 1e-4], N),
        capacity_bytes=np.full(N, 200e9),
        prompts_s=None if alike or draw(st.booleans()) else random.choice([0.0, 0.5, 10.0], N),
    )


def costs_of(links: LinkModel, source: int) -> NetworkCosts:
    in_flight = np.zeros(5, dtype=np.int64)
    return NetworkCosts(links.tier[source], links.tier_bytes_per_s, LATENCY_S, np.zeros(5), in_flight)


def choice_of(table: InFlight, source: int, pool: Candidates, starts_s: float = 0.0, **spec: float) -> Choice | Reject:
    """Choose with all instances as candidates, in the table's order."""
    policy = Foresight(ForesightSpec(**spec), table.network_view(table.now, source, ALL, starts_s))  # type: ignore[arg-type]
    return policy.choose(REQUEST, pool, costs_of(table.links, source), 0)


sources = st.integers(0, N - 1)
widths = st.integers(0, 4)


@given(tables(), sources, candidate_sets(), st.sampled_from([0.0, 0.3]))
def test_the_what_if_is_the_fluid_model(
    in_flight_state: tuple[InFlight, ReferenceTable], source: int, pool: Candidates, starts_s: float
) -> None:
    """Transfer time and imposed delay of every simulated candidate equal the definition."""
    table, slow = in_flight_state
    choice = choice_of(table, source, pool, starts_s, width=N, near_max=1_000)
    assume(isinstance(choice, Choice))
    assert isinstance(choice, Choice)
    order, capacity = list(slow.left), table.links.capacity_bytes_per_s.tolist()
    paths, held = [slow.paths[k] for k in order], [slow.ceilings[k] for k in order]
    left, starts = [slow.left[k] for k in order], [0.0] * len(order)
    base = fill_to_the_end(paths, [1.0] * len(order), capacity, left, starts, held)
    for index in np.flatnonzero(choice.terms.parts["simulated"]).tolist():
        kv_bytes, path = float(pool.kv_bytes[index]), path_of(table.links, source, index)
        if not path or not kv_bytes:
            continue
        after = fill_to_the_end(
            [*paths, path],
            [1.0] * (len(order) + 1),
            capacity,
            [*left, kv_bytes],
            [*starts, starts_s],
            [*held, slow.ceiling(source, index)],
        )
        seconds = after[-1] - starts_s + LATENCY_S[table.links.tier[source, index]]
        assert choice.terms.parts["transfer_s"][index] == pytest.approx(seconds, rel=1e-6)
        imposed_s = max(sum(after[:-1]) - sum(base), 0.0)
        assert choice.terms.parts["imposed_s"][index] == pytest.approx(imposed_s, rel=1e-5, abs=1e-6)


@given(tables(), sources, candidate_sets(), widths, st.integers(1, 20))
def test_the_choice_follows_its_terms(
    in_flight_state: tuple[InFlight, ReferenceTable], source: int, pool: Candidates, width: int, near_max: int
) -> None:
    """The first cheapest candidate with room is chosen. Costs and parts are finite and not negative, and the parts of a
    simulated candidate add up to its cost. No transfer time is below that of an idle network. The inputs are not
    modified."""
    table, slow = in_flight_state
    given = [getattr(pool, item.name) for item in fields(pool) if item.name != "names"]
    given_arrays = [array for array in given if array is not None]
    before = [array.copy() for array in given_arrays]
    choice = choice_of(table, source, pool, width=width, near_max=near_max)
    assert all((array == copy).all() for array, copy in zip(given_arrays, before, strict=True))
    assert table.left_bytes(table.now) == pytest.approx(slow.left, rel=1e-6)
    assert table.rates_bytes_per_s == pytest.approx(slow.rates, rel=1e-6)
    has_room = (pool.need_bytes <= pool.free_kv_bytes).tolist()
    assert isinstance(choice, Choice) == any(has_room)
    if isinstance(choice, Reject):
        return
    cost, parts = choice.terms.cost, choice.terms.parts
    assert choice.terms.feasible.tolist() == has_room
    assert all(np.isfinite(part).all() and (part >= 0).all() for part in (cost, *parts.values()))
    assert choice.index == min((value, index) for index, value in enumerate(cost.tolist()) if has_room[index])[1]
    summed = ("transfer_s", "imposed_s", "prompts_s", "wait_s", "step_s", "slot_s")
    whole = np.sum([parts[name] for name in summed if name in parts], axis=0)
    if pool.prompts_s is not None:
        assert parts["prompts_s"].tolist() == np.maximum(pool.prompts_s - parts["transfer_s"], 0.0).tolist()
    sure = parts["simulated"] == 1 if width else np.ones(N, dtype=np.bool_)
    assert cost[sure] == pytest.approx(whole[sure], rel=1e-12)
    assert (cost >= whole * (1 - 1e-12)).all()
    assert int(parts["simulated"].sum()) <= width
    assert not width or parts["simulated"][choice.index] == 1
    assert parts["tier"].tolist() == table.links.tier[source].tolist()
    nic = (table.links.tier[source] > 0) * pool.kv_bytes / NIC
    assert (parts["transfer_s"] >= nic * (1 - 1e-9)).all()


@given(tables(), sources, candidate_sets(), widths, st.sampled_from([2.0**-20, 4.0, 2.0**20]))
def test_the_choice_is_invariant_under_scaling_of_bytes(
    in_flight_state: tuple[InFlight, ReferenceTable], source: int, pool: Candidates, width: int, scale: float
) -> None:
    """If all bytes and bandwidths are multiplied by the same power of two, choice and cost stay the same."""
    table, slow = in_flight_state
    scaled = fabric(table.links.hashed_paths, scale, uplinks=len(table.links.cables) > 2 * N)
    large = InFlight(scaled)
    small = InFlight(table.links)
    for number, (kv_bytes, path) in enumerate(zip(slow.size.values(), slow.paths.values(), strict=True)):
        ends = (
            int(np.flatnonzero(scaled.attached[:, 0] == path[0])[0]),
            int(np.flatnonzero(scaled.attached[:, 1] == path[1])[0]),
        )
        small.started(0.0, number, *ends, kv_bytes)
        large.started(0.0, number, *ends, kv_bytes * scale)
    bigger = replace(
        pool,
        free_kv_bytes=pool.free_kv_bytes * scale,
        kv_bytes=pool.kv_bytes * scale,
        need_bytes=pool.need_bytes * scale,
    )
    first, second = choice_of(small, source, pool, width=width), choice_of(large, source, bigger, width=width)
    if isinstance(first, Choice):
        assert isinstance(second, Choice)
        assert (first.index, first.terms.cost.tolist()) == (second.index, second.terms.cost.tolist())
    else:
        assert isinstance(second, Reject)


@given(candidate_sets(alike=True), sources, widths, st.booleans(), st.floats(0, 1))
def test_without_network_bottlenecks_foresight_chooses_as_cla(
    pool: Candidates, source: int, width: int, sighted: bool, starts_s: float
) -> None:
    """With equal candidates over equal, unshared paths, the choice equals that of the cache and load score."""
    flat: TierArray = np.full((N, N), 3, dtype=np.int8)
    links = LinkModel.of_tiers(flat, np.full(5, 1e10))
    costs = costs_of(links, source)
    network_view = InFlight(links).network_view(0.0, source, ALL, starts_s) if sighted else None
    mine = Foresight(ForesightSpec(width=width), network_view).choose(REQUEST, pool, costs, 0)
    cla = CacheAndLoadAware().choose(REQUEST, pool, costs, 0)
    if isinstance(cla, Choice):
        assert isinstance(mine, Choice)
        assert mine.index == cla.index
    else:
        assert isinstance(mine, Reject)


@given(candidate_sets(), sources, st.floats(0, 1e6), st.floats(0, 4), st.floats(1, 5_000))
def test_the_cost_of_delayed_tokens_is_bounded_by_the_transfer(
    pool: Candidates, source: int, weight: float, transfers: float, answer: float
) -> None:
    """For any weight, the chosen candidate costs at most `answer_transfers` more transfers than the nearest one."""
    spec = ForesightSpec(
        answer_weight=weight,
        answer_transfers=transfers,
        output_tokens=answer,
        slot_weight=0.0,
        step_weight=0.0,
        wait_weight=0.0,
    )
    pool = msgspec.structs.replace(pool, prompts_s=None)
    choice = Foresight(spec).choose(REQUEST, pool, costs_of(fabric(), source), 0)
    if isinstance(choice, Choice):
        own_s = choice.terms.parts["transfer_s"] + choice.terms.parts["step_s"]
        nearest = choice.terms.parts["transfer_s"] * (1 + transfers) + choice.terms.parts["step_s"]
        assert own_s[choice.index] <= nearest.min(where=choice.terms.feasible, initial=math.inf) * (1 + 1e-9)


@given(tables(), candidate_sets(alike=True), sources, widths)
def test_with_an_unbounded_network_load_decides(
    in_flight_state: tuple[InFlight, ReferenceTable], pool: Candidates, source: int, width: int
) -> None:
    """For any transfers in flight, with links a million times faster the least loaded candidate with room is chosen."""
    table = InFlight(fabric(uplinks=len(in_flight_state[0].links.cables) > 2 * N, scale=1e12))
    for number, kv_bytes in in_flight_state[1].size.items():
        table.started(0.0, number, number % N, (5 * number + 7) % N, kv_bytes)
    policy = Foresight(ForesightSpec(width=width), table.network_view(0.0, source, ALL))
    flat = replace(costs_of(table.links, source), latency_s=np.zeros(5))
    choice, load = policy.choose(REQUEST, pool, flat, 0), pool.batch + pool.queued
    if isinstance(choice, Choice):
        assert load[choice.index] == load[pool.need_bytes <= pool.free_kv_bytes].min()


@given(tables(), sources, candidate_sets())
def test_closed_form_and_simulation_agree_on_an_idle_network(
    in_flight_state: tuple[InFlight, ReferenceTable], source: int, pool: Candidates
) -> None:
    """With nothing in flight the closed form and the fluid model agree."""
    idle = InFlight(in_flight_state[0].links)
    closed, fluid = choice_of(idle, source, pool, width=0), choice_of(idle, source, pool, width=4)
    if isinstance(closed, Choice):
        assert isinstance(fluid, Choice)
        assert fluid.index == closed.index
        assert fluid.terms.cost == pytest.approx(closed.terms.cost, rel=1e-12)


@given(st.floats(1e6, 1e12), st.floats(0, 300), st.sampled_from([1, 2, 4, 8]), st.floats(0, 1))
def test_the_collision_model_equals_the_expected_value(cable: float, rivals: float, hashed: int, share: float) -> None:
    """The value uses the expected time on the fullest of h cables, limited where nothing is left; it never exceeds h
    idle cables."""
    rate = collided(cable, rivals, hashed, share * cable)
    assert rate == pytest.approx(hashed_bytes_per_s(cable, rivals, hashed, share * cable), rel=1e-6)
    assert rate <= hashed * cable * (1 + 1e-12)


ends = st.lists(st.tuples(st.sampled_from([1, 2, 3, 4]), st.floats(1e-3, 1e3), st.floats(0, 1)), max_size=40)


@given(ends)
def test_learned_factors_stay_within_their_bounds(transfers: list[tuple[int, float, float]]) -> None:
    """The factor is also between 1 and the ratios of the transfers, and correct predictions do not change it."""
    learned = LearnedCapacity(ForesightSpec())
    for tier, ratio, limited in transfers:
        learned.ended(tier, 1e9 * ratio, 1e9, 1e9 * limited)
        assert ((learned.factor >= 0.05) & (learned.factor <= 8.0)).all()
    assert learned.factor[0] == 1
    true = LearnedCapacity(ForesightSpec())
    for tier, _, limited in transfers:
        true.ended(tier, 1e9, 1e9, 1e9 * limited)
    assert true.factor.tolist() == [1.0] * 5


observation = st.tuples(
    st.floats(0, 90),
    st.sampled_from([1, 2, 3, 4]),
    st.floats(1e-3, 1e3),
    st.floats(0, 1),
    st.booleans(),
    st.floats(0, 600),
)


@given(st.lists(observation, max_size=30), st.floats(0, 600))
def test_reading_learned_values_changes_nothing(
    observations: list[tuple[float, int, float, float, bool, float]], later_s: float
) -> None:
    """A reader sees the values that a decision would use, to the last digit, with the number of transfers used and
    their age."""
    watched, alone, at = LearnedCapacity(ForesightSpec()), LearnedCapacity(ForesightSpec()), 0.0
    last: dict[int, list[float]] = {1: [], 2: [], 3: [], 4: []}
    for step_s, tier, ratio, limited, reads, ahead_s in observations:
        at += step_s
        for learned in (watched, alone):
            learned.grown_old(at)
            learned.ended(tier, 1e9 * ratio, 1e9, 1e9 * limited)
        if reads:
            watched.seen(at + ahead_s)
        if tier == 1 or limited > 0.5 or math.log(ratio) < -0.2:
            last[tier].append(at)
    seen = watched.seen(at + later_s)
    assert watched.factor.tolist() == alone.factor.tolist()
    alone.grown_old(at + later_s)
    assert [tier.factor for tier in seen] == alone.factor.tolist()
    for tier, times in last.items():
        assert seen[tier].transfers == len(times)
        assert seen[tier].age_s == (math.floor(at + later_s) - math.floor(times[-1]) if times else None)
        assert 0 <= seen[tier].weight <= min(len(times), 10)
    assert (seen[0].factor, seen[0].transfers) == (1.0, 0)


@given(tables(), sources, candidate_sets(), ends, st.floats(0, 0.99))
def test_a_single_transfer_has_the_rate_that_a_decision_expects(
    in_flight_state: tuple[InFlight, ReferenceTable],
    source: int,
    pool: Candidates,
    transfers: list[tuple[int, float, float]],
    others: float,
) -> None:
    """With nothing in flight, this holds for any learned factors and any other traffic."""
    idle, congestion = InFlight(in_flight_state[0].links), np.array([0.0, 0.0, 1.0, 0.5, 0.1]) * others
    for tier, ratio, limited in transfers:
        idle.learned.ended(tier, 1e9 * ratio, 1e9, 1e9 * limited)
    factor = idle.learned.factor.copy()
    rates = [idle.uncontended_bytes_per_s(source, target, congestion, factor) for target in range(N)]
    idle.congested(0.0, congestion)
    choice = choice_of(idle, source, pool, width=2)
    if isinstance(choice, Choice):
        moved = pool.kv_bytes > 0
        assert choice.terms.parts["pace_bytes_per_s"][moved] == pytest.approx(np.array(rates)[moved], rel=1e-9)


@given(st.integers(1, 40), st.floats(0.25, 4.0), st.integers(1, 4), st.booleans())
def test_learned_factors_never_overshoot_the_true_factor(together: int, truth: float, rounds: int, rack: bool) -> None:
    """Each path, or each NIC in a rack, carries a given factor of the predicted rate, for any number of transfers that
    measure it at once."""
    tier: TierArray = np.full((2 * together, 2 * together), 1 if rack else 3, dtype=np.int8)
    nic = 1e9 if rack else 1e11
    table, now = InFlight(LinkModel.of_tiers(tier, np.full(5, 1e9), nic_bytes_per_s=nic)), 0.0
    for _ in range(rounds):
        for number in range(together):
            table.started(now, number, number, together + number, 1e9)
        now += 1.0 / truth
        for number in range(together):
            table.finished(now, number)
        factor = float(table.learned.factor[1 if rack else 3])
        assert min(truth, 1.0) * (1 - 1e-9) <= factor <= max(truth, 1.0) * (1 + 1e-9)


@given(tables(), st.lists(candidate_sets(), min_size=3, max_size=3), st.lists(st.floats(0, 5), min_size=3, max_size=3))
def test_the_pair_is_the_cheapest_of_those_simulated(
    in_flight_state: tuple[InFlight, ReferenceTable], pools: list[Candidates], start_s: list[float]
) -> None:
    """With every prefill instance simulated, the pair is the cheapest of all; it is rejected only if no instance has
    room."""
    table, spec = in_flight_state[0], ForesightSpec(joint_width=3)
    nothing = np.zeros(3, dtype=np.int64)
    prefill = PrefillCandidates(("p0", "p1", "p2"), np.array(start_s), nothing, np.zeros(3), None)
    paths = [
        JointPath(pool, costs_of(table.links, source), table.network_view(table.now, source, ALL, start_s[source]))
        for source, pool in enumerate(pools)
    ]
    pair = ForesightJoint(spec).choose(REQUEST, prefill, paths.__getitem__, 0)
    choices = [
        Foresight(spec, path.network_view, at_arrival=True).choose(REQUEST, path.candidates, path.costs, 0)
        for path in paths
    ]
    paid = [
        (start_s[source] + float(choice.terms.cost[choice.index]), source)
        for source, choice in enumerate(choices)
        if isinstance(choice, Choice)
    ]
    assert isinstance(pair, Pair) == bool(paid)
    if isinstance(pair, Pair):
        assert (float(pair.prefill.terms.cost[pair.prefill.index]), pair.prefill.index) == min(paid)
        chosen = choices[pair.prefill.index]
        assert isinstance(chosen, Choice)
        assert pair.decode.index == chosen.index
        msgspec.json.encode({part: values.tolist() for part, values in pair.prefill.terms.parts.items()})
