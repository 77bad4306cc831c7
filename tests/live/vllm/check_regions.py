"""Cache tensors of every layout as regions, in vLLM's environment (it has torch): blocks are sent and received
unchanged.

Prints the number of cases; a wrong one ends the program. `test_vllm_pair` runs it.
"""

from __future__ import annotations

from typing import Any

import torch  # type: ignore[import-not-found]

from kvroute.connector.device import regions_of
from kvroute.types import InputError

BLOCKS = 6


def layouts() -> dict[str, Any]:
    """Yield tensors with BLOCKS blocks, filled with different numbers."""

    def fill(*shape: int) -> Any:
        return torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape).to(torch.bfloat16)

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


def copy(source: Any, target: Any, staging: bool) -> None:
    """Copy blocks 4, 5, 1 into 0, 3, 2, as a transfer does."""
    pairs = zip(
        regions_of("l", source, BLOCKS, staging=staging), regions_of("l", target, BLOCKS, staging=staging), strict=True
    )
    for there, here in pairs:
        data = b"".join(there.outgoing([4, 5, 1]))
        views, at = here.incoming([0, 3, 2]), 0
        for view in views:
            view[:] = data[at : at + len(view)]
            at += len(view)
        assert at == len(data) == 3 * here.block_bytes
        here.landed([0, 3, 2], views)


def main() -> int:
    """Check all layouts, straight from memory and staged."""
    cases = 0
    for name, source in layouts().items():
        for staging in (False, True):
            target = source.clone(memory_format=torch.preserve_format).zero_()
            copy(source, target, staging)
            for there, here in ((4, 0), (5, 3), (1, 2)):
                assert torch.equal(block_of(source, there), block_of(target, here)), (name, staging, there)
            for untouched in (1, 4, 5):
                assert not block_of(target, untouched).any(), (name, staging, untouched)
            cases += 1
    for tensor in (torch.zeros(BLOCKS, 8, 4)[:, ::2], torch.zeros(BLOCKS + 1, 4)):
        try:
            regions_of("l", tensor, BLOCKS)
        except InputError:
            cases += 1
    return cases


if __name__ == "__main__":
    print(main())  # noqa: T201
