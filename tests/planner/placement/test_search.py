"""The search: near an exhaustive optimum, monotone in hardware and limits, and clear about what is impossible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tests.planner.placement_files import TESTBED, cluster_text, problem_of

from kvroute.planner.placement.compute import Parallelism
from kvroute.planner.placement.evaluation import isolated_per_s
from kvroute.planner.placement.instances import PlacedInstance
from kvroute.planner.placement.problem import PlacementProblem
from kvroute.planner.placement.search import Found, Search, possible_splits, search
from kvroute.topology.place import Shards
from kvroute.types import InputError


def partitions(left: tuple[int, ...], size: int, count: int) -> Iterator[list[tuple[int, ...]]]:
    """Every way to take `count` groups of `size` GPUs from servers with `left` free ones, by GPUs on each server."""
    if count == 0:
        yield []
        return
    for taken in product(*(range(min(free_gpus, size) + 1) for free_gpus in left)):
        if sum(taken) == size:
            rest = tuple(a - b for a, b in zip(left, taken, strict=True))
            for others in partitions(rest, size, count - 1):
                if not others or others[0] <= taken:
                    yield [taken, *others]


def numbered(plan: Sequence[tuple[int, ...]], start: list[int]) -> list[Shards]:
    """The groups of a partition as GPUs, from the first free index of each server."""
    found = []
    for taken in plan:
        found.append(tuple((node, start[node] + gpu) for node, count in enumerate(taken) for gpu in range(count)))
        for node, count in enumerate(taken):
            start[node] += count
    return found


def exhaustive_per_s(problem: PlacementProblem, servers: int, gpus: int) -> float:
    """The highest rate over all parallelisms without pipeline, all numbers of instances and all groups."""
    trial, kind, best = Search(problem, "milp"), problem.kinds[0], 0.0
    splits = [possible for possible in possible_splits(problem, kind) if possible.pp == 1]

    def instances(phase: str, split: Parallelism, groups: Sequence[Shards]) -> list[PlacedInstance]:
        return trial.builder.chained(phase, kind, split, groups)  # type: ignore[arg-type]

    for prefill, decode in product(splits, splits):
        total = servers * gpus
        for count in range(1, (total - decode.gpus) // prefill.gpus + 1):
            others = (total - count * prefill.gpus) // decode.gpus
            for plan in partitions((gpus,) * servers, prefill.tp, count):
                start = [0] * servers
                first = instances("prefill", prefill, numbered(plan, start))
                if not any(isolated_per_s(problem, instance) for instance in first):
                    continue
                for second in partitions(tuple(gpus - used for used in start), decode.tp, others):
                    groups = numbered(second, list(start))
                    placed = trial.placement(first, instances("decode", decode, groups))
                    best = max(best, placed.rate_per_s if placed else 0.0)
    return best


@pytest.mark.parametrize(
    ("servers", "gpus", "nic", "tokens"), [(2, 2, "25 Gbps", 800), (2, 3, "100 Gbps", 2_000), (3, 2, "10 Gbps", 300)]
)
def test_the_optimum_is_that_of_an_exhaustive_search(
    tmp_path: Path, servers: int, gpus: int, nic: str, tokens: int
) -> None:
    """On small clusters the rate is at most 2 % below the best of all placements without pipelines."""
    text = cluster_text(servers=servers, gpus=gpus, nic=nic, prompt_tokens=tokens, memory="24 GB")
    problem = problem_of(tmp_path, text.replace("traffic:", "pp_max: 1\n  traffic:"))
    found = search(problem)
    assert found.evaluated[0].rate_per_s >= 0.98 * exhaustive_per_s(problem, servers, gpus)
    assert found.best.rate_per_s >= 0.99 * found.evaluated[0].rate_per_s


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[PlacementProblem, Found]:
    problem = problem_of(tmp_path_factory.mktemp("small"), cluster_text(racks=2, servers=2, gpus=4))
    return problem, search(problem)


def test_bounds_are_above_the_rates(small: tuple[PlacementProblem, Found]) -> None:
    """The rate is the lowest of what the constraints allow, or less, because requests must meet all of them."""
    for placed in small[1].evaluated:
        assert placed.rate_per_s <= min(placed.evaluation.bounds_per_s().values()) * (1 + 1e-6)


def test_the_bound_of_a_candidate_is_above_its_rate(small: tuple[PlacementProblem, Found]) -> None:
    trial = Search(small[0], "milp")
    for candidate in sorted(trial.candidates(), key=lambda choice: -choice.bound_per_s)[:6]:
        for placed in trial.placements(candidate):
            assert placed.rate_per_s <= candidate.bound_per_s * (1 + 1e-9)


def test_the_required_share_is_met_at_the_rate(small: tuple[PlacementProblem, Found]) -> None:
    best = small[1].best
    assert best.evaluation.operation(best.rate_per_s).attainment == pytest.approx(0.9, abs=1e-3)
    assert best.evaluation.operation(best.rate_per_s * 1.05).attainment < 0.9


def test_every_gpu_is_used_at_most_once(small: tuple[PlacementProblem, Found]) -> None:
    for placed in small[1].evaluated:
        used = [gpu for instance in (*placed.prefill, *placed.decode) for gpu in instance.gpus]
        assert len(used) == len(set(used)) <= 16


def best_per_s(folder: Path, ttft_s: float = 0.3, tpot_s: float = 0.03, **changes: object) -> float:
    text = cluster_text(**({"racks": 1, "servers": 2, "gpus": 2, "nic": "50 Gbps"} | changes))  # type: ignore[arg-type]
    return search(problem_of(folder, text, ttft_s=ttft_s, tpot_s=tpot_s)).evaluated[0].rate_per_s


def test_better_hardware_and_weaker_limits_never_cost_rate(tmp_path: Path) -> None:
    plain = best_per_s(tmp_path)
    for better in (
        best_per_s(tmp_path, nic="200 Gbps"),
        best_per_s(tmp_path, nvlink="600 GB/s"),
        best_per_s(tmp_path, servers=3),
        best_per_s(tmp_path, memory="160 GB"),
        best_per_s(tmp_path, ttft_s=0.5),
        best_per_s(tmp_path, tpot_s=0.05),
    ):
        assert better >= plain * 0.995


def test_slow_nics_between_phases_bind_the_network(tmp_path: Path) -> None:
    """With 8,000 tokens a prompt over 1 Gbps, KV transfers are the limit."""
    text = cluster_text(servers=2, gpus=1, nic="1 Gbps", prompt_tokens=8_000)
    problem = problem_of(tmp_path, text, ttft_s=30.0)
    bounds = search(problem).best.evaluation.bounds_per_s()
    assert next(iter(bounds)).startswith("network (node")


def test_the_testbed_of_the_publication(tmp_path: Path) -> None:
    """OPT-66B needs more than the four GPUs of a server: groups or pipelines span two servers."""
    problem = problem_of(tmp_path, TESTBED.read_text(), "opt-66b", 2.5, 0.15)
    found = search(problem).best
    assert {instance.servers for instance in (*found.prefill, *found.decode)} == {2}
    assert found.gpus <= 16


def test_instances_of_the_file_keep_their_gpus(tmp_path: Path) -> None:
    text = cluster_text(servers=2, gpus=4) + (
        "timing: {default: {prefill: {kind: linear, per_token: 1 ms}, decode: {base: 10 ms}}}\n"
        "instances: [{name: old, role: both, gpus: 'node0:0-3', tp: 4, model: llama-3-8b, kv_capacity: 40 GB}]\n"
    )
    problem = problem_of(tmp_path, text)
    found = search(problem).best
    nodes = {node for instance in (*found.prefill, *found.decode) for node, _ in instance.gpus}
    assert nodes == {1}
    assert "4 more are used by the file's instances" in problem.choices[0]


def test_kinds_keep_to_their_roles(tmp_path: Path) -> None:
    text = TESTBED.read_text().replace('nodes: "v*",', 'nodes: "v*", role: decode,')
    found = search(problem_of(tmp_path, text, "opt-66b", 2.5, 0.15)).best
    assert {prefill_engine.roofline.kind.name for prefill_engine in found.prefill} == {"a100"}


@pytest.mark.parametrize(
    ("changes", "model", "limits", "what"),
    [
        ({}, "opt-175b", (1.0, 0.1), "opt-175b .349 GB of weights. and the KV of one request fit into no group"),
        ({}, "llama-3-8b", (1.0, 0.001), "no group of GPUs meets a TPOT of 0.001 s"),
        ({}, "llama-3-8b", (0.001, 0.1), "no group of GPUs meets a TTFT of 0.001 s"),
        ({"servers": 1, "gpus": 1}, "llama-3-8b", (1.0, 0.1), "enough GPUs for prefill and decode"),
    ],
)
def test_impossible_problems_say_why(
    tmp_path: Path, changes: dict[str, Any], model: str, limits: tuple[float, float], what: str
) -> None:
    text = cluster_text(**({"servers": 2, "gpus": 2} | changes))
    with pytest.raises(InputError, match=what):
        search(problem_of(tmp_path, text, model, *limits))


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("placement:", "qos:", "GPUs are not described|unknown"),
        ("role: both", "role: both, nodes: 'x*'", "no node is left for the pattern 'x.'"),
        ("    output_tokens: 100", "", "output_tokens"),
        ("{kind: constant, tokens: 500}", "{kind: constant, tokens: 0}", "tokens"),
        ("tflops: 312", "tflops: -1", "tflops"),
        ("placement:", "placement:\n  attainment: 1.5", "attainment: 1.5 .* above 0 and below 1$"),
        ("collectives:", "collectives:\n  schemes: [star]", "collectives.schemes.*star.*write one of ring"),
    ],
)
def test_wrong_files_name_the_line(tmp_path: Path, old: str, new: str, what: str) -> None:
    with pytest.raises(InputError, match=what):
        problem_of(tmp_path, cluster_text().replace(old, new))


def test_a_mixture_of_experts_needs_the_size_of_its_weights(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="size of the weights of mixtral-8x7b"):
        problem_of(tmp_path, cluster_text(), "mixtral-8x7b")
    given = cluster_text().replace("placement:", "placement:\n  weights: 93 GB")
    assert problem_of(tmp_path, given, "mixtral-8x7b").weights_bytes == 93e9
