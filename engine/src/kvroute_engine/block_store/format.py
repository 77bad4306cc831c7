"""The format of the blocks of one store: which model wrote them, and their shape."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import msgspec

from kvroute_engine.block_store.interface import StoreError

LAYOUT = 1
"""Version of the extents; another version is another format."""


@dataclass(frozen=True)
class BlockFormat:
    """The model's name or fingerprint, and the shape of a full block. `layer_bytes` is the size of one layer block."""

    model: str
    layers: int
    block_tokens: int
    layer_bytes: int

    def __post_init__(self) -> None:
        if min(self.layers, self.block_tokens, self.layer_bytes) < 1:
            raise StoreError(f"a block has positive sizes, not {self}", hint="check the model's configuration")

    @property
    def block_bytes(self) -> int:
        """Size of a full block, without its header."""
        return self.layers * self.layer_bytes

    @cached_property
    def description(self) -> bytes:
        """The format as JSON, which a store keeps beside its blocks."""
        fields = {name: getattr(self, name) for name in ("model", "layers", "block_tokens", "layer_bytes")}
        return msgspec.json.encode({"layout": LAYOUT, **fields})

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that differ for different formats."""
        return hashlib.blake2b(self.description, digest_size=16).digest()

    def require_same(self, stored: bytes, where: str) -> None:
        """Compare with the description that a store keeps.

        Raises:
            StoreError: the store holds blocks of another model or shape.
        """
        if stored != self.description:
            text = stored.decode("utf-8", "replace")
            raise StoreError(
                f"the store has blocks of another format ({text}, not {self.description.decode()})",
                where=where,
                hint="use a separate store for each model",
            )
