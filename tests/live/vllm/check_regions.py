"""Cache tensors of every layout as regions, in vLLM's environment (it has torch): blocks are sent and received
unchanged.

Prints the number of cases; a wrong one ends the program. `test_vllm_pair` runs it, and tests/gpu on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch  # type: ignore[import-not-found]

from kvroute_engine.connector.device import regions_of
from kvroute_engine.errors import InputError

BLOCKS = 6


def layouts(device: str) -> dict[str, Any]:
    """Return tensors with BLOCKS blocks, filled with different numbers, by the name of their layout."""

    def fill(*shape: int) -> Any:
        numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.int32, device=device)
        return numbers.view(shape).to(torch.bfloat16)

    return {
        "blocks first": fill(BLOCKS, 2, 4, 8),
        "keys and values apart": fill(2, BLOCKS, 4, 8),
        "heads inside": fill(BLOCKS, 4, 2, 8).permute(0, 2, 1, 3),
        "two kernel blocks each": fill(2 * BLOCKS, 2, 4, 8),
        "a slice of a larger tensor": fill(BLOCKS, 3, 4, 8)[:, 1:],
        "with an offset": fill(BLOCKS + 2, 2, 4)[2:],
    }


def block_of(tensor: Any, block: int) -> Any:
    """Return a block by torch's own functions, as numbers in the order of memory."""
    if tensor.shape[0] == 2:
        return torch.cat([tensor[0][block].flatten(), tensor[1][block].flatten()])
    per_block = tensor.shape[0] // BLOCKS
    part = tensor[block * per_block : (block + 1) * per_block]
    order = sorted(range(1, part.dim()), key=lambda dim: -part.stride(dim))
    return part.permute(0, *order).flatten()


CASES = {"scattered": ([4, 5, 1], [0, 3, 2]), "adjacent": ([3, 4, 5], [1, 2, 3])}
"""Blocks to copy, and the blocks that receive them."""


def copy(source: Any, target: Any, staging: bool, blocks: list[int], into: list[int]) -> None:
    """Copy blocks as a transfer does."""
    pairs = zip(
        regions_of("l", source, BLOCKS, staging=staging), regions_of("l", target, BLOCKS, staging=staging), strict=True
    )
    for there, here in pairs:
        data = b"".join(there.outgoing(blocks))
        views, at = here.incoming(into), 0
        for view in views:
            view[:] = data[at : at + len(view)]
            at += len(view)
        assert at == len(data) == len(blocks) * here.block_bytes
        here.landed(into, views)


def main(device: str = "cpu") -> int:
    """Check all layouts, straight from memory and staged."""
    checked = 0
    for name, source in layouts(device).items():
        for staging in (False, True):
            for blocks, into in CASES.values():
                target = source.clone(memory_format=torch.preserve_format).zero_()
                copy(source, target, staging, blocks, into)
                for there, here in zip(blocks, into, strict=True):
                    assert torch.equal(block_of(source, there), block_of(target, here)), (name, staging, there)
                for untouched in set(range(BLOCKS)) - set(into):
                    assert not block_of(target, untouched).any(), (name, staging, untouched)
                checked += 1
    for tensor in (torch.zeros(BLOCKS, 8, 4)[:, ::2], torch.zeros(BLOCKS + 1, 4)):
        try:
            regions_of("l", tensor, BLOCKS)
        except InputError:
            checked += 1
    return checked


if __name__ == "__main__":
    print(main())  # noqa: T201
