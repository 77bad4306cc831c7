"""The dashboard's state: splits, rates, ring buffers and the map against simple models."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.control import ControlSpec
from kvroute.serve.observe.admin.state import (
    DECISIONS_MOST,
    LINGER_S,
    TICK_DECISIONS_MOST,
    TRANSFERS_SHOWN_MOST,
    DashboardState,
)
from kvroute.serve.observe.decision_view import CANDIDATES_MOST, judgement_of
from kvroute.serve.observe.layout import MapDomain
from kvroute.serve.observe.metrics.rates import RATE_S, EventRate
from kvroute.serve.observe.recent_requests import REQUESTS_MOST, WINDOW_S
from kvroute.serve.observe.view import GatewayStatus, InstanceLoad, Snapshot, TtftBreakdown
from kvroute.topology import Cluster, InstanceCounts, build, fat_tree, two_datacenters
from kvroute.types import Arrived, Decode, Offload, Prefill, PrefillFinished, Reject, Request, SwitchRole, Terms

CLUSTER = build(
    fat_tree(
        pods=2,
        racks_per_pod=2,
        nodes_per_rack=2,
        rack_uplinks=(8, 12.5e9),
        pod_uplinks=(8, 12.5e9),
        instances=InstanceCounts(prefill=4, decode=12),
    )
)
DECODES = [instance.name for instance in CLUSTER.instances if instance.role == "decode"]
PREFILLS = [instance.name for instance in CLUSTER.instances if instance.role == "prefill"]
short_s = st.floats(0, 5)
tokens = st.tuples(
    st.floats(0, 20),
    st.sampled_from(["netkv", "round-robin"]),
    st.sampled_from([None, 0, 1, 2, 3, 4]),
    st.floats(0, 1e9),
    st.tuples(short_s, short_s, short_s, short_s),
)


def _state(load: GatewayStatus | None = None) -> DashboardState:
    return DashboardState(CLUSTER, lambda: load or GatewayStatus(), policy="netkv", version="1.2")


def _decode(number: int, tier: int = 2) -> Decode:
    return Decode(number, PREFILLS[0], DECODES[0], tier, 1e9, 1e9, 0)


def test_the_map_names_the_tiers_that_the_cluster_has() -> None:
    """One datacenter has no tier between datacenters; with one instance in each node there is no tier within a node."""
    assert _state().snapshot(0.0).layout.tiers_present == (0, 1, 2, 3)
    whole_nodes = fat_tree(pods=1, racks_per_pod=2, nodes_per_rack=2, instances=InstanceCounts(prefill=2, decode=2))
    defaults = msgspec.structs.replace(whole_nodes.defaults, tp=8)
    cluster = build(msgspec.structs.replace(whole_nodes, defaults=defaults))
    state = DashboardState(cluster, GatewayStatus, policy="netkv", version="1.2")
    assert state.snapshot(0.0).layout.tiers_present == (1, 2)


@given(st.lists(tokens, max_size=60))
def test_statistics_per_policy_cover_the_last_minute(
    seen: list[tuple[float, str, int | None, float, tuple[float, ...]]],
) -> None:
    """Requests, percentiles, means and tiers per policy are recomputed from all requests while time passes."""
    state, at, entries = _state(), 0.0, []
    for step_s, policy, tier, kv_bytes, parts in seen:
        at += step_s
        entries.append((at, policy, tier, kv_bytes, parts))
        state.first_token(TtftBreakdown(*parts), at, tier=tier, kv_bytes=kv_bytes, policy=policy)
    splits = {split.policy: split for split in state.tick(at).splits}
    recent = [entry for entry in entries if entry[0] >= at - WINDOW_S]
    assert set(splits) == {policy for _, policy, *_ in recent}
    for policy, split in splits.items():
        own = [entry for entry in recent if entry[1] == policy]
        totals = [sum(parts) for *_, parts in own]
        assert split.requests == len(own)
        assert split.ttft_p50_s == pytest.approx(np.percentile(totals, 50), rel=1e-5, abs=1e-9)
        assert split.ttft_p90_s == pytest.approx(np.percentile(totals, 90), rel=1e-5, abs=1e-9)
        assert sum(split.part_mean_s.values()) == pytest.approx(sum(totals) / len(own), rel=1e-4, abs=1e-9)
        assert split.local == sum(tier is None for _, _, tier, _, _ in own)
        for tier in range(5):
            bytes_of_tier = [kv_bytes for _, _, where, kv_bytes, _ in own if where == tier]
            assert split.tier_requests[tier] == len(bytes_of_tier)
            assert split.tier_bytes[tier] == pytest.approx(sum(bytes_of_tier))


def test_a_non_streaming_response_counts_for_tiers_and_not_for_times() -> None:
    """A non-streaming response has no time to the first token; if there is no other request, the times are 0."""
    state = _state()
    state.whole_answer(1.0, tier=3, kv_bytes=5.0)
    [split] = state.snapshot(1.0).tick.splits
    assert (split.requests, split.streams, split.tier_requests[3], split.tier_bytes[3]) == (1, 0, 1, 5.0)
    assert split.ttft_p50_s == split.ttft_p90_s == sum(split.part_mean_s.values()) == 0.0
    state.first_token(TtftBreakdown(0.0, 0.2, 0.1), 1.0, tier=None)
    [split] = state.snapshot(1.0).tick.splits
    assert (split.requests, split.streams, split.local) == (2, 1, 1)
    assert split.ttft_p50_s == split.ttft_p90_s == pytest.approx(0.3)


def test_parts_of_ttft_keep_their_names() -> None:
    """Each part is shown under the name with which it was recorded, and the total is their sum."""
    state = _state()
    ttft = TtftBreakdown(0.01, 0.2, 0.03, 0.004)
    assert ttft.total_s == pytest.approx(0.244)
    state.first_token(ttft, 1.0, tier=None)
    [split] = state.tick(1.0).splits
    assert split.policy == "netkv"
    assert split.part_mean_s == {"queue": 0.01, "prefill": 0.2, "transfer": 0.03, "first_step": 0.004}
    assert split.part_p50_s == split.part_p90_s == split.part_mean_s


def test_percentiles_are_recomputed_once_a_second() -> None:
    """Two ticks within a second give the same values; later ones give new values."""
    state = _state()
    counts = []
    for at in (1.0, 1.5, 2.0):
        state.first_token(TtftBreakdown(0.1, 0.1, 0.1), at, tier=1)
        counts.append(state.tick(at).splits[0].requests)
    assert counts == [1, 1, 3]


def test_the_newest_requests_are_kept() -> None:
    """Beyond the limit, the oldest requests are dropped one by one."""
    state = _state()
    for number in range(REQUESTS_MOST + 10):
        state.first_token(TtftBreakdown(0.0, 0.0, 0.0 if number < 10 else 1.0), 1.0, tier=0)
    [split] = state.tick(1.0).splits
    assert split.requests == REQUESTS_MOST
    assert split.part_mean_s["transfer"] == 1.0


@given(st.lists(st.floats(0, 30), max_size=80), st.floats(0, 30))
def test_a_rate_is_the_mean_over_whole_seconds(steps_s: list[float], wait_s: float) -> None:
    """The rate is recomputed from all times; the current second does not count."""
    rate, times, at = EventRate(), [], 0.0
    for step_s in steps_s:
        at += step_s
        times.append(at)
        rate.add(at)
    now = int(at + wait_s)
    seconds = min(RATE_S, now)
    counted = sum(now - seconds <= int(time) < now for time in times)
    assert rate.per_s(at + wait_s) == pytest.approx(counted / seconds if seconds else 0.0)
    assert rate.total == len(times)


def test_rates_of_rejects_and_errors_are_separate() -> None:
    """Rejects and errors are separate: a 503 is a reject, a 4xx is neither."""
    state = _state()
    for _ in range(20):
        state.arrived(0.5)
    for code in (200, 404, 499, 500, 502, 503):
        state.finished(0.5, code)
    state.rejected(0.5)
    tick = state.tick(2.0)
    assert (tick.arrivals_per_s, tick.finishes_per_s, tick.errors_per_s, tick.rejects_per_s) == (10.0, 3.0, 1.0, 0.5)
    state.stream_failed(2.5)
    state.finished(2.5, 200)
    assert state.tick(3.0).errors_per_s == 1.0
    assert (tick.requests, tick.rejects) == (20, 1)


def test_a_transfer_is_shown_until_shortly_after_its_end() -> None:
    """A transfer is shown while it runs and shortly after it; the end of an unknown transfer has no effect."""
    state = _state()
    state.transfer_started(_decode(1, tier=3), 10.0, 0.25)
    [moving] = state.tick(10.1).transfers
    assert (moving.request_id, moving.tier, moving.took_s) == (1, 3, None)
    assert (moving.age_s, moving.expected_s) == (0.1, 0.25)
    instances = state.layout.instances
    assert (instances[moving.source].name, instances[moving.target].name) == (PREFILLS[0], DECODES[0])
    state.transfer_ended(1, 10.2)
    state.transfer_ended(1, 10.3)
    [finished] = state.tick(10.2).transfers
    assert (finished.id, finished.took_s) == (moving.id, 0.2)
    assert state.tick(10.2).transfers_in_flight == 0
    assert state.tick(10.2 + LINGER_S + 0.01).transfers == ()


def test_all_transfers_are_counted_and_a_bounded_number_is_shown() -> None:
    """The page draws a bounded number, the newest."""
    state = _state()
    for number in range(1000):
        state.transfer_started(_decode(number), 1.0)
    for number in range(500):
        state.transfer_ended(number, 1.5)
    tick = state.tick(1.6)
    assert tick.transfers_in_flight == 500
    assert len(tick.transfers) == TRANSFERS_SHOWN_MOST
    assert {transfer.request_id for transfer in tick.transfers} >= {999, 499}


def test_decisions_of_the_core_are_shown_with_their_terms() -> None:
    """The page receives a prefill, a decode and a reject of the core."""
    core, state = ControlSpec(decode="netkv").build(CLUSTER), _state()
    [prefill] = core.handle(Arrived(0.0, Request(id=7, input_tokens=4000)))
    [decode] = core.handle(PrefillFinished(0.4, 7))
    assert isinstance(prefill, Prefill)
    assert isinstance(decode, Decode)
    for at, decision in ((0.0, prefill), (0.4, decode), (0.5, Reject(8, "no room"))):
        state.decided(decision, at)
    first, second, third = state.tick(1.0).decisions
    assert (first.kind, first.chosen, first.others) == ("prefill", prefill.instance, 0)
    assert (second.kind, second.source, second.chosen) == ("decode", decode.source, decode.target)
    assert (second.tier, second.kv_bytes, second.unit, second.policy) == (decode.tier, decode.kv_bytes, "s", "netkv")
    assert len(second.candidates) + second.others == len(DECODES)
    assert second.candidates[0].name == decode.target
    best = second.candidates[0]
    assert best.cost == pytest.approx(sum(best.terms[part] for part in ("transfer_s", "queue_s", "decode_s")), rel=1e-4)
    assert (third.kind, third.reason, third.chosen) == ("reject", "no room", "")


def test_reasons_of_offloads_and_role_switches_are_shown() -> None:
    """A decision shows the reason and figures of an offload, and the new role of an instance in a role switch; other
    decisions show neither."""
    offload = Offload("away-site", "long", {"incremental_tokens": 9000.0, "away-site.finish_s": 1.5})
    offloaded = judgement_of(1, 0.0, "netkv", Prefill(1, "far0", offload=offload))
    switched = judgement_of(2, 0.0, "netkv", SwitchRole("decode0", "prefill"))
    unchanged = judgement_of(3, 0.0, "netkv", Prefill(1, "prefill0"))
    assert (offloaded.offload, offloaded.role) == (offload, None)
    assert (switched.offload, switched.role) == (None, "prefill")
    assert (unchanged.offload, unchanged.role) == (None, None)


@given(st.integers(1, 300), st.data())
def test_the_cheapest_candidates_and_the_chosen_one_are_shown(count: int, data: st.DataObject) -> None:
    """Feasible candidates come first, then by cost, then by order; the chosen one is shown even if a constraint chose a
    dearer one."""
    cost = np.array(data.draw(st.lists(st.integers(0, 50), min_size=count, max_size=count)), dtype=np.float64)
    feasible = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=np.bool_)
    names = tuple(f"d{k:03}" for k in range(count))
    chosen = data.draw(st.sampled_from(names))
    decision = Decode(1, "p", chosen, 1, 1.0, 1.0, 0, Terms(names, cost, feasible, {"queue_s": cost / 3}))
    shown = judgement_of(1, 0.0, "netkv", decision)
    ranked = sorted(names, key=lambda name: (not feasible[names.index(name)], cost[names.index(name)], name))
    expected = ranked[:CANDIDATES_MOST]
    if chosen not in expected:
        expected[-1] = chosen
    assert [candidate.name for candidate in shown.candidates] == expected
    assert shown.others == count - len(expected)
    for candidate in shown.candidates:
        at = names.index(candidate.name)
        assert (candidate.cost, candidate.feasible) == (cost[at], feasible[at])
        assert candidate.terms["queue_s"] == pytest.approx(cost[at] / 3, rel=1e-5)


def test_decisions_are_numbered_and_bounded() -> None:
    """A tick contains the newest ones, a snapshot all that are stored; numbers never repeat."""
    state = _state()
    for number in range(3 * DECISIONS_MOST):
        state.decided(Reject(number, "no room"), 1.0)
    most = 3 * DECISIONS_MOST
    assert [d.id for d in state.tick(1.0).decisions] == list(range(most - TICK_DECISIONS_MOST + 1, most + 1))
    assert [d.id for d in state.snapshot(1.0).tick.decisions] == list(range(most - DECISIONS_MOST + 1, most + 1))


def _leaves(place: MapDomain) -> Iterator[int]:
    yield from place.instances
    for child in place.children:
        yield from _leaves(child)


@pytest.mark.parametrize(
    "cluster",
    [CLUSTER, build(two_datacenters(prefill_nodes=3, local_prefill_nodes=1, decode_nodes=4))],
    ids=["fat-tree", "two-sites"],
)
def test_every_instance_is_on_the_map_once(cluster: Cluster) -> None:
    """The tree's leaves are the instances, by position."""
    state = DashboardState(cluster, GatewayStatus, policy="netkv", version="")
    assert sorted(_leaves(state.layout.root)) == list(range(len(state.layout.instances)))
    assert state.layout.root.kind == "cluster"


TWO_SITES = build(two_datacenters(prefill_nodes=2, local_prefill_nodes=1, decode_nodes=2))
steps = st.tuples(
    st.floats(0, 4), st.integers(0, 4), st.integers(0, 4), st.floats(1e6, 1e10), st.sampled_from(["landed", "lost", ""])
)


@settings(max_examples=50)
@given(st.lists(steps, max_size=30))
def test_wan_bytes_are_those_of_transfers_between_its_ends(
    moves: list[tuple[float, int, int, float, str]],
) -> None:
    """Each direction counts separately: transfers in flight, and completed ones over the last full seconds."""
    state = DashboardState(TWO_SITES, GatewayStatus, policy="netkv", version="")
    at, completed = 0.0, list[tuple[float, bool, float]]()
    moving = dict[int, tuple[bool, float]]()
    sites = [instance.datacenter for instance in TWO_SITES.instances]
    for number, (step_s, source, target, kv_bytes, end) in enumerate(moves):
        at += step_s
        names = TWO_SITES.instances[source].name, TWO_SITES.instances[target].name
        state.transfer_started(Decode(number, *names, 4, kv_bytes, kv_bytes, 0), at)
        forward = sites[source] == "prefill-site"
        across = sites[source] != sites[target]
        if end:
            state.transfer_ended(number, at, landed=end == "landed")
            completed += [(at, forward, kv_bytes)] * (across and end == "landed")
        elif across:
            moving[number] = (forward, kv_bytes)
    (wan,) = state.tick(at).wan
    seconds = min(RATE_S, int(at))
    for direction, forward in enumerate((True, False)):
        sizes = [size for ahead, size in moving.values() if ahead is forward]
        assert wan.in_flight[direction] == len(sizes)
        assert wan.in_flight_bytes[direction] == pytest.approx(sum(sizes))
        recent = [
            size for when, ahead, size in completed if ahead is forward and int(at) - seconds <= int(when) < int(at)
        ]
        assert wan.utilisation[direction] == pytest.approx(sum(recent) / seconds / 12.5e9 if seconds else 0.0)


def test_the_page_receives_sites_links_and_the_offloaded_share() -> None:
    """The page receives the prefill-only site, the WAN links, and the share of the last minute's prefills that were
    offloaded."""
    state = DashboardState(TWO_SITES, GatewayStatus, policy="netkv", version="")
    layout = state.layout
    assert [(site.name, site.role) for site in layout.sites] == [("local-site", "home"), ("prefill-site", "prefill")]
    assert [(link.source, link.target, link.bytes_per_s) for link in layout.wan] == [
        ("prefill-site", "local-site", 12.5e9)
    ]
    assert state.tick(1.0).offloaded_share is None
    away = next(i.name for i in TWO_SITES.instances if i.datacenter == "prefill-site")
    for number in range(4):
        site = "prefill-site" if number == 0 else "local-site"
        state.decided(Prefill(number, away, offload=Offload(site, "long")), 2.0)
    state.decided(Prefill(9, away), 2.0)
    assert state.tick(3.0).offloaded_share == 0.25
    assert state.tick(3.0 + WINDOW_S).offloaded_share is None


def test_an_instance_after_a_role_switch_shows_the_load_of_its_new_role() -> None:
    """The load of a decode instance that prefills is that of its prefill queue."""
    name = DECODES[0]
    load = GatewayStatus(instances=(InstanceLoad(name=name, prefill_pending_s=0.5, requests=0, role="prefill"),))
    place = [instance.name for instance in CLUSTER.instances].index(name)
    assert _state(load).tick(1.0).instances[place].load == 0.5


def test_tiles_follow_the_layout_and_show_the_load() -> None:
    """A full batch and one second of pending prefill each count as full load; an instance without a report is down."""
    batch_max = CLUSTER.instances[0].batch_max
    load = GatewayStatus(
        in_flight=9,
        instances=(
            InstanceLoad(name=DECODES[1], running=batch_max // 2, waiting=0, scrape_age_s=0.5),
            InstanceLoad(name=DECODES[2], requests=10 * batch_max, breaker="half-open"),
            InstanceLoad(name=PREFILLS[0], prefill_pending_s=0.25, up=False),
        ),
    )
    tick = _state(load).tick(1.0)
    tiles = dict(zip((instance.name for instance in CLUSTER.instances), tick.instances, strict=True))
    assert tiles[DECODES[1]].load == 0.5
    assert (tiles[DECODES[2]].load, tiles[DECODES[2]].breaker, tiles[DECODES[2]].up) == (1.0, 1, 1)
    assert (tiles[PREFILLS[0]].load, tiles[PREFILLS[0]].up) == (0.25, 0)
    assert tiles[DECODES[0]].up == 0
    assert tick.load.in_flight == 9
    assert tick.load.instances == ()


def test_a_new_cluster_gets_a_new_layout() -> None:
    """After a reload, nothing refers to places of the old map; earlier decisions are dropped."""
    state = _state()
    before = state.layout.id
    state.transfer_started(_decode(1), 1.0)
    state.replace(build(two_datacenters(prefill_nodes=1, local_prefill_nodes=1, decode_nodes=1)))
    assert state.layout.id != before
    state.transfer_started(_decode(2), 1.0)
    state.transfer_ended(1, 1.1)
    tick = state.tick(1.2)
    assert tick.transfers == ()
    assert tick.layout_id == state.layout.id
    assert len(tick.instances) == 3


@settings(max_examples=20)
@given(st.floats(allow_nan=True, allow_infinity=True))
def test_the_page_receives_valid_json_for_any_numbers(cost: float) -> None:
    """The JSON contains no NaN or Infinity, which browsers cannot parse."""
    terms = Terms(("d0",), np.array([cost]), np.array([True]), {"queue_s": np.array([cost])})
    state = _state()
    state.decided(Decode(1, "p", "d0", 1, 1.0, 1.0, 0, terms), 1.0)
    text = msgspec.json.encode(state.snapshot(1.0))

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    [decision] = json.loads(text, parse_constant=refuse)["tick"]["decisions"]
    assert (decision["candidates"][0]["cost"] is None) == (not math.isfinite(cost))
    assert msgspec.json.decode(text, type=Snapshot, strict=True) if math.isfinite(cost) else True
