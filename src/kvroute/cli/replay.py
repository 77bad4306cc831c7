"""`kvroute replay` and `kvroute explain`: a recorded log decides again, and says why."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from kvroute.cli.output import console, print_json, remarks, thin_table
from kvroute.control import ControlSpec, LogRecord, ShadowTally, is_cut, read_log, replay, same
from kvroute.topology import parse
from kvroute.types import (
    Arrived,
    Convert,
    CopyPrefix,
    Decision,
    Decode,
    DecodeFailed,
    Event,
    InputError,
    InstanceDown,
    InstanceUp,
    Offload,
    Prefill,
    PrefillFailed,
    Reject,
    Terms,
)

_LOG_HELP = "A log that `kvroute serve --log` or `kvroute simulate --log` wrote."
LogFile = Annotated[Path, typer.Argument(help=_LOG_HELP, show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def replay_log(
    log: LogFile,
    shadow: Annotated[
        str,
        typer.Option(help="Ask this decode policy at each decision, and say how often it would have chosen otherwise."),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Make every decision of a log again and compare bit for bit, terms included. Exits with 1 at a difference.

    Example: [bold]kvroute replay run.log --shadow foresight[/bold]
    """
    header, records = read_log(log)
    if is_cut(log):
        remarks().print(f"{log}: the last line has no end and is left out: what followed is missing", soft_wrap=True)
    spec = msgspec.structs.replace(header.spec, shadow=shadow) if shadow else header.spec
    control = spec.build(parse(header.cluster, where=f"cluster in {log}"))
    tally = ShadowTally(spec.shadow)
    events = decisions = 0
    differing: int | None = None
    try:
        for record, again in replay(control, records):
            events += 1
            decisions += len(record.decisions)
            for decision in again:
                if isinstance(decision, Decode):
                    tally.decided(decision)
            if shadow:
                again = _as_recorded(again, record.decisions)
            if differing is None and not same(record.decisions, again):
                differing = events + 1
    except InputError as error:
        if error.where.startswith(f"{log}:"):
            raise
        mend = "record the run again" if differing is None else f"the decisions differ from line {differing} on"
        raise InputError(f"an event that cannot be: {error.what}", where=f"{log}:{events + 2}", mend=mend) from None
    if as_json:
        counted = {"events": events, "decisions": decisions}
        beside = {"shadow": msgspec.to_builtins(tally)} if tally.policy else {}
        print_json(counted | {"equal": differing is None, "first_difference_line": differing} | beside)
    elif differing is None:
        console().print(f"{events} events gave the same {decisions} decisions again, bit for bit.")
    else:
        console().print(f"The decisions differ from line {differing} of {log} on.")
    if tally.policy and not as_json:
        console().print(_shadow_sentence(tally, spec.decode))
    if differing is not None:
        raise typer.Exit(1)


def _as_recorded(again: tuple[Decision, ...], recorded: tuple[Decision, ...]) -> tuple[Decision, ...]:
    """Decisions with the recorded ones' shadows in place of their own, where there is one for one."""
    return tuple(
        msgspec.structs.replace(now, shadow=then.shadow)
        if isinstance(now, Decode) and isinstance(then, Decode)
        else now
        for now, then in itertools.zip_longest(again, recorded[: len(again)])
    )


def _shadow_sentence(tally: ShadowTally, acting: str) -> str:
    if not tally.differ:
        return f"{tally.policy} would have chosen as {acting} did in all {tally.decisions} decode decisions."
    per_choice = f"{tally.gain_s / tally.differ:.3g} s less a choice by its own terms, "
    per_choice += f"{tally.loss_s / tally.differ:.3g} s more by {acting}'s"
    share = f"{tally.differ} of {tally.decisions} decode decisions"
    return f"{tally.policy} would have chosen otherwise than {acting} in {share}: {per_choice}."


def explain(
    log: LogFile,
    request: Annotated[str, typer.Argument(help="Its number in the log, or its X-Request-Id.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Show every candidate's terms for each decision about one request, in order: retries after failures too.

    Example: [bold]kvroute explain run.log 17[/bold]
    """
    header, records = read_log(log)
    number = _number(request, records)
    found = [] if number is None else list(_about(number, read_log(log)[1]))
    if not found:
        what = f"has no decision about request {request}"
        raise InputError(what, where=str(log), mend=_what_there_is(read_log(log)[1]))
    if as_json:
        print_json({"request": number, "policy": header.spec.decode, "decisions": [_plain(made) for made in found]})
        return
    for made in found:
        _show(made, header.spec)


def _what_there_is(records: Iterable[LogRecord]) -> str:
    ids = [record.event.request.id for record in records if isinstance(record.event, Arrived)]
    return f"its {len(ids)} requests are between {min(ids)} and {max(ids)}" if ids else "it holds no request"


def _number(request: str, records: Iterable[LogRecord]) -> int | None:
    """A request by its number, else by the last one that its client called so."""
    named: int | None = None
    for record in records:
        if isinstance(record.event, Arrived):
            if str(record.event.request.id) == request:
                return record.event.request.id
            if record.name == request:
                named = record.event.request.id
    return named


@dataclass(frozen=True, slots=True)
class _Made:
    """A decision, what called for it, and who could not be chosen by then."""

    event: Event
    decision: Prefill | Decode | Reject
    ruled_out: dict[str, str]
    """Why, by instance."""

    def why_not(self, terms: Terms, index: int) -> str | None:
        """Why a candidate could not be chosen; None: it could."""
        if terms.feasible[index]:
            return None
        if terms.names[index] in self.ruled_out:
            return self.ruled_out[terms.names[index]]
        if "same_domain" in terms.parts and not terms.parts["same_domain"][index]:
            return "outside"
        if isinstance(self.decision, Prefill):
            return "not asked" if self.decision.offload else "no partner"
        return "no room"


def _about(request: int, records: Iterable[LogRecord]) -> Iterator[_Made]:
    """The decisions about a request, in order."""
    down: set[str] = set()
    failed: set[str] = set()
    source = target = ""
    for record in records:
        match record.event:
            case InstanceDown(instance=name):
                down.add(name)
            case InstanceUp(instance=name):
                down.discard(name)
            case PrefillFailed(request_id=number) if number == request:
                failed.add(source)
            case DecodeFailed(request_id=number) if number == request:
                failed.add(target)
        for decision in record.decisions:
            if isinstance(decision, Convert | CopyPrefix) or decision.request_id != request:
                continue
            match decision:
                case Prefill(instance=name):
                    source = name
                case Decode(target=name):
                    target = name
            yield _Made(record.event, decision, dict.fromkeys(failed, "failed") | dict.fromkeys(down, "down"))


def _chosen(decision: Prefill | Decode | Reject) -> str | None:
    match decision:
        case Prefill(instance=name) | Decode(target=name):
            return name
        case Reject():
            return None


def _plain(made: _Made) -> dict[str, Any]:
    decision, terms = made.decision, made.decision.terms
    candidates = [] if terms is None else [_row(made, terms, index) for index in range(len(terms.names))]
    return {
        "at_s": made.event.at,
        "event": type(made.event).__struct_config__.tag,
        "kind": type(decision).__name__.lower(),
        "chosen": _chosen(decision),
        "reason": decision.reason if isinstance(decision, Reject) else None,
        "offload": decision.offload if isinstance(decision, Prefill) else None,
        "unit": terms.unit if terms else None,
        "candidates": candidates,
        "left_out": terms.left_out if terms else 0,
    }


def _row(made: _Made, terms: Terms, index: int) -> dict[str, Any]:
    row: dict[str, Any] = {"name": terms.names[index], "feasible": bool(terms.feasible[index])}
    row["ruled_out"] = made.why_not(terms, index)
    row |= {name: float(values[index]) for name, values in terms.parts.items()}
    return row | {"cost": float(terms.cost[index])}


def _show(made: _Made, spec: ControlSpec) -> None:
    """One line on the decision, and a table of its terms if it has any."""
    terms, chosen = made.decision.terms, _chosen(made.decision)
    out = console()
    out.print(_sentence(made, spec), markup=False, highlight=False)
    if isinstance(made.decision, Prefill) and made.decision.offload:
        out.print(_site_table(made.decision.offload))
    if terms is None:
        return
    table = thin_table()
    for column in ("candidate", *terms.parts, f"cost ({terms.unit})"):
        table.add_column(column, justify="left" if column == "candidate" else "right")
    for index in terms.cost.argsort(kind="stable"):
        row = _row(made, terms, int(index))
        name, _, why_not = row.pop("name"), row.pop("feasible"), row.pop("ruled_out")
        label = f"{name} ({why_not})" if why_not else name
        table.add_row(
            label, *(f"{value:.6g}" for value in row.values()), style="bold green" if name == chosen else None
        )
    out.print(table)
    if terms.left_out:
        out.print(f"{terms.left_out} dearer candidates are not in the log (gateway.log.terms: all keeps them).")


def _site_table(offload: Offload) -> Table:
    """The datacenters that were compared; figures of the request itself stand in the title."""
    own = {name: value for name, value in offload.terms.items() if "." not in name}
    rows: dict[str, dict[str, float]] = {}
    for name, value in offload.terms.items():
        site, dot, figure = name.rpartition(".")
        if dot:
            rows.setdefault(site, {})[figure] = value
    table = thin_table(title=", ".join(f"{name} {value:g}" for name, value in own.items()))
    columns = list(dict.fromkeys(figure for row in rows.values() for figure in row))
    for column in ("datacenter", *columns):
        table.add_column(column, justify="left" if column == "datacenter" else "right")
    for site, row in rows.items():
        figures = (f"{row.get(column, 0.0):.6g}" for column in columns)
        table.add_row(site, *figures, style="bold green" if site == offload.site else None)
    return table


def _copied(prefill: Prefill) -> str:
    return f" with {prefill.copy_tokens:,} cached tokens from {prefill.copy_from}" if prefill.copy_from else ""


def _sentence(made: _Made, spec: ControlSpec) -> str:
    decision = made.decision
    after = {PrefillFailed: " after a failed prefill", DecodeFailed: " after a failed decode"}.get(type(made.event), "")
    start = f"request {decision.request_id} at {made.event.at:.3f} s{after}"
    match decision:
        case Reject(reason=reason):
            return f"{start}: rejected: {reason}"
        case Prefill(instance=name, offload=Offload(site=site, reason=reason)):
            return f"{start}: prefill on {name}{_copied(decision)}, by {spec.prefill} in {site}: {reason}"
        case Prefill(instance=name):
            return f"{start}: prefill on {name}{_copied(decision)}, by {spec.prefill}"
        case Decode(target=name, terms=None):
            return f"{start}: decode on {name} too"
        case Decode(source=source, target=name):
            return f"{start}: {'prefill and ' * (source == name)}decode on {name}, by {spec.decode}"
