"""An extent: a header of whole pages, then the layer blocks of one full block. All integers are little-endian."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from kvroute_engine.block_store.format import BlockFormat

PAGE_BYTES = 4096
MAX_KEY_BYTES = 64
MAGIC = b"kvrblock"
FIXED = struct.Struct("<8s16sBB64s64s")
"""Magic, digest of the format, lengths of key and parent, key, parent. The checksums of the layers follow."""


@dataclass(frozen=True, slots=True)
class Header:
    """The identity of an extent's block and the XXH3 checksum of each layer block."""

    key: bytes
    parent: bytes
    checksums: tuple[int, ...]


class ExtentCodec:
    """Sizes, headers and checksums of the extents of one format."""

    def __init__(self, form: BlockFormat) -> None:
        self.form = form
        self._checksums = struct.Struct(f"<{form.layers}Q")
        self._signed_bytes = FIXED.size + self._checksums.size
        self.header_bytes = -(-(self._signed_bytes + 8) // PAGE_BYTES) * PAGE_BYTES
        self.extent_bytes = self.header_bytes + form.block_bytes

    def header(self, key: bytes, parent: bytes, block: memoryview) -> bytes:
        """Return the header of this block, padded to whole pages."""
        assert 1 <= len(key) <= MAX_KEY_BYTES, "a key has 1 to 64 bytes"
        assert len(parent) <= MAX_KEY_BYTES, "a key has at most 64 bytes"
        assert block.nbytes == self.form.block_bytes, "a full block has all layers"
        fixed = FIXED.pack(MAGIC, self.form.digest, len(key), len(parent), key, parent)
        signed = fixed + self._checksums.pack(*self._sums(block.cast("B")))
        return (signed + xxhash.xxh3_64_digest(signed)).ljust(self.header_bytes, b"\0")

    def parsed(self, header: bytes | bytearray | memoryview) -> Header | None:
        """Return the content of a header; None if it is damaged or of another format."""
        if len(header) < self.header_bytes:
            return None
        signed = bytes(header[: self._signed_bytes])
        if bytes(header[self._signed_bytes : self._signed_bytes + 8]) != xxhash.xxh3_64_digest(signed):
            return None
        magic, digest, key_bytes, parent_bytes, key, parent = FIXED.unpack_from(signed)
        if (magic, digest) != (MAGIC, self.form.digest):
            return None
        return Header(key[:key_bytes], parent[:parent_bytes], self._checksums.unpack_from(signed, FIXED.size))

    def are_intact(self, header: Header, layers: range, data: memoryview) -> bool:
        """Return whether these layers' bytes have the checksums of the header."""
        return self._sums(data) == list(header.checksums[layers.start : layers.stop])

    def layers_at(self, layers: range) -> tuple[int, int]:
        """Return the offset in the extent and the size of consecutive layer blocks, in bytes."""
        assert layers.step == 1, "layers are consecutive"
        assert 0 <= layers.start < layers.stop <= self.form.layers, "the model has these layers"
        return self.header_bytes + layers.start * self.form.layer_bytes, len(layers) * self.form.layer_bytes

    def slices(self, keys: Sequence[bytes], layers: range, into: memoryview) -> list[memoryview]:
        """Return the part of `into` for each key."""
        _, nbytes = self.layers_at(layers)
        flat = into.cast("B")
        assert flat.nbytes >= len(keys) * nbytes, "the buffer has room for all blocks"
        return [flat[i * nbytes : (i + 1) * nbytes] for i in range(len(keys))]

    def _sums(self, data: memoryview) -> list[int]:
        step = self.form.layer_bytes
        return [xxhash.xxh3_64_intdigest(data[at : at + step]) for at in range(0, data.nbytes, step)]
