"""`kvroute llm`: the presets, or one model's geometry and the size of its KV cache."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvroute.cli.output import console, print_json, remarks
from kvroute.cli.quantities import TOKENS, token_count

if TYPE_CHECKING:
    from kvroute.llm import Model
    from kvroute.report.grid import Grid


def llm(
    name: Annotated[
        str | None, typer.Argument(help="A preset, a config.json or its folder; default: all presets.")
    ] = None,
    tp: Annotated[int, typer.Option("--tp", help="Number of tensor-parallel shards.")] = 1,
    tokens: Annotated[
        int,
        typer.Option("--tokens", parser=token_count(0), metavar=TOKENS, help="Context length, e.g. 128K."),
    ] = 8192,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Show how many bytes of KV cache a model keeps and sends, per token, per shard and for one context.

    Example: [bold]kvroute llm llama-3-70b --tp 4 --tokens 131072[/bold]
    """
    from kvroute.llm import MODELS, model
    from kvroute.report.grid import rich_table

    models = list(MODELS.values()) if name is None else [model(name)]
    if as_json:
        documents = [_plain(model, tp, tokens) for model in models]
        print_json(documents if name is None else documents[0])
        return
    shown = console()
    shown.print(rich_table(_sizes(models, tp, tokens), shown.width))
    if name is not None and any(group.kind != "mla" and group.kv_heads % tp for group in models[0].layers):
        remarks().print(f"{tp} shards cannot share the KV heads evenly; the values are those of the largest shard.")
    if name is not None:
        shown.print(rich_table(_geometry(models[0]), shown.width))


def _plain(model: Model, tp: int, tokens: int) -> dict[str, Any]:
    return {
        "name": model.name,
        "layers": [asdict(group) for group in model.layers],
        "tp": tp,
        "tokens": tokens,
        "kv_bytes_per_token": model.kv_bytes_per_token,
        "kv_bytes_per_token_shard": model.kv_bytes_per_token_shard(tp),
        "request_state_bytes": model.request_state_bytes,
        "kv_bytes": model.kv_bytes(tokens),
        "kv_bytes_shard": model.kv_bytes_shard(tokens, tp),
    }


def _sizes(models: list[Model], tp: int, tokens: int) -> Grid:
    from kvroute.report.grid import Grid, GridEntry, Heading

    headings = (
        Heading("model"),
        Heading("layers", drop=1),
        Heading("B/token"),
        Heading("B/token per shard"),
        Heading("state MiB", drop=2),
        Heading("context MiB"),
        Heading("MiB per shard"),
    )
    rows = tuple(
        (
            GridEntry(model.name),
            GridEntry(str(sum(group.count for group in model.layers))),
            GridEntry(f"{model.kv_bytes_per_token:,.0f}"),
            GridEntry(f"{model.kv_bytes_per_token_shard(tp):,.0f}"),
            GridEntry(f"{model.request_state_bytes / 2**20:,.1f}"),
            GridEntry(f"{model.kv_bytes(tokens) / 2**20:,.1f}"),
            GridEntry(f"{model.kv_bytes_shard(tokens, tp) / 2**20:,.1f}"),
        )
        for model in models
    )
    return Grid(f"KV cache, {tokens:,} tokens, TP {tp}", headings, rows)


def _geometry(model: Model) -> Grid:
    from kvroute.report.grid import UNKNOWN, Grid, GridEntry, Heading

    titles = ("count", "KV heads", "key dim", "value dim", "B/number", "window tokens", "B/token", "state B")
    rows = []
    for group in model.layers:
        numbers = (
            group.count,
            group.kv_heads,
            group.key_dim,
            group.value_dim,
            group.element_bytes,
            group.window_tokens,
        )
        sizes = (f"{group.token_bytes():,.0f}", f"{group.state_bytes:,.0f}")
        texts = (group.kind, *(f"{number:,g}" if number else UNKNOWN for number in numbers), *sizes)
        rows.append(tuple(map(GridEntry, texts)))
    return Grid("One layer of each kind", (Heading("kind"), *map(Heading, titles)), tuple(rows))
