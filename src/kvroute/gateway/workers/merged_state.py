"""The dashboard's state of all workers as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest

from msgspec.structs import replace

from kvroute.control import ShadowTally
from kvroute.gateway.observe.decision_view import DecisionView
from kvroute.gateway.observe.history import HistoryPoint
from kvroute.gateway.observe.state import PATHS_SHOWN_MOST
from kvroute.gateway.observe.view import (
    DashboardUpdate,
    GatewayStatus,
    MeasuredPath,
    Snapshot,
    Split,
    Tile,
    Transfer,
    WanLoad,
)

_DECISIONS_MOST = 50
_TRANSFERS_MOST = 200


def merged_snapshot(workers: Sequence[Snapshot]) -> Snapshot:
    """Return the state of all workers: counts, rates and own load are added. What workers share is the highest that one
    of them knows. Of what each observes for itself the first worker counts, health and breakers excepted: there the
    worst counts.

    Times are those of the first worker's clock. Percentiles are means of the workers' percentiles, weighted by their
    streams. A worker with another layout, because it has not yet followed a change of the cluster, is left out.

    Args:
        workers: one snapshot for each worker; at least one.
    """
    first = workers[0]
    same = [each for each in workers if each.layout.instances == first.layout.instances]
    return replace(
        first,
        tick=_tick([each.tick for each in same]),
        history=_history([each.history for each in same], [first.tick.at - each.tick.at for each in same]),
    )


def _tick(ticks: Sequence[DashboardUpdate]) -> DashboardUpdate:
    first = ticks[0]
    return replace(
        first,
        load=_status([tick.load for tick in ticks]),
        instances=tuple([_tile(tiles) for tiles in zip(*(tick.instances for tick in ticks), strict=True)]),
        arrivals_per_s=sum(tick.arrivals_per_s for tick in ticks),
        finishes_per_s=sum(tick.finishes_per_s for tick in ticks),
        rejects_per_s=sum(tick.rejects_per_s for tick in ticks),
        errors_per_s=sum(tick.errors_per_s for tick in ticks),
        requests=sum(tick.requests for tick in ticks),
        rejects=sum(tick.rejects for tick in ticks),
        transfers_in_flight=sum(tick.transfers_in_flight for tick in ticks),
        transfers=tuple(_transfers(ticks))[-_TRANSFERS_MOST:],
        decisions=tuple(sorted(_decisions(ticks), key=lambda each: (each.at, each.id)))[-_DECISIONS_MOST:],
        splits=tuple(_splits([split for tick in ticks for split in tick.splits])),
        wan=tuple([_wan(links) for links in zip(*(tick.wan for tick in ticks), strict=True)]),
        paths=_paths(ticks),
        shadow=_shadow([tick.shadow for tick in ticks if tick.shadow is not None]),
        offloaded_share=_weighted([(tick.offloaded_share, tick.arrivals_per_s) for tick in ticks]),
        history=_newest(ticks),
    )


def _paths(ticks: Sequence[DashboardUpdate]) -> tuple[MeasuredPath, ...]:
    """Return the last measurement of each pair that one of the workers shows, the slowest first."""
    last: dict[tuple[str, str], MeasuredPath] = {}
    for path in sorted((path for tick in ticks for path in tick.paths), key=lambda path: -path.age_s):
        last[path.source, path.target] = path
    slowest = sorted(last.values(), key=lambda path: (path.ratio, path.source, path.target))
    return tuple(slowest[:PATHS_SHOWN_MOST])


def _newest(ticks: Sequence[DashboardUpdate]) -> HistoryPoint | None:
    newest = [() if tick.history is None else (tick.history,) for tick in ticks]
    points = _history(newest, [ticks[0].at - tick.at for tick in ticks])
    return points[0] if points else None


def _status(loads: Sequence[GatewayStatus]) -> GatewayStatus:
    return replace(
        loads[0],
        in_flight=sum(load.in_flight for load in loads),
        queued=sum(load.queued for load in loads),
        connections=sum(load.connections for load in loads),
        ready=all(load.ready for load in loads),
        draining=any(load.draining for load in loads),
    )


def _tile(tiles: Sequence[Tile]) -> Tile:
    return replace(
        tiles[0],
        up=min(tile.up for tile in tiles),
        breaker=max(tile.breaker for tile in tiles),
        requests=sum(tile.requests for tile in tiles),
        load=max(tile.load for tile in tiles),
        prefill_pending_s=max(tile.prefill_pending_s for tile in tiles),
    )


def _transfers(ticks: Sequence[DashboardUpdate]) -> Iterable[Transfer]:
    """Yield the transfers of all workers with numbers that differ."""
    for place, tick in enumerate(ticks):
        for transfer in tick.transfers:
            yield replace(transfer, id=transfer.id * len(ticks) + place)


def _decisions(ticks: Sequence[DashboardUpdate]) -> Iterable[DecisionView]:
    for place, tick in enumerate(ticks):
        for decision in tick.decisions:
            at = round(decision.at + ticks[0].at - tick.at, 4)
            yield replace(decision, id=decision.id * len(ticks) + place, at=at)


def _splits(splits: Sequence[Split]) -> Iterable[Split]:
    for policy in dict.fromkeys(split.policy for split in splits):
        yield _split([split for split in splits if split.policy == policy])


def _split(splits: Sequence[Split]) -> Split:
    def mean(values: Iterable[float]) -> float:
        return _weighted(list(zip(values, [split.streams for split in splits], strict=True))) or 0.0

    def means(parts: Sequence[dict[str, float]]) -> dict[str, float]:
        return {part: mean([each[part] for each in parts]) for part in parts[0]}

    return Split(
        policy=splits[0].policy,
        requests=sum(split.requests for split in splits),
        streams=sum(split.streams for split in splits),
        ttft_p50_s=mean([split.ttft_p50_s for split in splits]),
        ttft_p90_s=mean([split.ttft_p90_s for split in splits]),
        part_mean_s=means([split.part_mean_s for split in splits]),
        part_p50_s=means([split.part_p50_s for split in splits]),
        part_p90_s=means([split.part_p90_s for split in splits]),
        tier_requests=tuple(map(sum, zip(*(split.tier_requests for split in splits), strict=True))),
        tier_bytes=tuple(map(sum, zip(*(split.tier_bytes for split in splits), strict=True))),
        local=sum(split.local for split in splits),
    )


def _wan(links: Sequence[WanLoad]) -> WanLoad:
    def both(value: Callable[[WanLoad], tuple[float, float]]) -> tuple[float, float]:
        return sum(value(link)[0] for link in links), sum(value(link)[1] for link in links)

    return WanLoad(
        in_flight=(sum(link.in_flight[0] for link in links), sum(link.in_flight[1] for link in links)),
        in_flight_bytes=both(lambda link: link.in_flight_bytes),
        utilisation=both(lambda link: link.utilisation),
    )


def _shadow(tallies: Sequence[ShadowTally]) -> ShadowTally | None:
    if not tallies:
        return None
    whole = tallies[0]
    for tally in tallies[1:]:
        counts = {name: getattr(whole, name) + getattr(tally, name) for name in tally.__struct_fields__[1:]}
        whole = replace(whole, **counts)
    return whole


def _history(histories: Sequence[Sequence[HistoryPoint]], ahead_s: Sequence[float]) -> tuple[HistoryPoint, ...]:
    """Add the workers' newest points, their second newest ones, and so on.

    Args:
        histories: points of each worker, oldest first.
        ahead_s: by how much the first worker's clock is ahead of that of each worker.
    """
    points = []
    for row in zip_longest(*(reversed(history) for history in histories)):
        known = [(point, ahead) for point, ahead in zip(row, ahead_s, strict=True) if point is not None]
        weights = [point.requests_per_s for point, _ in known]
        points.append(
            HistoryPoint(
                at=round(max(point.at + ahead for point, ahead in known), 2),
                requests_per_s=sum(weights),
                ttft_p50_s=_weighted([(point.ttft_p50_s, point.requests_per_s) for point, _ in known]),
                ttft_p95_s=_weighted([(point.ttft_p95_s, point.requests_per_s) for point, _ in known]),
                kv_bytes_per_s=sum(point.kv_bytes_per_s for point, _ in known),
            )
        )
    return tuple(sorted(points, key=lambda point: point.at))


def _weighted(values: Sequence[tuple[float | None, float]]) -> float | None:
    """Return the weighted mean of the values that are known; None if there are none."""
    known = [(value, weight) for value, weight in values if value is not None]
    total = sum(weight for _, weight in known)
    if not known:
        return None
    if total == 0.0:
        return sum(value for value, _ in known) / len(known)
    return sum(value * weight for value, weight in known) / total
