"""Files between the agent of a server and its ranks."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kvroute_engine.agent.files import (
    TABLE,
    GroupEntry,
    GroupTraffic,
    SchemeRule,
    TableFile,
    read_file,
    replace_file,
    size_exponent,
    traffic_files,
    traffic_path,
)


@given(st.integers(1, 1 << 40))
def test_the_size_exponent_is_that_of_the_next_power_of_two(nbytes: int) -> None:
    """2^e holds the size, and 2^(e - 1) does not."""
    exponent = size_exponent(nbytes)
    assert nbytes <= 1 << exponent
    assert exponent == 0 or nbytes > 1 << (exponent - 1)


def test_tables_are_read_as_they_were_written(tmp_path: Path) -> None:
    """A table survives its file, and no other file is left."""
    entry = GroupEntry(3, (SchemeRule("ina", 1 << 20), SchemeRule("ring")))
    table = TableFile(7, 1.5, {"decode-0": entry})
    replace_file(tmp_path / TABLE, table)
    assert read_file(tmp_path / TABLE, TableFile) == table
    assert [path.name for path in tmp_path.iterdir()] == [TABLE]


def test_files_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    """Missing and damaged files give None, names of groups are quoted."""
    traffic = GroupTraffic("prefill-0/1", 9, 0, {"ring": {20: 4}}, {"ring": {20: 4 << 20}})
    replace_file(traffic_path(tmp_path, traffic.group), traffic)
    (tmp_path / "traffic-damaged.json").write_text('{"group": 1}')
    assert traffic_files(tmp_path) == [traffic]
    assert read_file(tmp_path / "absent", TableFile) is None
