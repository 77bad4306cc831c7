"""What every backend of the block store offers, and its error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvroute_engine.errors import InputError


class StoreError(InputError):
    """The store cannot be opened or written; the message is one sentence. Published blocks are unaffected."""


class BlockStore(Protocol):
    """Full blocks by key. A key is the chained hash of a block: an equal key means an equal prefix.

    All methods are thread-safe, block until they are done, and release the GIL while they transfer bytes.
    """

    def match(self, keys: Sequence[bytes]) -> int:
        """Return how many leading keys are stored, and mark these blocks as used."""

    def read(self, keys: Sequence[bytes], layers: range, into: memoryview) -> int:
        """Read these consecutive layers of each block into `into` ([block, layer, tokens, bytes]).

        Returns:
            The number of leading blocks that were read. The first missing or damaged block ends the count; the content
            of `into` after these blocks is undefined.
        """

    def write(self, key: bytes, parent: bytes, block: memoryview) -> bool:
        """Store a full block ([layer, tokens, bytes]); return whether the block is stored afterwards.

        It is not stored if its parent is missing, or if there is no room that eviction may free.

        Raises:
            StoreError: the medium rejected the block, for example because it is full.
        """
