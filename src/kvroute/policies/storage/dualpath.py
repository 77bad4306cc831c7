"""Settings of DualPath's scheduling; each step can be switched off, so an ablation is a list of settings."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from kvroute.types import InputError

ReadSide = Literal["none", "prefill", "alternating", "shorter", "split"]
"""Which side reads a request's cached KV: none (it is there already), the prefill node, prefill and decode node in
turn, the node with the shorter storage queue, or both, each a part."""


class DualPathSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Which steps of DualPath are in use. Raises InputError for a number out of range."""

    layerwise: bool = True
    """Whether the KV of one layer at a time is in the memory of prefill GPUs, copied while the previous layer computes.
    Otherwise whole requests are loaded before they are computed."""
    reads: ReadSide = "shorter"
    scheduling: bool = True
    """Whether engines are chosen by load (DualPath 6.1); otherwise in turn."""
    quota_s: float | None = 0.3
    """Maximum attention time of a forward pass (DualPath 6.2); None: `forward_tokens` is the only limit."""
    forward_tokens: int = 8192
    """Maximum tokens that a GPU computes in one forward pass."""
    alpha_s: float = 3.0
    """Longest storage queue that counts as short, in seconds of reading."""
    beta_s: float = 5.0
    """Work of a prefill GPU above which it takes no more requests, in seconds."""
    fetch_s: float = 0.02
    """Time between two requests for work of an engine group, in seconds."""

    def __post_init__(self) -> None:
        for name, value in (("alpha_s", self.alpha_s), ("beta_s", self.beta_s), ("fetch_s", self.fetch_s)):
            if not 0 < value < math.inf:
                raise InputError(f"{value} s", where=name, hint="give finite seconds above 0")
        if self.quota_s is not None and not 0 < self.quota_s < math.inf:
            raise InputError(f"{self.quota_s} s", where="quota_s", hint="give finite seconds above 0, or null")
        if self.forward_tokens < 1:
            raise InputError(f"{self.forward_tokens} tokens", where="forward_tokens", hint="give 1 or more")


_BASIC = DualPathSpec(layerwise=False, reads="prefill", scheduling=False, quota_s=None)
_LAYERWISE = msgspec.structs.replace(_BASIC, layerwise=True)
_DUAL_PATH = msgspec.structs.replace(_LAYERWISE, reads="alternating")
_SCHEDULING = DualPathSpec()
ABLATION: dict[str, DualPathSpec] = {
    "basic": _BASIC,
    "layerwise": _LAYERWISE,
    "dual-path": _DUAL_PATH,
    "scheduling": _SCHEDULING,
    "split-reads": msgspec.structs.replace(_SCHEDULING, reads="split"),
    "oracle": msgspec.structs.replace(_SCHEDULING, reads="none"),
}
"""DualPath's ablation (figure 12) and split reads, its future work; each adds a step to the one before. `oracle` needs
no reads and no transfers."""
