"""Sweeps that can be stopped at any time: finished cells are kept, missing ones are run, none is run twice."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.planner.comparison.cells import Cell, Record, encode
from kvroute.sim.metrics import RequestCounts, Spread, Summary, TtftParts
from kvroute.types import InputError
from kvroute_studies.shared.provenance import code_of
from kvroute_studies.shared.runner import finished, run_cells

SWEEP = [
    Cell(experiment="test", reading="paper", profile="rag", settings={"load": load}, policy=policy, seed=seed)
    for load in (0.5, 1.0)
    for seed in (0, 1)
    for policy in ("cla", "netkv")
]


def record_of(cell: Cell) -> Record:
    """Return a record whose TTFT identifies the cell."""
    summary = Summary(
        policy=cell.policy,
        seed=cell.seed,
        requests=RequestCounts(arrived=1, finished=1, rejected=0, in_flight=0),
        measured=1,
        ttft_s=Spread(mean=cell.settings["load"] + cell.seed),
        ttft_parts_s=TtftParts(),
        transfer_s=Spread(),
        tbt_s=Spread(),
        tpot_s=Spread(),
        slo_attainment=1.0,
        goodput_per_s=1.0,
        throughput_per_s=1.0,
        tier_share={},
        cache_hit=0.0,
        prefill_cache_hit=0.0,
        kv_bytes=0.0,
        link_load={},
        wall_s=0.0,
        cpu_s=0.0,
    )
    return Record(key=cell.key, cell=cell, config={}, summary=summary)


class Interrupted:
    """Runs a number of cells, then raises KeyboardInterrupt; it records the cells that it ran."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.ran: list[str] = []

    def __call__(self, cell: Cell) -> Record:
        if len(self.ran) == self.after:
            raise KeyboardInterrupt
        self.ran.append(cell.key)
        return record_of(cell)


@given(stops=st.lists(st.integers(0, 5), max_size=4), cut=st.integers(0, 200))
def test_every_cell_is_run_once_despite_interruptions(
    tmp_path_factory: pytest.TempPathFactory, stops: list[int], cut: int
) -> None:
    """The sweep is stopped several times, and once a kill truncates the last line: at the end each cell is there, in
    order."""
    path = tmp_path_factory.mktemp("runs") / "results.jsonl"
    ran: list[str] = []
    for stop in stops:
        start = Interrupted(stop)
        with suppress(KeyboardInterrupt):
            run_cells(SWEEP, start, path, workers=1)
        ran += start.ran
    lost = 0
    if path.exists() and (text := path.read_bytes()).count(b"\n"):
        last = len(text) - text[:-1].rfind(b"\n") - 1
        lost = int(0 < cut < last)
        path.write_bytes(text[: len(text) - (cut if lost else 0)])
    last_start = Interrupted(len(SWEEP))
    records = run_cells(SWEEP, last_start, path, workers=1)
    assert [record.cell for record in records] == SWEEP
    assert len(ran) + len(last_start.ran) == len(SWEEP) + lost
    assert [record.summary.ttft_s.mean for record in records] == [cell.settings["load"] + cell.seed for cell in SWEEP]
    assert set(finished(path)) == {cell.key for cell in SWEEP}


def test_several_processes_give_the_same_records(tmp_path: Path) -> None:
    """With two workers, the records are in the order of the cells, for any order in which they end."""
    done: list[tuple[int, int]] = []
    records = run_cells(SWEEP, record_of, tmp_path / "r.jsonl", workers=2, progress=lambda *now: done.append(now))
    assert [record.cell for record in records] == SWEEP
    assert done[-1] == (len(SWEEP), len(SWEEP))


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    """A line that is no record in the middle of the file is reported."""
    path = tmp_path / "results.jsonl"
    run_cells(SWEEP[:2], record_of, path, workers=1)
    path.write_bytes(b"not a record\n" + path.read_bytes())
    with pytest.raises(InputError, match=r"results.jsonl:1: the line is not a valid result"):
        run_cells(SWEEP, record_of, path, workers=1)


def test_results_of_another_study_are_rejected(tmp_path: Path) -> None:
    """The cells are equal but use another trace: they are rejected before anything is run."""
    path = tmp_path / "results.jsonl"
    run_cells(SWEEP[:2], record_of, path, {}, workers=1)
    with pytest.raises(InputError, match="another trace"):
        run_cells(SWEEP, record_of, path, {"trace": "mine"}, workers=1)


def test_an_unknown_executor_is_named(tmp_path: Path) -> None:
    """`--on mars`."""
    with pytest.raises(InputError, match="choose local or ray"):
        run_cells(SWEEP, record_of, tmp_path / "r.jsonl", on="mars")


def test_results_of_other_code_are_run_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One sentence reports it; these results stay in the file. Results without a digest and results of this code
    count."""
    path = tmp_path / "results.jsonl"
    run_cells(SWEEP, record_of, path, workers=1)
    ours = list(finished(path).values())
    assert [record.code for record in ours] == [code_of(cell.policy) for cell in SWEEP]
    left = [*ours[:5], msgspec.structs.replace(ours[5], code=""), *(other_code(record) for record in ours[6:])]
    path.write_bytes(b"".join(encode(record) + b"\n" for record in left))
    assert finished(path).keys() == {cell.key for cell in SWEEP[:6]}
    start = Interrupted(len(SWEEP))
    records = run_cells(SWEEP, start, path, workers=1)
    assert start.ran == [cell.key for cell in SWEEP[6:]]
    assert records == [*ours[:5], left[5], *ours[6:]]
    assert len(path.read_bytes().splitlines()) == len(SWEEP) + 2
    again = Interrupted(0)
    assert run_cells(SWEEP, again, path, workers=1) == records
    path.write_bytes(path.read_bytes() + encode(other_code(ours[0])) + b"\n")
    assert run_cells(SWEEP, again, path, workers=1) == records
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "ignoring 2 results of a different code version; requested cells are run again"
    ]


def other_code(record: Record) -> Record:
    """Return the record as another version of the code would write it."""
    return msgspec.structs.replace(record, code=record.code[::-1] + "0")
