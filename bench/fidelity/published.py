"""Predictions of the timing models beside published measurements: `python -m bench.fidelity.published`.

A model is fitted to a part of a publication and predicts another part, which it has not seen:

- splitwise-sim (measured on A100 and H100, Llama-2-70B and BLOOM-176B): prompts alone give the prefill model, which
  predicts several prompts of 512 tokens in one step; every second batch size gives the decode model, which predicts
  the others.
- LLMServingSim (measured operations on H100, Llama-3.1-70B, TP 4, added up to steps): every second point gives the
  coefficients of the simulator's form for a chunk after computed tokens, which predicts the other points.

DistServe's files contain coefficients and no measurements. None of the files has TTFT or TPOT of a trace under load.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from bench.fidelity.errors import STEP_TOKENS_MAX, error
from bench.measurement import ROOT, Row, show

from kvroute.timing import IterationTime, fit_decode, fit_prefill, prefill_time, tokens_of_step_s
from kvroute.timing.fit import PrefillKind
from kvroute.types import QuadraticPrefill

DATA = ROOT.parent / "shared" / "data"
SPLITWISE = "splitwise_sim/perf_model_median.csv"
LLMSERVINGSIM = "llmservingsim_h100_llama70b/tp4_attention.csv.gz"
LLMSERVINGSIM_LAYERS = "llmservingsim_h100_llama70b/tp4_layers.csv.gz"
LAYERS, ONCE = 80, ("embedding", "final_layernorm", "lm_head")
"""Layers of Llama-3.1-70B, and operations that a step has once."""
KINDS: tuple[PrefillKind, ...] = ("linear", "quadratic")
PROMPT_TOKENS = 512
"""Length of the prompts of splitwise-sim's batches."""


def splitwise(path: Path) -> list[Row]:
    """Return the errors for each model and kind of GPU."""
    with path.open(encoding="ascii", newline="") as lines:
        table = list(csv.DictReader(lines))
    found = []
    for model, hardware, tp in sorted(
        {(row["model"], row["hardware"], row["tp"]) for row in table if "pcap" not in row["hardware"]}
    ):
        own = [row for row in table if (row["model"], row["hardware"], row["tp"]) == (model, hardware, tp)]
        name = f"{model} on {tp} {hardware}"
        found += _batches(own, f"splitwise-sim, {name}")
    return found


def _batches(own: Sequence[dict[str, str]], name: str) -> list[Row]:
    sizes, prompts, prompt_s, token_s = (
        np.array([float(row[column]) * factor for row in own])
        for column, factor in (
            ("batch_size", 1.0),
            ("prompt_size", 1.0),
            ("prompt_ms_median", 1e-3),
            ("token_ms_median", 1e-3),
        )
    )
    alone, batched = sizes == 1, (sizes > 1) & (prompts == PROMPT_TOKENS)
    shared = batched & (sizes * prompts <= STEP_TOKENS_MAX)
    made = []
    for kind in KINDS:
        time = prefill_time(fit_prefill(prompts[alone], prompt_s[alone], kind).spec)
        model_s = [
            time.seconds(0) + tokens_of_step_s(time, [(0, PROMPT_TOKENS)] * round(size)) for size in sizes[shared]
        ]
        what = f"{kind}: time of 2 to {sizes[shared].max():.0f} prompts in a step, {name}"
        made.append(error(what, model_s, prompt_s[shared]))
    steps = np.unique(sizes[batched])
    seen = alone | np.isin(sizes, steps[::2])
    if len(steps) > 2:
        contexts = sizes * prompts
        step = IterationTime.of(fit_decode(sizes[seen], token_s[seen], contexts[seen]).spec)
        model_s = [
            step.seconds(int(size), context) for size, context in zip(sizes[~seen], contexts[~seen], strict=True)
        ]
        made.append(error(f"decode step of other batches, {name}", model_s, token_s[~seen]))
    return made


def llmservingsim(folder: Path) -> list[Row]:
    """Return the errors of steps of one chunk: all layers, without all-reduces."""
    layers = _layer_times_s(folder / LLMSERVINGSIM_LAYERS)
    with gzip.open(folder / LLMSERVINGSIM, "rt", encoding="ascii", newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["is_prefill"] == "True" and row["batch_size"] == "1"]
    chunk = np.array([float(row["prefill_chunk_size"]) for row in rows])
    before = np.array([float(row["kv_cache_size"]) for row in rows])
    attention_s = np.array([float(row["time_stats.attn_prefill.median"]) * 1e-3 for row in rows])
    seconds = LAYERS * attention_s + np.array([layers[int(tokens)] for tokens in chunk])
    # A chunk after k tokens costs T(k + c) - T(k) with T(l) = base + per_token l + per_token2 l^2 (`prefill_time`).
    terms = np.column_stack([np.ones_like(chunk), chunk, (before + chunk) ** 2 - before**2])
    seen = np.argsort(np.lexsort((chunk, before))) % 2 == 0
    weights = 1 / seconds[seen]
    fitted = np.linalg.lstsq(terms[seen] * weights[:, None], np.ones_like(weights), rcond=None)[0]
    base_s, per_token_s, per_token2_s = (max(float(value), 0.0) for value in fitted)
    time = prefill_time(QuadraticPrefill(base_s=base_s, per_token_s=per_token_s, per_token2_s=per_token2_s))
    others = zip(before[~seen], chunk[~seen], strict=True)
    model_s = [time.seconds(int(start + tokens), int(start)) for start, tokens in others]
    name = f"steps of a chunk of {chunk.min():.0f} to {chunk.max():.0f} tokens after up to {before.max():.0f}"
    return [error(f"{name}, LLMServingSim's H100 profile", model_s, seconds[~seen])]


def _layer_times_s(path: Path) -> dict[int, float]:
    """Return the time of everything but attention, by the number of tokens of a step."""
    found: dict[int, float] = {}
    with gzip.open(path, "rt", encoding="ascii", newline="") as lines:
        for row in csv.DictReader(lines):
            if row["layer_name"] != "attn":
                times = 1 if row["layer_name"] in ONCE else LAYERS
                tokens = int(row["input"])
                found[tokens] = found.get(tokens, 0.0) + times * float(row["latency(ns)"]) * 1e-9
    return found


def main() -> None:
    """Fit, predict and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--data", type=Path, default=DATA)
    given = parser.parse_args()
    for name in (SPLITWISE, LLMSERVINGSIM, LLMSERVINGSIM_LAYERS):
        if not (given.data / name).exists():
            sys.exit(f"{given.data / name} is missing: give its folder with --data")
    made = splitwise(given.data / SPLITWISE) + llmservingsim(given.data)
    show(made, given.json)


if __name__ == "__main__":
    main()
