"""`kvroute experiment` where kvroute-studies is not installed."""

from __future__ import annotations

from typing import Annotated

import typer

from kvroute.types import InputError


def experiment(
    names: Annotated[list[str] | None, typer.Argument(help="Experiments by name.", show_default=False)] = None,
) -> None:
    """Repeat published evaluations; the package kvroute-studies has them, and it is not installed."""
    hint = "pip install kvroute-studies, or ./studies of the repository"
    raise InputError(
        "`kvroute experiment` is a command of the package kvroute-studies, which is not installed", hint=hint
    )
