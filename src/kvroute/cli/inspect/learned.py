"""State that foresight had learned at each decision about a request. A log holds only the events, so it is replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from kvroute.cli.output import remarks
from kvroute.control import Control, ControlSpec, LogRecord, decisions_equal
from kvroute.control.log import read_log
from kvroute.policies import FORESIGHT_POLICIES, TierLearned
from kvroute.report.grid import UNKNOWN, Grid, GridEntry, Heading
from kvroute.topology import parse
from kvroute.topology.tree import TIER_NAMES
from kvroute.types import SAME_RACK, FleetDecision, InputError
from kvroute_engine.files.units import about_bandwidth


def learned_at(log: Path, request: int, count: int) -> list[tuple[TierLearned, ...] | None]:
    """Return the state of each tier right before each of the `count` decisions about a request, in order.

    The state is None if neither the policy nor the shadow policy is foresight. It is also None, with a remark on
    stderr, if a replay does not reproduce the decisions, because the replayed state then differs from the original one.
    """
    header, records = read_log(log)
    found: list[tuple[TierLearned, ...] | None] = []
    if foreseeing(header.spec) is None:
        return [None] * count
    if header.part > 1:
        what = f"{log}: the beginning of the log is missing, so the state that foresight had learned is unknown"
        remarks().print(what, soft_wrap=True, highlight=False)
        return [None] * count
    control = header.spec.build(parse(header.cluster, where=f"cluster in {log}"))
    for record in records:
        about_request = _decisions_about(record, request)
        learned = control.learned(record.event.at) if about_request else None
        if not _alike(control, record, about_request):
            file, number = records.place
            what = (
                f"{file}:{number}: this version decides differently, so the state that foresight had learned is unknown"
            )
            remarks().print(what, soft_wrap=True, highlight=False)
            break
        found += [learned] * about_request
        if len(found) == count:
            break
    return found + [None] * (count - len(found))


def _alike(control: Control, record: LogRecord, about_request: int) -> bool:
    """Handle the event again; return False if that fails, or if decisions about the request differ from the record."""
    try:
        again = control.handle(record.event)
    except InputError:
        return False
    return not about_request or decisions_equal(record.decisions, again)


def foreseeing(spec: ControlSpec) -> str | None:
    """Return the name of the log's policy or shadow policy that learns; None if neither does."""
    return next((name for name in (spec.decode, spec.shadow) if name in FORESIGHT_POLICIES), None)


def learned_plain(spec: ControlSpec, tiers: tuple[TierLearned, ...]) -> dict[str, Any]:
    """Return the state as JSON for the tiers that the network connects; inside a rack the NICs are the limit."""
    rows = [{"tier": k, "name": TIER_NAMES[k]} | msgspec.structs.asdict(tier) for k, tier in _networked(tiers)]
    return {"policy": foreseeing(spec), "tiers": rows}


def learned_grid(spec: ControlSpec, tiers: tuple[TierLearned, ...]) -> Grid:
    """Return the state as a table; `-` marks a tier without measured transfers; other tiers give its factor."""
    policy = foreseeing(spec)
    shadow = "" if policy == spec.decode else ", as the shadow policy,"
    rows = tuple(
        (
            GridEntry(f"{k} ({TIER_NAMES[k]})"),
            GridEntry(f"{tier.factor:.3f}"),
            GridEntry(UNKNOWN if tier.bytes_per_s is None else about_bandwidth(tier.bytes_per_s)),
            GridEntry(f"{tier.transfers:,}"),
            GridEntry(f"{tier.weight:.1f}"),
            GridEntry(UNKNOWN if tier.age_s is None else f"{tier.age_s:,.0f} s ago"),
        )
        for k, tier in _networked(tiers)
    )
    headings = (
        Heading("tier"),
        Heading("measured / promised"),
        Heading("rate of one transfer"),
        Heading("transfers measured"),
        Heading("weight", drop=1),
        Heading("last measured", drop=2),
    )
    caption = "Weight: effective number of transfers in the average; older transfers count less." if rows else ""
    return Grid(f"State that {policy}{shadow} had learned by then", headings, rows, caption)


def _networked(tiers: tuple[TierLearned, ...]) -> list[tuple[int, TierLearned]]:
    return [(k, tier) for k, tier in enumerate(tiers) if k >= SAME_RACK and tier.bytes_per_s is not None]


def _decisions_about(record: LogRecord, request: int) -> int:
    """Count the decisions about the request in this record."""
    return sum(
        not isinstance(decision, FleetDecision) and decision.request_id == request for decision in record.decisions
    )
