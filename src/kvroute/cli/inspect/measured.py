"""What has measured the KV transfer of a decision, and how fast it was compared with the cluster file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvroute.control import LogRecord
from kvroute.control.log import read_log
from kvroute.topology import parse
from kvroute.types import Decode, Event, MeasuredBy, TransferMeasured
from kvroute_engine.files.units import about_bandwidth

_SENTENCES: dict[MeasuredBy, str] = {
    "": "measured",
    "kvroute": "counted by kvroute's connector",
    "nixl": "counted by NIXL",
    "sglang": "counted by SGLang",
    "tcp": "counted by the sender's TCP",
    "first-byte": "measured by the first byte of the response",
}


@dataclass(frozen=True, slots=True)
class MeasuredTransfer:
    """The measurement of a pair of instances that comes closest to a decision."""

    event: TransferMeasured
    map_bytes_per_s: float
    """Rate of a transfer alone, by the cluster file."""
    later: bool
    """The measurement is later than the decision, so it may include the decision's own transfer."""

    @property
    def bytes_per_s(self) -> float:
        """Rate of the measured transfers."""
        return self.event.kv_bytes / self.event.seconds


def measured_transfers(log: Path, made: Sequence[tuple[Event, Decode]]) -> list[MeasuredTransfer | None]:
    """Return the measurement of each decision's pair: the first one after the decision, else the last one before it.
    None: the log has none, or prefill and decode are on one instance."""
    header, records = read_log(log)
    found = _closest(records, made)
    if not any(found):
        return [None] * len(found)
    cluster = parse(header.cluster, where=f"cluster in {log}")
    known = {instance.name for instance in cluster.instances}
    return [
        None
        if transfer is None or not known.issuperset((transfer.source, transfer.target))
        else MeasuredTransfer(
            transfer,
            float(
                cluster.tier_bytes_per_s[cluster.tier[cluster.index(transfer.source), cluster.index(transfer.target)]]
            ),
            transfer.at > event.at,
        )
        for transfer, (event, _) in zip(found, made, strict=True)
    ]


def _closest(records: Iterable[LogRecord], made: Sequence[tuple[Event, Decode]]) -> list[TransferMeasured | None]:
    found: list[TransferMeasured | None] = [None] * len(made)
    for record in records:
        measured = record.event
        if not isinstance(measured, TransferMeasured) or not (measured.seconds > 0 and measured.kv_bytes > 0):
            continue
        for place, (event, decision) in enumerate(made):
            best = found[place]
            if (measured.source, measured.target) == (decision.source, decision.target) and (
                best is None or best.at <= event.at
            ):
                found[place] = measured
    return found


def measured_plain(transfer: MeasuredTransfer) -> dict[str, Any]:
    """Return the measurement as JSON."""
    event = transfer.event
    return {
        "by": event.measured_by,
        "at_s": event.at,
        "transfers": event.transfers,
        "bytes_per_s": transfer.bytes_per_s,
        "map_bytes_per_s": transfer.map_bytes_per_s,
        "ratio": transfer.bytes_per_s / transfer.map_bytes_per_s,
        "later": transfer.later,
    }


def measured_sentence(transfer: MeasuredTransfer) -> str:
    """Return the measurement as one line."""
    event, rate, promised = transfer.event, transfer.bytes_per_s, transfer.map_bytes_per_s
    when = "until" if transfer.later else "before the decision, at"
    return (
        f"KV transfer {event.source} to {event.target}, {_SENTENCES[event.measured_by]} {when} {event.at:.3f} s: "
        f"{about_bandwidth(rate)}, {rate / promised:.0%} of the cluster file's {about_bandwidth(promised)}"
    )
