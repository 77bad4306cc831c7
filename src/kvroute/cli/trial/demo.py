"""`kvroute demo`: the gateway on emulated engines under each policy, compared with the simulator's prediction."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from kvroute.cli.choices import DEFAULT_DECODE_POLICY
from kvroute.cli.output import make_folder, own_command, remarks, tell
from kvroute.cli.quantities import DURATION, RATE, listed, per_second
from kvroute.cli.quantities import seconds as seconds_option
from kvroute.types import TIER_COUNT, InputError

if TYPE_CHECKING:
    from kvroute.testbed.live import Comparison, Half, LiveComparisonSpec

WIDTH = 80
"""Width of the output in columns, on every terminal and in every file."""
TIERS = ("same node", "same rack", "same pod", "across pods", "across sites")


def demo(
    cluster: Annotated[Path, typer.Argument(help="Cluster file (YAML).", show_default=False)],
    seconds: Annotated[
        float,
        typer.Option(
            parser=seconds_option(1, 3600),
            metavar=DURATION,
            help="Duration of traffic under each policy.",
            show_default="30 s",
        ),
    ] = 30.0,
    rate: Annotated[
        float,
        typer.Option(
            parser=per_second(0.1, 1000), metavar=RATE, help="Request rate, e.g. 90/min.", show_default="2.5/s"
        ),
    ] = 2.5,
    profile: Annotated[str, typer.Option(help="Profile of the generated trace: chatbot, rag or long-context.")] = "rag",
    p_share: Annotated[float, typer.Option(min=0, max=1, help="Share of prompts with a shared prefix.")] = 0.7,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Decode policy; repeat for several; default: round-robin, foresight, foresight-joint."),
    ] = None,
    prefill: Annotated[
        str | None, typer.Option(help="Prefill policy; default: that of the file's `gateway` section, or cache-aware.")
    ] = None,
    output_max: Annotated[int, typer.Option(min=1, help="Maximum output length in tokens.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the trace and the engines.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the dashboard and the results.")] = Path("demo-results"),
) -> None:
    """Send generated traffic through a gateway to emulated engines, policy by policy, and compare with the simulator.

    Example: [bold]kvroute demo examples/fat-tree-64gpu.yaml[/bold]
    """
    from kvroute.control import ControlSpec

    try:
        from kvroute.testbed.live import LiveComparisonSpec, playable
    except ImportError as error:
        raise InputError(f"{error.name} is not installed", hint="pip install 'kvroute[serve]'") from None
    from kvroute.planner.comparison.requests import Workload
    from kvroute.planner.comparison.served import served_file
    from kvroute.report.dashboard_page import dashboard_page
    from kvroute.sim.workload import PROFILES

    served = served_file(str(cluster))
    prefill = prefill or served.gateway.prefill
    policies = listed(policy) or ["round-robin", "foresight", DEFAULT_DECODE_POLICY]
    for name in policies:
        ControlSpec(decode=name, prefill=prefill).check()
    if profile not in PROFILES:
        raise InputError(f"unknown profile {profile!r}", where="--profile", hint=f"use one of {', '.join(PROFILES)}")
    loaded = served.cluster
    tell(loaded.remarks)
    make_folder(out, "--out")
    workload = Workload(
        generated_requests=max(1, round(seconds * rate)), profile=profile, rate_per_s=rate, p_share=p_share
    )
    trace = playable(workload.of_seed(seed), output_max)
    _say(f"{loaded.name}: {len(loaded.instances)} emulated engines and a live gateway on this machine, no GPU.")
    _say(f"{len(trace.requests)} requests ({profile}) in {seconds:g} s, once under each policy:\n")
    found = [_live(LiveComparisonSpec(cluster, trace, name, prefill, seed), seconds, policies) for name in policies]
    comparisons = [comparison for comparison, _, _ in found]
    ends = [end for _, _, end in found]
    save(comparisons, dashboard_page(found[-1][1], ends), out)
    _report(comparisons)
    _farewell(cluster, out, policies[-1])


def _live(live_spec: LiveComparisonSpec, seconds: float, policies: Sequence[str]) -> tuple[Comparison, bytes, bytes]:
    """Compare live and predicted results of one policy; return them with the busiest and the final dashboard state."""
    from kvroute.testbed.live import Comparison, embedded, observed, predict, send_trace

    name = live_spec.policy
    with embedded(live_spec) as starting:
        predicted = predict(live_spec)  # during the start of the engines
        served = starting()
        turn = f"{policies.index(name) + 1}/{len(policies)} {name}"
        _say(f"{turn}: live dashboard at {served.admin} for the next {seconds:.0f} s")
        with _progress(len(live_spec.trace.requests)) as answered:
            answers, height = send_trace(served, live_spec.trace, answered)
        live = observed(answers, served.page("/metrics").decode())
        end = served.page("/state")
    if not live.answered:
        raise InputError(f"no request was answered under {name}: {live.errors[0] if live.errors else 'none was sent'}")
    return Comparison(name, live, predicted), height, end


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """Show a bar on a terminal, and nothing elsewhere; call the yielded function for every response."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    columns = (TextColumn("    answered"), BarColumn(30), MofNCompleteColumn())
    with Progress(*columns, console=remarks(), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)


def _paper() -> Console:
    return Console(width=WIDTH, highlight=False)


def _say(text: str) -> None:
    Console(width=WIDTH, highlight=False, stderr=True).print(text, markup=False, soft_wrap=True)


def _report(found: Sequence[Comparison]) -> None:
    paper = _paper()
    paper.print()
    paper.print(_times(found))
    paper.print()
    paper.print(_tiers(found))
    paper.print()
    for sentence in _verdict(found):
        paper.print(sentence, markup=False)


def _halves(found: Sequence[Comparison]) -> Iterator[tuple[str, str, Half]]:
    for comparison in found:
        yield comparison.policy, "live", comparison.live
        yield "", "predicted", comparison.predicted


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for column in ("policy", ""):
        table.add_column(column, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _times(found: Sequence[Comparison]) -> Table:
    table = _table("Time to first token, ms", ("p50", "p90", "mean", "prefill", "transfer", "answers"))
    for policy, side, half in _halves(found):
        times = (half.ttft_p50_s, half.ttft_p90_s, half.ttft_mean_s, half.parts_s["prefill"], half.parts_s["transfer"])
        table.add_row(policy, side, *(f"{1e3 * second:,.0f}" for second in times), str(half.answered))
    return table


def _tiers(found: Sequence[Comparison]) -> Table:
    seen = [tier for tier in range(TIER_COUNT) if any(half.tier_share[tier] for _, _, half in _halves(found))]
    table = _table("KV transfers by tier, % of requests", ["none", *(TIERS[tier] for tier in seen)])
    for policy, side, half in _halves(found):
        shares = (max(0.0, 1.0 - sum(half.tier_share)), *(half.tier_share[tier] for tier in seen))
        table.add_row(policy, side, *(f"{100 * share:.0f}" for share in shares))
    return table


def _verdict(found: Sequence[Comparison]) -> Iterator[str]:
    first, last = found[0], found[-1]
    if len(found) > 1:
        live, predicted = (
            of_last.ttft_mean_s / of_first.ttft_mean_s - 1.0
            for of_last, of_first in ((last.live, first.live), (last.predicted, first.predicted))
        )
        yield (
            f"The mean TTFT under {last.policy} is {_change(live)} than under {first.policy}; "
            f"the simulator predicted {_change(predicted)}."
        )
    off = ", ".join(f"{100 * abs(comparison.off):.1f} % ({comparison.policy})" for comparison in found)
    yield f"Live and predicted medians are {off} apart; both use the same decision code."


def _change(share: float) -> str:
    return f"{100 * abs(share):.0f} % {'lower' if share < 0 else 'higher'}"


def _farewell(cluster: Path, out: Path, policy: str) -> None:
    paper = _paper()
    paper.print()
    for text in (
        f"Open {out / 'dashboard.html'} in a browser: the cluster at its busiest under {policy}.",
        "To keep a gateway running, with the live dashboard at http://127.0.0.1:9090:",
        f"    {own_command()} serve --embedded {shlex.quote(str(cluster))}",
        "and send it requests at http://127.0.0.1:8080/v1 with any OpenAI client.",
    ):
        paper.print(text, markup=False, soft_wrap=True)


def save(found: Sequence[Comparison], page: str, out: Path) -> None:
    """Write dashboard.html and demo.json, each atomically. Raises InputError if a file cannot be written."""
    from kvroute.files.compressed_lines import written_whole

    rows = [
        {"policy": comparison.policy, "live": comparison.live, "predicted": comparison.predicted}
        for comparison in found
    ]
    with written_whole(out / "dashboard.html", "choose another folder") as part:
        part.write_text(page, encoding="utf-8")
    with written_whole(out / "demo.json", "choose another folder") as part:
        part.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=2))
