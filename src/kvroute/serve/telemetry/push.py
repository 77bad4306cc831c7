"""Telemetry received by push: converts one JSON object into events for `Control`."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from kvroute.serve.config.settings import TIERS
from kvroute.topology import Cluster
from kvroute.types import CongestionMeasured, Event, InputError, LinksMeasured, TransferMeasured


class PushedTransfer(msgspec.Struct, forbid_unknown_fields=True):
    """KV bytes transferred from one instance to another, and the duration of the transfer in seconds."""

    source: str
    target: str
    kv_bytes: float
    seconds: float
    transfers: int = 1


class Push(msgspec.Struct, forbid_unknown_fields=True):
    """The pushed JSON object; at least one of its three fields is given."""

    per_tier: dict[str, float] | None = None
    """Utilisation in [0, 1) by tier: node, rack, pod, datacenter, wan; a missing tier counts as 0."""
    per_link: dict[str, float] | None = None
    """Utilisation in [0, 1) by link name; a missing link counts as 0."""
    transfers: list[PushedTransfer] = []


_PUSH = msgspec.json.Decoder(Push)


def read_push(body: bytes, cluster: Cluster, at: float) -> list[Event]:
    """Return the events of a push; one invalid field rejects all of them.

    Raises:
        InputError: names the field that is wrong.
    """
    try:
        push = _PUSH.decode(body)
    except msgspec.DecodeError as error:
        hint = 'send JSON such as {"per_tier": {"rack": 0.3}}'
        raise InputError(str(error), where="push", hint=hint) from None
    if push.per_tier is not None and push.per_link is not None:
        raise InputError("both per_tier and per_link are given", where="push", hint="send only per_link")
    events: list[Event] = []
    if push.per_tier is not None:
        events.append(
            CongestionMeasured(at, _row(push.per_tier, {tier: n for n, tier in enumerate(TIERS)}, "per_tier"))
        )
    if push.per_link is not None:
        links = {link.name: number for number, link in enumerate(cluster.links)}
        events.append(LinksMeasured(at, _row(push.per_link, links, "per_link")))
    events += [
        _transfer(transfer, cluster, at, f"transfers[{number}]") for number, transfer in enumerate(push.transfers)
    ]
    if not events:
        raise InputError("the object is empty", where="push", hint="send per_tier, per_link or transfers")
    return events


def _row(values: Mapping[str, float], positions: Mapping[str, int], where: str) -> tuple[float, ...]:
    row = [0.0] * len(positions)
    for name, value in values.items():
        if name not in positions:
            shown = ", ".join(list(positions)[:5]) + (", ..." if len(positions) > 5 else "")
            raise InputError(f"{name!r} does not exist", where=where, hint=f"known: {shown}")
        if not 0 <= value <= 1:
            raise InputError(f"{value:g} is not a utilisation", where=f"{where}.{name}", hint="send a share in [0, 1)")
        row[positions[name]] = value
    return tuple(row)


def _transfer(pushed: PushedTransfer, cluster: Cluster, at: float, where: str) -> TransferMeasured:
    for field, name in (("source", pushed.source), ("target", pushed.target)):
        try:
            cluster.index(name)
        except InputError as error:
            raise InputError(error.what, where=f"{where}.{field}", hint=error.hint) from None
    for field, value in (("kv_bytes", pushed.kv_bytes), ("seconds", pushed.seconds)):
        if not 0 < value < math.inf:
            raise InputError(
                f"{value:g} is not a positive number", where=f"{where}.{field}", hint="send a number above 0"
            )
    if pushed.transfers < 1:
        raise InputError(
            f"{pushed.transfers} is not a number of transfers", where=f"{where}.transfers", hint="send 1 or more"
        )
    return TransferMeasured(at, pushed.source, pushed.target, pushed.kv_bytes, pushed.seconds, pushed.transfers)
