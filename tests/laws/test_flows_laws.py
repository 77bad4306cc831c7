"""Laws of the flow network, for any network, flows and changes."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.flows import FlowNetwork, fill_to_the_end, max_min_rates
from kvroute.types import InputError

LAW = settings(max_examples=40, deadline=None)
CAPACITIES = st.lists(st.sampled_from([1e9, 2.5e9, 1e10]) | st.floats(1e3, 1e12), min_size=1, max_size=8)


@dataclass(frozen=True, slots=True)
class Case:
    """A network and flows for it, one entry per flow."""

    capacities: tuple[float, ...]
    paths: tuple[tuple[int, ...], ...]
    weights: tuple[float, ...]
    sizes: tuple[float, ...]
    starts_s: tuple[float, ...]
    ceilings: tuple[float, ...]

    def network(self) -> FlowNetwork:
        return FlowNetwork(np.array(self.capacities))

    def started(self) -> FlowNetwork:
        """Return the network with all flows started at time 0."""
        net = self.network()
        for flow in range(len(self.paths)):
            self.start(net, flow)
        return net

    def start(self, net: FlowNetwork, flow: int) -> None:
        ceiling = self.ceilings[flow]
        net.start(flow, self.paths[flow], self.sizes[flow], self.weights[flow], ceiling_bytes_per_s=ceiling)


@st.composite
def cases(draw: st.DrawFn, flows_max: int = 25) -> Case:
    capacities = draw(CAPACITIES)
    links = st.lists(st.integers(0, len(capacities) - 1), min_size=1, max_size=12)
    flow = st.tuples(
        links,
        st.sampled_from([1.0, 1.0, 2.0]) | st.floats(0.1, 10.0),
        st.sampled_from([1.0, 1e6, 1e9, 1e15]) | st.floats(1.0, 1e15),
        st.sampled_from([0.0, 0.0, 1.0]) | st.floats(0.0, 20.0),
        st.sampled_from([math.inf, math.inf, 1e9]) | st.floats(1e3, 1e10),
    )
    flows = draw(st.lists(flow, min_size=1, max_size=flows_max))
    paths, weights, sizes, starts_s, ceilings = zip(*flows, strict=True)
    return Case(tuple(capacities), tuple(map(tuple, paths)), weights, sizes, starts_s, ceilings)


def _run(net: FlowNetwork) -> dict[int, float]:
    """Advance to the end; return the finish times by flow."""
    ends_s: dict[int, float] = {}
    while (upcoming := net.next_finish()) is not None:
        finished = net.advance(upcoming[0])
        assert finished[0] == upcoming[1], "what was announced finishes first"
        ends_s |= dict.fromkeys(finished, net.now)
    return ends_s


def _check_bottlenecks(
    net: FlowNetwork, paths: dict[int, tuple[int, ...]], weights: dict[int, float], ceilings: dict[int, float]
) -> None:
    """Check that every flow is at its ceiling or has a full link where no flow has more per weight: necessary and
    sufficient for max-min."""
    capacity, load = net.capacity_bytes_per_s, net.link_rate_bytes_per_s
    assert (load <= capacity * (1.0 + 1e-9)).all(), "no link above capacity"
    share = {flow: net.rate(flow) / weights[flow] for flow in paths}
    top = np.zeros(len(capacity))
    for flow, path in paths.items():
        for link in path:
            top[link] = max(top[link], share[flow])
    for flow, path in paths.items():
        assert net.rate(flow) <= ceilings[flow] * (1.0 + 1e-9)
        assert net.rate(flow) >= ceilings[flow] * (1.0 - 1e-9) or any(
            load[link] >= capacity[link] * (1.0 - 1e-9) and share[flow] >= top[link] * (1.0 - 1e-9) for link in path
        ), f"flow {flow} could go faster"


@LAW
@given(cases(), st.floats(0.1, 10.0), st.booleans())
def test_a_set_of_flows_equals_its_flows_one_by_one(case: Case, units: float, staged: bool) -> None:
    """Beside a flow that is there already, or starts at the same time: the same ends, and the same bytes on links."""
    each, together = case.network(), case.network()
    for net in (each, together):
        net.start(1_000, case.paths[0], 3e8)
        if not staged:
            net.advance(0.0)
    for flow, path in enumerate(case.paths):
        each.start(flow, path, case.sizes[flow] * units, ceiling_bytes_per_s=case.ceilings[flow])
    together.start_set(-1, together.prepared(case.paths, case.sizes, case.ceilings), units)
    assert together.active == (1_000, *(-1 for _ in case.paths))
    np.testing.assert_array_equal(together.link_rate_bytes_per_s, each.link_rate_bytes_per_s)
    while (upcoming := each.next_finish()) is not None:
        same = together.next_finish()
        assert same is not None
        assert same[0] == upcoming[0]
        ended = [flow if flow == 1_000 else -1 for flow in each.advance(upcoming[0])]
        assert together.advance(upcoming[0]) == ended
        np.testing.assert_array_equal(together.link_bytes, each.link_bytes)
    assert together.next_finish() is None


def test_a_set_needs_a_number_and_links_of_its_own() -> None:
    net = FlowNetwork(np.array([1e9]))
    flows = net.prepared([(0,)], [1.0], [math.inf])
    net.start(3, (0,), 1e9)
    with pytest.raises(InputError, match="already in flight"):
        net.start_set(3, flows, 1.0)
    with pytest.raises(InputError, match="outside 0 to 0"):
        net.prepared([(1,)], [1.0], [math.inf])


@LAW
@given(cases())
def test_rates_equal_progressive_filling(case: Case) -> None:
    """The kernel's rates equal the definition's, relative 1e-9."""
    net = case.started()
    expected = max_min_rates(case.paths, case.weights, case.capacities, case.ceilings)
    assert [net.rate(flow) for flow in range(len(case.paths))] == pytest.approx(expected, rel=1e-9, abs=0.0)


@LAW
@given(cases())
def test_completion_times_equal_the_reference(case: Case) -> None:
    """Also over time, with starts and finishes, every flow takes as long as in a simple event loop."""
    expected = fill_to_the_end(case.paths, case.weights, case.capacities, case.sizes, case.starts_s, case.ceilings)
    net = case.network()
    ends_s: dict[int, float] = {}
    for flow in sorted(range(len(case.paths)), key=lambda flow: case.starts_s[flow]):
        while (upcoming := net.next_finish()) is not None and upcoming[0] <= case.starts_s[flow]:
            ends_s |= dict.fromkeys(net.advance(upcoming[0]), upcoming[0])
        net.advance(case.starts_s[flow])
        case.start(net, flow)
    ends_s |= _run(net)
    for flow, end_s in ends_s.items():
        slack_s = 1e-9 * (expected[flow] - case.starts_s[flow]) + 4.0 * math.ulp(expected[flow])
        assert abs(end_s - expected[flow]) <= slack_s


@LAW
@given(st.integers(0, 2**32 - 1))
def test_every_flow_has_a_bottleneck_after_any_history(seed: int) -> None:
    """Starts, finishes, cancels and changes of capacities and ceilings in any order leave max-min rates, and time never
    goes back."""
    draw = random.Random(seed)
    capacities = [draw.choice([1.0, 2.0, draw.uniform(0.1, 50.0)]) for _ in range(draw.randint(1, 30))]
    net = FlowNetwork(np.array(capacities))
    paths: dict[int, tuple[int, ...]] = {}
    weights: dict[int, float] = {}
    ceilings: dict[int, float] = {}
    held = [0.0, 1.0, draw.uniform(0.1, 50.0), math.inf, math.inf]
    for flow in range(draw.randint(1, 80)):
        paths[flow] = tuple(draw.choices(range(len(capacities)), k=draw.randint(1, 9)))
        weights[flow] = draw.choice([1.0, 1.0, draw.uniform(0.2, 5.0)])
        ceilings[flow] = draw.choice(held)
        if draw.random() < 0.3:
            changed = draw.choice(list(paths)[:-1] or [flow])
            if changed != flow:
                ceilings[changed] = draw.choice(held)
                net.set_ceiling(changed, ceilings[changed])
        size = draw.choice([10.0, draw.uniform(1.0, 100.0)])
        net.start(flow, paths[flow], size, weights[flow], ceiling_bytes_per_s=ceilings[flow])
        if draw.random() < 0.3:
            net.set_capacity(draw.randrange(len(capacities)), draw.choice([0.0, 1.0, draw.uniform(0.1, 50.0)]))
        ended = []
        if draw.random() < 0.3:
            ended.append(draw.choice(net.active))
            net.cancel(ended[0])
        before_s = net.now
        if draw.random() < 0.7:
            ended += net.advance(before_s + draw.choice([0.0, 0.5, draw.expovariate(0.3)]))
        assert net.now >= before_s
        for left in ended:
            del paths[left]
        assert set(net.active) == set(paths)
        upcoming = net.next_finish()
        assert upcoming is None or upcoming[0] >= net.now
        _check_bottlenecks(net, paths, weights, ceilings)


@LAW
@given(cases())
def test_bytes_are_conserved(case: Case) -> None:
    """At the end, every link has carried exactly the bytes of the flows that use it; before, exactly the bytes that
    they sent."""
    net = case.started()
    upcoming = net.next_finish()
    assert upcoming is not None
    net.advance(upcoming[0] / 2.0)
    midway = np.zeros(len(case.capacities))
    for flow in net.active:
        assert 0.0 <= net.sent_bytes(flow) <= case.sizes[flow]
        midway[list(set(case.paths[flow]))] += net.sent_bytes(flow)
    assert net.link_bytes == pytest.approx(midway, rel=1e-9)
    assert len(_run(net)) == len(case.paths), "every flow finishes once"
    total = np.zeros(len(case.capacities))
    for path, size in zip(case.paths, case.sizes, strict=True):
        total[list(set(path))] += size
    assert net.link_bytes == pytest.approx(total, rel=1e-12)


@LAW
@given(cases(), st.floats(1.0, 100.0), st.data())
def test_more_bandwidth_never_slows_a_single_transfer(case: Case, factor: float, data: st.DataObject) -> None:
    """A single transfer takes its bytes over its narrowest link, and more capacity of any link does not lengthen it."""
    net, path, size = case.network(), case.paths[0], case.sizes[0]
    before_s = net.transfer_s(path, size)
    assert before_s == pytest.approx(size / min(case.capacities[link] for link in path), rel=1e-12)
    link = data.draw(st.sampled_from(path))
    net.set_capacity(link, case.capacities[link] * factor)
    assert net.transfer_s(path, size) <= before_s


@LAW
@given(cases(), st.randoms(use_true_random=False))
def test_order_of_simultaneous_starts_does_not_matter(case: Case, shuffled: random.Random) -> None:
    """Flows that start together have the same rates and finish times for any order of the calls."""
    order = list(range(len(case.paths)))
    shuffled.shuffle(order)
    other = case.network()
    for flow in order:
        case.start(other, flow)
    net = case.started()
    assert [net.rate(flow) for flow in order] == pytest.approx([other.rate(flow) for flow in order], rel=1e-9, abs=0.0)
    ends_s, other_s = _run(net), _run(other)
    assert [ends_s[flow] for flow in order] == pytest.approx([other_s[flow] for flow in order], rel=1e-9, abs=0.0)


@LAW
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20), st.floats(1.0, 1e12))
def test_weights_are_proportional_on_one_link(weights: list[float], capacity: float) -> None:
    """On a shared link, rates are proportional to the weights and fill the link."""
    net = FlowNetwork(np.array([capacity]))
    for flow, weight in enumerate(weights):
        net.start(flow, [0], 1e9, weight)
    expected = [capacity * weight / sum(weights) for weight in weights]
    assert [net.rate(flow) for flow in range(len(weights))] == pytest.approx(expected, rel=1e-9, abs=0.0)


@LAW
@given(cases(), st.floats(0.0, 1.0))
def test_cancel_returns_the_rest(case: Case, part: float) -> None:
    """Sent and remaining bytes add up to the size, and the other flows get the bandwidth of a cancelled flow."""
    net = case.started()
    upcoming = net.next_finish()
    assert upcoming is not None
    net.advance(upcoming[0] * part * 0.999)
    flow = net.active[0]
    sent = net.sent_bytes(flow)
    assert sent + net.cancel(flow) == pytest.approx(case.sizes[flow], rel=1e-12)
    rest = net.active
    held = [case.ceilings[k] for k in rest]
    expected = max_min_rates([case.paths[k] for k in rest], [case.weights[k] for k in rest], case.capacities, held)
    assert [net.rate(k) for k in rest] == pytest.approx(expected, rel=1e-9, abs=0.0)


@LAW
@given(cases(flows_max=12))
def test_what_if_equals_the_real_transfer_and_changes_nothing(case: Case) -> None:
    """`transfer_s` is the time that the flow then takes; the call changes nothing."""
    net, twin, last = case.network(), case.network(), len(case.paths) - 1
    for flow in range(last):
        case.start(net, flow)
        case.start(twin, flow)
    ceiling = case.ceilings[last]
    promised_s = net.transfer_s(case.paths[last], case.sizes[last], case.weights[last], ceiling_bytes_per_s=ceiling)
    assert (net.active, net.next_finish()) == (twin.active, twin.next_finish())
    case.start(net, last)
    assert _run(net)[last] == pytest.approx(promised_s, rel=1e-9)


@LAW
@given(cases(), st.lists(st.floats(0.0, 1.0), max_size=5))
def test_intermediate_advances_change_nothing(case: Case, stops: list[float]) -> None:
    """One long `advance` finishes the same flows in the same order as many short ones."""
    straight, stopping = case.started(), case.started()
    end_s = 2.0 * max(_run(case.started()).values())
    finished = straight.advance(end_s)
    piecewise = [flow for stop in [*sorted(stops), 1.0] for flow in stopping.advance(end_s * stop)]
    assert finished == piecewise
    assert sorted(finished) == list(range(len(case.paths)))


@LAW
@given(cases(), st.floats(0.0, 0.999), st.randoms(use_true_random=False))
def test_a_removed_ceiling_has_no_effect(case: Case, part: float, draw: random.Random) -> None:
    """If ceilings are set and removed at one instant, rates and later times are those of flows without ceilings."""
    free = replace(case, ceilings=(math.inf,) * len(case.paths))
    net, twin = free.started(), free.started()
    upcoming = net.next_finish()
    assert upcoming is not None
    for network in (net, twin):
        network.advance(upcoming[0] * part)
    for flow in draw.sample(net.active, len(net.active)):
        net.set_ceiling(flow, draw.choice([0.0, 1.0, 1e12]))
        if draw.random() < 0.5:
            net.next_finish()
    for flow in draw.sample(net.active, len(net.active)):
        net.set_ceiling(flow, math.inf)
    assert [net.rate(flow) for flow in net.active] == pytest.approx(
        [twin.rate(flow) for flow in twin.active], rel=1e-9, abs=0.0
    )
    ends_s, twin_s = _run(net), _run(twin)
    assert ends_s == pytest.approx(twin_s, rel=1e-9)
    assert net.link_bytes == pytest.approx(twin.link_bytes, rel=1e-9)
