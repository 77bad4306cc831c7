"""The engines of a run: which of them prefill and which decode now, their KV memory, and the change of role.

It has no clock: the run says when something is over, and is told when an instance has nothing left to do.
"""

from __future__ import annotations

from kvroute import llm
from kvroute.prefix import PrefixIndex
from kvroute.sim.instances import DecodeInstance, KvMemory, PrefillInstance
from kvroute.timing import IterationTime, prefill_time
from kvroute.topology import Cluster
from kvroute.types import InputError, Role


class Fleet:
    """Instances by index in the cluster. `take` and `give_back` count the requests that each is busy with: computes,
    keeps the KV of until it has left, expects or decodes."""

    def __init__(self, cluster: Cluster, *, block_tokens: int, prefill_queueing: bool) -> None:
        """All idle and empty.

        Args:
            block_tokens: tokens of one block of KV memory.
            prefill_queueing: prompts wait for each other.

        Raises:
            InputError: instances of several models, or of a role that the simulator does not model.
        """
        models = sorted({instance.model for instance in cluster.instances})
        if len(models) > 1:
            mend = "simulate a cluster file for each model"
            what = f"the cluster serves {', '.join(models)}, and a trace does not say which one a request wants"
            raise InputError(what, where=cluster.name, mend=mend)
        self._cluster, self._prefill_queueing = cluster, prefill_queueing
        self.block_tokens = block_tokens
        self.prefill: dict[int, PrefillInstance] = {}
        self.decode: dict[int, DecodeInstance] = {}
        """Those that have prefilled or decoded ever: an instance keeps its other half for when it changes back."""
        for index, instance in enumerate(cluster.instances):
            if instance.role == "both":
                raise InputError(
                    f"instance {instance.name} has role {instance.role!r}, which the simulator does not model",
                    mend="give it the role prefill or decode",
                )
            self._equip(index, instance.role)
        models_of = [llm.model(instance.model) for instance in cluster.instances]
        self.layers = [sum(group.count for group in model.layers) for model in models_of]
        self.keeps_states = [bool(model.request_state_bytes) for model in models_of]
        """Whether the instance's model has layers that keep a state per request."""
        # A model of sliding windows alone keeps nothing per token in the long run: its first block is the measure.
        self.block_bytes = [m.kv_bytes_per_token * block_tokens or float(m.kv_bytes(block_tokens)) for m in models_of]
        capacity = [
            int(instance.kv_capacity_bytes // size)
            for instance, size in zip(cluster.instances, self.block_bytes, strict=True)
        ]
        self.memory = KvMemory(PrefixIndex(len(capacity), capacity), capacity, [0] * len(capacity))
        self._busy = [0] * len(capacity)
        self._becoming: dict[int, Role] = {}
        self.conversions = 0

    def free_bytes(self, index: int) -> float:
        """KV memory that a new request could have there."""
        return self.memory.free_blocks(index) * self.block_bytes[index]

    def take(self, index: int) -> None:
        """One more request has to do with this instance."""
        self._busy[index] += 1

    def give_back(self, index: int) -> bool:
        """One less; whether this ends the draining of an instance that changes its role."""
        self._busy[index] -= 1
        return index in self._becoming and not self._busy[index]

    def drain(self, index: int, role: Role) -> bool:
        """Serve `role` once nothing is left to do; whether that is so already."""
        assert role != "both", "an instance that does both is not modelled"
        fresh = index not in self._becoming
        self._becoming[index] = role
        return fresh and not self._busy[index]

    def convert(self, index: int) -> Role:
        """It starts afresh in its new role, which is returned."""
        assert not self._busy[index], "the instance still has work"
        role = self._becoming.pop(index)
        self.memory.index.clear(index)
        self._equip(index, role)
        self.conversions += 1
        return role

    def _equip(self, index: int, role: Role) -> None:
        instance = self._cluster.instances[index]
        spec = self._cluster.timing[instance.timing]
        if role == "prefill" and index not in self.prefill:
            self.prefill[index] = PrefillInstance(index, prefill_time(spec.prefill), self._prefill_queueing)
        elif role == "decode" and index not in self.decode:
            self.decode[index] = DecodeInstance(index, IterationTime.of(spec.decode), instance.batch_max)
