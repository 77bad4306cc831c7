"""All-reduces of PyTorch tensors with the scheme of settings or table: rings by the backend's groups, or the switch."""

from __future__ import annotations

import atexit
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from kvroute_engine.all_reduce.channel import new_key
from kvroute_engine.all_reduce.counters import AllReduceCounters
from kvroute_engine.all_reduce.peers import Operations, RankPeers
from kvroute_engine.all_reduce.rules import HIERARCHICAL, SWITCHED, GroupRules, LiveScheme
from kvroute_engine.all_reduce.settings import Settings, local_ranks
from kvroute_engine.all_reduce.switched import SwitchedSums
from kvroute_engine.all_reduce.table import EARLY, RuleTable, packed, start_table, unpacked
from kvroute_engine.errors import InputError
from kvroute_engine.switch import AggregationClient, is_answering

try:
    import torch  # type: ignore[import-not-found]
    import torch.distributed as dist  # type: ignore[import-not-found]
except ModuleNotFoundError as error:
    raise ImportError("kvroute_engine.all_reduce needs PyTorch, which is not installed here") from error

Group: TypeAlias = Any
"""A torch.distributed.ProcessGroup."""
MakeGroup: TypeAlias = Callable[[Sequence[int], str], Group]
"""Creates a process group of some ranks of the group, by a name; called by exactly these ranks."""
_JOBS = 128
"""Jobs at the switch for each group: for both schemes one for each rank of a server. The last one never exists."""
_PROBE_S = 0.2


_RING = GroupRules(())
"""Rules of tensors that are not summed by the table."""


class _Started:
    """Operations that the host has started; those on a GPU end later. Limits how many have not ended, because ranks
    change their rules together only if none is far ahead of rank 0."""

    def __init__(self) -> None:
        self._events: deque[Any] = deque()

    def add(self, device: torch.device) -> None:
        """Take note that an operation was started; on a CPU it has ended."""
        event = None
        if device.type != "cpu":
            event = torch.Event(device)
            event.record()
        self._events.append(event)

    def wait(self) -> None:
        """Wait until another operation may be started."""
        if len(self._events) > EARLY:
            event = self._events.popleft()
            if event is not None:
                event.synchronize()


def _is_captured(tensor: torch.Tensor) -> bool:
    """Return whether a CUDA graph is captured. It repeats its operations without this module, so they take the ring."""
    return tensor.device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())


@dataclass
class TorchAllReduce:
    """One rank of a tensor-parallel group. All ranks reduce tensors of the same sizes in the same order.

    Tensors on a GPU go through host memory.
    """

    settings: Settings
    rank: int
    ranks: int
    whole: Group
    """Process group of all ranks for tensors in host memory."""
    make_group: MakeGroup
    counters: AllReduceCounters
    ring: Callable[[torch.Tensor], None] | None = None
    """The backend's own all-reduce, in place; None: that of `whole`."""
    _local: Group = None
    _across: Group = None
    _switches: dict[LiveScheme, SwitchedSums] = field(default_factory=dict)
    _table: RuleTable = field(init=False)
    _started: _Started = field(init=False)

    def __post_init__(self) -> None:
        used = self.settings.prepared
        if used & HIERARCHICAL:
            server, position = local_ranks(self.settings.ranks_per_server, self.rank)
            self._local = self.make_group(server, f"server-{server.start}") if len(server) > 1 else None
            self._across = self.make_group(position, f"position-{position.start}") if len(position) > 1 else None
        first_job = _JOBS * self.settings.job
        if "ina" in used and self.ranks > 1:
            self._switches["ina"] = self._join(self.whole, range(self.ranks), first_job)
        if "hierarchical-ina" in used and self._across is not None:
            job = first_job + 1 + position.start
            self._switches["hierarchical-ina"] = self._join(self._across, position, job)

        def exchange(own: bytes) -> list[bytes]:
            return _exchange(self.whole, own, self.ranks)

        def alive() -> bool:
            try:
                return is_answering(self.settings.switch_address, first_job + _JOBS - 1, _PROBE_S)
            except (InputError, OSError):
                return False

        self._table = start_table(self.settings, self.rank, self.ranks, exchange, alive, self.counters)
        self._started = _Started()
        atexit.register(self.close)

    def close(self) -> None:
        """Leave the switch, so that it frees the group's slots at once, and the table."""
        self._table.close()
        for sums in self._switches.values():
            sums.close()

    def _join(self, group: Group, members: range, job: int) -> SwitchedSums:
        """Connect the members to the switch and to each other."""
        settings, operations = self.settings, Operations()
        number = members.index(self.rank)
        client = AggregationClient(settings.switch_address, job, number, len(members), settings.slots)
        key = _exchange(group, new_key(), len(members))[0]
        peers = RankPeers(operations, settings.host, key)
        addresses = [unpacked(address) for address in _exchange(group, packed(peers.address), len(members))]
        peers.connect([address for at, address in enumerate(addresses) if at != number])
        return SwitchedSums(client, operations, peers, float(settings.timeout))

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by the sum over all ranks. All ranks get the same bits."""
        nbytes = tensor.numel() * tensor.element_size()
        if tensor.is_floating_point() and nbytes and self.ranks > 1 and not _is_captured(tensor):
            rules = self._begin()
        else:
            rules = _RING
        scheme = rules.scheme_of(nbytes)
        done = self._reduce(scheme, tensor, rules.generation)
        if rules is not _RING and self.settings.agent:
            self._started.add(tensor.device)
        self.counters.add(done, nbytes)
        if done != scheme:
            self._fell_back(scheme, done, rules.generation)

    def _begin(self) -> GroupRules:
        """Return the rules of the next operation. All ranks get the same ones."""
        self._started.wait()
        rules = self._table.next()
        if self.counters.table_version is not None:
            self.counters.table_version = rules.version
        return rules

    def _fell_back(self, scheme: LiveScheme, done: LiveScheme, generation: int) -> None:
        sums = self._switches.get(scheme)
        why = "there is one server" if sums is None else str(sums.failure)
        first = self.counters.fell_back(scheme, done, why, generation)
        if first and sums is not None:
            self._table.failed(generation)

    def _reduce(self, scheme: LiveScheme, tensor: torch.Tensor, generation: int) -> LiveScheme:
        """Reduce with a scheme; return the one that was used in the end."""
        if scheme != "ring":
            host = tensor.detach().to("cpu")
            hierarchical = scheme in HIERARCHICAL
            done = self._hierarchical(scheme, host, generation) if hierarchical else self._flat(host, generation)
            if done != "ring":
                tensor.copy_(host)
                return done
        if self.ring is not None:
            self.ring(tensor)
        else:
            _sum(self.whole, tensor)
        return "ring"

    def _flat(self, tensor: torch.Tensor, generation: int) -> LiveScheme:
        return "ina" if self._through_switch("ina", tensor, generation) else "ring"

    def _hierarchical(self, scheme: LiveScheme, tensor: torch.Tensor, generation: int) -> LiveScheme:
        """Sum a shard of the tensor on each rank of a server, then over the servers, and gather the shards."""
        shard, flat = tensor, tensor
        if self._local is not None:
            ranks = self._local.size()
            flat = torch.zeros(-(-tensor.numel() // ranks) * ranks, dtype=tensor.dtype, device=tensor.device)
            flat[: tensor.numel()] = tensor.reshape(-1)
            shard = torch.empty(flat.numel() // ranks, dtype=tensor.dtype, device=tensor.device)
            self._local._reduce_scatter_base(shard, flat, dist.ReduceScatterOptions()).wait()
        done = scheme
        if self._across is not None and not (scheme in SWITCHED and self._through_switch(scheme, shard, generation)):
            _sum(self._across, shard)
            done = "hierarchical-ring"
        if self._local is not None:
            self._local._allgather_base(flat, shard).wait()
            tensor.copy_(flat[: tensor.numel()].reshape(tensor.shape))
        return done

    def _through_switch(self, scheme: LiveScheme, tensor: torch.Tensor, generation: int) -> bool:
        """Sum through the switch; return False if the group must do it in another way."""
        sums = self._switches.get(scheme)
        if sums is None:
            return False
        values = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).contiguous().numpy()
        total = sums.all_reduce(values, generation)
        if total is None:
            return False
        tensor.copy_(torch.from_numpy(np.ascontiguousarray(total)).reshape(tensor.shape))
        return True


def _sum(group: Group, tensor: torch.Tensor) -> None:
    group.allreduce([tensor], dist.AllreduceOptions()).wait()


def _exchange(group: Group, own: bytes, ranks: int) -> list[bytes]:
    """Return the bytes of every member of a group, in the order of their ranks; all have the same length."""
    device = torch.device("cpu")
    given = torch.tensor(list(own), dtype=torch.uint8, device=device)
    gathered = torch.empty(ranks * len(own), dtype=torch.uint8, device=device)
    group._allgather_base(gathered, given).wait()
    return [bytes(row.tolist()) for row in gathered.reshape(ranks, -1)]


def counters_of(settings: Settings, rank: int) -> AllReduceCounters:
    """Return the counters of a rank, with their file if the settings name one."""
    path = settings.metrics.replace("{rank}", str(rank))
    return AllReduceCounters(rank, Path(path) if path else None)
