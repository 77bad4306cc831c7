"""`kvroute demo`: the gateway on emulated engines under two policies, beside what the simulator predicts."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kvroute import topology
from kvroute.cli.output import console, make_folder, remarks
from kvroute.types import TIER_COUNT, InputError

if TYPE_CHECKING:
    from kvroute.experiments.live import Comparison, Half
    from kvroute.sim.workload import Trace

_READY_S = 90.0
_TIERS = ("node", "rack", "pod", "datacenter", "cross_datacenter")


def demo(
    cluster: Annotated[Path, typer.Argument(help="Cluster file (YAML).", show_default=False)],
    seconds: Annotated[float, typer.Option(min=2, max=3600, help="Of traffic under each policy.")] = 30.0,
    rate: Annotated[float, typer.Option(min=0.1, max=1000, help="Requests per second.")] = 2.5,
    profile: Annotated[str, typer.Option(help="Of the generated trace: chatbot, rag or long-context.")] = "rag",
    p_share: Annotated[float, typer.Option(min=0, max=1, help="Share of prompts that begin alike.")] = 0.7,
    policy: Annotated[list[str] | None, typer.Option(help="Repeat; default round-robin and netkv.")] = None,
    prefill: Annotated[str, typer.Option(help="Prefill policy.")] = "cache-aware",
    output_max: Annotated[int, typer.Option(min=1, help="Longest answer, tokens.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Of the trace and the engines.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the dashboard and the numbers.")] = Path("demo-results"),
) -> None:
    """Play generated traffic through a gateway on emulated engines, policy by policy, and compare with the simulator.

    Example: [bold]kvroute demo examples/fat-tree-64gpu.yaml[/bold]
    """
    from kvroute.experiments.live import Comparison, playable, predict
    from kvroute.experiments.simulation import Workload

    loaded = topology.load(cluster)
    make_folder(out, "--out")
    workload = Workload(generated_requests=round(seconds * rate), profile=profile, rate_per_s=rate, p_share=p_share)
    trace = playable(workload.of_seed(seed), output_max)
    found: list[Comparison] = []
    for name in policy or ["round-robin", "netkv"]:
        engines = f"a gateway before {len(loaded.instances)} emulated engines"
        remarks().print(f"{name}: {len(trace.requests)} requests in {seconds:g} s, at {engines}")
        predicted = predict(loaded, trace, name, prefill, seed)
        found.append(Comparison(name, _live(cluster, trace, name, prefill, seed, out), predicted))
    console().print(_table(found))
    _save(found, out)
    console().print(f"Dashboard as it stood at the end: {out / 'dashboard.html'}")
    console().print(f"To keep one running: kvroute serve --embedded {cluster}")


def _live(cluster: Path, trace: Trace, policy: str, prefill: str, seed: int, out: Path) -> Half:
    """Serve and play; what clients and the gateway saw."""
    try:
        import uvloop

        from kvroute.emulator.player import play, plays
    except ImportError as error:
        raise InputError(f"{error.name} is not installed", mend="pip install 'kvroute[serve]'") from None
    from kvroute.experiments.live import observed
    from kvroute.report.dashboard_page import dashboard_page

    with tempfile.TemporaryDirectory(prefix="kvroute-") as folder:
        ready = Path(folder, "ready.json")
        command = [sys.executable, "-m", "kvroute.cli.app", "serve", "--embedded", str(cluster), "--policy", policy]
        command += ["--prefill", prefill, "--seed", str(seed), "--port", "0", "--admin-port", "0"]
        process = subprocess.Popen([*command, "--ready-file", str(ready)], stdout=subprocess.DEVNULL)
        try:
            addresses = _addresses(process, ready)
            model = json.loads(_page(addresses["url"] + "/v1/models"))["data"][0]["id"]
            answers = uvloop.run(play(addresses["url"], plays(trace.requests, model)))
            (out / "dashboard.html").write_text(dashboard_page(_page(addresses["admin"] + "/state")))
            return observed(answers, _transfers(_page(addresses["admin"] + "/metrics").decode()))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def _addresses(process: subprocess.Popen[bytes], ready: Path) -> dict[str, str]:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            # It has said itself what is wrong.
            raise typer.Exit(process.returncode or 1)
        if ready.exists() and (text := ready.read_text()).endswith("}"):
            addresses: dict[str, str] = json.loads(text)
            return addresses
        time.sleep(0.05)
    raise InputError(f"the gateway was not ready within {_READY_S:g} s", mend="try again on a quieter machine")


def _page(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as answer:
        body: bytes = answer.read()
        return body


def _transfers(page: str) -> dict[int, float]:
    """Transfers by tier, from the gateway's metrics."""
    found = re.findall(r'^kvroute_transfer_seconds_count\{tier="(\w+)"\} (\S+)', page, re.MULTILINE)
    return {_TIERS.index(tier): float(count) for tier, count in found if tier in _TIERS}


def _table(found: list[Comparison]) -> Table:
    table = Table(title="Time to first token, live beside predicted", title_justify="left")
    table.add_column("policy")
    for column in ("", "answered", "p50 ms", "p90 ms", "mean ms", "tier 0/../3 %"):
        table.add_column(column, justify="right")
    for one in found:
        for label, half in (("live", one.live), ("predicted", one.predicted)):
            tiers = "/".join(f"{100 * share:.0f}" for share in half.tier_share[: TIER_COUNT - 1])
            times = (half.ttft_p50_s, half.ttft_p90_s, half.ttft_mean_s)
            cells = [f"{1e3 * second:,.0f}" for second in times]
            table.add_row(one.policy if label == "live" else "", label, str(half.answered), *cells, tiers)
    table.caption = "; ".join(f"{one.policy}: live p50 is {100 * one.off:+.1f} % off" for one in found)
    return table


def _save(found: list[Comparison], out: Path) -> None:
    import msgspec

    rows = [{"policy": one.policy, "live": one.live, "predicted": one.predicted} for one in found]
    (out / "demo.json").write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=2))
