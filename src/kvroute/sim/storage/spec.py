"""The cluster, the model and the agents of a simulation of KV reads from storage."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kvroute.policies.storage.dualpath import DualPathSpec
from kvroute.policies.storage.dualpath_kernels import AttentionCost
from kvroute.sim.workload.trajectories import Trajectories
from kvroute.types import FloatArray, InputError, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageCluster:
    """Prefill and decode nodes, each with one storage NIC; each GPU has a compute NIC and is an engine."""

    prefill_nodes: int
    decode_nodes: int
    gpus: int = 8
    """GPUs of a node."""
    prefill_group: int = 8
    """GPUs of a prefill group, which computes each forward pass together."""
    decode_group: int = 8
    """GPUs of a decode group, which asks for work together."""
    storage_bytes_per_s: float = 50e9
    """Read bandwidth that the storage NIC of a node reaches."""
    compute_bytes_per_s: float = 50e9
    """Bandwidth of a GPU's compute NIC in each direction."""
    buffer_bytes: float = 80e9
    """Memory of a node in which KV waits on its way between storage and GPUs."""

    def __post_init__(self) -> None:
        """Raises InputError for a number out of range."""
        for name in ("prefill_nodes", "decode_nodes", "gpus", "prefill_group", "decode_group"):
            if getattr(self, name) < 1:
                raise InputError(f"{getattr(self, name)}", where=name, hint="give 1 or more")
        for name in ("storage_bytes_per_s", "compute_bytes_per_s", "buffer_bytes"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{getattr(self, name)}", where=name, hint="give a finite number above 0")
        for nodes, group in (("prefill_nodes", "prefill_group"), ("decode_nodes", "decode_group")):
            if getattr(self, nodes) * self.gpus % getattr(self, group):
                what = (
                    f"{getattr(self, nodes) * self.gpus} GPUs cannot be divided into groups of {getattr(self, group)}"
                )
                raise InputError(what, where=group, hint="give a divisor of the number of GPUs")

    @property
    def nodes(self) -> int:
        """Prefill and decode nodes, in this order."""
        return self.prefill_nodes + self.decode_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Sizes and times of one model on one GPU of its parallel configuration."""

    name: str
    kv_bytes: float
    """KV cache of a token, in bytes."""
    attention: AttentionCost
    dense_token_s: float
    """Time of all other layers per computed token, in seconds."""
    forward_s: float
    """Time of a forward pass without tokens, in seconds."""
    step_s: float
    """Time of a decode step of an empty batch, in seconds."""
    sequence_s: float
    """Time that each sequence adds to a decode step, in seconds."""
    prefill_kv_tokens: int
    """KV memory of a prefill GPU, in tokens."""
    decode_kv_tokens: int
    """KV memory of a decode GPU, in tokens."""
    sequences_max: int = 512
    """Maximum decode batch of a GPU."""
    block_tokens: int = 64
    """Tokens of a block in storage; only whole blocks are written and read."""

    def prefill_s(self, cached: int, new: int) -> float:
        """Return the time that a GPU computes `new` tokens after `cached` ones, without the time of a forward pass
        itself, in seconds."""
        tokens, context, attended, most = self.attention
        dense = min(max(most - cached, 0.0), new)
        selected = dense * (cached + 0.5 * dense) + ((new - dense) * most if new > dense else 0.0)
        return new * (tokens + self.dense_token_s + (cached + 0.5 * new) * context) + selected * attended


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRun:
    """What is simulated: agents that follow trajectories turn by turn."""

    cluster: StorageCluster
    model: ServedModel
    policy: DualPathSpec
    trajectories: Trajectories
    trajectory: IntArray
    """Trajectory of each agent, [agents]."""
    start_s: FloatArray
    """Start of each agent, in seconds, [agents]."""
    end_s: float = field(default=math.inf)
    """End of the simulation; turns that have not ended by then do not count."""
    window_s: float = 1.0
    """Window of the balance of storage NICs."""

    def __post_init__(self) -> None:
        """Raises InputError if the largest request fits in no buffer or GPU."""
        if len(self.trajectory) != len(self.start_s):
            raise InputError("the two arrays differ in length", where="start_s", hint="give one start for each agent")
        longest = self.trajectories.longest_tokens
        if longest * self.model.kv_bytes > self.cluster.buffer_bytes:
            what = f"the longest request has {longest * self.model.kv_bytes / 1e9:.1f} GB of KV"
            raise InputError(what, where="buffer_bytes", hint="give more than that")
        for name in ("prefill_kv_tokens", "decode_kv_tokens"):
            if longest > getattr(self.model, name):
                what = f"the longest request has {longest} tokens, more than fit in a GPU"
                raise InputError(what, where=name, hint="give shorter trajectories or more memory")
