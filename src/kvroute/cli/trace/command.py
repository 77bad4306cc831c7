"""`kvroute trace`: statistics of a request trace, and a generator of traces."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kvroute.cli import choices
from kvroute.cli.output import console, print_json, remarks, tell, thin_table
from kvroute.cli.quantities import RATE, per_second
from kvroute.types import InputError

if TYPE_CHECKING:
    from kvroute.sim.workload import LengthProfile, Trace, TraceStatistics

app = typer.Typer(
    name="trace", help="Show and generate traces of requests.", no_args_is_help=True, rich_markup_mode="rich"
)

DEFAULT_REQUESTS = 2_000
_GENERATED_MAX = 5_000_000
_SHOWN_SKIPS = 10

Profiled = Annotated[str, typer.Option(help=f"Use only requests of this profile: {', '.join(choices.PROFILES)}.")]
Rate = Annotated[
    float | None,
    typer.Option(
        parser=per_second(),
        metavar=RATE,
        help="Request rate, e.g. 6/s; all arrival times are scaled by one factor.",
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of a generated trace.")]
Share = Annotated[
    float | None, typer.Option(min=0, max=1, help="Replace the trace's prefixes: share by group with this probability.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else to stdout.")]


@app.command()
def show(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="Mooncake JSONL (.zst, .gz), Azure LLM CSV, an event log or sessions of agents.", show_default=False
        ),
    ] = None,
    generated: Annotated[bool, typer.Option("--generate", help="Show a generated trace instead of a file.")] = False,
    requests: Annotated[
        int | None, typer.Option(min=1, help=f"Number of requests to use, or to generate (default {DEFAULT_REQUESTS}).")
    ] = None,
    rate: Rate = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of random draws; default: 0.")] = None,
    profile: Profiled = "",
    p_share: Share = None,
    skip_bad: Annotated[bool, typer.Option(help="Skip and count invalid lines.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print lengths, arrivals and prefix reuse of a trace.

    Examples: [bold]kvroute trace show conversation_trace.jsonl.zst --profile rag[/bold]

    [bold]kvroute trace show --generate --requests 12000 --json[/bold]
    """
    from kvroute.sim.workload import apply_profile, rescale_if_spread, share_prefixes, take

    if (file is None) != generated:
        raise InputError("give either a FILE or --generate")
    if file is not None and seed is not None and p_share is None:
        raise InputError("a trace file needs no seed", where="--seed", hint="omit it, or also give --p-share")
    seed = seed or 0
    if file is None:
        trace = _generated(requests or DEFAULT_REQUESTS, rate, seed, profile)
    else:
        trace = _read(file, skip_bad)
        trace = apply_profile(trace, _profile(profile)) if profile else trace
        trace = trace if requests is None else take(trace, requests)
        trace = trace if rate is None else rescale_if_spread(trace, rate)
    trace = trace if p_share is None else share_prefixes(trace, p_share, seed=seed)
    _tell(trace, str(file or trace.name))
    statistics = trace.statistics()
    if as_json:
        print_json(statistics)
        return
    _print(statistics)


@app.command("generate")
def generate_file(
    out: Annotated[
        Path,
        typer.Argument(
            help="File to write: .jsonl, .jsonl.zst or .jsonl.gz; an existing file is replaced.",
            show_default=False,
        ),
    ],
    requests: Annotated[int, typer.Option(min=1, max=_GENERATED_MAX, help="Number of requests.")] = DEFAULT_REQUESTS,
    rate: Rate = None,
    seed: Seed = 0,
    profile: Profiled = "",
    p_share: Share = None,
    as_json: AsJson = False,
) -> None:
    """Write a trace in Mooncake's format with the statistics of its conversation trace; equal seeds give equal files.

    Example: [bold]kvroute trace generate rag.jsonl.zst --requests 5000 --rate 6 --profile rag --seed 1[/bold]
    """
    from kvroute.sim.workload import share_prefixes, write

    trace = _generated(requests, rate, seed, profile)
    trace = trace if p_share is None else share_prefixes(trace, p_share, seed=seed)
    _tell(trace, trace.name)
    write(trace, out)
    remarks().print(f"wrote {len(trace.requests)} requests to {out}", markup=False, highlight=False, soft_wrap=True)
    if as_json:
        print_json(trace.statistics())


def _generated(requests: int, rate_per_s: float | None, seed: int, profile: str) -> Trace:
    """Generate exactly `requests` that fit the profile, at exactly the requested rate."""
    from kvroute.sim.workload import MOONCAKE_CONVERSATION, apply_profile, generate, rescale_if_spread, take

    rate = MOONCAKE_CONVERSATION.rate_per_s if rate_per_s is None else rate_per_s
    if not profile:
        trace = generate(requests, rate_per_s=rate, seed=seed)
        return trace if rate_per_s is None else rescale_if_spread(trace, rate)
    bounds, drawn = _profile(profile), 2 * requests + 100
    trace = apply_profile(generate(drawn, rate_per_s=rate, seed=seed), bounds)
    while len(trace.requests) < requests:
        drawn *= 2
        trace = apply_profile(generate(drawn, rate_per_s=rate, seed=seed), bounds)
    return rescale_if_spread(take(trace, requests), rate)


def _profile(name: str) -> LengthProfile:
    from kvroute.sim.workload import PROFILES

    if name not in PROFILES:
        raise InputError(
            f"there is no profile {name!r}", where="--profile", hint=f"choose one of {', '.join(PROFILES)}"
        )
    return PROFILES[name]


def _read(file: Path, skip_bad: bool) -> Trace:
    from kvroute.sim.workload import read

    skipped: list[InputError] = []
    trace = read(file, skip_bad=skip_bad, on_skip=skipped.append)
    for fault in skipped[:_SHOWN_SKIPS]:
        typer.echo(f"skipped: {fault.where}: {fault.what}", err=True)
    return trace


def _tell(trace: Trace, name: str) -> None:
    tell(f"{name}: {remark}" for remark in trace.remarks)


def _print(statistics: TraceStatistics) -> None:
    from kvroute.sim.workload import LengthStatistics

    out = console()
    lengths = thin_table("tokens", title=statistics.name)
    lengths.add_column("prompt", justify="right")
    lengths.add_column("answer", justify="right")
    for figure in LengthStatistics.__struct_fields__:
        pair = (statistics.input_tokens, statistics.output_tokens)
        lengths.add_row(figure, *("-" if row is None else f"{getattr(row, figure):,.0f}" for row in pair))
    out.print(lengths)
    facts = Table(show_header=False, box=None, padding=(0, 1, 0, 0))
    facts.add_column(style="bold")
    facts.add_column()
    facts.add_row("requests", f"{statistics.requests:,} in {statistics.duration_s:,.1f} s")
    facts.add_row(
        "rate",
        f"{statistics.rate_per_s:.3f} per second" if statistics.rate_per_s else "none: all requests arrive at one time",
    )
    facts.add_row(
        "arrivals",
        f"{statistics.distinct_arrivals:,} times, every {statistics.gap_p50_s:.3f} s (median), with "
        f"{statistics.batch_mean:.1f} requests on average, {statistics.batch_max} at most; "
        f"variation of gaps {statistics.gap_cv:.2f} (Poisson: 1)",
    )
    facts.add_row("prefixes", _reuse(statistics))
    out.print(facts)


def _reuse(statistics: TraceStatistics) -> str:
    if not statistics.blocks:
        return "unknown: the trace has no block ids"
    return (
        f"{statistics.reused_token_share:.1%} of prompt tokens and {statistics.reused_block_share:.1%} of blocks "
        f"repeat earlier ones; {statistics.reusing_request_share:.1%} of requests reuse one or more of their "
        f"{statistics.block_tokens}-token blocks"
    )
