"""Finds commands in the code blocks of pages, and the outputs that the pages print after them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from kvroute.cli.app import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))

PROGRAMS = frozenset(
    """cd curl docker envoy epp export git groupadd helm install kubectl make mv openssl pd-sidecar pip pipx promtool
    pytest python python3 source smg systemctl useradd uv vllm vllm-router""".split()  # noqa: SIM905
)
"""Programs whose name begins a command in a block without a language; others begin an output."""
_PROMPT = re.compile(r"^(?:\$ )?(?:sudo )?(?:[A-Z_]+=\S+ )*")
_SHELL = ("sh", "bash")
_PLAIN = ("", "text", "console", "json")
"""Languages of outputs, and of commands beside `_SHELL`."""


@dataclass(frozen=True, slots=True)
class Output:
    """Printed lines without their indentation. `line` is that of the first one in the page, from 1."""

    line: int
    lines: tuple[str, ...]
    indent: int = 0
    language: str = ""


@dataclass(frozen=True, slots=True)
class Command:
    """One shell command; `text` has no prompt, comment or continued lines."""

    page: str
    line: int
    text: str
    output: Output | None = None

    @property
    def place(self) -> str:
        """Page and line, for messages."""
        return f"{self.page}:{self.line}"

    @property
    def arguments(self) -> list[str]:
        """The words, without `sudo` and variables in front."""
        words = shlex.split(self.text, comments=True)
        while words and (words[0] == "sudo" or re.fullmatch(r"[A-Z_]+=.*", words[0], re.DOTALL)):
            words.pop(0)
        return words

    @property
    def needs_shell(self) -> bool:
        """Return whether the command needs a shell, for a pipe, a redirection or a variable."""
        return bool(re.search(r"[|<>$&;`]", re.sub(r"'[^']*'", "", self.text)))


def is_command(line: str) -> bool:
    """Return whether a line of a block without a language begins a command."""
    words = _PROMPT.sub("", line).split()
    if not words:
        return False
    program = words[0].rsplit("/", 1)[-1]
    if program == "kvroute":
        return len(words) > 1 and (words[1] in COMMANDS or words[1].startswith("--"))
    return program in PROGRAMS


def _joined(lines: list[str], first: int) -> tuple[str, int]:
    """Return the command that begins at `lines[first]` in one line, and the index after it."""
    text, index = lines[first], first + 1
    while index < len(lines) and (text.endswith("\\") or not _closed(text)):
        text = f"{text.removesuffix(chr(92)).rstrip()} {lines[index].strip()}"
        index += 1
    return re.sub(r"\s+#\s.*$", "", text).removeprefix("$ ").strip(), index


def _closed(text: str) -> bool:
    """Return whether the quotation marks of a line are closed."""
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Block:
    """A code block. `line` is that of its first line of content, from 1; `section` counts the headings before it."""

    line: int
    lines: list[str]
    indent: int
    language: str
    section: int


def _blocks(text: str) -> Iterator[_Block]:
    source, section = text.split("\n"), 0
    for token in MarkdownIt("commonmark").parse(text):
        section += token.type == "heading_open"
        if token.type in ("fence", "code_block"):
            yield _block(token, source, section)


def _block(token: Token, source: list[str], section: int) -> _Block:
    assert token.map
    first = token.map[0] + (token.type == "fence")
    lines = token.content.rstrip("\n").split("\n")
    indent = len(source[first]) - len(lines[0])
    return _Block(first + 1, lines, indent, (token.info.split() or [""])[0], section)


def _commands(page: str, block: _Block) -> list[Command]:
    """Return the commands of a block; the last one has the output that follows in the same block."""
    lines, found, index = block.lines, list[Command](), 0
    if block.language in _SHELL and re.match(r"#!|while |if |for ", lines[0]):
        return [Command(page, block.line, "\n".join(lines))]
    while index < len(lines):
        line = lines[index]
        if not line.strip() or (block.language in _SHELL and line.startswith("#")):
            index += 1
        elif block.language in _SHELL or is_command(line):
            text, after = _joined(lines, index)
            found.append(Command(page, block.line + index, text))
            index = after
        else:
            break
    if found and index < len(lines):
        output = Output(block.line + index, tuple(lines[index:]), block.indent, block.language)
        found[-1] = replace(found[-1], output=output)
    return found


def read_page(text: str, page: str) -> tuple[list[Command], list[Output]]:
    """Return the commands of a page, in order, and plain blocks that follow no command of their section."""
    commands, alone, section = list[Command](), list[Output](), -1
    for block in _blocks(text):
        if block.language not in (*_SHELL, *_PLAIN):
            continue
        found = _commands(page, block)
        if found:
            commands, section = commands + found, block.section
            continue
        output = Output(block.line, tuple(block.lines), block.indent, block.language)
        if block.section == section and commands[-1].output is None:
            commands[-1] = replace(commands[-1], output=output)
        else:
            alone.append(output)
    return commands, alone


def mentions(text: str, page: str) -> list[Command]:
    """Return the commands of kvroute in the sentences and tables of a page; options may lack a value. `line` is that of
    the paragraph."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    spans = [(token.map, child.content) for token in tokens for child in _code(token)]
    return [Command(page, place[0] + 1, span) for place, span in spans if place and re.match(r"kvroute \S", span)]


def _code(token: Token) -> list[Token]:
    return [child for child in token.children or [] if child.type == "code_inline"]


def shown_file(text: str, first_words: str) -> str:
    """Return the content of the only block that begins with these words."""
    [lines] = [block.lines for block in _blocks(text) if block.lines[0].startswith(first_words)]
    return "\n".join(lines) + "\n"


def page_name(path: Path) -> str:
    """Return the path of a page from the root of the repository."""
    return str(path.relative_to(ROOT))
