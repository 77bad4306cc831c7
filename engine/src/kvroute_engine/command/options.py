"""Declares commands and their options, and reads them with argparse."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias

from kvroute_engine.errors import InputError
from kvroute_engine.files.units import about_duration, duration_s, size_bytes

Kind: TypeAlias = Literal["text", "whole number", "size", "duration", "flag", "path"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionSpec:
    """An option or argument; its value is the keyword `name` of the command's function."""

    name: str
    """`data_port` is the option --data-port."""
    kind: Kind
    help: str
    panel: str = ""
    """Title of the group of options on a help page."""
    default: Any = None
    required: bool = False
    positional: bool = False
    many: bool = False
    """The option may be repeated; the value is a list."""
    negatable: bool = False
    """A flag that --no-NAME switches off."""
    least: float = 0
    most: float = float("inf")
    """Bounds of numbers; bytes or seconds for quantities."""
    shown: str = ""
    """The default on a help page."""
    metavar: str = ""

    @property
    def flag(self) -> str:
        """The name on the command line."""
        return "--" + self.name.replace("_", "-")

    def parse(self, text: str) -> Any:
        """Return the value of a text.

        Raises:
            ValueError: in one sentence, what is wrong and what to write.
        """
        match self.kind:
            case "text" | "flag":
                return text
            case "path":
                return Path(text)
            case "whole number":
                return _whole(text, self.least, self.most)
            case "size":
                return _size(text, self.least)
            case "duration":
                return _duration(text, self.least)


@dataclass(frozen=True, slots=True)
class CommandSpec:
    """A command as data."""

    name: str
    about: str
    """The help page's text; its first paragraph is the summary."""
    options: tuple[OptionSpec, ...]
    run: Callable[..., None]
    """Takes the options as keywords; raises InputError for wrong input."""
    example: str = ""


def _whole(text: str, least: float, most: float) -> int:
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"{text[:40]!r} is not a whole number") from None
    if not least <= number <= most:
        raise ValueError(f"{number} is not between {least:g} and {most:g}")
    return number


def _size(text: str, least: float) -> int:
    write = "write a number and B, KB, MB, GB, TB, KiB, MiB, GiB or TiB, such as 64GB"
    try:
        nbytes = int(size_bytes(text))
    except InputError:
        raise ValueError(f"{text[:40]!r} is not a size; {write}") from None
    if nbytes < least:
        raise ValueError(f"{text[:40]!r} is not {least:g} bytes or more; {write}")
    return nbytes


def _duration(text: str, least: float) -> float:
    write = "write a number of seconds, or a number and ns, us, ms, s, min or h, such as 2s or 500ms"
    try:
        number = float(text)
    except ValueError:
        try:
            number = duration_s(text)
        except InputError:
            raise ValueError(f"{text[:40]!r} is not a duration; {write}") from None
    if not least <= number < float("inf"):
        raise ValueError(f"{text[:40]!r} is not {about_duration(least)} or more; {write}")
    return number


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line as one sentence."""

    def error(self, message: str) -> NoReturn:
        """Raise an InputError."""
        raise InputError(message, hint=f"`{self.prog} --help` has all options")


def parser_of(prog: str, commands: Sequence[CommandSpec], version: str) -> Parser:
    """Return a parser whose namespace has the command as `command`, and a keyword for each of its options."""
    parser = Parser(prog=prog, description="What kvroute runs beside an inference engine.")
    parser.add_argument("--version", action="version", version=f"{prog} {version}")
    parts = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in commands:
        text = command.about + (f"\n\nExample: {command.example}" if command.example else "")
        part = parts.add_parser(
            command.name,
            help=command.about.split("\n\n")[0].replace("\n", " "),
            description=text.replace("%", "%%"),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        part.set_defaults(command=command)
        panels: dict[str, Any] = {}
        for option in command.options:
            if option.panel and option.panel not in panels:
                panels[option.panel] = part.add_argument_group(option.panel)
            _add(panels.get(option.panel, part), option)
    return parser


def _add(part: Any, option: OptionSpec) -> None:
    about = option.help + (f" Default: {option.shown or option.default}." if _shows(option) else "")
    about = about.replace("%", "%%")
    if option.positional:
        part.add_argument(option.name, help=about, metavar=option.metavar or option.name.upper())
    elif option.kind == "flag":
        action = argparse.BooleanOptionalAction if option.negatable else "store_true"
        part.add_argument(option.flag, help=about, action=action, default=option.default or False)
    else:
        part.add_argument(
            option.flag,
            help=about,
            action="append" if option.many else "store",
            default=option.default,
            required=option.required,
            metavar=option.metavar or option.kind.upper().replace(" ", "-"),
            type=_typed(option),
        )


def _typed(option: OptionSpec) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return option.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _shows(option: OptionSpec) -> bool:
    return bool(option.shown) or not (option.default in (None, "", False) or option.kind == "flag")
