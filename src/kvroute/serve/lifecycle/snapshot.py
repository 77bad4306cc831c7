"""Present values for metrics and dashboard: the load and health of every instance, and the oracle's estimates."""

from __future__ import annotations

from collections.abc import Sequence

from kvroute.control import CountedLoad as CoreLoad
from kvroute.control.offload.allocation import Review
from kvroute.control.offload.offloader import Offloader
from kvroute.policies import FORESIGHT_POLICIES
from kvroute.serve.engines.client import EngineClient
from kvroute.serve.lifecycle.role_switches import RoleSwitches
from kvroute.serve.lifecycle.scaling import ScalingDriver
from kvroute.serve.observe.view import (
    DiscoveryLoad,
    ForesightLoad,
    GatewayStatus,
    InstanceLoad,
    OffloadLoad,
    OracleLoad,
    PanicLoad,
    ReplicationLoad,
    ReviewLoad,
    RoleSwitchLoad,
    ScalingLoad,
    SiteLoad,
)
from kvroute.serve.proxy.admission.admission import AdmissionController
from kvroute.serve.proxy.runtime import ClusterRuntime
from kvroute.types import InstanceMeasured


def status_snapshot(
    clusters: Sequence[ClusterRuntime],
    admission: AdmissionController,
    connections: int,
    now: float,
    *,
    ready: bool,
    draining: bool,
    forwarded: int = 0,
    role_switches: RoleSwitches | None = None,
    scaling: ScalingDriver | None = None,
    discovery: DiscoveryLoad | None = None,
    replication: ReplicationLoad | None = None,
    path_ratios: tuple[float | None, ...] = (),
) -> GatewayStatus:
    """Return the gauges. Args: `clusters` that have requests, the current one first; empty: not started yet."""
    queued, in_flight = admission.queued, admission.in_flight
    if not clusters:
        return GatewayStatus(
            in_flight=in_flight, queued=queued, connections=connections, ready=ready, draining=draining
        )
    runtime, *retired = clusters
    core = runtime.control.loads(now)
    older = {name: _in_flight(name, runtime, retired) if retired else 0 for name in runtime.engines}
    instances = tuple(
        _instance(engine, older[name], core[name], runtime.measured.get(name), now)
        for name, engine in runtime.engines.items()
    )
    return GatewayStatus(
        in_flight=in_flight,
        queued=queued,
        connections=connections,
        forwarded=forwarded,
        ready=ready,
        draining=draining,
        oracle=_oracle(runtime, now),
        foresight=_foresight(runtime, now),
        offload=_offload(runtime, role_switches, now),
        scaling=_scaling(runtime, scaling),
        panics=tuple(
            PanicLoad(
                model=panic.model,
                role=panic.role,
                active=panic.state.active,
                available=panic.state.available,
                instances=panic.state.instances,
            )
            for panic in runtime.panics.sets
        ),
        discovery=discovery,
        replication=replication,
        waiting=runtime.placement.depths() if runtime.placement is not None else None,
        deferred=runtime.placement.deferred if runtime.placement is not None else 0,
        path_ratios=path_ratios,
        instances=instances,
    )


def _offload(runtime: ClusterRuntime, role_switches: RoleSwitches | None, now: float) -> OffloadLoad | None:
    offloading, section = runtime.control.offloading, runtime.settings.offload
    if offloading is None or section is None:
        return None
    in_progress = role_switches.in_progress.values() if role_switches is not None else ()
    engines = runtime.engines.values()
    return OffloadLoad(
        sites=tuple(_site(runtime, offloading, site, now) for site in offloading.datacenters.prfaas),
        switches_roles=section.role_switch is not None,
        role_switches=tuple(RoleSwitchLoad(instance=c.instance, role=c.role, stage=c.stage) for c in in_progress),
        roles={engine.name: engine.role for engine in engines if engine.role != engine.instance.role},
        review=_review(offloading.last_review),
    )


def _scaling(runtime: ClusterRuntime, driver: ScalingDriver | None) -> ScalingLoad | None:
    scaling = runtime.control.scaling
    if scaling is None:
        return None
    steps = driver.steps if driver is not None else []
    return ScalingLoad(
        models=tuple(found for _, found in sorted(scaling.last.items())),
        starting=tuple(step.instance for step in steps if step.action == "start"),
        stopping=tuple(step.instance for step in steps if step.action == "stop"),
        stopped=tuple(sorted(driver.stopped)) if driver is not None else (),
    )


def _site(runtime: ClusterRuntime, offloading: Offloader, site: int, now: float) -> SiteLoad:
    name, threshold, egress = offloading.datacenters.names[site], offloading.thresholds[site], offloading.egress[site]
    others, utilisation = offloading.utilisation(site, now)
    seen = runtime.wan_paths.telemetry.sample(name, now) if runtime.wan_paths is not None else None
    return SiteLoad(
        name=name,
        threshold_tokens=threshold.tokens,
        base_tokens=threshold.base_tokens,
        open=threshold.up,
        wan_path=runtime.wan_paths.state(name, now) if runtime.wan_paths is not None else "closed",
        utilisation=utilisation,
        others=others,
        bytes_per_s=egress.bytes_per_s,
        sent_bytes_per_s=seen.bytes_per_s if seen is not None else None,
        sent_again_ratio=seen.again_share if seen is not None else None,
        queue_delay_s=seen.queue_delay_s if seen is not None else None,
        backlog_bytes=egress.backlog_bytes,
        backlog_s=egress.queue_s(others),
    )


def _review(review: Review | None) -> ReviewLoad | None:
    if review is None:
        return None
    return ReviewLoad(
        at=review.at,
        verdict=review.verdict,
        rate_per_s=review.rate_per_s,
        lambda_max_per_s=review.lambda_max_per_s,
        best_per_s=review.best_per_s,
        gain=review.gain,
        binding=review.binding,
        n_prefill=review.n_prefill,
        n_decode=review.n_decode,
    )


def _in_flight(name: str, runtime: ClusterRuntime, retired: Sequence[ClusterRuntime]) -> int:
    uid = runtime.uids.get(name)
    same = (old for old in retired if name in old.engines and old.uids.get(name) == uid)
    return sum(old.engines[name].in_flight for old in same)


def _instance(
    engine: EngineClient, older: int, core: CoreLoad, measured: InstanceMeasured | None, now: float
) -> InstanceLoad:
    return InstanceLoad(
        name=engine.name,
        up=engine.availability.healthy,
        breaker=engine.availability.breaker.state(now),
        requests=engine.in_flight + older,
        running=measured.running if measured else engine.in_flight + older,
        waiting=measured.waiting if measured else core.queued,
        prefill_pending_s=core.pending_s,
        storage_queue_s=core.storage_queue_s,
        kv_used_share=measured.kv_used_share if measured else None,
        scrape_age_s=now - measured.at if measured else None,
        role=engine.role,
    )


def _oracle(runtime: ClusterRuntime, now: float) -> OracleLoad:
    oracle = runtime.control.oracle
    return OracleLoad(
        source=runtime.settings.oracle.source,
        age_s=oracle.staleness_s(now),
        congestion=tuple(float(share) for share in oracle.congestion(now)),
        learned_ratio=oracle.learned_ratio(now),
    )


def _foresight(runtime: ClusterRuntime, now: float) -> ForesightLoad | None:
    learned, settings = runtime.control.learned(now), runtime.settings
    if learned is None:
        return None
    acts = settings.policy in FORESIGHT_POLICIES
    return ForesightLoad(policy=settings.policy if acts else settings.shadow, tiers=learned)
