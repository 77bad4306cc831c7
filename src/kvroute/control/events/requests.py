"""Handlers of the steps of a request: its arrival, the legs that end or fail, and its end."""

from __future__ import annotations

from msgspec.structs import replace

from kvroute.control.booking import Booking
from kvroute.control.cluster_change import GONE
from kvroute.control.events.state import CoreState, Handler
from kvroute.types import (
    Admitted,
    Arrived,
    Decision,
    DecodeFailed,
    Finished,
    InputError,
    PrefillFailed,
    PrefillFinished,
    Reject,
    Served,
    TransferFinished,
)

_ONCE = "report each step of a request once and in order"


def _arrived(state: CoreState, event: Arrived) -> tuple[Decision, ...]:
    request = event.request
    if request.id in state.bookings:
        raise InputError(f"request {request.id} has already arrived", hint="give every request its own id")
    model = state.view.model_name(request)
    if model is None:
        unnamed = "a request without a model (the cluster has several)"
        what = f"model {request.model!r}" if request.model else unnamed
        why = f"no prefill and decode instances serve {what}" if state.cluster.instances else "no instance is up"
        return (Reject(request.id, why),)
    booking = Booking(
        request, model, both_on_arrival=event.both_on_arrival, only=event.only, ttft_max_s=event.ttft_max_s
    )
    booking.restrict_to(state.cluster.instances)
    decisions = _start(state, booking, event.at)
    if state.scaling is not None:
        service_s = booking.prefill_s or booking.prompt_s
        state.scaling.arrived(event.at, state.view, model, request, service_s)
    return decisions


def _start(state: CoreState, booking: Booking, at: float) -> tuple[Decision, ...]:
    """Choose the first leg, and the second one if both are due. Keep the booking unless the request is rejected."""
    decisions = (
        state.dispatcher.place_single(booking, at) if booking.request.one_leg else state.dispatcher.route(booking, at)
    )
    if isinstance(decisions[-1], Reject):
        state.reservations.release_prefill(booking, at)
        state.bookings.pop(booking.request.id, None)
        return (_restricted(decisions[-1], booking),)
    state.bookings[booking.request.id] = booking
    return decisions


def _prefill_finished(state: CoreState, event: PrefillFinished) -> tuple[Decision, ...]:
    booking = _booking(state, event.request_id)
    if booking.prefill < 0:
        raise InputError(f"prefill of request {event.request_id} has already finished", hint=_ONCE)
    state.reservations.end_prefill(booking, event.at)
    planned = state.dispatcher.take_planned(booking, event.at, event.kept_tokens)
    if planned is not None:
        return (planned,)
    if booking.position < 0:
        return (_decode(state, booking, event.at),)
    if booking.source != booking.target and not booking.early:
        state.reservations.start_transfer(booking, event.at)
    return ()


def _prefill_failed(state: CoreState, event: PrefillFailed) -> tuple[Decision, ...]:
    booking = _booking(state, event.request_id)
    if booking.prefill < 0:
        raise InputError(f"prefill of request {event.request_id} is not in progress", hint=_ONCE)
    return _again(state, booking, booking.source, event.at)


def _decode_failed(state: CoreState, event: DecodeFailed) -> tuple[Decision, ...]:
    booking = _booking(state, event.request_id)
    if booking.position < 0 or booking.planned is not None:
        raise InputError(f"decode of request {event.request_id} is not in progress", hint=_ONCE)
    if booking.source == GONE:
        return _again(state, booking, booking.target, event.at)
    aggregated = booking.source == booking.target
    both_on_arrival = booking.both_on_arrival or state.cluster.instances[booking.source].traits.concurrent_legs
    if event.kv_lost and state.reservations.is_offloaded(booking):
        booking.at_home = True  # the WAN path failed, neither of the two instances
        return _again(state, booking, None, event.at)
    if event.kv_lost or aggregated or both_on_arrival:
        return _again(state, booking, booking.target, event.at)
    state.reservations.release_decode(booking, event.at)
    booking.exclude(booking.target)
    return (_decode(state, booking, event.at),)


def _served(state: CoreState, event: Served) -> tuple[Decision, ...]:
    booking, index = _booking(state, event.request_id), state.cluster.index(event.instance)
    if booking.pool is None or booking.position < 0 or booking.planned is not None or booking.source == GONE:
        raise InputError(f"decode of request {event.request_id} is not in progress", hint=_ONCE)
    pool = state.view.decode_pool_of(index)
    instance, own = state.cluster.instances[index], state.cluster.instances[booking.target]
    if pool is None or (instance.model, instance.protocol) != (own.model, own.protocol):
        what = f"instance {event.instance} cannot serve the decode of request {event.request_id}"
        raise InputError(what, hint="name an instance of its model that decodes with the same protocol")
    if index == booking.target:
        return ()
    return (state.dispatcher.move(booking, pool, pool.position[index], event.at),)


def _decode(state: CoreState, booking: Booking, at: float) -> Decision:
    decision = state.dispatcher.choose_decode(booking, at)
    if isinstance(decision, Reject):
        del state.bookings[booking.request.id]
        return _restricted(decision, booking)
    return decision


def _again(state: CoreState, booking: Booking, failed: int | None, at: float) -> tuple[Decision, ...]:
    """Restart the request from the beginning without the instance that failed."""
    state.reservations.release_prefill(booking, at)
    state.reservations.release_decode(booking, at)
    booking.early, booking.wait_s, booking.transfer_s, booking.ttft_s = False, 0.0, 0.0, None
    if failed is not None:
        booking.exclude(failed)
    return _start(state, booking, at)


def _transfer_finished(state: CoreState, event: TransferFinished) -> tuple[Decision, ...]:
    booking = _booking(state, event.request_id)
    if booking.source == GONE:
        return ()  # the transfer has ended with its source, as far as this core knows
    if not booking.in_transfer:
        raise InputError(f"request {event.request_id} has no transfer in progress", hint=_ONCE)
    state.reservations.end_transfer(booking, event.at, landed=True)
    if event.free_kv_bytes is not None and booking.pool is not None:
        booking.pool.free_kv_bytes[booking.position] = event.free_kv_bytes
    return ()


def _admitted(state: CoreState, event: Admitted) -> tuple[Decision, ...]:
    booking = _booking(state, event.request_id)
    if booking.pool is None or booking.position < 0 or booking.admitted:
        raise InputError(f"request {event.request_id} does not wait for a decode slot", hint=_ONCE)
    booking.pool.admit(booking.position)
    booking.admitted = True
    state.reservations.release_prompt(booking, event.at)
    return ()


def _finished(state: CoreState, event: Finished) -> tuple[Decision, ...]:
    booking = _booking(state, event.request_id)
    del state.bookings[event.request_id]
    state.reservations.release_prefill(booking, event.at)
    pool, position = booking.pool, booking.position
    state.reservations.release_decode(booking, event.at)
    if event.output_tokens:
        if state.parts.offloading is not None:
            state.parts.offloading.answered(event.at, event.output_tokens)
        if state.scaling is not None:
            state.scaling.answered(event.at, booking.model, event.output_tokens)
        for observer in state.view.states.response_observers:
            observer.answered(event.output_tokens)
    if pool is not None and position >= 0 and event.free_kv_bytes is not None:
        pool.free_kv_bytes[position] = event.free_kv_bytes
    return ()


def _booking(state: CoreState, request_id: int) -> Booking:
    booking = state.bookings.get(request_id)
    if booking is None:
        hint = "it has not arrived, was rejected or has left"
        raise InputError(f"request {request_id} is not in flight", hint=hint)
    return booking


def _restricted(reject: Reject, booking: Booking) -> Reject:
    """Return a Reject whose reason says that the request may use some instances only, if so."""
    if booking.only is None:
        return reject
    return replace(reject, reason=f"{reject.reason} among those that may serve the request")


REQUEST_HANDLERS: dict[type, Handler] = {
    Arrived: _arrived,
    PrefillFinished: _prefill_finished,
    PrefillFailed: _prefill_failed,
    TransferFinished: _transfer_finished,
    Admitted: _admitted,
    DecodeFailed: _decode_failed,
    Served: _served,
    Finished: _finished,
}
