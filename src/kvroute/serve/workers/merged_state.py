"""The dashboard's state of all workers as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice, zip_longest

from msgspec.structs import replace

from kvroute.control import ShadowTally, joined_calibration
from kvroute.serve.observe.admin.state import PATHS_SHOWN_MOST
from kvroute.serve.observe.decision_view import DecisionView, short
from kvroute.serve.observe.distribution import Distribution
from kvroute.serve.observe.history import POINTS_MOST, HistoryPoint
from kvroute.serve.observe.recent_requests import PARTS
from kvroute.serve.observe.view import (
    DashboardUpdate,
    Distributions,
    GatewayStatus,
    MeasuredPath,
    Snapshot,
    Split,
    Tile,
    TransferView,
    WanLoad,
)

_DECISIONS_MOST = 50
_TRANSFERS_MOST = 200


def merged_snapshot(workers: Sequence[Snapshot]) -> Snapshot:
    """Return the state of all workers: counts, rates and own load are added. What workers share is the highest that one
    of them knows. Of what each observes for itself the first worker counts, health and breakers excepted: there the
    worst counts.

    Times are those of the first worker's clock. Percentiles are those of the requests of all workers, to
    0.5 %. A worker with another layout, because it has not yet followed a change of the cluster, is left out.

    Args:
        workers: one snapshot for each worker; at least one.
    """
    return replace(workers[0], tick=merged_tick(workers), history=_history(_same(workers)), distributions=None)


def merged_tick(workers: Sequence[Snapshot]) -> DashboardUpdate:
    """Return the changing values of all workers, as `merged_snapshot` merges them."""
    same = _same(workers)
    newest = _history(same, points_most=1)
    return replace(_tick([worker.tick for worker in same]), splits=_splits(same), history=newest[0] if newest else None)


def _same(workers: Sequence[Snapshot]) -> list[Snapshot]:
    """Return the workers that have the layout of the first one."""
    return [worker for worker in workers if worker.layout.instances == workers[0].layout.instances]


def _tick(ticks: Sequence[DashboardUpdate]) -> DashboardUpdate:
    """Merge all but splits and history."""
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
        decisions=tuple(sorted(_decisions(ticks), key=lambda decision: (decision.at, decision.id)))[-_DECISIONS_MOST:],
        wan=tuple([_wan(links) for links in zip(*(tick.wan for tick in ticks), strict=True)]),
        paths=_paths(ticks),
        shadow=_shadow([tick.shadow for tick in ticks if tick.shadow is not None]),
        calibration=joined_calibration([tick.calibration for tick in ticks]),
        offloaded_share=_weighted([(tick.offloaded_share, tick.arrivals_per_s) for tick in ticks]),
    )


def _paths(ticks: Sequence[DashboardUpdate]) -> tuple[MeasuredPath, ...]:
    """Return the last measurement of each pair that one of the workers shows, the slowest first."""
    last: dict[tuple[str, str], MeasuredPath] = {}
    for path in sorted((path for tick in ticks for path in tick.paths), key=lambda path: -path.age_s):
        last[path.source, path.target] = path
    slowest = sorted(last.values(), key=lambda path: (path.ratio, path.source, path.target))
    return tuple(slowest[:PATHS_SHOWN_MOST])


def _status(loads: Sequence[GatewayStatus]) -> GatewayStatus:
    return replace(
        loads[0],
        in_flight=sum(load.in_flight for load in loads),
        queued=sum(load.queued for load in loads),
        waiting=_waiting([load.waiting for load in loads if load.waiting is not None]),
        deferred=sum(load.deferred for load in loads),
        connections=sum(load.connections for load in loads),
        ready=all(load.ready for load in loads),
        draining=any(load.draining for load in loads),
    )


def _waiting(workers: Sequence[dict[int, int]]) -> dict[int, int] | None:
    bands = sorted({band for waiting in workers for band in waiting})
    return {band: sum(waiting.get(band, 0) for waiting in workers) for band in bands} if workers else None


def _tile(tiles: Sequence[Tile]) -> Tile:
    return replace(
        tiles[0],
        up=min(tile.up for tile in tiles),
        breaker=max(tile.breaker for tile in tiles),
        requests=sum(tile.requests for tile in tiles),
        load=max(tile.load for tile in tiles),
        prefill_pending_s=max(tile.prefill_pending_s for tile in tiles),
    )


def _transfers(ticks: Sequence[DashboardUpdate]) -> Iterable[TransferView]:
    """Yield the transfers of all workers with numbers that differ."""
    for place, tick in enumerate(ticks):
        for transfer in tick.transfers:
            yield replace(transfer, id=transfer.id * len(ticks) + place)


def _decisions(ticks: Sequence[DashboardUpdate]) -> Iterable[DecisionView]:
    for place, tick in enumerate(ticks):
        for decision in tick.decisions:
            at = round(decision.at + ticks[0].at - tick.at, 4)
            yield replace(decision, id=decision.id * len(ticks) + place, at=at)


def _splits(workers: Sequence[Snapshot]) -> tuple[Split, ...]:
    found: dict[str, list[tuple[Split, Sequence[bytes]]]] = {}
    for worker in workers:
        known = _distributions(worker).splits
        for split in worker.tick.splits:
            found.setdefault(split.policy, []).append((split, known.get(split.policy, ())))
    return tuple([_split([split for split, _ in same], [times for _, times in same]) for same in found.values()])


def _split(splits: Sequence[Split], times: Sequence[Sequence[bytes]]) -> Split:
    """Add the splits of one policy. Args: `times`: distributions of the TTFT and of its parts, of each split."""
    whole, *parts = [Distribution(encoded) for encoded in zip(*times, strict=True)]

    def mean_s(part: str) -> float:
        return _weighted([(split.part_mean_s[part], split.streams) for split in splits]) or 0.0

    def parts_s(share: float) -> dict[str, float]:
        return {part: short(distribution.quantile_s(share)) for part, distribution in zip(PARTS, parts, strict=True)}

    return Split(
        policy=splits[0].policy,
        requests=sum(split.requests for split in splits),
        streams=sum(split.streams for split in splits),
        ttft_p50_s=short(whole.quantile_s(0.5)),
        ttft_p90_s=short(whole.quantile_s(0.9)),
        part_mean_s={part: mean_s(part) for part in PARTS},
        part_p50_s=parts_s(0.5),
        part_p90_s=parts_s(0.9),
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


def _history(workers: Sequence[Snapshot], points_most: int = POINTS_MOST) -> tuple[HistoryPoint, ...]:
    """Add the workers' newest points, their second newest ones, and so on; return them oldest first."""
    ahead_s = [workers[0].tick.at - worker.tick.at for worker in workers]
    ended = [zip(worker.history, _distributions(worker).history, strict=True) for worker in workers]
    points = []
    for row in islice(zip_longest(*(reversed(list(series)) for series in ended)), points_most):
        known = [(*point, ahead) for point, ahead in zip(row, ahead_s, strict=True) if point is not None]
        ttft = Distribution(times for _, times, _ in known)
        points.append(
            HistoryPoint(
                at=round(max(point.at + ahead for point, _, ahead in known), 2),
                requests_per_s=sum(point.requests_per_s for point, _, _ in known),
                ttft_p50_s=_rounded(ttft.least_above_s(0.5)),
                ttft_p95_s=_rounded(ttft.least_above_s(0.95)),
                kv_bytes_per_s=sum(point.kv_bytes_per_s for point, _, _ in known),
            )
        )
    return tuple(sorted(points, key=lambda point: point.at))


def _distributions(worker: Snapshot) -> Distributions:
    assert worker.distributions is not None, "workers send them"
    return worker.distributions


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _weighted(values: Sequence[tuple[float | None, float]]) -> float | None:
    """Return the weighted mean of the values that are known; None if there are none."""
    known = [(value, weight) for value, weight in values if value is not None]
    total = sum(weight for _, weight in known)
    if not known:
        return None
    if total == 0.0:
        return sum(value for value, _ in known) / len(known)
    return sum(value * weight for value, weight in known) / total
