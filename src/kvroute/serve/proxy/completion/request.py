"""One completion request: its legs, their failures and its end. It uses callbacks and no task per request.

The request reports each step to the control core once and in order, whatever engines and clients do. It releases what
it holds (slots, in-flight counts, connections) on every code path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from kvroute.http.server.request_parser import LIGHT_BYTES
from kvroute.serve.api.json_fields import RequestError
from kvroute.serve.api.responses import ended_by_length, error_body
from kvroute.serve.api.stream_record import StreamRecord, may_continue
from kvroute.serve.observe.logs import log_event
from kvroute.serve.proxy.admission.placement_queue import Arrival
from kvroute.serve.proxy.admission.tenancy import RequestAccount
from kvroute.serve.proxy.completion.client_departure import ClientDeparture
from kvroute.serve.proxy.completion.end import RequestEnd
from kvroute.serve.proxy.completion.failures import RequestFailures
from kvroute.serve.proxy.completion.legs import MakeDecodeLeg, RequestLegs
from kvroute.serve.proxy.completion.prompt import PromptReading, core_request
from kvroute.serve.proxy.legs.abandoned import SETTLE_S
from kvroute.serve.proxy.legs.relayed_decode import RelayedDecodeLeg
from kvroute.serve.proxy.request_state import RequestState
from kvroute.serve.proxy.retry import UNAVAILABLE, UPSTREAM, LegFailure, Step
from kvroute.types import Decode, Prefill, Reject

if TYPE_CHECKING:
    from kvroute.http.client_exchange import ClientExchange
    from kvroute.serve.api.prompt_queue import QueueFull
    from kvroute.serve.api.prompt_reader import Prompt
    from kvroute.serve.api.requests import Completion
    from kvroute.serve.api.responses import TokenUsage
    from kvroute.serve.engines.client import EngineClient
    from kvroute.serve.observe.view import TtftBreakdown
    from kvroute.serve.proxy.admission.tenancy import Refusal
    from kvroute.serve.proxy.legs.decode_leg import DecodeLeg, TransferTimes
    from kvroute.serve.proxy.legs.leg import Leg
    from kvroute.serve.proxy.legs.prefill_leg import PrefillLeg
    from kvroute.serve.proxy.runtime import ClusterRuntime


class ProxiedRequest:
    """One proxied request, from its admission to the end of its response. Its legs report to it; it alone reports the
    request's steps to the control core.

    Every method runs on the event loop and returns at once. Methods that are called from outside raise no exception: a
    bug in the gateway ends the request (`internal_error`).
    """

    __slots__ = (
        "_both_on_arrival",
        "_end",
        "_failures",
        "_only",
        "account",
        "legs",
        "model",
        "runtime",
        "state",
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
        both_on_arrival: bool = False,
    ) -> None:
        """Args:

        runtime: the cluster that serves it.
        exchange: its client's side.
        completion: the parsed request.
        request_id: value of the X-Request-Id header.
        received_at: time of its arrival, gateway clock.
        decode_leg: makes the leg that decodes; the default sends it to the engine and relays the response.
        only: names of the instances that may serve it; None: all.
        both_on_arrival: whether the decode instance orders the prefill, so that this request has no prefill leg.
        """
        self.runtime = runtime
        self._only, self._both_on_arrival = only, both_on_arrival
        self.state = RequestState(runtime, exchange, completion, request_id, received_at)
        self.legs = RequestLegs(self.state, self, decode_leg, both_on_arrival=both_on_arrival)
        self.account = RequestAccount(received_at)
        self._end = RequestEnd(self.state, self.legs, self.account)
        self._failures: RequestFailures | None = None
        """None: no leg has failed."""
        self.model = ""

    # Arrival

    def begin(self) -> None:
        """Read the prompt and request a decision."""
        runtime, state = self.runtime, self.state
        exchange, completion = state.exchange, state.completion
        try:
            exchange.on_gone = self._client_gone
            state.enter(completion.kind)
            if runtime.settings.retries.continue_streams and self.legs.relayed and may_continue(completion):
                state.record = StreamRecord(completion)
            self.model = runtime.reading.models.name(completion.model)
            if adapter := runtime.reading.models.adapter(completion.model):
                state.completion = structs.replace(completion, adapter=adapter)
            self._end.reading = PromptReading(state, self, runtime.reading.models.full_name(self.model))
            self._end.reading.begin()
        except RequestError as refused:
            self.on_bad_request(refused)
        except Exception as error:
            self.internal_error(error)

    def on_bad_request(self, error: RequestError) -> None:
        """See `PromptOwner`."""
        self._end.refused(error.status, error.body(), self.runtime.now(), error.message)

    def on_prompt_queue_full(self, full: QueueFull) -> None:
        """See `PromptOwner`."""
        runtime, now = self.runtime, self.runtime.now()
        runtime.metrics.rejected("prompt_queue")
        runtime.state.rejected(now)
        self._end.refused(503, error_body(str(full), UNAVAILABLE), now, str(full), full.retry_after_s)

    def on_prompt(self, prompt: Prompt) -> None:
        """See `PromptOwner`."""
        self._end.reading = None
        runtime, completion = self.runtime, self.state.completion
        now = runtime.now()
        request = self.state.request = core_request(
            self.state, prompt, self.model, now, both_on_arrival=self._both_on_arrival
        )
        self.legs.ids = prompt.ids if request.copyable and runtime.reading.keeps_ids else None
        runtime.metrics.prompt_read(prompt.input_tokens)
        runtime.budget.request(now)
        if runtime.expected_transfers.due_at <= now:
            runtime.expected_transfers.report_due(now)
        if runtime.placement is None:
            self.legs.carry_out(
                runtime.report.arrived(request, now, self._only, both_on_arrival=self._both_on_arrival), now
            )
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
        decisions = runtime.report.arrived(
            request, now, self._only, both_on_arrival=self._both_on_arrival, ttft_max_s=ttft_max_s
        )
        last = decisions[-1] if decisions else None
        if type(last) is Reject and last.ttft_s is not None:
            return last
        self.account.arrived_at = now
        first = decisions[0] if decisions else None
        self.account.predicted_s = first.ttft_s if isinstance(first, Prefill | Decode) else None
        if self.account.charge is not None:
            state.response_headers = runtime.tenancy.headers(self.account.charge.key, now)
        self.legs.carry_out(decisions, now)
        return None

    def reject(self, refusal: Refusal) -> None:
        """See `Placeable`."""
        runtime, now = self.runtime, self.runtime.now()
        runtime.state.rejected(now)
        self.state.response_headers = refusal.headers
        self._end.refused(refusal.status, refusal.body, now, refusal.reason, refusal.retry_after_s)

    # Reports of legs

    def on_prefill_done(self, engine: EngineClient, now: float) -> None:
        """See `PrefillOwner`."""
        runtime, state, decode = self.runtime, self.state, self.legs.decode
        request = state.request
        assert request is not None
        self.legs.ids = None
        if self.legs.prefill is not None and self.legs.prefill.copy is not None:
            self.legs.prefill.copy.computed(None, now)
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
        read = self.legs.prefill.storage_read if self.legs.prefill is not None else None
        kept_tokens = read.kept_tokens if read is not None else 0
        self.legs.carry_out(runtime.report.prefill_finished(state.number, now, kept_tokens), now)
        if decode is not None and waits:
            self.legs.begin_decode(decode, now)
        if runtime.placement is not None:
            runtime.placement.place_ready(now)

    def on_no_transfer_params(self, leg: PrefillLeg) -> None:
        """See `PrefillOwner`. If the output did not end by its length, the next request may be served by two
        instances."""
        state, kind = self.state, self.state.completion.kind
        state.aggregated = True
        if leg.storage_read is not None:
            leg.storage_read.release_kept()
        if ended_by_length(leg.body()):
            self.runtime.reading.unsplit.add(self.model, kind, self.runtime.now())
        request_id, why = state.request_id.decode("latin-1"), "its response has no kv_transfer_params"
        log_event("warning", "not_split", request_id=request_id, instance=leg.engine.name, endpoint=kind, reason=why)

    def on_transfer_done(self, leg: DecodeLeg, times: TransferTimes, now: float) -> None:
        """See `DecodeOwner`."""
        runtime, state, decision = self.runtime, self.state, leg.decision
        number, request, report = state.number, state.request, runtime.report
        assert request is not None
        if self.legs.prefill is not None and self.legs.prefill.storage_read is not None:
            self.legs.prefill.storage_read.loaded(decision.target)
        if times.measured_s is not None and decision.source in runtime.engines:
            runtime.reports.transfer_observed(decision, times.measured_s, now)
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
            self._end.client_gone(now)  # its first token has arrived
        elif self._end.limit is not None:
            self._end.limit.end_after(SETTLE_S)

    def on_first_token(self, leg: DecodeLeg, ttft: TtftBreakdown, decode_s: float, now: float) -> None:
        """See `DecodeOwner`."""
        state = self.state
        if len(state.exchange.body) > LIGHT_BYTES:
            self.release_body()
        trace_id = state.trace.trace_id if state.trace is not None else ""
        exemplar = ("trace_id", trace_id) if trace_id else ("request_id", str(state.number))
        self._end.first_token(ttft, now, retried=self._failures is not None and self._failures.retried)
        self.runtime.metrics.decode_answered(decode_s)
        self.runtime.reports.first_token(leg.decision, ttft, now, exemplar)

    def release_body(self) -> None:
        """See `DecodeOwner`."""
        self.legs.release_body()

    def on_response_end(self, leg: DecodeLeg, usage: TokenUsage | None, now: float) -> None:
        """See `DecodeOwner`."""
        self._end.answered(leg, usage, now)

    def on_served_elsewhere(self, instance: str, now: float) -> Decode | None:
        """See `DecodeOwner`."""
        for decision in self.runtime.report.served(self.state.number, instance, now):
            if type(decision) is Decode:
                self.runtime.state.decided(decision, now)
                return decision
        return None

    def on_leg_failed(self, leg: Leg, failure: LegFailure, now: float) -> None:
        """See `LegOwner`."""
        self._follow(leg.kind, leg, failure, now)

    def _follow(self, step: Step, leg: Leg, failure: LegFailure, now: float) -> None:
        if self._failures is None:
            self._failures = RequestFailures(self.state, self.legs, self._end)
        self._failures.follow(step, leg, failure, now)

    def _client_gone(self) -> None:
        ClientDeparture(self.state, self.legs, self._end).client_gone()

    def on_reject(self, reject: Reject, now: float) -> None:
        """See `LegsOwner`."""
        runtime = self.runtime
        runtime.metrics.rejected("no_instance")
        runtime.state.rejected(now)
        runtime.state.decided(reject, now)
        self._end.refused(503, error_body(reject.reason, UNAVAILABLE), now, reject.reason)

    def on_unsendable(self, why: str, now: float) -> None:
        """See `LegsOwner`."""
        self._end.refused(502, error_body(why, UPSTREAM), now, why)

    def on_nothing_to_fetch(self, now: float) -> None:
        """See `LegsOwner`."""
        self._end.client_gone(now)

    def internal_error(self, error: Exception) -> None:
        """Handle a bug in the gateway: respond with an error, and release what the request holds."""
        self._end.internal_error(error)

    # See `RequestInProgress`

    def stop(self) -> None:
        """See `RequestInProgress`."""
        if self.state.over:
            return
        try:
            why = "the gateway is shutting down"
            self._end.refused(503, error_body(why, UNAVAILABLE), self.runtime.now(), why)
        except Exception as error:
            self.internal_error(error)

    def uses(self, name: str) -> bool:
        """See `RequestInProgress`."""
        return self.legs.use(name)

    def transfers(self, source: str, target: str) -> bool:
        """See `RequestInProgress`."""
        return self.legs.transfer(source, target)

    def on_process_ended(self, name: str) -> None:
        """See `RequestInProgress`."""
        decode = None if self.state.over else self.legs.waiting_for_write_of(name)
        if decode is None:
            return
        why = f"prefill instance {name} ended before it had written the KV cache"
        failure = LegFailure("process_ended", why, 502, sent=True)
        try:
            self._follow("write", decode, failure, self.runtime.now())
        except Exception as error:
            self.internal_error(error)
