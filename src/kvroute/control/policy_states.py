"""The state of each decode policy that needs one, made from the Protocol that the policy declares."""

from __future__ import annotations

from kvroute.control.transfer_tracker import TransferTracker
from kvroute.oracle import NetworkOracle
from kvroute.policies import CapacityLearner, DecodePolicy, PolicyState, ResponseObserver, SightedPolicy
from kvroute.topology import Cluster


def state_of(policy: DecodePolicy | None, cluster: Cluster, oracle: NetworkOracle) -> PolicyState | None:
    """Return a fresh state for a policy; None if it needs none."""
    if isinstance(policy, SightedPolicy):
        return TransferTracker(cluster, policy, oracle)
    return None


class PolicyStates:
    """States of the acting policy and of the shadow policy. Equal policies share one state."""

    def __init__(
        self, acting: DecodePolicy, shadow: DecodePolicy | None, cluster: Cluster, oracle: NetworkOracle
    ) -> None:
        self.acting = state_of(acting, cluster, oracle)
        """State of the acting policy, or None."""
        self.shadow = self.acting if shadow == acting else state_of(shadow, cluster, oracle)
        states = [self.acting] if self.shadow is self.acting else [self.acting, self.shadow]
        self.all: tuple[PolicyState, ...] = tuple([state for state in states if state is not None])
        """All states, the acting policy's first."""
        self.response_observers = tuple([state for state in self.all if isinstance(state, ResponseObserver)])
        self.learners = tuple([state for state in self.all if isinstance(state, CapacityLearner)])
