"""Keys of blocks: a key stands for the whole prefix up to its block, within one cache salt."""

from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvroute_engine.block_keys import KEY_BYTES, block_keys

TOKENS = st.lists(st.integers(0, 3), max_size=24)


@given(TOKENS, TOKENS, st.integers(1, 4), st.sampled_from(["", "a"]), st.sampled_from(["", "a", "b"]))
def test_equal_keys_mean_equal_prefixes(
    one: list[int], other: list[int], block: int, salt: str, other_salt: str
) -> None:
    keys, others = block_keys(one, block, salt), block_keys(other, block, other_salt)
    assert len(keys) == len(one) // block
    for number, (key, another) in enumerate(zip(keys, others, strict=False), start=1):
        same = salt == other_salt and one[: number * block] == other[: number * block]
        assert (key == another) == same


def test_a_key_is_the_digest_of_its_parent_and_its_tokens() -> None:
    tokens = np.array([1, 2, 3, 4, 5])
    first = hashlib.sha256(bytes(KEY_BYTES) + tokens[:2].astype("<i8").tobytes()).digest()[:KEY_BYTES]
    second = hashlib.sha256(first + tokens[2:4].astype("<i8").tobytes()).digest()[:KEY_BYTES]
    assert block_keys(tokens, 2) == [first, second]
