"""What foresight had learned at each decision about a request: a log holds the events that taught it and not what they
taught, so that it is replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from kvroute.cli.output import remarks
from kvroute.control import Control, ControlSpec, LogRecord, read_log, same
from kvroute.policies import FORESIGHT_POLICIES, TierLearned
from kvroute.report.grid import UNKNOWN, Entry, Grid, Heading
from kvroute.topology import parse
from kvroute.topology.tree import TIER_NAMES
from kvroute.topology.units import about_bandwidth
from kvroute.types import SAME_POD, Convert, CopyPrefix, InputError


def learned_at(log: Path, request: int, count: int) -> list[tuple[TierLearned, ...] | None]:
    """What was known of each tier right before each of the `count` decisions about a request, in order.

    None where neither the policy nor the one in the shadow is foresight, and, with a remark on stderr, where the log
    does not give these decisions again: then what it would teach is not what it taught.
    """
    header, records = read_log(log)
    found: list[tuple[TierLearned, ...] | None] = []
    if foreseeing(header.spec) is None:
        return [None] * count
    if header.part > 1:
        what = f"{log}: the beginning of the log was removed, so what foresight had learned is not known"
        remarks().print(what, soft_wrap=True, highlight=False)
        return [None] * count
    control = header.spec.build(parse(header.cluster, where=f"cluster in {log}"))
    for record in records:
        told = _told(record, request)
        learned = control.learned(record.event.at) if told else None
        if not _alike(control, record, told):
            file, number = records.place
            what = f"{file}:{number}: this version decides otherwise, so what foresight had learned is not known"
            remarks().print(what, soft_wrap=True, highlight=False)
            break
        found += [learned] * told
        if len(found) == count:
            break
    return found + [None] * (count - len(found))


def _alike(control: Control, record: LogRecord, told: int) -> bool:
    """Whether the event can be, and gives the same decisions again where they are about the request."""
    try:
        again = control.handle(record.event)
    except InputError:
        return False
    return not told or same(record.decisions, again)


def foreseeing(spec: ControlSpec) -> str | None:
    """Which of a log's policies learns; None: neither."""
    return next((name for name in (spec.decode, spec.shadow) if name in FORESIGHT_POLICIES), None)


def learned_plain(spec: ControlSpec, tiers: tuple[TierLearned, ...]) -> dict[str, Any]:
    """As JSON: the cluster's tiers beyond the rack; inside it the NICs decide, and nothing is learned."""
    rows = [{"tier": k, "name": TIER_NAMES[k]} | msgspec.structs.asdict(tier) for k, tier in _far(tiers)]
    return {"policy": foreseeing(spec), "tiers": rows}


def learned_grid(spec: ControlSpec, tiers: tuple[TierLearned, ...]) -> Grid:
    """The same for people; `-`: no transfer has taught the tier, and what it is taken for comes from the others."""
    policy = foreseeing(spec)
    shadow = "" if policy == spec.decode else ", as the shadow policy,"
    rows = tuple(
        (
            Entry(f"{k} ({TIER_NAMES[k]})"),
            Entry(f"{tier.factor:.3f}"),
            Entry(UNKNOWN if tier.bytes_per_s is None else about_bandwidth(tier.bytes_per_s)),
            Entry(f"{tier.transfers:,}"),
            Entry(f"{tier.weight:.1f}"),
            Entry(UNKNOWN if tier.age_s is None else f"{tier.age_s:,.0f} s ago"),
        )
        for k, tier in _far(tiers)
    )
    headings = (
        Heading("tier"),
        Heading("measured / promised"),
        Heading("a lone transfer gets"),
        Heading("transfers measured"),
        Heading("weight", drop=1),
        Heading("last measured", drop=2),
    )
    caption = "Weight: how many recent transfers the average counts; older ones fade." if rows else ""
    return Grid(f"What {policy}{shadow} had learned by then", headings, rows, caption)


def _far(tiers: tuple[TierLearned, ...]) -> list[tuple[int, TierLearned]]:
    return [(k, tier) for k, tier in enumerate(tiers) if k >= SAME_POD and tier.bytes_per_s is not None]


def _told(record: LogRecord, request: int) -> int:
    """Decisions about the request in this record."""
    return sum(
        not isinstance(decision, Convert | CopyPrefix) and decision.request_id == request
        for decision in record.decisions
    )
