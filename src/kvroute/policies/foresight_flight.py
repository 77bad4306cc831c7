"""The transfers in flight as foresight models them, and what their ends have taught; it has no clock and sees no end by
itself.

A caller says when a transfer starts and when its end was observed. Between these the model's rates move its bytes; how
far the model was off is what a tier learns from.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from kvroute.flows import arrays, kernels
from kvroute.flows.kernels import State
from kvroute.oracle.telemetry import CONGESTION_MAX
from kvroute.policies.foresight_kernels import HOPS_MAX, ceiling_of, pass_time, path_of, set_off
from kvroute.policies.foresight_learned import Answers, Learned
from kvroute.policies.foresight_links import LinkModel
from kvroute.policies.foresight_spec import ForesightSpec
from kvroute.types import SAME_NODE, TIER_COUNT, CapacityLearned, FloatArray, InputError, IntArray

_SLOTS = 64
_NO_INTS: IntArray = np.empty(0, np.int64)
_NO_FLOATS: FloatArray = np.empty(0)


class Sight(NamedTuple):
    """What one decision may know of the network: live arrays, which a policy reads and keeps nothing of."""

    links: LinkModel
    state: State
    """Transfers in flight, their bytes left and their model rates, now."""
    crowd: IntArray
    """[m] transfers on each link."""
    cable_bytes_per_s: FloatArray
    """[m] what others leave of one cable."""
    tier_bytes_per_s: FloatArray
    """[TIER_COUNT] what others leave of a tier."""
    factor: FloatArray
    """[TIER_COUNT] measured over promised capacity."""
    mean_bytes_per_s: float
    """Mean model rate of a hashed path."""
    output_tokens: float
    """Mean answer."""
    source: int
    targets: IntArray
    """[n] index of each candidate in the tier map."""
    starts_s: float = 0.0
    """From now until the transfer would start."""


class _Under(NamedTuple):
    """One transfer under way."""

    slot: int
    tier: int
    kv_bytes: float
    path: tuple[int, ...]
    believed: float
    """Its tier's factor when it started."""


class InFlight:
    """The table of transfers in flight on the aggregated links, kept from calls; times may repeat and never go back."""

    def __init__(self, links: LinkModel, spec: ForesightSpec | None = None) -> None:
        """Nothing in flight, nothing learned, no congestion known."""
        self.links, self.spec = links, spec or ForesightSpec()
        self.learned, self.answers = Learned(self.spec), Answers(self.spec)
        self._told: FloatArray = np.zeros(TIER_COUNT)
        self._cable, self._tier_left = links.cable_bytes_per_s, links.tier_bytes_per_s
        self._all: IntArray = np.arange(len(links.capacity_bytes_per_s))
        self._crowd: IntArray = np.zeros(len(self._all), dtype=np.int64)
        self._state = arrays.idle(links.capacity_bytes_per_s, _SLOTS, HOPS_MAX)
        self._predicted: FloatArray = np.zeros(_SLOTS)
        self._limited: FloatArray = np.zeros(_SLOTS)
        self._out: IntArray = np.zeros(_SLOTS, dtype=np.int64)
        self._free = list(range(_SLOTS - 1, -1, -1))
        self._under: dict[int, _Under] = {}
        self._path: IntArray = np.zeros(HOPS_MAX, dtype=np.int64)
        self.now = 0.0
        self._mean: float | None = None
        """Mean rate of a hashed path, as long as neither time nor the table moves on."""

    def started(self, at: float, transfer: int, source: int, target: int, kv_bytes: float) -> None:
        """A transfer leaves. One inside a node or of no bytes is nobody's rival and is not kept.

        Raises:
            InputError: it is in flight already, or its bytes are negative or not finite.
        """
        if transfer in self._under:
            raise InputError(f"transfer {transfer} is in flight already", mend="give each its own number")
        if not 0.0 <= kv_bytes < math.inf:
            raise InputError(f"a transfer of {kv_bytes} bytes", where="kv_bytes", mend="give a size of zero or more")
        tier = int(self.links.tier[source, target])
        if tier == SAME_NODE or kv_bytes == 0.0:
            return
        mean = self._pass(at)
        if not self._free:
            self._widen()
        slot = self._free.pop()
        links, hashed = self.links, self.links.hashed_paths
        hops = set_off(
            self.now,
            slot,
            source,
            target,
            tier,
            kv_bytes,
            links.ways,
            links.wan,
            self._cable,
            links.cables,
            self._crowd,
            hashed,
            self.spec.rival_weight * hashed,
            self.spec.sibling_weight * (hashed - 1),
            mean,
            self.learned.factor,
            self._tier_left,
            *self._state,
            self._predicted,
            self._limited,
            self._path,
            self._out,
        )
        self._mean = None
        path = tuple(self._path[:hops].tolist())
        self._under[transfer] = _Under(slot, tier, kv_bytes, path, float(self.learned.factor[tier]))

    def finished(self, at: float, transfer: int, *, landed: bool = True) -> None:
        """Its end was observed: it has `landed`, or is given up and teaches nothing. One that is not in flight changes
        nothing: an engine may report the same end twice."""
        under = self._under.pop(transfer, None)
        if under is None:
            return
        self._pass(at)
        if landed:
            slot = under.slot
            predicted, limited = float(self._predicted[slot]), float(self._limited[slot])
            self.learned.ended(under.tier, under.kv_bytes, predicted, limited, under.believed)
        kernels.cancel(self.now, under.slot, self._state)
        self._crowd[list(under.path)] -= 1
        self._free.append(under.slot)
        self._solve()

    def resume(self, at: float, known: CapacityLearned) -> None:
        """Go on from what another table has taught. Raises InputError where it does not fit."""
        self._pass(at)
        self.learned.resume(self.now, known)
        for tokens in known.answers:
            self.answers.finished(tokens)
        self._mean = None

    def known_at(self, at: float) -> CapacityLearned:
        """What has been learned by then, for another table to go on from; changes nothing."""
        return self.learned.known_at(at, self.answers.last)

    def congested(self, at: float, congestion: FloatArray) -> None:
        """What others take of each tier, [TIER_COUNT] in [0, 1), from `at` on."""
        if congestion.tobytes() == self._told.tobytes():
            return
        self._pass(at)
        self._told = congestion.copy()
        congestion = np.minimum(congestion, CONGESTION_MAX)
        left = self.links.left(congestion)
        self._cable = self.links.cable_bytes_per_s * left
        self._tier_left = self.links.tier_bytes_per_s * (1.0 - congestion)
        kernels.set_capacities(self._all, self.links.capacity_bytes_per_s * left, self._state)
        self._solve()

    def sight(self, at: float, source: int, targets: IntArray, starts_s: float = 0.0) -> Sight:
        """What a decision at `at` may know, for a transfer from `source` that starts `starts_s` later."""
        return Sight(
            links=self.links,
            mean_bytes_per_s=self._pass(at),
            state=self._state,
            crowd=self._crowd,
            cable_bytes_per_s=self._cable,
            tier_bytes_per_s=self._tier_left,
            factor=self.learned.factor,
            output_tokens=self.answers.mean_tokens,
            source=source,
            targets=targets,
            starts_s=starts_s,
        )

    def alone_bytes_per_s(self, source: int, target: int, congestion: FloatArray, factor: FloatArray) -> float:
        """What a transfer from `source` to `target` gets where no other one is under way, its NICs included.

        Args:
            congestion: [TIER_COUNT] what others take of each tier, in [0, 1).
            factor: [TIER_COUNT] measured over promised capacity of the paths.
        """
        links, left = self.links, self.links.left(congestion)
        tier, hashed = int(links.tier[source, target]), links.hashed_paths
        ceiling = ceiling_of(
            source,
            target,
            tier,
            links.ways,
            links.wan,
            links.cable_bytes_per_s * left,
            links.cables,
            np.zeros_like(self._crowd),
            hashed,
            self.spec.rival_weight * hashed,
            self.spec.sibling_weight * (hashed - 1),
            0.0,
            factor,
            links.tier_bytes_per_s * (1.0 - congestion),
        )
        hops = path_of(source, target, tier, links.ways, links.wan, self._path)
        capacity = (links.capacity_bytes_per_s * left)[self._path[:hops]]
        return float(min([ceiling, *capacity.tolist()]))

    def left_bytes(self, at: float) -> dict[int, float]:
        """Bytes that each transfer in flight has left in the model, by its number."""
        self._pass(at)
        return {each: float(self._state.flow[under.slot, kernels.LEFT]) for each, under in self._under.items()}

    @property
    def rates_bytes_per_s(self) -> dict[int, float]:
        """Model rate of each transfer in flight, by its number."""
        return {each: float(self._state.flow[under.slot, kernels.RATE]) for each, under in self._under.items()}

    def _pass(self, at: float) -> float:
        """Move the model's bytes; returns the mean rate of a hashed path."""
        if at <= self.now and self._mean is not None:
            return self._mean
        self.now = max(at, self.now)
        self.learned.grown_old(self.now)
        net, share = self._state, self.spec.left_floor_share
        total = pass_time(self.now, share, net.flow, net.link, net.lists, net.counts, self._predicted, self._limited)
        self._mean = total / max(len(self._under) * self.links.hashed_paths, 1)
        return self._mean

    def _solve(self) -> None:
        """Make the rates max-min again; -inf: no finish is acted upon."""
        kernels.drive(self.now, -math.inf, *self._state, _NO_INTS, _NO_FLOATS, self._out)
        self._mean = None

    def _widen(self) -> None:
        slots = len(self._predicted)
        self._state = arrays.widened(self._state, 2 * slots)
        self._predicted = np.concatenate([self._predicted, np.zeros(slots)])
        self._limited = np.concatenate([self._limited, np.zeros(slots)])
        self._out = np.zeros(2 * slots, dtype=np.int64)
        self._free = list(range(2 * slots - 1, slots - 1, -1))
