"""The cells in which one instance may serve a request alone, as data. In all of them prompts queue, because an instance
that computes and decodes cannot compute several prompts in the time of one."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvroute.experiments.never_worse_cases import FABRICS, Case

_QUEUEING = (
    "prefill_queueing=true",
    "prefill_policy=least-loaded",
    "prefill_cache=true",
    "capacity=prefill",
    "prefixes=trace",
)
"""Changes of a fabric that models prefill as a pure delay."""
_CHATBOT_S = 20.0
"""Measured seconds of chatbot requests, which arrive often."""


@dataclass(frozen=True, slots=True)
class AloneCase:
    """One cell: a case of the never-worse matrix, with the roles and the chunks of its 16 instances (or of more, in
    larger clusters)."""

    case: Case
    prefill: int | None = None
    """Number of prefill instances; None: a quarter."""
    chunk_tokens: int = 2048
    output_factor: float = 1.0
    """Factor on the output lengths of the trace, which are short compared with its prompts."""


@dataclass(slots=True)
class _Cells:
    found: dict[str, AloneCase] = field(default_factory=dict)

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
        reading, changes = FABRICS[fabric]
        if reading != "realistic":
            changes = (*changes, *_QUEUEING)
        case = Case(
            name=f"{fabric}/{name}",
            axis="alone",
            reading=reading,
            changes=changes,
            settings={"load": load} | (settings or {}),
            **more,  # type: ignore[arg-type]
        )
        self.found[case.name] = AloneCase(case, prefill, chunk_tokens, output_factor)


def _all() -> dict[str, AloneCase]:
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


ALONE_CASES: dict[str, AloneCase] = _all()
"""Every cell by name."""
