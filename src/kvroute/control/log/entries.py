"""The format of an event log: each event with its decisions, one JSON line each. A replay gives the same decisions.

Files are read and written by `kvroute.control.log`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np

from kvroute.control.core import Control
from kvroute.control.spec import ControlSpec
from kvroute.types import (
    CopyPrefix,
    Decision,
    Decode,
    Event,
    Prefill,
    ReadKv,
    Reject,
    Replicas,
    ScaleIn,
    ScaleOut,
    SwitchRole,
    Terms,
)
from kvroute_engine import renamed

TermsKept: TypeAlias = Literal["best", "all"]
TERMS_ALL, TERMS_BEST = 64, 16
"""`best` keeps all terms of up to 64 candidates; of more, only those of the 16 cheapest and of the chosen one."""
HEADER_START = b'{"log":"kvroute-log"'


class LogRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event and its decisions, terms included."""

    event: Event
    decisions: tuple[Decision, ...]
    name: str = ""
    """The client's name for the request that arrives."""


class LogHeader(msgspec.Struct, frozen=True, tag="kvroute-log", tag_field="log", kw_only=True):
    """The first line of a log: the data needed to build the same core again."""

    cluster: str
    """Text of the cluster file; without secrets if a live gateway writes the log."""
    spec: ControlSpec
    log_id: str = ""
    """Identifier that all parts of a log share; empty if the log has one part."""
    part: int = 1
    """Number of this file among the parts of the log, counted from 1; each part continues the one before it."""


def _plain(value: Any) -> Any:
    """Arrays as lists: JSON has no numeric arrays."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"cannot log a {type(value).__name__}")


encode = msgspec.json.Encoder(enc_hook=_plain).encode
"""Encode a header, a record or decisions; the result has no line end."""


def _array(_type: type, value: Any) -> Any:
    return np.asarray(value)


_decode_record = msgspec.json.Decoder(LogRecord, dec_hook=_array).decode
_decode_header = msgspec.json.Decoder(LogHeader).decode


def decode_record(line: bytes) -> LogRecord:
    """Decode a line of a log, also one of the previous version. Raises msgspec.DecodeError if it is no record."""
    if not renamed.mentions(line, renamed.LOG_RECORD):
        return _decode_record(line)
    plain = msgspec.json.decode(line)
    renamed.rename_keys(plain, renamed.LOG_RECORD)
    return msgspec.convert(plain, LogRecord, dec_hook=_array)


def decode_header(line: bytes) -> LogHeader:
    """Decode the first line of a log, also of the previous version. Raises msgspec.DecodeError if it is no header."""
    if not renamed.mentions(line, renamed.LOG_HEADER):
        return _decode_header(line)
    plain = msgspec.json.decode(line)
    renamed.rename_keys(plain, renamed.LOG_HEADER)
    return msgspec.convert(plain, LogHeader)


def is_log(start: bytes) -> bool:
    """Whether a file that begins with these bytes is an event log."""
    return start.startswith(HEADER_START)


def trim_terms(decision: Decision) -> Decision:
    """Reduce a decision with over TERMS_ALL candidates to the terms of the TERMS_BEST cheapest and of the chosen one.
    Ties in cost are broken by position."""
    if isinstance(decision, Prefill) and decision.aggregated is not None and len(decision.aggregated.names) > TERMS_ALL:
        pair = len(decision.aggregated.names) - 1
        decision = msgspec.structs.replace(decision, aggregated=_cheapest(decision.aggregated, [pair]))
    terms = decision.terms
    if terms is None or len(terms.names) <= TERMS_ALL:
        return decision
    kept = list[int]()
    match decision:
        case (
            Prefill(instance=chosen)
            | Decode(target=chosen)
            | CopyPrefix(target=chosen)
            | ReadKv(prefill_instance=chosen)
        ):
            kept.append(terms.names.index(chosen))
        case Reject() | SwitchRole() | Replicas() | ScaleIn() | ScaleOut():
            pass
    return msgspec.structs.replace(decision, terms=_cheapest(terms, kept))


def _cheapest(terms: Terms, kept: list[int]) -> Terms:
    """Return the terms of the TERMS_BEST cheapest candidates and of those in `kept`."""
    order = np.where(terms.feasible, terms.cost, np.inf).argsort(kind="stable")[:TERMS_BEST].tolist()
    left = sorted({*order, *kept})
    return Terms(
        tuple([terms.names[index] for index in left]),
        terms.cost[left],
        terms.feasible[left],
        {name: values[left] for name, values in terms.parts.items()},
        terms.unit,
        len(terms.names) - len(left),
    )


def replay(control: Control, records: Iterable[LogRecord]) -> Iterator[tuple[LogRecord, tuple[Decision, ...]]]:
    """Feed the events of a log to a fresh core; yield each record with the decisions made now.

    Raises InputError if an event is not possible after those before it.
    """
    for record in records:
        yield record, control.handle(record.event)


def decisions_equal(recorded: tuple[Decision, ...], again: tuple[Decision, ...]) -> bool:
    """Whether decisions are equal bit for bit, including the terms that the record kept."""
    if any(_is_trimmed(decision) for decision in recorded):
        again = tuple([trim_terms(decision) for decision in again])
    return encode(recorded) == encode(again)


def _is_trimmed(decision: Decision) -> bool:
    aggregated = decision.aggregated if isinstance(decision, Prefill) else None
    return any(terms is not None and terms.left_out for terms in (decision.terms, aggregated))
