"""The models, clusters and assumptions of DualPath's experiments.

The publication gives models, node counts, network and thresholds. It gives no times, so these are assumptions; what
depends on them is in docs/dualpath.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from kvroute.llm import MODELS
from kvroute.llm.compute import Compute, Indexer, Latent, feed_forward, latent_attention
from kvroute.policies.storage.dualpath_kernels import AttentionCost
from kvroute.sim.storage.spec import ServedModel, StorageCluster


class DualPathAssumptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the publication leaves open."""

    gpu_flops: float = 989e12
    """Peak operations per second of a GPU."""
    storage_share: float = 0.9
    """Share of the storage NIC's line rate of 400 Gbps that reads reach."""
    compute_share: float = 0.9
    """Share of the compute NIC's line rate of 400 Gbps that copies reach."""
    hbm_bytes: float = 141e9
    """Memory of a GPU."""
    hbm_share: float = 0.85
    """Share of it for weights and KV cache."""
    layer_s: float = 0.8e-3
    """Time of a layer in a forward pass without tokens: kernel starts and collectives."""
    decode_layer_s: float = 0.4e-3
    """Time of a layer in a decode step with an empty batch."""
    hbm_bytes_per_s: float = 3e12
    """Rate at which a decode step reads the KV cache of its sequences."""


@dataclass(frozen=True, slots=True)
class DualPathProfile:
    """A model of the publication with its deployment (section 7.2, A.2 and A.4)."""

    name: str
    compute: Compute
    layers: int
    kv_bytes: float
    """KV cache of a token, in bytes."""
    weight_bytes: float
    """Weights on each GPU, in bytes."""
    mfu: float
    """Share of the peak that a prefill reaches: an assumption."""
    prefill_nodes: int
    decode_nodes: int
    buffer_bytes: float
    """Memory of a node for KV between storage and GPUs."""
    groups: bool
    """Whether the GPUs of a side form one group (expert parallelism); otherwise each GPU is its own."""


def _compute_of(name: str) -> Compute:
    compute = MODELS[name].compute
    assert compute is not None
    return compute


_DS_27B = Compute(
    (
        latent_attention(30, 2560, 32, Latent(query_rank=None), Indexer(heads=32, dim=64, top_tokens=1024)),
        feed_forward(1, 2560, 12_288),
        feed_forward(29, 2560, 1536 * (6 + 2), experts=72),
    )
)
DUALPATH_PROFILES: Mapping[str, DualPathProfile] = {
    "ds-660b": DualPathProfile(
        "ds-660b", _compute_of("deepseek-v3.2"), 61, 61 * (656 + 132), 671e9 / 16, 0.2, 2, 4, 80e9, True
    ),
    "ds-27b": DualPathProfile("ds-27b", _DS_27B, 30, 30 * (656 + 68), 27e9 / 8, 0.2, 1, 1, 80e9, True),
    "qwen-32b": DualPathProfile(
        "qwen-32b", _compute_of("qwen2.5-32b"), 64, 64 * 8 * 128 * 2 * 2.0, 65e9, 0.4, 1, 2, 320e9, False
    ),
}
"""FP8 weights and the FP8 cache of DeepSeek's kernels; FP16 for Qwen2.5-32B. The dimensions of the 27B model's MLA are
those of the 660B model, without compressed queries."""


def served_model(profile: DualPathProfile, assumed: DualPathAssumptions) -> ServedModel:
    """Return the times and sizes of a model on one GPU."""
    flops = assumed.gpu_flops * profile.mfu
    attention = [sublayer for sublayer in profile.compute.sublayers if sublayer.attended_flop]
    others = [sublayer for sublayer in profile.compute.sublayers if not sublayer.attended_flop]
    room = int((assumed.hbm_bytes * assumed.hbm_share - profile.weight_bytes) / profile.kv_bytes)
    return ServedModel(
        name=profile.name,
        kv_bytes=profile.kv_bytes,
        attention=AttentionCost(
            token_s=sum(2.0 * layers.count * layers.parameters for layers in attention) / flops,
            context_s=sum(layers.count * layers.indexed_flop for layers in attention) / flops,
            attended_s=sum(layers.count * layers.attended_flop for layers in attention) / flops,
            attended_tokens=max(layers.attended_max for layers in attention),
        ),
        dense_token_s=sum(2.0 * layers.count * layers.parameters for layers in others) / flops,
        forward_s=profile.layers * assumed.layer_s,
        step_s=profile.layers * assumed.decode_layer_s,
        sequence_s=32_768 * profile.kv_bytes / assumed.hbm_bytes_per_s,
        prefill_kv_tokens=room,
        decode_kv_tokens=room,
    )


def storage_cluster(
    profile: DualPathProfile, assumed: DualPathAssumptions, prefill_nodes: int, decode_nodes: int
) -> StorageCluster:
    """Return a cluster with this many nodes of 8 GPUs; groups have the size that they have in the publication."""
    gpus = 8
    return StorageCluster(
        prefill_nodes=prefill_nodes,
        decode_nodes=decode_nodes,
        gpus=gpus,
        prefill_group=_group(profile.prefill_nodes, prefill_nodes) * gpus if profile.groups else 1,
        decode_group=_group(profile.decode_nodes, decode_nodes) * gpus if profile.groups else gpus,
        storage_bytes_per_s=50e9 * assumed.storage_share,
        compute_bytes_per_s=50e9 * assumed.compute_share,
        buffer_bytes=profile.buffer_bytes,
    )


def _group(published: int, nodes: int) -> int:
    """Return the nodes of a group: as published, or a divisor if there are other numbers of nodes."""
    return published if nodes % published == 0 else 1
