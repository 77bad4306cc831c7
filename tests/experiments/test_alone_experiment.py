"""`alone`: its cells, the policies that it compares, and its verdicts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvroute.comparison.cells import Cell, Record
from kvroute.experiments.alone import AGGREGATED, ALONE, BASELINES, BOUNDED, CHOICE, JOINT_PAIRS, PAIRS, play, run_cell
from kvroute.experiments.alone_cases import ALONE_CASES
from kvroute.report.alone_tables import alone_grid, difference, tpot_p99_s, verdict

SHORT = "realistic/chatbot load=1"


def cell(policy: str, seed: int = 0, profile: str = SHORT) -> Cell:
    return Cell(experiment=ALONE.name, reading="paper", profile=profile, settings={}, policy=policy, seed=seed)


def test_every_cell_queues_its_prompts() -> None:
    """An instance that computes several prompts in the time of one could not be compared."""
    assert len(ALONE_CASES) == 60
    for name, one in ALONE_CASES.items():
        assert one.case.name == name
        assert one.case.reading == "realistic" or "prefill_queueing=true" in one.case.changes


@pytest.fixture(scope="module")
def records() -> dict[str, Record]:
    """One seed of a short cell, by policy."""
    return {policy: run_cell(cell(policy)) for policy in ALONE.policies}


def test_all_policies_get_the_same_requests_on_the_same_instances(records: dict[str, Record]) -> None:
    assert len({record.summary.measured for record in records.values()}) == 1
    assert records[PAIRS].figures["alone_share"] == records[JOINT_PAIRS].figures["alone_share"] == 0.0
    assert records[AGGREGATED].figures["alone_share"] == 1.0
    for name in (CHOICE, BOUNDED):
        assert 0.0 < records[name].figures["alone_share"] < 1.0
    assert records[AGGREGATED].summary.kv_bytes == 0.0


def test_the_choice_is_faster_than_pairs_and_than_no_pairs(records: dict[str, Record]) -> None:
    own_s = records[CHOICE].figures["response_s"]
    assert all(own_s < records[name].figures["response_s"] for name in BASELINES)


def test_the_bound_shortens_the_slowest_responses(records: dict[str, Record]) -> None:
    pairs_s, bounded_s, choice_s = (tpot_p99_s(records[name]) or 0.0 for name in (PAIRS, BOUNDED, CHOICE))
    assert 0.0 < pairs_s < bounded_s < choice_s


def test_a_cell_changes_roles_chunks_and_outputs() -> None:
    run, _ = play(ALONE_CASES["realistic/8 prefill load=0.5"], cell(PAIRS, profile="realistic/8 prefill load=0.5"))
    assert len(set(run.outcomes.source.tolist())) > 4
    plain = ALONE_CASES["realistic/load=1"]
    short, _ = play(plain, cell(PAIRS))
    long, _ = play(ALONE_CASES["realistic/outputs x4 load=1"], cell(PAIRS))
    assert long.outcomes.output_tokens.tolist() == [4 * tokens for tokens in short.outcomes.output_tokens.tolist()]


def made(records: dict[str, Record], response_s: dict[str, list[float]]) -> list[Record]:
    """Return records with these mean response times, one for each seed."""
    return [
        msgspec.structs.replace(
            records[policy],
            cell=cell(policy, seed),
            key=cell(policy, seed).key,
            figures={"response_s": seconds, "alone_share": 0.5},
        )
        for policy, values in response_s.items()
        for seed, seconds in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("own", "worse", "better"),
    [
        ([4.0, 5.1, 6.0], [], True),
        ([5.2, 6.1, 7.2], [AGGREGATED], False),
        ([4.9, 6.2, 6.9], [], False),
        ([9.0, 10.1, 11.0], list(BASELINES), False),
    ],
)
def test_verdicts_use_paired_differences(
    records: dict[str, Record], own: list[float], worse: list[str], better: bool
) -> None:
    """The seeds differ by more than the policies do."""
    times = {PAIRS: [8.0, 9.0, 10.0], JOINT_PAIRS: [7.0, 8.0, 9.0], AGGREGATED: [5.0, 6.0, 7.0], CHOICE: own}
    some = made(records, times)
    judged = verdict(some)
    assert judged.cells == 1
    assert [name for name, cells in judged.worse.items() if cells] == worse
    assert judged.better == ([SHORT] if better else [])
    found = difference(some, AGGREGATED)
    assert found is not None
    assert found.percent == pytest.approx(100 * (sum(own) / 18 - 1))


def test_the_table_has_one_row_for_each_cell(records: dict[str, Record]) -> None:
    grid: Any = alone_grid(list(records.values()))
    assert len(grid.rows) == 1
    assert grid.rows[0][0].text == SHORT
    assert "1 cells" in grid.caption
