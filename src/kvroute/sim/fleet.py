"""The engines of a run: their current roles, their KV memory and their role switches.

It has no clock: the caller reports when a request has ended on an instance.
"""

from __future__ import annotations

from collections.abc import Callable

from kvroute import llm
from kvroute.prefix import PrefixIndex
from kvroute.sim.chunked_prompts import ChunkedPrompts
from kvroute.sim.instances import DecodeInstance, KvMemory, PrefillInstance
from kvroute.timing import IterationTime, prefill_time, step_base_s
from kvroute.topology import Cluster
from kvroute.types import InputError, Role


class Fleet:
    """Instances by index in the cluster. `take` and `release` count the requests that occupy an instance: requests in
    prefill or decode there, and requests with a KV transfer from or to it that has not finished."""

    def __init__(self, cluster: Cluster, *, block_tokens: int, prefill_queueing: bool) -> None:
        """Start with idle instances and empty memory.

        Args:
            block_tokens: tokens of one block of KV memory.
            prefill_queueing: prompts wait for each other.

        Raises:
            InputError: instances of several models.
        """
        models = sorted({instance.model for instance in cluster.instances})
        if len(models) > 1:
            hint = "use one cluster file per model"
            what = f"the cluster serves {', '.join(models)}, but a trace does not contain the model of a request"
            raise InputError(what, where=cluster.name, hint=hint)
        self._cluster, self._prefill_queueing = cluster, prefill_queueing
        self.block_tokens = block_tokens
        self.prefill: dict[int, PrefillInstance] = {}
        self.decode: dict[int, DecodeInstance] = {}
        """Instances that have or had the role decode. An instance keeps its `prefill` and `decode` entries over role
        switches."""
        for index, instance in enumerate(cluster.instances):
            self._equip(index, instance.role)
        models_of = [llm.model(instance.model) for instance in cluster.instances]
        self.mixing: set[int] = set()
        """Prefill instances that also decode, and compute prompts beside the steps of their batch."""
        self.layers = [sum(group.count for group in model.layers) for model in models_of]
        self.keeps_states = [bool(model.request_state_bytes) for model in models_of]
        """True for instances whose model has layers that keep a state per request."""
        self.block_bytes = [model.block_bytes(block_tokens) for model in models_of]
        capacity = [
            int(instance.kv_capacity_bytes // size)
            for instance, size in zip(cluster.instances, self.block_bytes, strict=True)
        ]
        self.memory = KvMemory(PrefixIndex(len(capacity), capacity), capacity, [0] * len(capacity))
        self._busy = [0] * len(capacity)
        self._becoming: dict[int, Role] = {}
        self._stopping: set[int] = set()
        self.on_stopped: Callable[[int], None] | None = None
        """Called with an instance that stops when its last request has ended."""
        self.role_switches = 0

    def free_bytes(self, index: int) -> float:
        """KV memory available to a new request, in bytes."""
        return self.memory.free_blocks(index) * self.block_bytes[index]

    def decoding(self, index: int) -> DecodeInstance:
        """The batch of an instance; a prefill instance gets one when it first goes on to decode a request."""
        if index not in self.decode:
            self._equip(index, "decode")
        return self.decode[index]

    def mix(self, index: int) -> None:
        """Let a prefill instance compute further prompts beside its batch, once it has computed those submitted."""
        if index not in self.mixing:
            self.mixing.add(index)
            decode = self.decode[index]
            decode.paused_until_s = max(decode.paused_until_s, self.prefill[index].free_at_s)
            self._set_whole_alone(index, whole=True)

    def _set_whole_alone(self, index: int, *, whole: bool) -> None:
        prompts = self.decode[index].prompts
        assert prompts is not None, "every instance can compute prompts"
        prompts.whole_alone = whole

    def take(self, index: int) -> None:
        """Add one request to an instance."""
        self._busy[index] += 1

    def release(self, index: int) -> bool:
        """Remove one request; return True if this ends the draining of an instance that switches its role."""
        self._busy[index] -= 1
        if index in self._stopping and not self._busy[index] and self.on_stopped is not None:
            self.on_stopped(index)
        return index in self._becoming and not self._busy[index]

    def requests(self, index: int) -> int:
        """Number of requests that occupy an instance."""
        return self._busy[index]

    def stop(self, index: int) -> bool:
        """Drain an instance before it stops; return True if it is idle already."""
        self._stopping.add(index)
        return not self._busy[index]

    def empty(self, index: int) -> None:
        """Clear the cache of a drained instance."""
        assert not self._busy[index], "the instance still has work"
        self._stopping.discard(index)
        self.memory.index.clear(index)

    def drain(self, index: int, role: Role) -> bool:
        """Drain an instance before it switches to `role`; return True if it is idle already."""
        assert role != "both", "an instance of role `both` keeps it"
        fresh = index not in self._becoming
        self._becoming[index] = role
        return fresh and not self._busy[index]

    def switch_role(self, index: int) -> Role:
        """Switch an idle instance to its new role, with an empty cache; return the role."""
        assert not self._busy[index], "the instance still has work"
        role = self._becoming.pop(index)
        self.memory.index.clear(index)
        self._equip(index, role)
        if index in self.mixing:
            self.mixing.remove(index)
            self._set_whole_alone(index, whole=False)
        self.role_switches += 1
        return role

    def _equip(self, index: int, role: Role) -> None:
        instance = self._cluster.instances[index]
        spec = self._cluster.timing[instance.timing]
        if role == "prefill" and index not in self.prefill:
            time = prefill_time(spec.prefill)
            self.prefill[index] = PrefillInstance(index, time, self._prefill_queueing, instance.pp)
        elif role == "decode" and index not in self.decode:
            prompts = ChunkedPrompts(prefill_time(spec.prefill), instance.chunk_tokens, step_base_s(spec))
            time = IterationTime.of(spec.decode)
            self.decode[index] = DecodeInstance(index, time, instance.batch_max, prompts=prompts)
