"""Runs the commands of one page as `page_commands` says, and lists what differs from the page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.image import imread
from tests.pages.page_blocks import ROOT, Command, Output, mentions, read_page, shown_file
from tests.pages.page_commands import (
    BEFORE,
    EMBEDDED,
    FILES,
    PRINTED_BY,
    WITH_GATEWAY,
    OtherTest,
    Run,
    Service,
    treatment,
)
from tests.pages.page_output import difference
from tests.pages.page_runs import PageFolder, usage_error

SESSIONS = """\
{"id": "s1", "bs": 64, "req": [{"t": 0, "in": 9526, "out": 363, "api": 2.8, "think": 0, "h": [1, 148]}]}
{"id": "s2", "bs": 64, "req": [{"t": 1, "in": 4100, "out": 120, "api": 1.9, "think": 0, "h": [1, 64]}]}
"""
_MY_CLUSTER = "kvroute topology expand examples/small.yaml --out my-cluster.yaml --endpoints " + ",".join(
    f"http://127.0.0.1:{port}" for port in range(18000, 18004)
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A command that has run: the text that it has printed, and the error of one that has failed."""

    command: Command
    how: Run | Service
    printed: str = ""
    failed: str = ""
    drawn: Path | None = None

    @property
    def fault(self) -> str:
        """The difference from the page with its place, or an empty text."""
        if self.failed:
            return f"{self.command.place}: `{self.command.text}` {self.failed}"
        return self.difference or self.other_picture

    @property
    def other_picture(self) -> str:
        """The picture of the page that is not the one that the command has drawn, with the place."""
        if self.drawn is None or not isinstance(self.how, Run) or self.how.picture is None:
            return ""
        shown = self.how.picture[1]
        return "" if _same_picture(self.drawn, ROOT / shown) else f"{self.command.place}: {shown} is another picture"

    @property
    def difference(self) -> str:
        """The first line of the page that differs from the output, with its place."""
        output = self.command.output
        if output is None or (isinstance(self.how, Run) and not self.how.printed):
            return ""
        shown = _part(output) if isinstance(self.how, Service) or self.how.part else output
        found = difference(shown, self.printed, self.how.tolerance)
        return f"{self.command.page}:{found.line}: {found}" if found else ""


def _same_picture(one: Path, other: Path) -> bool:
    """Return whether two pictures have the same size and, but for rounding, the same colours."""
    first, second = (imread(path) for path in (one, other))
    return first.shape == second.shape and float(abs(first - second).mean()) < 1e-5


def commands_of(page: str, text: str) -> list[Command]:
    """Return the commands of a page, and those of `PRINTED_BY` with the block that shows a part of their output."""
    commands, alone = read_page(text, page)
    for (where, first_words), printed_by in PRINTED_BY.items():
        blocks = [output for output in alone if where == page and output.lines[0].startswith(first_words)]
        commands += [Command(page, output.line, printed_by, output) for output in blocks]
    return [Command(page, 0, EMBEDDED), *commands] if page in WITH_GATEWAY else commands


def _part(output: Output) -> Output:
    if output.language == "json":
        return output
    return replace(output, line=output.line - 1, lines=("...", *output.lines, "..."))


def listing_faults(commands: list[Command]) -> list[str]:
    """Return commands that are not listed, that `kvroute` does not accept, or whose other test does not know them."""
    faults = []
    for command in commands:
        how = treatment(command)
        if how is None:
            faults.append(f"{command.place}: `{command.text}` is not in tests/pages/page_commands.py")
        elif isinstance(how, OtherTest) and (fault := _unknown_other_test(command, how)):
            faults.append(f"{command.place}: {fault}")
        elif isinstance(how, Run) and how.options and how.printed and command.output:
            faults.append(f"{command.place}: its output is that of other options")
        if command.arguments[:1] and command.arguments[0].rsplit("/", 1)[-1] == "kvroute":
            error = usage_error(_own_arguments(command))
            faults += [f"{command.place}: `{command.text}`: {error}"] if error else []
    return faults


def mention_faults(text: str, page: str) -> list[str]:
    """Return commands in sentences whose names or options do not exist."""
    errors = [(command, usage_error(command.arguments[1:])) for command in mentions(text, page)]
    return [f"{command.place}: `{command.text}`: {error}" for command, error in errors if error.startswith("No such")]


def _own_arguments(command: Command) -> list[str]:
    """Return the arguments up to a pipe or a redirection."""
    words = command.arguments[1:]
    ends = [index for index, word in enumerate(words) if word in ("|", ">", "&&", "...")]
    return words[: ends[0]] if ends else words


def _unknown_other_test(command: Command, how: OtherTest) -> str:
    file, _, name = how.test.partition("::")
    path = ROOT / "tests" / file
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if f"def {name}(" not in text:
        return f"there is no test {how.test}"
    words = command.arguments
    word = how.word or (words[1] if words[0] == "kvroute" else words[0])
    return "" if word in text or Path(command.page).name in text else f"tests/{file} does not have {word!r}"


def prepared(page: str, text: str, path: Path) -> PageFolder:
    """Return a folder with the files that the page assumes and shows."""
    folder = PageFolder(path)
    shutil.copy(ROOT / "examples" / "vllm-tp8.yaml", path / "vllm-tp8.yaml")
    (path / "sessions.jsonl.zst").write_text(SESSIONS, encoding="utf-8")
    for name, first_words in FILES.get(page, {}).items():
        (path / name).write_text(shown_file(text, first_words), encoding="utf-8")
    for line in (_MY_CLUSTER, *BEFORE.get(page, ())):
        ended = folder.run(Command(page, 0, line))
        assert ended.code == 0, f"{line}: {ended.err}"
    return folder


def runs_here(command: Command, live: bool, alone: bool = False) -> bool:
    """Return whether this module runs the command in this kind of test."""
    how = treatment(command)
    if isinstance(how, Service):
        return live and not alone
    return isinstance(how, Run) and (how.live, how.alone) == (live, alone)


def outcomes(commands: list[Command], folder: PageFolder, live: bool = False, alone: bool = False) -> Iterator[Outcome]:
    """Run the commands in order; a service runs until the next one starts."""
    with ExitStack() as running:
        for command in commands:
            how = treatment(command)
            if not runs_here(command, live, alone):
                continue
            if isinstance(how, Service):
                running.close()
                yield Outcome(command, how, running.enter_context(folder.service(command, how.options, how.last)))
            elif isinstance(how, Run):
                yield _ran(command, how, folder)


def _ran(command: Command, how: Run, folder: PageFolder) -> Outcome:
    folder.columns = how.columns
    if how.new:
        (folder.path / how.new).unlink(missing_ok=True)
    ended = folder.run(replace(command, text=how.instead) if how.instead else command, how.options)
    failed = f"ended with {ended.code}: {ended.err.strip()[-600:]}" if ended.code else ""
    return Outcome(command, how, ended.out, failed, folder.path / how.picture[0] if how.picture else None)
