"""Decides when a request is placed: at once, in its turn, or not at all because its first token would come too late.

It is between the reading of the prompt and the control core, so that prompt lengths and cached prefixes count.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvroute.control import Backlog, QueuedRequest, RequestQueue, WaitingRequest
from kvroute.serve.proxy.admission.tenancy import ClassGrant, Refusal, RequestAccount, Tenancy
from kvroute.serve.proxy.retry import RETRY_AFTER_MAX_S
from kvroute.types import Reject, Request

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvroute.control import Control
    from kvroute.http.headers import Headers
    from kvroute.serve.api.json_fields import Fields
    from kvroute.serve.config.service_classes import FairQueueSection
    from kvroute.serve.observe.metrics.metrics import Metrics

_CHECK_MIN_S, _CHECK_MAX_S = 0.002, 0.05
"""Shortest and longest interval at which waiting requests are checked again."""
_RETRY_S = 0.02
"""Shortest interval between two attempts to place deferred requests."""


class Placeable(Protocol):
    """A request that has been read and is not placed yet."""

    account: RequestAccount

    def place(self, now: float, ttft_max_s: float | None) -> Reject | None:
        """Ask the core for a decision and carry it out. Return its Reject if the first token would come too late:
        nothing has happened then."""
        ...

    def reject(self, refusal: Refusal) -> None:
        """Respond that the request is not served now."""
        ...

    def internal_error(self, error: Exception) -> None:
        """Handle a bug in the gateway."""
        ...


@dataclass(frozen=True, slots=True)
class Arrival:
    """What is known of a request when it has been read."""

    request: Request
    received_at: float
    headers: Headers
    fields: Fields
    reserve_tokens: int
    """Largest number of output tokens that it is charged for in advance."""
    full_status: int
    """Status of the response if there is no room for it."""


@dataclass(slots=True)
class _Item:
    placeable: Placeable
    granted: ClassGrant
    entry: QueuedRequest
    model: str
    full_status: int
    since: float


class PlacementQueue:
    """The requests of one cluster that wait to be placed."""

    def __init__(
        self,
        control: Control,
        tenancy: Tenancy,
        section: FairQueueSection | None,
        metrics: Metrics,
        now: Callable[[], float],
        *,
        wait_max_s: float,
    ) -> None:
        """
        Args:
            control: the core, whose view says whether there is room.
            tenancy: what a request may use.
            section: when requests wait for their turn; None: never.
            metrics: counts.
            now: the gateway's clock, in seconds.
            wait_max_s: longest time that a request waits.
        """
        self._control, self._tenancy, self._section = control, tenancy, section
        self._metrics, self._now, self._wait_max_s = metrics, now, wait_max_s
        self._queues: dict[str, RequestQueue] = {}
        self._items: dict[int, _Item] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._pumping = self._closed = False
        self._retried_at = -math.inf

    @property
    def deferred(self) -> int:
        """Number of requests that wait because their first token would come too late."""
        return sum([queue.deferred for queue in self._queues.values()])

    def depths(self) -> dict[int, int]:
        """Return the number of requests that wait for their turn, by priority."""
        found: dict[int, int] = {}
        for queue in self._queues.values():
            for band, depth in queue.fair.depths().items():
                found[band] = found.get(band, 0) + depth
        return dict(sorted(found.items()))

    def submit(self, placeable: Placeable, arrival: Arrival, now: float) -> None:
        """Place a request now or later, or turn it away.

        Raises:
            RequestError: 400, its priority or its SLO is not a number.
        """
        request, tenancy = arrival.request, self._tenancy
        granted = tenancy.class_grant(placeable.account.key, arrival.headers, arrival.fields)
        placeable.account.service_class = granted.name
        charged = tenancy.charge(placeable.account.key, request.input_tokens + arrival.reserve_tokens, now)
        if isinstance(charged, Refusal):
            self._refuse(placeable, charged)
            return
        placeable.account.charge = charged
        item = self._item(placeable, granted, arrival, now)
        queue = self._queues.get(item.model)
        if queue is None:
            queue = self._queues[item.model] = RequestQueue()
        if self._section is None:
            self._place(queue, item, now)
        elif (late := self._cannot_meet_deadline(queue, item, now)) is not None:
            self._refuse(placeable, late)
        else:
            self._items[request.id] = item
            queue.push(item.entry)
            self.place_ready(now)
            return
        self._watch()

    def _item(self, placeable: Placeable, granted: ClassGrant, arrival: Arrival, now: float) -> _Item:
        request = arrival.request
        work_s = self._control.work_s(request, now, self._tenancy.output_tokens) if self._section is not None else 0.0
        deadline = math.inf if granted.slo_s is None else arrival.received_at + granted.slo_s
        waiting = WaitingRequest(request.id, placeable.account.key or "", granted.band, granted.weight, work_s)
        entry = QueuedRequest(waiting, now + self._wait_max_s, deadline)
        return _Item(placeable, granted, entry, request.model, arrival.full_status, now)

    def ended(self, number: int, now: float) -> None:
        """Handle the end of a request, waiting or not: others may be placed."""
        item = self._items.pop(number, None)
        if item is not None:
            self._queues[item.model].remove(number)
        if self._items:
            self.place_ready(now)

    def place_ready(self, now: float) -> None:
        """Place waiting requests as far as there is room. A request may end at once and make room for more, so calls
        from inside do nothing: this is a loop to avoid recursion."""
        if self._pumping or self._closed or not self._items:
            return
        self._pumping = True
        try:
            for model, queue in list(self._queues.items()):
                self._expire(queue, now)
                if queue.deferred and now - self._retried_at >= _RETRY_S:
                    self._retried_at = now
                    for entry in queue.take_deferred():
                        self._place(queue, self._items.pop(entry.waiting.number), now)
                while len(queue.fair) and self._has_room(model, now):
                    next_one = queue.pop()
                    assert next_one is not None
                    self._place(queue, self._items.pop(next_one.waiting.number), now)
        finally:
            self._pumping = False
        self._watch()

    def close(self) -> None:
        """Stop; the requests that wait have been answered by others."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _has_room(self, model: str, now: float) -> bool:
        section, backlog = self._section, self._control.backlog(model, now)
        if section is None or backlog is None:
            return True
        most = section.running if section.running is not None else backlog.slots
        return backlog.work_s < section.work_s and (backlog.running < most or not backlog.instances)

    def _place(self, queue: RequestQueue, item: _Item, now: float) -> None:
        entry, placeable = item.entry, item.placeable
        left_s = entry.deadline - now if entry.deadline < math.inf else None
        try:
            late = placeable.place(now, left_s)
        except Exception as error:
            placeable.internal_error(error)
            return
        if late is None:
            self._metrics.classes.placed(item.granted.name, now - item.since, entry.waiting.work_s)
            return
        assert left_s is not None
        least_s = late.least_s or 0.0
        if item.granted.defers and least_s <= left_s and now < entry.expires_at and not self._closed:
            self._items[entry.waiting.number] = item
            queue.defer(entry, least_s)
            return
        self._refuse(placeable, _late(late.reason, (late.ttft_s or 0.0) - left_s, item.full_status))

    def _cannot_meet_deadline(self, queue: RequestQueue, item: _Item, now: float) -> Refusal | None:
        """Return the response to a request that would wait beyond its deadline for its turn alone, even if all
        instances did nothing but serve the requests before it."""
        backlog = self._control.backlog(item.model, now)
        if item.entry.deadline == math.inf or item.granted.defers or not len(queue.fair) or backlog is None:
            return None
        wait_s = queue.fair.ahead_s(item.entry.waiting) / max(backlog.instances, 1)
        left_s = item.entry.deadline - now
        if wait_s <= left_s:
            return None
        reason = f"the first token is expected in more than {wait_s:.3g} s, and {max(left_s, 0.0):.3g} s are left"
        return _late(reason, wait_s - left_s, item.full_status)

    def _expire(self, queue: RequestQueue, now: float) -> None:
        for entry in queue.expire(now):
            item = self._items.pop(entry.waiting.number)
            waited_s = now - item.since
            if entry.hopeless_at_deadline:
                refusal = _late(f"the first token cannot come in time after {waited_s:.3g} s in the queue", 1.0, 0)
                refusal = refusal._replace(status=item.full_status)
            else:
                reason = f"the gateway is full: the request waited {waited_s:.3g} s in the queue"
                refusal = Refusal(item.full_status, reason, "queue_wait", 1, [])
            self._refuse(item.placeable, refusal)

    def _refuse(self, placeable: Placeable, refusal: Refusal) -> None:
        self._metrics.rejected(refusal.metric_reason)
        placeable.reject(refusal)

    def _watch(self) -> None:
        """Check again when a request gives up, or when there may be room."""
        if self._timer is not None or self._closed or not self._items:
            return
        now = self._now()
        ends_at = min([queue.next_end for queue in self._queues.values()], default=math.inf)
        delay_s = min(ends_at - now + 1e-4, *self._room_s(now), _CHECK_MAX_S)
        self._timer = asyncio.get_running_loop().call_later(max(delay_s, _CHECK_MIN_S), self._check)

    def _room_s(self, now: float) -> Iterator[float]:
        """Yield the times until prefill work has shrunk enough for the next request of each model."""
        yield _CHECK_MAX_S
        section = self._section
        for model, queue in self._queues.items():
            backlog: Backlog | None = self._control.backlog(model, now) if len(queue.fair) else None
            if section is not None and backlog is not None and backlog.work_s >= section.work_s:
                yield backlog.work_s - float(section.work_s) + 1e-4

    def _check(self) -> None:
        self._timer = None
        self.place_ready(self._now())


def _late(reason: str, by_s: float, status: int) -> Refusal:
    retry_after_s = min(max(math.ceil(by_s), 1), RETRY_AFTER_MAX_S)
    return Refusal(status, reason, "slo", retry_after_s, [])
