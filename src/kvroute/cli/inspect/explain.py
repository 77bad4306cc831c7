"""`kvroute explain`: options, and what they select. `explained` prints the reasons."""

from __future__ import annotations

from typing import Annotated

import typer

from kvroute.cli.inspect.replay import AsJson, LogFile
from kvroute.types import InputError


def explain(
    log: LogFile,
    request: Annotated[
        str, typer.Argument(help="Number of the request in the log, or its X-Request-Id.", show_default=False)
    ] = "",
    calibration: Annotated[
        bool, typer.Option("--calibration", help="Compare predicted with actual TTFT of all requests, by deciles.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show every candidate's terms for each decision about one request, in order, including retries after failures.

    Example: [bold]kvroute explain run.log 17[/bold]
    """
    from kvroute.cli.inspect.calibration import show_calibration
    from kvroute.cli.inspect.explained import explain_request

    if calibration:
        if request:
            what = "the option is about all requests of the log"
            raise InputError(what, where="--calibration", hint=f"leave out {request}, or the option")
        show_calibration(log, as_json=as_json)
        return
    if not request:
        hint = "add its number or X-Request-Id, or --calibration"
        raise InputError("no request is named", hint=hint)
    explain_request(log, request, as_json=as_json)
