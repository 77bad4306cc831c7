"""Keys of full KV blocks in a store: chained SHA-256 digests of token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from kvroute_engine.arrays import IntArray

KEY_BYTES = 16
NO_PARENT = b""
"""Parent of the first block of a prompt in a store."""
_TOKEN_BYTES = 8


def root_key(salt: str = "") -> bytes:
    """Return what the first block is chained to: KEY_BYTES zeros, or H(salt) with a cache salt."""
    return hashlib.sha256(salt.encode("utf-8", "surrogatepass")).digest()[:KEY_BYTES] if salt else bytes(KEY_BYTES)


def block_keys(
    tokens: Sequence[int] | IntArray, block_tokens: int, salt: str = "", parent: bytes | None = None
) -> list[bytes]:
    """Return the key of each full block: equal keys mean equal prefixes. Tokens after the last full block have none.

    key[0] = H(root + block 0), key[k] = H(key[k-1] + block k), over token ids as little-endian 64-bit integers; H is
    the first KEY_BYTES bytes of SHA-256. With `parent`, the key of the block before them, the tokens continue a prompt.
    """
    content = memoryview(np.asarray(tokens, dtype="<i8").tobytes())
    step = block_tokens * _TOKEN_BYTES
    keys: list[bytes] = []
    last = root_key(salt) if parent is None else parent
    for at in range(0, len(content) - step + 1, step):
        digest = hashlib.sha256(last)
        digest.update(content[at : at + step])
        last = digest.digest()[:KEY_BYTES]
        keys.append(last)
    return keys
