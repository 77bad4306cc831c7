"""One completion request: its legs, their failures and its end. It uses callbacks and no task per request.

The request reports each step to the control core once and in order, whatever engines and clients do. It releases what
it holds (slots, in-flight counts, connections) on every code path.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

from kvroute.gateway.engines.fault_attribution import FaultAttribution
from kvroute.gateway.http.headers import forwarded, header_lines
from kvroute.gateway.http.request_parser import LIGHT_BYTES
from kvroute.gateway.openai_api.json_fields import RequestError
from kvroute.gateway.openai_api.prompt_queue import QueueFull
from kvroute.gateway.openai_api.requests import Completion, without_body, without_prompts
from kvroute.gateway.openai_api.responses import error_body
from kvroute.gateway.proxy.decode_leg import DecodeLeg
from kvroute.gateway.proxy.prefill_leg import PrefillLeg
from kvroute.gateway.proxy.retry import (
    UNAVAILABLE,
    UPSTREAM,
    DecodeWithoutPrefill,
    EndStream,
    Fail,
    Ignore,
    LegFailure,
    PrefillWithoutCopy,
    Retry,
    decide,
)
from kvroute.types import (
    Arrived,
    Decision,
    Decode,
    DecodeFailed,
    Finished,
    KvStored,
    Prefill,
    PrefillFailed,
    PrefillFinished,
    Reject,
    Request,
)

if TYPE_CHECKING:
    from kvroute.gateway.engines.client import EngineClient
    from kvroute.gateway.http.exchange import Exchange
    from kvroute.gateway.observe.tracing import RequestTrace
    from kvroute.gateway.observe.view import Ttft
    from kvroute.gateway.openai_api.prompt import Prompt
    from kvroute.gateway.proxy.leg import Leg
    from kvroute.gateway.proxy.prefix_copy_leg import PrefixCopyLeg
    from kvroute.gateway.proxy.runtime import ClusterRuntime
    from kvroute.gateway.wan.paths import PathAttempt

OURS = "server_error"
_GONE = 499


class ProxiedRequest:
    """One proxied request, from its admission to the end of its response.

    Every method runs on the event loop and returns at once. Methods that are called from outside raise no exception: a
    bug in the gateway ends the request (`internal_error`). Flags mirror what has been reported to the core: `arrived`
    and `computed` here, the state of the transfer in the decode leg.
    """

    __slots__ = (
        "_attempts",
        "_ids",
        "_reading",
        "arrived",
        "completion",
        "computed",
        "decode",
        "exchange",
        "faults",
        "head",
        "model",
        "number",
        "over",
        "path_attempt",
        "prefill",
        "received_at",
        "request",
        "request_id",
        "runtime",
        "ticket",
        "trace",
    )
    head: bytes
    """Header lines that engines receive."""

    def __init__(
        self, runtime: ClusterRuntime, exchange: Exchange, completion: Completion, request_id: bytes, received_at: float
    ) -> None:
        self.runtime, self.exchange, self.completion, self.request_id = runtime, exchange, completion, request_id
        self.number = runtime.next_number()
        self.ticket = 0
        """Ticket of its admission."""
        self.received_at = received_at
        self.model = ""
        self.request: Request | None = None
        self.prefill: PrefillLeg | None = None
        """The leg that computes the KV cache, or has computed it."""
        self.decode: DecodeLeg | None = None
        self.path_attempt: PathAttempt | None = None
        """Its attempt to transfer the KV cache from another datacenter over a WAN path; None: there is none."""
        self.trace: RequestTrace | None = None
        self._reading: asyncio.Task[None] | None = None
        """Task that hashes a large prompt in a thread."""
        self.faults: FaultAttribution | None = None
        """Attributes failed attempts to engines or to the request; None: no attempt has failed."""
        self._ids: list[int] | None = None
        """The prompt's tokens, if its prefix may be copied from another instance."""
        self._attempts = 1
        self.over = self.arrived = self.computed = False

    def fault_attribution(self) -> FaultAttribution:
        """Return `faults`; create it at the first failure."""
        if self.faults is None:
            self.faults = FaultAttribution()
        return self.faults

    # Arrival

    def begin(self) -> None:
        """Hash the prompt and request a decision; large prompts are hashed in a thread."""
        runtime, exchange, completion = self.runtime, self.exchange, self.completion
        try:
            exchange.on_gone = self._client_gone
            self.trace = runtime.tracer.request(exchange.headers, completion.kind)
            self.head = (
                header_lines(forwarded(exchange.headers, self.request_id, runtime.forward_headers)) + runtime.added
            )
            self.model = runtime.model_of(completion.model)
            prompt = runtime.prompts.blocks_now(completion)
            if prompt is None:
                self._reading = runtime.spawn(self._begin_later())
            else:
                self._arrive(prompt)
        except RequestError as refused:
            self._answer_error(refused.status, refused.body(), runtime.now(), refused.message)
        except Exception as error:
            self.internal_error(error)

    async def _begin_later(self) -> None:
        runtime = self.runtime
        try:
            prompt = await runtime.prompts.blocks(self.completion)
            self._reading = None
            if not self.over:
                self.completion = without_prompts(self.completion)
                self._arrive(prompt)
        except RequestError as refused:
            self._reading = None
            self._answer_error(refused.status, refused.body(), runtime.now(), refused.message)
        except QueueFull as full:
            self._reading = None
            runtime.metrics.rejected("prompt_queue")
            runtime.state.rejected(runtime.now())
            body = error_body(str(full), UNAVAILABLE)
            self._answer_error(503, body, runtime.now(), str(full), full.retry_after_s)
        except Exception as error:
            self.internal_error(error)

    def _arrive(self, prompt: Prompt) -> None:
        runtime, completion = self.runtime, self.completion
        now = runtime.now()
        max_tokens, reserve = completion.max_tokens, runtime.reserve_output_tokens
        if max_tokens > reserve or (not max_tokens and completion.kind == "chat"):
            max_tokens = reserve  # a chat without a limit may use the whole context
        request = self.request = Request(
            id=self.number,
            input_tokens=prompt.input_tokens,
            blocks=prompt.blocks,
            block_tokens=prompt.block_tokens,
            max_output_tokens=max_tokens,
            model=self.model,
            one_leg=completion.one_leg and runtime.single_instance_only(completion),
            copyable=prompt.ids is not None,
        )
        self._ids = prompt.ids if runtime.copy_s else None
        runtime.metrics.prompt_read(prompt.input_tokens)
        runtime.budget.request(now)
        if runtime.expected_transfers.due_at <= now:
            runtime.expected_transfers.look(now)
        self.arrived = True
        self.apply(runtime.decide(Arrived(now, request)), now)

    def apply(self, decisions: tuple[Decision, ...], now: float) -> None:
        """Carry out the decisions of the core."""
        if not decisions:
            return
        first, last = decisions[0], decisions[-1]
        if type(first) is Prefill and (first is last or (type(last) is Decode and last.source != last.target)):
            # If sending fails at once, the retry has already started or the request is over.
            if self._send_prefill(first, now, early=first is not last) and type(last) is Decode:
                self._send_answer(last, now)
        elif type(last) is Decode:
            self._send_answer(last, now)
        elif type(last) is Reject:
            self.arrived = False
            self._reject(last, now)

    def _send_prefill(self, decision: Prefill, now: float, *, early: bool) -> bool:
        runtime = self.runtime
        self.computed = False
        runtime.state.decided(decision, now)
        self._depart(decision, now)
        leg = self.prefill = PrefillLeg(self, decision, now, early=early)
        return leg.begin(now)

    def take_token_ids(self) -> list[int] | None:
        """Return the prompt's tokens on the first call and None later: if an attempt with a prefix copy fails, the
        retry uses no copy."""
        ids, self._ids = self._ids, None
        return ids

    def due_transfer(self, at: float) -> DecodeLeg | PrefixCopyLeg | None:
        """Return the leg whose transfer is expected to end at this time; None if there is none any more."""
        copy = self.prefill.copy if self.prefill is not None else None
        return next((leg for leg in (self.decode, copy) if leg is not None and leg.transfer_due_at == at), None)

    def _depart(self, decision: Prefill, now: float) -> None:
        """Begin a new path attempt if the prefill is in another datacenter; an unfinished attempt does not count."""
        if self.path_attempt is not None:
            self.path_attempt.cancelled(now)
        wan_paths, counted = self.runtime.wan_paths, self.faults is None
        self.path_attempt = wan_paths.start_attempt(decision, now, counted=counted) if wan_paths is not None else None

    def _send_answer(self, decision: Decode, now: float) -> None:
        self.runtime.state.decided(decision, now)
        leg = self.decode = DecodeLeg(self, decision, now)
        if leg.aggregated:
            self.computed, self.prefill = False, None
        leg.begin(now)

    # Called by legs

    def on_prefill_done(self, engine: EngineClient, now: float) -> None:
        """Record that the KV cache is complete on `engine`, and report it to the core."""
        runtime, request, answer = self.runtime, self.request, self.decode
        assert request is not None
        self.computed, self._ids = True, None
        if self.prefill is not None and self.prefill.copy is not None:
            self.prefill.copy.computed(None, now)
        if self.faults is not None:
            self.faults.answered("prefill", now)
        if engine.approximate and request.blocks:
            runtime.notify(KvStored(now, engine.name, request.blocks, request.block_tokens))
        if runtime.expected_transfers.due_at <= now:
            runtime.expected_transfers.look(now)
        if answer is not None and not answer.aggregated:
            answer.transfer_started(now)
            answer.expect_transfer(now)
        self.apply(runtime.decide(PrefillFinished(now, self.number)), now)

    def on_prefill_lost(self, now: float) -> None:
        """Handle a prefill that has failed without a retry while the decode engine waits for its KV cache: the decode
        engine may compute the prompt itself; otherwise it reports an error."""
        self.computed = True
        if self.path_attempt is not None:
            self.path_attempt.cancelled(now)
        if self.decode is not None:
            self.decode.end_transfer(now, False)
        self.apply(self.runtime.decide(PrefillFinished(now, self.number)), now)

    def on_leg_failed(self, leg: Leg, failure: LegFailure, now: float) -> None:
        """Carry out what follows from the failure of a leg, which has ended and reported it already."""
        match decide(leg.kind, failure, leg.progress()):
            case Ignore():
                pass
            case PrefillWithoutCopy():
                assert self.prefill is not None
                assert self.prefill.copy is not None
                self.prefill.copy.continue_without(now)
            case DecodeWithoutPrefill():
                self.prefill = None
                self.on_prefill_lost(now)
            case EndStream():
                self._end_stream(failure, now)
            case Retry(leg="prefill"):
                self.prefill = None
                self.drop_decode(now)
                self._retry("prefill", PrefillFailed(now, self.number), failure, now)
            case Retry(kv_lost=kv_lost, abort_prefill=abort_prefill):
                self._leave_decode(now, abort_prefill=abort_prefill)
                self._retry("decode", DecodeFailed(now, self.number, kv_lost=kv_lost), failure, now)
            case Fail(error_kind=error_kind):
                self.fail(failure.status, failure.reason, now, error_kind)

    def _leave_decode(self, now: float, *, abort_prefill: bool) -> None:
        leg, self.decode = self.decode, None
        assert leg is not None
        if abort_prefill and self.prefill is not None:
            self.prefill.abort(now)
        leg.end_transfer(now, False)

    def _retry(
        self, leg: Literal["prefill", "decode"], event: PrefillFailed | DecodeFailed, failure: LegFailure, now: float
    ) -> None:
        if self._may_retry(leg, now):
            self.apply(self.runtime.decide(event), now)
        else:
            self.fail(failure.status, failure.reason, now)

    def _end_stream(self, failure: LegFailure, now: float) -> None:
        leg, runtime = self.decode, self.runtime
        assert leg is not None
        runtime.metrics.stream_failed()
        runtime.state.stream_failed(now)
        leg.abort_stream(failure.reason)
        self.drop_legs(now)
        self.end(200, now, leg.events, relayed_bytes=leg.size, error=failure.reason)

    def first_token(self, leg: DecodeLeg, ttft: Ttft, decode_s: float, now: float) -> None:
        """Record the first event of a stream."""
        if len(self.exchange.body) > LIGHT_BYTES:
            self._release_body()
        trace_id = self.trace.trace_id if self.trace is not None else ""
        exemplar = ("trace_id", trace_id) if trace_id else ("request_id", str(self.number))
        self.runtime.metrics.decode_answered(decode_s)
        self.runtime.first_token(leg.decision, ttft, now, exemplar)

    def _release_body(self) -> None:
        """Release the request's body and its copies: the response has begun, so nothing is sent again."""
        self.completion = without_body(self.completion)
        for leg in (self.prefill, self.decode):
            if leg is not None and leg.call is not None:
                leg.call.forget_request()
        self.exchange.release_body()

    def _may_retry(self, leg: Literal["prefill", "decode"], now: float) -> bool:
        """Return whether a failed leg may be retried; if so, count the retry as made."""
        runtime = self.runtime
        if self._attempts >= runtime.settings.retries.attempts:
            return False
        if not runtime.budget.spend(now):
            runtime.metrics.retry_refused(leg)
            return False
        self._attempts += 1
        runtime.metrics.retried(leg)
        return True

    # End

    def _reject(self, reject: Reject, now: float) -> None:
        runtime = self.runtime
        runtime.metrics.rejected("no_instance")
        runtime.state.rejected(now)
        runtime.state.decided(reject, now)
        self.fail(503, reject.reason, now, UNAVAILABLE)

    def fail(self, status: int, why: str, now: float, kind: str = UPSTREAM) -> None:
        """Respond with an error and end the request."""
        self._answer_error(status, error_body(why, kind), now, why)

    def _answer_error(self, status: int, body: bytes, now: float, why: str, retry_after_s: int = 1) -> None:
        self.drop_legs(now)
        exchange = self.exchange
        if exchange.started:
            exchange.abort()
        else:
            headers = [(b"x-request-id", self.request_id)]
            if status == 503:
                headers.append((b"retry-after", b"%d" % retry_after_s))
            exchange.respond(status, body, b"application/json", headers)
        self.end(status, now, error=why)

    def _client_gone(self) -> None:
        if self.over:
            return
        try:
            now = self.runtime.now()
            self.runtime.metrics.client_gone()
            self.drop_legs(now)
            self.end(_GONE, now, error="the client closed the connection")
        except Exception as error:
            self.internal_error(error)

    def stop(self) -> None:
        """Abort the request, because the gateway shuts down."""
        if self.over:
            return
        try:
            self.fail(503, "the gateway is shutting down", self.runtime.now(), UNAVAILABLE)
        except Exception as error:
            self.internal_error(error)

    def internal_error(self, error: Exception) -> None:
        """Handle a bug in the gateway: respond with an error, and release what the request holds."""
        asyncio.get_running_loop().call_exception_handler(
            {"message": "a proxied request failed with an internal error", "exception": error}
        )
        why, exchange, answer = "internal error in the gateway", self.exchange, self.decode
        now = self.runtime.now()
        with suppress(Exception):
            self.drop_prefill(now)
        with suppress(Exception):
            self.drop_decode(now)
        with suppress(Exception):
            if not exchange.started:
                exchange.respond(500, error_body(why, OURS), headers=[(b"x-request-id", self.request_id)])
            elif answer is not None and not exchange.finished:
                answer.abort_stream(why, OURS)
        if not self.over:
            with suppress(Exception):
                self.end(500, now, error=why)

    def drop_legs(self, now: float) -> None:
        """Abort both legs."""
        self.drop_prefill(now)
        self.drop_decode(now)

    def drop_prefill(self, now: float) -> None:
        """Abort the prefill leg."""
        leg, self.prefill = self.prefill, None
        if leg is not None:
            leg.abort(now)

    def drop_decode(self, now: float) -> None:
        """Abort the decode leg."""
        leg, self.decode = self.decode, None
        if leg is not None:
            leg.abort(now)

    def end(
        self, status: int, now: float, output_tokens: int | None = None, *, relayed_bytes: int = 0, error: str = ""
    ) -> None:
        """End the request and report it; the legs must be closed already."""
        assert not self.over
        self.over = True
        self.prefill = self.decode = None
        if self._reading is not None:
            self._reading.cancel()  # so that a prompt in the queue is released at once
            self._reading = None
        runtime = self.runtime
        try:
            if self.faults is not None:
                self.faults.ended(status, now)
            if self.path_attempt is not None:
                self.path_attempt.cancelled(now)
            if self.arrived:
                runtime.notify(Finished(now, self.number, output_tokens=output_tokens))
            if self.trace is not None:
                self.trace.end(status, error)
        finally:
            runtime.ended(self, self.completion.kind, status, now, relayed_bytes)
