"""Handlers of what engines and the network report, and of what other cores have learned."""

from __future__ import annotations

from kvroute.control.events.state import CoreState, Handler
from kvroute.types import (
    AdaptersMeasured,
    BandwidthLearned,
    CapacityLearned,
    CongestionMeasured,
    Decision,
    InputError,
    InstanceMeasured,
    LinksMeasured,
    SessionsServed,
    ThresholdKnown,
    TransferMeasured,
)


def _instance_measured(state: CoreState, event: InstanceMeasured) -> tuple[Decision, ...]:
    state.view.measured(state.cluster.index(event.instance), event)
    return ()


def _adapters_measured(state: CoreState, event: AdaptersMeasured) -> tuple[Decision, ...]:
    state.cluster.index(event.instance)  # raises for an instance that the cluster does not have
    state.view.adapters.measured(event.instance, event.adapters, event.slots)
    return ()


def _transfer_measured(state: CoreState, event: TransferMeasured) -> tuple[Decision, ...]:
    source, target = state.cluster.index(event.source), state.cluster.index(event.target)
    state.parts.oracle.transfer_measured(event.at, source, target, event.kv_bytes, event.seconds, event.transfers)
    return ()


def _congestion_measured(state: CoreState, event: CongestionMeasured) -> tuple[Decision, ...]:
    state.parts.oracle.congestion_measured(event.at, event.per_tier)
    return ()


def _links_measured(state: CoreState, event: LinksMeasured) -> tuple[Decision, ...]:
    state.parts.oracle.links_measured(event.at, event.utilisation)
    return ()


def _capacity_learned(state: CoreState, event: CapacityLearned) -> tuple[Decision, ...]:
    for learner in state.view.states.learners:
        learner.resume(event.at, event)
    return ()


def _bandwidth_learned(state: CoreState, event: BandwidthLearned) -> tuple[Decision, ...]:
    index = state.cluster.index
    pairs = [(index(source), index(target), known) for source, target, known in event.pairs]
    state.parts.oracle.resume(event.tiers, pairs)
    return ()


def _threshold_known(state: CoreState, event: ThresholdKnown) -> tuple[Decision, ...]:
    if state.parts.offloading is None or not state.parts.offloading.restore_threshold(
        event.site, event.tokens, event.base_tokens
    ):
        hint = "name a datacenter with prefill instances only"
        raise InputError(f"{event.site} is not an offloading site", hint=hint)
    return ()


def _sessions_served(state: CoreState, event: SessionsServed) -> tuple[Decision, ...]:
    for session, prefill, decode in event.sessions:
        state.view.sessions.learn(session, prefill, decode)
    return ()


MEASUREMENT_HANDLERS: dict[type, Handler] = {
    ThresholdKnown: _threshold_known,
    CapacityLearned: _capacity_learned,
    BandwidthLearned: _bandwidth_learned,
    InstanceMeasured: _instance_measured,
    AdaptersMeasured: _adapters_measured,
    SessionsServed: _sessions_served,
    TransferMeasured: _transfer_measured,
    CongestionMeasured: _congestion_measured,
    LinksMeasured: _links_measured,
}
