"""The cells of `aggregated`, as data: its own in which prompts queue, those of the never-worse matrix, and those of
`network_cases`."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvroute_studies.aggregated.network_cases import NETWORK_CASES, NetworkCase
from kvroute_studies.netkv.readings import reading
from kvroute_studies.never_worse.cases import CASES, FABRICS, Case

_QUEUEING = (
    "prefill_queueing=true",
    "prefill_policy=least-loaded",
    "prefill_cache=true",
    "capacity=prefill",
    "prefixes=trace",
)
"""Changes of a fabric that models prefill as a pure delay."""
_GPUS_MAX = 128.0
"""Cells of the matrix on larger clusters are left out; they take most of its time."""
_CHATBOT_S = 20.0
"""Measured seconds of chatbot requests, which arrive often."""


@dataclass(frozen=True, slots=True)
class AggregatedCase:
    """One cell: a case in the form of the never-worse matrix, with the roles and the chunks of its 16 instances (or of
    more, in larger clusters)."""

    case: Case
    prefill: int | None = None
    """Number of prefill instances; None: a quarter."""
    chunk_tokens: int = 2048
    output_factor: float = 1.0
    """Factor on the output lengths of the trace, which are short compared with its prompts."""


@dataclass(slots=True)
class _Cells:
    found: dict[str, AggregatedCase] = field(default_factory=dict)

    def add(
        self,
        name: str,
        fabric: str = "realistic",
        *,
        load: float = 1.0,
        settings: dict[str, float] | None = None,
        prefill: int | None = None,
        chunk_tokens: int = 2048,
        output_factor: float = 1.0,
        **more: object,
    ) -> None:
        base, changes = FABRICS[fabric]
        if base != "realistic":
            changes = (*changes, *_QUEUEING)
        case = Case(
            name=f"queue/{fabric}/{name}",
            axis="aggregated",
            reading=base,
            changes=changes,
            settings={"load": load} | (settings or {}),
            **more,  # type: ignore[arg-type]
        )
        self.found[case.name] = AggregatedCase(case, prefill, chunk_tokens, output_factor)


def _all() -> dict[str, AggregatedCase]:
    cells = _Cells()
    for fabric in ("realistic", "nic150-flow", "nic100-flow", "literal"):
        for load in (0.25, 0.5, 1.0, 1.5):
            cells.add(f"load={load:g}", fabric, load=load)
    cells.add("load=2.5", load=2.5)
    for fabric in ("realistic", "nic100-flow"):
        for load in (0.5, 1.0, 1.5):
            cells.add(f"chatbot load={load:g}", fabric, load=load, profile="chatbot", measure_s=_CHATBOT_S)
            cells.add(f"long-context load={load:g}", fabric, load=load, profile="long-context")
    for prefill in (2, 8):
        for load in (0.5, 1.0, 1.5):
            cells.add(f"{prefill} prefill load={load:g}", load=load, prefill=prefill)
    for factor in (4.0, 10.0):
        for load in (0.5, 1.0):
            name = f"outputs x{factor:g} load={load:g}"
            cells.add(name, load=load, output_factor=factor)
            cells.add(name, "nic100-flow", load=load, output_factor=factor)
            more = {"profile": "chatbot", "measure_s": _CHATBOT_S}
            cells.add(f"chatbot {name}", load=load, output_factor=factor, **more)  # type: ignore[arg-type]
    for chunk_tokens in (512, 8192):
        cells.add(f"chunk={chunk_tokens}", chunk_tokens=chunk_tokens)
        cells.add(f"chunk={chunk_tokens} outputs x4", chunk_tokens=chunk_tokens, output_factor=4.0)
    for slots in (4, 8, 16):
        cells.add(f"slots={slots}", slots=slots)
    for kv_gb in (30.0, 60.0):
        cells.add(f"{kv_gb:g} GB", kv_gb=kv_gb)
    for ratio in (1.0, 8.0):
        cells.add(f"{ratio:g}:1", settings={"oversubscription": ratio})
    for gpus in (128, 256):
        cells.add(f"{gpus} GPUs", settings={"gpus": float(gpus)}, measure_s=20.0)
    return cells.found


def _of_matrix() -> dict[str, AggregatedCase]:
    some = (case for case in CASES.values() if case.trace == "generated" and case.settings.get("gpus", 0) <= _GPUS_MAX)
    return {f"matrix/{case.name}": AggregatedCase(case) for case in some}


AGGREGATED_CASES: dict[str, AggregatedCase | NetworkCase] = {**NETWORK_CASES, **_all(), **_of_matrix()}
"""Every cell by name; the first part of a name is its set: network, queue or matrix."""


def queues(name: str) -> bool:
    """Return whether prompts queue in a cell. In the others each prompt takes its prefill time at any load."""
    case = AGGREGATED_CASES[name]
    return isinstance(case, NetworkCase) or reading(case.case.reading, case.case.changes).prefill_queueing
