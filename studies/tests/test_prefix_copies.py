"""`prefix-copies`: its requests, its policies, and the text about its runs."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.control.state.hotspots import CopySpec
from kvroute.planner.comparison.cells import Cell, Record
from kvroute_studies.prefix_copies.page import copies_findings, copies_grid, gain, write_copies
from kvroute_studies.prefix_copies.run import (
    BLOCK_TOKENS,
    CONVERSATIONS,
    DOCUMENTS,
    OWN,
    PREFIX_COPIES,
    documents,
    requests_of,
    run_cell,
    spec_of,
)
from kvroute_studies.shared.cells import cells

SHORT_S = 180.0


def cell(policy: str, seed: int = 0, profile: str = DOCUMENTS) -> Cell:
    """Return a cell of the sweep."""
    return Cell(experiment=PREFIX_COPIES.name, reading="paper", profile=profile, settings={}, policy=policy, seed=seed)


@given(st.integers(0, 1_000), st.floats(0.2, 4.0))
def test_a_question_continues_its_document(seed: int, rate_per_s: float) -> None:
    """The document comes first, alone and whole; a question's own tokens are not shared."""
    trace = documents(np.random.default_rng(seed), rate_per_s, 200.0)
    ends: dict[int, float] = {}
    own: defaultdict[int, int] = defaultdict(int)
    for request in trace.requests:
        assert len(request.blocks) == request.input_tokens // BLOCK_TOKENS
        depth = sum(block < 10_000_000 for block in request.blocks)
        document = request.blocks[0] // 1_000
        assert request.blocks[:depth] == tuple(range(document * 1_000, document * 1_000 + depth))
        if request.input_tokens == depth * BLOCK_TOKENS and document not in ends:
            ends[document] = request.at_s
        assert ends[document] <= request.at_s
        for block in request.blocks[depth:]:
            own[block] += 1
    assert set(own.values()) <= {1}


def test_policies_get_the_same_requests_and_differ_only_by_their_option() -> None:
    assert (
        requests_of(CONVERSATIONS, 3, 60.0)
        == requests_of(CONVERSATIONS, 3, 60.0)
        != requests_of(CONVERSATIONS, 4, 60.0)
    )
    own, pool, exchange, ahead, _, both = map(spec_of, PREFIX_COPIES.policies)
    assert own.offload is not None
    assert exchange.offload is not None
    assert (own.offload.rule, exchange.offload.rule) == ("scarce", "auto")
    assert [spec.prefix_pool for spec in (own, pool, exchange, both)] == [False, True, False, True]
    assert [spec.copies for spec in (own, ahead, both)] == [None, CopySpec(), CopySpec()]
    assert len(cells(PREFIX_COPIES, "paper", PREFIX_COPIES.profiles, (0, 1))) == 2 * 6 * 2


@pytest.fixture(scope="module")
def records() -> list[Record]:
    """Four policies, two seeds, short runs."""
    policies = (OWN, "exchange", "exchange+ahead", "exchange+pool")
    return [run_cell(cell(policy, seed), SHORT_S) for policy in policies for seed in (0, 1)]


def test_figures_equal_those_of_the_run(records: list[Record]) -> None:
    """With own caches nothing is copied and KV moves only towards home; bytes between the sites include the KV
    caches."""
    by_name = {(record.cell.policy, record.cell.seed): record for record in records}
    for seed in (0, 1):
        own, exchange = by_name[OWN, seed], by_name["exchange", seed]
        assert own.figures["copied_gb"] == own.figures["ahead_gb"] == own.figures["ingress_gb"] == 0.0
        assert own.figures["egress_gb"] > 0.0
        assert exchange.figures["copied_gb"] > 0.0
        assert exchange.figures["copied_gb"] == exchange.summary.copied_prefixes.kv_bytes / 1e9
        assert by_name["exchange+ahead", seed].figures["ahead_gb"] > 0.0


def test_gains_pair_runs_of_the_same_requests(records: list[Record]) -> None:
    """The base is the run with own caches, or the same policy without copies ahead."""
    goodput = {(record.cell.policy, record.cell.seed): record.summary.goodput_per_s or 0.0 for record in records}
    for policy, base in (("exchange", OWN), ("exchange+ahead", "exchange")):
        difference = gain(records, policy)
        assert difference is not None
        assert difference.mean == pytest.approx(
            np.mean([goodput[policy, seed] - goodput[base, seed] for seed in (0, 1)])
        )
    assert gain(records, OWN) is None


def test_page_and_table_contain_every_policy_of_the_run(records: list[Record], tmp_path: Path) -> None:
    table = copies_grid(records)
    assert [row[1].text for row in table.rows] == [OWN, "exchange", "exchange+ahead", "exchange+pool"]
    assert {finding.claim for finding in copies_findings(records)} >= {"exchange+ahead costs no goodput"}
    page = write_copies(PREFIX_COPIES, records, tmp_path).read_text()
    assert "exchange+pool below exchange" in page
    assert "kvroute experiment prefix-copies" in page
    assert (tmp_path / "figures" / "copies.png").exists()
