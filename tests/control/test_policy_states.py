"""States of policies: created for policies that declare a need, shared by equal policies, updated with transfers."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvroute.control.state.policy_states import PolicyStates
from kvroute.control.state.transfer_tracker import TransferTracker
from kvroute.oracle import NetworkOracle
from kvroute.policies import DECODE_POLICIES, FORESIGHT_POLICIES, decode_policy
from kvroute.topology import load

CLUSTER = load(Path(__file__).resolve().parents[2] / "examples" / "small.yaml")


def states(acting: str, shadow: str = "") -> PolicyStates:
    """Return the states of new policies with these names."""
    return PolicyStates(
        decode_policy(acting), decode_policy(shadow) if shadow else None, CLUSTER, NetworkOracle.of(CLUSTER)
    )


@pytest.mark.parametrize("name", DECODE_POLICIES)
def test_a_policy_gets_a_state_only_if_it_declares_a_need(name: str) -> None:
    """Foresight's variants declare one; the state learns from transfers and from responses."""
    made = states(name)
    count = 1 if name in FORESIGHT_POLICIES else 0
    assert (len(made.all), len(made.learners), len(made.response_observers)) == (count, count, count)
    assert (made.acting is not None) == bool(count)


def test_equal_policies_share_a_state_and_others_do_not() -> None:
    """A shared state receives each transfer once."""
    same = states("foresight", "foresight")
    assert same.shadow is same.acting
    assert len(same.all) == 1
    other = states("foresight", "foresight-closed")
    assert other.all == (other.acting, other.shadow)
    assert other.shadow is not other.acting


def test_a_shadow_policy_has_a_state_without_one_of_the_acting_policy() -> None:
    made = states("netkv", "foresight")
    assert made.acting is None
    assert made.all == (made.shadow,)


def test_a_transfer_reported_to_the_state_is_in_its_table() -> None:
    """The bytes are those of the report until time passes, and a finished transfer is removed."""
    (state,) = states("foresight").all
    assert isinstance(state, TransferTracker)
    roles = [instance.role for instance in CLUSTER.instances]
    source, target = roles.index("prefill"), roles.index("decode")
    state.started(0.0, 7, source, target, 1e9)
    assert state.table.left_bytes(0.0) == {7: 1e9}
    state.finished(0.5, 7, landed=True)
    assert state.table.left_bytes(0.5) == {}
