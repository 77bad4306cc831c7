"""What the control core orders."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from kvroute.types.instances import Role
from kvroute.types.snapshots import Terms


class Reject(msgspec.Struct, frozen=True, tag="reject"):
    """No instance can take the request now: normal in operation, hence a value."""

    request_id: int
    reason: str
    terms: Terms | None = None


class Offload(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a prefill is sent to another datacenter or kept at home (PrfaaS 3.4.3)."""

    site: str
    """The datacenter that prefills."""
    reason: str
    """short, long, home_down, away_down, not_worth_it or nobody_up (`policies.offload.Reason`)."""
    terms: dict[str, float] = {}
    """The figures it followed from: tokens, seconds and shares, by name."""


class Prefill(msgspec.Struct, frozen=True, tag="prefill", omit_defaults=True):
    """Compute the request's KV cache on `instance`; `cached_tokens` of it are there already, or will be once
    `copy_tokens` of them have been copied from another site."""

    request_id: int
    instance: str
    cached_tokens: int = 0
    terms: Terms | None = None
    copy_from: str = ""
    """The instance whose cached prefix is copied to this one before the prefill; empty: none is."""
    copy_tokens: int = 0
    copy_bytes: float = 0.0
    copy_id: int = 0
    """Number of that copy, 1 and up; the driver reports CopyFinished, and computes all if it has not landed."""
    offload: Offload | None = None
    """Why it is prefilled in this datacenter, where there is a choice."""


class Shadowed(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the policy in the shadow would have chosen in place of a decode decision."""

    target: str
    """Empty: it would have refused the request."""
    loss_s: float | None = None
    """Seconds that its target costs more by the acting policy's terms; None where those are not in seconds."""
    gain_s: float | None = None
    """Seconds that its target costs less by its own."""


class Decode(msgspec.Struct, frozen=True, tag="decode", omit_defaults=True):
    """Send `kv_bytes` from `source` to `target` and decode there."""

    request_id: int
    source: str
    target: str
    tier: int
    kv_bytes: float
    need_bytes: float
    hit_tokens: int
    terms: Terms | None = None
    shadow: Shadowed | None = None


class Convert(msgspec.Struct, frozen=True, tag="convert"):
    """Drain `instance`, then let it serve `role`; the driver reports InstanceConverted when it does."""

    instance: str
    role: Role
    terms: Terms | None = None


class CopyPrefix(msgspec.Struct, frozen=True, tag="copy"):
    """Send a cached prefix from `source` to `target` as well, ahead of any request and behind every request's bytes;
    the driver reports CopyFinished. Nothing of it counts as cached at the target before all of it is there."""

    copy_id: int
    """1 and up, from one count with the copies of `Prefill`."""
    source: str
    target: str
    blocks: tuple[int, ...]
    """The chain that ends the prefix."""
    block_tokens: int
    kv_bytes: float
    """What the target lacks of it."""
    terms: Terms | None = None
    """Tokens of cached prefixes that were read at each place of late."""


Decision: TypeAlias = Prefill | Decode | Reject | Convert | CopyPrefix
