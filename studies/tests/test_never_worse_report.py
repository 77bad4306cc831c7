"""The page of the matrix: a loss must exceed chance, the worst one comes first, and noise is called noise."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, sqrt
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.planner.comparison.cells import Cell, Record
from kvroute.sim.metrics import RequestCounts, Spread, Summary, TtftParts
from kvroute.types import InputError
from kvroute_studies.never_worse.findings import geometric_mean, losses, matrix_findings, p99_s, pair, terms
from kvroute_studies.never_worse.page import verdict, write_never_worse
from kvroute_studies.never_worse.tables import (
    cells_grid,
    headline_grid,
    losses_grid,
    seen_grid,
    terms_grid,
)
from kvroute_studies.never_worse.verdicts import ABLATION, FORESEEN, MATRIX

FAIR, OTHER, LYING = "paper/load=1", "nic150-flow/load=1", "paper/0.5 on tier 3 reported for tier 2"
NOISE = (0.0, 0.01, -0.01, 0.002)


def record(case: str, policy: str, seed: int, ttft_s: float, sweep: str = MATRIX.name, tbt_s: float = 0.013) -> Record:
    """Return a run with a TTFT and a TBT; its P99 is twice the mean."""
    cell = Cell(experiment=sweep, reading="", profile=case, settings={}, policy=policy, seed=seed)
    summary = Summary(
        policy=policy,
        seed=seed,
        requests=RequestCounts(arrived=1, finished=1, rejected=0, in_flight=0),
        measured=1,
        ttft_s=Spread(mean=ttft_s, p99=2 * ttft_s),
        ttft_parts_s=TtftParts(),
        transfer_s=Spread(),
        tbt_s=Spread(mean=tbt_s),
        tpot_s=Spread(),
        slo_attainment=1.0,
        goodput_per_s=10.0 - ttft_s,
        throughput_per_s=None,
        tier_share={},
        cache_hit=None,
        prefill_cache_hit=None,
        kv_bytes=0.0,
        link_load={},
        wall_s=0.0,
        cpu_s=0.0,
    )
    return Record(key=cell.key, cell=cell, config={}, summary=summary)


def runs(case: str, sweep: str = MATRIX.name, **means: float) -> list[Record]:
    """Return four seeds of each policy (`_` for `-`): foresight's values differ from the others' by a little noise."""
    return [
        record(case, name.replace("_", "-"), seed, mean + (NOISE[seed] if name == "foresight" else 0.0), sweep)
        for name, mean in means.items()
        for seed in range(4)
    ]


seconds = st.floats(0.1, 10.0)


@given(st.lists(st.tuples(seconds, seconds), min_size=2, max_size=8))
def test_a_difference_is_significant_beyond_two_standard_errors(values: list[tuple[float, float]]) -> None:
    """The standard error equals SciPy's; at most one of the two directions counts, and exchanging the pair reverses
    it."""
    from scipy.stats import sem

    records = [record(FAIR, name, seed, both[k]) for seed, both in enumerate(values) for k, name in enumerate("ab")]
    forward, backward = pair(records[::-1], FAIR, "a", "b"), pair(records, FAIR, "b", "a")
    assert forward is not None
    assert backward is not None
    gaps = [a - b for a, b in values]
    mean, error = sum(gaps) / len(gaps), float(sem(gaps))
    assert forward.difference == pytest.approx(mean, abs=1e-12)
    assert forward.error == pytest.approx(error, abs=1e-12)
    if abs(abs(mean) - 2 * error) > 1e-6:
        assert forward.is_higher == (mean > 2 * error)
        assert forward.is_lower == (-mean > 2 * error)
    assert (backward.is_lower, backward.is_higher) == (forward.is_higher, forward.is_lower)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=20))
def test_the_geometric_mean_equals_scipys(ratios: list[float]) -> None:
    from scipy.stats import gmean

    assert geometric_mean(ratios) == pytest.approx(float(gmean(ratios)))
    assert geometric_mean([]) is None


def test_losses_are_sorted_and_have_a_reason() -> None:
    """2 % above netkv and 20 % above cla under a lying oracle are losses; half a percent is noise; a lower value is no
    loss."""
    matrix = [
        *runs(FAIR, foresight=1.02, cla=1.3, netkv=1.0),
        *runs(OTHER, foresight=1.005, cla=1.0, netkv=1.1),
        *runs(LYING, foresight=1.2, cla=1.0, netkv=1.4),
    ]
    assert [(loss.case, loss.second) for loss in losses(matrix)] == [(LYING, "cla"), (FAIR, "netkv")]
    grid = losses_grid(matrix)
    texts = [[entry.text for entry in row] for row in grid.rows]
    assert [row[:3] for row in texts] == [[LYING, "cla", "lying"], [FAIR, "netkv", "truthful"]]
    assert "Telemetry wrongly reports" in texts[0][-1]
    assert texts[1][-1] == "no reason found"
    assert "2 of 3 cells (1 of them with a lying oracle)" in verdict(matrix)


def test_falsified_oracles_are_reported_separately() -> None:
    """The geometric mean against netkv is of 1/2 and 1/1.25; the lying oracle is not included."""
    matrix = [
        *runs(FAIR, foresight=1.0, cla=1.25, netkv=2.0),
        *runs(OTHER, foresight=1.0, cla=1.25, netkv=1.25),
        *runs(LYING, foresight=3.0, cla=1.0, netkv=1.0),
    ]
    findings = {(finding.profile, finding.claim): finding for finding in matrix_findings(matrix, [])}
    lead = findings["truthful or silent oracle", "at least 8% below netkv"]
    assert lead.holds == "holds"
    assert f"{sqrt(1.0005**2 / 2.5):.3f}"[:4] in lead.sentence
    assert findings["truthful or silent oracle", "mean TTFT not above cla in any cell"].holds == "holds"
    assert findings["lying oracle", "mean TTFT at most 10 % above cla"].holds == "does not hold"
    assert findings["truthful or silent oracle", "TBT within 1 ms of cla"].holds == "holds"
    slower = [*runs(FAIR, cla=1.0, netkv=1.0), *(record(FAIR, "foresight", s, 0.9, tbt_s=0.0145) for s in range(4))]
    (tbt,) = (finding for finding in matrix_findings(slower, []) if finding.claim.startswith("TBT"))
    assert tbt.holds == "does not hold"
    assert f"{FAIR} +1.50 ms" in tbt.sentence
    one_seed = [of_matrix for of_matrix in matrix if of_matrix.cell.seed == 0]
    assert {finding.holds for finding in matrix_findings(one_seed, [])} == {"unclear"}


def test_lost_goodput_is_reported_in_requests() -> None:
    """A large relative loss of a very small goodput is a small loss."""
    matrix = [*runs(FAIR, foresight=9.96, cla=9.92, netkv=9.92), *runs(OTHER, foresight=2.0, cla=1.0, netkv=3.0)]
    findings = {finding.claim: finding for finding in matrix_findings(matrix, []) if "goodput" in finding.claim}
    lost = findings["goodput not below cla in any cell"]
    assert lost.holds == "does not hold"
    assert f"lower in 2, by at most 50.63% ({FAIR}: 0.04/s instead of 0.08/s)." in lost.sentence


def test_the_value_of_a_term_is_the_loss_without_it() -> None:
    """Against the better of the two rivals the ratio is 0.8 with every term, and 1.1 at worst without uplinks."""
    matrix = [*runs(FAIR, cla=1.0, netkv=2.0), *runs(OTHER, cla=3.0, netkv=1.0)]
    ablation = [
        *runs(FAIR, ABLATION.name, foresight=0.8),
        *runs(OTHER, ABLATION.name, foresight=0.8),
        *(
            record(case, "no uplinks", seed, ttft_s, ABLATION.name)
            for case, ttft_s in ((FAIR, 0.8), (OTHER, 1.1))
            for seed in range(4)
        ),
    ]
    whole, without = terms(ablation, matrix)
    assert (whole.variant, without.worst_case, without.cells) == ("foresight", OTHER, 2)
    assert (whole.mean, without.worst) == pytest.approx((0.8, 1.1), rel=0.01)
    assert without.mean == pytest.approx(sqrt(0.8 * 1.1))
    assert without.beside == pytest.approx(sqrt(1.1 / 0.8), rel=0.01)
    assert [row[0].text for row in terms_grid(ablation, matrix).rows] == ["all terms", "no uplinks"]


def test_results_are_compared_with_the_descent() -> None:
    seen = runs(FAIR, FORESEEN.name, foresight=1.04, cla=1.3, netkv=1.2, clairvoyant=1.0)
    (finding,) = (
        claimed
        for claimed in matrix_findings(runs(FAIR, foresight=1.0, cla=1.0, netkv=1.0), seen)
        if "descent" in claimed.claim
    )
    assert finding.holds == "holds"
    assert "foresight +4.0%, netkv +20.0%, cla +30.0%" in finding.sentence
    assert seen_grid(seen).rows[0][1].text == "1,000"


def test_tables_show_every_cell_including_those_not_run() -> None:
    matrix = runs(FAIR, foresight=0.9, cla=1.0, netkv=1.0, round_robin=2.0)
    grid = cells_grid(matrix, {"realistic/mooncake load=1": "not run: give it"})
    assert [row[0].text for row in grid.rows] == [FAIR, "realistic/mooncake load=1"]
    assert {len(row) for row in grid.rows} == {len(grid.headings)}
    assert grid.rows[1][2].text == "not run: give it"
    assert grid.rows[0][3].text.startswith("0.45")
    assert grid.rows[0][3].best
    assert [row[0].text for row in headline_grid(matrix).rows] == ["round-robin", "cla", "netkv"]
    gap = pair(matrix, FAIR, "foresight", "cla", p99_s)
    assert gap is not None
    assert gap.ours == pytest.approx(1.801)
    assert pair(matrix, FAIR, "foresight", "no-such-policy") is None


@pytest.mark.parametrize("lost", [False, True], ids=["no loss", "a loss"])
def test_the_page_starts_with_the_losses(lost: bool, tmp_path: Path) -> None:
    """The page is one file with its figures; a part of the matrix is sufficient."""
    matrix = runs(FAIR, foresight=1.1 if lost else 0.9, cla=1.0, netkv=1.2)
    ablation = runs(FAIR, ABLATION.name, foresight=0.9)
    seen = runs(FAIR, FORESEEN.name, foresight=1.0, cla=1.1, netkv=1.2, clairvoyant=0.99)
    page = write_never_worse(matrix, ablation, seen, tmp_path, {"realistic/mooncake load=1": "not run: give it"})
    text = page.read_text()
    assert ("None: in no cell" in text) != lost
    assert text.index("Cells where foresight loses") < text.index("Claims") < text.index("<figure>")
    assert text.count("<figure>") == 3
    assert "not run: give it" in text
    assert {path.name for path in (tmp_path / "figures").iterdir()} >= {"ratios.png", "trade.svg", "terms.png"}


def test_rejections_are_shown_with_the_times() -> None:
    """A tenth is rejected under foresight, half under CLA*: the faster one has fewer responses in its mean."""
    matrix = [
        *(with_rejections(run, 1) for run in runs(FAIR, foresight=1.02)),
        *(with_rejections(run, 5) for run in runs(FAIR, cla=1.0)),
        *runs(OTHER, foresight=0.9, cla=1.0),
    ]
    texts = {row[0].text: row[-1] for row in cells_grid(matrix, {}).rows}
    assert (texts[FAIR].text, texts[FAIR].detail) == ("10.0%", "50.0%")
    assert (texts[OTHER].text, texts[OTHER].detail) == ("0", "")
    (lost,) = losses_grid(matrix).rows
    assert (lost[-2].text, lost[-2].detail) == ("10.0%", "50.0%")


def with_rejections(each: Record, rejected: int) -> Record:
    """Return the same run with ten requests, of which this number is rejected for lack of room."""
    counts = RequestCounts(arrived=10, finished=10 - rejected, rejected=rejected, in_flight=0)
    return msgspec.structs.replace(each, summary=msgspec.structs.replace(each.summary, requests=counts))


def test_the_page_names_results_of_unknown_code(tmp_path: Path) -> None:
    matrix = runs(FAIR, foresight=0.9, cla=1.0, netkv=1.2)
    signed = [msgspec.structs.replace(record, code="0123456789abcdef") for record in matrix]
    message = "do not record their code version"
    assert (
        f"4 of 12 results {message}" in write_never_worse([*signed[4:], *matrix[:4]], [], [], tmp_path, {}).read_text()
    )
    assert message not in write_never_worse(signed, [], [], tmp_path, {}).read_text()


def test_a_page_without_results_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no result"):
        write_never_worse([], [], [], tmp_path, {})
    assert not list(tmp_path.iterdir())


def test_a_run_without_a_first_token_is_left_out() -> None:
    """The seed of such a run is in no pair."""
    records: Sequence[Record] = runs(FAIR, foresight=1.0, cla=1.0)
    empty = msgspec.structs.replace(records[0].summary, ttft_s=Spread())
    gap = pair([msgspec.structs.replace(records[0], summary=empty), *records[1:]], FAIR, "foresight", "cla")
    assert gap is not None
    assert gap.seeds == 3
    assert gap.error is not None
    assert gap.error < inf
