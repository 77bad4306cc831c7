"""Joins the commands into `kvroute` and turns wrong input into one sentence on stderr and exit code 2."""

from __future__ import annotations

import sys

import typer

from kvroute import __version__
from kvroute.cli.demo import demo
from kvroute.cli.emulate import emulate
from kvroute.cli.experiment import experiment
from kvroute.cli.flows import flows
from kvroute.cli.keys import app as keys
from kvroute.cli.llm import llm
from kvroute.cli.plan import app as plan
from kvroute.cli.replay import explain, replay_log
from kvroute.cli.serve import serve
from kvroute.cli.simulate import simulate
from kvroute.cli.timing import app as timing
from kvroute.cli.topology import app as topology
from kvroute.cli.workload import app as trace
from kvroute.types import InputError

app = typer.Typer(
    name="kvroute",
    help="Network-aware control plane for prefill/decode-disaggregated LLM inference.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvroute {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Simulate, plan and serve prefill/decode-disaggregated clusters with the same decision code."""


app.command()(simulate)
app.command()(serve)
app.command()(emulate)
app.command()(demo)
app.command()(experiment)
app.add_typer(plan, name="plan")
app.add_typer(topology, name="topology")
app.add_typer(trace, name="trace")
app.add_typer(timing, name="timing")
app.add_typer(keys, name="key")
app.command()(llm)
app.command()(flows)
app.command("replay")(replay_log)
app.command()(explain)


def main() -> None:
    """Entry point of the `kvroute` command."""
    try:
        app()
    except InputError as error:
        typer.echo(f"kvroute: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
