"""`aggregated`: its cells, the policies that it compares, and its verdicts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvroute.planner.comparison.cells import Cell, Record
from kvroute_engine.files.units import bandwidth_bytes_per_s
from kvroute_studies.aggregated.cases import AGGREGATED_CASES, AggregatedCase, queues
from kvroute_studies.aggregated.network_cases import (
    NETWORK_CASES,
    network_cluster,
    network_rate_per_s,
    network_trace,
)
from kvroute_studies.aggregated.run import (
    AGGREGATED,
    BASELINES,
    BOUNDED,
    CHOICE,
    EXPERIMENT,
    PAIRS,
    play,
    run_cell,
)
from kvroute_studies.aggregated.tables import difference, ttft_s, verdict, verdict_grid, worst_grid

SHORT = "queue/realistic/chatbot load=1"
NETWORK = next(name for name, case in NETWORK_CASES.items() if (case.racks, case.slow_share) == (1, 1))


def cell(policy: str, seed: int = 0, profile: str = SHORT) -> Cell:
    return Cell(experiment=EXPERIMENT.name, reading="paper", profile=profile, settings={}, policy=policy, seed=seed)


def test_cells_have_their_own_names_in_three_sets() -> None:
    sets = {name.split("/")[0] for name in AGGREGATED_CASES}
    assert sets == {"network", "queue", "matrix"}
    for name, case in AGGREGATED_CASES.items():
        assert case.case.name == name.removeprefix("matrix/") if isinstance(case, AggregatedCase) else case.name == name
    assert all(queues(name) for name in AGGREGATED_CASES if not name.startswith("matrix/"))
    assert not queues("matrix/realistic/pure delay")
    assert queues("matrix/paper/FIFO load=1")


@pytest.mark.parametrize(
    ("value", "low", "high"),
    [
        ("nic_gbps", 1.1, 370),
        ("uplink_share", 0.11, 0.97),
        ("prompt_tokens", 130, 59_000),
        ("output_tokens", 32, 580),
        ("load", 0.22, 1.4),
    ],
)
def test_network_cells_cover_every_range(value: str, low: float, high: float) -> None:
    """The first and the last of 120 equal parts of each range have a cell."""
    values = sorted(getattr(case, value) for case in NETWORK_CASES.values())
    assert values[0] <= low
    assert values[-1] >= high


def test_network_cells_cover_sizes_and_ratios() -> None:
    sizes = {case.prefill + case.decode for case in NETWORK_CASES.values()}
    ratios = {case.prefill / case.decode for case in NETWORK_CASES.values()}
    assert min(sizes) == 2
    assert max(sizes) > 55
    assert min(ratios) < 1 / 5
    assert max(ratios) > 5


@pytest.mark.parametrize("name", NETWORK_CASES)
def test_a_network_cell_has_the_cluster_of_its_name(name: str) -> None:
    case = NETWORK_CASES[name]
    file = network_cluster(case).file
    assert len(file.racks) == case.racks
    nics = {float(node.nics.compute.bytes_per_s) for node in file.nodes if node.nics.compute}
    fast = bandwidth_bytes_per_s(f"{case.nic_gbps:g} Gbps")
    assert max(nics) == pytest.approx(fast)
    if case.slow_share < 1 and case.prefill + case.decode > case.racks:
        assert min(nics) == pytest.approx(fast * case.slow_share)
    for rack in file.racks if case.racks > 1 else ():
        below = sum(
            node.nics.compute.count * float(node.nics.compute.bytes_per_s)
            for node in file.nodes
            if node.rack == rack.name and node.nics.compute
        )
        assert rack.uplinks is not None
        assert float(rack.uplinks.bytes_per_s) == pytest.approx(case.uplink_share * below)


def test_a_network_cell_has_poisson_arrivals_at_its_load() -> None:
    case = NETWORK_CASES[NETWORK]
    one, other = (network_trace(case, seed) for seed in (0, 1))
    assert one.requests != other.requests
    assert one.rate_per_s == pytest.approx(network_rate_per_s(case), rel=0.2)
    mean = sum(request.input_tokens for request in one.requests) / len(one.requests)
    assert mean == pytest.approx(case.prompt_tokens, rel=0.3)


@pytest.fixture(scope="module")
def records() -> dict[str, Record]:
    """One seed of a short cell, by policy."""
    return {policy: run_cell(cell(policy)) for policy in EXPERIMENT.policies}


def test_all_policies_get_the_same_requests_on_the_same_instances(records: dict[str, Record]) -> None:
    assert len({record.summary.measured for record in records.values()}) == 1
    assert records[PAIRS].figures["aggregated_share"] == 0.0
    assert records[AGGREGATED].figures["aggregated_share"] == 1.0
    assert all(0.0 < records[name].figures["aggregated_share"] < 1.0 for name in (CHOICE, BOUNDED))
    assert records[AGGREGATED].summary.kv_bytes == 0.0


def test_the_choice_is_faster_than_pairs_and_than_the_bounded_choice(records: dict[str, Record]) -> None:
    own_s = records[CHOICE].figures["response_s"]
    assert all(own_s < records[name].figures["response_s"] for name in (PAIRS, BOUNDED))


def test_a_cell_changes_roles_chunks_and_outputs() -> None:
    name = "queue/realistic/8 prefill load=0.5"
    run, _ = play(AGGREGATED_CASES[name], cell(PAIRS, profile=name))
    assert len(set(run.outcomes.source.tolist())) > 4
    plain = AGGREGATED_CASES["queue/realistic/load=1"]
    short, _ = play(plain, cell(PAIRS))
    long, _ = play(AGGREGATED_CASES["queue/realistic/outputs x4 load=1"], cell(PAIRS))
    assert long.outcomes.output_tokens.tolist() == [4 * tokens for tokens in short.outcomes.output_tokens.tolist()]


def made(records: dict[str, Record], response_s: dict[str, list[float]], profile: str = SHORT) -> list[Record]:
    """Return records with these mean response times, one for each seed."""
    return [
        msgspec.structs.replace(
            records[policy],
            cell=cell(policy, seed, profile),
            key=cell(policy, seed, profile).key,
            figures={"response_s": seconds, "aggregated_share": 0.5, "rejected": 1.0},
        )
        for policy, values in response_s.items()
        for seed, seconds in enumerate(values)
    ]


TIMES = {PAIRS: [8.0, 9.0, 10.0], AGGREGATED: [5.0, 6.0, 7.0], BOUNDED: [5.5, 6.5, 7.5]}


@pytest.mark.parametrize(
    ("own", "equal", "above_pairs", "worst"),
    [
        ([4.0, 5.0, 6.0], 1, 0, -100 / 6),
        ([5.2, 6.2, 7.2], 0, 0, 20 / 6),
        ([4.0, 6.2, 8.4], 1, 0, 20 / 6),  # above by as much, within the noise
        ([9.0, 10.0, 11.0], 0, 1, 400 / 6),
    ],
)
def test_verdicts_use_paired_differences_to_the_best(
    records: dict[str, Record], own: list[float], equal: int, above_pairs: int, worst: float
) -> None:
    """The seeds differ by more than the policies do."""
    judged = verdict(made(records, TIMES | {CHOICE: own}))
    assert (judged.cells, judged.equal, judged.above_pairs) == (1, equal, above_pairs)
    assert judged.worst is not None
    assert judged.worst.percent == pytest.approx(worst)
    assert judged.rejected == dict.fromkeys((CHOICE, *BASELINES), 3)


def test_a_cell_without_one_of_the_policies_is_not_judged(records: dict[str, Record]) -> None:
    some = made(records, {CHOICE: [1.0], PAIRS: [1.0], AGGREGATED: [1.0]})
    assert verdict(some).cells == 0
    assert difference(some, BASELINES) is None


def test_first_tokens_are_compared_with_pairs_and_the_bounded_choice(records: dict[str, Record]) -> None:
    some = made(records, {name: [1.0] for name in EXPERIMENT.policies})
    late = [
        msgspec.structs.replace(
            record,
            summary=msgspec.structs.replace(
                record.summary, ttft_s=msgspec.structs.replace(record.summary.ttft_s, mean=seconds)
            ),
        )
        for record, seconds in zip(some, (1.03, 2.0, 0.5, 1.0), strict=True)
    ]
    assert [record.cell.policy for record in late] == [CHOICE, PAIRS, AGGREGATED, BOUNDED]
    judged = verdict(late)
    assert judged.ttft_above == 1
    assert judged.ttft == pytest.approx(-48.5)
    found = difference(late, (PAIRS, BOUNDED), ttft_s)
    assert found is not None
    assert found.percent == pytest.approx(3.0)


def test_tables_list_sets_and_the_worst_cells(records: dict[str, Record]) -> None:
    times = {name: [1.0, 1.0] for name in BASELINES}
    some = made(records, times | {CHOICE: [1.1, 1.1]}) + made(records, times | {CHOICE: [1.3, 1.3]}, NETWORK)
    grid: Any = verdict_grid(some)
    assert [(row[0].text, row[1].text) for row in grid.rows[::4]] == [("queue", CHOICE), ("network", CHOICE)]
    assert grid.rows[0][3].text == "+10.0"
    worst: Any = worst_grid(some)
    assert [row[0].text for row in worst.rows] == [NETWORK, SHORT]
    assert len(worst_grid(some, 1).rows) == 1
