"""LoRA adapters of one emulated engine: a few slots, and the time to load an adapter that is in none of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence


class LoraSlots:
    """Adapters in the engine's memory; the one that was used longest ago makes room."""

    def __init__(self, load_s: Mapping[str, float] | None = None, slots: int = 4) -> None:
        """Args: `load_s`: seconds that loading takes, by name of each adapter; None: there are none."""
        self.load_s, self.slots = load_s or {}, slots
        self._loaded: dict[str, None] = {}
        self.loads = 0
        """Number of loads since the start."""

    def use(self, adapter: str) -> float:
        """Use an adapter (empty: none); return the seconds that it takes to load."""
        if not adapter:
            return 0.0
        seconds = 0.0
        if adapter not in self._loaded:
            self.loads += 1
            seconds = self.load_s[adapter]
            while len(self._loaded) >= self.slots:
                del self._loaded[next(iter(self._loaded))]
        self._loaded.pop(adapter, None)
        self._loaded[adapter] = None
        return seconds


def adapter_lines(slots: LoraSlots, in_use: tuple[Sequence[str], Sequence[str]]) -> bytes:
    """Return vLLM's sample about adapters. Args: `in_use`: those of running and of waiting requests."""
    running, waiting = (",".join(names) for names in in_use)
    labels = f'max_lora="{slots.slots}",running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"'
    return (
        "# TYPE vllm:lora_requests_info gauge\n"
        f"vllm:lora_requests_info{{{labels}}} {time.time()!r}\n"
        "# TYPE kvroute:adapter_loads counter\n"
        f"kvroute:adapter_loads_total {float(slots.loads)!r}\n"
    ).encode()


def distinct(adapters: list[str]) -> list[str]:
    """Return each name once, in their order, without empty ones."""
    return list(dict.fromkeys(filter(None, adapters)))
