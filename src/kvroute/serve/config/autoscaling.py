"""The `gateway.autoscaling:` section: SLO, limits and periods, and the hook that starts and stops engines.

`policies.fleet.autoscaling` and `policies.fleet.replicas` define the parameters and their defaults.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from kvroute.policies.fleet.autoscaling import Manages, ScalingSpec
from kvroute.policies.fleet.replicas import REPLICAS_MAX, ReplicaBounds, ReplicaTarget
from kvroute.serve.config.field_types import Share, Wait, Window
from kvroute.serve.config.offload import HookUrl, RoleSwitchSection
from kvroute.topology.schema import Entry

_SPEC, _TARGET = ScalingSpec(), ReplicaTarget()
Replicas = Annotated[int, Meta(ge=1, le=REPLICAS_MAX)]
ShareInside = Annotated[float, Meta(gt=0, lt=1)]


class ReplicaSection(Entry, frozen=True, kw_only=True):
    """Least and largest number of instances of a role, for each model."""

    min: Replicas = 1
    max: Replicas = REPLICAS_MAX

    def bounds(self) -> ReplicaBounds:
        """Return the policy's form."""
        return ReplicaBounds(least=self.min, most=self.max)


class ScaleHookSection(Entry, frozen=True, kw_only=True):
    """Hook that starts and stops engines: a URL or a program, not both."""

    url: HookUrl | None = None
    """URL that receives a POST."""
    command: Annotated[list[str], Meta(min_length=1)] | None = None
    """Program and arguments; its environment has ACTION, INSTANCE, ENDPOINT, MODEL, ROLE and REPLICAS."""
    drain_s: Wait = field(name="drain", default=Wait(600.0))
    """Time limit for earlier requests of an instance that stops."""
    timeout_s: Wait = field(name="timeout", default=Wait(600.0))
    """Time limit for the hook, and after it for a started engine to pass its health check."""
    back_off_s: Wait = field(name="back_off", default=Wait(60.0))
    """Pause after a failure; it doubles with each further failure, up to 16 times."""


class AutoscalingSection(Entry, frozen=True, kw_only=True):
    """How many prefill and decode instances the traffic needs; the section may be empty."""

    ttft_s: Wait = field(name="ttft", default=Wait(_TARGET.ttft_s))
    """SLO of the time to the first token."""
    tpot_s: Wait | None = field(name="tpot", default=None)
    """SLO of the time per output token; None: any."""
    attainment: ShareInside = _TARGET.attainment
    """Share of the requests that must meet both."""
    utilisation: ShareInside = _TARGET.utilisation_max
    """Highest planned utilisation of compute, decode slots, KV memory and network cards."""
    prefill: ReplicaSection = ReplicaSection()
    decode: ReplicaSection = ReplicaSection()
    interval_s: Wait = field(name="interval", default=Wait(15.0))
    """Time between two computations."""
    window_s: Wait = field(name="window", default=Wait(_SPEC.window_s))
    """Length of the observed traffic window."""
    startup_s: Window = field(name="startup", default=Window(_SPEC.startup_s))
    """Time from the order of an instance to its first request; a rising rate is extrapolated so far."""
    scale_in_s: Window = field(name="scale_in", default=Window(_SPEC.scale_in_s))
    """Period without need before an instance is taken away."""
    margin: Share = _SPEC.margin
    """Share by which the rate may rise without need for an instance that has just been taken away."""
    catch_up_s: Wait = field(name="catch_up", default=Wait(_TARGET.catch_up_s))
    """Time within which waiting work is to be done."""
    hook: ScaleHookSection | None = None
    """None: the gateway starts and stops no engines."""
    role_switch: RoleSwitchSection | None = None
    """Set if the number of engines is fixed and they switch between prefill and decode."""

    @property
    def manages(self) -> Manages:
        """What the core decides besides the number of instances."""
        return "instances" if self.hook is not None else "roles" if self.role_switch is not None else "nothing"

    def spec(self) -> ScalingSpec:
        """Return the core's form of the section. Raises InputError for values that contradict each other."""
        target = ReplicaTarget(
            ttft_s=float(self.ttft_s),
            tpot_s=None if self.tpot_s is None else float(self.tpot_s),
            attainment=self.attainment,
            utilisation_max=self.utilisation,
            catch_up_s=float(self.catch_up_s),
            prefill=self.prefill.bounds(),
            decode=self.decode.bounds(),
        )
        return ScalingSpec(
            target=target,
            manages=self.manages,
            window_s=float(self.window_s),
            startup_s=float(self.startup_s),
            scale_in_s=float(self.scale_in_s),
            margin=self.margin,
        )
