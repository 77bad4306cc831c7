"""`kvroute llm`: the presets, or one model's geometry and the size of its KV cache."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from kvroute.cli.output import console, print_json, remarks, thin_table
from kvroute.llm import MODELS, Model, model
from kvroute.types import InputError


def llm(
    name: Annotated[
        str | None, typer.Argument(help="A preset, a config.json or its folder; nothing: all presets.")
    ] = None,
    tp: Annotated[int, typer.Option("--tp", help="Tensor-parallel shards.")] = 1,
    tokens: Annotated[int, typer.Option("--tokens", help="Length of the context to size.")] = 8192,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Show how many bytes of KV cache a model keeps and sends, per token, per shard and for one context.

    Example: [bold]kvroute llm llama-3-70b --tp 4 --tokens 131072[/bold]
    """
    if tokens < 0:
        raise InputError(f"a context of {tokens} tokens is impossible", where="--tokens", mend="give 0 or more")
    models = list(MODELS.values()) if name is None else [model(name)]
    if as_json:
        documents = [_plain(each, tp, tokens) for each in models]
        print_json(documents if name is None else documents[0])
        return
    console().print(_sizes(models, tp, tokens))
    if name is not None and any(group.kind != "mla" and group.kv_heads % tp for group in models[0].layers):
        remarks().print(f"{tp} shards do not share the KV heads evenly: the figures are of the fullest shard.")
    if name is not None:
        console().print(_geometry(models[0]))


def _plain(each: Model, tp: int, tokens: int) -> dict[str, Any]:
    return {
        "name": each.name,
        "layers": [asdict(group) for group in each.layers],
        "tp": tp,
        "tokens": tokens,
        "kv_bytes_per_token": each.kv_bytes_per_token,
        "kv_bytes_per_token_shard": each.kv_bytes_per_token_shard(tp),
        "request_state_bytes": each.request_state_bytes,
        "kv_bytes": each.kv_bytes(tokens),
        "kv_bytes_shard": each.kv_bytes_shard(tokens, tp),
    }


def _sizes(models: list[Model], tp: int, tokens: int) -> Table:
    table = thin_table(title=f"KV cache, {tokens:,} tokens, TP {tp}")
    table.add_column("model", no_wrap=True)
    for heading in ("layers", "B/token", "B/token a shard", "state MiB", "context MiB", "MiB a shard"):
        table.add_column(heading, justify="right")
    for each in models:
        table.add_row(
            each.name,
            str(sum(group.count for group in each.layers)),
            f"{each.kv_bytes_per_token:,.0f}",
            f"{each.kv_bytes_per_token_shard(tp):,.0f}",
            f"{each.request_state_bytes / 2**20:,.1f}",
            f"{each.kv_bytes(tokens) / 2**20:,.1f}",
            f"{each.kv_bytes_shard(tokens, tp) / 2**20:,.1f}",
        )
    return table


def _geometry(each: Model) -> Table:
    table = thin_table(title="One layer of each kind")
    table.add_column("kind")
    for heading in (
        "count",
        "KV heads",
        "key dim",
        "value dim",
        "B/number",
        "window",
        "B/token",
        "state B",
    ):
        table.add_column(heading, justify="right")
    for group in each.layers:
        numbers = (
            group.count,
            group.kv_heads,
            group.key_dim,
            group.value_dim,
            group.element_bytes,
            group.window_tokens,
        )
        sizes = (f"{group.token_bytes():,.0f}", f"{group.state_bytes:,.0f}")
        table.add_row(group.kind, *(f"{number:g}" if number else "-" for number in numbers), *sizes)
    return table
