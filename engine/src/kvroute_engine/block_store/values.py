"""The block store over a service that keeps whole values by name: the common part of Redis and S3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvroute_engine.block_keys import NO_PARENT
from kvroute_engine.block_store.extent import ExtentCodec
from kvroute_engine.block_store.format import BlockFormat

FORMAT_NAME = "format"


class Values(Protocol):
    """Values by name. A value appears whole or not at all; failures of the service raise StoreError."""

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Return the size of each value in bytes; None where there is none."""

    def parts(self, names: Sequence[str], ranges: Sequence[tuple[int, int]]) -> list[list[memoryview]]:
        """Return these parts (offset and size in bytes) of each value; shorter parts where the value is missing."""

    def create(self, name: str, value: Sequence[memoryview]) -> None:
        """Store a value, given in pieces, unless it exists."""


class ValueStore:
    """A `BlockStore` over `Values`: one value per block, with the content of an extent.

    The service evicts by its own rules, so a chain may have gaps; a match ends at the first gap.
    """

    def __init__(self, values: Values, form: BlockFormat, where: str, *, verify: bool = True) -> None:
        """Open the store, or create it.

        Raises:
            StoreError: the service fails, or holds blocks of another format.
        """
        self._values, self._codec, self._verify = values, ExtentCodec(form), verify
        values.create(FORMAT_NAME, [memoryview(form.description)])
        [size] = values.sizes([FORMAT_NAME])
        [[stored]] = values.parts([FORMAT_NAME], [(0, size or 0)])
        form.require_same(bytes(stored), where)

    def match(self, keys: Sequence[bytes]) -> int:
        """Return how many leading keys are stored. See `BlockStore`."""
        sizes = [*self._values.sizes([key.hex() for key in keys]), None]
        return next(at for at, size in enumerate(sizes) if size != self._codec.extent_bytes)

    def read(self, keys: Sequence[bytes], layers: range, into: memoryview) -> int:
        """Read layers of blocks into a buffer; return the number of leading blocks read. See `BlockStore`."""
        places = self._codec.slices(keys, layers, into)
        ranges = [self._codec.layers_at(layers)] + ([(0, self._codec.header_bytes)] if self._verify else [])
        found = self._values.parts([key.hex() for key in keys], ranges)
        for count, (key, place, (data, *header)) in enumerate(zip(keys, places, found, strict=True)):
            if data.nbytes != place.nbytes:
                return count
            if header and not self._intact(key, header[0], layers, data):
                return count
            place[:] = data
        return len(keys)

    def _intact(self, key: bytes, header: memoryview, layers: range, data: memoryview) -> bool:
        found = self._codec.parsed(header)
        return found is not None and found.key == key and self._codec.are_intact(found, layers, data)

    def write(self, key: bytes, parent: bytes, block: memoryview) -> bool:
        """Store a full block; return whether it is stored afterwards. See `BlockStore`."""
        header = self._codec.header(key, parent, block)
        if parent != NO_PARENT and not self.match([parent]):
            return False
        self._values.create(key.hex(), [memoryview(header), block.cast("B")])
        return True
