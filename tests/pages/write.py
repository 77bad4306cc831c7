"""Replaces outputs and pictures in pages by those of their commands: `python -m tests.pages.write [--long] PAGE...`."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.pages.page_blocks import ROOT
from tests.pages.page_check import Outcome, commands_of, outcomes, prepared
from tests.pages.page_commands import Run


def new_lines(outcome: Outcome) -> list[str] | None:
    """Return the lines that replace an output, with the page's indentation; None if the output is right, or is to be
    shortened by hand: JSON, a part, or lines with `...`."""
    output = outcome.command.output
    if not outcome.difference or outcome.failed or output is None or output.language == "json":
        return None
    if (isinstance(outcome.how, Run) and outcome.how.part) or any("..." in line for line in output.lines):
        return None
    lines = [line.rstrip() for line in outcome.printed.splitlines()]
    lines = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n").split("\n")
    return [f"{' ' * output.indent}{line}".rstrip() for line in lines]


def rewritten(text: str, ran: Iterable[Outcome]) -> str:
    """Return the text of a page with new outputs."""
    lines = text.split("\n")
    for outcome in sorted(ran, key=lambda ended: -ended.command.line):
        replacement, output = new_lines(outcome), outcome.command.output
        if replacement is not None and output is not None:
            lines[output.line - 1 : output.line - 1 + len(output.lines)] = replacement
    return "\n".join(lines)


def main() -> None:
    """Run the commands of each page and write the page; print what is left to do."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="+", metavar="PAGE", help="path from the root of the repository")
    parser.add_argument("--long", action="store_true", help="commands that `make live` runs, instead of the others")
    parser.add_argument("--alone", action="store_true", help="commands that measure, instead of the others")
    given = parser.parse_args()
    for page in given.pages:
        path = ROOT / page
        text = path.read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as folder:
            commands = commands_of(page, text)
            ran = list(outcomes(commands, prepared(page, text, Path(folder)), given.long or given.alone, given.alone))
            for outcome in ran:
                _draw(outcome)
        path.write_text(rewritten(text, ran), encoding="utf-8")
        for outcome in ran:
            if outcome.difference or outcome.failed:
                sys.stdout.write(f"{'by hand' if new_lines(outcome) is None else 'written'}: {outcome.fault}\n")


def _draw(outcome: Outcome) -> None:
    """Replace the picture of the page, unless the command has failed."""
    if outcome.other_picture and outcome.drawn and isinstance(outcome.how, Run) and outcome.how.picture:
        shutil.copy(outcome.drawn, ROOT / outcome.how.picture[1])
        sys.stdout.write(f"drawn: {outcome.how.picture[1]}\n")


if __name__ == "__main__":
    main()
