"""Status of a `KvRouter`: conditions and counts that the operator writes."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from kvroute.kube.resources.fields import Part


class Condition(Part, frozen=True, kw_only=True):
    """One condition, as in metav1.Condition."""

    type: Annotated[str, Meta(max_length=100)]
    status: Literal["True", "False", "Unknown"]
    reason: Annotated[str, Meta(pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?\Z", max_length=100)]
    """One word for programs."""
    message: Annotated[str, Meta(max_length=2000)]
    """One sentence for people."""
    last_transition_time: Annotated[str, Meta(max_length=40)]
    """Time at which `status` changed."""
    observed_generation: int = 0
    """Generation of the KvRouter to which it applies."""


class EngineCounts(Part, frozen=True, kw_only=True):
    """Ready engine pods by role."""

    prefill: int = 0
    decode: int = 0
    both: int = 0


class KvRouterStatus(Part, frozen=True, kw_only=True):
    """What the operator has observed."""

    observed_generation: int = 0
    ready_replicas: int = 0
    """Gateways that are ready."""
    engines: EngineCounts = EngineCounts()
    labelled_pods: int = 0
    """Engine pods that have a label for every level."""
    conditions: Annotated[list[Condition], Meta(max_length=8)] = field(default_factory=list)
