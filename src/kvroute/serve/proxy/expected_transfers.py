"""Expected completion times of KV transfers, from the decision's own terms: for responses that are not streamed and
so do not show it, and for prefix copies, whose completion is not reported.

One timer serves all transfers and need not be exact: code that is about to decide checks for due transfers first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from kvroute.http.deadlines import NEVER_S
from kvroute.topology import Cluster
from kvroute.types import Decode

_TIMER_MIN_S = 0.05
"""Shortest interval between two runs of the timer."""


class ExpectedTiming(NamedTuple):
    """Seconds that a request needs on its decode instance until its first token, split in three consecutive parts."""

    transfer_s: float
    queue_s: float
    """Wait for a batch slot, and the prompt if the decode instance computes it itself."""
    step_s: float
    """First decode step."""


class ExpectedEnd:
    """The expected end of one transfer, until it is due or cancelled."""

    __slots__ = ("_on_due",)

    def __init__(self, on_due: Callable[[float], None]) -> None:
        self._on_due: Callable[[float], None] | None = on_due

    def due(self, now: float) -> None:
        """Call the callback, unless this was cancelled."""
        on_due, self._on_due = self._on_due, None
        if on_due is not None:
            on_due(now)

    def cancel(self) -> None:
        """Never call the callback, and release it."""
        self._on_due = None


class ExpectedTransfers:
    """Transfers that are expected to complete, and when."""

    __slots__ = ("_bytes_per_s", "_due", "_idle_step_s", "_latency_s", "_order", "_timer", "due_at")

    def __init__(self, cluster: Cluster) -> None:
        self._due: list[tuple[float, int, ExpectedEnd]] = []
        self._order = count()
        """Breaks ties: transfers that are due at the same time end in the order in which they were expected."""
        self._timer: asyncio.TimerHandle | None = None
        self.due_at = NEVER_S
        """Time of the next expected completion."""
        self.change(cluster)

    def change(self, cluster: Cluster) -> None:
        """Follow a change of the cluster."""
        specs = {instance.name: cluster.timing[instance.timing].decode for instance in cluster.instances}
        self._idle_step_s = {name: spec.base_s + spec.per_request_s for name, spec in specs.items()}
        self._bytes_per_s, self._latency_s = cluster.tier_bytes_per_s.tolist(), cluster.tier_latency_s.tolist()

    def expected(self, decision: Decode) -> ExpectedTiming:
        """Return the timing by the decision's own terms, else by tier and timing model alone."""
        terms = decision.terms
        parts = {} if terms is None else terms.parts
        index = -1 if terms is None else terms.names.index(decision.target)
        if "transfer_s" in parts:
            transfer_s = float(parts["transfer_s"][index])
        elif decision.source == decision.target:
            transfer_s = 0.0
        else:
            transfer_s = self.uncontended_s(decision.tier, decision.kv_bytes)
        if "steps_s" in parts:  # the decode instance computes the prompt itself
            queue_s = sum(float(parts[name][index]) for name in ("wait_s", "prefill_s", "steps_s"))
            return ExpectedTiming(transfer_s, queue_s, self._idle_step_s[decision.target])
        if "decode_s" in parts:
            return ExpectedTiming(transfer_s, float(parts["queue_s"][index]), float(parts["decode_s"][index]))
        return ExpectedTiming(transfer_s, 0.0, self._idle_step_s[decision.target])

    def uncontended_s(self, tier: int, nbytes: float) -> float:
        """Return the duration of a transfer that has its tier's bandwidth for itself."""
        seconds: float = nbytes / self._bytes_per_s[tier] + self._latency_s[tier]
        return seconds

    def expect(self, at: float, on_due: Callable[[float], None], now: float) -> ExpectedEnd:
        """Call `on_due` with the time when a KV transfer is expected to complete: at `at` (gateway clock) or later.

        `on_due` raises no exception. The caller cancels the result when the transfer ends earlier.
        """
        end = ExpectedEnd(on_due)
        heappush(self._due, (at, next(self._order), end))
        self.due_at = self._due[0][0]
        if self._timer is None:
            self._arm(now)
        return end

    def report_due(self, now: float) -> None:
        """Report due transfers to the core."""
        due = self._due
        while due and due[0][0] <= now:
            heappop(due)[2].due(now)
        self.due_at = due[0][0] if due else NEVER_S

    def close(self) -> None:
        """Stop the timer and drop all expected transfers."""
        self._due.clear()
        self.due_at = NEVER_S
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, now: float) -> None:
        delay_s = max(self.due_at - now, _TIMER_MIN_S)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._ring, now + delay_s)

    def _ring(self, now: float) -> None:
        self._timer = None
        self.report_due(now)
        if self._due:
            self._arm(now)
