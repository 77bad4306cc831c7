"""One completion on its way: two legs, their failures and their end; callbacks only, so that a request costs no task.

The journey tells the control core each step once and in order, whatever engines and clients do, and gives back all
that it holds on every path: slots, in-flight counts, connections.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvroute.gateway.answers import error_body, error_event
from kvroute.gateway.dialects import DialectError, Meeting, forwarded
from kvroute.gateway.legs import AnswerLeg, Leg, PrefillLeg
from kvroute.gateway.openai import Completion
from kvroute.gateway.view import Ttft
from kvroute.types import (
    Admitted,
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
    TransferFinished,
    TransferMeasured,
)

if TYPE_CHECKING:
    from kvroute.gateway.exchange import Exchange, Headers
    from kvroute.gateway.prompt import Prompt
    from kvroute.gateway.serving import Serving
    from kvroute.gateway.station import Station

UPSTREAM, UNAVAILABLE = "upstream_error", "service_unavailable"
_MEASURABLE_BYTES = 1 << 20
"""Smaller transfers say more about latency and scheduling than about bandwidth."""
_CONTEXT = (b"traceparent", b"tracestate")
_GONE = 499


class Journey:
    """From the admitted request to its answer. Every method runs on the event loop and returns at once.

    What the core knows of the request is mirrored in four flags: it has `_arrived`, its prefill is `_computed`, its
    transfer `_crossing`, it is `_admitted` to a decode batch.
    """

    __slots__ = (
        "_admitted",
        "_answer",
        "_arrived",
        "_attempts",
        "_completion",
        "_computed",
        "_crossing",
        "_decode",
        "_decode_at",
        "_exchange",
        "_headers",
        "_landing",
        "_meeting",
        "_over",
        "_prefill",
        "_prefill_at",
        "_received_at",
        "_reply",
        "_request",
        "_request_id",
        "_serving",
        "_trace",
        "number",
        "ticket",
    )

    def __init__(
        self, serving: Serving, exchange: Exchange, completion: Completion, request_id: bytes, received_at: float
    ) -> None:
        self._serving, self._exchange, self._completion, self._request_id = serving, exchange, completion, request_id
        self.number = serving.next_number()
        self.ticket = 0
        """Of its admission."""
        self._received_at = received_at
        self._prefill_at = self._decode_at = received_at
        self._request: Request | None = None
        self._prefill: PrefillLeg | None = None
        self._answer: AnswerLeg | None = None
        self._decode: Decode | None = None
        self._meeting: Meeting | None = None
        self._reply: bytes | None = None
        self._landing: asyncio.TimerHandle | None = None
        self._attempts = 1
        self._over = self._arrived = self._computed = self._crossing = self._admitted = False
        self._trace = serving.tracer.request(exchange.headers, completion.kind)
        base = serving.engine_headers(forwarded(exchange.headers, request_id))
        self._headers: Headers = [header for header in base if header[0] not in _CONTEXT]

    # The way in

    def begin(self) -> None:
        """Hash the prompt and ask where to go; large prompts are hashed beside the loop."""
        self._exchange.on_gone = self._client_gone
        prompt = self._serving.prompts.blocks_now(self._completion)
        if prompt is None:
            self._serving.spawn(self._begin_later())
        else:
            self._arrive(prompt)

    async def _begin_later(self) -> None:
        try:
            prompt = await self._serving.prompts.blocks(self._completion)
        except Exception as error:
            if not self._over:
                self._fail(500, f"the prompt cannot be read ({error})", "internal_error")
            return
        if not self._over:
            self._arrive(prompt)

    def _arrive(self, prompt: Prompt) -> None:
        serving, completion = self._serving, self._completion
        now = serving.now()
        self._request = Request(
            id=self.number,
            input_tokens=prompt.input_tokens,
            blocks=prompt.blocks,
            block_tokens=prompt.block_tokens,
            max_output_tokens=min(completion.max_tokens, serving.reserve_output_tokens),
            model=serving.model_of(completion.model),
            one_leg=serving.must_stay(completion),
        )
        serving.metrics.prompt_read(prompt.input_tokens)
        serving.budget.request(now)
        self._arrived = True
        self._act(serving.decide(Arrived(now, self._request)))

    def _act(self, decisions: tuple[Decision, ...]) -> None:
        """Carry out what the core has decided."""
        match decisions:
            case (Reject() as reject,):
                self._arrived = False
                self._reject(reject)
            case (Prefill() as prefill,):
                self._send_prefill(prefill)
            case (Prefill() as prefill, Decode() as decode) if decode.source != decode.target:
                # Where sending fails at once, what comes instead is under way already, or the request is over.
                if self._send_prefill(prefill):
                    self._send_answer(decode)
            case (*_, Decode() as decode):
                self._send_answer(decode)

    def _reject(self, reject: Reject) -> None:
        serving = self._serving
        serving.metrics.rejected("no_instance")
        serving.state.rejected(serving.now())
        serving.state.decided(reject, serving.now())
        self._fail(503, reject.reason, UNAVAILABLE)

    # The prefill leg

    def _send_prefill(self, decision: Prefill) -> bool:
        """Send the leg, now or once it is known where to meet; False where it has failed already."""
        serving = self._serving
        station = serving.stations[decision.instance]
        self._computed, self._reply = False, None
        self._prefill_at = serving.now()
        serving.state.decided(decision, self._prefill_at)
        leg = self._prefill = PrefillLeg(self, station, serving.answer_bytes_max)
        self._meeting = station.meeting(serving.draw())
        if self._meeting is None:
            station.meet(lambda: self._met(leg))
            return True
        return self._send_met(leg, self._meeting)

    def _met(self, leg: PrefillLeg) -> None:
        """The bootstrap server has answered, or not."""
        if self._prefill is not leg or self._over:
            return
        self._meeting = leg.station.meeting(self._serving.draw())
        if self._meeting is None:
            leg.attempt = leg.station.guard.started(self._serving.now())
            why = f"the bootstrap server of prefill instance {leg.station.name} does not answer"
            self.prefill_failed(leg, "refused", why, 502)
        else:
            self._send_met(leg, self._meeting)

    def _send_met(self, leg: PrefillLeg, meeting: Meeting) -> bool:
        try:
            body = leg.station.dialect.prefill_body(self._completion, meeting)
        except DialectError as error:
            leg.attempt = leg.station.guard.started(self._serving.now())
            self.prefill_failed(leg, "malformed", f"prefill instance {leg.station.name} {error}", 502)
            return False
        self._send(leg, body)
        return True

    def _send(self, leg: PrefillLeg | AnswerLeg, body: bytes) -> None:
        timeouts = self._serving.settings.timeouts
        trace = leg.trace = self._trace.leg(leg.kind, {"kvroute.instance": leg.station.name})
        headers = self._headers + trace.headers if trace.headers else self._headers
        first_byte_s = timeouts.prefill_s if leg.kind == "prefill" else timeouts.first_token_s
        leg.station.send(self._exchange.path, headers, body, leg, first_byte_s=first_byte_s)

    def prefill_answered(self, leg: PrefillLeg) -> None:
        """The whole answer of the prefill leg is here."""
        if leg.status >= 400:
            self._refused(leg)
            return
        serving, station = self._serving, leg.station
        reply = None if station.dialect.joint else leg.body()
        if reply is not None:
            try:
                station.dialect.check(reply)
            except DialectError as error:
                self.prefill_failed(leg, "malformed", f"prefill instance {station.name} {error}", 502)
                return
        leg.succeeded(serving.now())
        leg.close()
        self._prefill = None
        if self._computed or self._over:
            return  # the decode leg's first token was faster
        self._reply = reply
        self._compute(station)
        if station.dialect.joint and not self._over:
            self._expect_landing()

    def _compute(self, station: Station) -> None:
        """The KV cache is complete on `station`."""
        serving, request, now = self._serving, self._request, self._serving.now()
        assert request is not None
        serving.metrics.prefill_answered(now - self._prefill_at)
        self._computed = True
        if station.approximate and request.blocks:
            serving.tell(KvStored(now, station.name, request.blocks, request.block_tokens))
        decode = self._decode
        if decode is not None and decode.source != decode.target:
            self._start_crossing(decode, now)
        self._act(serving.decide(PrefillFinished(now, self.number)))

    def prefill_failed(self, leg: PrefillLeg, kind: str, why: str, status: int) -> None:
        """The prefill leg came to nothing: another instance, if the budget allows."""
        self._lost(leg, kind, why)
        leg.station.forget()
        self._prefill = None
        if self._computed or self._over:
            return  # nobody needs it any more
        self._drop_answer()
        self._decode = None
        if self._may_retry("prefill"):
            self._act(self._serving.decide(PrefillFailed(self._serving.now(), self.number)))
        else:
            self._fail(status, why, UPSTREAM)

    # The decode leg

    def _send_answer(self, decision: Decode) -> None:
        serving, station, completion = self._serving, self._serving.stations[decision.target], self._completion
        now = self._decode_at = serving.now()
        self._decode = decision
        serving.state.decided(decision, now)
        leg = self._answer = AnswerLeg(self, station, serving.answer_bytes_max, streams=completion.stream)
        if decision.source == decision.target:
            self._prefill_at, self._computed = now, False
            body = station.dialect.alone_body(completion)
        else:
            if self._computed:
                self._start_crossing(decision, now)
            assert self._meeting is not None
            try:
                body = station.dialect.decode_body(completion, self._meeting, self._reply)
            except DialectError as error:
                self._stop_crossing(now, None)
                self._fail(502, f"prefill instance {decision.source} {error}", UPSTREAM)
                return
        self._send(leg, body)
        if self._computed or decision.source == decision.target:
            self._expect_landing()

    def first_token(self, leg: AnswerLeg) -> None:
        """The first bytes of the answer: the transfer is over and the request decodes."""
        serving, decision, now = self._serving, self._decode, self._serving.now()
        assert decision is not None
        leg.succeeded(now)
        if leg.streams:
            self._measure(leg, decision, now)
        self._land()
        step_s, _ = serving.steps_s(decision)
        decode_s = now - self._decode_at
        first_step_s = min(step_s, decode_s)
        alone = decision.source == decision.target
        queue_s = self._prefill_at - self._received_at
        prefill_s = max(0.0, self._decode_at - self._prefill_at)
        transfer_s = 0.0 if alone else decode_s - first_step_s
        ttft = Ttft(queue_s, decode_s - first_step_s if alone else prefill_s, transfer_s, first_step_s)
        exemplar = ("trace_id", self._trace.trace_id) if self._trace.trace_id else ("request_id", str(self.number))
        serving.metrics.decode_answered(decode_s)
        serving.first_token(decision, ttft, now, exemplar)

    def _expect_landing(self) -> None:
        """Where the answer comes whole, nothing but time tells when the KV cache has landed: never before it is
        computed, lest a decode engine wait for what has failed."""
        if not self._completion.stream and self._decode is not None:
            self._landing = self._serving.call_later(self._serving.expected_landing_s(self._decode), self._land)

    def _land(self) -> None:
        """Tell the core that transfer and wait are over: seen in a stream, expected where the answer comes whole."""
        self._cancel_landing()
        decision, request, serving = self._decode, self._request, self._serving
        if self._over or self._admitted or decision is None:
            return
        assert request is not None
        now, target = serving.now(), serving.stations[decision.target]
        if not self._computed and not request.one_leg:
            self._compute(serving.stations[decision.source])
        self._stop_crossing(now, now - self._decode_at)
        serving.tell(Admitted(now, self.number))
        self._admitted = True
        if target.approximate and request.blocks and (request.one_leg or decision.source != decision.target):
            serving.tell(KvStored(now, target.name, request.blocks, request.block_tokens))

    def _start_crossing(self, decision: Decode, now: float) -> None:
        self._crossing = True
        self._serving.transfer_started(decision, now)

    def _stop_crossing(self, now: float, seconds: float | None) -> None:
        """The transfer has landed or (`seconds` None) come to nothing; the core is told of the first alone, for the
        second comes with the failure or the end of the request."""
        if self._crossing and self._decode is not None:
            self._crossing = False
            self._serving.transfer_ended(self._decode, now, seconds)
            if seconds is not None:
                self._serving.tell(TransferFinished(now, self.number))

    def _measure(self, leg: AnswerLeg, decision: Decode, now: float) -> None:
        """What the transfer took, where nobody else measures it and no queue stood in its way."""
        if not leg.station.measures or not self._crossing or decision.kv_bytes < _MEASURABLE_BYTES:
            return
        step_s, queue_s = self._serving.steps_s(decision)
        seconds = now - self._decode_at - step_s
        if queue_s == 0.0 and seconds > 0.0 and not leg.station.dialect.joint:
            self._serving.tell(TransferMeasured(now, decision.source, decision.target, decision.kv_bytes, seconds))

    def answer_data(self, leg: AnswerLeg, data: bytes) -> None:
        """Relay a piece of a streamed answer."""
        exchange = self._exchange
        if not exchange.started:
            exchange.on_pause, exchange.on_resume = leg.pause, leg.resume
            exchange.start(leg.status, self._serving.answer_headers(leg.headers, self._request_id), None)
        exchange.write(data)

    def answered(self, leg: AnswerLeg) -> None:
        """The answer is complete."""
        if leg.status >= 400 and not self._exchange.started:
            self._refused(leg)
            return
        if leg.streams and not self._exchange.started:
            why = f"decode instance {leg.station.name} ended the stream before its first token"
            self.answer_failed(leg, "malformed", why, 502, sent=True)
            return
        if leg.streams:
            self._exchange.end()
        else:
            self.first_token(leg)
            headers = _without_type(self._serving.answer_headers(leg.headers, self._request_id))
            self._exchange.respond(leg.status, leg.body(), leg.content_type(), headers)
        leg.close()
        self._answer = None
        self._end(leg.status, leg.output_tokens(), relayed_bytes=leg.size)

    def answer_failed(self, leg: AnswerLeg, kind: str, why: str, status: int, *, sent: bool) -> None:
        """The decode leg came to nothing: before the first token it is tried again, after it the stream says so.

        Args:
            kind: one word for the metrics.
            why: one sentence for the client.
            status: for the client, if this is the end.
            sent: the engine may have fetched the KV cache, which is then gone from its source.
        """
        self._lost(leg, kind, why)
        if sent and self._decode is not None:
            self._serving.stations[self._decode.source].forget()
        self._answer = None
        if self._exchange.started:
            self._drop_prefill()
            self._serving.metrics.stream_failed()
            self._exchange.write(error_event(why, UPSTREAM))
            self._exchange.end()
            self._end(200, leg.output_tokens(), relayed_bytes=leg.size, error=why)
            return
        self._cancel_landing()
        self._drop_prefill()
        now = self._serving.now()
        if not self._may_retry("decode"):
            self._fail(status, why, UPSTREAM)
            return
        if self._crossing and self._decode is not None:
            self._crossing = False
            self._serving.transfer_ended(self._decode, now, None)
        self._decode, self._admitted = None, False
        kept = kind == "reset" and self._computed and leg.station.dialect.refetches(self._reply)
        self._act(self._serving.decide(DecodeFailed(now, self.number, kv_lost=sent and not kept)))

    # The ways out

    def _refused(self, leg: PrefillLeg | AnswerLeg) -> None:
        """An engine's own error: the client's fault is the client's to read, anything else is a failure."""
        status = leg.status
        if status < 500 and status != 429:
            leg.succeeded(self._serving.now())
            leg.close()
            if leg is self._prefill and (self._computed or self._over):
                self._prefill = None  # the decode leg's first token was faster
                return
            self._drop_legs()
            headers = _without_type(self._serving.answer_headers(leg.headers, self._request_id))
            self._exchange.respond(status, leg.body(), leg.content_type(), headers)
            self._end(status, None)
            return
        why = f"{leg.kind} instance {leg.station.name} answered {status}"
        full = status in (429, 503)
        if isinstance(leg, PrefillLeg):
            self.prefill_failed(leg, "status", why, 503 if full else 502)
        else:
            # An engine that is full or starting up has not touched the KV cache.
            self.answer_failed(leg, "status", why, 503 if full else 502, sent=not full)

    def _lost(self, leg: Leg, kind: str, why: str) -> None:
        leg.close(why)
        leg.failed(self._serving.now())
        self._serving.leg_failed(leg, kind, why, self._request_id)

    def _may_retry(self, leg: str) -> bool:
        serving = self._serving
        if self._attempts >= serving.settings.retries.attempts:
            return False
        kind = "prefill" if leg == "prefill" else "decode"
        if not serving.budget.spend(serving.now()):
            serving.metrics.retry_refused("prefill" if kind == "prefill" else "decode")
            return False
        self._attempts += 1
        serving.metrics.retried("prefill" if kind == "prefill" else "decode")
        return True

    def _fail(self, status: int, why: str, kind: str) -> None:
        """Answer with an error; nothing of the request is left."""
        self._drop_legs()
        exchange = self._exchange
        if exchange.started:
            exchange.abort()
        else:
            headers = [(b"x-request-id", self._request_id)]
            if status == 503:
                headers.append((b"retry-after", b"1"))
            exchange.respond(status, error_body(why, kind), b"application/json", headers)
        self._end(status, None, error=why)

    def _client_gone(self) -> None:
        if not self._over:
            self._serving.metrics.client_gone()
            self._drop_legs()
            self._end(_GONE, None, error="the client left")

    def stop(self) -> None:
        """The gateway closes: break the answer off."""
        if not self._over:
            self._fail(503, "the gateway is shutting down", UNAVAILABLE)

    def _drop_legs(self) -> None:
        self._drop_prefill()
        self._drop_answer()

    def _drop_prefill(self) -> None:
        if self._prefill is not None:
            self._prefill.abort(self._serving.now())
            self._prefill = None

    def _drop_answer(self) -> None:
        self._cancel_landing()
        if self._answer is not None:
            self._answer.abort(self._serving.now())
            self._answer = None

    def _cancel_landing(self) -> None:
        if self._landing is not None:
            self._landing.cancel()
            self._landing = None

    def _end(self, status: int, output_tokens: int | None, *, relayed_bytes: int = 0, error: str = "") -> None:
        assert not self._over
        self._over = True
        serving, now = self._serving, self._serving.now()
        self._cancel_landing()
        self._stop_crossing(now, None)
        if self._arrived:
            serving.tell(Finished(now, self.number, output_tokens=output_tokens))
        self._trace.end(status, error)
        serving.ended(self, self._completion.kind, status, now - self._received_at, relayed_bytes)


def _without_type(headers: Headers) -> Headers:
    return [header for header in headers if header[0] != b"content-type"]
