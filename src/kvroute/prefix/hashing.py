"""Chained hashes of a prompt's full blocks; tokens after the last full block are not hashed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import xxhash

from kvroute.types import InputError, IntArray

_TOKEN_BYTES = 8
_SEED_LIMIT = 1 << 64
_ADAPTER = 0x61646170746572
"""Distinguishes the name of an adapter from an equal cache salt."""
_HINT = "give a 1-dimensional array of signed 64-bit integers"


def block_hashes(tokens: Sequence[int] | IntArray, block_tokens: int = 16, seed: int = 0) -> tuple[int, ...]:
    """One unsigned 64-bit hash per full block of `block_tokens` tokens: equal hashes mean equal prefixes.

    h[0] = XXH64(block 0, seed), h[k] = XXH64(block k, h[k-1]), over tokens as little-endian 64-bit integers. Each hash
    is the seed of the next, so it stands for its whole prefix. Raises InputError for tokens that are not integers, a
    block of less than one token and a seed outside 0..2^64-1.
    """
    if block_tokens < 1:
        raise InputError(f"a block of {block_tokens} tokens", where="block_tokens", hint="give 1 or more")
    if not 0 <= seed < _SEED_LIMIT:
        raise InputError(f"{seed} is not an unsigned 64-bit integer", where="seed", hint="give 0 to 2^64-1")
    content = memoryview(_token_bytes(tokens))
    step = block_tokens * _TOKEN_BYTES
    digest, parent = xxhash.xxh64_intdigest, seed
    return tuple([parent := digest(content[at : at + step], parent) for at in range(0, len(content) - step + 1, step)])


def salt_seed(salt: str) -> int:
    """Seed of the block hashes of prompts with this cache salt: equal prompts with different salts get different ones.

    An empty salt means no salt and has the seed 0.
    """
    return xxhash.xxh64_intdigest(salt.encode("utf-8", "surrogatepass")) if salt else 0


def prompt_seed(salt: str = "", adapter: str = "") -> int:
    """Seed of the block hashes of prompts with this cache salt and this LoRA adapter; without an adapter that of the
    salt. KV depends on the adapter, so that equal prompts with different adapters share no blocks."""
    seed = salt_seed(salt)
    return xxhash.xxh64_intdigest(adapter.encode("utf-8", "surrogatepass"), seed ^ _ADAPTER) if adapter else seed


def _token_bytes(tokens: Sequence[int] | IntArray) -> bytes:
    try:
        # array() is twice as fast as numpy on a list, but would read bytes as raw memory.
        ids = tokens if isinstance(tokens, np.ndarray | bytes | bytearray) else array("q", tokens)
    except (OverflowError, TypeError) as error:
        raise InputError(f"not token ids ({error})", where="tokens", hint=_HINT) from error
    row = np.asarray(ids)
    if row.ndim != 1 or not np.can_cast(row.dtype, np.int64) or row.dtype.kind == "b":
        raise InputError(f"not token ids: {row.dtype} in {row.ndim} dimensions", where="tokens", hint=_HINT)
    return row.astype("<i8", copy=False).tobytes()
