"""`kvroute replay` and `kvroute explain`: a recorded log decides again, and says why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kvroute.cli.output import console, print_json
from kvroute.control import LogRecord, read_log, replay, same
from kvroute.topology import parse
from kvroute.types import Decision, Decode, InputError, Prefill, Reject, Terms

LogFile = Annotated[Path, typer.Argument(help="A log that `kvroute simulate --log` wrote.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def replay_log(log: LogFile, as_json: AsJson = False) -> None:
    """Make every decision of a log again and compare bit for bit, terms included. Exits with 1 at a difference.

    Example: [bold]kvroute replay run.log[/bold]
    """
    header, records = read_log(log)
    control = header.spec.build(parse(header.cluster, where=f"cluster in {log}"))
    events = decisions = 0
    differing: int | None = None
    try:
        for record, again in replay(control, records):
            events += 1
            decisions += len(record.decisions)
            if differing is None and not same(record.decisions, again):
                differing = events + 1
    except InputError as error:
        if error.where.startswith(f"{log}:"):
            raise
        mend = "record the run again" if differing is None else f"the decisions differ from line {differing} on"
        raise InputError(f"an event that cannot be: {error.what}", where=f"{log}:{events + 2}", mend=mend) from None
    if as_json:
        print_json(
            {"events": events, "decisions": decisions, "equal": differing is None, "first_difference_line": differing}
        )
    elif differing is None:
        console().print(f"{events} events gave the same {decisions} decisions again, bit for bit.")
    else:
        console().print(f"The decisions differ from line {differing} of {log} on.")
    if differing is not None:
        raise typer.Exit(1)


def explain(
    log: LogFile,
    request: Annotated[int, typer.Argument(help="The request's number in the log.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Show every candidate's terms for each decision about one request.

    Example: [bold]kvroute explain run.log 17[/bold]
    """
    header, records = read_log(log)
    found = [
        (record, decision) for record in records for decision in record.decisions if decision.request_id == request
    ]
    if not found:
        raise InputError(f"has no decision about request {request}", where=str(log), mend="choose another request")
    if as_json:
        print_json({"request": request, "policy": header.spec.decode, "decisions": [_plain(*pair) for pair in found]})
        return
    for record, decision in found:
        _show(record, decision, header.spec.decode if not isinstance(decision, Prefill) else header.spec.prefill)


def _chosen(decision: Decision) -> str | None:
    match decision:
        case Prefill(instance=name) | Decode(target=name):
            return name
        case Reject():
            return None


def _plain(record: LogRecord, decision: Decision) -> dict[str, Any]:
    terms = decision.terms
    candidates = [] if terms is None else [_row(terms, index) for index in range(len(terms.names))]
    return {
        "at_s": record.event.at,
        "kind": type(decision).__name__.lower(),
        "chosen": _chosen(decision),
        "reason": decision.reason if isinstance(decision, Reject) else None,
        "unit": terms.unit if terms else None,
        "candidates": candidates,
    }


def _row(terms: Terms, index: int) -> dict[str, Any]:
    row: dict[str, Any] = {"name": terms.names[index], "feasible": bool(terms.feasible[index])}
    row |= {name: float(values[index]) for name, values in terms.parts.items()}
    return row | {"cost": float(terms.cost[index])}


def _show(record: LogRecord, decision: Decision, policy: str) -> None:
    kind = type(decision).__name__.lower()
    title = f"request {decision.request_id} at {record.event.at:.3f} s: {kind} by {policy}"
    if isinstance(decision, Reject):
        console().print(f"{title}: {decision.reason}")
        return
    terms, chosen = decision.terms, _chosen(decision)
    if terms is None:
        console().print(f"{title}: {chosen}")
        return
    table = Table(title=title, title_justify="left")
    for column in ("candidate", *terms.parts, f"cost ({terms.unit})"):
        table.add_column(column, justify="left" if column == "candidate" else "right")
    for index in terms.cost.argsort(kind="stable"):
        row = _row(terms, int(index))
        name = row.pop("name") + ("" if row.pop("feasible") else " (no room)")
        style = "bold green" if name == chosen else None
        table.add_row(name, *(f"{value:.6g}" for value in row.values()), style=style)
    console().print(table)
