"""Runs commands of pages in a temporary folder: in this process where no shell is needed, services as processes."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import typer
from tests.commands import folder_with_kvroute
from tests.pages.page_blocks import ROOT, Command
from typer.core import TyperGroup

from kvroute.cli.app import UsageError, app, main

_PROGRAMS = Path(sys.executable).parent
_PATIENCE_S = 240.0
_LOG_LINE = re.compile(r"\d{4}-\d\d-\d\dT\S+Z ")
_ADDRESS = re.compile(r"http://(127\.0\.0\.1|localhost):(\d+)")


@dataclass(frozen=True, slots=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str


def usage_error(arguments: list[str]) -> str:
    """Parse `kvroute` arguments without running the command; return the error, or an empty text.

    Files need not exist."""
    command: Any = typer.main.get_command(app)
    context, rest = None, arguments
    try:
        while isinstance(command, TyperGroup) and rest and not rest[0].startswith("--"):
            context = typer.Context(command, info_name="kvroute", parent=context)
            _, command, rest = command.resolve_command(context, list(rest))
        if rest or not isinstance(command, TyperGroup):
            with redirect_stdout(io.StringIO()):
                command.make_context(command.name, list(rest), parent=context)
    except typer.Exit:
        return ""
    except UsageError as error:
        return str(error.format_message())
    return ""


@dataclass
class PageFolder:
    """The working folder of a page's commands, and the service that runs there."""

    path: Path
    columns: int = 80
    ports: dict[str, str] = field(default_factory=dict)
    """Host and port in the page: host and port of the service."""

    def __post_init__(self) -> None:
        for name in ("examples", "requirements", "deploy"):
            if not (self.path / name).exists():
                (self.path / name).symlink_to(ROOT / name)

    @property
    def _environment(self) -> dict[str, str]:
        path = f"{_PROGRAMS}{os.pathsep}{os.environ.get('PATH', '')}"
        return {**os.environ, "COLUMNS": str(self.columns), "PATH": path}

    def run(self, command: Command, options: str = "") -> Ended:
        """Run a command to its end; `options` are added."""
        *words, before_last, last = ["", *command.arguments, *options.split()]
        if before_last == ">" and words[1] == "kvroute":
            ended = self._here(words[2:])
            (self.path / last).write_text(ended.out, encoding="utf-8")
            return ended
        if command.arguments[0] != "kvroute" or command.needs_shell:
            return self._in_shell(f"{command.text} {options}")
        return self._here([*command.arguments[1:], *options.split()])

    def _here(self, arguments: list[str]) -> Ended:
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
        with (
            chdir(self.path),
            patch.dict(os.environ, self._environment),
            patch.object(sys, "argv", ["kvroute", *arguments]),
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            try:
                main()
                code = 0
            except SystemExit as ended:
                code = int(ended.code or 0)
        texts = [stream.buffer.getvalue().decode() for stream in (out, err)]
        return Ended(code, *texts)

    def _in_shell(self, text: str) -> Ended:
        for there, here in self.ports.items():
            text = text.replace(there, here)
        path = f"{folder_with_kvroute()}{os.pathsep}{self._environment['PATH']}"
        ended = subprocess.run(
            ["bash", "-o", "pipefail", "-c", text],
            cwd=self.path,
            env=self._environment | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
        )
        return Ended(ended.returncode, ended.stdout, ended.stderr)

    @contextmanager
    def service(self, command: Command, options: str, last: str) -> Iterator[str]:
        """Run a service on free ports until the block ends; yield what it has printed up to the line with `last`,
        without the lines of its log.

        In this text and for later commands of the folder, its addresses have the ports of the page, 8080 and 9090.
        """
        words = [*command.arguments, *options.split()]
        with subprocess.Popen(
            words, cwd=self.path, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            printed: list[str] = []
            try:
                while not printed or last not in printed[-1]:
                    line = process.stdout.readline()
                    assert line, "".join(printed)
                    printed.append(line)
                yield self._as_in_the_page("".join(line for line in printed if not _LOG_LINE.match(line)))
            finally:
                process.send_signal(signal.SIGINT)
                rest, _ = process.communicate(timeout=_PATIENCE_S)
        assert "Traceback" not in rest, rest

    def _as_in_the_page(self, printed: str) -> str:
        found = [port for _, port in _ADDRESS.findall(printed)]
        for port, usual in zip(dict.fromkeys(found), ("8080", "9090"), strict=False):
            self.ports |= {f"{host}:{usual}": f"{host}:{port}" for host in ("127.0.0.1", "localhost")}
            printed = printed.replace(f":{port}", f":{usual}")
        return printed
