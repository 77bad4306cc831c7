"""The timing models beside step times that were measured on a GPU: `python -m bench.fidelity.gpu [--data FOLDER]`.

The folder is one that `gpu_steps.py` has written; `h100/` is from an H100 with 80 GB. A model is fitted to every second
prompt length and batch size, and predicts the others, prompts that share a step, and a part of a prompt beside a decode
batch. The roofline of `kvroute plan placement` is not fitted: it has the GPU's published peaks, and the default shares
of them.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np
from bench.fidelity.errors import STEP_TOKENS_MAX, error
from bench.measurement import Row, show

from kvroute.llm.presets import model as preset_model
from kvroute.planner.placement.compute import Communication, Parallelism, Roofline
from kvroute.planner.placement.problem import GpuKind
from kvroute.planner.placement.schema import GpuKindEntry
from kvroute.timing import (
    IterationTime,
    Profile,
    fit_decode,
    fit_prefill,
    prefill_time,
    read_profile,
    tokens_of_step_s,
)
from kvroute.timing.fit import PrefillKind
from kvroute.types import FloatArray
from kvroute_engine.files.units import Bandwidth, Size

DATA = Path(__file__).parent / "h100"
KINDS: tuple[PrefillKind, ...] = ("linear", "quadratic", "piecewise")
GPU = GpuKindEntry(memory_bytes=Size(80e9), tflops=989.0, memory_bytes_per_s=Bandwidth(3.35e12))
"""Published peaks of an H100; shares of them by default."""


def table(path: Path) -> dict[str, FloatArray]:
    """Return the columns of a CSV file."""
    with path.open(encoding="ascii", newline="") as lines:
        rows = list(csv.DictReader(lines))
    return {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}


def prefills(prompts: Profile, shared: dict[str, FloatArray]) -> list[Row]:
    """Return the errors for prompts alone and for prompts that share a step."""
    seen = np.arange(len(prompts.tokens)) % 2 == 0
    count, each = shared["prompts"], shared["prompt_tokens"]
    chosen = (count > 1) & (count * each <= STEP_TOKENS_MAX)
    made = []
    for kind in KINDS:
        time = prefill_time(fit_prefill(prompts.tokens[seen], prompts.prefill_s[seen], kind).spec)
        alone_s = [time.seconds(round(tokens)) for tokens in prompts.tokens[~seen]]
        made.append(error(f"{kind}: prompts of other lengths", alone_s, prompts.prefill_s[~seen]))
        steps_s = [
            time.seconds(0) + tokens_of_step_s(time, [(0, round(tokens))] * round(number))
            for number, tokens in zip(count[chosen], each[chosen], strict=True)
        ]
        made.append(error(f"{kind}: prompts that share a step", steps_s, shared["seconds"][chosen]))
    return made


def decodes(prompts: Profile, steps: Profile, mixed: dict[str, FloatArray]) -> list[Row]:
    """Return the errors for decode steps, and for those with a part of a prompt."""
    assert steps.context_tokens is not None
    seen = np.isin(steps.batch, np.unique(steps.batch)[::2])
    fit = fit_decode(steps.batch[seen], steps.iteration_s[seen], steps.context_tokens[seen])
    step = IterationTime.of(fit.spec)
    others = zip(steps.batch[~seen], steps.context_tokens[~seen], strict=True)
    others_s = [step.seconds(round(batch), context) for batch, context in others]
    made = [error("decode steps of other batches", others_s, steps.iteration_s[~seen])]
    rows = np.column_stack([mixed[name] for name in ("batch", "context_tokens", "computed_tokens", "chunk_tokens")])
    for kind in KINDS:
        time = prefill_time(fit_prefill(prompts.tokens, prompts.prefill_s, kind).spec)
        mixed_s = [
            step.seconds(round(batch), context) + tokens_of_step_s(time, [(round(computed), round(tokens))])
            for batch, context, computed, tokens in rows
        ]
        made.append(error(f"{kind}: a part of a prompt beside a decode batch", mixed_s, mixed["seconds"]))
    return made


def roofline(prompts: Profile, steps: Profile) -> list[Row]:
    """Return the errors of the planner's roofline without the overhead of an engine."""
    model = preset_model("llama-3.1-8b")
    assert model.shape is not None
    assert model.shape.parameters is not None
    assert steps.context_tokens is not None
    flop_per_s, bytes_per_s = GPU.tflops * 1e12 * GPU.mfu, float(GPU.memory_bytes_per_s) * GPU.mbu
    kind = GpuKind("H100", "both", (), float(GPU.memory_bytes), flop_per_s, bytes_per_s, overhead_s=0.0)
    mean = float(prompts.tokens.mean())
    times = Roofline(kind, Parallelism(1, 1), model, 0.0, 2 * model.shape.parameters, mean).times(Communication())
    long = prompts.tokens >= 512
    decode_s = [
        times.decode_s(batch, context / batch) for batch, context in zip(steps.batch, steps.context_tokens, strict=True)
    ]
    return [
        error(
            "roofline: prompts of 512 tokens or more", times.prefill_s(prompts.tokens[long]), prompts.prefill_s[long]
        ),
        error("roofline: decode steps", decode_s, steps.iteration_s),
    ]


def main() -> None:
    """Fit, predict and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--data", type=Path, default=DATA)
    given = parser.parse_args()
    prompts, steps = (read_profile(given.data / name) for name in ("prompts.csv", "decode.csv"))
    shared, mixed = (table(given.data / name) for name in ("shared-steps.csv", "mixed-steps.csv"))
    show(prefills(prompts, shared) + decodes(prompts, steps, mixed) + roofline(prompts, steps), given.json)


if __name__ == "__main__":
    main()
