"""Times of prompts and decode steps from aiconfigurator's tables of measured operators (extra `aiconfigurator`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Literal, Protocol, TypeAlias

import numpy as np

from kvroute.timing import Profile
from kvroute.types import InputError

Backend: TypeAlias = Literal["vllm", "sglang", "trtllm"]
AttentionPrecision: TypeAlias = Literal["bfloat16", "fp8"]
LIBRARY = "aiconfigurator_core"
PROMPT_TOKENS_MIN, CONTEXT_TOKENS_MIN = 128, 512
_MESSAGE_CHARACTERS = 160


@dataclass(frozen=True, slots=True)
class ModelledEngine:
    """One engine as the library names it."""

    system: str
    """GPU and its node, such as `h200_sxm`."""
    backend: Backend
    model: str
    """A model that the library has, with or without its organisation, or a folder with its config.json."""
    tp: int = 1
    ep: int = 1
    """Expert-parallel degree; the experts of a rank are split among `tp * dp / ep` GPUs."""
    dp: int = 1
    """Data-parallel ranks of attention; the batch is that of one rank."""
    drafts: int = 0
    """Tokens that speculative decoding drafts per step (MTP)."""
    acceptance: float = 0.0
    """Probability that a draft is accepted, if those before it were."""
    attention: AttentionPrecision | None = None
    """Precision of attention; None: that of the model."""

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step gives a request: the drafts that are accepted, and one."""
        return sum(self.acceptance**accepted for accepted in range(self.drafts + 1))


class EngineTimes(Protocol):
    """What is used of the library's `EngineHandle`; times are in milliseconds."""

    def predict_prefill_latency(self, bs: int, isl: int, prefix: int = 0) -> float:
        """Return the time of a step of `bs` prompts."""
        ...

    def predict_decode_latency(self, bs: int, isl: int, osl: int = 2) -> float:
        """Return the time of `osl - 1` decode steps of a batch whose requests have `isl` tokens."""
        ...


def engine_times(engine: ModelledEngine) -> EngineTimes:
    """Load the operators of an engine, about a second.

    Raises:
        InputError: the library is not installed, does not know system, model or backend, or has no times for them.
    """
    try:
        from aiconfigurator_core.sdk import EngineHandle
    except ImportError:
        raise InputError(f"{LIBRARY} is not installed", hint="pip install 'kvroute[aiconfigurator]'") from None
    logging.getLogger(LIBRARY).setLevel(logging.CRITICAL)
    systems = sorted(folder.name for folder in (resources.files(LIBRARY) / "systems" / "data").iterdir())
    if engine.system not in systems:
        what = f"aiconfigurator has no system {engine.system!r}"
        raise InputError(what, where="--system", hint=f"choose one of {', '.join(systems)}")
    if engine.tp * engine.dp % engine.ep:
        what = f"{engine.ep} expert-parallel ranks do not divide tp * dp = {engine.tp * engine.dp} GPUs"
        raise InputError(what, where="--ep", hint="give a divisor")
    try:
        times: EngineTimes = EngineHandle.compile(
            _model_path(engine.model),
            engine.system,
            engine.backend,
            tp_size=engine.tp,
            attention_dp_size=engine.dp,
            moe_tp_size=engine.tp * engine.dp // engine.ep,
            moe_ep_size=engine.ep,
            nextn=engine.drafts,
            fmha_quant_mode=engine.attention,
        )
        times.predict_prefill_latency(1, PROMPT_TOKENS_MIN)
    except InputError:
        raise
    except Exception as error:  # the library's errors have no class of their own
        raise _no_times(engine, error) from None
    return times


def operator_profile(engine: ModelledEngine, times: EngineTimes, prompt_max: int, batch_max: int) -> Profile:
    """Return the times of whole prompts, and per output token those of steps of a batch, at sizes that double.

    Raises:
        InputError: the library has no time for one of them.
    """
    lengths = _doubled(PROMPT_TOKENS_MIN, prompt_max)
    sizes = _doubled(1, batch_max)
    points = [(batch, context) for batch in sizes for context in _doubled(CONTEXT_TOKENS_MIN, prompt_max)]
    try:
        prefill_ms = [times.predict_prefill_latency(1, length) for length in lengths]
        steps_ms = [times.predict_decode_latency(batch, context, 2) for batch, context in points]
    except Exception as error:  # the library's errors have no class of their own
        raise _no_times(engine, error) from None
    batch, context = np.array(points, np.float64).T
    drafted = f"steps with {engine.drafts} drafts give {engine.tokens_per_step:.3g} tokens" if engine.drafts else ""
    return Profile(
        where=f"aiconfigurator {engine.system}",
        tokens=np.array(lengths, np.float64),
        prefill_s=1e-3 * np.array(prefill_ms),
        batch=batch,
        iteration_s=1e-3 * np.array(steps_ms) / engine.tokens_per_step,
        context_tokens=batch * context,
        decode_remarks=(drafted,) if drafted else (),
        times="times of operators",
    )


def _model_path(model: str) -> str:
    """Return the library's name of a model; it would download the configuration of others."""
    from pathlib import Path

    from aiconfigurator_core.sdk.common import DefaultHFModels

    if (Path(model) / "config.json").is_file():
        return model
    known: list[str] = sorted(DefaultHFModels)
    found = [name for name in known if model.lower() in (name.lower(), name.lower().rpartition("/")[2])]
    if len(found) != 1:
        like = [name for name in known if model.lower().rpartition("/")[2][:5] in name.lower()]
        hint = f"choose one of {', '.join(like)}" if like else "give a folder with the model's config.json"
        raise InputError(f"aiconfigurator does not know the model {model!r}", where="--model", hint=hint)
    return found[0]


def _no_times(engine: ModelledEngine, error: Exception) -> InputError:
    """Return the library's first sentence without paths."""
    said = (str(error).strip() or type(error).__name__).splitlines()[0].partition(" at /")[0][:_MESSAGE_CHARACTERS]
    hint = "choose another system, backend or degree"
    if "fmha_quant" in said and engine.attention is None:
        hint = "give --attention bfloat16, or another backend"
    where = f"{engine.model} with {engine.backend} on {engine.system}"
    return InputError(f"aiconfigurator has no times for this engine ({said})", where=where, hint=hint)


def _doubled(least: int, most: int) -> Sequence[int]:
    """Return numbers that double from `least` on, and `most`."""
    found = [least]
    while 2 * found[-1] < most:
        found.append(2 * found[-1])
    return [*found, most] if most > found[-1] else found
