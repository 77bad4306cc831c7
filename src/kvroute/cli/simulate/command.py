"""`kvroute simulate`: the results of each policy on the user's own cluster and trace, and the best policy."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from kvroute.cli.choices import DECODE_POLICIES, PREFILL_POLICIES, PROFILES, THINK_MAX_S
from kvroute.cli.output import console, make_folder, print_json, progress_bar, remarks, tell
from kvroute.cli.quantities import DURATION, RATE, TOKENS, listed, per_second, seconds, token_count
from kvroute.types import InputError

SEED_MAX, PROMPT_MAX, AGENTS_MAX, WORKERS_MAX = 2**31 - 1, 10_000_000, 1_000_000, 1024
GATEWAYS_MAX = 1_000
_OF_FILE = "default: as the file's `gateway` section says"
SETUP, WORKLOAD, NETWORK, OUTPUT = "Policies", "Workload", "Network and telemetry", "Output"


def _names(known: Iterable[str]) -> str:
    return ", ".join(known)


def simulate(
    cluster: Annotated[Path, typer.Argument(help="Cluster file (YAML), see `kvroute topology`.", show_default=False)],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy", help=f"Decode policy; repeat to compare: {_names(DECODE_POLICIES)}.", rich_help_panel=SETUP
        ),
    ] = None,
    prefill_policy: Annotated[
        str | None,
        typer.Option(help=f"Prefill policy: {_names(PREFILL_POLICIES)}; {_OF_FILE}.", rich_help_panel=SETUP),
    ] = None,
    constraint: Annotated[
        str | None,
        typer.Option(
            help=f"Topology constraint: level:fail, level:fallback or level:preferred:weight; {_OF_FILE}.",
            rich_help_panel=SETUP,
        ),
    ] = None,
    cla_weights: Annotated[
        str | None, typer.Option(help="Weights of cla: cache,load; default: 1,1.", rich_help_panel=SETUP)
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Mooncake JSONL (.zst, .gz), Azure LLM CSV, an event log of `serve --log` or `--log`, or sessions of "
            "coding agents (JSONL, or a folder of trace_*.json); default: a generated Mooncake-like trace.",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of requests to use from the trace, or to generate (default 2000).",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            parser=per_second(),
            metavar=RATE,
            help="Scale arrival times to this rate, e.g. 6/s; for agents, scale the session starts.",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    agents: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=AGENTS_MAX,
            help="Number of concurrent agent sessions; each turn starts after the previous response.",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    think_max: Annotated[
        float,
        typer.Option(
            parser=seconds(),
            metavar=DURATION,
            help="Maximum pause of agents between turns; 0: no pauses.",
            show_default=f"{THINK_MAX_S:g} s",
            rich_help_panel=WORKLOAD,
        ),
    ] = THINK_MAX_S,
    profile: Annotated[
        str, typer.Option(help=f"Use only requests of this profile: {_names(PROFILES)}.", rich_help_panel=WORKLOAD)
    ] = "",
    input_tokens: Annotated[
        int | None,
        typer.Option(
            parser=token_count(1, PROMPT_MAX),
            metavar=TOKENS,
            help="Set every prompt to this length, e.g. 32K.",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    p_share: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Replace the trace's prefixes: share by group with this probability.",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option(help="Skip and count invalid lines of the trace.", rich_help_panel=WORKLOAD)
    ] = False,
    prefill_queueing: Annotated[
        bool, typer.Option(help="Queue prefills FIFO; otherwise prefill is a pure delay.", rich_help_panel=SETUP)
    ] = True,
    lock_step: Annotated[
        bool,
        typer.Option(
            "--lock-step",
            help="Let the data-parallel ranks of an engine run each iteration together, as with a mixture of experts.",
            rich_help_panel=SETUP,
        ),
    ] = False,
    lock_step_tokens: Annotated[
        int,
        typer.Option(
            parser=token_count(1, PROMPT_MAX),
            metavar=TOKENS,
            help="With --lock-step: most prompt tokens of a rank in one iteration (vLLM's --max-num-batched-tokens).",
            show_default="8192",
            rich_help_panel=SETUP,
        ),
    ] = 8192,
    prefill_cache: Annotated[
        bool, typer.Option(help="Let prefill instances reuse cached prefixes.", rich_help_panel=SETUP)
    ] = True,
    background: Annotated[
        float,
        typer.Option(
            min=0, max=0.99, help="Share of every network link that other traffic uses.", rich_help_panel=NETWORK
        ),
    ] = 0.0,
    oracle_refresh: Annotated[
        float | None,
        typer.Option(
            parser=seconds(1e-3),
            metavar=DURATION,
            help=f"Time between telemetry updates, e.g. 500ms; {_OF_FILE} (1 s).",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    telemetry: Annotated[
        Literal["tier", "link", "none"] | None,
        typer.Option(help=f"Detail of the telemetry on other traffic; {_OF_FILE} (none).", rich_help_panel=NETWORK),
    ] = None,
    prediction: Annotated[
        Literal["none", "smooth", "trend"] | None,
        typer.Option(
            help=f"Predict congestion: exponential smoothing, or Holt's trend; {_OF_FILE}.", rich_help_panel=NETWORK
        ),
    ] = None,
    stale_after: Annotated[
        float | None,
        typer.Option(
            parser=seconds(1e-3),
            metavar=DURATION,
            help=f"Reduce the weight of telemetry older than this; {_OF_FILE} (30 s).",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    separate_own: Annotated[
        bool | None,
        typer.Option(
            "--separate-own/--no-separate-own",
            help=f"Exclude the router's own transfers from telemetry; {_OF_FILE} (yes).",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    scenario: Annotated[
        Path | None,
        typer.Option(
            help="Scenario file (YAML): link cuts and changes, TCP between datacenters, offloading.",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    gateways: Annotated[
        int,
        typer.Option(
            min=1,
            max=GATEWAYS_MAX,
            help="Number of gateways in front of the cluster; each decides for its part of the requests.",
            rich_help_panel=SETUP,
        ),
    ] = 1,
    sync_ms: Annotated[
        str,
        typer.Option(
            metavar="MS",
            help="Milliseconds until a gateway knows what another has decided; none: it never does.",
            rich_help_panel=SETUP,
        ),
    ] = "0",
    slo_ttft: Annotated[
        float | None,
        typer.Option(
            parser=seconds(1e-6),
            metavar=DURATION,
            help=f"TTFT target of the SLO, e.g. 2s; {_OF_FILE} (5 s).",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    refuse_late: Annotated[
        bool,
        typer.Option(
            "--refuse-late",
            help="Refuse requests whose predicted TTFT misses --slo-ttft, as `gateway.classes` does.",
            rich_help_panel=SETUP,
        ),
    ] = False,
    warmup: Annotated[
        float,
        typer.Option(
            parser=seconds(),
            metavar=DURATION,
            help="Exclude requests that arrive before this time.",
            show_default="0 s",
            rich_help_panel=OUTPUT,
        ),
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=SEED_MAX, help="First seed.", rich_help_panel=OUTPUT)] = 0,
    seeds: Annotated[
        int,
        typer.Option(
            min=1,
            max=10_000,
            help="Number of seeds; a seed sets the path draws and the generated requests.",
            rich_help_panel=OUTPUT,
        ),
    ] = 5,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, max=WORKERS_MAX, help="Number of processes; default: one per core.", rich_help_panel=OUTPUT
        ),
    ] = None,
    on: Annotated[str, typer.Option(help="Where to run: local or ray.", rich_help_panel=OUTPUT)] = "local",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for results.jsonl, figures and report.html; existing files are replaced.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            help="Record every event and decision (one policy, one seed) for replay and explain; an existing "
            "log is replaced at the end of the run.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document and nothing else.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """Compare routing policies on your cluster and your trace.

    Examples:

    [bold]kvroute simulate examples/fat-tree-64gpu.yaml[/bold]

    [bold]kvroute simulate my.yaml --trace trace.jsonl.zst --policy netkv --policy cla --seeds 5 --out results[/bold]

    [bold]kvroute simulate my.yaml --trace sessions.jsonl.zst --agents 50 --requests 5000[/bold]
    """
    from kvroute.cli.simulate.options import (
        FileOptions,
        check_log,
        file_remarks,
        record_run,
        sync_s,
        weights,
    )
    from kvroute.cli.simulate.scenario import Scenario, read_scenario
    from kvroute.files.compressed_lines import written_whole
    from kvroute.planner.comparison.cells import encode
    from kvroute.planner.comparison.parallel import check_where
    from kvroute.planner.comparison.question import ComparisonSpec, compare
    from kvroute.planner.comparison.requests import Workload
    from kvroute.planner.comparison.served import served_file
    from kvroute.report.compare import verdict
    from kvroute.report.tables import comparison_table
    from kvroute.serve.config.settings import GatewaySettings
    from kvroute.sim.settings import Background

    if profile and profile not in PROFILES:
        raise InputError(
            f"there is no profile {profile!r}", where="--profile", hint=f"choose one of {_names(PROFILES)}"
        )
    named = listed(policy)
    options = FileOptions(
        policies=tuple(dict.fromkeys(named)) or None,
        prefill=prefill_policy,
        constraint=constraint,
        scenario=scenario,
        oracle_refresh_s=oracle_refresh,
        telemetry=telemetry,
        prediction=prediction,
        stale_after_s=stale_after,
        separates_own=separate_own,
        slo_ttft_s=slo_ttft,
        refuses_late=refuse_late,
    )
    file = served_file(str(cluster))
    served = options.applied(file)
    assumed = read_scenario(scenario, file.cluster) if scenario else Scenario()
    comparison = ComparisonSpec(
        cluster=str(cluster),
        workload=Workload(
            trace=str(trace) if trace else "",
            generated_requests=requests or 2_000,
            skip_bad=skip_bad,
            profile=profile,
            rate_per_s=rate,
            input_tokens=input_tokens,
            p_share=p_share,
            requests=requests,
            agents=agents,
            think_max_s=think_max,
        ),
        settings=assumed.settings(
            msgspec.structs.replace(
                options.settings(served.settings),
                prefill_queueing=prefill_queueing,
                lock_step=lock_step,
                lock_step_tokens=lock_step_tokens,
                background=Background.uniform(background),
                gateways=gateways,
                sync_s=sync_s(sync_ms),
                warmup_s=warmup,
            )
        ),
        spec=assumed.control(msgspec.structs.replace(served.spec, prefill_cache=prefill_cache)),
        service=served.service,
        parameters={} if cla_weights is None else {"cla": weights(cla_weights)},
    )
    check_where(on)
    policies = options.compared(file.gateway)
    if len(policies) < len(named):
        remarks().print("Duplicate policies run only once.")
    if log is not None:
        check_log(comparison, policies, seeds, log)
    if out is not None:
        comparison.check(policies, seed)  # before a folder is created for nothing
        make_folder(out, "--out")
    tell(file.cluster.remarks)
    for name in policies:
        tell(comparison.spec_of(name).remarks(GatewaySettings().prefill))
    tell(file_remarks(cluster, file, policies, gateways))
    tell(options.replaced(file, assumed))
    tell(f"{trace or 'generated trace'}: {remark}" for remark in comparison.workload.remarks(seed))
    if log is not None:
        record_run(comparison, policies[0], seed, log)
    with progress_bar("Simulating") as progress:
        records = compare(comparison, policies, range(seed, seed + seeds), on=on, workers=workers, progress=progress)
    runs = [record.summary for record in records]
    if out is not None:
        from kvroute.report.comparison_page import write_report  # its import of plots takes a second

        with written_whole(out / "results.jsonl", "choose another folder") as part:
            part.write_bytes(b"".join(encode(record) + b"\n" for record in records))
        command = shlex.join(["kvroute", *sys.argv[1:]])
        page = write_report(records, out, title=f"{cluster.name}: {', '.join(policies)}", command=command)
        remarks().print(f"Report: {page}")
    if as_json:
        print_json({"runs": runs, "verdict": verdict(runs)})
        return
    shown = console()
    shown.print(comparison_table(runs, width=shown.width, slo=comparison.settings.slo))
    found = verdict(runs)
    console().print(found.sentence)
    for remark in found.remarks:
        console().print(remark)
