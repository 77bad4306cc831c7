"""Times of instances: all-reduces by form, the roofline, transfers and link loads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planner.placement_files import cluster_text, problem_of

from kvroute.collectives import Aggregation, AllReduce, all_reduce, seconds
from kvroute.planner.placement.all_reduce_times import NO_TIME, Affine, AllReduceTimes
from kvroute.planner.placement.compute import Communication, Parallelism, Roofline
from kvroute.planner.placement.instances import Builder, PlacedInstance
from kvroute.planner.placement.problem import PlacementProblem
from kvroute.planner.placement.transfers import all_reduce_load, kv_load, transfer
from kvroute.topology.place import Shards
from kvroute_engine.agent.schemes import SCHEMES


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> PlacementProblem:
    text = cluster_text(racks=2, servers=2, gpus=4, oversubscription=2.0)
    return problem_of(tmp_path_factory.mktemp("times"), text)


def test_groups_use_the_schemes_of_the_file(tmp_path: Path) -> None:
    """A ring is always allowed; without the others it is the slowest choice over servers."""
    text, group = cluster_text(), ((0, 0), (0, 1), (1, 0), (1, 1))
    only = problem_of(tmp_path, text.replace("collectives:", "collectives:\n  schemes: [hierarchical-ring]"))
    assert only.schemes == ("ring", "hierarchical-ring")
    everything = problem_of(tmp_path, text)
    assert everything.schemes == SCHEMES
    few, all_of = (
        AllReduceTimes(problem.cluster, Aggregation(), 2.0, problem.schemes).of(group) for problem in (only, everything)
    )
    assert set(few) == {"ring", "hierarchical-ring"}
    assert set(all_of) == set(SCHEMES)
    assert few["ring"].seconds(1e7) > few["hierarchical-ring"].seconds(1e7)


groups = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=6, unique=True).map(
    lambda gpus: tuple(sorted(gpus))
)


@settings(deadline=None, max_examples=60)
@given(group=groups, nbytes=st.floats(1e3, 1e8))
def test_lines_are_the_times_of_the_flows(problem: PlacementProblem, group: Shards, nbytes: float) -> None:
    """At any size, the line of a scheme is the time that max-min fair flows give."""
    aggregation = Aggregation()
    times = AllReduceTimes(problem.cluster, aggregation, 2.0)
    for scheme in SCHEMES:
        found = all_reduce(scheme, AllReduce(group, nbytes), problem.cluster, aggregation)
        if found is None:
            assert scheme not in times.of(group)
        else:
            expected = seconds(found, problem.cluster.capacity_bytes_per_s)
            assert times.of(group)[scheme].seconds(nbytes) == pytest.approx(expected)


@settings(deadline=None, max_examples=60)
@given(one=groups, other=groups)
def test_groups_of_one_form_have_the_same_times(problem: PlacementProblem, one: Shards, other: Shards) -> None:
    """The form decides the times, unless NICs share an uplink by chance: those groups are inside one rack here."""
    times = AllReduceTimes(problem.cluster, None, 2.0)
    if any(node > 1 for node, _ in (*one, *other)) or times.form(one) != times.form(other):
        return
    alone = AllReduceTimes(problem.cluster, None, 2.0)
    assert alone.of(other) == times.of(one)


def test_a_single_gpu_needs_no_all_reduce(problem: PlacementProblem) -> None:
    times = AllReduceTimes(problem.cluster, None, 2.0)
    assert times.of(((0, 0),)) == {}
    assert times.best(((0, 0),), 1e6) == (None, NO_TIME)


def test_a_stage_sends_its_share_to_the_next(problem: PlacementProblem) -> None:
    """Two ranks send half of the activations each over their own 100 Gbps NIC."""
    times = AllReduceTimes(problem.cluster, None, 2.0)
    found = times.send(((0, 0), (0, 1)), ((1, 0), (1, 1)))
    assert found.seconds(1e9) == pytest.approx(3e-6 + 1e9 / 2 / 12.5e9)


def roofline(problem: PlacementProblem, tp: int, pp: int) -> Roofline:
    return Roofline.of(problem, problem.kinds[0], Parallelism(tp, pp))


def test_a_prefill_takes_the_operations_of_its_tokens(problem: PlacementProblem) -> None:
    """The quadratic form is the sum over all tokens of the operations at their context, over the peak times mfu."""
    tokens = 400
    flop = sum(problem.model.token_flop(context) for context in range(1, tokens + 1))
    found = roofline(problem, 4, 1).times(Communication()).prefill_at(tokens)
    assert found == pytest.approx(0.01 + flop / (4 * 312e12 * 0.6), rel=1e-3)


def test_all_reduces_are_two_for_each_layer(problem: PlacementProblem) -> None:
    """A latency of 1 us and 1 ns per byte add 2L times that to an iteration: hidden size 4,096 in 2 bytes."""
    line = roofline(problem, 2, 1)
    plain = line.times(Communication())
    slower = line.times(Communication(Affine(1e-6, 1e-12)))
    layers = problem.model.layer_count
    extra = 2 * layers * (1e-6 + 1e-12 * 100 * 4096 * 2)
    assert slower.prefill_at(100) - plain.prefill_at(100) == pytest.approx(extra)
    assert slower.decode_s(100, 500) - plain.decode_s(100, 500) == pytest.approx(extra)
    assert roofline(problem, 1, 2).all_reduces == 0


def test_a_pipeline_does_not_shorten_an_iteration(problem: PlacementProblem) -> None:
    """Base time and prefill are those of one stage; only the batch is divided, because as many batches are in
    flight."""
    one, four = (roofline(problem, 2, pp).times(Communication()) for pp in (1, 4))
    assert four.prefill_at(300) == one.prefill_at(300)
    assert four.decode_s(0, 0) == one.decode_s(0, 0)
    assert four.decode_s(4, 500) == pytest.approx(one.decode_s(1, 500))
    assert roofline(problem, 2, 4).stage_s(1.0) == 0.25
    assert roofline(problem, 2, 5).stage_s(1.0) == pytest.approx(7 / 32)


def test_memory_beside_the_weights_holds_the_kv(problem: PlacementProblem) -> None:
    """Eight KV heads: with 2 ranks each token takes half of its KV on a rank."""
    found = roofline(problem, 2, 1)
    free = 80e9 * 0.9 - problem.weights_bytes / 2
    assert found.kv_tokens() == pytest.approx(free / (problem.model.kv_bytes_per_token / 2))


def placed(problem: PlacementProblem, phase: str, *stages: Shards) -> PlacedInstance:
    builder = Builder(problem, AllReduceTimes(problem.cluster, None, 2.0))
    split = Parallelism(len(stages[0]), len(stages))
    found = builder.chained(phase, problem.kinds[0], split, stages)  # type: ignore[arg-type]
    return found[0]


def test_a_transfer_ends_with_its_slowest_flow(problem: PlacementProblem) -> None:
    """Four flows of a quarter each over four NICs; four GPUs to one GPU share its NIC."""
    source = placed(problem, "prefill", ((0, 0), (0, 1), (0, 2), (0, 3)))
    wide = placed(problem, "decode", ((1, 0), (1, 1), (1, 2), (1, 3)))
    narrow = placed(problem, "decode", ((1, 0),))
    assert transfer(problem.cluster, source, wide).line.seconds(1e9) == pytest.approx(3e-6 + 1e9 / 50e9)
    assert transfer(problem.cluster, source, narrow).line.seconds(1e9) == pytest.approx(3e-6 + 1e9 / 12.5e9)


def test_kv_loads_are_those_of_all_pairs(problem: PlacementProblem) -> None:
    """Loads by domain equal the bytes of every pair of instances, flow by flow."""
    prefill = [
        placed(problem, "prefill", ((0, 0), (0, 1))),
        placed(problem, "prefill", ((2, 0), (2, 1))),
    ]
    decode = [
        placed(problem, "decode", ((0, 2), (0, 3))),
        placed(problem, "decode", ((1, 0), (1, 1))),
        placed(problem, "decode", ((3, 0), (3, 1))),
    ]
    shares = np.array([0.7, 0.3]), np.array([0.5, 0.3, 0.2])
    found = kv_load(problem, prefill, decode, shares)
    nbytes = problem.model.kv_bytes(500)
    tiers = np.array([link.tier for link in problem.cluster.links])
    expected = np.zeros(4)
    for source, share in zip(prefill, shares[0], strict=True):
        for target, other in zip(decode, shares[1], strict=True):
            level = problem.cluster.places.level(source.gpus[0][0], target.gpus[0][0])
            crossed = [0] if level == 0 else range(1, level + 1)
            for tier in crossed:
                expected[tier] += 2 * share * other * nbytes  # up and down
    for tier in range(3):
        assert found[tiers == tier].sum() == pytest.approx(expected[tier])


def test_all_reduce_loads_count_every_token(problem: PlacementProblem) -> None:
    """Two ranks on two servers: a ring sends the tensor over both NICs both ways, for every token and layer."""
    group = ((0, 0), (1, 0))
    instance = placed(problem, "decode", group)
    found, used = all_reduce_load(problem, [instance], np.ones(1))
    tensor = 100 * 4096 * 2 * 2 * problem.model.layer_count
    nics = [link for link in used[0] if problem.cluster.links[link].tier == 1]
    assert len(nics) == 4
    assert found[nics].tolist() == pytest.approx([tensor] * 4)
