"""Decisions: outputs of the control core."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from kvroute.types.instances import Role
from kvroute.types.snapshots import Terms


class Reject(msgspec.Struct, frozen=True, tag="reject"):
    """No instance can take the request now. This is normal in operation and therefore a value, not an exception."""

    request_id: int
    reason: str
    terms: Terms | None = None
    ttft_s: float | None = None
    """Predicted time to the first token, if that is longer than `Arrived.ttft_max_s`; None: rejected for another
    reason."""
    least_s: float | None = None
    """The same without waiting for other requests."""


class Offload(msgspec.Struct, frozen=True, omit_defaults=True):
    """Reason for sending a prefill to another datacenter or keeping it in its own (PrfaaS 3.4.3)."""

    site: str
    """Datacenter that computes the prefill."""
    reason: str
    """Reason: short, long, home_down, away_down, not_worth_it or no_instance_up (`policies.fleet.offload.Reason`)."""
    terms: dict[str, float] = {}
    """Values behind the decision, by name: tokens, seconds and shares."""


class Prefill(msgspec.Struct, frozen=True, tag="prefill", omit_defaults=True):
    """Compute the request's KV cache on `instance`.

    `cached_tokens` of it are cached there, including the `copy_tokens` that are first copied from another instance.
    """

    request_id: int
    instance: str
    cached_tokens: int = 0
    terms: Terms | None = None
    copy_from: str = ""
    """Instance whose cached prefix is copied to this one before the prefill; empty: no copy."""
    copy_tokens: int = 0
    copy_bytes: float = 0.0
    copy_id: int = 0
    """Id of that copy, from 1; the driver reports CopyFinished, and computes all tokens if the copy failed."""
    offload: Offload | None = None
    """Reason for the datacenter of the prefill, if there is a choice."""
    ttft_s: float | None = None
    """Predicted time to the first token, in seconds; None: it was not to be predicted."""
    aggregated: Terms | None = None
    """Terms of the instances that could have served the request aggregated, and last of the pair that was preferred to
    them;
    None: there are none."""


class Shadowed(msgspec.Struct, frozen=True, omit_defaults=True):
    """Decode target that the shadow policy would have chosen for the same request."""

    target: str
    """Target instance; empty: the shadow policy would have rejected the request."""
    loss_s: float | None = None
    """Seconds by which its target costs more in the acting policy's terms; None if those are not in seconds."""
    gain_s: float | None = None
    """Seconds by which its target costs less in the shadow policy's terms."""


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
    ttft_s: float | None = None
    """As in `Prefill`, if there is no `Prefill` before this decision."""


class SwitchRole(msgspec.Struct, frozen=True, tag="switch_role"):
    """Drain `instance`, then switch it to `role`; the driver reports RoleSwitched when it serves the new role."""

    instance: str
    role: Role
    terms: Terms | None = None


class CopyPrefix(msgspec.Struct, frozen=True, tag="copy"):
    """Copy a cached prefix from `source` to `target` ahead of any request, with lower priority than requests.

    The driver reports CopyFinished. Until the copy is complete, nothing of it counts as cached at the target.
    """

    copy_id: int
    """Id, from 1; counted together with the copies of `Prefill`."""
    source: str
    target: str
    blocks: tuple[int, ...]
    """Chain of blocks of the prefix."""
    block_tokens: int
    kv_bytes: float
    """Bytes of the prefix that the target lacks."""
    terms: Terms | None = None
    """Tokens of cached prefixes read recently, by instance."""


class ReadKv(msgspec.Struct, frozen=True, tag="read", omit_defaults=True):
    """Read cached KV of a request from the store before its prefill: the read path of DualPath.

    The node of the prefill instance reads the first `prefill_tokens` from `first_token` on, the node of the decode
    instance the next `decode_tokens`. The driver reports ReadFinished for each of the two that reads.
    """

    request_id: int
    read_id: int
    """Id, from 1; a retry of the request gets a new one."""
    prefill_instance: str
    decode_instance: str
    """Instance whose node reads, too; empty: only the prefill node can read."""
    first_token: int
    """Tokens that the prefill instance has in its own memory; reads begin after them."""
    prefill_tokens: int
    decode_tokens: int
    kv_bytes: float
    terms: Terms | None = None
    """Cost of reading everything by each of the two nodes, and the tokens that each reads."""


class Replicas(msgspec.Struct, frozen=True, tag="replicas", kw_only=True):
    """Number of instances that a model should have now. Pairs are of prefill and decode."""

    model: str
    prefill: int
    decode: int
    needed: tuple[int, int]
    """What the traffic needs at this moment; the result also counts what it needed a short time ago."""
    reasons: tuple[str, str]
    """What sets `needed` (`policies.fleet.replicas.Reason`)."""
    serving: tuple[int, int]
    """Instances that serve, or are about to."""
    rate_per_s: float
    """Arrival rate that is expected when an instance ordered now would be ready."""
    attainment: float
    """Predicted share of requests that meet the SLO with the needed instances."""
    terms: Terms | None = None


class ScaleIn(msgspec.Struct, frozen=True, tag="scale_in", kw_only=True):
    """Drain `instance`, then stop it; the driver reports ScaleEnded."""

    instance: str
    model: str
    role: Role
    replicas: int
    """Desired number of instances of this role."""
    terms: Terms | None = None


class ScaleOut(msgspec.Struct, frozen=True, tag="scale_out", kw_only=True):
    """Start `instance`; the driver reports ScaleEnded when it serves, or if it cannot be started."""

    instance: str
    """Empty: start as many new instances as `replicas` needs; no report is due."""
    model: str
    role: Role
    replicas: int
    terms: Terms | None = None


Decision: TypeAlias = Prefill | Decode | ReadKv | Reject | SwitchRole | CopyPrefix | Replicas | ScaleIn | ScaleOut
FleetDecision: TypeAlias = SwitchRole | CopyPrefix | Replicas | ScaleIn | ScaleOut
"""Decisions that belong to no request."""
