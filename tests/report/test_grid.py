"""Grids in a terminal: columns that do not fit are left out and named, and the others are complete."""

from __future__ import annotations

from io import StringIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from kvroute.report.grid import Grid, GridEntry, Heading, rich_table, with_ties

words = st.text("abcdefg", min_size=1, max_size=9)
titles = st.lists(words, min_size=1, max_size=4).map(" ".join)
headings = st.lists(st.builds(Heading, titles, drop=st.integers(0, 4)), min_size=2, max_size=12)


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    """Draw up to twelve columns with short cells; the first one is the row's name."""
    columns = draw(headings)
    cells = st.builds(GridEntry, words, st.one_of(st.just(""), words))
    row = st.tuples(*(cells for _ in columns))
    return Grid("", tuple(columns), tuple(draw(st.lists(row, min_size=1, max_size=4))))


def printed(grid: Grid, width: int) -> str:
    """Return the output of a terminal of this width."""
    console = Console(width=width, file=StringIO(), record=True)
    console.print(rich_table(grid, width))
    return console.export_text()


@given(grids(), st.integers(40, 200))
@settings(deadline=None)
def test_a_column_is_shown_whole_or_named_as_left_out(grid: Grid, width: int) -> None:
    shown = printed(grid, width)
    assert max(map(len, shown.splitlines())) <= width
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    table, _, missing = shown.partition("Too narrow for:")
    names = " ".join(missing.split())
    for index, heading in enumerate(grid.headings):
        left_out = heading.title in names
        whole = all(entry.text in table and entry.detail in table for entry in (row[index] for row in grid.rows))
        assert whole or left_out
    assert len(missing.split(",")) < len(grid.headings)


def test_columns_are_dropped_in_the_order_of_their_headings() -> None:
    """The row's name and the columns without an order are kept as long as there are others."""
    titles = (("name", 0), ("stays", 0), ("second", 2), ("first", 1))
    grid = Grid(
        "", tuple(Heading(title, drop=drop) for title, drop in titles), (tuple(GridEntry("x" * 12) for _ in titles),)
    )
    assert "Too narrow" not in printed(grid, 60)
    assert "Too narrow for: first." in printed(grid, 50)
    both = " ".join(printed(grid, 35).split())
    assert "Too narrow for: second, first." in both
    assert "stays" in both


def test_headings_wrap_before_a_column_is_dropped() -> None:
    """A heading of many words is wrapped, and the numbers are kept."""
    grid = Grid(
        "", (Heading("name"), Heading("a title of many words", drop=1)), ((GridEntry("row"), GridEntry("1.00")),)
    )
    assert "Too narrow" not in printed(grid, 20)
    assert "1.00" in printed(grid, 20)


@pytest.mark.parametrize(
    ("texts", "best", "marked"),
    [
        (["7 ±1", "7 ±2", "8 ±1"], 0, [True, True, False]),
        (["7", "8", "9"], 2, [False, False, True]),
        (["7", "7", "-"], 1, [False, False, False]),
        (["7", "8"], None, [False, False]),
    ],
)
def test_entries_that_read_alike_are_marked_alike(texts: list[str], best: int | None, marked: list[bool]) -> None:
    """Means that differ by less than the last digit have the same type; if all are equal, there is no best one."""
    entries = [GridEntry(text, best=index == best) for index, text in enumerate(texts)]
    assert [entry.best for entry in with_ties(entries)] == marked
