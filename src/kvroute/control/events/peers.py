"""Handlers of the reports of other gateways, and of their loss."""

from __future__ import annotations

from contextlib import suppress

from msgspec.structs import replace

from kvroute.control.events.fleet import FLEET_HANDLERS
from kvroute.control.events.kv import KV_HANDLERS
from kvroute.control.events.measurements import MEASUREMENT_HANDLERS
from kvroute.control.events.state import CoreState, Handler
from kvroute.types import (
    BandwidthLearned,
    Decision,
    InputError,
    PeerEvent,
    PeerLost,
    PeerReported,
)

_HANDLERS = KV_HANDLERS | FLEET_HANDLERS | MEASUREMENT_HANDLERS
"""The handler of each kind of event that a report may hold."""


def _peer_reported(state: CoreState, event: PeerReported) -> tuple[Decision, ...]:
    ahead_s = event.at - event.report.at
    before = state.peers.arrivals
    events = state.peers.reported(event.at, event.report)
    if state.scaling is not None and state.peers.arrivals > before:
        state.scaling.arrived_elsewhere(event.at, state.peers.arrivals - before)
    for reported in events:
        with suppress(InputError):  # this core does not have the instance or the feature
            _HANDLERS[type(reported)](state, _at(reported, event.at, ahead_s))
    return ()


def _peer_lost(state: CoreState, event: PeerLost) -> tuple[Decision, ...]:
    state.peers.lost(event.at, event.gateway)
    return ()


def _at(event: PeerEvent, at: float, ahead_s: float) -> PeerEvent:
    """An event of another gateway by this core's clock, which is `ahead_s` ahead of that gateway's."""
    if not isinstance(event, BandwidthLearned):
        return replace(event, at=at)
    tiers = tuple([known and replace(known, at=known.at + ahead_s) for known in event.tiers])
    pairs = tuple([(source, target, replace(known, at=known.at + ahead_s)) for source, target, known in event.pairs])
    return BandwidthLearned(at, tiers, pairs)


PEER_HANDLERS: dict[type, Handler] = {
    PeerReported: _peer_reported,
    PeerLost: _peer_lost,
}
