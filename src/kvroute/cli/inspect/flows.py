"""`kvroute flows`: solves a scenario of transfers over shared links and prints when each one ends."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kvroute.cli.output import console

if TYPE_CHECKING:
    from kvroute.flows import FlowScenario
    from kvroute.report.grid import Grid

app = typer.Typer()


@app.command("flows")
def flows(
    file: Annotated[Path, typer.Argument(help="Scenario: JSON with `links` and `flows`.", show_default=False)],
    table: Annotated[bool, typer.Option("--table", help="Print a table instead of the JSON document.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document: completion_times_s (the default).")
    ] = False,
) -> None:
    """Solve a scenario of transfers: weighted max-min fair rates, computed again at every start and finish.

    The file holds [bold]links[/bold] (id, capacity_Bps) and [bold]flows[/bold] (id, links, size_B, start_s, and
    optionally weight and class; [bold]classes[/bold] maps a class to its weight). Completion times are absolute seconds
    in the order of the flows.

    Prints {"completion_times_s": [...]}.

    Example: [bold]kvroute flows examples/flows-shared-uplink.json[/bold]
    """
    from kvroute.flows import completion_times, read_scenario
    from kvroute.report.grid import rich_table

    scenario = read_scenario(file)
    ends_s = completion_times(scenario)
    if table and not json:
        shown = console()
        shown.print(rich_table(_grid(scenario, ends_s), shown.width))
    else:
        typer.echo(msgspec.json.encode({"completion_times_s": ends_s}).decode())


def _grid(scenario: FlowScenario, ends_s: list[float]) -> Grid:
    from kvroute.report.grid import UNKNOWN, Grid, GridEntry, Heading
    from kvroute_engine.files.units import about_bandwidth, about_duration, about_size

    rows = []
    for flow, end_s in zip(scenario.flows, ends_s, strict=True):
        taken_s = end_s - flow.start_s
        rate = about_bandwidth(flow.nbytes / taken_s) if taken_s > 0.0 else UNKNOWN
        times = (about_duration(flow.start_s), about_duration(end_s))
        texts = (str(flow.id), " > ".join(flow.links), about_size(flow.nbytes), *times, rate)
        rows.append(tuple(map(GridEntry, texts)))
    headings = (
        Heading("flow"),
        Heading("links", drop=1, prose=True),
        *(Heading(title) for title in ("size", "start", "end", "mean rate")),
    )
    return Grid(f"{len(scenario.flows)} flows over {len(scenario.links)} links", headings, tuple(rows))
