"""`kvroute key new NAME`: generates an API key for the gateway, shows it once, and prints the line for the key file."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kvroute.cli.output import print_json
from kvroute.types import InputError

if TYPE_CHECKING:
    pass

app = typer.Typer(help="Create API keys of the gateway.", no_args_is_help=True)


@app.command("new")
def key_new(
    name: Annotated[str, typer.Argument(help="Name of the key's owner; logs and limits use it.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Generate a key of 256 random bits. The key is shown only once and not stored.

    Example: [bold]kvroute key new alice[/bold]
    """
    from kvroute.serve.api.api_keys import new_key
    from kvroute.topology.schema import Name

    try:
        msgspec.convert(name, Name)
    except msgspec.ValidationError as error:
        hint = "use letters, digits, `-`, `_` and `.`, and begin with a letter or a digit"
        raise InputError(f"{name!r} is not a valid key name", where="NAME", hint=hint) from error
    key, hashed = new_key(secrets.token_bytes(32))
    if as_json:
        print_json({"name": name, "key": key, "hash": hashed})
        return
    typer.echo(f"The key, shown only once; give it to {name}:\n\n    {key}\n")
    typer.echo(f"The line for the key file, or for `gateway: {{keys: {{known: ...}}}}`:\n\n    {name}: {hashed}")


@app.callback()
def _root() -> None:
    """Manage API keys of the gateway. The key file stores only hashes, which cannot be used as keys."""
