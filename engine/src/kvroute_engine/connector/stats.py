"""Counters of transfers as plain dicts, which vLLM carries from its workers to its metrics page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TypedDict, TypeVar

from kvroute_engine.connector.transfer.congestion import Gauges, SentCounters

N = TypeVar("N", int, float)


class TransferCounts(TypedDict):
    """Counts of one interval. Every tensor-parallel rank counts its own share of a transfer: the sums over ranks are
    the bytes of whole transfers, and the mean of the ranks' times, because they transfer at the same time."""

    transfers: dict[str, int]
    """Number of transfers, counted by the first rank. All fields up to `nixl_bytes` are by source instance."""
    nbytes: dict[str, float]
    seconds: dict[str, float]
    failures: dict[str, dict[str, int]]
    """By source instance and reason."""
    early: dict[str, int]
    """Transfers that began before their prompt was computed. Their durations would include the prefill."""
    early_bytes: dict[str, float]
    nixl_bytes: dict[str, float]
    """Bytes of all transfers, failed ones included, that NIXL has read from the source's memory."""
    expired: int
    """Requests held here whose blocks were not fetched in time."""
    sent: dict[str, dict[str, float]]
    """By target instance and field of `congestion.Sent`."""
    links: dict[str, dict[str, dict[str, float]]]
    """By target instance, tensor-parallel rank and field of `congestion.Gauges`. Later values replace earlier ones."""


def no_counts() -> TransferCounts:
    """Return zero counts."""
    return TransferCounts(
        transfers={},
        nbytes={},
        seconds={},
        failures={},
        early={},
        early_bytes={},
        nixl_bytes={},
        expired=0,
        sent={},
        links={},
    )


def is_empty(counts: TransferCounts) -> bool:
    """Return whether there is nothing to report."""
    return not any(counts.values())


def count_transfer(
    counts: TransferCounts, source: str, nbytes: float, seconds: float, *, rank: int = 0, ranks: int = 1
) -> None:
    """Count a successful transfer. Args: `rank`: the one that counts its share, of `ranks`."""
    _add(counts["transfers"], {source: int(rank == 0)})
    _add(counts["nbytes"], {source: nbytes})
    _add(counts["seconds"], {source: seconds / ranks})


def count_early(counts: TransferCounts, source: str, nbytes: float) -> None:
    """Count a successful transfer that began before its prompt was computed."""
    _add(counts["early"], {source: 1})
    _add(counts["early_bytes"], {source: nbytes})


def count_nixl(counts: TransferCounts, source: str, nbytes: float) -> None:
    """Count bytes that NIXL has read from the source's memory."""
    if nbytes:
        _add(counts["nixl_bytes"], {source: nbytes})


def count_failure(counts: TransferCounts, source: str, reason: str) -> None:
    """Count a failed transfer. vLLM computes the prompt instead."""
    _add(counts["failures"].setdefault(source, {}), {reason: 1})


def count_link(counts: TransferCounts, target: str, rank: int, sent: SentCounters, gauges: Gauges) -> None:
    """Record what rank `rank` has sent to `target`, and the state of its connections."""
    _add(counts["sent"].setdefault(target, {}), asdict(sent))
    counts["links"].setdefault(target, {})[str(rank)] = asdict(gauges)


def add(counts: TransferCounts, more: TransferCounts) -> None:
    """Add `more`, which is later, to `counts`."""
    _add(counts["transfers"], more["transfers"])
    _add(counts["early"], more["early"])
    for floats in ("nbytes", "seconds", "early_bytes", "nixl_bytes"):
        _add(counts[floats], more[floats])
    for source, reasons in more["failures"].items():
        _add(counts["failures"].setdefault(source, {}), reasons)
    counts["expired"] += more["expired"]
    for target, fields in more["sent"].items():
        _add(counts["sent"].setdefault(target, {}), fields)
    for target, ranks in more["links"].items():
        counts["links"].setdefault(target, {}).update(ranks)


def link(ranks: Mapping[str, Mapping[str, float]]) -> Gauges:
    """Combine all ranks' connections to one target."""
    by_rank = [Gauges(**fields) for fields in ranks.values()]  # type: ignore[arg-type]
    busy = [gauges for gauges in by_rank if gauges.connections]
    connections = sum(gauges.connections for gauges in busy)
    return Gauges(
        connections=connections,
        rtt_s=sum(gauges.rtt_s * gauges.connections for gauges in busy) / connections if busy else 0.0,
        min_rtt_s=min((gauges.min_rtt_s for gauges in busy), default=0.0),
        cwnd_bytes=sum(gauges.cwnd_bytes for gauges in busy),
        queue_bytes=sum(gauges.queue_bytes for gauges in busy),
        delivery_bytes_per_s=sum(gauges.delivery_bytes_per_s for gauges in busy),
        unsent_bytes=sum(gauges.unsent_bytes for gauges in busy),
        looked_s=max((gauges.looked_s for gauges in by_rank), default=0.0),
    )


def summary(counts: TransferCounts) -> dict[str, int | float]:
    """Return a summary for a log line."""
    nbytes, seconds = sum(counts["nbytes"].values()), sum(counts["seconds"].values())
    sent = sum((SentCounters(**fields) for fields in counts["sent"].values()), SentCounters())  # type: ignore[arg-type]
    return {
        "transfers": sum(counts["transfers"].values()),
        "bytes": nbytes,
        "bytes_per_s": round(nbytes / seconds) if seconds else 0,
        "early": sum(counts["early"].values()),
        "failures": sum(sum(reasons.values()) for reasons in counts["failures"].values()),
        "expired": counts["expired"],
        "sent_bytes": sent.nbytes,
        "sent_again_bytes": sent.again_bytes,
    }


def _add(counts: dict[str, N], more: Mapping[str, N]) -> None:
    for key, number in more.items():
        counts[key] = counts[key] + number if key in counts else number
