"""What the pages quote of benches: figures of their rows, in `bench/results/NAME.json` with the code behind them.

`python -m bench.all NAME --write` writes a file, `python -m docs.generate.results` the pages. Files without digests
have figures from before there were result files.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Literal

from bench.measurement import ROOT, Row

from kvroute.types import InputError
from kvroute_studies.shared.result_files import ResultFile, code_digests, write_result

FOLDER = ROOT / "bench" / "results"


@dataclass(frozen=True, slots=True)
class QuotedFigure:
    """A figure of the first row whose measure begins with a text."""

    measure: str
    form: str
    of: Literal["ours", "peer", "ratio", "share"] = "ours"
    """`share`: ours divided by the peer's."""
    peer: str = ""
    """Only of the row with this peer."""

    def text(self, rows: Sequence[Row]) -> str:
        """Return the figure as the pages print it. Raises InputError if it was not measured."""
        for row in rows:
            if row.measure.startswith(self.measure) and row.peer_name.startswith(self.peer):
                share = row.ours / row.peer if row.ours is not None and row.peer else None
                value: float | None = share if self.of == "share" else getattr(row, self.of)
                if value is not None:
                    return self.form.format(value)
        raise InputError(f"no {self.of} of {self.measure!r} was measured", where="bench", hint="run it with its peers")


@dataclass(frozen=True, slots=True)
class QuotedBench:
    """What the pages quote of a bench."""

    code: tuple[str, ...]
    """Folders and files of the packages."""
    figures: Mapping[str, QuotedFigure]


_GATEWAY = ("kvroute", "kvroute_engine")
_CPU = "CPU per request, 32 connections"
QUOTED: Mapping[str, QuotedBench] = {
    "simulate": QuotedBench(
        ("kvroute/control", "kvroute/flows", "kvroute/policies", "kvroute/sim", "kvroute/timing", "kvroute/topology"),
        {"ratio": QuotedFigure("simulated requests, 4P + 12D", "{:.1f}", "ratio")},
    ),
    "gateway.storage": QuotedBench(
        _GATEWAY, {"gain": QuotedFigure("turns/s with storage NICs, read path split", "{:.1f}", "ratio")}
    ),
    "storage_nics.vllm": QuotedBench(
        _GATEWAY, {"gain": QuotedFigure("turns/s of real vLLM, read path shorter", "{:.1f}", "ratio")}
    ),
    "all_reduce.truth": QuotedBench(
        ("kvroute/collectives", "kvroute/flows", "kvroute/topology", "kvroute_engine/switch"),
        {
            "alone": QuotedFigure("time of an all-reduce, alone", "{:.1f} %"),
            "beside-a-transfer": QuotedFigure("time of an all-reduce, beside a KV transfer", "{:.1f} %"),
        },
    ),
    "kube.discovery": QuotedBench(
        ("kvroute/kube",),
        {
            "in-sync": QuotedFigure("from cold until all is known", "{:.1f} s"),
            "in-sync-peer": QuotedFigure("from cold until all is known", "{:.1f} s", "peer"),
        },
    ),
    "testbed.transfers": QuotedBench(
        ("kvroute/flows", "kvroute/oracle", "kvroute/topology"),
        {"error": QuotedFigure("fair queues, simulated", "{:.1f} %")},
    ),
    "fidelity.gpu": QuotedBench(
        ("kvroute/llm", "kvroute/timing"),
        {
            "prompts": QuotedFigure("piecewise: prompts of other lengths", "{:.1f}"),
            "shared-steps": QuotedFigure("piecewise: prompts that share a step", "{:.1f}"),
            "decode": QuotedFigure("decode steps of other batches", "{:.1f} %"),
        },
    ),
    "gateway.routers": QuotedBench(
        _GATEWAY,
        {
            "vllm-router": QuotedFigure(_CPU, "{:.1f}", "share", "vllm-router"),
            "sglang-router": QuotedFigure(_CPU, "{:.1f}", "share", "sglang-router"),
            "stream": QuotedFigure("CPU of a streamed answer", "{:.2f}", "share", "vllm-router"),
        },
    ),
    "arrival": QuotedBench(
        ("kvroute/control", "kvroute/policies", "kvroute/prefix"),
        {
            "default": QuotedFigure("arrival, foresight-joint, 12 decode instances", "{:.0f} us"),
            "with-a-prefill-policy": QuotedFigure("arrival, foresight-joint, 12 decode instances", "{:.0f} us", "peer"),
        },
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
        figures={key: figure.text(rows) for key, figure in quoted.figures.items()},
    )
    path = FOLDER / f"{name.replace('.', '-').replace('_', '-')}.json"
    write_result(path, result)
    return path


def machine() -> str:
    """Return number and type of the cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} x {models[0] if models else platform.processor() or platform.machine()}"
