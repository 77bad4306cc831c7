"""Weighted fair queueing over keys, in bands of strict priority. Pure, and without a clock.

Within a band it is start-time fair queueing (Goyal, Vin, Cheng 1996): the next request is that of the key with the
smallest start tag, and serving it raises the tag by its work divided by the weight of the key. While two keys wait, the
work that each gets, divided by its weight, differs by one request of each at most.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush
from typing import NamedTuple


class WaitingRequest(NamedTuple):
    """A request in the queue."""

    number: int
    """Identifies it; lower numbers have arrived earlier."""
    key: str
    band: int
    """A higher band is served first."""
    weight: float
    """Weight of the key, above 0; equal for all requests of a key in a band."""
    work_s: float
    """Predicted work in seconds, zero or more."""


class _Flow:
    """The waiting requests of one key in one band."""

    __slots__ = ("requests", "tag")

    def __init__(self) -> None:
        self.requests: OrderedDict[int, WaitingRequest] = OrderedDict()
        self.tag = 0.0
        """Start tag of the first request; without a request, of the next one if it comes at once."""


class _Band:
    """Requests of one priority."""

    __slots__ = ("clock", "flows", "heap")

    def __init__(self) -> None:
        self.clock = 0.0
        """Start tag of the request that was served last."""
        self.flows: dict[str, _Flow] = {}
        self.heap: list[tuple[float, int, str]] = []
        """Tag and number of the first request of each key, and outdated entries."""

    def push(self, request: WaitingRequest) -> None:
        flow = self.flows.get(request.key)
        if flow is None:
            flow = self.flows[request.key] = _Flow()
        if not flow.requests:
            flow.tag = max(flow.tag, self.clock)
            heappush(self.heap, (flow.tag, request.number, request.key))
        flow.requests[request.number] = request

    def pop(self) -> WaitingRequest | None:
        while self.heap:
            tag, number, key = heappop(self.heap)
            flow = self.flows.get(key)
            if flow is None or tag != flow.tag or next(iter(flow.requests), None) != number:
                continue
            request = flow.requests.pop(number)
            self.clock = tag
            flow.tag = tag + request.work_s / request.weight
            self._next(key, flow)
            return request
        return None

    def remove(self, request: WaitingRequest) -> None:
        flow = self.flows[request.key]
        first = next(iter(flow.requests)) == request.number
        del flow.requests[request.number]
        if first:
            self._next(request.key, flow)

    def _next(self, key: str, flow: _Flow) -> None:
        if flow.requests:
            heappush(self.heap, (flow.tag, next(iter(flow.requests)), key))

    def forget_served(self) -> None:
        """Free the memory of keys that have no claim on later turns. Call it while nothing waits."""
        self.heap.clear()
        self.flows = {key: flow for key, flow in self.flows.items() if flow.tag > self.clock}


class FairQueue:
    """Waiting requests. It is work conserving: `pop` returns a request whenever one waits."""

    def __init__(self) -> None:
        self._bands: dict[int, _Band] = {}
        self._waiting: dict[int, WaitingRequest] = {}
        self._depths: dict[int, int] = {}
        """Number of waiting requests of each band that has some."""

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: WaitingRequest) -> None:
        """Add a request."""
        assert request.number not in self._waiting, "a number is used once"
        self._waiting[request.number] = request
        self._depths[request.band] = self._depths.get(request.band, 0) + 1
        band = self._bands.get(request.band)
        if band is None:
            band = self._bands[request.band] = _Band()
        band.push(request)

    def pop(self) -> WaitingRequest | None:
        """Remove and return the next request; None if none waits."""
        if not self._depths:
            return None
        request = self._bands[max(self._depths)].pop()
        assert request is not None, "a band with waiting requests has a first one"
        self._removed(request)
        return request

    def remove(self, number: int) -> bool:
        """Remove a request that does not wait any more. Return whether it was in the queue."""
        request = self._waiting.get(number)
        if request is None:
            return False
        self._bands[request.band].remove(request)
        self._removed(request)
        return True

    def depths(self) -> dict[int, int]:
        """Return the number of waiting requests by band, for bands that have some."""
        return dict(sorted(self._depths.items()))

    def ahead_s(self, request: WaitingRequest) -> float:
        """Return the seconds of work that would be served before a request if it came now and no other one did after
        it."""
        ahead_s = 0.0
        own = self._own_ahead_s(request)
        turn = (own + request.work_s) / request.weight
        shares: dict[str, float] = {}
        for waiting in self._waiting.values():
            if waiting.band > request.band:
                ahead_s += waiting.work_s
            elif waiting.band == request.band and waiting.key != request.key:
                most = turn * waiting.weight
                shares[waiting.key] = min(shares.get(waiting.key, 0.0) + waiting.work_s, most)
        return ahead_s + own + sum(shares.values())

    def _own_ahead_s(self, request: WaitingRequest) -> float:
        band = self._bands.get(request.band)
        flow = band.flows.get(request.key) if band is not None else None
        return sum([request.work_s for request in flow.requests.values()]) if flow is not None else 0.0

    def _removed(self, request: WaitingRequest) -> None:
        del self._waiting[request.number]
        depth = self._depths[request.band] - 1
        if depth:
            self._depths[request.band] = depth
        else:
            del self._depths[request.band]
            self._bands[request.band].forget_served()
