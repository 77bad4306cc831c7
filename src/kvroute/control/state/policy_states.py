"""The state of each decode policy that needs one, made from the Protocol that the policy declares."""

from __future__ import annotations

from collections.abc import Iterable

from kvroute.control.state.transfer_tracker import TransferTracker
from kvroute.oracle import NetworkOracle
from kvroute.policies import CapacityLearner, DecodePolicy, NetworkViewPolicy, PolicyState, ResponseObserver
from kvroute.topology import Cluster
from kvroute.types import IntArray


def state_of(policy: DecodePolicy | None, cluster: Cluster, oracle: NetworkOracle) -> PolicyState | None:
    """Return a fresh state for a policy; None if it needs none."""
    if isinstance(policy, NetworkViewPolicy):
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
        self.trackers = tuple([state for state in self.all if isinstance(state, TransferTracker)])
        self.learners = tuple([state for state in self.all if isinstance(state, CapacityLearner)])

    def links_after(self, old: PolicyStates, before: IntArray) -> tuple[IntArray, ...]:
        """Return for each tracker the numbers of the earlier links, see `LinkModel.after`."""
        pairs = zip(self.trackers, old.trackers, strict=True)
        return tuple(own.links_after(earlier, before) for own, earlier in pairs)

    def take_over(
        self,
        old: PolicyStates,
        links_after: Iterable[IntArray],
        at: float,
        in_flight: Iterable[tuple[int, int, int, float]],
    ) -> None:
        """Continue with the states of the cluster before the change: trackers copy their tables, and every other state
        gets the start of each transfer in flight again.

        Args:
            old: the states before.
            links_after: from the method of this name.
            at: time in seconds.
            in_flight: number, source, target and bytes of each own transfer.
        """
        for own, earlier, after in zip(self.trackers, old.trackers, links_after, strict=True):
            own.take_over(earlier, after)
        others = [state for state in self.all if not isinstance(state, TransferTracker)]
        for transfer in in_flight if others else ():
            for state in others:
                state.started(at, *transfer)
