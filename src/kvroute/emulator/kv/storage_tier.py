"""One emulated instance and the store: staged blocks for its prefills, and write-back of the blocks that it fills."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvroute.emulator.kv.kv_events import BlockStored, KvPublisher
from kvroute.emulator.kv.storage import StorageNode
from kvroute.emulator.prompt import EmulatedPrompt, text_tokens
from kvroute.prefix import block_hashes, salt_seed
from kvroute.types import IntArray
from kvroute_engine.block_keys import block_keys


@dataclass(slots=True, eq=False)
class StorageTier:
    """The storage node of an instance, and what the instance has written and reported."""

    node: StorageNode
    model: str
    block_tokens: int
    block_bytes: float
    publisher: KvPublisher | None
    _reported: set[int] = field(default_factory=set)
    """Hashes of the blocks that were reported as stored. They are closed under prefixes."""

    def staged_tokens(self, prompt: EmulatedPrompt, first_block: int, blocks: int, key: str) -> int:
        """Return the number of prompt tokens up to the end of staged blocks; 0 if they belong to another prompt."""
        tokens = (first_block + blocks) * self.block_tokens
        keys = block_keys(prompt.tokens[:tokens], self.block_tokens, prompt.salt)
        return tokens if len(keys) == first_block + blocks and keys[-1].hex() == key else 0

    def write_back(self, prompt: EmulatedPrompt, output: Sequence[bytes] = ()) -> None:
        """Write the full blocks of a prompt and its output that are not in the store. Args: `output`: its tokens."""
        tokens = prompt.tokens
        if output:
            generated = text_tokens(b"".join(output))
            tokens = np.concatenate([tokens, generated])
        keys = block_keys(tokens, self.block_tokens, prompt.salt)
        self.node.write(self.model, keys, self.block_bytes, lambda: self._report(tokens, prompt.salt))

    def _report(self, tokens: IntArray, salt: str) -> None:
        """Publish the blocks of this chain that this instance has not reported yet."""
        hashes = block_hashes(tokens, self.block_tokens, salt_seed(salt))
        known = next((at for at, digest in enumerate(hashes) if digest not in self._reported), len(hashes))
        if self.publisher is None or known == len(hashes):
            return
        self._reported.update(hashes)
        size = self.block_tokens
        event = BlockStored(
            list(hashes[known:]),
            hashes[known - 1] if known else None,
            tokens[known * size : len(hashes) * size].tolist(),
            size,
            medium="STORE",
            extra_keys=[(salt,) if at == 0 else None for at in range(known, len(hashes))] if salt else None,
        )
        self.publisher.publish([event])
