"""Handlers of what instances have cached, and of the copies and reads that end."""

from __future__ import annotations

from kvroute.control.events.state import CoreState, Handler
from kvroute.types import (
    CopyFinished,
    Decision,
    InputError,
    KvCleared,
    KvEvicted,
    KvStored,
    ReadFinished,
)


def _kv_stored(state: CoreState, event: KvStored) -> tuple[Decision, ...]:
    state.view.caches.stored(state.cluster.index(event.instance), event.blocks, event.tier)
    return ()


def _kv_evicted(state: CoreState, event: KvEvicted) -> tuple[Decision, ...]:
    state.view.caches.evicted(state.cluster.index(event.instance), event.blocks, event.keep, event.tier)
    return ()


def _kv_cleared(state: CoreState, event: KvCleared) -> tuple[Decision, ...]:
    state.view.caches.cleared(state.cluster.index(event.instance))
    state.view.adapters.forget(event.instance)
    return ()


def _copy_finished(state: CoreState, event: CopyFinished) -> tuple[Decision, ...]:
    if not state.parts.prefixes.ended(event.at, event.copy_id, landed=event.landed):
        raise InputError(f"copy {event.copy_id} is not in progress", hint="report the end of every copy once")
    return ()


def _read_finished(state: CoreState, event: ReadFinished) -> tuple[Decision, ...]:
    reads = state.view.reads
    if reads is None or not reads.finished(event.read_id, event.side):
        what = f"the {event.side} node does not read for read {event.read_id}"
        raise InputError(what, hint="report the end of every read once")
    return ()


KV_HANDLERS: dict[type, Handler] = {
    KvStored: _kv_stored,
    KvEvicted: _kv_evicted,
    KvCleared: _kv_cleared,
    CopyFinished: _copy_finished,
    ReadFinished: _read_finished,
}
