"""The equations as published beside the corrected ones: one test for each row of the table in docs/placement.md."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from tests.planner.placement_files import TESTBED, cluster_text, problem_of

from kvroute.collectives import AllReduce, all_reduce, link_bytes, seconds
from kvroute.planner.placement.all_reduce_times import AllReduceTimes
from kvroute.planner.placement.compute import Communication, Parallelism, Roofline
from kvroute.planner.placement.problem import PlacementProblem
from kvroute.planner.placement.search import Search, search
from kvroute.timing.queueing import token_s, waiting
from kvroute.topology import Cluster, load_network
from kvroute.topology.gpu_paths import Gpu
from kvroute.topology.place import Shards
from kvroute.types import InputError
from kvroute_studies.heroserve import published
from kvroute_studies.heroserve.literal import literal_plan
from kvroute_studies.heroserve.paper_grouping import kmeans_groups, latencies, perturbed

HIDDEN, TOKENS, BATCH = 9_216, 247.0, 8
NIC_BITS_PER_S, NIC_BYTES_PER_S = 100e9, 12.5e9


@pytest.fixture(scope="module")
def testbed(tmp_path_factory: pytest.TempPathFactory) -> PlacementProblem:
    folder = tmp_path_factory.mktemp("published")
    return problem_of(folder, TESTBED.read_text(), "opt-66b", 2.5, 0.15)


@pytest.fixture(scope="module")
def racks(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    path = tmp_path_factory.mktemp("grouping") / "cluster.yaml"
    path.write_text(cluster_text(racks=2, servers=3, gpus=4, oversubscription=2.0))
    return load_network(path)


def free_gpus(kept: list[int]) -> list[Gpu]:
    """The first `kept[node]` GPUs of each node."""
    return [(node, gpu) for node, count in enumerate(kept) for gpu in range(count)]


def test_eq_1_scalability_does_not_depend_on_the_number_of_gpus(tmp_path: Path) -> None:
    """H is a reciprocal latency; the corrected rate doubles with twice as many GPUs."""
    assert published.scalability_per_s(12.0) == pytest.approx(0.083, abs=1e-3)
    rates = [
        search(problem_of(tmp_path, cluster_text(servers=servers, gpus=4))).evaluated[0].rate_per_s
        for servers in (1, 2)
    ]
    assert rates[1] > 1.8 * rates[0]


def test_queueing_is_negative_in_overload() -> None:
    """At T = 12 s and 0.2 requests/s, H is 0.58: overload wins against an idle system with 0.083."""
    serve_s, rate = 12.0, 0.2
    queue_s = published.queueing_s(rate, serve_s)
    assert queue_s < 0
    assert published.scalability_per_s(serve_s + queue_s) == pytest.approx(0.58, abs=0.01)
    assert waiting(rate, np.array([serve_s]), np.ones(1)).mean_s == math.inf


def test_eq_3_has_no_queue() -> None:
    """A prefill of 1 s at a utilisation of 0.8 waits for 2 s in the mean."""
    assert published.prefill_latency_s(0.2, 0.8) == 1.0
    assert waiting(0.8, np.ones(1), np.ones(1)).mean_s == pytest.approx(2.0)


def test_eq_4_charges_the_transfer_to_every_token() -> None:
    assert published.decode_latency_s(0.01, 0.02, 0.2) == pytest.approx(0.23)
    assert token_s(0.03, 0.2, 200) == pytest.approx(0.031, abs=1e-4)


def test_eq_5_counts_two_all_reduces(testbed: PlacementProblem) -> None:
    """OPT-66B has 64 layers with two all-reduces each: 64 times as many."""
    line = Roofline.of(testbed, testbed.kinds[0], Parallelism(8, 1))
    assert line.all_reduces / published.STEPS == 64


def test_eq_6_divides_elements_by_bits(testbed: PlacementProblem) -> None:
    """16 times too low for two bytes an element; the decode phase lacks the batch."""
    literal_s = published.hops_s(published.pipeline_elements(TOKENS, HIDDEN, decode=False), [NIC_BITS_PER_S])
    send = AllReduceTimes(testbed.cluster, None, 2.0).send(((0, 0),), ((1, 0),))
    assert send.s_per_byte * TOKENS * HIDDEN * 2 == pytest.approx(16 * literal_s)
    assert published.pipeline_elements(BATCH, HIDDEN, decode=True) * BATCH == BATCH * HIDDEN


def group(servers: int, gpus: int) -> Shards:
    return tuple((node, gpu) for node in range(servers) for gpu in range(gpus))


def test_eq_8_to_10_add_hops_and_ignore_shared_links(testbed: PlacementProblem) -> None:
    """Four GPUs of a server behind one uplink take four times as long; a wire of int32 doubles fp16."""
    elements = 4e6
    alone = published.aggregation_s(elements, [[NIC_BITS_PER_S]])
    assert published.aggregation_s(elements, [[NIC_BITS_PER_S]] * 4) == alone
    assert published.aggregation_s(elements, [[NIC_BITS_PER_S] * 2]) == pytest.approx(2 * alone, rel=0.01)
    tensor = AllReduce(group(2, 4), elements * 2)
    found = all_reduce("ina", tensor, testbed.cluster, testbed.aggregation)
    assert found is not None
    assert max(link_bytes(found).values()) == pytest.approx(elements * 4)
    # Up and down at the same time (cut-through), at 32 bits per element instead of 1.
    assert seconds(found, testbed.cluster.capacity_bytes_per_s) == pytest.approx(alone / 2 * 32, rel=0.05)


def test_at_equal_bandwidth_a_ring_always_wins_by_the_published_equations() -> None:
    """INA takes 2 M / B over one hop each way, a ring 2 (P - 1) / P M / B."""
    for gpus in range(2, 65):
        ring = published.ring_s(1e6, gpus, NIC_BITS_PER_S)
        assert ring < published.aggregation_s(1e6, [[NIC_BITS_PER_S]] * gpus)


def test_decode_synchronises_the_batch_not_its_prompts(testbed: PlacementProblem) -> None:
    """A decode iteration of eight requests all-reduces 0.15 MB; K_in h is as large as for the prefill of all eight."""
    corrected = BATCH * HIDDEN * 2
    assert corrected == pytest.approx(0.147e6, rel=0.01)
    assert published.decode_elements(BATCH * 750, HIDDEN) * 2 == pytest.approx(111e6, rel=0.01)


def test_eq_11_has_neither_latency_nor_rails(testbed: PlacementProblem) -> None:
    """A small tensor takes 2 (P - 1) latencies; four NICs per server carry a large one nearly four times as fast."""
    times = AllReduceTimes(testbed.cluster, None, 2.0).of(group(2, 4))
    assert published.ring_s(1.0, 8, NIC_BITS_PER_S) < 1e-9
    assert times["ring"].latency_s > 10e-6
    assert times["ring"].s_per_byte / times["multi-rail-ring"].s_per_byte == pytest.approx(4.0, rel=0.3)
    assert times["ring"].s_per_byte * 2e6 == pytest.approx(16 * published.ring_s(1e6, 8, NIC_BITS_PER_S))


def test_eq_12_counts_all_reduces_twice(testbed: PlacementProblem) -> None:
    """A fit of measured prefills at TP 4 contains the all-reduces over NVLink, which T_n adds again."""
    kind, split = testbed.kinds[0], Parallelism(4, 1)
    line = Roofline.of(testbed, kind, split)
    nvlink = AllReduceTimes(testbed.cluster, None, 2.0).of(group(1, 4))["ring"]
    measured = line.times(Communication(nvlink)).prefill_at(TOKENS)
    compute = line.times(Communication()).prefill_at(TOKENS)
    c1 = measured / published.prefill_compute_s((1.0, 0.0, 0.0), 4, HIDDEN, 4 * HIDDEN, TOKENS, 0.0)
    fitted = published.prefill_compute_s((c1, 0.0, 0.0), 4, HIDDEN, 4 * HIDDEN, TOKENS, 0.0)
    reduced_s = 128 * nvlink.seconds(TOKENS * HIDDEN * 2)
    assert fitted == pytest.approx(measured)
    assert fitted + reduced_s - (compute + reduced_s) == pytest.approx(reduced_s)


def test_eq_13_divides_by_the_number_of_stages(testbed: PlacementProblem) -> None:
    """Four stages do not make an iteration four times as fast; and the batch is missing."""
    fit = (1e-12, 1e-12, 0.0)
    one, four = (published.decode_compute_s(fit, 4, pp, HIDDEN, 4 * HIDDEN, TOKENS) for pp in (1, 4))
    assert one == pytest.approx(4 * four)
    corrected = [Roofline.of(testbed, testbed.kinds[0], Parallelism(2, pp)).times(Communication()) for pp in (1, 4)]
    assert corrected[0].decode_s(0, 0) == corrected[1].decode_s(0, 0)
    assert corrected[0].decode_s(64, TOKENS) > 1.1 * corrected[0].decode_s(1, TOKENS)


def test_d_ij_rounds_up_to_one(testbed: PlacementProblem) -> None:
    """ceil(P / A) is 1, so a segment has one head: 18 (P = 4) or 9 (P = 8) heads are missing, and two bytes each."""
    for tp, heads in ((4, 18), (8, 9)):
        literal_bytes = published.kv_elements(TOKENS, HIDDEN, 72, tp) * 2
        layers = testbed.model.layer_count
        corrected = testbed.model.kv_bytes_shard(247, tp) / layers
        assert corrected == pytest.approx(heads * literal_bytes)


def test_eq_14_ignores_that_transfers_share_links() -> None:
    """Two flows over one link take twice as long; the published time is that of one of them."""
    alone = published.transfer_s([1e9], [[NIC_BITS_PER_S]])
    assert max(published.transfer_s([1e9], [[NIC_BITS_PER_S]]) for _ in range(2)) == alone
    assert published.transfer_s([1e9], [[NIC_BITS_PER_S] * 4]) == pytest.approx(4 * alone)


def test_the_least_number_of_gpus_is_a_ratio(testbed: PlacementProblem) -> None:
    """131 GB over sixteen GPUs is 0.25 GPUs; and m_req leaves no room for a KV cache."""
    assert published.least_gpus(testbed.weights_bytes, [36e9] * 16, 0.9) == pytest.approx(0.253, abs=1e-3)
    kind = next(kind for kind in testbed.kinds if kind.name == "a100")
    least = published.least_memory_bytes(testbed.weights_bytes, 4, 1, 0.9)
    assert least > kind.memory_bytes > testbed.weights_bytes / 4
    exact = published.least_memory_bytes(testbed.weights_bytes, 4, 1, testbed.weights_bytes / 4 / kind.memory_bytes)
    assert exact == pytest.approx(kind.memory_bytes)
    assert Roofline.of(testbed, kind, Parallelism(4, 1)).kv_tokens() < 6_000


def test_algorithm_2_stops_at_the_first_failed_swap() -> None:
    """Each of 50 groups tries one or two swaps, although many would help."""
    draw = np.random.default_rng(1)
    order = draw.permutation(400).tolist()
    groups: list[Shards] = [
        tuple((gpu // 8, gpu % 8) for gpu in order[start : start + 8]) for start in range(0, 400, 8)
    ]
    _, tried = perturbed(groups, lambda group: float(len({node for node, _ in group})))
    assert tried < 2.5 * len(groups)


def test_the_published_choice_is_rated_by_the_corrected_equations(testbed: PlacementProblem) -> None:
    """Above a utilisation of 1 the published H is highest, and its choice sustains less than kvroute's."""
    found = search(testbed)
    literal = literal_plan(found.search, found.best.rate_per_s)
    assert literal is not None
    assert literal.transfer_s < 1e-4
    assert literal.corrected_rate_per_s < found.best.rate_per_s


def test_there_may_be_no_published_choice(tmp_path: Path) -> None:
    problem = problem_of(tmp_path, cluster_text(), tpot_s=1e-4)
    assert literal_plan(Search(problem, "milp"), 1.0) is None


def test_published_grouping_is_a_partition(racks: Cluster) -> None:
    """k-means-constrained in a process of its own finds the six servers of four GPUs."""
    found = kmeans_groups(racks, free_gpus([4] * 6), 4)
    assert len(found) == 6
    assert sorted(gpu for group in found for gpu in group) == free_gpus([4] * 6)
    assert kmeans_groups(racks, free_gpus([2, 0, 0, 0, 0, 0]), 4) == []


def test_published_latencies_follow_the_hierarchy(racks: Cluster) -> None:
    """One byte costs less inside a server than in a rack, and less in a rack than between racks."""
    gpus = [(0, 0), (0, 1), (1, 0), (5, 0)]
    found = latencies(racks, gpus)
    assert found[0, 0] == 0.0
    assert 0 < found[0, 1] < found[0, 2] < found[0, 3]
    assert np.allclose(found, found.T)


def test_published_swaps_stop_at_the_first_failure_and_ignore_the_partner() -> None:
    """A swap that helps one group and costs the other one more is kept; the sum increases."""
    cost = {(0, 0): 1.0, (0, 1): 0.0}

    def seconds(group: Shards) -> float:
        return float(sum(cost.get(gpu, 5.0) for gpu in group)) * (10.0 if (0, 0) in group and (0, 2) in group else 1.0)

    groups: list[Shards] = [((0, 0), (0, 3)), ((0, 1), (0, 2))]
    before = sum(map(seconds, groups))
    found, tried = perturbed(groups, seconds)
    assert tried < 10
    assert sorted(gpu for group in found for gpu in group) == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert sum(map(seconds, found)) >= before


def test_published_grouping_refuses_large_clusters(racks: Cluster) -> None:
    with pytest.raises(InputError, match="too many for k-means-constrained"):
        kmeans_groups(racks, [(0, 0)] * 2_001, 4)
