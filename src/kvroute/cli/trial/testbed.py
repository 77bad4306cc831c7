"""`kvroute testbed`: a small-scale cluster on this machine that uses the kernel's network stack."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from kvroute.cli.choices import DEFAULT_DECODE_POLICY
from kvroute.cli.output import console, own_command, print_json, progress_bar, remarks
from kvroute.cli.quantities import RATE, listed, per_second
from kvroute.types import InputError

if TYPE_CHECKING:
    from kvroute.report.grid import Grid
    from kvroute.testbed import Build, NamedTestbed
    from kvroute.testbed.rounds import Round

app = typer.Typer(
    name="testbed",
    help="Build a scaled-down cluster on this machine: network namespaces, shaped links, emulated engines. Needs root.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

File = Annotated[Path, typer.Argument(help="Cluster file (YAML).", show_default=False)]
Name = Annotated[str | None, typer.Option(help="Name of the testbed; default: derived from the cluster's name.")]
Scale = Annotated[float, typer.Option(help="Real bytes per modelled byte, for rates and KV; times are not scaled.")]
Queues = Annotated[str, typer.Option(help="Queue at every link: fair (fair queueing by connection) or fifo.")]
Others = Annotated[
    str,
    typer.Option(
        "--background",
        help="Share of link capacity that other traffic uses: one value for tiers 1 to 4, or five by tier.",
    ),
]
Prefill = Annotated[str, typer.Option(help="Prefill policy.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of path draws, engines and trace.")]


@app.command()
def up(
    file: File,
    name: Name = None,
    scale: Scale = 1e-3,
    queues: Queues = "fair",
    background: Others = "0",
    policy: Annotated[str, typer.Option(help="Decode policy.")] = DEFAULT_DECODE_POLICY,
    prefill: Prefill = "least-loaded",
    seed: Seed = 0,
) -> None:
    """Start a testbed and keep it running: engines inside, a gateway outside. Prints its addresses as JSON.

    Example: [bold]sudo kvroute testbed up examples/testbed-literal.yaml[/bold]
    """
    from kvroute import topology
    from kvroute.control import ControlSpec
    from kvroute.testbed import Testbed

    cluster, build = topology.load(file), _build(scale, queues, background, seed)
    ControlSpec(decode=policy, prefill=prefill).check()
    testbed = Testbed(_run(name, cluster.name), cluster, build)
    testbed.check()
    with _ended_by_signals():
        try:
            testbed.lay()
            state = testbed.start_gateway(
                testbed.start_engines(), ["--policy", policy, "--prefill", prefill, "--seed", str(seed)]
            )
        except BaseException:
            testbed.remove()
            raise
        testbed.leave()
    print_json(state)
    remarks().print(f"`{own_command()} testbed down --name {state.run}` removes the testbed", highlight=False)


@app.command()
def run(
    file: File,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Decode policy; repeat for several; default: round-robin, cla, netkv, foresight.", show_default=False
        ),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 60,
    rate: Annotated[
        float, typer.Option(parser=per_second(0.1), metavar=RATE, help="Request rate, e.g. 90/min.", show_default="2/s")
    ] = 2.0,
    trace: Annotated[Path | None, typer.Option(help="Play this trace instead of a generated one.")] = None,
    profile: Annotated[str, typer.Option(help="Profile of the generated trace: chatbot, rag or long-context.")] = "rag",
    p_share: Annotated[float, typer.Option(min=0, max=1, help="Share of prompts with a shared prefix.")] = 0.3,
    output_max: Annotated[int, typer.Option(min=1, help="Maximum output length in tokens.")] = 32,
    prefill: Prefill = "least-loaded",
    name: Name = None,
    scale: Scale = 1e-3,
    queues: Queues = "fair",
    background: Others = "0",
    seed: Seed = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Start a testbed, run a trace on it under each policy, compare with the simulator, and remove the testbed.

    Example: [bold]sudo kvroute testbed run examples/testbed-literal.yaml --requests 100[/bold]
    """
    from kvroute import topology
    from kvroute.report.grid import rich_table

    try:
        from kvroute.testbed.live import playable
    except ImportError as error:
        raise InputError(f"{error.name} is not installed", hint="pip install 'kvroute[serve]'") from None
    from kvroute.control import ControlSpec
    from kvroute.planner.comparison.requests import Workload
    from kvroute.sim.workload import PROFILES
    from kvroute.testbed.rounds import POLICIES, course

    policies = listed(policy) or POLICIES
    for wanted in policies:
        ControlSpec(decode=wanted, prefill=prefill).check()
    if profile not in PROFILES:
        raise InputError(f"unknown profile {profile!r}", where="--profile", hint=f"use one of {', '.join(PROFILES)}")
    workload = Workload(
        trace=str(trace) if trace else "",
        generated_requests=requests,
        requests=requests,
        profile=profile,
        rate_per_s=rate,
        p_share=p_share,
    )
    sent = playable(workload.of_seed(seed), output_max)
    build, found = _build(scale, queues, background, seed), []
    with _ended_by_signals(), course(_run(name, topology.load(file).name), file, build) as testbed:
        for wanted in policies:
            with progress_bar(wanted) as tell:
                answered = _counting(tell, len(sent.requests))
                found.append(testbed.play(wanted, prefill, sent, answered))
    if as_json:
        print_json(found)
    else:
        shown = console()
        shown.print(rich_table(_grid(found), shown.width))


@app.command()
def down(
    file: Annotated[Path | None, typer.Argument(help="Cluster file of the testbed.", show_default=False)] = None,
    name: Name = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove every testbed of this machine.")] = False,
) -> None:
    """Remove a testbed in any state: its processes, namespaces, devices and files, and nothing else.

    Example: [bold]sudo kvroute testbed down examples/testbed-literal.yaml[/bold]
    """
    from kvroute import topology
    from kvroute.testbed import known, namespaces

    if not everything and name is None and file is None:
        raise InputError(
            "no testbed is selected", where="testbed down", hint="give its cluster file, --name NAME or --all"
        )
    if everything and (name is not None or file is not None):
        what = f"it removes every testbed, not only {name or file}"
        raise InputError(what, where="--all", hint="omit one of them")
    namespaces.check_tools()
    runs = known() if everything else [_run(name, topology.load(file).name if file else "")]
    for run in runs:
        there = run.remains()
        run.remove()
        remark = (
            f"removed {len(there)} items of testbed {run.name}"
            if there
            else f"testbed {run.name} had nothing to remove"
        )
        remarks().print(remark, highlight=False)
    if left := [thing for run in runs for thing in run.remains()]:
        raise InputError(f"not removed: {', '.join(left)}", where="testbed down", hint="try again")


def _run(name: str | None, cluster: str) -> NamedTestbed:
    from kvroute.testbed import NamedTestbed

    return NamedTestbed.of(cluster) if name is None else NamedTestbed(name)


def _build(scale: float, queues: str, background: str, seed: int) -> Build:
    from kvroute.cli.trial.emulate import shares_by_tier
    from kvroute.testbed import Build
    from kvroute.testbed.queues import Discipline

    for known_one in get_args(Discipline):
        if queues == known_one:
            return Build(scale=scale, queues=known_one, background=shares_by_tier(background), seed=seed)
    raise InputError(f"unknown queues {queues!r}", where="--queues", hint="use fair or fifo")


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Make SIGTERM end the block like Ctrl-C, so that the testbed is removed."""

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _counting(tell: Callable[[int, int], None], total: int) -> Callable[[], None]:
    done = 0
    tell(0, total)

    def answered() -> None:
        nonlocal done
        done += 1
        tell(done, total)

    return answered


def _grid(found: Sequence[Round]) -> Grid:
    from kvroute.report.grid import Grid, GridEntry, Heading

    headings = (
        Heading("policy"),
        Heading("p50"),
        Heading("p90", drop=1),
        Heading("mean"),
        Heading("prefill", drop=3),
        Heading("transfer", drop=4),
        Heading("answered"),
        Heading("CPU", drop=2),
    )
    rows = []
    for comparison in found:
        kernel, simulated = comparison.kernel, comparison.simulated
        pairs = (
            (kernel.ttft_p50_s, simulated.ttft_p50_s),
            (kernel.ttft_p90_s, simulated.ttft_p90_s),
            (kernel.ttft_mean_s, simulated.ttft_mean_s),
            (kernel.parts_s["prefill"], simulated.parts_s["prefill"]),
            (kernel.parts_s["transfer"], simulated.parts_s["transfer"]),
        )
        times = (f"{1e3 * a:,.0f} ({1e3 * b:,.0f})" for a, b in pairs)
        texts = (comparison.policy, *times, f"{kernel.answered}/{len(kernel.ttft_s)}", f"{comparison.cpu_share:.0%}")
        rows.append(tuple(map(GridEntry, texts)))
    return Grid("Time to first token, ms: kernel (simulated)", headings, tuple(rows))
