"""Options that the commands of `kvroute timing` share."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import typer

Kind: TypeAlias = Annotated[
    Literal["linear", "quadratic", "piecewise"], typer.Option("--kind", help="Form of the prefill model.")
]
TimingName: TypeAlias = Annotated[str, typer.Option("--name", help="Name of the timing in the cluster file.")]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
