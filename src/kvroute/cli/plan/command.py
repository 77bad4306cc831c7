"""`kvroute plan`: placement, offloading, splits, bandwidth of networks and storage, traffic classes, by formula."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import msgspec
import typer

from kvroute.cli.output import console, make_folder, print_json, remarks
from kvroute.cli.plan.placement import placement
from kvroute.cli.plan.replicas import replicas
from kvroute.cli.quantities import TOKENS, token_count
from kvroute.types import InputError

if TYPE_CHECKING:
    from kvroute.planner.qos.schema import LinkType
    from kvroute.planner.throughput.plan import Plan

_TOKENS = re.compile(r"(\d{1,9})([Kk]?)", re.ASCII)

_CACHED = (16_384, 32_768, 65_536)

app = typer.Typer(
    help="Compute thresholds, splits, bandwidth and traffic classes before you build a cluster.", no_args_is_help=True
)

app.command()(placement)
app.command()(replicas)


@app.command()
def prfaas(
    spec: Annotated[Path, typer.Argument(help="Plan file (YAML): traffic, hardware, clusters.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the report page, figures and all numbers.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Find which prompts to offload to other datacenters and how to split the local cluster (PrfaaS 3.4).

    Every threshold and every split is tried. The output shows the optimum, the stage that limits it and its
    sensitivity, compared with the home GPUs alone, as many GPUs in one place (homogeneous) and everything prefilled
    remotely (naive). Rates are computed by formula, without queues and without simulation.

    Example: [bold]kvroute plan prfaas examples/prfaas-case-study.yaml --out plan[/bold]
    """
    from kvroute.planner.throughput.plan import make_plan
    from kvroute.planner.throughput.problem import read_problem
    from kvroute.planner.throughput.search import KINDS, deployment, find, find_home

    problem = read_problem(spec)
    if as_json and out is None:
        found = {kind: deployment(find(problem, kind), kind) for kind in KINDS}
        home = find_home(problem)
        print_json(found | ({"home": deployment(home, "home")} if home else {}))
        return
    if out is not None:
        make_folder(out, "--out")
    plan = make_plan(problem)
    if as_json:
        print_json(plan.report.deployments)
    else:
        _print(plan)
    if out is not None:
        from kvroute.report.plans.throughput_page import write_plan  # its import of plots takes a second

        page = write_plan(plan, out, shlex.join(["kvroute", "plan", "prfaas", str(spec), "--out", str(out)]))
        remarks().print(f"Report: {page}", highlight=False, markup=False)


def _print(plan: Plan) -> None:
    from kvroute.report.grid import rich_table
    from kvroute.report.plans.throughput_tables import grids, verdict

    shown = console()
    shown.print(verdict(plan.report), highlight=False, markup=False)
    for grid in grids(plan.report):
        shown.print(rich_table(grid, shown.width))
    for choice in plan.report.choices:
        shown.print(f"- {choice}", highlight=False, markup=False)


@app.command()
def dualpath(
    spec: Annotated[
        Path, typer.Argument(help="Plan file (YAML): nodes, KV cache, turns, compute.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the report page, figures and all numbers.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Find whether cached KV is bound by storage or by compute, and what reading through decode nodes brings.

    By formula (DualPath 4.2), in general form: the load of every storage NIC, compute NIC and memory, the ratios of
    prefill to decode nodes at which all storage NICs can read at full rate, and the pooled rate for the nodes given.

    Example: [bold]kvroute plan dualpath examples/dualpath-660b.yaml --out plan[/bold]
    """
    from kvroute.planner.dualpath.plan import plan_dualpath
    from kvroute.planner.dualpath.problem import read_dualpath
    from kvroute.report.grid import rich_table
    from kvroute.report.plans.dualpath_tables import dualpath_verdict, utilisation_grid

    problem = read_dualpath(spec)
    if out is not None:
        make_folder(out, "--out")
    plan = plan_dualpath(problem)
    if as_json:
        print_json(plan)
    else:
        shown = console()
        shown.print(dualpath_verdict(plan), highlight=False, markup=False)
        shown.print(rich_table(utilisation_grid(plan), shown.width))
        for choice in plan.choices:
            shown.print(f"- {choice}", highlight=False, markup=False)
    if out is not None:
        from kvroute.report.plans.dualpath_page import write_dualpath  # its import of plots takes a second

        page = write_dualpath(
            problem, plan, out, shlex.join(["kvroute", "plan", "dualpath", str(spec), "--out", str(out)])
        )
        remarks().print(f"Report: {page}", highlight=False, markup=False)


@app.command()
def ratio(
    models: Annotated[
        list[str], typer.Argument(help="Presets, config.json files or their folders.", show_default=False)
    ],
    cached: Annotated[
        list[int] | None,
        typer.Option(
            "--cached",
            parser=token_count(),
            metavar=TOKENS,
            help="Tokens of cached KV; repeat for several; default: 16K, 32K and 64K.",
        ),
    ] = None,
    appended: Annotated[
        int, typer.Option("--appended", parser=token_count(), metavar=TOKENS, help="Tokens that a turn appends.")
    ] = 429,
    kv_number: Annotated[
        float | None,
        typer.Option("--kv-number", min=0.25, max=8, help="Bytes of one number of KV; 1 is FP8; default: the model's."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Compute how many gigabytes of cached KV a turn reads per PFLOP that it computes (DualPath table 1).

    The higher this cache-compute ratio is, the more likely storage is the limit. A prefill at X PFLOPS reads X times as
    many gigabytes per second.

    Example: [bold]kvroute plan ratio deepseek-v3.2 qwen3-235b --kv-number 1[/bold]
    """
    from kvroute.llm import model as find_model
    from kvroute.planner.throughput.cache_compute import cache_compute
    from kvroute.report.grid import rich_table
    from kvroute.report.plans.ratio_tables import ratio_grid

    found = [find_model(name) for name in models]
    if kv_number is not None:
        found = [model.with_kv_numbers(kv_number) for model in found]
    rows = [(model, [cache_compute(model, tokens, appended) for tokens in cached or _CACHED]) for model in found]
    if as_json:
        print_json([row for _, some in rows for row in some])
        return
    shown = console()
    shown.print(rich_table(ratio_grid(rows), shown.width))


@app.command()
def qos(
    cluster: Annotated[Path, typer.Argument(help="Cluster file (YAML).", show_default=False)],
    link: Annotated[
        str | None, typer.Option("--link", help="infiniband or roce; default: `link` of the file's section `qos`.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Print the configuration of traffic classes that keeps KV transfers from delaying collectives (DualPath A.1).

    The classes come from the section `qos` of the cluster file; without it, collectives of the model have 98 % of a
    link, KV transfers 1 % and all other traffic 1 % while all of them send. Printed are the lines for OpenSM
    (InfiniBand), or for NICs and switches (RoCE), and the environment variables that mark the traffic.

    Example: [bold]kvroute plan qos examples/superpod.yaml --link roce[/bold]
    """
    from kvroute.planner.qos.plan import plan_qos
    from kvroute.planner.qos.schema import LinkType
    from kvroute.report.grid import rich_table
    from kvroute.report.plans.qos_config import configurations
    from kvroute.report.plans.qos_tables import qos_grid, qos_verdict

    if link not in (None, *get_args(LinkType)):
        hint = f"choose one of {', '.join(get_args(LinkType))}"
        raise InputError(f"there is no link type {link!r}", where="--link", hint=hint)
    plan = plan_qos(cluster, cast("LinkType | None", link))
    found = configurations(plan)
    if as_json:
        print_json(msgspec.to_builtins(plan) | {"configurations": found})
        return
    shown = console()
    shown.print(qos_verdict(plan), highlight=False, markup=False)
    shown.print(rich_table(qos_grid(plan), shown.width))
    typer.echo("\n\n".join(f"# {title}\n{text}" for title, text in found.items()))


@app.command()
def egress(
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="GPUs that only prefill.", show_default=False)],
    tokens: Annotated[
        str, typer.Option("--tokens", help="Mean uncached prompt length, e.g. 32K (K is 1,024).")
    ] = "32K",
    model: Annotated[
        list[str] | None,
        typer.Option("--model", help="Model; repeat for several; default: all models of the published table."),
    ] = None,
    gpus_per_instance: Annotated[int, typer.Option("--gpus-per-instance", min=1, help="GPUs per instance.")] = 8,
    prefill: Annotated[
        str, typer.Option("--prefill", help="Measured prefill time of one such prompt, e.g. 1.84s.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Compute the smallest egress bandwidth at which this many prefill GPUs never wait for the link (PrfaaS eq. 2).

    With --prefill, the KV throughput of one instance is the size of the model's KV cache (a preset or a config.json)
    divided by that time. Without it, the published value of 8 H200 is used (PrfaaS Table 3).

    Example: [bold]kvroute plan egress --gpus 512 --model minimax-m2.5 --tokens 32K[/bold]
    """
    from kvroute.planner.throughput.kv_throughput import PUBLISHED_GBPS
    from kvroute.report.grid import Grid, GridEntry, Heading, rich_table

    if gpus % gpus_per_instance:
        what = f"{gpus} GPUs cannot be divided into instances of {gpus_per_instance}"
        raise InputError(what, where="--gpus", hint=f"use a multiple of {gpus_per_instance}")
    count = _token_count(tokens)
    if not prefill and gpus_per_instance != 8:
        hint = "measure one prompt and give --prefill"
        raise InputError("the published table covers only instances of 8 GPUs", where="--gpus-per-instance", hint=hint)
    if prefill and not model:
        raise InputError("--prefill needs --model", hint="the prefill time belongs to one model; name it")
    rows = [_egress_row(name, count, gpus, gpus_per_instance, prefill) for name in model or PUBLISHED_GBPS]
    if as_json:
        print_json({"gpus": gpus, "gpus_per_instance": gpus_per_instance, "tokens": count, "models": rows})
        return
    headings = (
        Heading("model"),
        Heading("KV Gbps per instance"),
        Heading("egress Gbps"),
        Heading("KV throughput from", prose=True, drop=1),
    )
    texts = tuple(
        tuple(map(GridEntry, (row["model"], f"{row['kv_gbps']:,.2f}", f"{row['egress_gbps']:,.1f}", row["source"])))
        for row in rows
    )
    title = f"Minimum egress of {gpus:,} GPUs that prefill prompts of {count:,} tokens"
    shown = console()
    shown.print(rich_table(Grid(title, headings, texts), shown.width))


def _egress_row(name: str, tokens: int, gpus: int, gpus_per_instance: int, prefill: str) -> dict[str, Any]:
    from kvroute.llm import model as find_model
    from kvroute.planner.throughput.kv_throughput import egress_bytes_per_s, published_kv_bytes_per_s

    key = name.strip().rpartition("/")[2].lower()
    if prefill:
        found, seconds = find_model(name), _prefill_s(prefill)
        if not seconds > 0:
            raise InputError(
                "the prefill time is not above 0", where="--prefill", hint="give the measured time, e.g. '1.84 s'"
            )
        kv_bytes_per_s, key, source = found.kv_bytes(tokens) / seconds, found.name, f"KV size over {prefill.strip()}"
    else:
        kv_bytes_per_s, source = published_kv_bytes_per_s(key, tokens), "PrfaaS Table 3, 8 H200"
    need = egress_bytes_per_s(gpus, gpus_per_instance, kv_bytes_per_s)
    return {"model": key, "kv_gbps": kv_bytes_per_s * 8 / 1e9, "egress_gbps": need * 8 / 1e9, "source": source}


def _prefill_s(text: str) -> float:
    """Parse a time such as "1.84", "1.84s" or "184 ms" into seconds."""
    from kvroute.topology import duration_s

    try:
        return duration_s(f"{float(text)} s")
    except ValueError:
        return duration_s(text)


def _token_count(text: str) -> int:
    match = _TOKENS.fullmatch(text.strip())
    count = int(match[1]) * (1024 if match[2] else 1) if match else 0
    if not count:
        raise InputError(f"{text!r} is not a valid number of tokens", where="--tokens", hint="write 32768 or 32K")
    return count
