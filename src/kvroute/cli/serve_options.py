"""Options that the commands that run a gateway share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

ROUTING, PLACE, ENGINES = "Routing", "Addresses", "Emulated engines"
Policy: TypeAlias = Annotated[
    str | None, typer.Option(help="Decode policy; default: the file's, else foresight.", rich_help_panel=ROUTING)
]
PrefillPolicy: TypeAlias = Annotated[
    str | None, typer.Option(help="Prefill policy; default: the file's.", rich_help_panel=ROUTING)
]
AdminPort: TypeAlias = Annotated[
    int | None,
    typer.Option(min=0, max=65535, help="Port of dashboard and metrics; 0: any free port.", rich_help_panel=PLACE),
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
