"""`kvroute replay`: repeats the decisions of a recorded log and compares them bit for bit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kvroute.cli.output import console, print_json, remarks
from kvroute.types import InputError

if TYPE_CHECKING:
    from kvroute.control import ShadowTally
    from kvroute.types import Decision

_LOG_HELP = "A log that `kvroute serve --log` or `kvroute simulate --log` wrote."
LogFile = Annotated[Path, typer.Argument(help=_LOG_HELP, show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def replay_log(
    log: LogFile,
    shadow: Annotated[
        str,
        typer.Option(help="Evaluate this decode policy at each decision and report how often its choice differs."),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Repeat every decision of a log and compare it bit for bit, including its terms. Exits with 1 at a difference.

    Example: [bold]kvroute replay run.log --shadow foresight[/bold]
    """
    from kvroute.control import ShadowTally, decisions_equal, replay
    from kvroute.control.log import check_whole, is_truncated, read_log
    from kvroute.topology import parse
    from kvroute.types import Decode

    header, records = read_log(log)
    check_whole(log, header)
    if is_truncated(log):
        remarks().print(f"{log}: the last line is incomplete and was skipped; later events are missing", soft_wrap=True)
    spec = msgspec.structs.replace(header.spec, shadow=shadow) if shadow else header.spec
    control = spec.build(parse(header.cluster, where=f"cluster in {log}"))
    tally = ShadowTally(spec.shadow)
    events = decisions = 0
    differing: tuple[Path, int] | None = None
    try:
        for record, again in replay(control, records):
            events += 1
            decisions += len(record.decisions)
            for decision in again:
                if isinstance(decision, Decode):
                    tally.decided(decision)
            if shadow:
                again = _as_recorded(again, record.decisions)
            if differing is None and not decisions_equal(record.decisions, again):
                differing = records.place
    except InputError as error:
        file, line = records.place
        if error.where in (str(file), f"{file}:{line}"):
            raise
        hint = "record the run again"
        if differing is not None:
            hint = f"the decisions differ starting at line {differing[1]} of {differing[0]}"
        raise InputError(f"the event is invalid: {error.what}", where=f"{file}:{line}", hint=hint) from None
    if as_json:
        counted = {"events": events, "decisions": decisions}
        beside = {"shadow": msgspec.to_builtins(tally)} if tally.policy else {}
        at: dict[str, object] = {"first_difference_line": None, "first_difference_file": None}
        if differing is not None:
            at = {"first_difference_line": differing[1], "first_difference_file": str(differing[0])}
        print_json(counted | {"equal": differing is None} | at | beside)
    elif differing is None:
        console().print(f"{events} events reproduce the same {decisions} decisions, bit for bit.")
    else:
        console().print(f"The decisions differ starting at line {differing[1]} of {differing[0]}.", soft_wrap=True)
    if tally.policy and not as_json:
        console().print(_shadow_sentence(tally, spec.decode))
    if differing is not None:
        raise typer.Exit(1)


def _as_recorded(again: tuple[Decision, ...], recorded: tuple[Decision, ...]) -> tuple[Decision, ...]:
    """Replace the shadows of decisions by the recorded ones, pair by pair, so that a comparison ignores them."""
    from kvroute.types import Decode

    return tuple(
        msgspec.structs.replace(now, shadow=then.shadow)
        if isinstance(now, Decode) and isinstance(then, Decode)
        else now
        for now, then in itertools.zip_longest(again, recorded[: len(again)])
    )


def _shadow_sentence(tally: ShadowTally, acting: str) -> str:
    if not tally.differ:
        return f"{tally.policy} agrees with {acting} in all {tally.decisions} decode decisions."
    per_choice = f"{tally.gain_s / tally.differ:.3g} s lower cost per choice by its own terms, "
    per_choice += f"{tally.loss_s / tally.differ:.3g} s higher by {acting}'s"
    share = f"{tally.differ} of {tally.decisions} decode decisions"
    return f"{tally.policy} differs from {acting} in {share}: {per_choice}."
