"""foresight by worked examples: a crowded NIC, full slots, learned values, the links of a cluster, pairs of
instances."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvroute.control.learning.learned_capacity import Answers, LearnedCapacity
from kvroute.control.state.transfer_table import InFlight
from kvroute.oracle import NetworkOracle
from kvroute.policies import decode_policy, foresight_policy
from kvroute.policies.foresight.joint import ForesightJoint, JointPath, Pair
from kvroute.policies.foresight.links import UNKNOWN, LinkModel
from kvroute.policies.foresight.policy import Foresight
from kvroute.policies.foresight.sight import NetworkView
from kvroute.policies.foresight.spec import ForesightSpec
from kvroute.policies.prefill import PrefillCandidates
from kvroute.topology import InstanceCounts, build, fat_tree
from kvroute.types import Candidates, Choice, InputError, IntArray, NetworkCosts, Reject, Request, TierArray

NIC = 1e9
FLAT: TierArray = np.full((4, 4), 3, dtype=np.int8)
"""Instances 0 and 1 prefill, 2 and 3 decode, all at the same large distance."""
DECODERS: IntArray = np.array([2, 3])
NO_LATENCY = np.zeros(5)
NO_LATENCY.flags.writeable = False  # as an oracle's: kernels are compiled by the type of their arrays
REQUEST = Request(id=1, input_tokens=1_000)


def links() -> LinkModel:
    return LinkModel.of_tiers(FLAT, np.full(5, NIC))


def pool(batch: tuple[int, int] = (0, 0), queued: tuple[int, int] = (0, 0), batch_max: int = 8) -> Candidates:
    """Return two decode instances with steps of 10 ms; the KV cache has 1 GB."""
    return Candidates(
        names=("far", "near"),
        batch=np.array(batch),
        queued=np.array(queued),
        batch_max=np.full(2, batch_max),
        free_kv_bytes=np.full(2, 1e12),
        hit_tokens=np.zeros(2, dtype=np.int64),
        kv_bytes=np.full(2, 1e9),
        need_bytes=np.full(2, 1e9),
        iteration_base_s=np.full(2, 0.010),
        iteration_per_request_s=np.zeros(2),
    )


def costs(source: int = 0) -> NetworkCosts:
    nothing = np.zeros(5, dtype=np.int64)
    return NetworkCosts(FLAT[source].take(DECODERS), np.full(5, NIC), NO_LATENCY, np.zeros(5), nothing)


def chosen(table: InFlight, candidates: Candidates, source: int = 0, spec: ForesightSpec | None = None) -> Choice:
    policy = Foresight(spec or ForesightSpec(), table.network_view(table.now, source, DECODERS))
    choice = policy.choose(REQUEST, candidates, costs(source), 0)
    assert isinstance(choice, Choice)
    return choice


def chosen_by(spec: ForesightSpec, network_view: NetworkView) -> Choice:
    choice = Foresight(spec, network_view).choose(REQUEST, pool(), costs(), 0)
    assert isinstance(choice, Choice)
    return choice


def test_foresight_avoids_a_congested_nic_that_netkv_does_not_model() -> None:
    """Another prefill instance sends 1 GB to the first decode instance: a second transfer to it takes 2 s and delays
    the first one by 1 s. To the other instance it takes 1 s and delays none. NetKV counts the transfers of its own
    source only and takes the first."""
    table = InFlight(links())
    table.started(0.0, 7, 1, 2, 1e9)
    choice = chosen(table, pool())
    assert choice.index == 1
    assert choice.terms.parts["transfer_s"].tolist() == pytest.approx([2.0, 1.0])
    oracle = NetworkOracle(FLAT, np.full(5, NIC), np.zeros(5))
    oracle.transfer_started(1, 2)
    netkv = decode_policy("netkv").choose(REQUEST, pool(), oracle.costs(0, DECODERS, 0.0), 0)
    assert isinstance(netkv, Choice)
    assert netkv.index == 0


def test_the_imposed_delay_is_part_of_the_cost() -> None:
    """1 GB joins 1.5 GB on a NIC of 1 GB/s: it takes 2 s, and the other one ends at 2.5 s instead of 1.5 s. The decode
    step of the other instance is 1.8 s slower: this is better for the sum of both, but not for the new transfer
    alone."""
    table = InFlight(links())
    table.started(0.0, 7, 1, 2, 1.5e9)
    slow = pool()
    slow.iteration_base_s[1] = 1.5
    spec = ForesightSpec(slot_weight=0.0)
    choice = chosen(table, slow, spec=spec)
    assert choice.terms.parts["imposed_s"].tolist() == pytest.approx([1.0, 0.0])
    assert choice.terms.parts["transfer_s"].tolist() == pytest.approx([2.0, 1.0])
    assert choice.terms.cost.tolist() == pytest.approx([3.01, 2.5])
    alone = chosen(table, slow, spec=ForesightSpec(slot_weight=0.0, imposed_weight=0.0))
    assert (choice.index, alone.index) == (1, 0)


def test_the_closed_form_shares_the_most_congested_link() -> None:
    """With two transfers into the first NIC, a third one gets a third of it. The closed form includes no delay of
    others."""
    table = InFlight(links())
    for number in range(2):
        table.started(0.0, number, 1, 2, 9e9)
    choice = chosen(table, pool(), spec=ForesightSpec(width=0))
    assert choice.terms.parts["transfer_s"].tolist() == pytest.approx([3.0, 1.0])
    assert choice.terms.parts["pace_bytes_per_s"].tolist() == pytest.approx([NIC / 3, NIC])
    assert not choice.terms.parts["imposed_s"].any()


def test_a_candidate_that_is_not_simulated_is_not_favoured_by_the_closed_form() -> None:
    """The best candidate by the closed form (2 s against 2.5 s) is simulated and delays another transfer by 1 s. The
    cost of the other candidate is raised by 1 s too, as if it had an equal delay. When it is simulated as well, it has
    none and wins."""
    table = InFlight(links())
    table.started(0.0, 7, 1, 2, 1.5e9)
    slow = pool()
    slow.iteration_base_s[1] = 1.5
    one = chosen(table, slow, spec=ForesightSpec(slot_weight=0.0, width=1))
    assert one.index == 0
    assert one.terms.cost.tolist() == pytest.approx([3.01, 3.5])
    assert one.terms.parts["simulated"].tolist() == [1.0, 0.0]
    assert chosen(table, slow, spec=ForesightSpec(slot_weight=0.0, width=2)).index == 1


def test_a_later_transfer_shares_with_those_still_in_flight() -> None:
    """0.5 GB and 1.5 GB share a NIC: the first one ends after 1 s, and after 1.5 s the second one has 0.5 GB left. 1 GB
    that starts then has half of the NIC for 1 s and all of it for 0.5 s."""
    table = InFlight(links())
    table.started(0.0, 7, 1, 2, 0.5e9)
    table.started(0.0, 8, 1, 2, 1.5e9)
    policy = Foresight(ForesightSpec(), table.network_view(0.0, 0, DECODERS, starts_s=1.5))
    choice = policy.choose(REQUEST, pool(batch=(0, 7)), costs(), 0)
    assert isinstance(choice, Choice)
    assert choice.terms.parts["simulated"][0] == 1.0
    assert choice.terms.parts["transfer_s"][0] == pytest.approx(1.5)
    assert choice.terms.parts["imposed_s"][0] == pytest.approx(0.5)


def test_transfers_beyond_the_nearest_keep_their_rates() -> None:
    """Three long transfers into a NIC of 1 GB/s: a fourth one gets a quarter. If only one may slow down for it, the two
    others keep their thirds, and it shares the rest."""
    table = InFlight(links())
    for number in range(3):
        table.started(0.0, number, 1, 2, 9e9)
    expected = ((24, 4.0), (1, 6.0))
    for near_max, seconds in expected:
        choice = chosen(table, pool(batch=(0, 8)), spec=ForesightSpec(near_max=near_max, slot_weight=100.0))
        assert choice.terms.parts["simulated"][0] == 1.0
        assert choice.terms.parts["transfer_s"][0] == pytest.approx(seconds)


def test_the_wait_for_a_full_batch_overlaps_the_transfer() -> None:
    """All eight slots are taken and one request waits: two outputs of 400 steps of 10 ms must end, one every 0.5 s. 1 s
    of that passes during the transfer, so no time is lost. With a short transfer, time is lost."""
    full = pool(batch=(8, 0), queued=(1, 0))
    spec = ForesightSpec(output_tokens=400.0)
    table = InFlight(links(), spec)
    assert chosen(table, full, spec=spec).terms.parts["wait_s"].tolist() == pytest.approx([0.0, 0.0], abs=1e-9)
    full.kv_bytes[:] = 0.25e9
    choice = chosen(table, full, spec=spec)
    assert choice.terms.parts["wait_s"].tolist() == pytest.approx([0.75, 0.0])
    assert choice.terms.parts["slot_s"].tolist() == pytest.approx([0.5 * (10 / 8) ** 2, 0.5 * (1 / 8) ** 2])
    assert choice.index == 1


def test_a_near_instance_is_avoided_for_delayed_tokens_only_within_the_bound() -> None:
    """The near instance has three requests in its batch, each of which would wait 1 ms longer for each of 2,000 tokens:
    a cost of 1.2 s. The transfer to it takes 0.1 s. An instance at 0.25 s is preferred to it, an instance at 0.35 s is
    not."""
    spec = ForesightSpec(output_tokens=2_000.0, slot_weight=0.0, step_weight=0.0)
    for far_s, expected in ((0.25, 0), (0.35, 1)):
        crowded = pool(batch=(0, 3), batch_max=64)
        crowded.iteration_per_request_s[:] = 0.001
        crowded.kv_bytes[:] = (far_s * NIC, 0.1 * NIC)
        choice = Foresight(spec).choose(REQUEST, crowded, costs(), 0)
        assert isinstance(choice, Choice)
        assert choice.index == expected
        assert choice.terms.parts["slot_s"].tolist() == pytest.approx([0.0, 0.2])
    unbounded = Foresight(ForesightSpec(output_tokens=2_000.0, answer_transfers=1e9))
    choice = unbounded.choose(REQUEST, crowded, costs(), 0)
    assert isinstance(choice, Choice)
    assert choice.index == 0


def test_nominal_bandwidth_can_be_discounted() -> None:
    """At half the speed of receiving NICs, transfers take twice as long. If their speed is unknown, the other end
    decides."""
    for factor, expected in ((0.5, [2.0, 2.0]), (0.0, [1.0, 1.0]), (4.0, [1.0, 1.0])):
        known = LinkModel.of_tiers(FLAT, np.full(5, 1e12), NIC).taken_for(1.0, factor, 1.0)
        choice = chosen(InFlight(known), pool())
        assert choice.terms.parts["transfer_s"].tolist() == pytest.approx(expected)
    assert links().taken_for(1.0, 1.0, 1.0).capacity_bytes_per_s.tolist() == [NIC] * 8
    cluster = build(fat_tree(pods=1, racks_per_pod=2, nodes_per_rack=2, instances=InstanceCounts(prefill=2, decode=2)))
    model = LinkModel.of(cluster)
    unknown, half = model.taken_for(1.0, 1.0, 0.0), model.taken_for(1.0, 1.0, 0.5)
    uplinks = np.unique(model.attached[:, 2:6][model.attached[:, 2:6] >= 0])
    assert (unknown.attached[:, 2:6] == UNKNOWN).all()
    assert (unknown.attached[:, :2] == model.attached[:, :2]).all()
    share = half.capacity_bytes_per_s / model.capacity_bytes_per_s
    assert [float(share[link]) for link in range(len(share))] == [
        0.5 if link in uplinks else 1.0 for link in range(len(share))
    ]


def test_the_weight_of_rival_transfers_is_configurable() -> None:
    """Two transfers are in flight over two cables; a third one expects to share a cable with them, unless their weight
    is 0."""
    rows = [(8e9, 8e9, 1, 1)] * 8 + [(2 * NIC, NIC, 2, 3)] * 2
    table = np.array(rows)
    attached = np.full((4, 7), UNKNOWN, dtype=np.int64)
    for instance in range(4):
        attached[instance, [0, 1, 2, 3, 6]] = (2 * instance, 2 * instance + 1, 8, 9, 0)
    model = LinkModel(
        tier=FLAT,
        tier_bytes_per_s=np.full(5, NIC),
        attached=np.asfortranarray(attached),  # as `LinkModel.of` makes it
        wan=np.full((1, 1), UNKNOWN, dtype=np.int64),
        capacity_bytes_per_s=table[:, 0].copy(),
        cable_bytes_per_s=table[:, 1].copy(),
        cables=table[:, 2].astype(np.int64),
        link_tier=table[:, 3].astype(np.int64),
        hashed_paths=1,
    )
    network_views = {}
    for weight in (0.0, 0.5, 1.0):
        spec = ForesightSpec(rival_weight=weight, width=0)
        flying = InFlight(model, spec)
        for number in range(2):
            flying.started(0.0, number, 1, 2 + number, 9e9)
        network_views[weight] = flying.network_view(0.0, 0, DECODERS)
    paces = [
        float(chosen_by(ForesightSpec(rival_weight=weight, width=0), network_view).terms.parts["pace_bytes_per_s"][0])
        for weight, network_view in network_views.items()
    ]
    assert paces[0] == pytest.approx(2 * NIC / 3)
    assert paces[0] > paces[1] > paces[2]


def test_without_a_transfer_table_costs_are_by_tier() -> None:
    """NetKV's transfer time is used: three transfers of the same source in the tier, so that the fourth one gets a
    quarter."""
    seen = NetworkCosts(
        np.array([3, 1], dtype=np.int8),
        np.array([8e9, 4e9, 2e9, 1e9, 1e9]),
        np.array([0, 0, 0, 0.5, 0]),
        np.array([0, 0.5, 0, 0, 0]),
        np.array([0, 0, 0, 3, 0]),
    )
    choice = Foresight().choose(REQUEST, pool(), seen, 0)
    assert isinstance(choice, Choice)
    assert choice.terms.parts["transfer_s"].tolist() == pytest.approx([4.5, 0.5])
    assert choice.terms.parts["tier"].tolist() == [3.0, 1.0]
    without_room = pool()
    without_room.free_kv_bytes[:] = 0.0
    rejection = Foresight().choose(REQUEST, without_room, seen, 0)
    assert isinstance(rejection, Reject)
    assert "no decode instance has room" in rejection.reason


def test_completed_transfers_update_the_factor_of_their_tier() -> None:
    """Paths of 1 GB/s repeatedly carry half of that: the factor falls towards a half, held back by a prior of two
    transfers against ten remembered ones. Values of one far tier also have a small effect on the other one."""
    table = InFlight(LinkModel.of_tiers(FLAT, np.full(5, NIC), nic_bytes_per_s=4e9), ForesightSpec(fading_s=1e12))
    at = 0.0
    for number in range(200):
        table.started(at, number, 0, 2, 1e9)
        at += 2.0
        table.finished(at, number)
    pooled = 10 / 110
    assert table.learned.factor[3] == pytest.approx(0.5 ** ((10 + 2 * pooled) / 12), rel=1e-6)
    assert table.learned.factor[2] == pytest.approx(0.5**pooled, rel=1e-6)
    assert table.learned.factor[1] == 1.0
    seen = table.learned.seen(at + 30.5)
    assert seen[3].weight == pytest.approx(10.0, rel=0.01)
    assert (seen[3].transfers, seen[3].age_s) == (200, 30.0)
    assert (seen[2].weight, seen[2].transfers, seen[2].age_s) == (0.0, 0, None)
    half = np.array([0.0, 0.0, 0.0, 0.5, 0.0])
    alone = table.uncontended_bytes_per_s(0, 2, half, table.learned.factor)
    assert alone == pytest.approx(0.5e9 * table.learned.factor[3])


def test_the_factor_of_an_unused_tier_decays() -> None:
    """One stall makes a tier look slow. Without newer transfers the value decays with time, for any size of time
    steps."""
    once, often = LearnedCapacity(ForesightSpec(fading_s=60.0)), LearnedCapacity(ForesightSpec(fading_s=60.0))
    for learned in (once, often):
        learned.ended(3, 1e9, 8e9, 8e9)
        assert learned.factor[3] == pytest.approx(math.exp(-1.5 / 3), rel=0.01)
    assert once.seen(60.5)[3].weight == pytest.approx(math.exp(-1))
    for tenth in range(6_001):
        often.grown_old(tenth / 10)
    once.grown_old(600.0)
    assert often.factor.tolist() == pytest.approx(once.factor.tolist(), rel=1e-9)
    assert 0.9999 < once.factor[3] < 1.0
    assert once.seen(600.0)[3].weight == pytest.approx(math.exp(-10))


def test_a_decision_uses_decayed_factors() -> None:
    """A path took ten times the predicted time and then was unused for twenty minutes."""
    table = InFlight(LinkModel.of_tiers(FLAT, np.full(5, NIC), nic_bytes_per_s=4e9))
    table.started(0.0, 0, 0, 2, 1e9)
    table.finished(10.0, 0)
    assert float(table.network_view(10.0, 0, np.array([2])).factor[3]) < 0.7
    assert float(table.network_view(1_210.0, 0, np.array([2])).factor[3]) > 0.99


def test_transfers_limited_by_a_nic_do_not_change_path_factors() -> None:
    """In the model two transfers share a NIC; if they take the predicted time, the factor of the paths does not
    change."""
    learned = LearnedCapacity(ForesightSpec())
    learned.ended(3, 1e9, 0.9e9, 0.1e9)
    assert learned.factor.tolist() == [1.0] * 5
    learned.ended(3, 1e9, 0.9e9, 0.8e9)
    assert learned.factor[3] == pytest.approx((10 / 9) ** (1 / 3), rel=0.01)
    learned.ended(0, 1e9, 5e9, 5e9)
    learned.ended(2, 1e9, 0.0, 0.0)
    assert learned.factor[:3].tolist() == pytest.approx([1.0, 1.0, 1.0], rel=0.01)


def test_nic_speeds_in_a_rack_are_learned() -> None:
    """NICs have a quarter of the speed in the file: after 20 transfers a decision expects four times the time, with a
    prior of two transfers at the given speed. A delay of a tenth of a second teaches nothing."""
    rack: TierArray = np.ones((4, 4), dtype=np.int8)
    slow, punctual = (InFlight(LinkModel.of_tiers(rack, np.full(5, NIC))) for _ in range(2))
    for table, lasts_s in ((slow, 4.0), (punctual, 1.1)):
        for number in range(20):
            table.started(5.0 * number, number, number % 2, 2 + number % 2, 1e9)
            table.finished(5.0 * number + lasts_s, number)
    assert slow.learned.factor[1] == pytest.approx(0.25, rel=0.4)
    assert punctual.learned.factor[1] == pytest.approx(1.0)
    transfer_s = 1.0 / float(slow.learned.factor[1])
    in_rack = NetworkCosts(
        rack[0].take(DECODERS), np.full(5, NIC), NO_LATENCY, np.zeros(5), np.zeros(5, dtype=np.int64)
    )
    choice = Foresight(ForesightSpec(), slow.network_view(99.0, 0, DECODERS)).choose(REQUEST, pool(), in_rack, 0)
    assert isinstance(choice, Choice)
    assert choice.terms.parts["transfer_s"] == pytest.approx([transfer_s, transfer_s])
    slow.learned.grown_old(2_000.0)
    assert slow.learned.factor[1] == pytest.approx(1.0, abs=0.01)


def test_a_transfer_stays_in_the_table_until_its_end_is_reported() -> None:
    table = InFlight(links())
    table.started(0.0, 7, 0, 2, 1e9)
    table.started(0.0, 8, 0, 2, 0.0)
    assert table.left_bytes(0.5) == pytest.approx({7: 0.5e9})
    assert table.left_bytes(9.0) == pytest.approx({7: 0.03e9})
    table.finished(9.0, 7)
    table.finished(9.5, 7)
    assert table.left_bytes(9.5) == {}
    table.started(10.0, 1, 0, 3, 1e9)
    with pytest.raises(InputError, match="in flight already"):
        table.started(10.0, 1, 0, 3, 1e9)
    with pytest.raises(InputError, match="bytes"):
        table.started(10.0, 2, 0, 3, -1.0)


def test_the_transfer_table_grows() -> None:
    """200 transfers leave one NIC, in a table that starts with fewer rows: each one has its share."""
    table = InFlight(links())
    for number in range(200):
        table.started(0.0, number, 0, 2 + number % 2, 1e9)
    assert list(table.rates_bytes_per_s.values()) == pytest.approx([NIC / 200] * 200)
    for number in range(199):
        table.finished(0.0, number, landed=False)
    assert table.rates_bytes_per_s == pytest.approx({199: NIC})
    assert table.learned.factor.tolist() == [1.0] * 5


def test_the_links_of_a_cluster() -> None:
    """Two pods of two racks with two nodes each have a NIC pair per instance and one link per rack, pod and
    direction."""
    cluster = build(
        fat_tree(
            pods=2,
            racks_per_pod=2,
            nodes_per_rack=2,
            oversubscription=(2.0, 4.0),
            instances=InstanceCounts(prefill=4, decode=4, placement="spread"),
        )
    )
    model = LinkModel.of(cluster)
    count = len(cluster.instances)
    assert len(set(model.attached[:, :2].ravel().tolist())) == 2 * count
    racks, pods = set(model.attached[:, 2:4].ravel().tolist()), set(model.attached[:, 4:6].ravel().tolist())
    assert (len(racks), len(pods)) == (8, 4)
    assert UNKNOWN not in racks | pods
    groups = [(model.attached[0, 2], "rack"), (model.attached[0, 4], "pod")]
    for (link, kind), tier in zip(groups, (2, 3), strict=True):
        ids = cluster.links_of_tier(tier)
        total = float(cluster.capacity_bytes_per_s[list(ids)].sum())
        assert model.capacity_bytes_per_s[link] * len({"rack": racks, "pod": pods}[kind]) == pytest.approx(total)
        assert model.cables[link] * model.cable_bytes_per_s[link] == pytest.approx(model.capacity_bytes_per_s[link])
        assert model.link_tier[link] == tier
    cards = cluster.hops(0, 1, 0)[0], cluster.hops(1, 0, 0)[-1]
    for column, card in zip((0, 1), cards, strict=True):
        each = float(cluster.capacity_bytes_per_s[list(card)].sum())
        assert model.capacity_bytes_per_s[model.attached[0, column]] == pytest.approx(len(cluster.shards[0]) * each)
    assert model.hashed_paths == cluster.flows_per_transfer(0, 1)
    congestion = np.array([0.0, 0.9, 0.5, 0.25, 0.0])
    left = model.capacities(congestion) / model.capacity_bytes_per_s
    assert [float(left[model.attached[0, column]]) for column in (0, 2, 4)] == pytest.approx([1.0, 0.5, 0.75])


def test_unknown_nics_have_the_speed_of_the_rack() -> None:
    bytes_per_s = np.array([9.0, 7.0, 5.0, 3.0, 1.0]) * 1e9
    assert set(LinkModel.of_tiers(FLAT, bytes_per_s).capacity_bytes_per_s.tolist()) == {7e9}
    assert set(LinkModel.of_tiers(FLAT, bytes_per_s, 2e9).capacity_bytes_per_s.tolist()) == {2e9}
    with pytest.raises(InputError, match="shape"):
        LinkModel.of_tiers(FLAT[:2], bytes_per_s)
    with pytest.raises(InputError, match="NIC"):
        LinkModel.of_tiers(FLAT, bytes_per_s, -1.0)


def test_mean_output_lengths_start_at_the_prior() -> None:
    answers = Answers(ForesightSpec(output_tokens=100.0, output_window=4))
    assert answers.mean_tokens == 100.0
    answers.finished(500)
    assert answers.mean_tokens == 200.0
    for _ in range(4):
        answers.finished(0)
    assert answers.mean_tokens == 1.0


def test_the_pair_avoids_a_prefill_instance_with_congested_paths() -> None:
    """Both instances prefill in 1 s; the transfers in flight of the first one end 1.5 s after that, so the second one
    is chosen. If they end before its prefill does, the first one is chosen."""
    for nbytes, expected in ((4e9, 1), (0.5e9, 0)):
        table = InFlight(links())
        for number in range(2):
            table.started(0.0, number, 0, 2 + number, nbytes)
        prefill = PrefillCandidates(("p0", "p1"), np.zeros(2), np.zeros(2, dtype=np.int64), np.array([1.0, 1.0]), None)
        paths = [JointPath(pool(), costs(source), table.network_view(0.0, source, DECODERS, 1.0)) for source in (0, 1)]
        pair = ForesightJoint().choose(REQUEST, prefill, paths.__getitem__, 0)
        assert isinstance(pair, Pair)
        assert pair.prefill.index == expected
        assert pair.prefill.terms.cost[1] == pytest.approx(3.0 if nbytes > 3e9 else 2.0, rel=0.4)
    assert isinstance(ForesightJoint().choose(REQUEST, prefill, [None, None].__getitem__, 0), Reject)


def test_present_decode_load_does_not_count_before_prefill() -> None:
    """A full batch decides between equal paths when the KV cache is complete, but not while its prefill is still to
    come: then the first of equals is taken, unless the load has a weight."""
    table, full = InFlight(links()), pool(batch=(8, 0), queued=(9, 0))
    network_view = table.network_view(0.0, 0, DECODERS)
    expected = (
        (ForesightSpec(), False, 1),
        (ForesightSpec(), True, 0),
        (ForesightSpec(arrival_load_weight=0.5), True, 1),
    )
    for spec, at_arrival, index in expected:
        choice = Foresight(spec, network_view, at_arrival).choose(REQUEST, full, costs(), 0)
        assert isinstance(choice, Choice)
        assert choice.index == index


def test_pairs_that_are_not_simulated_are_ranked_behind() -> None:
    """One of two prefill instances is simulated: the closed-form cost of the other one is raised by the same amount as
    the first one's."""
    table = InFlight(links())
    for number in range(2):
        table.started(0.0, number, 1, 2 + number, 2e9)
    prefill = PrefillCandidates(("p0", "p1"), np.zeros(2), np.zeros(2, dtype=np.int64), np.array([1.0, 0.0]), None)
    paths = [
        JointPath(pool(), costs(source), table.network_view(0.0, source, DECODERS, 1.0 - source)) for source in (0, 1)
    ]
    pair = ForesightJoint(ForesightSpec(joint_width=1)).choose(REQUEST, prefill, paths.__getitem__, 0)
    assert isinstance(pair, Pair)
    simulated = ForesightJoint(ForesightSpec(joint_width=2)).choose(REQUEST, prefill, paths.__getitem__, 0)
    closed = pair.prefill.terms
    assert isinstance(simulated, Pair)
    assert closed.cost[0] == pytest.approx(simulated.prefill.terms.cost[0])
    assert closed.cost[1] >= 3.0
    assert closed.cost.argmin() == pair.prefill.index


def test_names_and_numbers_are_checked() -> None:
    assert foresight_policy("foresight", width=3).spec.width == 3
    assert foresight_policy("foresight-closed").spec.width == 0
    with pytest.raises(InputError, match="did you mean 'foresight'"):
        foresight_policy("forsight")
    with pytest.raises(InputError, match="slot_weight"):
        foresight_policy("foresight", slot_wait=1.0)
    wrong = {
        "slot_weight": -1.0,
        "width": 1.5,
        "near_max": 0,
        "output_tokens": 0.0,
        "factor_min": 2.0,
        "left_floor_share": 1.0,
        "late_log": 0.5,
        "surprise_max": float("nan"),
    }
    for name, value in wrong.items():
        with pytest.raises(InputError):
            foresight_policy("foresight", **{name: value})
