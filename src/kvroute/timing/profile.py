"""Reads measured profiles (plain CSV, splitwise-sim's CSV, DistServe's JSON) and refuses to mix configurations.

Plain CSV has a header and either `tokens,seconds` (one whole prompt per row) or `batch,seconds` with an optional
`context_tokens` (the sum over the batch; one decode iteration per row). Further columns are ignored.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvroute import plausibility
from kvroute.timing.reports import load_generator_of
from kvroute.types import FloatArray, InputError

_SPLITWISE = (
    "model",
    "hardware",
    "prompt_size",
    "batch_size",
    "token_size",
    "prompt_time",
    "token_time",
    "tensor_parallel",
)
_DISTSERVE_TOKENS = tuple(range(64, 2049, 64))
"""Prompt lengths: DistServe's OPT models have a context of 2,048 tokens."""
_DISTSERVE_BATCHES = (1, 2, 4, 8, 16, 32, 64, 94)
"""Batch sizes below 95 requests, from which on DistServe uses other coefficients."""
_DISTSERVE_CONTEXTS = (128, 512, 2048)


@dataclass(frozen=True, slots=True)
class Profile:
    """Measurements of one model on one kind of instance; arrays are empty if nothing was measured."""

    where: str
    tokens: FloatArray
    """Prompt lengths in tokens; `prefill_s` has the same length."""
    prefill_s: FloatArray
    batch: FloatArray
    """Requests per iteration; `iteration_s` and `context_tokens` have the same length."""
    iteration_s: FloatArray
    context_tokens: FloatArray | None
    """Sum over the batch; None if not measured."""
    prefill_remarks: tuple[str, ...] = ()
    decode_remarks: tuple[str, ...] = ()
    times: str = "column seconds"
    """Place of the times in the file, for messages."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """Implausible values, in sentences for the user."""
        points = list(zip(self.tokens.tolist(), self.prefill_s.tolist(), strict=True))
        found = (plausibility.of_prefill(points), plausibility.of_decode(self.iteration_s.tolist()))
        return tuple(f"{self.where}: {self.times}: {remark.what}; {remark.cause}" for remark in found if remark)


@dataclass(frozen=True, slots=True)
class _Row:
    """One line of a CSV file; errors give file, line and column."""

    where: str
    line: int
    fields: Mapping[str, str | None]

    def number(self, column: str, *, zero: bool = False) -> float:
        text = (self.fields.get(column) or "").strip()
        place = f"{self.where} line {self.line} column {column}"
        try:
            number = float(text)
        except ValueError:
            what = f"{text!r} is not a number" if text else "a number is missing"
            raise InputError(what, where=place, hint="give a number") from None
        if not (number >= 0 if zero else number > 0) or number == math.inf:
            raise InputError(
                f"{text} is not valid",
                where=place,
                hint="give a finite number " + ("of 0 or more" if zero else "above 0"),
            )
        return number

    def text(self, column: str) -> str:
        return (self.fields.get(column) or "").strip()


def read_profile(
    path: Path, *, model: str | None = None, hardware: str | None = None, tp: int | None = None
) -> Profile:
    """Read a profile; `model`, `hardware` and `tp` select one of several configurations in a file.

    splitwise-sim: prompts of batch 1 give the prefill; every row gives an iteration, whose context is the prompt and
    half of the output. DistServe: its published coefficients, as points from 64 to 2,048 tokens and below 95 requests.

    Raises:
        InputError: an unreadable file, a missing column, a bad number (with line and column), or a selection that is
            missing or matches nothing.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(
            f"cannot be read ({error.strerror})", where=str(path), hint="give a CSV or JSON file"
        ) from error
    except UnicodeDecodeError as error:
        raise InputError("is not UTF-8 text", where=str(path), hint="give a CSV or JSON file") from error
    if generator := load_generator_of(text):
        what = f"is a result file of {generator}: its times include queues and other requests"
        hint = "measure the idle engine with `kvroute timing measure URL`, or give a CSV file with tokens,seconds"
        raise InputError(what, where=str(path), hint=hint)
    choice = {"model": model, "hardware": hardware, "tp": None if tp is None else str(tp)}
    if text.lstrip().startswith(("{", "[")):
        return _read_distserve(text, str(path), choice)
    columns, rows = _read_rows(text, str(path))
    if "prompt_time" in columns or "token_time" in columns:
        return _read_splitwise(columns, rows, str(path), choice)
    if any(value is not None for value in choice.values()):
        what = "is a plain profile without model, hardware and tp"
        raise InputError(what, where=str(path), hint="remove --model, --hardware and --tp")
    return _read_plain(columns, rows, str(path))


def _read_rows(text: str, where: str) -> tuple[list[str], list[_Row]]:
    reader = csv.DictReader(text.splitlines(), skipinitialspace=True)
    try:
        columns = [name.strip() for name in reader.fieldnames or ()]
        reader.fieldnames = columns
        rows = [_Row(where, reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise InputError(f"is not CSV ({error})", where=f"{where} line {reader.line_num}") from error
    if not rows:
        raise InputError("has no measurements", where=where, hint="give a header line and one line per measurement")
    return columns, rows


def _read_plain(columns: Sequence[str], rows: Sequence[_Row], where: str) -> Profile:
    _require(columns, ("seconds",), where)
    none = np.empty(0)
    seconds = np.array([row.number("seconds") for row in rows])
    if "tokens" in columns:
        return Profile(where, np.array([row.number("tokens") for row in rows]), seconds, none, none, None)
    if "batch" not in columns:
        hint = "add `tokens` for prompts, or `batch` and `context_tokens` for decode iterations"
        raise InputError("the column tokens or batch is missing", where=f"{where} line 1", hint=hint)
    batch = np.array([row.number("batch") for row in rows])
    contexts = None
    if "context_tokens" in columns:
        contexts = np.array([row.number("context_tokens", zero=True) for row in rows])
    return Profile(where, none, none, batch, seconds, contexts)


def _read_splitwise(
    columns: Sequence[str], rows: Sequence[_Row], where: str, choice: Mapping[str, str | None]
) -> Profile:
    _require(columns, _SPLITWISE, where)
    names = {"model": "model", "hardware": "hardware", "tp": "tensor_parallel"}
    chosen = list(rows)
    for option, column in names.items():
        have = sorted({row.text(column) for row in chosen})
        picked = _pick(option, choice[option], have, where)
        chosen = [row for row in chosen if row.text(column) == picked]
    single = [row for row in chosen if row.number("batch_size") == 1]
    prompts = np.array([row.number("prompt_size") for row in single])
    prefill_s = np.array([row.number("prompt_time") * 1e-3 for row in single])
    batch = np.array([row.number("batch_size") for row in chosen])
    contexts = np.array([row.number("prompt_size") + row.number("token_size") / 2 for row in chosen]) * batch
    iteration_s = np.array([row.number("token_time") * 1e-3 for row in chosen])
    times = "columns prompt_time and token_time"
    return Profile(where, prompts, prefill_s, batch, iteration_s, contexts, times=times)


def _read_distserve(text: str, where: str, choice: Mapping[str, str | None]) -> Profile:
    try:
        models = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise InputError(
            f"is not JSON ({error})", where=where, hint="give DistServe's profile or a CSV file"
        ) from error
    if choice["hardware"] is not None:
        raise InputError("has no hardware names", where=where, hint="remove --hardware")
    if isinstance(models, dict) and not all(isinstance(entry, dict) for entry in models.values()):
        hint = "give DistServe's profile (model, tp, coefficients) or a CSV file"
        raise InputError("is JSON of another kind: its models are not objects", where=where, hint=hint)
    degrees = _entry(models, "model", choice["model"], where)
    entry = _entry(degrees, "tp", choice["tp"], where)
    base_s, per_token_s, per_token2_s = _coefficients(entry, "prefill", where)
    tokens = np.array(_DISTSERVE_TOKENS, dtype=np.float64)
    prefill_s = base_s + per_token_s * tokens + per_token2_s * tokens**2
    step_s, per_context_token_s, per_request_s = _coefficients(entry, "decoding_smallbs", where)
    grid = np.array(list(product(_DISTSERVE_BATCHES, _DISTSERVE_CONTEXTS)), dtype=np.float64)
    batch, contexts = grid[:, 0], grid[:, 0] * grid[:, 1]
    iteration_s = step_s + per_context_token_s * contexts + per_request_s * batch
    return Profile(
        where=where,
        tokens=tokens,
        prefill_s=prefill_s,
        batch=batch,
        iteration_s=iteration_s,
        context_tokens=contexts,
        prefill_remarks=("points of DistServe's own fit, 64 to 2,048 tokens",),
        times="coefficients",
        decode_remarks=("points of DistServe's own fit for fewer than 95 requests",),
    )


def _entry(entries: Any, option: str, wanted: str | None, where: str) -> Mapping[str, Any]:
    if not isinstance(entries, dict) or not entries:
        raise InputError(f"has no {option}s", where=where, hint="give DistServe's profile: model, tp, coefficients")
    entry = entries[_pick(option, wanted, sorted(entries), where)]
    if not isinstance(entry, dict):
        raise InputError(f"has no object under its {option}", where=where, hint="give DistServe's profile")
    return entry


def _coefficients(entry: Mapping[str, Any], name: str, where: str) -> tuple[float, float, float]:
    """Return three coefficients, converted from milliseconds to seconds."""
    values = entry.get(name)
    sound = isinstance(values, list) and len(values) == 3
    if not sound or not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values or ()):
        raise InputError(f"{name} is {values!r}", where=where, hint="give three numbers in milliseconds")
    first, second, third = (float(value) * 1e-3 for value in values or ())
    return first, second, third


def _pick(option: str, wanted: str | None, have: Sequence[str], where: str) -> str:
    """Return the one matching entry; case, and an organisation before a model's name, do not matter."""
    if wanted is None:
        if len(have) == 1:
            return have[0]
        raise InputError(
            f"has several values of {option}: {', '.join(have)}", where=where, hint=f"choose with --{option}"
        )
    key = wanted.lower()
    found = [name for name in have if key in (name.lower(), name.lower().rpartition("/")[2])]
    if len(found) != 1:
        what = f"has no measurements for {option} {wanted}"
        raise InputError(what, where=where, hint=f"choose one of {', '.join(have)}")
    return found[0]


def _require(columns: Sequence[str], names: Sequence[str], where: str) -> None:
    missing = [name for name in names if name not in columns]
    if missing:
        what = f"the column {', '.join(missing)} is missing"
        raise InputError(what, where=f"{where} line 1", hint=f"it has {', '.join(columns) or 'no columns'}")
