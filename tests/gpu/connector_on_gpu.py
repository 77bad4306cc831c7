"""The connector with a KV cache on a GPU: copies of blocks, their order with the model's work, and whole transfers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch  # type: ignore[import-not-found]
from bench.fidelity import gpu_steps
from engine.tests.connector.loopback import BLOCKS, Cache, ends, pull
from tests.live.vllm import check_regions

from kvroute_engine.connector.blocks import BlockLayout
from kvroute_engine.connector.device import fence_of, regions_of
from kvroute_engine.connector.options import ConnectorSettings
from kvroute_engine.connector.transfer.block_leases import Computing
from kvroute_engine.connector.transfer.transfer_lanes import BlockTransfer

ALL = tuple(range(BLOCKS))
LONG = 4_000_000_000
"""Clock cycles of the model's work in these tests: about 2 s, longer than any copy."""


class GpuCache(Cache):
    """A cache of `layers` tensors on the GPU, [2, BLOCKS, tokens, heads, head]."""

    def __init__(self, layers: int, seed: int | None = None, tokens: int = 16) -> None:
        shape = (2, BLOCKS, tokens, 8, 128)
        if seed is None:
            self.tensors = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(layers)]
        else:
            torch.manual_seed(seed)
            self.tensors = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(layers)]
        self.regions = [region for tensor in self.tensors for region in regions_of("l", tensor, BLOCKS)]  # type: ignore[misc]
        region_bytes = tuple(region.block_bytes for region in self.regions)
        self.layout = BlockLayout(model="tiny", dtype="bfloat16", block_tokens=16, region_bytes=region_bytes)


@contextmanager
def busy_model() -> Iterator[torch.Stream]:
    """Yield the model's stream, which is the current one and busy for longer than a test's copies. Its work is over at
    the end."""
    torch.cuda.synchronize()
    stream = torch.Stream("cuda")
    with stream:
        torch.cuda._sleep(LONG)
        yield stream
    torch.cuda.synchronize()


def test_blocks_of_every_layout() -> None:
    """Scattered and adjacent blocks are sent and received unchanged, and no other one is touched."""
    assert check_regions.main("cuda") == 26


def test_a_transfer_between_caches_on_a_gpu() -> None:
    """All blocks of all layers arrive in the order of the request."""
    source, target = GpuCache(3, seed=1), GpuCache(3)
    into = tuple(torch.randperm(BLOCKS).tolist())
    with ends(source, target) as (server, client, peer):
        server.hold("p", ALL)
        assert pull(client, peer, into).failure == ""
    for there, here in zip(source.tensors, target.tensors, strict=True):
        assert torch.equal(there, here[:, list(into)])


def test_copies_do_not_wait_for_the_model() -> None:
    """Blocks that the model does not use are sent and received while its work is queued on another stream."""
    cache = GpuCache(1, seed=2)
    region = cache.regions[0]
    with busy_model() as stream:
        (sent,) = region.outgoing([3, 1])
        (received,) = region.incoming([5, 6])
        received[:] = sent
        region.landed([5, 6], [received])
        assert not stream.query(), "the model's work was over: these copies may have waited for it"
    assert torch.equal(cache.tensors[0][0, [5, 6]], cache.tensors[0][0, [3, 1]])


def test_a_layer_is_sent_after_the_model_has_written_it() -> None:
    """The fence of `fence_of` is behind what the model has queued before it."""
    source, target = GpuCache(1), GpuCache(1)
    with ends(source, target, ConnectorSettings(), ConnectorSettings()) as (server, client, peer), busy_model():
        client.start(BlockTransfer("d", peer, "p", 0, ALL, wait_s=60.0))
        source.tensors[0].fill_(7)
        server.computed(Computing("p", "p", ALL, BLOCKS), [0, 1], fence_of(source.tensors[0]))
        result = client.wait(60.0)
        assert result is not None
        assert result.failure == ""
        server.hold("p", ALL)
    assert (target.tensors[0] == 7).all()


def test_blocks_are_written_after_the_model_has_used_their_earlier_content() -> None:
    """What the model has queued for the request that had these blocks before does not overwrite them."""
    source, target = GpuCache(1, seed=3), GpuCache(1)
    with ends(source, target) as (server, client, peer), busy_model():
        target.tensors[0].fill_(7)  # the model's late write
        server.hold("p", ALL)
        client.start(BlockTransfer("d", peer, "p", 0, ALL, fence=fence_of(target.tensors[0])))
        result = client.wait(60.0)
        assert result is not None
        assert result.failure == ""
    assert torch.equal(source.tensors[0], target.tensors[0])


@pytest.mark.parametrize(("batch", "tokens"), [(1, 4096), (3, 512), (64, 128)])
def test_attention_of_the_measured_decode_steps(batch: int, tokens: int) -> None:
    """Divided contexts give the result of PyTorch's own attention."""
    torch.manual_seed(4)
    shape = (batch, gpu_steps.KV_HEADS, tokens, gpu_steps.HEAD)
    keys, values = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    query = torch.randn(batch, gpu_steps.HEADS, 1, gpu_steps.HEAD, device="cuda", dtype=torch.bfloat16)
    whole = torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
    found = gpu_steps.decode_attention(query, keys, values)
    assert torch.allclose(found, whole.reshape(batch, 1, -1), atol=1e-2)


@pytest.mark.parametrize("computed", [0, 300])
def test_attention_of_the_measured_chunks(computed: int) -> None:
    """Each token of a chunk attends to the tokens before it and to itself."""
    torch.manual_seed(5)
    tokens = 64
    keys, values = (torch.randn(1, 8, computed + tokens, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    query = torch.randn(1, 32, tokens, 128, device="cuda", dtype=torch.bfloat16)
    seen = torch.ones(tokens, computed + tokens, dtype=torch.bool, device="cuda").tril(computed)
    whole = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=seen, enable_gqa=True)
    found = gpu_steps.chunk_attention(query, keys, values)
    assert torch.allclose(found, whole.transpose(1, 2).reshape(1, tokens, -1), atol=2e-2)
