"""A cluster file as a gateway serves it, in the form of a simulation's input."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from kvroute.control import ControlSpec
from kvroute.serve.config.modelled import default_ttft_s, not_modelled, simulated_spec
from kvroute.serve.config.preflight import deployment_of
from kvroute.serve.config.service_classes import DEFAULT_CLASS, ServiceClass
from kvroute.serve.config.settings import GatewaySettings
from kvroute.serve.proxy.admission.admission import Accepted, AdmissionController, AdmissionLimits, Queued
from kvroute.sim.placement import SimulatedTenancy, Tenant
from kvroute.sim.settings import SimSpec, Slo, Telemetry
from kvroute.topology import Cluster
from kvroute.topology.reading.assembly import check_simulable, read_text


@dataclass(frozen=True, slots=True)
class GrantedService:
    """What a gateway grants to requests without a key: how many at a time, their turn and their deadline."""

    limits: AdmissionLimits = field(default_factory=AdmissionLimits)
    ttft_max_s: float | None = None
    """Requests whose predicted time to the first token is longer are refused; None: none is."""
    work_s: float | None = None
    """See `SimulatedTenancy`."""
    running: int | None = None

    @property
    def predicts(self) -> bool:
        """Whether the core must predict times to the first token."""
        return self.ttft_max_s is not None or self.work_s is not None

    def tenancy(self, requests: int) -> SimulatedTenancy:
        """Return the turns and deadlines of a run with so many requests."""
        everyone = Tenant(DEFAULT_CLASS, ttft_max_s=self.ttft_max_s)
        admission = GatewayAdmission(self.limits)
        return SimulatedTenancy(
            (everyone,), [0] * requests, self.work_s, self.running, admission, self.limits.queue_wait_s
        )


class GatewayAdmission:
    """The gateway's admission control for simulated requests, which have no key; see `sim.placement.Admission`."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._controller = AdmissionController(limits)

    def arrive(self, request: int, now: float) -> float | str | None:
        """Admit, queue or refuse a request."""
        match self._controller.acquire(request, None, now):
            case Accepted():
                return None
            case Queued(expires_at=expires_at):
                return expires_at
            case refused:
                return refused.reason

    def leave(self, request: int, now: float) -> list[int]:
        """Remove a request that is over."""
        return self._controller.release(request, now)

    def expire(self, now: float) -> tuple[list[int], str]:
        """Remove the requests that have waited too long."""
        return self._controller.expire(now), self._controller.overdue(now).reason


def settings_of(gateway: GatewaySettings) -> SimSpec:
    """Return what a core learns of the network and how KV caches are sent, by the settings of a gateway."""
    oracle, offload = gateway.oracle, gateway.offload
    sources: dict[str, Telemetry] = {"static": "none", "push": "tier", "prometheus": "tier"}
    per_link = oracle.prometheus is not None and oracle.prometheus.per_link is not None
    interval_s = gateway.scrape.interval_s if oracle.prometheus is None else oracle.prometheus.interval_s
    early = gateway.layerwise or (offload is not None and offload.layerwise)
    return SimSpec(
        telemetry="link" if per_link else sources[oracle.source],
        oracle_refresh_s=float(interval_s),
        separates_own_traffic=oracle.separates_own_traffic,
        measures_transfers=True,
        transfer="layerwise" if early else "serial",
        review_s=float(offload.check_interval_s) if offload is not None else None,
        slo=_slo_of(gateway),
    )


def _slo_of(gateway: GatewaySettings) -> Slo:
    """Return what a good request is: the limit of requests without a key, else the targets of the policy."""
    limit, targets = gateway.classes.get(DEFAULT_CLASS, ServiceClass()).slo, gateway.policy_parameters()
    ttft_s = float(limit.ttft_s) if limit is not None and limit.ttft_s is not None else targets.get("ttft")
    return Slo(ttft_s=ttft_s or Slo().ttft_s, tpot_s=targets.get("tpot") or None)


def service_of(gateway: GatewaySettings) -> GrantedService:
    """Return limits, turns and deadlines of requests by the settings of a gateway."""
    limits, queue = gateway.limits, gateway.fair_queue
    return GrantedService(
        limits=AdmissionLimits(limits.in_flight, limits.queue, float(limits.queue_wait_s)),
        ttft_max_s=default_ttft_s(gateway),
        work_s=float(queue.work_s) if queue is not None else None,
        running=queue.running if queue is not None else None,
    )


@dataclass(frozen=True, slots=True)
class ServedFile:
    """A cluster file without errors, and what a gateway would do with it."""

    cluster: Cluster
    gateway: GatewaySettings

    @property
    def spec(self) -> ControlSpec:
        """Configuration of the core."""
        return simulated_spec(self.gateway)

    @property
    def settings(self) -> SimSpec:
        """See `settings_of`."""
        return settings_of(self.gateway)

    @property
    def service(self) -> GrantedService:
        """See `service_of`."""
        return service_of(self.gateway)

    @property
    def not_modelled(self) -> list[str]:
        """Settings of the file that a simulation leaves out, by name."""
        return not_modelled(self.cluster.file.gateway)


def served_file(path: str) -> ServedFile:
    """Read a cluster file that has instances of its own, once while it does not change.

    Raises:
        InputErrors: every fault of the file, those of its `gateway` section included, each with its line and field.
        InputError: the file cannot be read, or it leaves its instances to `discovery`.
    """
    return _read(path, read_text(path))


@lru_cache(maxsize=2)
def _read(path: str, text: str) -> ServedFile:
    cluster, settings = deployment_of(text, path, embedded=True, environ=None)
    check_simulable(cluster, path)
    return ServedFile(cluster, settings)
