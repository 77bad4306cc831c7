"""Help pages: options by panel, each with its complete name and type; narrow terminals truncate no name."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperArgument, TyperCommand

from kvroute.cli.output import console

_PAGE_WIDTH = 100
_NAMES_WIDTH = 30
"""Width of the name column; a longer name gets a line of its own."""


class Command(TyperCommand):
    """A command whose help page fits 80 columns."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the page."""
        page = Console(width=min(console().width, _PAGE_WIDTH))
        page.print(Padding(Text(self.get_usage(ctx), style="bold"), 1))
        if self.help:
            page.print(Padding(Text.from_markup(_unwrapped(self.help)), (0, 1, 1, 1)))
        panels: dict[str, list[Any]] = {}
        for parameter in self.get_params(ctx):
            if not getattr(parameter, "hidden", False):
                standard = "Arguments" if isinstance(parameter, TyperArgument) else "Options"
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or standard, []).append(parameter)
        order = sorted(panels, key=lambda title: {"Arguments": 0, "Options": 2}.get(title, 1))
        for title in order:
            rows = [_row(parameter.get_help_record(ctx)) for parameter in panels[title]]
            page.print(Panel(Group(*rows), title=title, title_align="left", border_style="dim"))


def _unwrapped(text: str) -> str:
    """Join the lines of each paragraph of the source."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _row(record: tuple[str, str]) -> RenderableType:
    names, about = record
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_column(width=_NAMES_WIDTH, overflow="fold")
    row.add_column(overflow="fold")
    if len(names) <= _NAMES_WIDTH:
        row.add_row(Text(names, style="cyan"), Text(about))
        return row
    row.add_row("", Text(about))
    return Group(Text(names, style="cyan"), row)
