"""The `gateway.offload:` section: when a prefill leaves its datacenter, and how instances switch roles.

`policies` defines the parameters and their defaults; this module adds the units, bounds and key names of the
configuration file.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, TypeVar

from msgspec import Meta, Struct, field

from kvroute.policies.fleet.offload import OffloadSpec
from kvroute.policies.fleet.role_switch import LongTerm
from kvroute.policies.fleet.short_term import Rule, ShortTerm
from kvroute.policies.fleet.throughput import Reading
from kvroute.serve.config.field_types import Limit, LimitOrNone, Share, Tokens, Wait, tokens
from kvroute.topology.schema import Entry
from kvroute.types import InputError
from kvroute_engine.files.units import Duration, Quantity

_ENDPOINT = "{endpoint}"
_SHORT, _LONG, _OFFLOAD = ShortTerm(), LongTerm(), OffloadSpec()
"""The defaults are those of the policy."""
Factor = Annotated[float, Meta(gt=0, le=1e6)]
HookUrl = Annotated[
    str, Meta(pattern=r"^(\{endpoint\}|https?://[^\s/?#{}]+)[^\s{}]*\Z", examples=["http://10.0.0.9:8000/role"])
]
EMULATED_HOOK = f"{_ENDPOINT}/emulator/role"


S = TypeVar("S", bound=Struct)


def _built(kind: type[S], section: Entry, **given: object) -> S:
    """Return the policy's form of a section: `given`, and the fields of the same name, without units."""
    same = {name: getattr(section, name) for name in kind.__struct_fields__ if name in section.__struct_fields__}
    plain = {name: float(value) if isinstance(value, Quantity) else value for name, value in same.items()}
    return kind(**(plain | given))


class ShortTermSection(Entry, frozen=True, kw_only=True):
    """Short-term rules: the threshold follows the link, within seconds."""

    enabled: bool = _SHORT.enabled
    utilisation_high: Share = _SHORT.utilisation_high
    utilisation_low: Share = _SHORT.utilisation_low
    queue_high_s: Wait = field(name="queue_high", default=Wait(_SHORT.queue_high_s))
    queue_low_s: Duration = field(name="queue_low", default=Duration(_SHORT.queue_low_s))
    step: Factor = _SHORT.step
    dwell_s: Duration = field(name="dwell", default=Duration(_SHORT.dwell_s))
    remember_s: Duration = field(name="remember", default=Duration(_SHORT.remember_s))
    threshold_min: Tokens = _SHORT.threshold_min_tokens
    threshold_max: Tokens = _SHORT.threshold_max_tokens

    def spec(self) -> ShortTerm:
        """Return the policy's form of the section. Raises InputError for values that contradict each other."""
        return _built(
            ShortTerm,
            self,
            threshold_min_tokens=tokens(self.threshold_min),
            threshold_max_tokens=tokens(self.threshold_max),
        )


class LongTermSection(Entry, frozen=True, kw_only=True):
    """Long-term rules: threshold and roles follow the traffic, within minutes."""

    review_s: Wait = field(name="review", default=Wait(_LONG.review_s))
    window_s: Wait = field(name="window", default=Wait(_LONG.window_s))
    start_requests: Limit = _LONG.start_requests
    requests_min: Limit = _LONG.requests_min
    gain_min: Share = _LONG.gain_min
    threshold_gain_min: Share = _LONG.threshold_gain_min
    reading: Reading = _LONG.reading
    at_once: Limit = _LONG.at_once
    prefill_min: LimitOrNone = _LONG.prefill_min
    decode_min: LimitOrNone = _LONG.decode_min
    busy_above: Share = _LONG.busy_above
    spare_below: Share = _LONG.spare_below
    queue_high_s: Wait = field(name="queue_high", default=Wait(_LONG.queue_high_s))

    def spec(self, *, role_switches: bool) -> LongTerm:
        """Return the policy's form of the section. Raises InputError for values that contradict each other."""
        return _built(LongTerm, self, role_switches=role_switches)


class WanPathSection(Entry, frozen=True, kw_only=True):
    """Conditions under which the path from another datacenter counts as down."""

    failures: Annotated[int, Meta(ge=1, le=10_000)] = 3
    """Consecutive failed KV transfers after which the path is down."""
    open_s: Wait = field(name="open", default=Wait(3.0))
    """Time for which a path that is down is not used; then one request probes it."""
    stalled_after_s: Wait = field(name="stalled_after", default=Wait(2.0))
    """Time without progress of pending data after which the path is down; needs engines that report their
    connections."""


class RoleSwitchSection(Entry, frozen=True, kw_only=True):
    """Hook that switches the role of an engine: a URL or a program, not both."""

    url: HookUrl | None = None
    """URL that receives a POST; `{endpoint}` stands for the instance's own URL."""
    command: Annotated[list[str], Meta(min_length=1)] | None = None
    """Program and arguments; its environment has INSTANCE, ENDPOINT, ROLE and FROM."""
    drain_s: Wait = field(name="drain", default=Wait(120.0))
    """Time limit for earlier requests to finish."""
    timeout_s: Wait = field(name="timeout", default=Wait(600.0))
    """Time limit for the hook to respond or to exit."""
    back_off_s: Wait = field(name="back_off", default=Wait(60.0))
    """Pause of role switches after a failure; it doubles with each further failure, up to 16 times."""


class CopySection(Entry, frozen=True, kw_only=True):
    """Copies of cached prefixes between datacenters; the presence of this section states that the engines support
    them."""

    min: Tokens = 1
    """Minimum number of tokens by which the prefix cached at the other site must be longer."""
    timeout_s: Wait = field(name="timeout", default=Wait(5.0))
    """Time limit for an instance to offer its cached prefix; after it the whole prompt is computed."""


class OffloadSection(Entry, frozen=True, kw_only=True):
    """Prefill across datacenters; the section may be empty."""

    threshold: Tokens | None = None
    """Fixed base threshold; None: searched from the observed traffic."""
    rule: Rule = "scarce"
    scarce_above: Share = _OFFLOAD.scarce_above
    abundant_below: Share = _OFFLOAD.abundant_below
    copy: CopySection | None = None
    """Set if every engine that prefills can send and receive the prefix of a prompt; None: they cannot."""
    layerwise: bool = False
    """Whether KV leaves a prefill-only site while it is computed; False: when it is complete."""
    stay_factor: Factor | None = None
    check_interval_s: Wait = field(name="check_interval", default=Wait(2.0))
    """Longest interval between two updates of the thresholds and two checks whether a review is due."""
    short_term: ShortTermSection = ShortTermSection()
    long_term: LongTermSection = LongTermSection()
    wan_path: WanPathSection = WanPathSection()
    role_switch: RoleSwitchSection | None = None
    """None: roles do not change, and a review only reports what it would change."""

    def spec(self) -> OffloadSpec:
        """Return the core's form of the section.

        Raises:
            InputError: values that contradict each other, or that live engines do not support.
        """
        if self.rule != "scarce" and self.copy is None:
            what = f"`rule: {self.rule}` copies cached prefixes between datacenters, which requires a `copy` section"
            hint = "add `copy: {}` if all prefill engines have kvroute's connector as kv_both, or write `rule: scarce`"
            raise InputError(what, where="offload.rule", hint=hint)
        return _built(
            OffloadSpec,
            self,
            threshold_tokens=None if self.threshold is None else tokens(self.threshold),
            copy_queues=self.copy is not None,
            copy_min_tokens=math.ceil(tokens(self.copy.min)) if self.copy is not None else 1,
            short_term=self.short_term.spec(),
            long_term=self.long_term.spec(role_switches=self.role_switch is not None),
        )

    @property
    def copy_s(self) -> float:
        """Time limit for an instance to offer a prefix; 0: nothing is copied."""
        return float(self.copy.timeout_s) if self.copy is not None and self.rule != "scarce" else 0.0


def written(where: str) -> tuple[str, ...]:
    """Return the key in the file for a field of the policy's settings: `offload.short_term.dwell_s` is `dwell`
    there."""
    parts = re.split(r"[.,]", where)
    return tuple(re.sub(r"_(s|tokens)\Z", "", part) for part in parts if " " not in part)


def hook_url(template: str, endpoint: str) -> str:
    """Return the URL of the hook of one instance."""
    return template.replace(_ENDPOINT, endpoint.rstrip("/"))
