"""State shown by the dashboard and the gauges: layout, load, transfers, decisions, and TTFT of the last minute.

The hooks of requests only append to bounded rings; everything else is computed on demand. It makes no decisions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

import msgspec

from kvroute.control import Calibration, CalibrationRow, ShadowTally
from kvroute.serve.observe.admin.measured_paths import MeasuredPaths
from kvroute.serve.observe.decision_view import judgement_of, short
from kvroute.serve.observe.history import History
from kvroute.serve.observe.layout import ClusterLayout, LayoutInstance, layout_of
from kvroute.serve.observe.metrics.rates import EventRate, WanTraffic
from kvroute.serve.observe.recent_requests import WINDOW_S, RecentRequests
from kvroute.serve.observe.view import (
    BreakerState,
    DashboardUpdate,
    Distributions,
    GatewayStatus,
    InstanceLoad,
    Snapshot,
    Tile,
    TransferView,
    TtftBreakdown,
)
from kvroute.topology import Cluster
from kvroute.types import Decision, Decode, Prefill, TransferMeasured

DECISIONS_MOST = 50
TICK_DECISIONS_MOST = 12
TRANSFERS_SHOWN_MOST = 200
PATHS_SHOWN_MOST = 8
LINGER_S = 1.0
"""Time for which finished transfers stay visible: most take less than the time between two dashboard updates."""


@dataclass(slots=True)
class _Moving:
    id: int
    request_id: int
    source: int
    target: int
    tier: int
    kv_bytes: float
    started_s: float
    expected_s: float
    ended_s: float = -1.0


class DashboardState:
    """Receives the hooks of requests and returns snapshots; times are the gateway's clock in seconds and never
    decrease."""

    def __init__(
        self,
        cluster: Cluster,
        load: Callable[[], GatewayStatus],
        *,
        policy: str,
        version: str,
        distributions: bool = False,
    ) -> None:
        """
        Args:
            load: returns the current load; it is called only for a snapshot.
            distributions: whether snapshots have the distributions of their times.
        """
        self._distributions = distributions
        self._load, self._version = load, version
        self.policy = policy
        self._layout_id = 0
        self._shadow: ShadowTally | None = None
        self.replace(cluster)
        self._decisions: deque[tuple[int, float, str, Decision]] = deque(maxlen=DECISIONS_MOST)
        self._decided = 0
        self._moved = 0
        self._ended: deque[_Moving] = deque(maxlen=TRANSFERS_SHOWN_MOST)
        self._recent = RecentRequests()
        self._arrivals, self._finishes, self._rejects, self._errors = EventRate(), EventRate(), EventRate(), EventRate()
        self._history = History()
        self._calibration = Calibration()
        self._calibrated = 0
        self._calibration_rows: tuple[CalibrationRow, ...] = ()

    def replace(self, cluster: Cluster) -> None:
        """Show another cluster from now on (reload); its layout gets a new id."""
        self._layout_id += 1
        self.layout = layout_of(cluster, self._layout_id)
        self._positions = {instance.name: k for k, instance in enumerate(cluster.instances)}
        self._moving: dict[int, _Moving] = {}
        self._ended = deque(maxlen=TRANSFERS_SHOWN_MOST)
        self._traffic = WanTraffic(cluster)
        self._paths = MeasuredPaths(cluster)
        self._away = frozenset(site.name for site in self.layout.sites if site.role == "prefill")
        self._prefills, self._offloaded = EventRate(int(WINDOW_S)), EventRate(int(WINDOW_S))

    def change(self, cluster: Cluster, layout: ClusterLayout) -> None:
        """Show the cluster after a change; transfers between instances that stay are still shown. Args: `layout`: made
        by `layout_of` with the number `next_layout`."""
        names = [instance.name for instance in self.layout.instances]
        self._layout_id, self.layout = layout.id, layout
        self._positions = positions = {instance.name: k for k, instance in enumerate(layout.instances)}
        for moving in (*self._moving.values(), *self._ended):
            moving.source = positions.get(names[moving.source], -1)
            moving.target = positions.get(names[moving.target], -1)
        self._moving = {key: moving for key, moving in self._moving.items() if min(moving.source, moving.target) >= 0}
        kept = [moving for moving in self._ended if min(moving.source, moving.target) >= 0]
        self._ended = deque(kept, maxlen=TRANSFERS_SHOWN_MOST)
        self._traffic = WanTraffic(cluster)
        self._paths.change(cluster)

    @property
    def layout_id(self) -> int:
        """Id of the present layout."""
        return self.layout.id

    @property
    def next_layout(self) -> int:
        """Id of the layout after the present one."""
        return self._layout_id + 1

    def shadow(self, policy: str) -> None:
        """Set the shadow policy, empty for none; its counts continue if it does not change."""
        if policy != (self._shadow.policy if self._shadow else ""):
            self._shadow = ShadowTally(policy) if policy else None

    def arrived(self, at: float) -> None:
        """Count a request that was read."""
        self._arrivals.add(at)

    def decided(self, decision: Decision, at: float) -> None:
        """Record a decision; its arrays are referenced, not copied."""
        self._decided += 1
        self._decisions.append((self._decided, at, self.policy, decision))
        if self._shadow is not None and type(decision) is Decode:
            self._shadow.decided(decision)
        if type(decision) is Prefill and decision.offload is not None:
            self._prefills.add(at)
            if decision.offload.site in self._away:
                self._offloaded.add(at)

    def rejected(self, at: float) -> None:
        """Count a request that got no instance or was rejected before scheduling."""
        self._rejects.add(at)

    def transfer_started(self, decision: Decode, at: float, expected_s: float = 0.0) -> None:
        """Record that a request's KV transfer has started. A second transfer of one request replaces the first one."""
        number, ends = decision.request_id, (decision.source, decision.target)
        self._moves(number, number, *ends, decision.tier, decision.kv_bytes, at, expected_s)

    def copy_started(self, decision: Prefill, tier: int, at: float, expected_s: float) -> None:
        """Record that the copy of a cached prefix has started; its end is reported with the negative copy number."""
        ends = decision.copy_from, decision.instance
        self._moves(-decision.copy_id, decision.request_id, *ends, tier, decision.copy_bytes, at, expected_s)

    def _moves(
        self, key: int, request: int, source: str, target: str, tier: int, kv_bytes: float, at: float, expected_s: float
    ) -> None:
        ends = self._positions.get(source), self._positions.get(target)
        if ends[0] is None or ends[1] is None:
            return  # decided before the cluster file was reloaded
        self._moved += 1
        self._moving[key] = _Moving(self._moved, request, ends[0], ends[1], tier, kv_bytes, at, expected_s)

    def transfer_ended(self, number: int, at: float, *, landed: bool = True) -> None:
        """Record that a transfer has completed or failed; does nothing if there is none."""
        moving = self._moving.pop(number, None)
        if moving is not None:
            moving.ended_s = at
            self._ended.append(moving)
            if landed:
                self._traffic.landed(moving.source, moving.target, moving.kv_bytes, at)

    def transfer_measured(self, event: TransferMeasured) -> None:
        """Record a measurement of the KV transfers between two instances of the cluster."""
        self._paths.measured(event)

    def lowest_path_ratios(self, at: float) -> tuple[float | None, ...]:
        """See `MeasuredPaths.lowest_ratios`."""
        return self._paths.lowest_ratios(at)

    def first_token(
        self, ttft: TtftBreakdown, at: float, *, tier: int | None, kv_bytes: float = 0.0, policy: str = ""
    ) -> None:
        """Record the first byte of a client's stream; `tier` None: prefill and decode on one instance."""
        self._recent.first_token(ttft, at, policy or self.policy, tier=tier, kv_bytes=kv_bytes)

    def predicted(self, predicted_s: float, actual_s: float) -> None:
        """Record the predicted and the actual TTFT of a stream."""
        self._calibration.add(predicted_s, actual_s)

    def whole_answer(self, at: float, *, tier: int | None, kv_bytes: float = 0.0, policy: str = "") -> None:
        """Record a response that is not streamed, whose first token cannot be observed."""
        self._recent.whole_answer(at, policy or self.policy, tier=tier, kv_bytes=kv_bytes)

    def finished(self, at: float, code: int) -> None:
        """Count a request whose response is complete or has failed; 499: the client disconnected, 503: it was
        rejected."""
        self._finishes.add(at)
        if code >= 500 and code != 503:
            self._errors.add(at)

    def stream_failed(self, at: float) -> None:
        """Count a stream that ended with an error event; its status was 200, so `finished` counts no error."""
        self._errors.add(at)

    def remember(self, at: float) -> None:
        """Add a point to the history when its step has ended; called several times per second, without requests too."""
        if not self._history.is_due(at):
            return
        ttft_s, kv_bytes = self._recent.newest(self._history.answers)
        self._history.add(
            at,
            arrivals=self._arrivals.total,
            answers=self._recent.count,
            ttft_s=ttft_s,
            kv_bytes=kv_bytes,
        )

    def snapshot(self, at: float) -> Snapshot:
        """Return the current state with all recorded decisions."""
        self._recent.forget_splits()  # the snapshot kept of a run must include its last request
        return Snapshot(
            layout=self.layout,
            tick=self.tick(at, DECISIONS_MOST),
            history=self._history.points,
            distributions=self._all_distributions(at) if self._distributions else None,
        )

    def _all_distributions(self, at: float) -> Distributions:
        return Distributions(splits=self._recent.distributions(at), history=self._history.distributions)

    def tick(self, at: float, decisions_most: int = TICK_DECISIONS_MOST) -> DashboardUpdate:
        """Return the values that change, with the newest decisions."""
        load = self._load()
        newest = islice(self._decisions, max(0, len(self._decisions) - decisions_most), None)
        return DashboardUpdate(
            at=round(at, 4),
            layout_id=self.layout.id,
            policy=self.policy,
            version=self._version,
            load=msgspec.structs.replace(load, instances=()),
            instances=self._tiles(load.instances),
            arrivals_per_s=self._arrivals.per_s(at),
            finishes_per_s=self._finishes.per_s(at),
            rejects_per_s=self._rejects.per_s(at),
            errors_per_s=self._errors.per_s(at),
            requests=int(self._arrivals.total),
            rejects=int(self._rejects.total),
            transfers_in_flight=len(self._moving),
            transfers=self._transfers(at),
            decisions=tuple(judgement_of(*entry) for entry in newest),
            window_s=WINDOW_S,
            splits=self._recent.splits(at),
            wan=self._traffic.load(
                ((moving.source, moving.target, moving.kv_bytes) for moving in self._moving.values()), at
            ),
            paths=self._paths.slowest(at, PATHS_SHOWN_MOST),
            shadow=msgspec.structs.replace(self._shadow) if self._shadow else None,
            offloaded_share=self._offloaded_share(at),
            history=self._history.newest,
            calibration=self._calibration_now(),
        )

    def _calibration_now(self) -> tuple[CalibrationRow, ...]:
        """Return the deciles, which are computed again after one more percent of the requests."""
        if self._calibration.count > 1.01 * self._calibrated:
            self._calibrated = self._calibration.count
            self._calibration_rows = self._calibration.rows()
        return self._calibration_rows

    def _offloaded_share(self, at: float) -> float | None:
        prefills = self._prefills.recent(at)
        return short(self._offloaded.recent(at) / prefills) if prefills else None

    def _tiles(self, loads: Iterable[InstanceLoad]) -> tuple[Tile, ...]:
        by_name = {load.name: load for load in loads}
        return tuple(_tile(instance, by_name.get(instance.name, _UNKNOWN)) for instance in self.layout.instances)

    def _transfers(self, at: float) -> tuple[TransferView, ...]:
        while self._ended and at - self._ended[0].ended_s > LINGER_S:
            self._ended.popleft()
        recent = islice(reversed(self._ended), TRANSFERS_SHOWN_MOST // 2)
        moving = islice(reversed(self._moving.values()), TRANSFERS_SHOWN_MOST // 2)
        return tuple(_transfer(entry, at) for entry in (*recent, *moving))


_BREAKER: dict[BreakerState, int] = {"closed": 0, "half-open": 1, "open": 2}
_UNKNOWN = InstanceLoad(name="", up=False)


def _tile(instance: LayoutInstance, load: InstanceLoad) -> Tile:
    # Full means a second of pending prefill or a full batch: the delay that a new request would have.
    batch = max(load.requests, load.running + load.waiting) / (instance.batch_max or 1)
    pending_s = load.prefill_pending_s
    role = load.role or instance.role
    share = batch if role == "decode" else pending_s if role == "prefill" else max(batch, pending_s)
    return Tile(
        int(load.up),
        _BREAKER[load.breaker],
        load.requests,
        load.running,
        load.waiting,
        1.0 if share > 1.0 else share,
        pending_s,
        load.kv_used_share,
        load.scrape_age_s,
        load.storage_queue_s,
    )


def _transfer(moving: _Moving, at: float) -> TransferView:
    return TransferView(
        id=moving.id,
        request_id=moving.request_id,
        source=moving.source,
        target=moving.target,
        tier=moving.tier,
        kv_bytes=moving.kv_bytes,
        age_s=round(max(0.0, at - moving.started_s), 4),
        expected_s=round(moving.expected_s, 6),
        took_s=None if moving.ended_s < 0 else round(moving.ended_s - moving.started_s, 6),
    )
