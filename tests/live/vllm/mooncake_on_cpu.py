"""vLLM's Mooncake connector on a host without accelerator, with faults that tests inject. vLLM loads this module by
`kv_connector_module_path`.

The prefill engine writes the KV cache into the decode engine's memory. The file that `fault_file` of the connector's
options names has the fault while it exists:

- `stall`: the second half of the writes of a request waits until the file is gone; until then a second file with the
  ending `.stalled` shows that the first half has been written;
- `corrupt`: one block of the third layer is written from the place of another block.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import (  # type: ignore[import-not-found]
    mooncake_connector as stock,
)

if not torch.accelerator.is_available():
    # The connector asks for the number of its device, which raises an exception without one.
    torch.accelerator.current_device_index = lambda: 0

# The counts of an interval in which the engine is idle are logged with level DEBUG only.
logging.getLogger("vllm.v1.metrics.loggers").setLevel(logging.DEBUG)
for handler in logging.getLogger("vllm").handlers:
    handler.setLevel(logging.DEBUG)

_DAMAGED_LAYER = 2


class FaultyWorker(stock.MooncakeConnectorWorker):  # type: ignore[misc]
    """The connector's worker with faults in its writes."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._fault_file = Path(options["fault_file"])

    def _send_blocks(self, session: str, sources: list[int], targets: list[int], lengths: list[int]) -> int:
        fault = self._fault()
        if fault == "stall":
            half = len(sources) // 2
            failed: int = super()._send_blocks(session, sources[:half], targets[:half], lengths[:half])
            stalled = self._fault_file.with_suffix(".stalled")
            stalled.touch()
            while self._fault() == "stall":
                time.sleep(0.02)
            stalled.unlink(missing_ok=True)
            return failed or self._send_blocks(session, sources[half:], targets[half:], lengths[half:])
        failed = super()._send_blocks(session, sources, targets, lengths)
        if fault == "corrupt":
            block = self.kv_block_len_per_layer[_DAMAGED_LAYER]
            source, target = sources[_DAMAGED_LAYER] + block, targets[_DAMAGED_LAYER]
            failed = failed or super()._send_blocks(session, [source], [target], [block])
        return failed

    def _fault(self) -> str:
        try:
            return self._fault_file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""


stock.MooncakeConnectorWorker = FaultyWorker
MooncakeConnector = stock.MooncakeConnector
