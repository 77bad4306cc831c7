"""The table of transfers in flight in the foresight model, and what it learns from finished transfers.

It has no clock and does not detect the end of a transfer: the caller reports each start and each observed end. In
between, the model moves bytes at its own rates; a tier learns from the model's error.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from kvroute.control.learning.learned_capacity import Answers, LearnedCapacity
from kvroute.flows import arrays, kernels, state
from kvroute.oracle.telemetry import CONGESTION_MAX
from kvroute.policies.foresight.links import LinkModel
from kvroute.policies.foresight.paths import HOPS_MAX, ceiling_of, path_of
from kvroute.policies.foresight.sight import RECENT_S, NetworkView, StartedBytes
from kvroute.policies.foresight.spec import ForesightSpec
from kvroute.policies.foresight.transfers import pass_time, start_transfer
from kvroute.types import SAME_NODE, SAME_RACK, TIER_COUNT, CapacityLearned, FloatArray, InputError, IntArray

_SLOTS = 64
_NO_INTS: IntArray = np.empty(0, np.int64)
_NO_FLOATS: FloatArray = np.empty(0)


class _Under(NamedTuple):
    """One transfer in flight."""

    slot: int
    tier: int
    kv_bytes: float
    path: tuple[int, ...]
    believed: float
    """Its tier's learned factor when it started."""
    began_s: float


class InFlight:
    """The table of transfers in flight on the aggregated links, updated by calls.

    The times of calls may repeat and must not decrease.
    """

    def __init__(self, links: LinkModel, spec: ForesightSpec | None = None) -> None:
        """Create an empty table: no transfers, nothing learned, no congestion."""
        self.links, self.spec = links, spec or ForesightSpec()
        self.learned, self.answers = LearnedCapacity(self.spec), Answers(self.spec)
        self._told: FloatArray = np.zeros(TIER_COUNT)
        self._cable, self._tier_left = links.cable_bytes_per_s, links.tier_bytes_per_s
        self._capacity = links.capacity_bytes_per_s
        self._all: IntArray = np.arange(len(links.capacity_bytes_per_s))
        self._flows_per_link: IntArray = np.zeros(len(self._all), dtype=np.int64)
        self._state = arrays.idle(links.capacity_bytes_per_s, _SLOTS, HOPS_MAX)
        self._predicted: FloatArray = np.zeros(_SLOTS)
        self._limited: FloatArray = np.zeros(_SLOTS)
        self._out: IntArray = np.zeros(_SLOTS, dtype=np.int64)
        self._free = list(range(_SLOTS - 1, -1, -1))
        self._under: dict[int, _Under] = {}
        self._path: IntArray = np.zeros(HOPS_MAX, dtype=np.int64)
        self._started_bytes: FloatArray = np.zeros(len(self._all))
        self._started_at: FloatArray = np.zeros(len(self._all))
        self._since: float | None = None
        """Time of the first transfer."""
        self.now = 0.0
        self._nic_factor = 1.0
        """Learned factor on the speed of NICs that the capacities contain."""
        self._mean: float | None = None
        """Mean rate of a hashed path; valid until time or the table changes."""

    def take_over(self, old: InFlight, after: IntArray) -> None:
        """Continue with the transfers and the knowledge of the table of the cluster before, which must not be used any
        more.

        Args:
            old: that table; no transfer in it uses an instance that has left.
            after: see `LinkModel.after`.
        """
        self.learned, self.answers, self.now, self._told = old.learned, old.answers, old.now, old._told
        self._leave()
        before = self._capacity.copy()
        before[after[after >= 0]] = old._state.link[: len(after), state.CAPACITY][after >= 0]
        self._state = arrays.relinked(old._state, before, after)
        self._predicted, self._limited, self._out, self._free = old._predicted, old._limited, old._out, old._free
        self._flows_per_link[after[after >= 0]] = old._flows_per_link[after >= 0]
        self._started_bytes[after[after >= 0]] = old._started_bytes[after >= 0]
        self._started_at[after[after >= 0]] = old._started_at[after >= 0]
        self._since = old._since
        numbers = after.tolist()
        self._under = {
            number: under._replace(path=tuple([numbers[link] for link in under.path]))
            for number, under in old._under.items()
        }
        kernels.set_capacities(self._all, self._capacity, self._state)
        self._solve()

    def started(self, at: float, transfer: int, source: int, target: int, kv_bytes: float) -> None:
        """Add a transfer. One inside a node or with zero bytes competes with no other transfer and is not stored.

        Raises:
            InputError: it is in flight already, or its bytes are negative or not finite.
        """
        if transfer in self._under:
            raise InputError(f"transfer {transfer} is in flight already", hint="give each transfer its own number")
        if not 0.0 <= kv_bytes < math.inf:
            raise InputError(f"a transfer of {kv_bytes} bytes", where="kv_bytes", hint="give a size of zero or more")
        tier = int(self.links.tier[source, target])
        if tier == SAME_NODE or kv_bytes == 0.0:
            return
        mean = self._pass(at)
        if not self._free:
            self._widen()
        slot = self._free.pop()
        links, hashed = self.links, self.links.hashed_paths
        hops = start_transfer(
            self.now,
            slot,
            source,
            target,
            tier,
            kv_bytes,
            links.attached,
            links.wan,
            self._cable,
            links.cables,
            self._flows_per_link,
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
            self._started_bytes,
            self._started_at,
            RECENT_S,
        )
        self._mean = None
        self._since = self.now if self._since is None else self._since
        path = tuple(self._path[:hops].tolist())
        self._under[transfer] = _Under(slot, tier, kv_bytes, path, float(self.learned.factor[tier]), self.now)

    def finished(self, at: float, transfer: int, *, landed: bool = True) -> None:
        """Remove a transfer whose end was observed. It teaches its tier if it is complete (`landed`), but not if it was
        aborted. A transfer that is not in flight is ignored: an engine may report the same end twice."""
        under = self._under.pop(transfer, None)
        if under is None:
            return
        self._pass(at)
        if landed:
            slot = under.slot
            predicted, limited = float(self._predicted[slot]), float(self._limited[slot])
            lasted_s = self.now - under.began_s
            self.learned.ended(under.tier, under.kv_bytes, predicted, limited, under.believed, lasted_s)
        kernels.cancel(self.now, under.slot, self._state)
        self._flows_per_link[list(under.path)] -= 1
        self._free.append(under.slot)
        self._solve()

    def resume(self, at: float, known: CapacityLearned) -> None:
        """Restore what another table has learned. Raises InputError if the shapes or numbers do not fit."""
        self._pass(at)
        self.learned.resume(self.now, known)
        for tokens in known.answers:
            self.answers.finished(tokens)
        self._solve()

    def known_at(self, at: float) -> CapacityLearned:
        """What has been learned until `at`, for another table to restore. Changes nothing."""
        return self.learned.known_at(at, self.answers.last)

    def congested(self, at: float, congestion: FloatArray) -> None:
        """Set the share of each tier that other traffic uses from `at` on, [TIER_COUNT] in [0, 1)."""
        if congestion.tobytes() == self._told.tobytes():
            return
        self._pass(at)
        self._told = congestion.copy()
        self._leave()
        kernels.set_capacities(self._all, self._capacity, self._state)
        self._solve()

    def _leave(self) -> None:
        """Recompute what other traffic leaves free, at the learned speed of NICs."""
        congestion = np.minimum(self._told, CONGESTION_MAX)
        left = self.links.left(congestion)
        self._nic_factor = float(self.learned.factor[SAME_RACK])
        self._cable = self.links.cable_bytes_per_s * left
        self._tier_left = self.links.tier_bytes_per_s * (1.0 - congestion)
        self._capacity = self.links.capacity_bytes_per_s * left * self.links.nic_factors(self._nic_factor)

    def network_view(self, at: float, source: int, targets: IntArray, starts_s: float = 0.0) -> NetworkView:
        """The network state for a decision at `at` about a transfer from `source` that starts `starts_s` later."""
        mean_bytes_per_s = self._pass(at)
        since = self.now if self._since is None else self._since
        return NetworkView(
            links=self.links,
            mean_bytes_per_s=mean_bytes_per_s,
            state=self._state,
            flows_per_link=self._flows_per_link,
            capacity_bytes_per_s=self._capacity,
            cable_bytes_per_s=self._cable,
            tier_bytes_per_s=self._tier_left,
            factor=self.learned.factor,
            output_tokens=self.answers.mean_tokens,
            source=source,
            targets=targets,
            starts_s=starts_s,
            started=StartedBytes(self._started_bytes, self._started_at, self.now, since),
        )

    def uncontended_bytes_per_s(self, source: int, target: int, congestion: FloatArray, factor: FloatArray) -> float:
        """Rate of a transfer from `source` to `target` without other transfers in flight, within the limits of its
        NICs.

        Args:
            congestion: [TIER_COUNT] share of each tier that other traffic uses, in [0, 1).
            factor: [TIER_COUNT] measured over nominal capacity of the paths.
        """
        links, left = self.links, self.links.left(congestion)
        tier, hashed = int(links.tier[source, target]), links.hashed_paths
        ceiling = ceiling_of(
            source,
            target,
            tier,
            links.attached,
            links.wan,
            links.cable_bytes_per_s * left,
            links.cables,
            np.zeros_like(self._flows_per_link),
            hashed,
            self.spec.rival_weight * hashed,
            self.spec.sibling_weight * (hashed - 1),
            0.0,
            factor,
            links.tier_bytes_per_s * (1.0 - congestion),
        )
        hops = path_of(source, target, tier, links.attached, links.wan, self._path)
        nics = links.nic_factors(float(factor[SAME_RACK]))
        capacity = (links.capacity_bytes_per_s * left * nics)[self._path[:hops]]
        return float(min([ceiling, *capacity.tolist()]))

    def left_bytes(self, at: float) -> dict[int, float]:
        """Remaining bytes of each transfer in flight in the model, by its number."""
        self._pass(at)
        return {number: float(self._state.flow[under.slot, state.LEFT]) for number, under in self._under.items()}

    @property
    def rates_bytes_per_s(self) -> dict[int, float]:
        """Model rate of each transfer in flight, by its number."""
        return {number: float(self._state.flow[under.slot, state.RATE]) for number, under in self._under.items()}

    def _pass(self, at: float) -> float:
        """Move the model's bytes up to `at`; return the mean rate of a hashed path."""
        if at <= self.now and self._mean is not None:
            return self._mean
        self.now = max(at, self.now)
        self.learned.grown_old(self.now)
        total = self._move()
        if self._nic_factor != self.learned.factor[SAME_RACK]:
            self._solve()
            total = self._move()
        self._mean = total / max(len(self._under) * self.links.hashed_paths, 1)
        return self._mean

    def _move(self) -> float:
        """Move the model's bytes up to now at the rates so far; return the sum of the rates."""
        net, share = self._state, self.spec.left_floor_share
        return pass_time(self.now, share, net.flow, net.link, net.lists, net.counts, self._predicted, self._limited)

    def _solve(self) -> None:
        """Recompute the max-min fair rates. The -inf means that no finish is processed."""
        if self._nic_factor != self.learned.factor[SAME_RACK]:
            self._leave()
            kernels.set_capacities(self._all, self._capacity, self._state)
        kernels.drive(self.now, -math.inf, *self._state, _NO_INTS, _NO_FLOATS, self._out)
        self._mean = None

    def _widen(self) -> None:
        slots = len(self._predicted)
        self._state = arrays.widened(self._state, 2 * slots)
        self._predicted = np.concatenate([self._predicted, np.zeros(slots)])
        self._limited = np.concatenate([self._limited, np.zeros(slots)])
        self._out = np.zeros(2 * slots, dtype=np.int64)
        self._free = list(range(2 * slots - 1, slots - 1, -1))
