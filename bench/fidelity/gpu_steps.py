"""Step times of a Llama-shaped model on one GPU, by PyTorch alone: profiles for `kvroute timing fit`.

`python bench/fidelity/gpu_steps.py --out FOLDER`, with any PyTorch for CUDA and without kvroute. Weights are random, in
bfloat16; a step is all layers, the output layer for the last token, and the choice of the next one. Layers are compiled
by torch.compile, and steps are CUDA graphs. Each time is the median of several.

Files, in the format of `kvroute timing fit`: `prompts.csv` (tokens) and `decode.csv` (batch, context_tokens of the
whole batch). Others: `shared-steps.csv` (prompts in a step, tokens of each) and `mixed-steps.csv` (a decode batch, and
tokens of a prompt after those that are already computed).
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]
import torch.nn.functional as F  # type: ignore[import-not-found]  # noqa: N812
from torch.nn.attention.bias import causal_lower_right  # type: ignore[import-not-found]

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD, WIDTH, VOCABULARY = 32, 4096, 32, 8, 128, 14336, 128_256
"""Llama-3.1-8B."""
GROUP = HEADS // KV_HEADS
PROMPTS = (16, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12_288, 16_384)
MIXED = tuple(
    (batch, chunk, computed) for batch in (8, 32, 128) for chunk in (128, 512, 2048) for computed in (0, 4096)
)
MIXED_CONTEXT = 1024
SHARED = tuple((prompts, tokens) for tokens in (128, 512, 2048) for prompts in (1, 2, 4, 8, 16))
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (128, 512, 1024, 2048, 4096, 8192)
KV_TOKENS_MAX = 330_000
"""Tokens whose KV fits beside the weights on a GPU of 80 GB."""
SPLIT_TOKENS_MIN, PROGRAMS = 256, 264
"""A decode step divides each context among so many programs that the GPU is filled (flash decoding)."""
REPEATS = 7


class Layer:
    """Weights of one layer."""

    def __init__(self) -> None:
        def weights(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * columns**-0.5

        self.qkv = weights((HEADS + 2 * KV_HEADS) * HEAD, HIDDEN)
        self.output = weights(HIDDEN, HEADS * HEAD)
        self.gate_up = weights(2 * WIDTH, HIDDEN)
        self.down = weights(HIDDEN, WIDTH)
        self.norms = torch.ones(2, HIDDEN, device="cuda", dtype=torch.bfloat16)


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Return x [..., tokens, head] with rotary embeddings of angles [tokens, head / 2]."""
    first, second = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def before_attention(x: torch.Tensor, layer: Layer, angles: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return queries, keys and values, [batch, heads, tokens, head]."""
    normed = F.rms_norm(x, (HIDDEN,), layer.norms[0])
    parts = F.linear(normed, layer.qkv).view(*x.shape[:2], -1, HEAD).transpose(1, 2)
    query, key, value = parts.split((HEADS, KV_HEADS, KV_HEADS), 1)
    return rotated(query, angles), rotated(key, angles), value


def after_attention(x: torch.Tensor, attended: torch.Tensor, layer: Layer) -> torch.Tensor:
    """Return the output of a layer."""
    x = x + F.linear(attended, layer.output)
    gate, up = F.linear(F.rms_norm(x, (HIDDEN,), layer.norms[1]), layer.gate_up).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, layer.down)


def decode_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attend to contexts [batch, KV heads, tokens, head] with one query token each; returns [batch, 1, hidden]."""
    batch, _, tokens, _ = keys.shape
    splits = 1
    while batch * KV_HEADS * splits < PROGRAMS and tokens // (2 * splits) >= SPLIT_TOKENS_MIN:
        splits *= 2
    query = query.reshape(batch, KV_HEADS, 1, GROUP, HEAD).expand(-1, -1, splits, -1, -1)
    parts = [cache.view(batch, KV_HEADS * splits, -1, HEAD) for cache in (keys, values)]
    found = torch.ops.aten._scaled_dot_product_flash_attention(query.reshape(batch, -1, GROUP, HEAD), *parts)
    attended, weight = found[0].view(batch, KV_HEADS, splits, GROUP, HEAD), found[1]
    share = weight.view(batch, KV_HEADS, splits, GROUP, 1).softmax(2)
    return (attended * share).sum(2).to(keys.dtype).reshape(batch, 1, HEADS * HEAD)


def chunk_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attend with the last tokens of a prompt to all of it, [1, heads, tokens, head]; returns [1, tokens, hidden]."""
    tokens = query.shape[2]
    mask = causal_lower_right(tokens, keys.shape[2])
    attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
    return attended.transpose(1, 2).reshape(1, tokens, -1)


class Model:
    """The model; `compiled`: with the parts around attention compiled."""

    def __init__(self, compiled: bool) -> None:
        torch.manual_seed(0)
        self.layers = [Layer() for _ in range(LAYERS)]
        self.embedding = torch.randn(VOCABULARY, HIDDEN, device="cuda", dtype=torch.bfloat16)
        self.head = torch.randn(VOCABULARY, HIDDEN, device="cuda", dtype=torch.bfloat16) * HIDDEN**-0.5
        self.frequencies = 500_000.0 ** -(torch.arange(0, HEAD, 2, device="cuda") / HEAD)
        made: Callable[..., Any] = torch.compile(dynamic=True) if compiled else lambda part: part
        self.before, self.after = made(before_attention), made(after_attention)

    def prefill(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the next token of each prompt, ids [prompts, tokens]. Keeps the KV of one layer at a time."""
        x = self.embedding[ids]
        angles = torch.outer(torch.arange(ids.shape[1], device="cuda").float(), self.frequencies)
        for layer in self.layers:
            query, key, value = self.before(x, layer, angles)
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            x = self.after(x, attended.transpose(1, 2).reshape(x.shape), layer)
        return F.linear(x[:, -1], self.head).argmax(-1)

    def decode(self, ids: torch.Tensor, cache: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Return the next token of each request. The new token's KV is written at position `at`.

        Args:
            ids: [batch, 1].
            cache: [layers, 2, batch, KV heads, tokens, head].
            at: one position.
        """
        x = self.embedding[ids]
        angles = torch.outer(at.float(), self.frequencies)
        for layer, (keys, values) in zip(self.layers, cache, strict=True):
            query, key, value = self.before(x, layer, angles)
            keys.index_copy_(2, at, key)
            values.index_copy_(2, at, value)
            x = self.after(x, decode_attention(query, keys, values), layer)
        return F.linear(x[:, -1], self.head).argmax(-1)

    def mixed(self, ids: torch.Tensor, cache: torch.Tensor, at: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
        """Return the next tokens of a decode batch and of a prompt whose chunk shares the step.

        Args:
            ids: [1, batch + chunk].
            cache: see `decode`.
            at: [1], see `decode`.
            computed: KV of the prompt's earlier tokens, [layers, 2, 1, KV heads, tokens, head].
        """
        batch, before = cache.shape[2], computed.shape[4]
        chunk = torch.arange(before, before + ids.shape[1] - batch, device="cuda")
        angles = torch.outer(torch.cat((at.expand(batch), chunk)).float(), self.frequencies)
        x = self.embedding[ids]
        for layer, (keys, values), earlier in zip(self.layers, cache, computed, strict=True):
            query, key, value = self.before(x, layer, angles)
            keys.index_copy_(2, at, key[:, :, :batch].transpose(0, 2))
            values.index_copy_(2, at, value[:, :, :batch].transpose(0, 2))
            decoded = decode_attention(query[:, :, :batch].transpose(0, 2), keys, values)
            whole = [
                torch.cat(halves, 2) for halves in zip(earlier, (key[:, :, batch:], value[:, :, batch:]), strict=True)
            ]
            prompt = chunk_attention(query[:, :, batch:], *whole)
            x = self.after(x, torch.cat((decoded.transpose(0, 1), prompt), 1), layer)
        last = torch.cat((x[0, :batch], x[0, -1:]))
        return F.linear(last, self.head).argmax(-1)


def seconds(run: Callable[[], object]) -> float:
    """Return the median time of a run on the GPU, the launch of its kernels included."""
    for _ in range(2):
        run()
    times: list[float] = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def graph_seconds(run: Callable[[], object]) -> float:
    """Return the median time of a step as a CUDA graph."""
    for _ in range(2):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    found = seconds(graph.replay)
    del graph
    torch.cuda.empty_cache()
    return found


def prompts(model: Model, cases: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int, float]]:
    """Yield the number of prompts in a step, the tokens of each, and the step's time."""
    for count, tokens in cases:
        ids = torch.randint(VOCABULARY, (count, tokens), device="cuda")
        yield count, tokens, graph_seconds(partial(model.prefill, ids))


def decodes(model: Model) -> Iterable[tuple[int, int, float]]:
    """Yield batch, tokens of all contexts, and the step's time."""
    for batch in BATCHES:
        for context in CONTEXTS:
            if batch * context <= KV_TOKENS_MAX:
                ids = torch.randint(VOCABULARY, (batch, 1), device="cuda")
                at = torch.tensor([context - 1], device="cuda")
                yield batch, batch * context, graph_seconds(partial(model.decode, ids, kv(batch, context), at))


def mixed(model: Model) -> Iterable[tuple[int, int, int, int, float]]:
    """Yield batch, tokens of all contexts, tokens of the prompt's chunk and before it, and the step's time."""
    for batch, chunk, computed in MIXED:
        ids = torch.randint(VOCABULARY, (1, batch + chunk), device="cuda")
        at = torch.tensor([MIXED_CONTEXT - 1], device="cuda")
        step = partial(model.mixed, ids, kv(batch, MIXED_CONTEXT), at, kv(1, computed))
        yield batch, batch * MIXED_CONTEXT, chunk, computed, graph_seconds(step)


def kv(batch: int, tokens: int) -> torch.Tensor:
    """Return KV of contexts, [layers, 2, batch, KV heads, tokens, head]."""
    return torch.randn(LAYERS, 2, batch, KV_HEADS, tokens, HEAD, device="cuda", dtype=torch.bfloat16)


def write(path: Path, columns: Sequence[str], rows: Iterable[Sequence[float]]) -> None:
    """Write a profile."""
    with path.open("w", newline="") as out:
        lines = csv.writer(out, lineterminator="\n")
        lines.writerow(columns)
        for row in rows:
            lines.writerow([f"{cell:.6f}" if isinstance(cell, float) else cell for cell in row])


@torch.inference_mode()  # type: ignore[untyped-decorator]
def main() -> None:
    """Measure, and write the profiles."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--eager", action="store_true", help="without torch.compile")
    given = options.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    model = Model(not given.eager)
    alone = ((tokens, took_s) for _, tokens, took_s in prompts(model, ((1, tokens) for tokens in PROMPTS)))
    write(given.out / "prompts.csv", ("tokens", "seconds"), alone)
    write(given.out / "shared-steps.csv", ("prompts", "prompt_tokens", "seconds"), prompts(model, SHARED))
    write(given.out / "decode.csv", ("batch", "context_tokens", "seconds"), decodes(model))
    columns = ("batch", "context_tokens", "chunk_tokens", "computed_tokens", "seconds")
    write(given.out / "mixed-steps.csv", columns, mixed(model))
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    product_s = seconds(lambda: a @ a)
    large = torch.empty(2**32, device="cuda", dtype=torch.uint8)
    copy_s = seconds(lambda: large[: 2**31].copy_(large[2**31 :]))
    reached = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "compiled": not given.eager}
    reached |= {"matmul_tflops": 2 * 8192**3 / product_s / 1e12, "copy_gb_per_s": 2**32 / copy_s / 1e9}
    (given.out / "gpu.json").write_text(json.dumps(reached, indent=1) + "\n")


if __name__ == "__main__":
    main()
