"""One completion request: its legs, their failures and its end. It uses callbacks and no task per request.

The request reports each step to the control core once and in order, whatever engines and clients do. It releases what
it holds (slots, in-flight counts, connections) on every code path.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, TypeAlias

from msgspec import structs

from kvroute.http.headers import answered
from kvroute.http.server.request_parser import LIGHT_BYTES
from kvroute.serve.api.json_fields import RequestError
from kvroute.serve.api.requests import Completion, without_body
from kvroute.serve.api.responses import ended_by_length, error_body, error_event, with_text_code
from kvroute.serve.api.stream_record import COMPLETIONS_PATH, StreamRecord, may_continue
from kvroute.serve.engines.protocols import ProtocolError, with_one_token
from kvroute.serve.observe.logs import log_event
from kvroute.serve.proxy.admission.placement_queue import Arrival
from kvroute.serve.proxy.completion.prompt import PromptReading, core_request
from kvroute.serve.proxy.legs.abandoned import SETTLE_S, AbandonedLimit, strands_kv, waits_for_write
from kvroute.serve.proxy.legs.decode_leg import DecodeLeg, DecodeOwner, TransferTimes
from kvroute.serve.proxy.legs.prefill_leg import PrefillLeg
from kvroute.serve.proxy.legs.relayed_decode import RelayedDecodeLeg
from kvroute.serve.proxy.request_state import RequestState
from kvroute.serve.proxy.retry import (
    UNAVAILABLE,
    UPSTREAM,
    DecodeWithoutPrefill,
    EndStream,
    Fail,
    Ignore,
    LegFailure,
    PassOn,
    PrefillWithoutCopy,
    Progress,
    Retry,
    Step,
    decide,
    free_of_charge,
    retry_after,
)
from kvroute.serve.proxy.runtime import EndedRequest
from kvroute.types import Decision, Decode, Prefill, ReadKv, Reject

if TYPE_CHECKING:
    from kvroute.http.client_exchange import ClientExchange
    from kvroute.serve.api.prompt_queue import QueueFull
    from kvroute.serve.api.prompt_reader import Prompt
    from kvroute.serve.api.responses import Usage
    from kvroute.serve.engines.client import EngineClient
    from kvroute.serve.observe.view import Ttft
    from kvroute.serve.proxy.admission.tenancy import Charge, Refusal
    from kvroute.serve.proxy.legs.leg import Leg
    from kvroute.serve.proxy.runtime import ClusterRuntime

OURS = "server_error"
MakeDecodeLeg: TypeAlias = Callable[[RequestState, DecodeOwner, Decode, PrefillLeg | None, float], DecodeLeg]
"""Makes the decode leg of a decision; the arguments are those of `DecodeLeg`."""
_GONE = 499


class ProxiedRequest:
    """One proxied request, from its admission to the end of its response. Its legs report to it; it alone reports the
    request's steps to the control core.

    Every method runs on the event loop and returns at once. Methods that are called from outside raise no exception: a
    bug in the gateway ends the request (`internal_error`).
    """

    __slots__ = (
        "_abandoned_limit",
        "_arrived_at",
        "_attempts",
        "_decode_leg",
        "_generated",
        "_ids",
        "_joint",
        "_only",
        "_predicted_s",
        "_prompt_tokens",
        "_reading",
        "_ttft_s",
        "charge",
        "decode",
        "key",
        "model",
        "prefill",
        "runtime",
        "service_class",
        "state",
        "ticket",
    )

    def __init__(
        self,
        runtime: ClusterRuntime,
        exchange: ClientExchange,
        completion: Completion,
        request_id: bytes,
        received_at: float,
        *,
        decode_leg: MakeDecodeLeg = RelayedDecodeLeg,
        only: tuple[str, ...] | None = None,
        joint: bool = False,
    ) -> None:
        """Args:

        runtime: the cluster that serves it.
        exchange: its client's side.
        completion: the parsed request.
        request_id: value of the X-Request-Id header.
        received_at: time of its arrival, gateway clock.
        decode_leg: makes the leg that decodes; the default sends it to the engine and relays the response.
        only: names of the instances that may serve it; None: all.
        joint: whether the decode instance orders the prefill, so that this request has no prefill leg.
        """
        self.runtime = runtime
        self._decode_leg, self._only, self._joint = decode_leg, only, joint
        self.state = RequestState(runtime, exchange, completion, request_id, received_at)
        self.ticket = 0
        """Ticket of its admission."""
        self.key: str | None = None
        """Name of its client's key, if keys are in use."""
        self.charge: Charge | None = None
        """What it counts against the rates of its key; None: they are not limited."""
        self.service_class = ""
        self._predicted_s: float | None = None
        self._arrived_at = received_at
        self._ttft_s: float | None = None
        """Time from its arrival at the core to its first token."""
        self._generated = 0
        """Output tokens that its legs have relayed."""
        self._prompt_tokens: int | None = None
        """Tokens of its prompt, as an engine has reported them."""
        self.model = ""
        self.prefill: PrefillLeg | None = None
        """The leg that computes the KV cache, or has computed it."""
        self.decode: DecodeLeg | None = None
        self._reading: PromptReading | None = None
        self._abandoned_limit: AbandonedLimit | None = None
        """None: the client is there."""
        self._ids: list[int] | None = None
        """The prompt's tokens, if its prefix may be copied from another instance or read from the store."""
        self._attempts = 1

    # Arrival

    def begin(self) -> None:
        """Read the prompt and request a decision."""
        runtime, state = self.runtime, self.state
        exchange, completion = state.exchange, state.completion
        try:
            exchange.on_gone = self._client_gone
            state.enter(completion.kind)
            if (
                runtime.settings.retries.continue_streams
                and self._decode_leg is RelayedDecodeLeg
                and may_continue(completion)
            ):
                state.record = StreamRecord(completion)
            self.model = runtime.models.name(completion.model)
            if adapter := runtime.models.adapter(completion.model):
                state.completion = structs.replace(completion, adapter=adapter)
            self._reading = PromptReading(state, self, runtime.models.full_name(self.model))
            self._reading.begin()
        except RequestError as refused:
            self.on_bad_request(refused)
        except Exception as error:
            self.internal_error(error)

    def on_bad_request(self, error: RequestError) -> None:
        """See `PromptOwner`."""
        self._answer_error(error.status, error.body(), self.runtime.now(), error.message)

    def on_prompt_queue_full(self, full: QueueFull) -> None:
        """See `PromptOwner`."""
        runtime, now = self.runtime, self.runtime.now()
        runtime.metrics.rejected("prompt_queue")
        runtime.state.rejected(now)
        self._answer_error(503, error_body(str(full), UNAVAILABLE), now, str(full), full.retry_after_s)

    def on_prompt(self, prompt: Prompt) -> None:
        """See `PromptOwner`."""
        self._reading = None
        runtime, completion = self.runtime, self.state.completion
        now = runtime.now()
        request = self.state.request = core_request(self.state, prompt, self.model, now, joint=self._joint)
        self._ids = prompt.ids if request.copyable and (runtime.copy_s or runtime.reads_storage) else None
        runtime.metrics.prompt_read(prompt.input_tokens)
        runtime.budget.request(now)
        if runtime.expected_transfers.due_at <= now:
            runtime.expected_transfers.report_due(now)
        if runtime.placement is None:
            self._apply(runtime.report.arrived(request, now, self._only, joint=self._joint), now)
            return
        arrival = Arrival(
            request,
            self.state.received_at,
            self.state.exchange.headers,
            completion.fields,
            request.max_output_tokens * completion.n * completion.prompts,
            self.state.exchange.full_status,
        )
        runtime.placement.submit(self, arrival, now)

    def place(self, now: float, ttft_max_s: float | None) -> Reject | None:
        """See `Placeable`."""
        runtime, state, request = self.runtime, self.state, self.state.request
        assert request is not None
        decisions = runtime.report.arrived(request, now, self._only, joint=self._joint, ttft_max_s=ttft_max_s)
        last = decisions[-1] if decisions else None
        if type(last) is Reject and last.ttft_s is not None:
            return last
        self._arrived_at = now
        first = decisions[0] if decisions else None
        self._predicted_s = first.ttft_s if isinstance(first, Prefill | Decode) else None
        if self.charge is not None:
            state.response_headers = runtime.tenancy.headers(self.charge.key, now)
        self._apply(decisions, now)
        return None

    def turn_away(self, refusal: Refusal) -> None:
        """See `Placeable`."""
        runtime, now = self.runtime, self.runtime.now()
        runtime.state.rejected(now)
        self.state.response_headers = refusal.headers
        self._answer_error(refusal.status, refusal.body, now, refusal.reason, refusal.retry_after_s)

    def _apply(self, decisions: tuple[Decision, ...], now: float) -> None:
        """Carry out the decisions of the core."""
        if not decisions:
            return
        first, last = decisions[0], decisions[-1]
        if self._joint and type(first) is Prefill:
            self.runtime.state.decided(first, now)
            first = last
        if type(first) is Prefill and type(last) is ReadKv:
            self._send_prefill(first, now, early=False, read=last)
        elif type(first) is Prefill and (first is last or (type(last) is Decode and last.source != last.target)):
            # If sending fails at once, the retry has already started or the request is over.
            if self._send_prefill(first, now, early=first is not last) and type(last) is Decode:
                self._send_decode(last, now)
        elif type(last) is Decode:
            self._send_decode(last, now)
        elif type(last) is Reject:
            self._reject(last, now)

    def _send_prefill(self, decision: Prefill, now: float, *, early: bool, read: ReadKv | None = None) -> bool:
        self.runtime.state.decided(decision, now)
        if read is not None:
            self.runtime.state.decided(read, now)
        self._start_path_attempt(decision, now)
        self.state.alone = False
        leg = self.prefill = PrefillLeg(self.state, self, decision, now, early=early, read=read)
        # If an attempt with a prefix copy or with blocks from the store fails, the retry uses neither.
        prepared = decision.copy_from or read is not None
        ids, self._ids = (self._ids, None) if prepared else (None, self._ids)
        return leg.begin(ids, now)

    def _start_path_attempt(self, decision: Prefill, now: float) -> None:
        """Begin a new path attempt if the prefill is in another datacenter; an unfinished attempt does not count."""
        state = self.state
        if state.path_attempt is not None:
            state.path_attempt.cancelled(now)
        wan_paths, counted = self.runtime.wan_paths, state.faults is None
        state.path_attempt = wan_paths.start_attempt(decision, now, counted=counted) if wan_paths is not None else None

    def _send_decode(self, decision: Decode, now: float) -> None:
        if self.state.alone and self.state.abandoned:
            self._leave(now)  # there is no KV cache to fetch
            return
        if self.state.alone:
            decision = structs.replace(decision, source=decision.target, tier=0, kv_bytes=0.0)
        self.runtime.state.decided(decision, now)
        make = RelayedDecodeLeg if self.state.abandoned else self._decode_leg
        leg = self.decode = make(self.state, self, decision, self.prefill, now)
        if leg.aggregated:
            self.prefill = None
        if not leg.waits:
            self._begin_decode(leg, now)

    def _begin_decode(self, leg: DecodeLeg, now: float) -> None:
        try:
            leg.begin(now)
        except ProtocolError as error:
            self._fail(502, f"prefill instance {leg.decision.source} {error}", now)

    # Reports of legs

    def on_prefill_done(self, engine: EngineClient, now: float) -> None:
        """See `PrefillOwner`."""
        runtime, state, decode = self.runtime, self.state, self.decode
        request = state.request
        assert request is not None
        self._ids = None
        if self.prefill is not None and self.prefill.copy is not None:
            self.prefill.copy.computed(None, now)
        if state.faults is not None:
            state.faults.answered("prefill", now)
        if engine.approximate and request.blocks:
            runtime.report.prefix_stored(engine.name, request, now)
        if runtime.expected_transfers.due_at <= now:
            runtime.expected_transfers.report_due(now)
        waits = decode is not None and decode.waits
        if decode is not None and not (decode.aggregated or waits):
            decode.transfer_started(now)
            decode.expect_transfer(now)
        read = self.prefill.storage_read if self.prefill is not None else None
        kept_tokens = read.kept_tokens if read is not None else 0
        self._apply(runtime.report.prefill_finished(state.number, now, kept_tokens), now)
        if decode is not None and waits:
            self._begin_decode(decode, now)
        if runtime.placement is not None:
            runtime.placement.pump(now)

    def on_no_transfer_params(self, leg: PrefillLeg) -> None:
        """See `PrefillOwner`. If the output did not end by its length, the next request may be served by two
        instances."""
        state, kind = self.state, self.state.completion.kind
        state.alone = True
        if leg.storage_read is not None:
            leg.storage_read.release_kept()
        if ended_by_length(leg.body()):
            self.runtime.unsplit.add(self.model, kind, self.runtime.now())
        request_id, why = state.request_id.decode("latin-1"), "its response has no kv_transfer_params"
        log_event("warning", "not_split", request_id=request_id, instance=leg.engine.name, endpoint=kind, reason=why)

    def _prefill_lost(self, now: float) -> None:
        """Handle a prefill that has failed without a retry while the decode engine waits for its KV cache: the decode
        engine may compute the prompt itself; otherwise it reports an error."""
        state, self.prefill = self.state, None
        if state.path_attempt is not None:
            state.path_attempt.cancelled(now)
        if self.decode is not None:
            self.decode.end_transfer(now, False)
        self._apply(self.runtime.report.prefill_finished(state.number, now), now)

    def on_copy_finished(self, decision: Prefill, now: float, *, landed: bool) -> None:
        """See `CopyOwner`. The core itself ends the copy when the prefill ends."""
        if self.runtime.control.copying(decision.copy_id):
            self.runtime.report.copy_finished(decision, now, landed=landed)

    def on_transfer_done(self, leg: DecodeLeg, times: TransferTimes, now: float) -> None:
        """See `DecodeOwner`."""
        runtime, state, decision = self.runtime, self.state, leg.decision
        number, request, report = state.number, state.request, runtime.report
        assert request is not None
        if self.prefill is not None and self.prefill.storage_read is not None:
            self.prefill.storage_read.loaded(decision.target)
        if times.measured_s is not None and decision.source in runtime.engines:
            runtime.transfer_observed(decision, times.measured_s, now)
        if runtime.control.admitted(number):
            return
        computed = state.prefill_done
        if not computed:
            self.on_prefill_done(runtime.engines[decision.source], now)
        if leg.end_transfer(now, True, times.seconds):
            report.transfer_finished(number, now)
        report.admitted(number, now)
        if leg.engine.approximate and request.blocks and (computed or not leg.aggregated):
            report.prefix_stored(decision.target, request, now)
        if state.abandoned and leg.streams:
            self._leave(now)  # its first token has arrived
        elif self._abandoned_limit is not None:
            self._abandoned_limit.end_after(SETTLE_S)

    def on_first_token(self, leg: DecodeLeg, ttft: Ttft, decode_s: float, now: float) -> None:
        """See `DecodeOwner`."""
        state = self.state
        if len(state.exchange.body) > LIGHT_BYTES:
            self.release_body()
        trace_id = state.trace.trace_id if state.trace is not None else ""
        exemplar = ("trace_id", trace_id) if trace_id else ("request_id", str(state.number))
        self._first_token(ttft, now)
        self.runtime.metrics.decode_answered(decode_s)
        self.runtime.first_token(leg.decision, ttft, now, exemplar)

    def _first_token(self, ttft: Ttft, now: float) -> None:
        """Record the time to the first token, and the prediction beside it unless a leg has failed."""
        self._ttft_s = now - self._arrived_at
        runtime, predicted_s = self.runtime, self._predicted_s
        if runtime.placement is None:
            return
        runtime.metrics.class_first_token(self.service_class, ttft.total_s)
        if predicted_s is not None and self._attempts == 1:
            runtime.metrics.predicted(predicted_s, self._ttft_s)
            runtime.state.predicted(predicted_s, self._ttft_s)

    def release_body(self) -> None:
        """See `DecodeOwner`."""
        self.state.completion = without_body(self.state.completion)
        for leg in (self.prefill, self.decode):
            if leg is not None and leg.call is not None:
                leg.call.forget_request()
        self.state.exchange.release_body()

    def on_response_end(self, leg: DecodeLeg, usage: Usage | None, now: float) -> None:
        """See `DecodeOwner`."""
        if usage is not None and usage.prompt_tokens is not None:
            self._prompt_tokens = usage.prompt_tokens
        self._end(leg.status, now, usage.output_tokens if usage is not None else None, relayed_bytes=leg.size)

    def on_served_elsewhere(self, instance: str, now: float) -> Decode | None:
        """See `DecodeOwner`."""
        for decision in self.runtime.report.served(self.state.number, instance, now):
            if type(decision) is Decode:
                self.runtime.state.decided(decision, now)
                return decision
        return None

    # Failures

    def on_leg_failed(self, leg: Leg, failure: LegFailure, now: float) -> None:
        """See `LegOwner`: `retry.decide` says what follows."""
        self._follow(leg.kind, leg, failure, now)

    def _follow(self, step: Step, leg: Leg, failure: LegFailure, now: float) -> None:
        """Carry out what follows from a failure."""
        match decide(step, failure, self._progress(leg)):
            case Ignore():
                pass
            case PrefillWithoutCopy():
                assert self.prefill is not None
                assert self.prefill.copy is not None
                self.prefill.copy.continue_without(now)
            case DecodeWithoutPrefill():
                self._prefill_lost(now)
            case PassOn():
                self._pass_on(leg, now)
            case EndStream():
                if not self._continue_stream(now):
                    self._end_stream(failure, now)
            case Retry(leg="prefill"):
                self._retry_prefill(failure, now)
            case Retry(kv_lost=kv_lost, abort_prefill=abort_prefill):
                self._retry_decode(failure, now, kv_lost=kv_lost, abort_prefill=abort_prefill)
            case Fail(error_kind=error_kind):
                self._fail_with(failure, now, error_kind)

    def _progress(self, leg: Leg) -> Progress:
        """Return how far the request is, as far as the consequences of this leg's failure depend on it."""
        state, decode = self.state, self.decode
        waits, elsewhere, refetchable = False, True, False
        final = decode is not None and decode.final
        if leg is self.prefill:
            waits = decode is not None and decode.early
            elsewhere = not waits or self.runtime.prefills_elsewhere(leg.engine)
        elif decode is not None and leg is decode:
            waits, refetchable = decode.early, decode.kv_refetchable()
        return Progress(state.over, state.exchange.started, state.prefill_done, waits, elsewhere, refetchable, final)

    def _pass_on(self, leg: Leg, now: float) -> None:
        """Respond with the engine's error response and end the request."""
        state = self.state
        self._drop_legs(now)
        content_type, headers = answered(leg.headers)
        headers += state.response_headers
        state.exchange.respond(leg.status, with_text_code(leg.body()), content_type, headers)
        self._end(leg.status, now)

    def _retry_prefill(self, failure: LegFailure, now: float) -> None:
        self.prefill = None
        self._drop_decode(now)
        if self._may_retry("prefill", now):
            self._apply(self.runtime.report.prefill_failed(self.state.number, now), now)
        else:
            self._fail_with(failure, now)

    def _retry_decode(self, failure: LegFailure, now: float, *, kv_lost: bool, abort_prefill: bool) -> None:
        assert self.decode is not None
        if abort_prefill and self.prefill is not None:
            self.prefill.abort(now)
        self._release_kept()
        self._drop_decode(now)
        if self._may_retry("decode", now):
            self._apply(self.runtime.report.decode_failed(self.state.number, now, kv_lost=kv_lost), now)
        else:
            self._fail_with(failure, now)

    def _continue_stream(self, now: float) -> bool:
        """Let other engines generate the rest of a stream that has broken off. Return False if that is impossible."""
        state, leg = self.state, self.decode
        record = state.record
        if record is None or leg is None or not record.continuable or not self._may_retry("decode", now):
            return False
        self.decode = None
        self._release_kept()
        leg.end_transfer(now, False)
        self._ids = None
        state.completion, state.path = record.rest(), COMPLETIONS_PATH
        self.runtime.metrics.stream_continued()
        self._apply(self.runtime.report.decode_failed(state.number, now, kv_lost=True), now)
        return True

    def _may_retry(self, leg: Literal["prefill", "decode"], now: float) -> bool:
        """Return whether a failed leg may be retried; if so, count the retry as made."""
        runtime = self.runtime
        if self.state.abandoned or self._attempts >= runtime.settings.retries.attempts:
            return False
        if not runtime.budget.spend(now):
            runtime.metrics.retry_refused(leg)
            return False
        self._attempts += 1
        self.state.next_attempt()
        runtime.metrics.retried(leg)
        return True

    # End

    def _end_stream(self, failure: LegFailure, now: float) -> None:
        leg, runtime = self.decode, self.runtime
        assert leg is not None
        runtime.metrics.stream_failed()
        runtime.state.stream_failed(now)
        leg.abort_stream(failure.reason)
        self._drop_legs(now)
        if self.state.faults is not None:  # first: the status of a stream that has broken off proves nothing
            self.state.faults.ended(failure.status, now)
        self._end(200, now, leg.usage().output_tokens, relayed_bytes=leg.size, error=failure.reason)

    def _reject(self, reject: Reject, now: float) -> None:
        runtime = self.runtime
        runtime.metrics.rejected("no_instance")
        runtime.state.rejected(now)
        runtime.state.decided(reject, now)
        self._fail(503, reject.reason, now, UNAVAILABLE)

    def _fail(self, status: int, why: str, now: float, kind: str = UPSTREAM) -> None:
        """Respond with an error and end the request."""
        self._answer_error(status, error_body(why, kind), now, why)

    def _fail_with(self, failure: LegFailure, now: float, kind: str = UPSTREAM) -> None:
        """Respond with the failure of a leg and end the request."""
        self._answer_error(failure.status, error_body(failure.message, kind), now, failure.reason)

    def _answer_error(self, status: int, body: bytes, now: float, why: str, retry_after_s: int = 1) -> None:
        self._drop_legs(now)
        exchange = self.state.exchange
        if exchange.started and self.state.record is not None:
            assert exchange.writer is not None, "only a stream that is relayed here has a record"
            exchange.writer.write(error_event(why, UPSTREAM))
            exchange.writer.end()
        elif exchange.started:
            exchange.abort()
        else:
            headers = [*self.state.response_headers, *retry_after(status, retry_after_s)]
            exchange.respond(status, body, b"application/json", headers)
        self._end(status, now, error=why)

    def _client_gone(self) -> None:
        if self.state.over:
            return
        try:
            now = self.runtime.now()
            if self._complete(now):
                return
            self.runtime.metrics.client_gone()
            if strands_kv(self.state, self.prefill, self.decode, now):
                self._abandon()
            else:
                self._leave(now)
        except Exception as error:
            self.internal_error(error)

    def _complete(self, now: float) -> bool:
        """End a request whose client has left with its whole response, as the end of a stream's body may come after it.
        Return whether it has ended."""
        decode = self.decode
        if decode is None:
            return False
        decode.settle()
        if self.state.over:
            return True
        if not decode.complete:
            return False
        if decode.call is not None:
            decode.call.abort()
        decode.close()
        self._drop_prefill(now)
        self.on_response_end(decode, decode.usage(), now)
        return True

    def _abandon(self) -> None:
        """Go on until a decode engine has fetched the KV cache, or for the time limit."""
        timeouts, decode, prefill = self.runtime.timeouts, self.decode, self.prefill
        most_s = float(timeouts.abandoned_s)
        self.state.abandoned = True
        if decode is None or decode.waits:
            self.state.completion = with_one_token(self.state.completion)
            if decode is not None:
                self.decode = RelayedDecodeLeg(self.state, self, decode.decision, prefill, self.runtime.now())
        elif prefill is not None and not self.state.prefill_done and waits_for_write(prefill, decode):
            most_s += timeouts.prefill_s
        elif self.runtime.control.admitted(self.state.number):
            most_s = min(most_s, SETTLE_S)
        self._abandoned_limit = AbandonedLimit(self._give_up)
        self._abandoned_limit.end_after(most_s)

    def _give_up(self) -> None:
        """End an abandoned request if it has not ended."""
        if self.state.over:
            return
        try:
            self._leave(self.runtime.now())
        except Exception as error:
            self.internal_error(error)

    def _leave(self, now: float) -> None:
        """End a request whose client has left."""
        self._drop_legs(now)
        self._end(_GONE, now, error="the client closed the connection")

    def stop(self) -> None:
        """See `RequestInProgress`."""
        if self.state.over:
            return
        try:
            self._fail(503, "the gateway is shutting down", self.runtime.now(), UNAVAILABLE)
        except Exception as error:
            self.internal_error(error)

    def uses(self, name: str) -> bool:
        """See `RequestInProgress`."""
        prefill, decode = self.prefill, self.decode
        if decode is not None and decode.engine.name == name:
            return True
        if prefill is None or prefill.engine.name != name:
            return False
        return decode is None or not self.runtime.control.admitted(self.state.number)

    def transfers(self, source: str, target: str) -> bool:
        """See `RequestInProgress`."""
        leg = self.decode
        return leg is not None and leg.transferring and (leg.decision.source, leg.decision.target) == (source, target)

    def on_process_ended(self, name: str) -> None:
        """See `RequestInProgress`. If the prefill is in progress, its leg fails by itself. A response that comes whole
        does not show whether the KV cache has arrived, so it is taken as not arrived."""
        state, prefill, decode = self.state, self.prefill, self.decode
        if state.over or prefill is None or decode is None or prefill.engine.name != name:
            return
        if not (state.prefill_done and waits_for_write(prefill, decode)):
            return
        if decode.streams and self.runtime.control.admitted(state.number):
            return
        why = f"prefill instance {name} ended before it had written the KV cache"
        failure = LegFailure("process_ended", why, 502, sent=True)
        try:
            self._follow("write", decode, failure, self.runtime.now())
        except Exception as error:
            self.internal_error(error)

    def internal_error(self, error: Exception) -> None:
        """Handle a bug in the gateway: respond with an error, and release what the request holds."""
        asyncio.get_running_loop().call_exception_handler(
            {"message": "a proxied request failed with an internal error", "exception": error}
        )
        why, exchange, decode = "internal error in the gateway", self.state.exchange, self.decode
        now = self.runtime.now()
        with suppress(Exception):
            self._drop_prefill(now)
        with suppress(Exception):
            self._drop_decode(now)
        with suppress(Exception):
            if not exchange.started:
                exchange.respond(500, error_body(why, OURS))
            elif decode is not None and not exchange.finished:
                decode.abort_stream(why, OURS)
        if not self.state.over:
            with suppress(Exception):
                self._end(500, now, error=why)

    def _drop_legs(self, now: float) -> None:
        self._drop_prefill(now)
        self._drop_decode(now)

    def _drop_prefill(self, now: float) -> None:
        leg, self.prefill = self.prefill, None
        if leg is not None:
            leg.abort(now)

    def _release_kept(self) -> None:
        """Release the KV in the buffer of a decode node whose decode instance does not need it any more."""
        if self.prefill is not None and self.prefill.storage_read is not None:
            self.prefill.storage_read.release_kept()

    def _drop_decode(self, now: float) -> None:
        leg, self.decode = self.decode, None
        if leg is not None:
            leg.abort(now)
            self._generated += leg.usage().output_tokens or 0

    def _end(
        self, status: int, now: float, output_tokens: int | None = None, *, relayed_bytes: int = 0, error: str = ""
    ) -> None:
        """End the request and report it; the legs must be closed already."""
        runtime, state = self.runtime, self.state
        state.leave()
        if state.abandoned:
            status = _GONE
            runtime.metrics.abandoned(fetched=runtime.control.admitted(state.number))
        self._release_kept()
        self.prefill = self.decode = None
        if self._abandoned_limit is not None:
            self._abandoned_limit.cancel()
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        try:
            if state.faults is not None:
                state.faults.ended(status, now)
            if state.path_attempt is not None:
                state.path_attempt.cancelled(now)
            if runtime.control.in_progress(state.number):
                runtime.report.finished(state.number, output_tokens, now, self._ttft_s)
            if state.trace is not None:
                state.trace.end(status, error)
        finally:
            seconds = now - state.received_at
            ended = EndedRequest(state.number, self.ticket, state.kind, status, seconds, relayed_bytes)
            try:
                self._close_charge(status, output_tokens, now)
            finally:
                runtime.ended(ended, now)

    def _close_charge(self, status: int, output_tokens: int | None, now: float) -> None:
        """Charge what was used, or nothing if the gateway or the engines have failed the request."""
        runtime, request = self.runtime, self.state.request
        if runtime.placement is None:
            return
        if output_tokens is not None and status == 200:
            runtime.tenancy.answered(output_tokens)
        if self.charge is not None and request is not None:
            if free_of_charge(status):
                self.charge.refund(now)
            else:
                prompt_tokens = request.input_tokens if self._prompt_tokens is None else self._prompt_tokens
                used = prompt_tokens + max(output_tokens or 0, self._generated)
                unseen = status == 200 and output_tokens is None
                self.charge.settle(max(used, self.charge.tokens) if unseen else used, now)
        runtime.placement.ended(self.state.number, now)
