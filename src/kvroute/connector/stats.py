"""Counters of transfers as plain dicts, which vLLM carries from its workers to its metrics page."""

from __future__ import annotations

from typing import TypedDict


class Counts(TypedDict):
    """One interval. Every tensor-parallel rank counts its own share of a transfer."""

    transfers: dict[str, int]
    """By source instance, as the four below."""
    nbytes: dict[str, float]
    seconds: dict[str, float]
    failures: dict[str, dict[str, int]]
    """By source instance and reason."""
    expired: int
    """Requests held here whose blocks nobody fetched in time."""


def no_counts() -> Counts:
    """Nothing has happened."""
    return Counts(transfers={}, nbytes={}, seconds={}, failures={}, expired=0)


def is_empty(counts: Counts) -> bool:
    """Whether there is nothing to tell."""
    return not (counts["transfers"] or counts["failures"] or counts["expired"])


def count_transfer(counts: Counts, source: str, nbytes: float, seconds: float) -> None:
    """A transfer that went well."""
    counts["transfers"][source] = counts["transfers"].get(source, 0) + 1
    counts["nbytes"][source] = counts["nbytes"].get(source, 0.0) + nbytes
    counts["seconds"][source] = counts["seconds"].get(source, 0.0) + seconds


def count_failure(counts: Counts, source: str, reason: str) -> None:
    """A transfer that did not; vLLM computes the prompt instead."""
    reasons = counts["failures"].setdefault(source, {})
    reasons[reason] = reasons.get(reason, 0) + 1


def add(counts: Counts, more: Counts) -> None:
    """Add `more` into `counts`."""
    for source, transfers in more["transfers"].items():
        counts["transfers"][source] = counts["transfers"].get(source, 0) + transfers
        counts["nbytes"][source] = counts["nbytes"].get(source, 0.0) + more["nbytes"][source]
        counts["seconds"][source] = counts["seconds"].get(source, 0.0) + more["seconds"][source]
    for source, reasons in more["failures"].items():
        mine = counts["failures"].setdefault(source, {})
        for reason, failures in reasons.items():
            mine[reason] = mine.get(reason, 0) + failures
    counts["expired"] += more["expired"]


def summary(counts: Counts) -> dict[str, int | float]:
    """For a log line."""
    nbytes, seconds = sum(counts["nbytes"].values()), sum(counts["seconds"].values())
    return {
        "transfers": sum(counts["transfers"].values()),
        "bytes": nbytes,
        "bytes_per_s": round(nbytes / seconds) if seconds else 0,
        "failures": sum(sum(reasons.values()) for reasons in counts["failures"].values()),
        "expired": counts["expired"],
    }
