"""The cells of the matrix in which foresight must never be worse than the policies it replaces, as data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

Oracle = Literal["truthful", "silent", "lying"]
"""Background traffic as reported to the router: the true values every second, nothing, or false values."""
TraceName = Literal["generated", "mooncake", "coding-agent"]
MEASURE_S, WARMUP_S = 45.0, 10.0
_ALL_TIERS = (0.0, 1.0, 1.0, 1.0, 0.0)
"""Tiers with background traffic: NICs, rack uplinks and pod uplinks."""
_UPLINKS = (0.0, 0.0, 1.0, 1.0, 0.0)


@dataclass(frozen=True, slots=True)
class Case:
    """One cell of the matrix: a cluster, its traffic, and the information available to the router."""

    name: str
    axis: str
    """Column of the matrix."""
    reading: str
    changes: tuple[str, ...] = ()
    """Fields of the reading, as `field=value`."""
    profile: str = "rag"
    settings: dict[str, float] = field(default_factory=dict)
    """load, gpus, oversubscription, as in NetKV's experiments."""
    slots: int = 64
    """Size of a decode batch."""
    kv_gb: float = 180.0
    """KV memory of an instance, in GB."""
    background: tuple[float, ...] = (0.0,) * 5
    """Share of each tier's capacity that background traffic uses."""
    burst: tuple[float, ...] = (0.0,) * 5
    burst_every_s: float = 0.0
    oracle: Oracle = "truthful"
    reported: tuple[float, ...] | None = None
    """Values reported by a lying oracle."""
    refresh_s: float = 1.0
    trace: TraceName = "generated"
    warmup_s: float = WARMUP_S
    measure_s: float = MEASURE_S
    ablated: bool = False
    """True if the ablation runs this case without each of the terms."""


FABRICS: dict[str, tuple[str, tuple[str, ...]]] = {
    "paper": ("paper", ("request_set=shifted",)),
    "literal": ("literal", ("request_set=shifted",)),
    "realistic": ("realistic", ()),
    **{
        f"nic{speed}-{ecmp}": (
            "paper",
            (
                "request_set=shifted",
                "nic_scope=instance",
                f"nic_bandwidth={speed} Gbps",
                f"ecmp={ecmp}",
                "rack_uplinks=16",
                "pod_uplinks=32",
            ),
        )
        for speed in (100, 150, 200)
        for ecmp in ("flow", "transfer")
    },
}
"""Reading and changed fields by name. In nic150-flow, every instance has one NIC of 150 Gbps, and each flow of a
transfer draws its own uplink."""


def _case(axis: str, fabric: str, name: str, **more: object) -> Case:
    base, changes = FABRICS[fabric]
    more["changes"] = (*changes, *more.pop("changes", ()))  # type: ignore[misc]
    return Case(name=f"{fabric}/{name}", axis=axis, reading=base, **more)  # type: ignore[arg-type]


def _load() -> list[Case]:
    loads = {
        "paper": (0.5, 1.0, 1.5, 2.0),
        "literal": (0.25, 0.5, 1.0, 2.0),
        "realistic": (0.5, 1.0, 1.2, 1.5),
        "nic100-flow": (0.5, 1.0, 1.5, 2.0),
        "nic100-transfer": (1.0, 2.0),
        "nic150-flow": (1.0, 1.5, 2.0),
        "nic150-transfer": (1.0, 2.0),
        "nic200-flow": (1.0, 1.5, 2.0),
        "nic200-transfer": (1.0, 2.0),
    }
    ablated = {("paper", 1.0), ("literal", 0.5), ("realistic", 1.2), ("nic100-flow", 1.0), ("nic150-flow", 1.5)}
    return [
        _case("load", fabric, f"load={load:g}", settings={"load": load}, ablated=(fabric, load) in ablated)
        for fabric, some in loads.items()
        for load in some
    ]


def _oversubscription() -> list[Case]:
    return [
        _case("oversubscription", fabric, f"{ratio:g}:1", settings={"oversubscription": ratio}, ablated=ratio == 1.0)
        for fabric in ("paper", "nic150-flow")
        for ratio in (1.0, 2.0, 8.0)
    ]


def _share(of: tuple[float, ...], share: float) -> tuple[float, ...]:
    return tuple(share * value for value in of)


def _background() -> list[Case]:
    found = []
    for fabric, shares in (("paper", (0.2, 0.6)), ("nic150-flow", (0.2, 0.4, 0.6)), ("realistic", (0.3,))):
        for share in shares:
            there = _share(_ALL_TIERS, share)
            for oracle in ("truthful", "silent"):
                name = f"background={share:g} {oracle}"
                found.append(_case("background", fabric, name, background=there, oracle=oracle))
    found.append(
        _case(
            "background",
            "nic150-flow",
            "background=0.6 on tier 2 silent",
            background=(0.0, 0.0, 0.6, 0.0, 0.0),
            oracle="silent",
            ablated=True,
        )
    )
    return found


def _lies() -> list[Case]:
    third, second = (0.0, 0.0, 0.0, 0.5, 0.0), (0.0, 0.0, 0.5, 0.0, 0.0)
    reports = {
        "0.5 on tier 3 reported for tier 2": (third, second),
        "0.5 on tier 2 reported for tier 3": (second, third),
        "0.6 reported for tier 2 where none is": ((0.0,) * 5, (0.0, 0.0, 0.6, 0.0, 0.0)),
    }
    return [
        _case("lies", fabric, name, background=there, reported=claimed, oracle="lying")
        for fabric in ("paper", "nic150-flow")
        for name, (there, claimed) in reports.items()
    ]


def _bursts() -> list[Case]:
    found = [
        _case(
            "bursts",
            fabric,
            f"bursts of 0.6 every 3 s {oracle}",
            burst=_share(_UPLINKS, 0.6),
            burst_every_s=3.0,
            oracle=oracle,
            ablated=(fabric, oracle) == ("nic150-flow", "silent"),
        )
        for fabric in ("paper", "nic150-flow", "realistic")
        for oracle in ("truthful", "silent")
    ]
    stale = _case(
        "bursts",
        "paper",
        "bursts of 0.6 every 3 s reported 10 s late",
        burst=_share(_UPLINKS, 0.6),
        burst_every_s=3.0,
        refresh_s=10.0,
        oracle="lying",
    )
    return [*found, stale]


def _prefill() -> list[Case]:
    queueing = ("prefill_queueing=true", "prefill_policy=least-loaded", "capacity=prefill")
    found = [
        _case("prefill", fabric, f"FIFO load={load:g}", changes=queueing, settings={"load": load})
        for fabric, load in (("paper", 1.0), ("nic150-flow", 1.0), ("nic150-flow", 1.2), ("literal", 1.0))
    ]
    pure = _case("prefill", "realistic", "pure delay", changes=("prefill_queueing=false", "prefill_policy=round-robin"))
    cached = _case("prefill", "realistic", "cache-aware prefill", changes=("prefill_policy=cache-aware",))
    return [*found, pure, cached]


def _placement() -> list[Case]:
    return [
        _case(
            "placement",
            fabric,
            f"{placement} load={load:g}",
            changes=(f"placement={placement}",),
            settings={"load": load},
            ablated=(fabric, placement, load) in {("nic100-flow", "node", 1.0), ("paper", "spread", 2.0)},
        )
        for fabric, placement, load in (
            ("paper", "spread", 1.0),
            ("paper", "spread", 2.0),
            ("nic100-flow", "spread", 1.0),
            ("nic100-flow", "spread", 2.0),
            ("literal", "spread", 1.0),
            ("realistic", "spread", 1.0),
            ("paper", "node", 1.0),
            ("nic100-flow", "node", 1.0),
            ("nic150-flow", "node", 1.5),
            ("literal", "node", 0.5),
            ("realistic", "node", 1.0),
        )
    ]


def _slots() -> list[Case]:
    return [
        _case(
            "slots",
            fabric,
            f"slots={slots} load={load:g}",
            slots=slots,
            settings={"load": load},
            ablated=(fabric, slots) in {("paper", 4), ("nic150-flow", 8)},
        )
        for fabric, slots, load in (
            ("paper", 4, 1.0),
            ("paper", 8, 1.0),
            ("paper", 8, 2.0),
            ("paper", 16, 2.0),
            ("nic150-flow", 4, 1.0),
            ("nic150-flow", 8, 1.5),
            ("nic150-flow", 16, 2.0),
            ("realistic", 4, 1.0),
        )
    ]


def _slope() -> list[Case]:
    return [
        _case(
            "slope",
            fabric,
            f"{slope * 1e3:g} ms per request" + (f" {placement}" if placement else ""),
            changes=(f"decode_per_request_s={slope}", *((f"placement={placement}",) if placement else ())),
            ablated=slope == 1e-3 and fabric == "paper",
        )
        for fabric, slope, placement in (
            ("paper", 0.5e-3, ""),
            ("paper", 1e-3, ""),
            ("paper", 1e-3, "spread"),
            ("nic150-flow", 1e-3, ""),
            ("realistic", 1e-3, ""),
        )
    ]


def _memory() -> list[Case]:
    return [
        _case(
            "memory", fabric, f"{kv_gb:g} GB load={load:g}", kv_gb=kv_gb, settings={"load": load}, ablated=kv_gb == 30
        )
        for fabric, kv_gb, load in (
            ("paper", 50.0, 1.0),
            ("paper", 30.0, 1.0),
            ("nic150-flow", 50.0, 1.5),
            ("nic150-flow", 30.0, 1.0),
            ("realistic", 40.0, 1.0),
            ("realistic", 60.0, 1.2),
        )
    ]


def _size() -> list[Case]:
    return [
        _case("size", fabric, f"{gpus} GPUs", settings={"gpus": float(gpus)}, measure_s=measure_s)
        for fabric in ("paper", "nic150-flow", "realistic")
        for gpus, measure_s in ((128, 30.0), (256, 20.0), (512, 9.0), (1024, 8.0))
    ]


def _profiles() -> list[Case]:
    # Chatbot requests arrive so often that longer windows of eight seeds would contain the same requests.
    return [
        _case(
            "profile",
            fabric,
            profile,
            profile=profile,
            measure_s=measure_s,
            ablated=(fabric, profile) == ("nic150-flow", "long-context"),
        )
        for profile, measure_s in (("chatbot", 12.0), ("long-context", MEASURE_S))
        for fabric in ("paper", "nic150-flow", "realistic")
    ]


def _traces() -> list[Case]:
    found = [
        _case("trace", fabric, f"mooncake load={load:g}", trace="mooncake", settings={"load": load}, changes=changes)
        for fabric, load, changes in (
            ("realistic", 0.5, ()),
            ("realistic", 1.0, ()),
            ("realistic", 1.2, ()),
            ("realistic", 1.0, ("nic_scope=instance",)),
            ("paper", 1.0, ("prefixes=trace",)),
        )
    ]
    named = [replace(case, name=f"{case.name} {case.changes[-1]}") for case in found[3:]]
    # The mean prompt has 122,000 tokens, nearly all of them cached; with 256 GPUs, load 0.85 is the recorded rate.
    agents = [
        _case(
            "trace",
            "realistic",
            f"coding-agent load={load:g} {memory}",
            trace="coding-agent",
            profile="long-context",
            changes=("prefill_policy=cache-aware",),
            settings={"load": load, "gpus": 256.0},
            kv_gb=kv_gb,
            warmup_s=120.0,
            measure_s=120.0,
        )
        for load, kv_gb, memory in (
            (0.85, 720.0, "720 GB"),
            (0.4, 720.0, "720 GB"),
            (0.4, 360.0, "360 GB"),
        )
    ]
    return [*found[:3], *named, *agents]


_GROUPS = (
    _load,
    _oversubscription,
    _background,
    _lies,
    _bursts,
    _prefill,
    _placement,
    _slots,
    _slope,
    _memory,
    _size,
    _profiles,
    _traces,
)
CASES: dict[str, Case] = {case.name: case for group in _GROUPS for case in group()}
"""Every cell of the matrix by name, in the order of the axes."""
