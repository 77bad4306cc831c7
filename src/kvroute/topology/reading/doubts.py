"""Implausible values of a cluster file, each with its line: warnings, not faults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvroute import llm, plausibility
from kvroute.plausibility import TYPICAL_TOKENS
from kvroute.topology.place import gpu_list
from kvroute.topology.schema import (
    ClusterFile,
    InstanceCounts,
    InstanceEntry,
    LinearPrefillEntry,
    PiecewisePrefillEntry,
    QuadraticPrefillEntry,
)
from kvroute_engine.files.form import FileError, Key, Lines


def unit_warnings(file: ClusterFile, written: ClusterFile, lines: Lines) -> Iterator[FileError]:
    """Yield warnings of an expanded, checked file; `written` is the file before its shorthands were expanded."""
    yield from _memory_warnings(file, written, lines)
    for name, timing in file.timing.items():
        if warning := plausibility.of_prefill(_points(timing.prefill)):
            yield lines.error(warning.what, ("timing", name, "prefill"), warning.cause)
        batch, context = 1, TYPICAL_TOKENS
        decode = timing.decode
        step_s = decode.base_s + decode.per_request_s * batch + decode.per_context_token_s * context
        if warning := plausibility.of_decode([step_s]):
            yield lines.error(warning.what, ("timing", name, "decode"), warning.cause)


def _memory_warnings(file: ClusterFile, written: ClusterFile, lines: Lines) -> Iterator[FileError]:
    reported: set[Key] = set()
    assert isinstance(file.instances, list), "expand first"
    for index, entry in enumerate(file.instances):
        own: InstanceEntry | InstanceCounts = entry
        key: Key = ("instances", index)
        if isinstance(written.instances, InstanceCounts):
            own, key = written.instances, ("instances",)
        place = (*key, "kv_capacity") if own.kv_capacity_bytes is not None else ("defaults", "kv_capacity")
        kv_bytes = entry.kv_capacity_bytes or file.defaults.kv_capacity_bytes or 0.0
        model = llm.model(entry.model or file.defaults.model or "")
        if place in reported:
            continue
        if warning := plausibility.of_kv_memory(kv_bytes, len(gpu_list(entry.gpus)), model.kv_bytes_per_token):
            reported.add(place)
            yield lines.error(warning.what, place, warning.cause)


def _points(
    prefill: LinearPrefillEntry | QuadraticPrefillEntry | PiecewisePrefillEntry,
) -> Sequence[tuple[float, float]]:
    """Return points (tokens, seconds) of the curve."""
    match prefill:
        case LinearPrefillEntry(per_token_s=per_token_s, base_s=base_s):
            return [(TYPICAL_TOKENS, base_s + per_token_s * TYPICAL_TOKENS)]
        case QuadraticPrefillEntry(base_s=base_s, per_token_s=per_token_s, per_token2_s=square_s):
            return [(TYPICAL_TOKENS, base_s + per_token_s * TYPICAL_TOKENS + square_s * TYPICAL_TOKENS**2)]
        case PiecewisePrefillEntry(tokens=tokens, times_s=times_s):
            return [(count, second) for count, second in zip(tokens, times_s, strict=True) if count]
