"""A grid of texts, and its drawing in a terminal: columns give way until the table fits, and the caption names them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

UNKNOWN = "-"
_PROSE_WIDTH = 24
"""Narrower columns of sentences cannot be read."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One field of a grid: its text, a smaller second line, and whether it is the best of its column."""

    text: str
    detail: str = ""
    best: bool = False


@dataclass(frozen=True, slots=True)
class Heading:
    """A column's title and what it means."""

    title: str
    about: str = ""
    drop: int = 0
    """Where the table is too wide, columns go in ascending order of this; 0 stays."""
    prose: bool = False
    """Sentences rather than numbers."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Texts by row and column; the first `labels` columns name the row."""

    title: str
    headings: tuple[Heading, ...]
    rows: tuple[tuple[Entry, ...], ...]
    caption: str = ""
    labels: int = 1
    bold: str = ""
    """What bold means; told where there is bold type."""


def rich_table(grid: Grid, width: int | None = None) -> Table:
    """The grid for a terminal of `width` characters, None for this one's; columns give way until it fits.

    Headings are set in more lines first. Then columns go: those with a `drop`, in ascending order, then the others
    from the right. Columns that name the row stay, and so does one more.
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
    """Whether no cell has to be cut or wrapped, but for sentences, which get `_PROSE_WIDTH` at least."""
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


def _stacked(title: str, cells: Sequence[Entry]) -> str:
    """A heading in as many lines as keep it no wider than its column, or its longest word."""
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


def _text(entry: Entry) -> Text:
    text = Text(entry.text, style="bold" if entry.best else "")
    return text.append(f"\n{entry.detail}", style="not bold dim") if entry.detail else text
