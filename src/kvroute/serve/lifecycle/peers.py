"""The gateways that share with this one: workers of its machine, and those of the section `replication`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvroute.control import Admissions, ChargedUsage, Control
from kvroute.serve.replication.common_limits import CommonLimits, CommonUsage
from kvroute.serve.replication.driver import Replication, SharedStream
from kvroute.serve.replication.stream import RedisStream
from kvroute.types import Event, PeerReported, RoleSwitched, ScaleEnded

if TYPE_CHECKING:
    from kvroute.serve.config.replication import ReplicationSection
    from kvroute.serve.lifecycle.reload import ClusterManager
    from kvroute.serve.observe.metrics.metrics import Metrics
    from kvroute.serve.proxy.admission.admission import PeerCounts
    from kvroute.serve.proxy.admission.rate_limits import OtherUsage

_WORKER_LEASE_S, _WORKER_FLUSH_S = 5.0, 0.001
"""Times of `Replication` between workers of one machine, in seconds."""


@dataclass(frozen=True, slots=True)
class SharedByWorkers:
    """What a worker shares with the other workers of its machine."""

    salt_secret: bytes
    """Secret from which cache salts are derived, unless the settings name another one."""
    group: str
    """Identifier of the workers of this machine together."""
    counts: PeerCounts
    """What the others count against the limits of admission."""
    stream: Callable[[], SharedStream]
    """Connects to the stream of their bookings, which is used unless the settings have the section `replication`."""


class Peers:
    """What this gateway shares, and with whom."""

    def __init__(
        self,
        section: ReplicationSection | None,
        cluster: str,
        shared: SharedByWorkers | None,
        metrics: Metrics,
        now: Callable[[], float],
    ) -> None:
        """
        Args:
            section: the section `replication`; None: there is none.
            cluster: name of the cluster.
            shared: what it shares with the other workers of its machine; None: it is no worker.
            metrics: counts entries.
            now: the gateway's clock, in seconds.
        """
        self.clusters: ClusterManager | None = None
        """The clusters that are served; set before the replication starts."""
        self.counts: PeerCounts | None = shared.counts if shared is not None else None
        """What the same gateways count against the limits of admission; None: there are none."""
        self.usage: OtherUsage | None = None
        """What they charge to keys; None: there are no others with common rates."""
        self.replication: Replication | None = None
        """The connection to the gateways of the section, workers of this machine among them; else to the other workers.
        None: there are none."""
        if section is None and shared is None:
            return
        own_only = section is not None and section.limits == "own"
        group = shared.group if shared is not None else ""
        usage = ChargedUsage(group, within_group=own_only)
        if section is None:
            assert shared is not None
            self.replication = Replication(
                shared.stream, self, metrics, now, lease_s=_WORKER_LEASE_S, flush_s=_WORKER_FLUSH_S, usage=usage
            )
        else:
            admissions = Admissions(group) if section.limits == "common" else None
            self.replication = Replication(
                lambda: RedisStream(section, cluster),
                self,
                metrics,
                now,
                lease_s=float(section.lease_s),
                flush_s=float(section.flush_s),
                admissions=admissions,
                usage=usage,
            )
            if admissions is not None:
                self.counts = CommonLimits(admissions, self.counts, self.replication.counted)
        self.usage = CommonUsage(usage, self.replication.counted)

    # See `Cores`

    def cores(self) -> tuple[Control, ...]:
        """Return the cores that have requests, the current one first."""
        assert self.clusters is not None, "start first"
        return tuple([cluster.control for cluster in self.clusters.clusters])

    def notify(self, event: Event) -> None:
        """Pass an event of another gateway to the current core."""
        assert self.clusters is not None, "start first"
        self.clusters.runtime.report.received(event)
        if isinstance(event, PeerReported):
            for reported in event.report.events:
                if isinstance(reported, RoleSwitched):
                    self.clusters.role_switches.followed(reported)
                elif isinstance(reported, ScaleEnded):
                    self.clusters.scaling.followed(reported)

    def approximate(self) -> frozenset[str]:
        """Return the instances whose cached prefixes are known from requests alone."""
        assert self.clusters is not None, "start first"
        return frozenset([name for name, engine in self.clusters.runtime.engines.items() if engine.approximate])
