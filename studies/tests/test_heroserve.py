"""`heroserve-online`: its cells, options and page."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvroute.cli.app import app
from kvroute.planner.comparison.cells import Cell, Record
from kvroute_studies.heroserve.results import online_findings, online_grid, ratio, write_online
from kvroute_studies.heroserve.run import (
    AGGREGATION,
    ONLINE,
    RINGS,
    STALE,
    Unit,
    priced_options_of,
    run_cell,
)
from kvroute_studies.shared.cells import cells


def cell(policy: str, span: float = 4.0, background: float = 0.0, seed: int = 0) -> Cell:
    settings = {"span": span, "background": background}
    return Cell(experiment=ONLINE.name, reading="paper", profile="unit", settings=settings, policy=policy, seed=seed)


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return [run_cell(cell(policy, seed=seed), end_s=0.02) for policy in ONLINE.policies for seed in (0, 1)]


def test_ring_and_aggregation_put_their_bytes_on_the_links() -> None:
    """Over four servers a ring sends 1.5 times the tensor over each NIC and aggregation sends it once."""
    unit = Unit()
    ring, aggregation = unit.ring([0, 1, 2, 3], 1), unit.aggregation([0, 1, 2, 3], 1)
    nics = sorted(link for server in range(4) for link in (unit.up(server, 1), unit.down(server, 1)))
    assert ring.option.links.tolist() == nics
    assert ring.option.share.tolist() == pytest.approx([1.5] * 8)
    assert aggregation.option.links.tolist() == sorted([*nics, unit.slots(1)])
    assert aggregation.option.share.tolist() == [1.0] * 9


def test_groups_span_the_given_servers() -> None:
    for choices in priced_options_of(Unit(), 8, 3):
        assert [way.option.name for way in choices] == [
            "hierarchical-ring 0",
            "hierarchical-ring 1",
            "hierarchical-ina 0",
            "hierarchical-ina 1",
        ]
        assert len(choices[0].option.links) == 16


def test_restricted_policies_use_their_schemes_only(records: list[Record]) -> None:
    share = {record.cell.policy: record.figures["aggregated_share"] for record in records}
    assert share[RINGS] == 0.0
    assert share[AGGREGATION] == 1.0
    assert 0.0 < share["outstanding"] < 1.0


def test_over_two_servers_aggregation_brings_nothing() -> None:
    """A ring over two servers sends as many bytes as aggregation, and no slots limit it."""
    rings, both = (run_cell(cell(policy, span=2.0), end_s=0.03).figures for policy in (RINGS, "outstanding"))
    assert both["slowdown_mean"] == pytest.approx(rings["slowdown_mean"], rel=0.03)


def test_one_scheduler_is_faster_than_stale_replicas(records: list[Record]) -> None:
    found = ratio(records, (4.0, 0.0), ("outstanding", STALE))
    assert found is not None
    assert found.mean > 1.1


def test_a_cell_runs_again_alike() -> None:
    assert run_cell(cell("ecmp"), end_s=0.01).figures == run_cell(cell("ecmp"), end_s=0.01).figures


def test_the_page_has_every_policy(records: list[Record], tmp_path: Path) -> None:
    text = write_online(ONLINE, records, tmp_path).read_text()
    for policy in ONLINE.policies:
        assert policy in text
    assert len(online_grid(records).rows) == len(ONLINE.policies)
    assert {finding.holds for finding in online_findings(records)} <= {"holds", "does not hold", "unclear"}
    assert (tmp_path / "figures" / "online.png").is_file()


def test_all_cells_have_names() -> None:
    found = cells(ONLINE, "paper", ONLINE.profiles, (0, 1, 2))
    assert len({cell.key for cell in found}) == 3 * 2 * 10 * 3


def test_one_cell_runs_from_the_command_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["experiment", "heroserve-online", "--cell", "unit,2,0,static", "--out", str(tmp_path), "--seeds", "1"]
    )
    assert result.exit_code == 0, result.output
    assert "static" in result.output
