"""A grid of texts and its rendering in a terminal; columns are dropped until it fits and listed in the caption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

UNKNOWN = "-"
_PROSE_WIDTH = 24
"""Minimum width of a column of sentences, in characters."""


@dataclass(frozen=True, slots=True)
class GridEntry:
    """One cell of a grid: its text, a smaller second line, and a mark for the best of its column."""

    text: str
    detail: str = ""
    best: bool = False


@dataclass(frozen=True, slots=True)
class Heading:
    """A column's title and description."""

    title: str
    about: str = ""
    drop: int = 0
    """Order in which columns are dropped from a table that is too wide, ascending; 0 is dropped last."""
    prose: bool = False
    """True for sentences instead of numbers."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Texts by row and column; the first `labels` columns name the row."""

    title: str
    headings: tuple[Heading, ...]
    rows: tuple[tuple[GridEntry, ...], ...]
    caption: str = ""
    labels: int = 1
    bold: str = ""
    """Meaning of bold type; printed only if the table has some."""


def with_ties(entries: Sequence[GridEntry]) -> list[GridEntry]:
    """Mark every entry whose number is printed like that of the best one; none if all numbers are printed alike."""
    numbers = [entry.text.partition(" ")[0] for entry in entries]
    best = {number for number, entry in zip(numbers, entries, strict=True) if entry.best}
    same = len(set(numbers) - {UNKNOWN}) <= 1
    return [replace(entry, best=number in best and not same) for number, entry in zip(numbers, entries, strict=True)]


def rich_table(grid: Grid, width: int | None = None) -> Table:
    """Render the grid for a terminal of `width` characters (None: the current one); drop columns until it fits.

    Headings are first broken into more lines. Then columns are dropped: those with a `drop` in ascending order, then
    the others from the right. Columns that label the row stay, and at least one more.
    """
    width = width or Console().width
    kept = list(range(len(grid.headings)))
    if _fits(grid, kept, width, narrow=False):
        return _draw(grid, kept, narrow=False)
    chosen = sorted((index for index in kept if grid.headings[index].drop), key=lambda index: grid.headings[index].drop)
    others = [index for index in reversed(kept) if index not in chosen and index >= grid.labels]
    for index in (*chosen, *others):
        if _fits(grid, kept, width, narrow=True) or len(kept) <= grid.labels + 1:
            break
        kept.remove(index)
    return _draw(grid, kept, narrow=not _fits(grid, kept, width, narrow=False))


def _fits(grid: Grid, kept: Sequence[int], width: int, *, narrow: bool) -> bool:
    """Return whether all cells fit uncut and unwrapped; sentences may wrap, but get at least `_PROSE_WIDTH`."""
    prose = [index for index in kept if grid.headings[index].prose]
    numbers = _draw(grid, [index for index in kept if index not in prose], narrow=narrow)
    needed = Console(width=10_000).measure(numbers).maximum
    return needed + (_PROSE_WIDTH + 2) * len(prose) <= width


def _draw(grid: Grid, kept: Sequence[int], *, narrow: bool) -> Table:
    dropped = [heading.title for index, heading in enumerate(grid.headings) if index not in kept]
    bold = grid.bold if Console().is_terminal else ""
    missing = dropped and f"Too narrow for: {', '.join(dropped)}."
    caption = " ".join(part for part in (grid.caption, bold, missing) if part)
    table = Table(
        title=grid.title or None,
        caption=Text(caption),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title_justify="left",
        caption_justify="left",
    )
    for index in kept:
        heading, label = grid.headings[index], index < grid.labels
        cells = [row[index] for row in grid.rows]
        title = _stacked(heading.title, cells) if narrow else heading.title.replace(" ", "\n", 1)
        left = index == 0 or heading.prose
        table.add_column(Text(title), justify="left" if left else "right", no_wrap=label, overflow="fold")
    for row in grid.rows:
        table.add_row(*(_text(row[index]) for index in kept))
    return table


def _stacked(title: str, cells: Sequence[GridEntry]) -> str:
    """Break a heading into as many lines as needed to be no wider than its column, or its longest word."""
    words = title.split(" ")
    texts = [part for cell in cells for part in (cell.text, cell.detail)]
    most = max(map(len, [*words, *texts]))
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + 1 + len(word) <= most:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return "\n".join(lines)


def _text(entry: GridEntry) -> Text:
    text = Text(entry.text, style="bold" if entry.best else "")
    return text.append(f"\n{entry.detail}", style="not bold dim") if entry.detail else text
