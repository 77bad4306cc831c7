"""Options that the commands that run a gateway share."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from kvroute.types import InputError

ROUTING, PLACE, ENGINES = "Routing", "Addresses", "Emulated engines"
ClusterFile: TypeAlias = Annotated[
    Path | None,
    typer.Argument(
        help="Cluster file (YAML), with an endpoint for each instance. Optional with --kubernetes.",
        show_default=False,
    ),
]
Policy: TypeAlias = Annotated[
    str | None, typer.Option(help="Decode policy; default: the file's, else foresight-joint.", rich_help_panel=ROUTING)
]
PrefillPolicy: TypeAlias = Annotated[
    str | None, typer.Option(help="Prefill policy; default: the file's.", rich_help_panel=ROUTING)
]
AdminPort: TypeAlias = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        help="Port of dashboard and metrics, at the file's `gateway.admin.host` (127.0.0.1); 0: any free port.",
        rich_help_panel=PLACE,
    ),
]
EventLog: TypeAlias = Annotated[
    Path | None, typer.Option(help="Write every event and decision to this file, for replay and explain.")
]
LogFormat: TypeAlias = Annotated[str | None, typer.Option(help="Format of the messages on stderr: text or json.")]
Embedded: TypeAlias = Annotated[
    bool,
    typer.Option("--embedded", help="Also emulate the engines of the file; no GPU needed.", rich_help_panel=ENGINES),
]
KvScale: TypeAlias = Annotated[
    float,
    typer.Option(min=0, max=1, help="Real bytes per modelled byte of KV.", rich_help_panel=ENGINES),
]
Background: TypeAlias = Annotated[
    str,
    typer.Option(
        help="Share of link capacity that other traffic uses, see `kvroute emulate`.", rich_help_panel=ENGINES
    ),
]
Seed: TypeAlias = Annotated[
    int | None, typer.Option(min=0, help="Seed of emulated engines and random ids.", rich_help_panel=ENGINES)
]
UntilEof: TypeAlias = Annotated[
    bool, typer.Option("--until-eof", help="Exit when standard input is closed, e.g. when the parent process ends.")
]
ReadyFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="Write the addresses to this file as JSON when requests are accepted.", rich_help_panel=PLACE),
]


def check_log_format(log_format: str | None) -> None:
    """Raise InputError if the value of --log-format is unknown."""
    if log_format not in (None, "text", "json"):
        raise InputError(f"unknown format {log_format!r}", where="--log-format", hint="use text or json")


def ignore_reload_until_read() -> None:
    """Ignore SIGHUP until the cluster file is read. This is a handler because child processes would inherit SIG_IGN."""
    signal.signal(signal.SIGHUP, lambda number, frame: None)
