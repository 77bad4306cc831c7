"""Read and write trace files: Mooncake JSON lines, Azure LLM CSV, event logs and agent sessions, detected by content
and not by file name.

A broken line is an error that names file, line and field; it is skipped only on request of the caller.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec

from kvroute import plausibility
from kvroute.control import is_log
from kvroute.control.log import parts_of
from kvroute.control.log.entries import HEADER_START as _LOG_START
from kvroute.files.compressed_lines import lines_of, write_compressed
from kvroute.sim.workload.agent_lines import is_session, session
from kvroute.sim.workload.agents import Agents, Session
from kvroute.sim.workload.event_log import RecordedRequests
from kvroute.sim.workload.trace import Trace, TracedRequest
from kvroute.timing.reports import load_generator_of
from kvroute.types import InputError, InputErrors

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens per id in Mooncake's hash_ids."""
UNKNOWN_BLOCK_TOKENS = 16
"""Block size of requests whose content is unknown (vLLM's default)."""

_SHOWN_FAULTS = 10
_REPORT_LINES = 200
"""Lines after a wrong first one in which a load generator's result file is recognised."""
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_LONGEST_TOKENS = 100_000_000
_LATEST_S = 1e7
"""First arrivals after this are taken for times of day: no trace begins months after its own start."""
_BLOCK_LIMIT = 1 << 64
_AZURE_COLUMNS = ("timestamp", "contexttokens", "generatedtokens")
_LINE_HINT = "correct the line, or skip invalid lines (--skip-bad)"
_CONTENT_HINT = (
    "give Mooncake JSON lines, an Azure LLM CSV (TIMESTAMP,ContextTokens,GeneratedTokens), a kvroute event log or "
    "agent sessions"
)

Parse: TypeAlias = Callable[[bytes], TracedRequest]
"""Converts one line to one request; raises ValueError with the reason for an invalid line."""
Rows: TypeAlias = Iterator[tuple[str, bytes]]
"""Pairs of a place (file:number) and a line that is not blank."""


class _MooncakeLine(msgspec.Struct, kw_only=True):
    """Mooncake's four keys, and three additional keys of kvroute."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    """Milliseconds since the trace began."""
    input_length: Annotated[int, msgspec.Meta(ge=1, le=_LONGEST_TOKENS)]
    output_length: Annotated[int, msgspec.Meta(ge=0, le=_LONGEST_TOKENS)]
    hash_ids: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = ()
    at_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """Exact time if it is not a whole number of milliseconds."""
    block_tokens: Annotated[int, msgspec.Meta(ge=1, le=_LONGEST_TOKENS)] | None = None
    group: Annotated[int, msgspec.Meta(ge=0)] | None = None


def read(
    path: str | Path,
    *,
    skip_bad: bool = False,
    on_skip: Callable[[InputError], None] = lambda fault: None,
    block_tokens: int = MOONCAKE_BLOCK_TOKENS,
) -> Trace:
    """Read the requests of a trace file, plain or compressed (zstd, gzip), ascending by time.

    Requests out of order are sorted, equal times stay in file order; Azure's times of day and a log's times are
    relative to the first request. Output lengths of a log are the recorded ones; remarks say how many are missing.
    Sessions of agents start at random times (`Agents.open_loop`, seed 0). `block_tokens` is the block size of hash_ids
    unless a line gives its own. With `skip_bad`, broken lines are skipped, passed to `on_skip` and counted in the
    trace's remarks; sorting is noted in the remarks, too.

    Raises:
        InputError: a file that cannot be read, is no trace or holds no request; InputErrors for broken lines, the first
            ten of them, each with file, line and field.
    """
    found = read_any(path, skip_bad=skip_bad, on_skip=on_skip, block_tokens=block_tokens)
    return found.open_loop(seed=0) if isinstance(found, Agents) else found


def read_any(
    path: str | Path,
    *,
    skip_bad: bool = False,
    on_skip: Callable[[InputError], None] = lambda fault: None,
    block_tokens: int = MOONCAKE_BLOCK_TOKENS,
) -> Trace | Agents:
    """Read as `read` does, but return agent sessions unchanged. They may also be a folder of .json files, read in the
    order of their names."""
    path = Path(path)
    if block_tokens < 1:
        raise InputError(f"a block of {block_tokens} tokens", where="block_tokens", hint="give 1 or more")
    rows = _rows(path)
    first = next(rows, None)
    if first is None:
        raise InputError("the file is empty", where=str(path), hint=_CONTENT_HINT)
    limit = math.inf if skip_bad else _SHOWN_FAULTS
    requests, sessions, notes = list[TracedRequest](), list[Session](), list[str]()
    if path.is_dir() or is_session(first[1]):
        faults = _taken(itertools.chain([first], rows), lambda line: sessions.append(_session(line)), limit)
    else:
        requests, faults, notes = _requests(first, rows, block_tokens, limit)
    if faults and not skip_bad:
        raise InputErrors(faults)
    for fault in faults:
        on_skip(fault)
    if not (requests or sessions):
        raise InputError("the file has no requests", where=str(path), hint=_CONTENT_HINT)
    notes += _left_out(len(faults))
    return Agents(_name(path), tuple(sessions), tuple(notes)) if sessions else _in_order(_name(path), requests, notes)


def write(trace: Trace, path: str | Path) -> None:
    """Write Mooncake JSON lines, compressed if the name ends in .zst or .gz. `read` returns equal requests.

    Lines have Mooncake's four keys. Keys `at_s`, `block_tokens` and `group`, which Mooncake's own readers ignore, are
    added only if information would be lost without them.

    Raises:
        InputError: a name that does not end in .jsonl, .jsonl.zst or .jsonl.gz, a file that cannot be written, or a
            closed loop, which this format cannot represent.
    """
    path = Path(path)
    if trace.loop is not None:
        what = "this format cannot represent a closed loop"
        raise InputError(what, where=trace.name, hint="give the sessions fixed start times")
    if not path.name.endswith((".jsonl", ".jsonl.zst", ".jsonl.gz")):
        hint = "use .jsonl, .jsonl.zst or .jsonl.gz"
        raise InputError("this file name does not belong to a trace in JSON lines", where=str(path), hint=hint)
    encode = msgspec.json.Encoder().encode
    write_compressed(path, b"".join(encode(_mooncake_keys(request)) + b"\n" for request in trace.requests))


def _rows(path: Path) -> Rows:
    """Yield the rows of a file, or of the .json files of a folder, plain or compressed."""
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.endswith((".json", ".json.zst", ".json.gz")))
        if not files:
            raise InputError("cannot be read: the folder has no .json files", where=str(path), hint=_CONTENT_HINT)
    elif _is_log_file(path):
        files = parts_of(path)
        yield str(files[0]), _LOG_START
        for file in files:
            lines = enumerate(lines_of(file), 1)
            next(lines, None)
            yield from ((f"{file}:{number}", line) for number, line in lines if line.strip())
        return
    for file in files:
        yield from ((f"{file}:{number}", line) for number, line in enumerate(lines_of(file), 1) if line.strip())


def _is_log_file(path: Path) -> bool:
    """Return True if the file is an uncompressed event log, of which all parts can be read."""
    try:
        with path.open("rb") as file:
            return is_log(file.read(64))
    except OSError:
        return False  # the caller that reads the file reports the error


def _requests(
    first: tuple[str, bytes], rows: Rows, block_tokens: int, fault_limit: float
) -> tuple[list[TracedRequest], list[InputError], list[str]]:
    """Return the requests in file order, the broken lines, and remarks."""
    if is_log(first[1]):
        log = RecordedRequests()
        faults = _taken(rows, log.take, fault_limit)
        return log.requests(), faults, log.remarks()
    parse, rows = _format(first, rows, block_tokens)
    requests: list[TracedRequest] = []
    faults = _taken(rows, lambda line: requests.append(parse(line)), fault_limit)
    return requests, faults, _unit_warnings(requests) if first[1].lstrip().startswith(b"{") else []


def _unit_warnings(requests: Sequence[TracedRequest]) -> list[str]:
    """Return a remark if Mooncake's timestamps seem to have another unit. Times between two milliseconds come from
    `at_s`, whose unit is known."""
    at_s = [request.at_s for request in requests]
    warning = plausibility.of_arrivals(len(at_s), max(at_s) - min(at_s)) if at_s else None
    if warning is None or any(round(time * 1e3) / 1e3 != time for time in at_s):
        return []
    return [f"field timestamp: {warning.what}; {warning.cause}"]


def _taken(rows: Rows, take: Callable[[bytes], None], fault_limit: float) -> list[InputError]:
    faults: list[InputError] = []
    for place, line in rows:
        try:
            take(line)
        except ValueError as error:
            faults.append(InputError(str(error), where=place, hint=_LINE_HINT))
            if len(faults) >= fault_limit:
                break
    return faults


def _mooncake_keys(request: TracedRequest) -> dict[str, object]:
    milliseconds = round(request.at_s * 1e3)
    keys: dict[str, object] = {
        "timestamp": milliseconds,
        "input_length": request.input_tokens,
        "output_length": request.output_tokens,
        "hash_ids": request.blocks,
    }
    if milliseconds / 1e3 != request.at_s:
        keys["at_s"] = request.at_s
    if request.block_tokens != (MOONCAKE_BLOCK_TOKENS if request.blocks else UNKNOWN_BLOCK_TOKENS):
        keys["block_tokens"] = request.block_tokens
    if request.group is not None:
        keys["group"] = request.group
    return keys


def _format(first: tuple[str, bytes], rows: Rows, block_tokens: int) -> tuple[Parse, Rows]:
    """Return the parser of a line, and the lines to parse: the first one is a header or a request."""
    place, line = first
    if line.lstrip().startswith(b"{"):
        parse = _mooncake(block_tokens)
        try:
            parse(line)
        except ValueError:
            following = list(itertools.islice(rows, _REPORT_LINES))
            _refuse_report(first, following)
            rows = itertools.chain(following, rows)
        return parse, itertools.chain([first], rows)
    columns = [column.strip().strip('"').lower() for column in line.decode("utf-8", "replace").split(",")]
    if set(_AZURE_COLUMNS) <= set(columns):
        return _azure(columns), rows
    _refuse_report(first, list(itertools.islice(rows, _REPORT_LINES)))
    what = "neither a JSON object nor an Azure header"
    if line.lstrip().startswith(b"["):
        what = "a JSON array, not one object per line"
    raise InputError(f"the first line is {what}", where=place, hint=_CONTENT_HINT)


def _refuse_report(first: tuple[str, bytes], following: Sequence[tuple[str, bytes]]) -> None:
    """Raise InputError if these lines begin a result file of a load generator, or a JSON object over several lines."""
    place, line = first
    text = b"\n".join([line, *(text_line for _, text_line in following)]).decode("utf-8", "replace")
    if generator := load_generator_of(text):
        what = f"this is a result file of {generator}, not a trace of requests"
        hint = "give the trace that was played (docs/workloads.md), or record one with `kvroute serve --log`"
        raise InputError(what, where=place, hint=hint)
    if line.strip() == b"{":
        what = "the first line begins a JSON object over several lines, and a trace has one object per line"
        raise InputError(what, where=place, hint=_CONTENT_HINT)


def _session(line: bytes) -> Session:
    try:
        return session(line)
    except msgspec.ValidationError as error:
        raise ValueError(_field_first(str(error), line)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"not an agent session ({error})") from None


def _mooncake(block_tokens: int) -> Parse:
    decode = msgspec.json.Decoder(_MooncakeLine).decode

    def parse(line: bytes) -> TracedRequest:
        try:
            row = decode(line)
        except msgspec.ValidationError as error:
            raise ValueError(_field_first(str(error), line)) from None
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"not a JSON object ({error})") from None
        size = row.block_tokens or (block_tokens if row.hash_ids else UNKNOWN_BLOCK_TOKENS)
        _check_blocks(row, size)
        at_s = row.timestamp / 1e3 if row.at_s is None else row.at_s
        return TracedRequest(at_s, row.input_length, row.output_length, row.hash_ids, size, row.group)

    return parse


def _field_first(text: str, line: bytes) -> str:
    """Move the field to the front of msgspec's message about a line, which is like "Expected `int` >= 1 - at
    `$.input_length`"."""
    what, _, place = text.partition(" - at `$.")
    place = place.rstrip("`")
    if missing := _MISSING.fullmatch(what):
        name = missing[1]
        near = get_close_matches(name, msgspec.json.decode(line)) if not place else []
        what = f"it is missing; did you mean it by {near[0]!r}?" if near else "it is missing"
        return f"field {place}{'.' * bool(place)}{name}: {what}"
    return f"field {place}: {what.replace('Expected', 'expected', 1)}" if place else text


def _check_blocks(row: _MooncakeLine, block_tokens: int) -> None:
    count, full = len(row.hash_ids), row.input_length // block_tokens
    if not count:
        return
    if count != full and count != -(-row.input_length // block_tokens):
        raise ValueError(
            f"field hash_ids: {count} ids for {row.input_length} tokens in blocks of {block_tokens}"
            f" instead of {-(-row.input_length // block_tokens)}"
        )
    if max(row.hash_ids) >= _BLOCK_LIMIT:
        raise ValueError("field hash_ids: an id exceeds 64 bits")


def _azure(columns: Sequence[str]) -> Parse:
    time, context, generated = (columns.index(name) for name in _AZURE_COLUMNS)

    def parse(line: bytes) -> TracedRequest:
        fields = [text.strip().strip('"') for text in line.decode("utf-8", "replace").split(",")]
        if len(fields) != len(columns):
            raise ValueError(f"{len(fields)} fields, but the header has {len(columns)}")
        at_s = _time_of_day_s(fields[time])
        input_tokens = _count(fields[context], "ContextTokens", least=1)
        output_tokens = _count(fields[generated], "GeneratedTokens", least=0)
        return TracedRequest(at_s, input_tokens, output_tokens, (), UNKNOWN_BLOCK_TOKENS)

    return parse


def _time_of_day_s(text: str) -> float:
    """Return seconds since 1970 of "2023-11-16 18:17:03.9799600" (2023) or "2024-05-10 00:00:00.009930+00:00"
    (2024)."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"field TIMESTAMP: {text[:40]!r} is not a date and time") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _count(text: str, name: str, *, least: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and least <= int(text) <= _LONGEST_TOKENS):
        raise ValueError(f"field {name}: {text[:40]!r} is not a whole number from {least} to {_LONGEST_TOKENS}")
    return int(text)


def _left_out(bad_lines: int) -> list[str]:
    return [f"{bad_lines} invalid line{'s' if bad_lines > 1 else ''} skipped"] if bad_lines else []


def _in_order(name: str, requests: list[TracedRequest], notes: list[str]) -> Trace:
    remarks = list(notes)
    backwards = sum(b.at_s < a.at_s for a, b in itertools.pairwise(requests))
    if backwards:
        remarks.append(
            f"time went backwards {backwards} time{'s' if backwards > 1 else ''}; requests are sorted by arrival"
        )
        requests.sort(key=lambda request: request.at_s)
    if silent := sum(not request.output_tokens for request in requests):
        of = f"{silent} of {len(requests)} requests"
        remarks.append(f"the output of {of} has 0 tokens; they end with their prompt and count in no latency")
    first_s = requests[0].at_s
    if not 0 <= first_s <= _LATEST_S:
        # Six digits: a double of the microseconds since 1970 has no more.
        requests = [msgspec.structs.replace(r, at_s=round(r.at_s - first_s, 6)) for r in requests]
    assert all(math.isfinite(request.at_s) for request in requests)
    return Trace(name, tuple(requests), tuple(remarks))


def _name(path: Path) -> str:
    name = path.name
    for ending in (".zst", ".gz", ".jsonl", ".json", ".csv", ".log"):
        name = name.removesuffix(ending)
    return name or path.name
