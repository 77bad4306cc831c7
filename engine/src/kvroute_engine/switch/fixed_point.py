"""Floats as int32 with one power-of-two scale per chunk, so that sums are exact and independent of the order.

A chunk's exponent e is the smallest with |x| < 2^e for all of its values on all workers. A value x becomes
round(x 2^(b - e)) with b = 30 - ceil(log2(workers)), so a sum over all workers is at most 2^30 in magnitude.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvroute_engine.switch.wire import CHUNK_VALUES, Values

Floats: TypeAlias = npt.NDArray[np.floating[Any]]
FLOAT_TYPES = (np.float16, np.float32, np.float64)
ZERO = -2000
"""Exponent of a chunk of zeros: below every float64."""
NOT_FINITE = 2000
"""Exponent of a chunk that contains an infinity or NaN: above every float64. The maximum over workers keeps it."""


def split(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the values as chunks, [n, CHUNK_VALUES], the last one padded with zeros."""
    count = -(-array.size // CHUNK_VALUES)
    chunks = np.zeros((count, CHUNK_VALUES), array.dtype)
    chunks.reshape(-1)[: array.size] = array.reshape(-1)
    return chunks


def merge(chunks: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Return the array that `split` has split."""
    return chunks.reshape(-1)[: int(np.prod(shape))].reshape(shape)


def exponents(chunks: Floats) -> Values:
    """Return the exponent of each chunk of one worker, [n]."""
    largest = np.abs(chunks).max(axis=1)
    found: Values = np.frexp(largest)[1].astype(np.int32)
    found[largest == 0] = ZERO
    found[~np.isfinite(largest)] = NOT_FINITE
    return found


def to_fixed(chunks: Floats, common: Values, workers: int) -> Values:
    """Return a worker's chunks in fixed point, [n, CHUNK_VALUES].

    Args:
        chunks: [n, CHUNK_VALUES].
        common: maximum over all workers of the chunks' exponents, [n].
        workers: number of workers.
    """
    finite = np.where((common == NOT_FINITE)[:, None], 0.0, chunks.astype(np.float64))
    fixed: Values = np.rint(np.ldexp(finite, (_bits(workers) - common)[:, None])).astype(np.int32)
    return fixed


def to_float(sums: Values, common: Values, workers: int, dtype: npt.DTypeLike) -> Floats:
    """Return sums of `to_fixed` as floats, [n, CHUNK_VALUES]; a chunk whose exponent is NOT_FINITE is NaN."""
    with np.errstate(over="ignore", under="ignore"):
        values = np.ldexp(sums.astype(np.float64), (common - _bits(workers))[:, None])
        values[common == NOT_FINITE] = np.nan
        found: Floats = values.astype(dtype)
    return found


def _bits(workers: int) -> int:
    """Return the number of bits of a worker's values besides the sign."""
    return 30 - (workers - 1).bit_length()
