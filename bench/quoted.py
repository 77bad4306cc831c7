"""What the pages quote of benches: figures of their rows, in files of `bench/results/` with the code behind them.

`python -m bench.all NAME --write` writes a file, `python -m docs.generate.results` the pages. Files without digests
have figures from before there were result files.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Literal

from bench.measurement import ROOT, Row, number

from kvroute.types import InputError
from kvroute_studies.shared.result_files import (
    ROUTING,
    ResultFile,
    ResultTable,
    code_digests,
    read_result,
    write_result,
)

FOLDER = ROOT / "bench" / "results"


@dataclass(frozen=True, slots=True)
class QuotedFigure:
    """A figure of the first row whose measure begins with a text."""

    measure: str
    form: str
    of: Literal["ours", "peer", "ratio", "share", "below"] = "ours"
    """`share`: ours divided by the peer's; `below`: by how many percent ours is lower."""
    peer: str = ""
    """Only of the row with this peer."""

    def text(self, rows: Sequence[Row]) -> str:
        """Return the figure as the pages print it. Raises InputError if it was not measured."""
        for row in rows:
            if not (row.measure.startswith(self.measure) and row.peer_name.startswith(self.peer)):
                continue
            share = row.ours / row.peer if row.ours is not None and row.peer else None
            below = None if share is None else 100 * (1 - share)
            found = {"ours": row.ours, "peer": row.peer, "ratio": row.ratio, "share": share, "below": below}
            if (value := found[self.of]) is not None:
                return self.form.format(value)
        raise InputError(f"no {self.of} of {self.measure!r} was measured", where="bench", hint="run it with its peers")


@dataclass(frozen=True, slots=True)
class QuotedBench:
    """What the pages quote of a bench."""

    code: tuple[str, ...]
    """Folders and files of the packages."""
    figures: Mapping[str, QuotedFigure] = field(default_factory=dict)
    rows: tuple[str, ...] = ()
    """Beginnings of the measures in the table `rows`."""
    remarks: bool = False
    """Whether the table has what the notes say of a row."""

    def tables(self, rows: Sequence[Row]) -> dict[str, ResultTable]:
        """Return the table of the quoted rows, {} for no rows. Raises InputError if one was not measured."""
        chosen = [row for row in rows if row.measure.startswith(self.rows)] if self.rows else []
        for measure in self.rows:
            if not any(row.measure.startswith(measure) and row.ours is not None for row in chosen):
                raise InputError(f"no row {measure!r} was measured", where="bench", hint="run it with its peers")
        columns = ["measure", "kvroute", "in the same run", "target", *(["remark"] if self.remarks else [])]
        return {"rows": ResultTable(columns, [_cells(row, self.remarks) for row in chosen])} if chosen else {}


def _cells(row: Row, remarks: bool) -> list[str]:
    peer = "" if row.peer is None else f"{row.peer_name}: {number(row.peer)}"
    if row.ratio is not None:
        peer += f" ({number(row.ratio)} times)"
    sign = "≥" if row.better == "higher" else "≤"
    target = "" if row.target is None else f"{sign} {number(row.target)}{'' if row.met else ', **missed**'}"
    remark = [row.note.removeprefix(f"{row.measure.rpartition(': ')[0]}: ")] if remarks else []
    return [row.measure, f"{number(row.ours)} {row.unit}".strip(), peer, target, *remark]


_GATEWAY = ("kvroute", "kvroute_engine")
_DECISION = ("kvroute/control", "kvroute/policies", "kvroute/prefix")
_CPU = "CPU per request, 32 connections"
QUOTED: Mapping[str, QuotedBench] = {
    "simulate": QuotedBench(
        ("kvroute/control", "kvroute/flows", "kvroute/policies", "kvroute/sim", "kvroute/timing", "kvroute/topology"),
        {"ratio": QuotedFigure("simulated requests, 4P + 12D", "{:.1f}", "ratio")},
        ("simulated requests", "peak memory"),
    ),
    "decision": QuotedBench(_DECISION, rows=("decode decision, 32K tokens, median",)),
    "foresight": QuotedBench(_DECISION, rows=("foresight, 128 instances", "foresight, 1,024 instances")),
    "arrival": QuotedBench(
        _DECISION,
        {
            "default": QuotedFigure("arrival, foresight-joint, 12 decode instances", "{:.0f} us"),
            "with-a-prefill-policy": QuotedFigure("arrival, foresight-joint, 12 decode instances", "{:.0f} us", "peer"),
        },
        ("arrival",),
    ),
    "flows": QuotedBench(("kvroute/flows",), rows=("max-min rates recomputed, 1,024 instances",)),
    "evaluation": QuotedBench(ROUTING, rows=("NetKV's whole evaluation",)),
    "placement": QuotedBench(
        ("kvroute/collectives", "kvroute/planner/placement", "kvroute/topology"),
        {
            "large": QuotedFigure("placement, 9,600 GPUs, OPT-175B, file", "{:.0f} s"),
            "large-memory": QuotedFigure("placement, 9,600 GPUs, OPT-175B, peak", "{:.1f} GB"),
        },
        ("placement, 9,600 GPUs", "placement, Llama"),
        remarks=True,
    ),
    "tenants": QuotedBench(
        ROUTING,
        rows=(
            "p99 TTFT of the small tenant",
            "load 1.2 of 8,000 tokens, SLO 2 s: first tokens",
            "load 1.2 of 8,000 tokens, SLO 2 s: refused",
        ),
    ),
    "cheap_transfers": QuotedBench(
        ROUTING,
        {
            f"{policy}-{links}": QuotedFigure(f"mean TTFT, 400 Gbps per GPU, {where}, {policy}", "{:.1f} %", "below")
            for links, where in (("idle", "links idle"), ("used", "90 % of each link used"))
            for policy in ("foresight", "foresight-joint")
        },
    ),
    "gateway.routers": QuotedBench(
        _GATEWAY,
        {
            "vllm-router": QuotedFigure(_CPU, "{:.1f}", "share", "vllm-router"),
            "sglang-router": QuotedFigure(_CPU, "{:.1f}", "share", "sglang-router"),
            "vllm-router-inverse": QuotedFigure(_CPU, "{:.2f}", "ratio", "vllm-router"),
            "sglang-router-inverse": QuotedFigure(_CPU, "{:.2f}", "ratio", "sglang-router"),
            "stream": QuotedFigure("CPU of a streamed answer", "{:.2f}", "share", "vllm-router"),
        },
        (_CPU, "added latency", "delay of a streamed chunk", "CPU of a streamed answer"),
    ),
    "gateway.start_up": QuotedBench(_GATEWAY, rows=("memory at rest", "CPU until", "CPU of --help")),
    "gateway.chaos": QuotedBench(_GATEWAY, rows=("requests not answered", "held afterwards", "events that a replay")),
    "gateway.scale": QuotedBench(_GATEWAY, rows=("decode decision inside the gateway, median",)),
    "gateway.live_vs_sim": QuotedBench(
        _GATEWAY,
        {
            policy: QuotedFigure(f"median TTFT, {policy}, 150 requests: off by", "{:.1f}")
            for policy in ("round-robin", "cla", "netkv")
        },
        ("median TTFT",),
    ),
    "gateway.layerwise": QuotedBench(_GATEWAY, rows=("TTFT, layer-wise", "the ratio live"), remarks=True),
    "gateway.replication": QuotedBench(_GATEWAY, rows=("mean TTFT",), remarks=True),
    "gateway.envoy": QuotedBench(_GATEWAY, rows=("choices per second of the picker's CPU",)),
    "gateway.storage": QuotedBench(
        _GATEWAY,
        {"gain": QuotedFigure("turns/s with storage NICs, read path split", "{:.1f}", "ratio")},
        ("turns/s",),
        remarks=True,
    ),
    "storage_nics.emulated": QuotedBench(
        _GATEWAY, rows=("turns/s", "bytes of the shaped NICs, maximum to mean"), remarks=True
    ),
    "storage_nics.vllm": QuotedBench(
        _GATEWAY,
        {"gain": QuotedFigure("turns/s of real vLLM, read path shorter", "{:.1f}", "ratio")},
        ("turns/s", "bytes of the storage NICs, maximum to mean"),
    ),
    "all_reduce.truth": QuotedBench(
        ("kvroute/collectives", "kvroute/flows", "kvroute/topology", "kvroute_engine/switch"),
        {
            "alone": QuotedFigure("time of an all-reduce, alone", "{:.1f} %"),
            "beside-a-transfer": QuotedFigure("time of an all-reduce, beside a KV transfer", "{:.1f} %"),
        },
        ("time of an all-reduce",),
        remarks=True,
    ),
    "kube.discovery": QuotedBench(
        ("kvroute/kube",),
        {
            "in-sync": QuotedFigure("from cold until all is known", "{:.1f} s"),
            "in-sync-peer": QuotedFigure("from cold until all is known", "{:.1f} s", "peer"),
        },
        ("from cold", "CPU time", "memory", "from a change"),
    ),
    "wan.connections": QuotedBench(("kvroute_engine/connector",), rows=("WAN",)),
    "wan.layerwise": QuotedBench(("kvroute_engine/connector",), rows=("WAN",)),
    "testbed.transfers": QuotedBench(
        ("kvroute/flows", "kvroute/oracle", "kvroute/topology"),
        {"error": QuotedFigure("fair queues, simulated", "{:.1f} %")},
        tuple(f"{kind} queues, {what}" for kind in ("fair", "fifo") for what in ("simulated", "foreseen")),
        remarks=True,
    ),
    "testbed.policies": QuotedBench(_GATEWAY, rows=("literal, fair", "paper, fair"), remarks=True),
    "fidelity.vllm": QuotedBench(_GATEWAY, rows=("median", "p95", "output tokens/s", "load with")),
    "fidelity.gpu": QuotedBench(
        ("kvroute/llm", "kvroute/timing"),
        {
            "prompts": QuotedFigure("piecewise: prompts of other lengths", "{:.1f}"),
            "shared-steps": QuotedFigure("piecewise: prompts that share a step", "{:.1f}"),
            "decode": QuotedFigure("decode steps of other batches", "{:.1f} %"),
        },
        (*(f"{kind}: " for kind in ("linear", "quadratic", "piecewise", "roofline")), "decode steps"),
        remarks=True,
    ),
    "fidelity.published": QuotedBench(
        ("kvroute/timing",), rows=("quadratic", "decode step", "steps of a chunk"), remarks=True
    ),
}
"""By name of the bench."""


def write(name: str, rows: Sequence[Row]) -> Path:
    """Write what the pages quote of a bench's rows; return the file.

    Raises:
        InputError: a figure was not measured.
    """
    quoted = QUOTED[name]
    result = ResultFile(
        command=f".venv/bin/python -m bench.all {name} --write",
        date=date.today().isoformat(),
        machine=machine(),
        code=code_digests(quoted.code),
        tables=quoted.tables(rows),
        figures={key: figure.text(rows) for key, figure in quoted.figures.items()},
    )
    path = result_path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_result(path, result)
    return path


def result_path(name: str) -> Path:
    """Return the file of a bench's result."""
    return FOLDER.joinpath(*name.replace("_", "-").split(".")).with_suffix(".json")


def results() -> dict[str, ResultFile]:
    """Return the results by the name that pages quote, `bench-` before. Raises InputError for a file that is none."""
    return {
        "-".join(("bench", *path.relative_to(FOLDER).with_suffix("").parts)): read_result(path)
        for path in sorted(FOLDER.rglob("*.json"))
    }


def machine() -> str:
    """Return number and type of the cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} x {models[0] if models else platform.processor() or platform.machine()}"
