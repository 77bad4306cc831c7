"""vLLM's NIXL connectors on a host with few cores, with faults that tests inject. vLLM loads this module by
`kv_connector_module_path`.

NIXL's progress thread polls without a pause, which keeps one core of each server busy. Here it polls a thousand times a
second.

With `NixlConnector` the decode engine reads the KV cache from the prefill engine's memory; with `NixlPushConnector` the
prefill engine writes it into that of the decode engine. The file that `fault_file` of the connector's
options names has the fault while it exists:

- `stall`: the second half of a transfer waits until the file is gone; until then a second file with the ending
  `.stalled` shows that the first half has been moved;
- `corrupt`: one block of the third layer is read from the place of another block.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (  # type: ignore[import-not-found]
    base_worker,
    connector,
)

POLL_US = 1_000
_LAYERS = 4
_DAMAGED_LAYER = 2


class FaultyAgent:
    """A NIXL agent with faults in its transfers."""

    def __init__(self, agent: Any, fault_file: Path) -> None:
        self._agent, self._fault_file = agent, fault_file
        self._stalled: dict[Any, Any] = {}
        """The first half of each transfer, by the second half."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def make_prepped_xfer(
        self, operation: str, local: Any, local_ids: Any, remote: Any, remote_ids: Any, **more: Any
    ) -> Any:
        """Prepare a transfer of descriptors, layer by layer."""
        fault = self._fault()
        if fault == "corrupt":
            first = len(remote_ids) // _LAYERS * _DAMAGED_LAYER
            remote_ids = remote_ids.copy()
            # Not exchanged with it: the result of attention does not depend on the order of blocks.
            remote_ids[first] = remote_ids[first + 1]
        if fault != "stall":
            return self._agent.make_prepped_xfer(operation, local, local_ids, remote, remote_ids, **more)
        half = len(remote_ids) // 2
        begun = self._agent.make_prepped_xfer(operation, local, local_ids[:half], remote, remote_ids[:half])
        rest = self._agent.make_prepped_xfer(operation, local, local_ids[half:], remote, remote_ids[half:], **more)
        self._agent.transfer(begun)
        self._stalled[rest] = begun
        return rest

    def transfer(self, handle: Any, *more: Any) -> Any:
        """Begin a transfer, unless it is to wait."""
        return "PROC" if handle in self._stalled else self._agent.transfer(handle, *more)

    def check_xfer_state(self, handle: Any) -> Any:
        """Return the state of a transfer; begin its second half once the fault is over."""
        begun = self._stalled.get(handle)
        if begun is None:
            return self._agent.check_xfer_state(handle)
        mark = self._fault_file.with_suffix(".stalled")
        if self._fault() == "stall":
            if self._agent.check_xfer_state(begun) == "DONE":
                mark.touch()
            return "PROC"
        mark.unlink(missing_ok=True)
        del self._stalled[handle]
        self._agent.release_xfer_handle(begun)
        return self._agent.transfer(handle)

    def _fault(self) -> str:
        try:
            return self._fault_file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""


def with_faults(worker: Any, vllm_config: Any) -> None:
    """Give a worker of the connector such an agent."""
    options = vllm_config.kv_transfer_config.kv_connector_extra_config
    worker.nixl_wrapper = FaultyAgent(worker.nixl_wrapper, Path(options["fault_file"]))


@contextmanager
def on_the_same_cores() -> Iterator[None]:
    """Undo what vLLM's worker does on a CPU: it moves its main thread, which computes the model here, to the last core.
    The workers of all servers would then share this core."""
    cores = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


class FaultyPullWorker(connector.NixlPullConnectorWorker):  # type: ignore[misc]
    """The worker of `NixlConnector` with faults."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        with on_the_same_cores():
            super().__init__(vllm_config, engine_id, kv_cache_config)
        with_faults(self, vllm_config)


class FaultyPushWorker(connector.NixlPushConnectorWorker):  # type: ignore[misc]
    """The worker of `NixlPushConnector` with faults."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        with on_the_same_cores():
            super().__init__(vllm_config, engine_id, kv_cache_config)
        with_faults(self, vllm_config)


def polling_slowly(make: Any, name: str, config: Any) -> Any:
    """Return a NIXL agent whose progress thread pauses. Args: `make`: of the bindings."""
    config.pthrDelay = POLL_US
    return make(name, config)


bindings = sys.modules[base_worker.NixlWrapper.__module__].nixlBind
bindings.nixlAgent = partial(polling_slowly, bindings.nixlAgent)
connector.NixlPullConnectorWorker = FaultyPullWorker
connector.NixlPushConnectorWorker = FaultyPushWorker
NixlConnector, NixlPushConnector = connector.NixlConnector, connector.NixlPushConnector
