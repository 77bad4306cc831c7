"""Handlers of the health, the roles and the number of instances, and of reviews that may change them."""

from __future__ import annotations

from kvroute.control.cluster_change import carry_over, refuse_in_use
from kvroute.control.events.state import CoreState, Handler
from kvroute.types import (
    ClusterChanged,
    Decision,
    InputError,
    InstanceDown,
    InstanceUp,
    ReviewDue,
    RoleSwitched,
    ScaleEnded,
    ScalingDue,
    SwitchRole,
)


def _instance_down(state: CoreState, event: InstanceDown) -> tuple[Decision, ...]:
    state.view.set_up(state.cluster.index(event.instance), False, event.at)
    return ()


def _instance_up(state: CoreState, event: InstanceUp) -> tuple[Decision, ...]:
    state.view.set_up(state.cluster.index(event.instance), True, event.at, returned=event.returned)
    return ()


def _role_switched(state: CoreState, event: RoleSwitched) -> tuple[Decision, ...]:
    index = state.cluster.index(event.instance)
    if index not in state.settings.switchable:
        what = f"instance {event.instance} does not change its role"
        hint = "only prefill and decode instances in the sites of `offload`, or of `autoscaling`, switch roles"
        raise InputError(what, hint=hint)
    drained = state.view.roles[index] is None
    state.view.set_role(index, event.role)
    if drained and state.parts.offloading is not None:
        state.parts.offloading.role_switched(event.at)
    return ()


def _review_due(state: CoreState, event: ReviewDue) -> tuple[Decision, ...]:
    # Role switches come first: an instance that is about to be drained gets no copies.
    return (*_switch_roles(state, event.at), *state.parts.prefixes.review(event.at))


def _switch_roles(state: CoreState, at: float) -> tuple[SwitchRole, ...]:
    if state.parts.offloading is None:
        return ()
    switches = state.parts.offloading.review(at)
    for switch in switches:
        state.view.set_role(state.cluster.index(switch.instance), None)
    state.parts.offloading.switching += len(switches)
    return tuple(SwitchRole(switch.instance, switch.role) for switch in switches)


def _scaling_due(state: CoreState, event: ScalingDue) -> tuple[Decision, ...]:
    if state.scaling is None:
        return ()
    decisions = state.scaling.review(event.at, state.view, event.queued)
    for decision in decisions:
        if isinstance(decision, SwitchRole):
            state.view.set_role(state.cluster.index(decision.instance), None)
    return decisions


def _scale_ended(state: CoreState, event: ScaleEnded) -> tuple[Decision, ...]:
    if state.may_scale(event.instance) and state.scaling is not None:
        state.scaling.ended(event.instance, serves=event.serves)
    return ()


def _cluster_changed(state: CoreState, event: ClusterChanged) -> tuple[Decision, ...]:
    following, state.following = state.following, None
    if following is None or not following.is_for(event):
        following = state.next_cluster(event.joined, event.left)
    refuse_in_use(state.parts, following, state.bookings)
    state.peers.lift(event.at)
    carry_over(state.parts, following, state.bookings, event.at)
    state.members = following.members
    state.adopt(following.parts)
    state.peers.put_back(event.at, following.parts)
    if state.scaling is not None:
        state.scaling.changed(event.at, state.view, [joined.engine.name for joined in event.joined])
    return ()


FLEET_HANDLERS: dict[type, Handler] = {
    InstanceDown: _instance_down,
    InstanceUp: _instance_up,
    RoleSwitched: _role_switched,
    ReviewDue: _review_due,
    ScalingDue: _scaling_due,
    ScaleEnded: _scale_ended,
    ClusterChanged: _cluster_changed,
}
