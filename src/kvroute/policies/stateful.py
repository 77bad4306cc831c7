"""Protocols of policies that need more than the inputs of one decision: state over time, or both choices on arrival.

A policy declares what it needs. `control` maintains the state and reports to it what happens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from kvroute.policies.constraint import TopologyConstraint
from kvroute.policies.decode import DecodePolicy
from kvroute.policies.foresight.aggregated import AggregatedChoice, AggregatedOffer
from kvroute.policies.foresight.joint import JointPath, Pair
from kvroute.policies.foresight.sight import NetworkView, TierLearned
from kvroute.policies.foresight.spec import ForesightSpec
from kvroute.policies.prefill import PrefillCandidates
from kvroute.types import CapacityLearned, FloatArray, IntArray, NetworkCosts, Reject, Request, Role


@runtime_checkable
class NetworkViewPolicy(Protocol):
    """A decode policy that predicts transfers from those in flight. Control maintains the table of transfers."""

    @property
    def spec(self) -> ForesightSpec:
        """Parameters of the table."""

    def informed(self, network_view: NetworkView) -> DecodePolicy:
        """Return the policy with the state of the network at one decision."""


@runtime_checkable
class PairingPolicy(Protocol):
    """A decode policy that also chooses the prefill instance, on arrival."""

    def pair_policy(self, constraint: TopologyConstraint | None) -> PairPolicy:
        """Return the policy for arrivals. `constraint`: on the decode instance relative to the prefill instance."""


class PairPolicy(Protocol):
    """Chooses prefill and decode instance together, or one instance (aggregated)."""

    @property
    def serves_aggregated(self) -> frozenset[Role]:
        """Roles of the instances that it may choose for an aggregated request."""

    @property
    def has_targets(self) -> bool:
        """Whether there is a target for TPOT or TTFT."""

    def choose(
        self,
        request: Request,
        prefill: PrefillCandidates,
        path_of: Callable[[int], JointPath | None],
        turn: int,
        offer: AggregatedOffer | None = None,
        session_s: FloatArray | None = None,
    ) -> Pair | AggregatedChoice | Reject:
        """Choose among n prefill instances, and the instances of an offer.

        Args:
            request: to be placed.
            prefill: the prefill instances.
            path_of: returns the decode candidates of a prefill instance, or None without any.
            turn: number of decisions before.
            offer: instances that may serve the request aggregated.
            session_s: minus the bonus of the prefill instance that served the request's session last, [n].
        """


class PolicyState(Protocol):
    """State of one policy. Control reports each own transfer and gets the policy for each decision.

    Times never decrease. Instances are indices in the cluster.
    """

    def started(self, at: float, transfer: int, source: int, target: int, kv_bytes: float) -> None:
        """Record that a transfer has started; `transfer` is its number."""

    def finished(self, at: float, transfer: int, *, landed: bool) -> None:
        """Record that a transfer is complete (`landed`) or was aborted."""

    def policy(self, source: int, targets: IntArray, costs: NetworkCosts, at: float) -> DecodePolicy:
        """Return the policy for one decision about KV on `source`. `targets`: the candidates, [n]."""


@runtime_checkable
class ResponseObserver(Protocol):
    """A `PolicyState` that also learns from responses."""

    def answered(self, output_tokens: int) -> None:
        """Record the length of a complete response."""


@runtime_checkable
class CapacityLearner(Protocol):
    """A `PolicyState` that learns the capacity of the network. A reload and a replay carry over what it knows."""

    def known_at(self, at: float) -> CapacityLearned:
        """Return what has been learned until `at`. Changes nothing."""

    def resume(self, at: float, known: CapacityLearned) -> None:
        """Restore what another state has learned. Raises InputError if it does not fit."""

    def learned(self, at: float) -> tuple[TierLearned, ...]:
        """Return what has been learned about each tier, [TIER_COUNT], for displays. Changes nothing."""
