"""`kvroute agent`, `buffer` and `switch`: the commands of kvroute_engine, with this command line's help pages."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer

from kvroute.cli.quantities import DURATION, SIZE
from kvroute_engine.command.agent import AGENT
from kvroute_engine.command.buffer import BUFFER
from kvroute_engine.command.options import CommandSpec, OptionSpec
from kvroute_engine.command.switch import SWITCH

_TYPES = {"text": str, "whole number": int, "size": int, "duration": float, "flag": bool, "path": Path}
_METAVARS = {"size": SIZE, "duration": DURATION}


def declared(command: CommandSpec) -> Callable[..., None]:
    """Return the function of which Typer makes the command."""

    def run(**values: Any) -> None:
        command.run(**values)

    parameters = [_parameter(option) for option in command.options]
    run.__signature__ = Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__name__ = command.name
    run.__doc__ = command.about + (f"\n\nExample: [bold]{command.example}[/bold]" if command.example else "")
    return run


def _parameter(option: OptionSpec) -> Parameter:
    kind: Any = _TYPES[option.kind]
    if option.many:
        kind = list[kind]
    required = option.positional or option.required
    if option.default is None and not required and option.kind != "flag":
        kind = kind | None
    about: dict[str, Any] = {"help": option.help, "show_default": option.shown or not required}
    if option.panel:
        about["rich_help_panel"] = option.panel
    if option.kind in _METAVARS:
        about |= {"parser": _parser(option), "metavar": _METAVARS[option.kind]}
    elif option.kind == "whole number":
        about |= {"min": int(option.least), "max": int(option.most)}
    if option.metavar:
        about["metavar"] = option.metavar
    if option.positional:
        return Parameter(option.name, Parameter.KEYWORD_ONLY, annotation=Annotated[kind, typer.Argument(**about)])
    names = [f"{option.flag}/--no-{option.flag[2:]}"] if option.negatable else [option.flag]
    annotation = Annotated[kind, typer.Option(*names, **about)]
    if required:
        return Parameter(option.name, Parameter.KEYWORD_ONLY, annotation=annotation)
    default = bool(option.default) if option.kind == "flag" else option.default
    return Parameter(option.name, Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _parser(option: OptionSpec) -> Callable[[Any], Any]:
    def parse(text: Any) -> Any:
        if not isinstance(text, str):
            return text
        try:
            return option.parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parse


agent, buffer, switch = declared(AGENT), declared(BUFFER), declared(SWITCH)
