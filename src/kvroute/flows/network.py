"""Flow network: transfers in flight over shared links, their max-min rates and finish times. It has no clock.

Rates are solved lazily: changes at one instant are collected and solved once, when time moves or a rate is read. The
result equals a solution after each change, because no byte moves in between.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvroute.flows import arrays, kernels, state
from kvroute.flows.sets import FlowSet
from kvroute.types import FloatArray, InputError, IntArray

LinkId: TypeAlias = int
FlowId: TypeAlias = int

WEIGHT_MIN, WEIGHT_MAX = 1e-3, 1e3
"""Bounds of a flow's weight times its class weight: with wider ratios the light flow's rate would be lost in
rounding."""
_UNKNOWN = -2
_NO_INTS: IntArray = np.empty(0, np.int64)
_NO_FLOATS: FloatArray = np.empty(0, np.float64)


class FlowNetwork:
    """Transfers in flight over shared links. The caller owns time: `advance(to)` moves bytes.

    Rates are weighted max-min per link, solved again on every start, finish, cancel and change of capacity or ceiling.
    A flow with a ceiling never exceeds it, and other flows share the rest. Units are seconds and bytes. Base latency is
    left to the caller.
    """

    def __init__(self, capacity_bytes_per_s: FloatArray, classes: Mapping[str, float] | None = None) -> None:
        """`capacity_bytes_per_s`: one entry per link, 0 allowed; `classes`: a weight multiplier by traffic class.

        Without `classes` there is one class, "kv", of weight 1. Raises InputError for values that are negative or not
        finite.
        """
        capacity = np.asarray(capacity_bytes_per_s, np.float64)
        if capacity.ndim != 1:
            raise InputError("link capacities must be one row of numbers", where="capacity_bytes_per_s")
        _check_capacities(range(len(capacity)), capacity)
        self.now = 0.0
        self._classes = dict(classes) if classes is not None else {"kv": 1.0}
        for name, weight in self._classes.items():
            _check_weight(weight, f"traffic class {name!r}")
        self._links = len(capacity)
        self._longest = 8
        self._state = arrays.idle(capacity, 64, self._longest)
        self._out: IntArray = np.zeros(64, np.int64)
        self._ids: list[FlowId] = [0] * 64
        self._free = list(range(63, -1, -1))
        self._slot: dict[FlowId, int] = {}
        self._staged_ints: list[int] = []
        self._staged_floats: list[float] = []
        self._next_s, self._next_slot = math.inf, -1

    def start(
        self,
        flow: FlowId,
        path: Sequence[LinkId],
        nbytes: float,
        weight: float = 1.0,
        traffic_class: str = "kv",
        ceiling_bytes_per_s: float = math.inf,
    ) -> None:
        """Start a transfer at `now`, never faster than its ceiling.

        A repeated link counts once. A transfer of no bytes, or without links and ceiling, finishes at once. Raises
        InputError for an id that is in flight, an unknown link or class, or numbers out of range.
        """
        if flow in self._slot:
            raise InputError(f"flow {flow} is already in flight", hint="give every active flow its own number")
        links, effective = self._checked(path, nbytes, weight, traffic_class)
        if ceiling_bytes_per_s != math.inf:
            links = self._held(links, ceiling_bytes_per_s)
        else:
            self._make_room(len(links))
        slot = self._free.pop()
        self._slot[flow] = slot
        self._ids[slot] = flow
        self._staged_ints += (slot, len(links))
        self._staged_ints += links
        self._staged_floats += (nbytes, effective)
        self._next_slot = _UNKNOWN

    def start_many(
        self,
        flows: Sequence[FlowId],
        paths: Sequence[Sequence[LinkId]],
        nbytes: Sequence[float],
        weight: float = 1.0,
        traffic_class: str = "kv",
        ceiling_bytes_per_s: float = math.inf,
    ) -> None:
        """Start several flows of the same weight, class and ceiling (each); the n-th flow takes the n-th path and
        size."""
        for flow, path, size in zip(flows, paths, nbytes, strict=True):
            self.start(flow, path, size, weight, traffic_class, ceiling_bytes_per_s)

    def prepared(
        self,
        paths: Sequence[Sequence[LinkId]],
        nbytes: Sequence[float],
        ceilings_bytes_per_s: Sequence[float],
    ) -> FlowSet:
        """Return a set of flows for `start_set`, with sizes for one unit; an infinite ceiling is none.

        Raises InputError as `start` does.
        """
        for path, size, ceiling in zip(paths, nbytes, ceilings_bytes_per_s, strict=True):
            self._checked(path, size, 1.0, next(iter(self._classes)))
            _check_ceiling(ceiling)
        return FlowSet.of(paths, nbytes, ceilings_bytes_per_s)

    def start_set(self, number: FlowId, flows: FlowSet, units: float, traffic_class: str = "kv") -> None:
        """Start all flows of a set at `now`, each with its size times `units`.

        All have the id `number`: `advance` returns it once for each flow, and they cannot be changed or cancelled.
        Raises InputError for the id of another flow in flight, an unknown class, or a number of units out of range.
        """
        if number in self._slot:
            raise InputError(f"flow {number} is already in flight", hint="give every set a number of its own")
        _, weight = self._checked((), units, 1.0, traffic_class)
        while len(self._free) < flows.count:
            self._widen()
        if flows.longest > self._longest:
            self._lengthen(flows.longest)
        slots = self._free[-flows.count :] if flows.count else []
        del self._free[len(self._free) - flows.count :]
        for slot in slots:
            self._ids[slot] = number
        self._flush()
        taken = np.array(slots, np.int64)
        ints = flows.template.copy()
        ints[flows.slot_at] = taken
        if len(flows.limited):
            private = self._links + taken[flows.limited]
            ints[flows.private_at] = private
            self._state.link[private, state.CAPACITY] = flows.ceilings_bytes_per_s
        floats = np.empty(2 * flows.count)
        floats[0::2], floats[1::2] = flows.nbytes * units, weight
        _, self._next_s, self._next_slot = kernels.drive(self.now, -math.inf, *self._state, ints, floats, self._out)

    def cancel(self, flow: FlowId) -> float:
        """Stop a transfer at `now`; return the bytes not sent. Raises InputError when it is not in flight."""
        slot = self._known(flow)
        self._flush()
        left = kernels.cancel(self.now, slot, self._state)
        self._release(slot)
        self._next_slot = _UNKNOWN
        return left

    def set_ceiling(self, flow: FlowId, bytes_per_s: float) -> None:
        """Limit a flow to this rate from `now` on; inf removes the limit, 0 stalls the flow.

        Raises InputError when it is not in flight, or for a rate that is negative or NaN.
        """
        slot = self._known(flow)
        _check_ceiling(bytes_per_s)
        self._flush()
        if int(self._state.flow_int[slot, state.HOPS]) == self._longest:
            self._lengthen(self._longest + 1)
        kernels.set_ceiling(self.now, slot, bytes_per_s, self._state)
        self._next_slot = _UNKNOWN

    def advance(self, to: float) -> list[FlowId]:
        """Move time to `to` (seconds, not before `now`); return the finished flows by finish time, then start order.

        Each finish on the way frees its bandwidth at its own time. Flows whose finish times differ by rounding only
        (1e-12 of the duration) finish together.
        """
        if not self.now <= to < math.inf:
            raise InputError(f"time cannot advance from {self.now} s to {to} s", hint="advance to a later, finite time")
        if self._next_slot != _UNKNOWN and self._next_s > to:
            self.now = to
            return []
        count = self._drive(to)
        self.now = to
        return [self._release(slot) for slot in self._out[:count].tolist()]

    def next_finish(self) -> tuple[float, FlowId] | None:
        """Return the time and id of the next flow to finish if nothing else changes; None if no flow can finish."""
        if self._next_slot == _UNKNOWN:
            self._drive(-math.inf)
        return None if self._next_slot < 0 else (self._next_s, self._ids[self._next_slot])

    def set_capacity(self, link: LinkId, bytes_per_s: float) -> None:
        """Change a link's capacity from `now` on; 0 stalls its flows."""
        self.set_capacities([link], [bytes_per_s])

    def set_capacities(self, links: Sequence[LinkId] | IntArray, bytes_per_s: Sequence[float] | FloatArray) -> None:
        """Change several links' capacities from `now` on; both arguments have one entry per changed link."""
        numbers, values = np.asarray(links, np.int64), np.asarray(bytes_per_s, np.float64)
        if numbers.shape != values.shape or numbers.ndim != 1:
            raise InputError(f"{numbers.size} links but {values.size} capacities", hint="give one capacity per link")
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < self._links):
            raise InputError(f"a link is not between 0 and {self._links - 1}", where="set_capacities")
        _check_capacities(numbers.tolist(), values)
        self._flush()
        kernels.set_capacities(numbers, values, self._state)
        self._next_slot = _UNKNOWN

    def transfer_s(
        self,
        path: Sequence[LinkId],
        nbytes: float,
        weight: float = 1.0,
        traffic_class: str = "kv",
        ceiling_bytes_per_s: float = math.inf,
    ) -> float:
        """Return the seconds that a transfer would take if it started now and no other transfer started. State is
        unchanged.

        The result accounts for other flows that finish earlier and free their bandwidth. It is inf if the transfer
        could never finish.
        """
        links, effective = self._checked(path, nbytes, weight, traffic_class)
        self._flush()
        if ceiling_bytes_per_s != math.inf:
            links = self._held(links, ceiling_bytes_per_s)
        else:
            self._make_room(len(links))
        slot = self._free[-1]
        starts = np.array([slot, len(links), *links], np.int64), np.array([nbytes, effective], np.float64)
        return kernels.finish_of(slot, self.now, self._state, *starts) - self.now

    def rate(self, flow: FlowId) -> float:
        """Return a flow's current rate in bytes per second. Raises InputError when it is not in flight."""
        slot = self._known(flow)
        self.next_finish()
        return float(self._state.flow[slot, state.RATE])

    def sent_bytes(self, flow: FlowId) -> float:
        """Return the bytes of a flow sent until `now`. Raises InputError when it is not in flight."""
        slot = self._known(flow)
        self._flush()
        size, left, rate, since = (
            float(self._state.flow[slot, row]) for row in (state.SIZE, state.LEFT, state.RATE, state.SINCE)
        )
        return size - max(left - rate * (self.now - since), 0.0)

    @property
    def active(self) -> tuple[FlowId, ...]:
        """Flows in flight, in start order."""
        self._flush()
        slots = self._state.lists[state.ORDER, : self._state.counts[state.ACTIVE]].tolist()
        return tuple(self._ids[slot] for slot in slots)

    @property
    def capacity_bytes_per_s(self) -> FloatArray:
        """Current capacity of each link in bytes per second (a copy)."""
        return self._state.link[: self._links, state.CAPACITY].copy()

    @property
    def link_rate_bytes_per_s(self) -> FloatArray:
        """Current rate on each link in bytes per second."""
        self.next_finish()
        rates = kernels.link_loads(self.now, self._state)[0]
        return rates[: self._links]

    @property
    def link_bytes(self) -> FloatArray:
        """Bytes carried by each link from the beginning until `now`."""
        self._flush()
        carried = kernels.link_loads(self.now, self._state)[1]
        return carried[: self._links]

    def _checked(
        self, path: Sequence[LinkId], nbytes: float, weight: float, traffic_class: str
    ) -> tuple[tuple[LinkId, ...], float]:
        links = tuple(path)
        if len(set(links)) != len(links):
            links = tuple(dict.fromkeys(links))
        if links and not (min(links) >= 0 and max(links) < self._links):
            raise InputError(f"path {list(links)} has a link outside 0 to {self._links - 1}", hint="use existing links")
        if not 0.0 <= nbytes < math.inf:
            raise InputError(f"a transfer of {nbytes} bytes", hint="give a size that is finite and not negative")
        multiplier = self._classes.get(traffic_class)
        if multiplier is None:
            known = ", ".join(sorted(self._classes))
            raise InputError(f"traffic class {traffic_class!r} is unknown", hint=f"choose one of {known}")
        effective = weight * multiplier
        if not WEIGHT_MIN <= effective <= WEIGHT_MAX:
            _check_weight(effective, f"a flow of class {traffic_class!r}")
        return links, effective

    def _known(self, flow: FlowId) -> int:
        slot = self._slot.get(flow)
        if slot is None:
            raise InputError(f"flow {flow} is not in flight", hint="name a flow that has started and not finished")
        return slot

    def _release(self, slot: int) -> FlowId:
        flow = self._ids[slot]
        self._slot.pop(flow, None)  # flows of a set have no entry
        self._free.append(slot)
        return flow

    def _flush(self) -> None:
        if self._staged_floats:
            self._drive(-math.inf)

    def _drive(self, to: float) -> int:
        ints, floats = _NO_INTS, _NO_FLOATS
        if self._staged_floats:
            ints, floats = np.array(self._staged_ints, np.int64), np.array(self._staged_floats, np.float64)
            self._staged_ints, self._staged_floats = [], []
        count, self._next_s, self._next_slot = kernels.drive(self.now, to, *self._state, ints, floats, self._out)
        return int(count)

    def _make_room(self, hops: int) -> None:
        """Make sure that a slot is free and that paths of `hops` links fit."""
        if not self._free:
            self._widen()
        if hops > self._longest:
            self._lengthen(hops)

    def _widen(self) -> None:
        """Double the number of slots."""
        slots = len(self._ids)
        self._state = arrays.widened(self._state, 2 * slots)
        self._out = np.zeros(2 * slots, np.int64)
        self._free = [*range(2 * slots - 1, slots - 1, -1), *self._free]
        self._ids += [0] * slots

    def _lengthen(self, hops: int) -> None:
        self._longest = 2 ** math.ceil(math.log2(hops))
        self._state = arrays.lengthened(self._state, self._longest)

    def _held(self, links: tuple[LinkId, ...], bytes_per_s: float) -> tuple[LinkId, ...]:
        """Return the path extended by the private link of the next free slot; make space for it."""
        _check_ceiling(bytes_per_s)
        self._make_room(len(links) + 1)
        private = self._links + self._free[-1]
        self._state.link[private, state.CAPACITY] = bytes_per_s
        return (*links, private)


def _check_weight(weight: float, where: str) -> None:
    if not WEIGHT_MIN <= weight <= WEIGHT_MAX:
        raise InputError(
            f"weight {weight} is not between {WEIGHT_MIN:g} and {WEIGHT_MAX:g}", where=where, hint="scale the weights"
        )


def _check_capacities(links: Sequence[LinkId], capacity: npt.NDArray[np.float64]) -> None:
    bad = ~(np.isfinite(capacity) & (capacity >= 0.0))
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        raise InputError(
            f"capacity {capacity[at]} is not a number of bytes per second",
            where=f"link {links[at]}",
            hint="give a finite capacity of 0 or more",
        )


def _check_ceiling(bytes_per_s: float) -> None:
    if not bytes_per_s >= 0.0:
        raise InputError(f"a ceiling of {bytes_per_s} bytes per second", hint="give 0 or more; inf means no limit")
