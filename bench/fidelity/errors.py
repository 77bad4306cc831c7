"""Errors of predicted times, as rows of a bench."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from bench.measurement import Row

from kvroute.types import FloatArray

WITHIN = 15.0
STEP_TOKENS_MAX = 8_192
"""Largest number of tokens of a step that is compared: vLLM's default on an H100."""


def error(what: str, model_s: Sequence[float] | FloatArray, measured_s: FloatArray) -> Row:
    """Return the median error of predictions; the note has mean and p95."""
    errors = 100 * (np.array(model_s) / measured_s - 1)
    middle, high = np.percentile(np.abs(errors), (50, 95))
    note = f"{what}: {len(errors)} points, mean {errors.mean():+.1f} %, p95 of the absolute error {high:.1f} %"
    return Row(measure=f"{what}: median error", unit="%", better="lower", ours=float(middle), target=WITHIN, note=note)
