"""The agent's table: its file and its age."""

from __future__ import annotations

from pathlib import Path

from kvroute_engine.agent.agent import HeldTable
from kvroute_engine.agent.files import TABLE, GroupEntry, SchemeRule, TableFile, read_file
from kvroute_engine.agent.reports import AgentTable

ENTRIES = {"decode-0": GroupEntry(7, (SchemeRule("ina", 4096), SchemeRule("ring")))}


def received(folder: Path) -> float:
    table = read_file(folder / TABLE, TableFile)
    assert table is not None
    return table.received_unix_s


def test_heartbeats_refresh_the_age_and_the_file_once_a_second(tmp_path: Path) -> None:
    held = HeldTable(tmp_path)
    assert (held.version, held.age_s(50.0)) == (0, None)
    held.receive(AgentTable(7, ENTRIES), 100.0)
    held.heartbeat(7, 100.5)
    assert (held.version, held.age_s(102.5), received(tmp_path)) == (7, 2.0, 100.0)
    held.heartbeat(7, 101.0)
    assert (held.age_s(102.5), received(tmp_path)) == (1.5, 101.0)


def test_heartbeats_of_other_tables_refresh_nothing(tmp_path: Path) -> None:
    """Such as those of a scheduler that has just started and has no table yet."""
    held = HeldTable(tmp_path)
    held.heartbeat(0, 99.0)
    assert not (tmp_path / TABLE).exists()
    held.receive(AgentTable(7, ENTRIES), 100.0)
    held.heartbeat(0, 105.0)
    held.heartbeat(8, 105.0)
    assert (held.age_s(106.0), received(tmp_path)) == (6.0, 100.0)


def test_an_agent_that_starts_again_has_its_table_and_its_age(tmp_path: Path) -> None:
    HeldTable(tmp_path).receive(AgentTable(7, ENTRIES), 100.0)
    again = HeldTable(tmp_path)
    assert (again.version, again.age_s(160.0)) == (7, 60.0)
    table = read_file(tmp_path / TABLE, TableFile)
    assert table == TableFile(7, 100.0, ENTRIES)


def test_a_clock_that_goes_back_gives_no_negative_age_and_still_writes(tmp_path: Path) -> None:
    held = HeldTable(tmp_path)
    held.receive(AgentTable(7, ENTRIES), 100.0)
    assert held.age_s(40.0) == 0.0
    held.heartbeat(7, 40.0)
    assert received(tmp_path) == 40.0
