"""vLLM's device communicator whose tensor-parallel groups reduce by the scheme of the settings; `plugin` registers it.

It wraps the device communicator of vLLM's platform. All other collectives stay as they are, but for shared memory
between CPU ranks: it cannot cross servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvroute_engine.all_reduce import plugin
from kvroute_engine.all_reduce.settings import reachable, settings_from_environment
from kvroute_engine.all_reduce.torch_groups import Group, TorchAllReduce, counters_of

import torch  # type: ignore[import-not-found]  # isort: skip
import torch.distributed as dist  # type: ignore[import-not-found]  # isort: skip
from vllm.logger import init_logger  # type: ignore[import-not-found]  # isort: skip
from vllm.utils.network_utils import get_ip  # type: ignore[import-not-found]  # isort: skip
from vllm.utils.import_utils import resolve_obj_by_qualname  # type: ignore[import-not-found]  # isort: skip

init_logger("kvroute")  # vLLM prints only the log lines of its own loggers


def communicator_of(platforms: type) -> type:
    """Return a communicator class that reduces by the settings in tensor-parallel groups, and else as `platforms`."""

    class KvrouteCommunicator(platforms):  # type: ignore[misc]
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self._sums: TorchAllReduce | None = None
            if self.unique_name.startswith("tp") and self.world_size > 1:
                self._sums = self._build()

        def _build(self) -> TorchAllReduce | None:
            settings = settings_from_environment(self.world_size)
            if settings is None:
                return None
            settings = reachable(settings, get_ip())
            if hasattr(self, "dist_module"):
                self.dist_module, self.supports_tensor_dict = dist, False

            def make_group(members: Sequence[int], name: str) -> Group:
                ranks = [self.ranks[member] for member in members]
                return dist.new_group(ranks, backend="gloo", use_local_synchronization=True, group_desc=name)

            def ring(tensor: torch.Tensor) -> None:
                tensor.copy_(super(KvrouteCommunicator, self).all_reduce(tensor))

            counters = counters_of(settings, self.rank_in_group)
            return TorchAllReduce(
                settings, self.rank_in_group, self.world_size, self.cpu_group, make_group, counters, ring
            )

        def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
            """Return the sum over all ranks, in place on CPUs."""
            if self._sums is None:
                return super().all_reduce(input_)
            total = input_ if input_.device.type == "cpu" else input_.clone()
            self._sums.all_reduce(total)
            return total

    return KvrouteCommunicator


Communicator = communicator_of(resolve_obj_by_qualname(plugin.wrapped_communicator))
"""The class that vLLM creates for each group."""
