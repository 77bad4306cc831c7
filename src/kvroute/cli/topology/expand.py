"""`kvroute topology expand`: writes a simulated cluster's file without shorthands and with its engines' addresses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from kvroute.cli.output import own_command, tell
from kvroute.types import TRAITS, InputError, InputErrors, KvProtocol


def expand_file(
    file: Annotated[Path, typer.Argument(help="The cluster file (YAML).", show_default=False)],
    endpoints: Annotated[
        list[str] | None,
        typer.Option(
            help="Addresses of the engines, http://host:port: one for each instance in the file's order, or NAME=URL; "
            "separated by commas, or repeat the option; or a file with one address per line.",
            show_default=False,
        ),
    ] = None,
    protocol: Annotated[str, typer.Option(help=f"KV transfer protocol: {', '.join(TRAITS)}.")] = "vllm",
    out: Annotated[Path | None, typer.Option(help="File to write; default: stdout.", show_default=False)] = None,
) -> None:
    """Write a cluster file without shorthands: every node and every instance, with the address of its engine.

    A simulated cluster can then be served: with the same racks, links and timing, and an endpoint for each instance.

    Example: [bold]kvroute topology expand examples/small.yaml --endpoints prefill0=http://10.0.0.1:8000[/bold]
    """
    from kvroute.topology import parse
    from kvroute.topology.reading.assembly import read_text
    from kvroute.topology.reading.expansion import with_endpoints

    if protocol not in get_args(KvProtocol):
        hint = f"choose one of {', '.join(get_args(KvProtocol))}"
        raise InputError(f"there is no protocol {protocol!r}", where="--protocol", hint=hint)
    cluster = parse(read_text(file), str(file))
    tell(cluster.remarks)
    try:
        placed = with_endpoints(cluster.file, _addresses(endpoints or []), cast(KvProtocol, protocol))
    except InputError as error:
        raise InputError(error.what, where="--endpoints", hint=error.hint) from None
    text = f"# {file.name}, written out by `kvroute topology expand`.\n{placed.to_yaml()}"
    try:
        written_out = parse(text, where="--endpoints")
    except InputErrors as errors:
        # The file does not exist yet, so line numbers would be useless to the reader.
        problems = [InputError(fault.what, where="--endpoints", hint=fault.hint) for fault in errors.problems]
        raise InputErrors(problems) from None
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        with out.open("x", encoding="utf-8") as written:
            written.write(text)
    except FileExistsError:
        raise InputError("the file already exists", where=str(out), hint="give another file to --out") from None
    except OSError as error:
        hint = "give another file to --out"
        raise InputError(f"cannot be written ({error.strerror})", where=str(out), hint=hint) from None
    lacking = [instance.name for instance in written_out.instances if instance.endpoint is None]
    after = f"give an endpoint to {', '.join(lacking)}" if lacking else f"{own_command()} serve {out}"
    typer.echo(f"wrote {out}; next: {after}")


def _addresses(options: list[str]) -> list[str]:
    """Return the addresses in all options; an option that names a file stands for the file's lines."""
    from kvroute.topology.reading.assembly import read_text

    found: list[str] = []
    for option in options:
        path = Path(option)
        lines = read_text(path).splitlines() if "://" not in option and path.is_file() else option.split(",")
        found += [stripped for line in lines if (stripped := line.partition("#")[0].strip())]
    return found
