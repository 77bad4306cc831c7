"""Values of engines whose pods do not give them, and the times that prefill and decode take."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta, field

from kvroute.files.units_in_structs import with_units
from kvroute.kube.resources.fields import Part, camel_case
from kvroute.topology import H100_LLAMA_70B_TP4
from kvroute.topology.schema import Count, LinearPrefillEntry
from kvroute.types import DecodeSpec
from kvroute_engine.files.units import Bandwidth, Duration, Size

TimingName: TypeAlias = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?\Z", max_length=63, examples=["default"])
]
"""A name that is also a value of the label `kvroute.io/timing`."""


class EngineDefaults(Part, frozen=True, kw_only=True):
    """Values of engines whose pods do not give them."""

    tp: Count = 1
    """Tensor parallelism."""
    pp: Count = 1
    """Pipeline parallelism."""
    batch_max: Count = 64
    """Requests that decode at the same time."""
    kv_capacity_bytes: Size = field(name="kvCapacity", default=Size(60e9))
    """GPU memory for KV caches, all GPUs of an engine together."""
    cpu_bytes_per_s: Bandwidth = field(name="cpuBandwidth", default=Bandwidth(50e9))
    """Rate at which an engine loads KV from CPU memory."""
    disk_bytes_per_s: Bandwidth = field(name="diskBandwidth", default=Bandwidth(5e9))
    """Rate at which an engine loads KV from storage of its own."""
    timing: TimingName = "default"
    """Name of one of `timing`."""


class RouterPrefillTime(Part, frozen=True, kw_only=True):
    """Time of a prefill: `linear` is base + perToken * tokens, `quadratic` adds perToken2 * tokens^2, and `piecewise`
    connects measured points by straight lines."""

    kind: Literal["linear", "quadratic", "piecewise"] = "linear"
    base_s: Duration = field(name="base", default=Duration(0.0))
    per_token_s: Duration | None = field(name="perToken", default=None)
    per_token2_s: Duration | None = field(name="perToken2", default=None)
    tokens: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=64)] = field(default_factory=list)
    """Numbers of tokens of the measured points, ascending."""
    times_s: Annotated[list[Duration], Meta(max_length=64)] = field(name="times", default_factory=list)
    """The measured time for each of `tokens`."""

    def missing(self) -> str:
        """Return the field that this kind needs and that is not given; empty: none is missing."""
        if self.kind == "piecewise":
            complete = len(self.tokens) > 1 and len(self.tokens) == len(self.times_s)
            return "" if complete else "two or more tokens, and one of times for each"
        if self.per_token_s is None:
            return "perToken"
        return "perToken2" if self.kind == "quadratic" and self.per_token2_s is None else ""


@with_units(camel_case)
class DecodeTime(DecodeSpec, Part, frozen=True, kw_only=True):
    """Time of one decode iteration: base + perRequest * batch + perContextToken * all context tokens of the batch."""


class EngineTiming(Part, frozen=True, kw_only=True):
    """Computing times of an engine; `kvroute timing fit` finds them from a profile."""

    prefill: RouterPrefillTime
    decode: DecodeTime


def typical_timing() -> dict[TimingName, EngineTiming]:
    """Return the timing of KvRouters that give none: a model of 70 billion parameters on four GPUs."""
    prefill = H100_LLAMA_70B_TP4.prefill
    assert isinstance(prefill, LinearPrefillEntry)
    return {
        "default": EngineTiming(
            prefill=RouterPrefillTime(base_s=Duration(prefill.base_s), per_token_s=Duration(prefill.per_token_s)),
            decode=DecodeTime(**msgspec.structs.asdict(H100_LLAMA_70B_TP4.decode)),
        )
    }
