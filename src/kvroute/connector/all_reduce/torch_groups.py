"""All-reduces of PyTorch tensors with the scheme of the settings: rings by the backend's own groups, or the switch."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from kvroute.connector.all_reduce.counters import Counters
from kvroute.connector.all_reduce.peers import Address, Operations, Peers, new_key, own_host
from kvroute.connector.all_reduce.settings import HIERARCHICAL, SWITCHED, LiveScheme, Settings, local_ranks
from kvroute.connector.all_reduce.switched import SwitchedSums
from kvroute.switch import AggregationClient

try:
    import torch  # type: ignore[import-not-found]
    import torch.distributed as dist  # type: ignore[import-not-found]
except ModuleNotFoundError as error:
    raise ImportError("kvroute.connector.all_reduce needs PyTorch, which is not installed here") from error

Group: TypeAlias = Any
"""A torch.distributed.ProcessGroup."""
MakeGroup: TypeAlias = Callable[[Sequence[int], str], Group]
"""Creates a process group of some ranks of the group, by a name; called by exactly these ranks."""
_JOBS = 128
"""Jobs at the switch for each group: for both schemes one for each rank of a server."""


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
    counters: Counters
    ring: Callable[[torch.Tensor], None] | None = None
    """The backend's own all-reduce, in place; None: that of `whole`."""
    _local: Group = None
    _across: Group = None
    _switches: dict[LiveScheme, SwitchedSums] = field(default_factory=dict)

    def __post_init__(self) -> None:
        used = sorted({rule.scheme for rule in self.settings.schemes})
        if set(used) & HIERARCHICAL:
            server, position = local_ranks(self.settings.ranks_per_server, self.rank)
            self._local = self.make_group(server, f"server-{server.start}") if len(server) > 1 else None
            self._across = self.make_group(position, f"position-{position.start}") if len(position) > 1 else None
        first_job = _JOBS * self.settings.job
        if "ina" in used and self.ranks > 1:
            self._switches["ina"] = self._join(self.whole, range(self.ranks), first_job)
        if "hierarchical-ina" in used and self._across is not None:
            job = first_job + 1 + position.start
            self._switches["hierarchical-ina"] = self._join(self._across, position, job)

        atexit.register(self.close)

    def close(self) -> None:
        """Leave the switch, so that it frees the group's slots at once."""
        for sums in self._switches.values():
            sums.close()

    def _join(self, group: Group, members: range, job: int) -> SwitchedSums:
        """Connect the members to the switch and to each other."""
        settings, operations = self.settings, Operations()
        number = members.index(self.rank)
        client = AggregationClient(settings.switch_address, job, number, len(members), settings.slots)
        host = settings.host or own_host(settings.switch_address)
        key = _exchange(group, new_key(), len(members))[0]
        peers = Peers(operations, host, key)
        addresses = [_address(each) for each in _exchange(group, _packed(peers.address), len(members))]
        peers.connect([each for at, each in enumerate(addresses) if at != number])
        return SwitchedSums(client, operations, peers, float(settings.timeout))

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by the sum over all ranks. All ranks get the same bits."""
        nbytes = tensor.numel() * tensor.element_size()
        scheme = self.settings.scheme_of(nbytes)
        if not tensor.is_floating_point() or not tensor.numel() or self.ranks == 1:
            scheme = "ring"
        done = self._reduce(scheme, tensor)
        self.counters.add(done, nbytes)
        if done != scheme:
            sums = self._switches.get(scheme)
            self.counters.fell_back(scheme, done, "there is one server" if sums is None else str(sums.failure))

    def _reduce(self, scheme: LiveScheme, tensor: torch.Tensor) -> LiveScheme:
        """Reduce with a scheme; return the one that was used in the end."""
        if scheme != "ring":
            host = tensor.detach().to("cpu")
            done = self._hierarchical(scheme, host) if scheme in HIERARCHICAL else self._flat(host)
            if done != "ring":
                tensor.copy_(host)
                return done
        if self.ring is not None:
            self.ring(tensor)
        else:
            _sum(self.whole, tensor)
        return "ring"

    def _flat(self, tensor: torch.Tensor) -> LiveScheme:
        return "ina" if self._through_switch("ina", tensor) else "ring"

    def _hierarchical(self, scheme: LiveScheme, tensor: torch.Tensor) -> LiveScheme:
        """Sum a shard of the tensor on each rank of a server, then over the servers, and gather the shards."""
        shard, flat = tensor, tensor
        if self._local is not None:
            ranks = self._local.size()
            flat = torch.zeros(-(-tensor.numel() // ranks) * ranks, dtype=tensor.dtype, device=tensor.device)
            flat[: tensor.numel()] = tensor.reshape(-1)
            shard = torch.empty(flat.numel() // ranks, dtype=tensor.dtype, device=tensor.device)
            self._local._reduce_scatter_base(shard, flat, dist.ReduceScatterOptions()).wait()
        done = scheme
        if self._across is not None and not (scheme in SWITCHED and self._through_switch(scheme, shard)):
            _sum(self._across, shard)
            done = "hierarchical-ring"
        if self._local is not None:
            self._local._allgather_base(flat, shard).wait()
            tensor.copy_(flat[: tensor.numel()].reshape(tensor.shape))
        return done

    def _through_switch(self, scheme: LiveScheme, tensor: torch.Tensor) -> bool:
        """Sum through the switch; return False if the group must do it in another way."""
        sums = self._switches.get(scheme)
        if sums is None:
            return False
        values = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).contiguous().numpy()
        total = sums.all_reduce(values)
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
    return [bytes(each.tolist()) for each in gathered.reshape(ranks, -1)]


def counters_of(settings: Settings, rank: int) -> Counters:
    """Return the counters of a rank, with their file if the settings name one."""
    path = settings.metrics.replace("{rank}", str(rank))
    return Counters(rank, Path(path) if path else None)


def _packed(address: Address) -> bytes:
    return f"{address[0]}:{address[1]}".encode().ljust(64)


def _address(packed: bytes) -> Address:
    host, _, port = packed.decode().strip().rpartition(":")
    return host, int(port)
