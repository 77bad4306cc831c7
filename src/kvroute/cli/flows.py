"""The command `flows`: solves a scenario of transfers over shared links and prints when each one ends."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from kvroute.cli.output import console, thin_table
from kvroute.flows import Scenario, completion_times, read_scenario

app = typer.Typer()


@app.command("flows")
def flows(
    file: Annotated[Path, typer.Argument(help="Scenario: JSON with `links` and `flows`.", show_default=False)],
    table: Annotated[bool, typer.Option("--table", help="Print a table in place of the JSON document.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document: completion_times_s (the default).")
    ] = False,
) -> None:
    """Solve a scenario of transfers: weighted max-min fair rates, re-solved at every start and finish.

    The file holds [bold]links[/bold] (id, capacity_Bps) and [bold]flows[/bold] (id, links, size_B, start_s, and if
    wanted weight and class; [bold]classes[/bold] maps a class to its weight). Completion times are absolute seconds
    in the order of the flows.

    Prints {"completion_times_s": [...]}.

    Example: [bold]kvroute flows examples/flows-shared-uplink.json[/bold]
    """
    scenario = read_scenario(file)
    ends_s = completion_times(scenario)
    if table and not json:
        console().print(_table(scenario, ends_s))
    else:
        typer.echo(msgspec.json.encode({"completion_times_s": ends_s}).decode())


def _table(scenario: Scenario, ends_s: list[float]) -> Table:
    table = thin_table("flow", "links", title=f"{len(scenario.flows)} flows over {len(scenario.links)} links")
    for heading in ("size_B", "start_s", "end_s", "mean rate_Bps"):
        table.add_column(heading, justify="right")
    for flow, end_s in zip(scenario.flows, ends_s, strict=True):
        taken_s = end_s - flow.start_s
        mean = f"{flow.nbytes / taken_s:.6g}" if taken_s > 0.0 else "-"
        row = (
            str(flow.id),
            escape(" > ".join(flow.links)),
            f"{flow.nbytes:.6g}",
            f"{flow.start_s:.6g}",
            f"{end_s:.9g}",
            mean,
        )
        table.add_row(*row)
    return table
