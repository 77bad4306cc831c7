"""PyTorch's backend `kvroute`: gloo, with all-reduces by the scheme of the settings.

`import kvroute_engine.all_reduce.backend`, then `torch.distributed.init_process_group("kvroute")`. Sums of floating
point tensors go by the settings of KVROUTE_ALL_REDUCE, all other collectives are gloo's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from kvroute_engine.all_reduce.channel import own_host
from kvroute_engine.all_reduce.settings import Settings, reachable, settings_from_environment
from kvroute_engine.all_reduce.torch_groups import Group, TorchAllReduce, counters_of

import torch  # type: ignore[import-not-found]  # isort: skip
import torch.distributed as dist  # type: ignore[import-not-found]  # isort: skip

NAME = "kvroute"
_GLOO = (
    *("barrier", "broadcast", "reduce", "gather", "scatter", "send", "recv", "recv_anysource"),
    *("allgather", "_allgather_base", "allgather_coalesced", "reduce_scatter", "_reduce_scatter_base"),
    *("alltoall", "alltoall_base", "allreduce_coalesced"),
)
"""Collectives that are gloo's."""


class _Done(dist.Work):  # type: ignore[misc]
    """An operation that is complete."""

    def __init__(self, tensors: list[Any]) -> None:
        super().__init__()
        devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
        self._future = torch.futures.Future(devices=list(devices))
        self._future.set_result(tensors)

    def wait(self, timeout: Any = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def get_future(self) -> Any:
        """Return a future that is done."""
        return self._future


class KvrouteGroup(dist.ProcessGroup):  # type: ignore[misc]
    """A process group whose all-reduces go by the settings."""

    def __init__(self, store: Any, rank: int, ranks: int, timeout: Any) -> None:
        super().__init__(rank, ranks)
        self._gloo = dist.ProcessGroupGloo(store, rank, ranks, timeout)
        settings = reachable(settings_from_environment(ranks) or Settings(), _own_address())

        def make_group(members: Sequence[int], name: str) -> Group:
            at = dist.PrefixStore(f"kvroute/{name}", store)
            return dist.ProcessGroupGloo(at, members.index(rank), len(members), timeout)

        self.counters = counters_of(settings, rank)
        self._sums = TorchAllReduce(settings, rank, ranks, self._gloo, make_group, self.counters)

    def getBackendName(self) -> str:  # noqa: N802  PyTorch's name
        """Return `kvroute`."""
        return NAME

    def allreduce(self, tensors: list[Any], options: Any = None) -> Any:
        """Reduce one tensor in place."""
        options = options or dist.AllreduceOptions()
        if options.reduceOp != dist.ReduceOp.SUM or len(tensors) != 1:
            return self._gloo.allreduce(tensors, options)
        self._sums.all_reduce(tensors[0])
        return _Done(tensors)


def _own_address() -> str:
    """Return the address of this machine on its path to the one that PyTorch's variables name."""
    return own_host((os.environ.get("MASTER_ADDR", "127.0.0.1"), 1))


def _forwarded(name: str) -> Callable[..., Any]:
    """Return a method that calls gloo's; PyTorch finds methods of a process group in its class only."""
    return lambda self, *given, **named: getattr(self._gloo, name)(*given, **named)


for _name in _GLOO:
    setattr(KvrouteGroup, _name, _forwarded(_name))

dist.Backend.register_backend(NAME, KvrouteGroup, devices=["cpu", "cuda"])
