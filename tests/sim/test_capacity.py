"""Capacity of links over time: bursts of other traffic, cuts and fluctuation, each determined by the seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.sim.network.capacity import LinkCapacities, links_named
from kvroute.sim.network.transfers import Fabric
from kvroute.sim.settings import Background, CapacityChange, Fluctuation, SimSpec, WanTransport
from kvroute.topology import parse
from kvroute.types import CROSS_DATACENTER, InputError

CLUSTER = parse("""
name: sites
datacenters: [{name: away}, {name: home}]
racks:
  - {name: rack0, datacenter: away, uplinks: {count: 2, capacity: 100 Gbps}}
  - {name: rack1, datacenter: home, uplinks: {count: 2, capacity: 100 Gbps}}
nodes:
  - {name: node0, rack: rack0, gpus: 4, nics: {compute: {count: 4, capacity: 100 Gbps}}}
  - {name: node1, rack: rack1, gpus: 4, nics: {compute: {count: 4, capacity: 100 Gbps}}}
wan: [{from: away, to: home, count: 2, capacity: 10 Gbps, latency: 5 ms}]
timing: {default: {prefill: {kind: linear, per_token: 90 us}, decode: {base: 12 ms}}}
defaults: {model: llama-3-8b, tp: 4, kv_capacity: 100 GB}
instances:
  - {name: p, role: prefill, gpus: "node0:0-3"}
  - {name: d, role: decode, gpus: "node1:0-3"}
""")
OUT = links_named(CLUSTER, "away to home")
BACK = links_named(CLUSTER, "home to away")
BURSTS = Background(per_tier=(0, 0.2, 0.2, 0.2, 0.2), burst_per_tier=(0, 0, 0.5, 0.5, 0), burst_every_s=2.0)


def capacity(
    background: Background | None = None, seed: int = 0, *changes: CapacityChange, moves: tuple[Fluctuation, ...] = ()
) -> LinkCapacities:
    """Return the capacity of the two sites."""
    return LinkCapacities(CLUSTER, background or Background(), seed, changes=changes, fluctuations=moves)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 100))
def test_bursts_alternate_and_depend_only_on_the_seed(seed: int) -> None:
    """Bursts alternate on and off and the share follows; times depend on the seed only and have the given mean."""
    one, two = capacity(BURSTS, seed), capacity(BURSTS, seed)
    times = []
    for turn in range(150):
        assert one.next_s == two.next_s
        times.append(one.next_s)
        before = [0, 0.2, 0.7, 0.7, 0.2] if turn % 2 else [0, 0.2, 0.2, 0.2, 0.2]
        assert one.background_share().tolist() == one.missing_per_tier().tolist() == before
        one.step()
        two.step()
    assert np.diff([0.0, *times]).mean() == pytest.approx(2.0, rel=0.5)


@given(
    st.lists(
        st.builds(
            CapacityChange,
            at_s=st.floats(0, 100),
            link=st.sampled_from(["wan", "away to home", "home to away"]),
            share=st.sampled_from([0.0, 0.3, 1.0]),
        ),
        max_size=8,
    ),
    st.sampled_from([Background(), BURSTS, Background.uniform(0.5)]),
    st.integers(0, 3),
)
def test_capacity_follows_the_last_change_minus_background_traffic(
    changes: list[CapacityChange], background: Background, seed: int
) -> None:
    """At any time, the operator's telemetry, per link and per tier, is the missing part of the nominal capacity."""
    truth = capacity(background, seed, *changes)
    whole = CLUSTER.capacity_bytes_per_s
    for _ in range(len(changes) + 5):
        if truth.next_s == float("inf"):
            break
        now = truth.next_s
        while truth.next_s == now:
            truth.step()
        left = np.ones(len(whole))
        for change in sorted(changes, key=lambda change: change.at_s):
            if change.at_s <= now:
                left[links_named(CLUSTER, change.link)] = change.share
        others = np.array([truth.background_share()[link.tier] for link in CLUSTER.links])
        assert truth.bytes_per_s == pytest.approx(whole * left * (1 - others))
        assert truth.missing_per_link() == pytest.approx(1 - left * (1 - others), abs=1e-12)
        wan = list(CLUSTER.links_of_tier(CROSS_DATACENTER))
        expected = 1 - truth.bytes_per_s[wan].sum() / whole[wan].sum()
        assert truth.missing_per_tier()[CROSS_DATACENTER] == pytest.approx(expected, abs=1e-12)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.floats(0.1, 1.0))
def test_fluctuation_depends_only_on_the_seed_and_stays_within_bounds(seed: int, share_min: float) -> None:
    """All links of one name change together, at random times with the given mean, and no others do."""
    moves = (Fluctuation(link="away to home", every_s=3.0, share_min=share_min, share_max=1.0),)
    one, two = capacity(None, seed, moves=moves), capacity(None, seed, moves=moves)
    times, shares = [0.0], []
    for _ in range(100):
        share = one.bytes_per_s / CLUSTER.capacity_bytes_per_s
        assert (share == two.bytes_per_s / CLUSTER.capacity_bytes_per_s).all()
        assert share[OUT[0]] == share[OUT[1]]
        assert (np.delete(share, OUT) == 1.0).all()
        shares.append(float(share[OUT[0]]))
        times.append(one.next_s)
        one.step()
        two.step()
    assert share_min * (1 - 1e-12) <= min(shares) <= max(shares) <= 1.0
    assert share_min > 0.99 or np.ptp(shares) > 0.5 * (1.0 - share_min)
    assert np.diff(times).mean() == pytest.approx(3.0, rel=0.5)


def test_names_of_links() -> None:
    """A name is one link, one direction between two sites or switches, or all links between datacenters."""
    assert [CLUSTER.links[i].name for i in OUT] == ["away to home #0 up", "away to home #1 up"]
    assert sorted([*OUT, *BACK]) == links_named(CLUSTER, "wan").tolist()
    assert links_named(CLUSTER, "away to home #1 up").tolist() == [OUT[1]]
    assert len(links_named(CLUSTER, "rack0 to away")) == 2
    with pytest.raises(
        InputError, match="no link 'moon'; use the name of a link or one of wan, away to home, home to away"
    ):
        links_named(CLUSTER, "moon")


def test_a_cut_is_permanent_only_without_a_later_change() -> None:
    """A change of all links ends the cut of one."""
    cut = CapacityChange(at_s=5.0, link="away to home #1 up", share=0.0)
    assert capacity(None, 0, cut).cut_for_good().tolist() == [OUT[1]]
    assert not len(capacity(None, 0, CapacityChange(at_s=9.0, link="wan", share=0.1), cut).cut_for_good())
    assert len(capacity(None, 0, CapacityChange(at_s=4.0, link="wan", share=1.0), cut).cut_for_good()) == 1


def fabric(wan: WanTransport | None, *changes: CapacityChange) -> Fabric:
    """Return the links of the two sites."""
    return Fabric(CLUSTER, capacity(None, 0, *changes), 0, wan)


@given(st.integers(1, 40), st.sampled_from([2**16, 2**20, 2**24]), st.sampled_from([0.0, 1e-4, 1e-2]))
def test_connections_fill_the_link_or_reach_their_ceilings(connections: int, window: int, loss: float) -> None:
    """One connection is limited by its window or its loss per round trip, n by n times that, up to the drawn links."""
    wan = WanTransport(connections=connections, window_bytes=window, loss=loss)
    links = fabric(wan)
    links.send(0, CLUSTER.index("p"), CLUSTER.index("d"), 1e9)
    ceiling = wan.ceiling_bytes_per_s(CLUSTER.latency_s(CLUSTER.index("p"), CLUSTER.index("d")))
    rates = links.network.link_rate_bytes_per_s
    drawn = [rates[link] for link in OUT]
    assert all(rate <= 1.25e9 * (1 + 1e-9) for rate in drawn)
    if connections * ceiling <= 1.25e9:
        assert sum(drawn) == pytest.approx(connections * ceiling)
    assert sum(drawn) <= connections * ceiling * (1 + 1e-9)
    links.advance(links.next_finish_s())
    while links.next_finish_s() < float("inf"):
        links.advance(links.next_finish_s())
    assert sum(links.network.link_bytes[OUT]) == pytest.approx(1e9)


def test_one_connection_is_slower_than_the_link_and_eight_fill_it() -> None:
    """4 MiB per 10.03 ms are 3.35 Gbps per connection: 8 would need 26.8 Gbps, and the links have at most 20."""
    ends_s = {}
    for connections in (1, 8):
        links = fabric(WanTransport(connections=connections))
        links.send(0, CLUSTER.index("p"), CLUSTER.index("d"), 1.25e9)
        while links.next_finish_s() < float("inf"):
            ends_s[connections] = links.next_finish_s()
            links.advance(ends_s[connections])
    rtt_s = 2 * CLUSTER.latency_s(CLUSTER.index("p"), CLUSTER.index("d"))
    assert ends_s[1] == pytest.approx(1.25e9 * rtt_s / (4 * 2**20))
    assert 0.5 <= ends_s[8] < ends_s[1] / 3


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (lambda: CapacityChange(at_s=-1.0, link="wan", share=0.5), "changes.at_s"),
        (lambda: CapacityChange(at_s=1.0, link="wan", share=1.5), "changes.share"),
        (lambda: Fluctuation(link="wan", every_s=0.0, share_min=0.5), "fluctuations.every_s"),
        (lambda: Fluctuation(link="wan", every_s=1.0, share_min=0.0), "fluctuations move between"),
        (lambda: WanTransport(connections=0), "wan.connections"),
        (lambda: WanTransport(window_bytes=0.0), "wan.window_bytes"),
        (lambda: WanTransport(mss_bytes=float("nan")), "wan.mss_bytes"),
        (lambda: WanTransport(loss=1.0), "wan.loss"),
        (lambda: SimSpec(stall_s=0.0), "stall_s"),
        (lambda: SimSpec(review_s=float("inf")), "review_s"),
        (lambda: SimSpec(role_switch_s=-1.0), "role_switch_s"),
    ],
    ids=lambda wrong: wrong if isinstance(wrong, str) else "",
)
def test_invalid_wan_settings_are_named(wrong: object, problem: str) -> None:
    """The error names the field in one sentence."""
    assert callable(wrong)
    with pytest.raises(InputError, match=problem):
        wrong()
