"""The reasons for each decision about one request of a recorded log, as `kvroute explain` prints them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvroute.cli.inspect.columns import columns_of
from kvroute.cli.inspect.learned import learned_at, learned_grid, learned_plain
from kvroute.cli.inspect.measured import (
    MeasuredTransfer,
    measured_plain,
    measured_sentence,
    measured_transfers,
)
from kvroute.cli.inspect.not_compared import not_compared
from kvroute.cli.output import console, print_json
from kvroute.control import ControlSpec, LogRecord
from kvroute.control.log import read_log
from kvroute.policies import TierLearned
from kvroute.report.grid import Grid, GridEntry, Heading, rich_table
from kvroute.topology import parse
from kvroute.types import (
    Arrived,
    CopyFinished,
    Decode,
    DecodeFailed,
    Event,
    FleetDecision,
    InputError,
    InstanceDown,
    InstanceUp,
    Offload,
    Prefill,
    PrefillFailed,
    ReadKv,
    Reject,
    Request,
    Served,
    Terms,
)

_DROPPED: tuple[str, ...] = (
    "simulated",
    "own_transfers",
    "congestion",
    "policy_cost",
    "hit_tokens",
    "cached_tokens",
    "utilisation",
)
_DROPPED += ("pace_bytes_per_s", "effective_bytes_per_s", "tier")
"""Informative columns that a narrow terminal drops, in this order; the terms of a cost are kept."""


def explain_request(log: Path, request: str, *, as_json: bool) -> None:
    """Print every candidate's terms for each decision about a request, given its number or its X-Request-Id.

    Raises:
        InputError: the log has no decision about this request.
    """
    header, records = read_log(log)
    number = _number(request, records)
    found = [] if number is None else _about(number, read_log(log)[1])
    if not found:
        what = f"the log has no decision about request {request}"
        raise InputError(what, where=str(log), hint=_what_there_is(read_log(log)[1]))
    assert number is not None
    for made, learned in zip(found, learned_at(log, number, len(found)), strict=True):
        made.learned = learned
    _add_measured(log, found)
    _add_not_compared(log, found)
    if as_json:
        decisions = [_plain(made, header.spec) for made in found]
        print_json({"request": number, "policy": header.spec.decode, "decisions": decisions})
        return
    for made in found:
        _show(made, header.spec)


def _add_measured(log: Path, found: Sequence[_Made]) -> None:
    """Add to each decode decision how fast its KV transfer was."""
    decodes = [(made, made.decision) for made in found if isinstance(made.decision, Decode)]
    transfers = measured_transfers(log, [(made.event, decision) for made, decision in decodes])
    for (made, _), transfer in zip(decodes, transfers, strict=True):
        made.measured = transfer


def _add_not_compared(log: Path, found: Sequence[_Made]) -> None:
    """Add to each decision about a whole request which instances were not compared as its only one."""
    header, _ = read_log(log)
    cluster = parse(header.cluster, where=f"cluster in {log}")
    for made in found:
        if made.request is None or not (made.aggregated or isinstance(made.decision, Prefill)):
            continue
        others = not_compared(cluster, header.spec, made.request, made.aggregated.names if made.aggregated else ())
        made.not_compared = {name: made.ruled_out.get(name, why) for name, why in others.items()}


def _what_there_is(records: Iterable[LogRecord]) -> str:
    ids = [record.event.request.id for record in records if isinstance(record.event, Arrived)]
    return (
        f"the log has {len(ids)} requests, numbered from {min(ids)} to {max(ids)}" if ids else "the log has no requests"
    )


def _number(request: str, records: Iterable[LogRecord]) -> int | None:
    """Return a request's number, given that number or the X-Request-Id; the last request with this id counts."""
    named: int | None = None
    for record in records:
        if isinstance(record.event, Arrived):
            if str(record.event.request.id) == request:
                return record.event.request.id
            if record.name == request:
                named = record.event.request.id
    return named


@dataclass(slots=True)
class _Made:
    """A decision, its event, the candidates that were excluded, and the result of the prefix copy that it orders."""

    event: Event
    decision: Prefill | Decode | ReadKv | Reject
    ruled_out: dict[str, str]
    """Reason for exclusion, by instance."""
    only: tuple[str, ...] | None = None
    """Names of the instances that may serve the request; None: all."""
    landed: bool | None = None
    """True if the copy succeeded; None if there is none, or if it ended with the request or the prefill."""
    learned: tuple[TierLearned, ...] | None = None
    """State of each tier that foresight had learned before the decision."""
    measured: MeasuredTransfer | None = None
    """How fast the KV transfer between the two instances was."""
    request: Request | None = None
    not_compared: dict[str, str] = field(default_factory=dict)
    """Reason by instance why it was not compared as the only one of the request."""

    @property
    def aggregated(self) -> Terms | None:
        """Terms of the instances that were compared as the only one of the request, and of the pair."""
        match self.decision:
            case Prefill(aggregated=Terms() as terms):
                return terms
            case Prefill(terms=Terms() as terms) | Decode(terms=Terms() as terms):
                return terms if "steps_s" in terms.parts else None
            case _:
                return None

    def why_not(self, terms: Terms, index: int) -> str | None:
        """Return why a candidate could not be chosen; None if it could."""
        if terms.feasible[index]:
            return None
        if self.only is not None and terms.names[index] not in self.only:
            return "not allowed"
        if terms.names[index] in self.ruled_out:
            return self.ruled_out[terms.names[index]]
        if "same_domain" in terms.parts and not terms.parts["same_domain"][index]:
            return "outside"
        if isinstance(self.decision, ReadKv):
            return "no storage NIC"
        if isinstance(self.decision, Prefill) and terms is not self.aggregated:
            return "not considered" if self.decision.offload else "no partner"
        return "no room"


def _about(request: int, records: Iterable[LogRecord]) -> list[_Made]:
    """Return the decisions about a request, in order."""
    made: list[_Made] = []
    copies: dict[int, _Made] = {}
    down: set[str] = set()
    failed: set[str] = set()
    source = target = ""
    asked: Request | None = None
    only: tuple[str, ...] | None = None
    for record in records:
        match record.event:
            case Arrived() as arrived if arrived.request.id == request:
                asked, only = arrived.request, arrived.only
            case InstanceDown(instance=name):
                down.add(name)
            case InstanceUp(instance=name):
                down.discard(name)
            case PrefillFailed(request_id=number) if number == request:
                failed.add(source)
            case DecodeFailed(request_id=number) if number == request:
                failed.add(target)
            case CopyFinished(copy_id=copy, landed=landed) if copy in copies:
                copies[copy].landed = landed
        for decision in record.decisions:
            if isinstance(decision, FleetDecision) or decision.request_id != request:
                continue
            match decision:
                case Prefill(instance=name):
                    source = name
                case Decode(target=name):
                    target = name
                case ReadKv() | Reject():
                    pass
            ruled_out = dict.fromkeys(failed, "failed") | dict.fromkeys(down, "down")
            made.append(_Made(record.event, decision, ruled_out, only, request=asked))
            if isinstance(decision, Prefill) and decision.copy_from:
                copies[decision.copy_id] = made[-1]
    return made


def _chosen(decision: Prefill | Decode | ReadKv | Reject) -> str | None:
    match decision:
        case ReadKv(prefill_instance=prefill, decode_instance=decode, prefill_tokens=tokens):
            return prefill if tokens else decode
        case Prefill(instance=name) | Decode(target=name):
            return name
        case Reject():
            return None


def _plain(made: _Made, spec: ControlSpec) -> dict[str, Any]:
    decision, terms = made.decision, made.decision.terms
    candidates = [] if terms is None else [_row(made, terms, index) for index in range(len(terms.names))]
    return {
        "at_s": made.event.at,
        "event": type(made.event).__struct_config__.tag,
        "kind": type(decision).__name__.lower(),
        "chosen": _chosen(decision),
        "reason": decision.reason if isinstance(decision, Reject) else None,
        "offload": decision.offload if isinstance(decision, Prefill) else None,
        "read": _read(decision) if isinstance(decision, ReadKv) else None,
        "copy": _copy(decision, made.landed) if isinstance(decision, Prefill) and decision.copy_from else None,
        "unit": terms.unit if terms else None,
        "candidates": candidates,
        "aggregated": _plain_aggregated(made),
        "left_out": terms.left_out if terms else 0,
        "learned": learned_plain(spec, made.learned) if made.learned else None,
        "measured": measured_plain(made.measured) if made.measured else None,
    }


def _plain_aggregated(made: _Made) -> dict[str, Any] | None:
    """Return the instances that were compared as the only one of the request, and why others were not."""
    terms = made.aggregated
    if terms is None and not made.not_compared:
        return None
    rows = [] if terms is None else [_row(made, terms, index) for index in range(len(terms.names))]
    return {"candidates": rows, "not_compared": made.not_compared}


def _row(made: _Made, terms: Terms, index: int) -> dict[str, Any]:
    row: dict[str, Any] = {"name": terms.names[index], "feasible": bool(terms.feasible[index])}
    row["ruled_out"] = made.why_not(terms, index)
    row |= {name: float(values[index]) for name, values in terms.parts.items()}
    return row | {"cost": float(terms.cost[index])}


def _show(made: _Made, spec: ControlSpec) -> None:
    """Print one line on the decision, and a table of its terms if it has any."""
    terms, chosen = made.decision.terms, _chosen(made.decision)
    out = console()
    out.print(_sentence(made, spec), markup=False, highlight=False)
    if isinstance(made.decision, Prefill) and made.decision.offload:
        out.print(rich_table(_sites(made.decision.offload), out.width))
    if made.measured is not None:
        out.print(measured_sentence(made.measured), markup=False, highlight=False)
    if terms is None:
        return
    out.print(rich_table(_candidates(made, terms, chosen), out.width))
    if terms.left_out:
        out.print(f"The log omits {terms.left_out} candidates with higher cost (`gateway.log.terms: all` keeps them).")
    _show_aggregated(made)
    if made.learned and isinstance(made.decision, Decode):
        out.print(rich_table(learned_grid(spec, made.learned), out.width))


def _show_aggregated(made: _Made) -> None:
    """Print the instances that could have served the aggregated request, unless they are the candidates themselves; and
    the others, each with the reason."""
    out = console()
    if isinstance(made.decision, Prefill) and made.decision.aggregated is not None:
        aggregated = made.decision.aggregated
        out.print("The pair was compared with single instances (aggregated):", markup=False, highlight=False)
        out.print(rich_table(_candidates(made, aggregated, aggregated.names[-1]), out.width))
    if made.not_compared:
        others = ", ".join(f"{name} ({why})" for name, why in made.not_compared.items())
        out.print(f"Not compared as the only instance: {others}.", markup=False, highlight=False)


def _candidates(made: _Made, terms: Terms, chosen: str | None) -> Grid:
    """Return one row per candidate, the cheapest first."""
    order = [int(index) for index in terms.cost.argsort(kind="stable")]
    labels = []
    for index in order:
        why_not = made.why_not(terms, index)
        labels.append(f"{terms.names[index]} ({why_not})" if why_not else terms.names[index])
    names = [terms.names[index] for index in order]
    cost = "cost_s" if terms.unit == "s" else "cost"
    figures = {
        name: [float(values[index]) for index in order] for name, values in (*terms.parts.items(), (cost, terms.cost))
    }
    return _grid("candidate", labels, figures, names.index(chosen) if chosen in names else None)


def _sites(offload: Offload) -> Grid:
    """Return one row per compared datacenter; the figures of the request itself are in the title."""
    own = {name: [value] for name, value in offload.terms.items() if "." not in name}
    rows: dict[str, dict[str, float]] = {}
    for name, value in offload.terms.items():
        site, dot, figure = name.rpartition(".")
        if dot:
            rows.setdefault(site, {})[figure] = value
    columns = dict.fromkeys(figure for row in rows.values() for figure in row)
    figures = {column: [row.get(column, 0.0) for row in rows.values()] for column in columns}
    title = ", ".join(f"{heading.title} {entry.text}" for heading, (entry,) in columns_of(own))
    return _grid(
        "datacenter", list(rows), figures, list(rows).index(offload.site) if offload.site in rows else None, title
    )


def _grid(
    label: str, labels: Sequence[str], figures: dict[str, list[float]], best: int | None, title: str = ""
) -> Grid:
    named = (Heading(label), tuple(GridEntry(text, best=index == best) for index, text in enumerate(labels)))
    columns = [named, *columns_of(figures, drop=_DROPPED, best=best)]
    headings = tuple(heading for heading, _ in columns)
    rows = tuple(zip(*(texts for _, texts in columns), strict=True))
    return Grid(title, headings, rows, bold="Bold: chosen.")


def _copy(prefill: Prefill, landed: bool | None) -> dict[str, Any]:
    """Describe a prefix that is copied from another instance before the rest of the prompt is computed."""
    what = {"from": prefill.copy_from, "tokens": prefill.copy_tokens, "bytes": prefill.copy_bytes}
    return {"id": prefill.copy_id, **what, "landed": landed}


def _read(decision: ReadKv) -> dict[str, Any]:
    """Describe a read of cached KV from the store."""
    tokens = {"prefill_tokens": decision.prefill_tokens, "decode_tokens": decision.decode_tokens}
    return {"id": decision.read_id, "first_token": decision.first_token, **tokens, "bytes": decision.kv_bytes}


def _read_by(decision: ReadKv) -> str:
    parts = ((decision.prefill_tokens, decision.prefill_instance), (decision.decode_tokens, decision.decode_instance))
    return " and ".join(f"{tokens:,} tokens by the node of {name}" for tokens, name in parts if tokens)


def _copied(prefill: Prefill, landed: bool | None) -> str:
    if not prefill.copy_from:
        return ""
    end = " (the copy failed)" if landed is False else ""
    return f" with {prefill.copy_tokens:,} cached tokens from {prefill.copy_from}{end}"


def _sentence(made: _Made, spec: ControlSpec) -> str:
    decision = made.decision
    after = {PrefillFailed: " after a failed prefill", DecodeFailed: " after a failed decode"}.get(type(made.event), "")
    start = f"request {decision.request_id} at {made.event.at:.3f} s{after}"
    match decision:
        case Reject(reason=reason):
            return f"{start}: rejected: {reason}"
        case ReadKv():
            return f"{start}: read from the store: {_read_by(decision)}"
        case Prefill(instance=name, offload=Offload(site=site, reason=reason)):
            return f"{start}: prefill on {name}{_copied(decision, made.landed)}, by {spec.prefill} in {site}: {reason}"
        case Prefill(instance=name):
            paired = decision.terms is not None and not {"start_s", "steps_s"}.isdisjoint(decision.terms.parts)
            by = spec.decode if paired else spec.prefill
            return f"{start}: prefill on {name}{_copied(decision, made.landed)}, by {by}"
        case Decode(target=name) if isinstance(made.event, Served):
            return f"{start}: served by {name} instead"
        case Decode(target=name, terms=None):
            return f"{start}: decode on {name} as well"
        case Decode(source=source, target=name):
            return f"{start}: {'prefill and ' * (source == name)}decode on {name}, by {spec.decode}"
