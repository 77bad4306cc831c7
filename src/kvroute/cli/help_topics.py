"""`kvroute help`: topics, and the help pages of commands."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from kvroute.cli.output import console
from kvroute.types import InputError

if TYPE_CHECKING:
    from kvroute.cli.topics import Topic

_PAGE_WIDTH = 100
_TERM_WIDTH = 24
"""Width of the column of terms; a longer command gets a line of its own."""


def help_topic(
    context: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(metavar="[TOPIC]", help="A topic, or a command.")] = None,
) -> None:
    """Explain a topic or a command; without one, list them.

    Example: [bold]kvroute help units[/bold]
    """
    from kvroute.cli.topics import topics

    group = context.find_root().command
    assert isinstance(group, TyperGroup)
    known, commands = topics(), group.list_commands(context)
    page = Console(width=min(console().width, _PAGE_WIDTH))
    if not words:
        _print_list(page, context, group)
    elif len(words) == 1 and words[0] in known:
        _print_topic(page, words[0], known[words[0]]())
    elif words[0] in commands:
        group.main([*words, "--help"], prog_name="kvroute", standalone_mode=False)
    else:
        name = " ".join(words)
        near = get_close_matches(words[0], [*known, *commands], n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        hint = f"{meant}the topics are {', '.join(known)}; `kvroute help COMMAND` explains a command"
        raise InputError(f"there is no help topic {name!r}", hint=hint)


def topics_markdown() -> str:
    """Return all topics as sections of a Markdown page."""
    from kvroute.cli.topics import topics

    return "\n\n".join(_markdown(name, make()) for name, make in topics().items())


def _print_list(page: Console, context: typer.Context, group: TyperGroup) -> None:
    from kvroute.cli.topics import topics

    page.print(Text("Topics: kvroute help TOPIC", style="bold"))
    _print_rows(page, [(name, make().title) for name, make in topics().items()])
    page.print(Text("\nCommands: kvroute help COMMAND", style="bold"))
    rows = []
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        rows.append((name, command.get_short_help_str(limit=1000)))
    _print_rows(page, rows)


def _print_topic(page: Console, name: str, topic: Topic) -> None:
    page.print(Text(f"{name}: {topic.title}", style="bold"))
    for paragraph in topic.paragraphs:
        page.print(Text("\n" + _plain(paragraph)))
    for rows in (topic.rows, topic.commands):
        if rows:
            page.print()
            _print_rows(page, rows)
    if topic.page:
        page.print(Text(f"\nDetails: docs/{topic.page}"))


def _print_rows(page: Console, rows: list[tuple[str, str]] | tuple[tuple[str, str], ...]) -> None:
    aligned = max(len(_plain(term)) for term, _ in rows) <= _TERM_WIDTH
    if not aligned:
        for term, text in rows:
            page.print(Padding(Text(_plain(term), style="cyan"), (0, 0, 0, 2)))
            page.print(Padding(Text(_plain(text)), (0, 0, 0, 6)))
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for term, text in rows:
        table.add_row(Text(f"  {_plain(term)}", style="cyan"), Text(_plain(text)))
    page.print(table)


def _plain(text: str) -> str:
    return text.replace("`", "")


def _markdown(name: str, topic: Topic) -> str:
    lines = [f"### `{name}`: {topic.title}", "", *(f"{paragraph}\n" for paragraph in topic.paragraphs)]
    if topic.rows:
        lines += ["| | |", "|---|---|", *(f"| {term} | {text} |" for term, text in topic.rows), ""]
    lines += [f"- `{command}`: {text}" for command, text in topic.commands]
    return "\n".join(lines).strip()
