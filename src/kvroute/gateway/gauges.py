"""What metrics and dashboard show of the present: every instance's load and health, and the oracle's beliefs."""

from __future__ import annotations

from collections.abc import Sequence

from kvroute.control import Load as CoreLoad
from kvroute.gateway.admission import Admission
from kvroute.gateway.serving import Serving
from kvroute.gateway.station import Station
from kvroute.gateway.view import InstanceLoad, Load, OracleLoad
from kvroute.types import InstanceMeasured


def load_of(
    clusters: Sequence[Serving],
    admission: Admission,
    connections: int,
    now: float,
    *,
    ready: bool,
    draining: bool,
) -> Load:
    """The gauges at one time. Args: `clusters` that have requests, the current one first; none: not started yet."""
    queued, in_flight = admission.queued, admission.in_flight
    if not clusters:
        return Load(in_flight=in_flight, queued=queued, connections=connections, ready=ready, draining=draining)
    serving, *retired = clusters
    core = serving.control.loads(now)
    older = {name: _under_way(name, retired) if retired else 0 for name in serving.stations}
    instances = tuple(
        _instance(station, older[name], core[name], serving.measured.get(name), now)
        for name, station in serving.stations.items()
    )
    return Load(
        in_flight=in_flight,
        queued=queued,
        connections=connections,
        ready=ready,
        draining=draining,
        oracle=_oracle(serving, now),
        instances=instances,
    )


def _under_way(name: str, retired: Sequence[Serving]) -> int:
    return sum(each.stations[name].under_way for each in retired if name in each.stations)


def _instance(
    station: Station, older: int, core: CoreLoad, measured: InstanceMeasured | None, now: float
) -> InstanceLoad:
    return InstanceLoad(
        name=station.name,
        up=station.guard.healthy,
        breaker=station.guard.breaker.state(now),
        requests=station.under_way + older,
        running=measured.running if measured else station.under_way + older,
        waiting=measured.waiting if measured else core.queued,
        prefill_pending_s=core.pending_s,
        kv_used_share=measured.kv_used_share if measured else None,
        scrape_age_s=now - measured.at if measured else None,
    )


def _oracle(serving: Serving, now: float) -> OracleLoad:
    oracle = serving.control.oracle
    return OracleLoad(
        source=serving.settings.oracle.source,
        age_s=oracle.staleness_s(now),
        congestion=tuple(float(share) for share in oracle.congestion(now)),
        learned_ratio=oracle.learned_ratio(now),
    )
