"""One completion on its way: its legs, their failures and their end; callbacks only, so that a request costs no task.

The journey tells the control core each step once and in order, whatever engines and clients do, and gives back all
that it holds on every path: slots, in-flight counts, connections.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

from kvroute.gateway.answer_leg import UPSTREAM, AnswerLeg
from kvroute.gateway.answers import error_body
from kvroute.gateway.fields import RequestError
from kvroute.gateway.headers import forwarded, header_lines
from kvroute.gateway.legs import UNAVAILABLE
from kvroute.gateway.openai import Completion, without_body, without_prompts
from kvroute.gateway.prefill_leg import PrefillLeg
from kvroute.gateway.prompt_queue import QueueFull
from kvroute.gateway.reading import LIGHT_BYTES
from kvroute.gateway.suspicion import Suspicion
from kvroute.types import Arrived, Decision, Decode, Finished, KvStored, Prefill, PrefillFinished, Reject, Request

if TYPE_CHECKING:
    from kvroute.gateway.copy_leg import CopyLeg
    from kvroute.gateway.exchange import Exchange
    from kvroute.gateway.prompt import Prompt
    from kvroute.gateway.serving import Serving
    from kvroute.gateway.station import Station
    from kvroute.gateway.tracing import RequestTrace
    from kvroute.gateway.view import Ttft
    from kvroute.gateway.ways import Passage

OURS = "server_error"
_GONE = 499


class Journey:
    """From the admitted request to its answer. Every method runs on the event loop, returns at once and, where it is
    called from outside, lets no exception out: a mistake of the gateway's own ends the journey (`broke`).

    What the core knows of the request is mirrored in flags: here that it has `arrived` and its prefill is `computed`,
    in the answer's leg how far the transfer is.
    """

    __slots__ = (
        "_attempts",
        "_ids",
        "_reading",
        "answer",
        "arrived",
        "completion",
        "computed",
        "exchange",
        "head",
        "model",
        "number",
        "over",
        "passage",
        "prefill",
        "received_at",
        "request",
        "request_id",
        "serving",
        "suspicion",
        "ticket",
        "trace",
    )
    head: bytes
    """The client's headers as engines get them, in lines."""

    def __init__(
        self, serving: Serving, exchange: Exchange, completion: Completion, request_id: bytes, received_at: float
    ) -> None:
        self.serving, self.exchange, self.completion, self.request_id = serving, exchange, completion, request_id
        self.number = serving.next_number()
        self.ticket = 0
        """Of its admission."""
        self.received_at = received_at
        self.model = ""
        self.request: Request | None = None
        self.prefill: PrefillLeg | None = None
        """The leg that computes the KV cache, or has."""
        self.answer: AnswerLeg | None = None
        self.passage: Passage | None = None
        """Its way through another datacenter."""
        self.trace: RequestTrace | None = None
        self._reading: asyncio.Task[None] | None = None
        """The prompt's way through the threads."""
        self.suspicion: Suspicion | None = None
        """What failed attempts say about engines or about the request; None: none has failed."""
        self._ids: list[int] | None = None
        """The prompt's tokens, where a copy of its beginning may come to be ordered."""
        self._attempts = 1
        self.over = self.arrived = self.computed = False

    def suspect(self) -> Suspicion:
        """`suspicion`, from the first failure on."""
        if self.suspicion is None:
            self.suspicion = Suspicion()
        return self.suspicion

    # The way in

    def begin(self) -> None:
        """Hash the prompt and ask where to go; large prompts are hashed beside the loop."""
        serving, exchange, completion = self.serving, self.exchange, self.completion
        try:
            exchange.on_gone = self._client_gone
            self.trace = serving.tracer.request(exchange.headers, completion.kind)
            self.head = (
                header_lines(forwarded(exchange.headers, self.request_id, serving.forward_headers)) + serving.added
            )
            self.model = serving.model_of(completion.model)
            prompt = serving.prompts.blocks_now(completion)
            if prompt is None:
                self._reading = serving.spawn(self._begin_later())
            else:
                self._arrive(prompt)
        except RequestError as refused:
            self._answer_error(refused.status, refused.body(), serving.now(), refused.message)
        except Exception as error:
            self.broke(error)

    async def _begin_later(self) -> None:
        serving = self.serving
        try:
            prompt = await serving.prompts.blocks(self.completion)
            self._reading = None
            if not self.over:
                self.completion = without_prompts(self.completion)
                self._arrive(prompt)
        except RequestError as refused:
            self._reading = None
            self._answer_error(refused.status, refused.body(), serving.now(), refused.message)
        except QueueFull as full:
            self._reading = None
            serving.metrics.rejected("prompt_queue")
            serving.state.rejected(serving.now())
            body = error_body(str(full), UNAVAILABLE)
            self._answer_error(503, body, serving.now(), str(full), full.retry_after_s)
        except Exception as error:
            self.broke(error)

    def _arrive(self, prompt: Prompt) -> None:
        serving, completion = self.serving, self.completion
        now = serving.now()
        max_tokens, reserve = completion.max_tokens, serving.reserve_output_tokens
        if max_tokens > reserve or (not max_tokens and completion.kind == "chat"):
            max_tokens = reserve  # a chat without a bound may go on for as long as the context does
        request = self.request = Request(
            id=self.number,
            input_tokens=prompt.input_tokens,
            blocks=prompt.blocks,
            block_tokens=prompt.block_tokens,
            max_output_tokens=max_tokens,
            model=self.model,
            one_leg=completion.one_leg and serving.must_stay(completion),
            copyable=prompt.ids is not None,
        )
        self._ids = prompt.ids if serving.copy_s else None
        serving.metrics.prompt_read(prompt.input_tokens)
        serving.budget.request(now)
        if serving.landings.due_at <= now:
            serving.landings.look(now)
        self.arrived = True
        self.act(serving.decide(Arrived(now, request)), now)

    def act(self, decisions: tuple[Decision, ...], now: float) -> None:
        """Carry out what the core has decided."""
        if not decisions:
            return
        first, last = decisions[0], decisions[-1]
        if type(first) is Prefill and (first is last or (type(last) is Decode and last.source != last.target)):
            # Where sending fails at once, what comes instead is under way already, or the request is over.
            if self._send_prefill(first, now, early=first is not last) and type(last) is Decode:
                self._send_answer(last, now)
        elif type(last) is Decode:
            self._send_answer(last, now)
        elif type(last) is Reject:
            self.arrived = False
            self._reject(last, now)

    def _send_prefill(self, decision: Prefill, now: float, *, early: bool) -> bool:
        serving = self.serving
        self.computed = False
        serving.state.decided(decision, now)
        self._depart(decision, now)
        leg = self.prefill = PrefillLeg(self, decision, now, early=early)
        return leg.begin(now)

    def ids_once(self) -> list[int] | None:
        """The prompt's tokens, the first time that somebody asks: a request that fails with a copy is tried again
        without one."""
        ids, self._ids = self._ids, None
        return ids

    def landing(self, at: float) -> AnswerLeg | CopyLeg | None:
        """Whose bytes are expected at this time, if anybody's still are."""
        copy = self.prefill.copy if self.prefill is not None else None
        return next((leg for leg in (self.answer, copy) if leg is not None and leg.lands_at == at), None)

    def _depart(self, decision: Prefill, now: float) -> None:
        """What becomes of a passage that is not over says nothing of its way."""
        if self.passage is not None:
            self.passage.given_up(now)
        ways, counted = self.serving.ways, self.suspicion is None
        self.passage = ways.depart(decision, now, counted=counted) if ways is not None else None

    def _send_answer(self, decision: Decode, now: float) -> None:
        self.serving.state.decided(decision, now)
        leg = self.answer = AnswerLeg(self, decision, now)
        if leg.alone:
            self.computed, self.prefill = False, None
        leg.begin(now)

    # What legs say

    def compute(self, station: Station, now: float) -> None:
        """The KV cache is complete on `station`."""
        serving, request, answer = self.serving, self.request, self.answer
        assert request is not None
        self.computed, self._ids = True, None
        if self.prefill is not None and self.prefill.copy is not None:
            self.prefill.copy.computed(None, now)
        if self.suspicion is not None:
            self.suspicion.answered("prefill", now)
        if station.approximate and request.blocks:
            serving.tell(KvStored(now, station.name, request.blocks, request.block_tokens))
        if serving.landings.due_at <= now:
            serving.landings.look(now)
        if answer is not None and not answer.alone:
            answer.cross(now)
            answer.expect_landing(now)
        self.act(serving.decide(PrefillFinished(now, self.number)), now)

    def uncomputed(self, now: float) -> None:
        """The prefill has failed for good while the decode engine waits for its KV cache: that one may compute the
        prompt itself, and otherwise says so."""
        self.computed = True
        if self.passage is not None:
            self.passage.given_up(now)
        if self.answer is not None:
            self.answer.stop_crossing(now, False)
        self.act(self.serving.decide(PrefillFinished(now, self.number)), now)

    def first_token(self, leg: AnswerLeg, ttft: Ttft, decode_s: float, now: float) -> None:
        """The first event of a stream is here."""
        if len(self.exchange.body) > LIGHT_BYTES:
            self._release_body()
        trace_id = self.trace.trace_id if self.trace is not None else ""
        exemplar = ("trace_id", trace_id) if trace_id else ("request_id", str(self.number))
        self.serving.metrics.decode_answered(decode_s)
        self.serving.first_token(leg.decision, ttft, now, exemplar)

    def _release_body(self) -> None:
        """The answer has begun, so nothing is sent again: let go of the request's body and of its copies."""
        self.completion = without_body(self.completion)
        for leg in (self.prefill, self.answer):
            if leg is not None and leg.call is not None:
                leg.call.forget_request()
        self.exchange.release_body()

    def may_retry(self, leg: Literal["prefill", "decode"], now: float) -> bool:
        """Whether a leg that has failed is tried again; it is taken for done."""
        serving = self.serving
        if self._attempts >= serving.settings.retries.attempts:
            return False
        if not serving.budget.spend(now):
            serving.metrics.retry_refused(leg)
            return False
        self._attempts += 1
        serving.metrics.retried(leg)
        return True

    # The ways out

    def _reject(self, reject: Reject, now: float) -> None:
        serving = self.serving
        serving.metrics.rejected("no_instance")
        serving.state.rejected(now)
        serving.state.decided(reject, now)
        self.fail(503, reject.reason, now, UNAVAILABLE)

    def fail(self, status: int, why: str, now: float, kind: str = UPSTREAM) -> None:
        """Answer with an error; nothing of the request is left."""
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
            now = self.serving.now()
            self.serving.metrics.client_gone()
            self.drop_legs(now)
            self.end(_GONE, now, error="the client left")
        except Exception as error:
            self.broke(error)

    def stop(self) -> None:
        """The gateway closes: break the answer off."""
        if self.over:
            return
        try:
            self.fail(503, "the gateway is shutting down", self.serving.now(), UNAVAILABLE)
        except Exception as error:
            self.broke(error)

    def broke(self, error: Exception) -> None:
        """A mistake of the gateway's own: the client is told so, and everything is given back all the same."""
        asyncio.get_running_loop().call_exception_handler({"message": "a journey broke", "exception": error})
        why, exchange, answer = "the gateway failed", self.exchange, self.answer
        now = self.serving.now()
        with suppress(Exception):
            self.drop_prefill(now)
        with suppress(Exception):
            self.drop_answer(now)
        with suppress(Exception):
            if not exchange.started:
                exchange.respond(500, error_body(why, OURS), headers=[(b"x-request-id", self.request_id)])
            elif answer is not None and not exchange.finished:
                answer.break_off(why, OURS)
        if not self.over:
            with suppress(Exception):
                self.end(500, now, error=why)

    def drop_legs(self, now: float) -> None:
        """Nobody waits for them."""
        self.drop_prefill(now)
        self.drop_answer(now)

    def drop_prefill(self, now: float) -> None:
        """Nobody waits for the prefill."""
        leg, self.prefill = self.prefill, None
        if leg is not None:
            leg.abort(now)

    def drop_answer(self, now: float) -> None:
        """Nobody waits for the decode leg's answer."""
        leg, self.answer = self.answer, None
        if leg is not None:
            leg.abort(now)

    def end(
        self, status: int, now: float, output_tokens: int | None = None, *, relayed_bytes: int = 0, error: str = ""
    ) -> None:
        """Nothing follows; the legs are closed."""
        assert not self.over
        self.over = True
        self.prefill = self.answer = None
        if self._reading is not None:
            self._reading.cancel()  # a prompt that waits to be read is let go of at once
            self._reading = None
        serving = self.serving
        try:
            if self.suspicion is not None:
                self.suspicion.ended(status, now)
            if self.passage is not None:
                self.passage.given_up(now)
            if self.arrived:
                serving.tell(Finished(now, self.number, output_tokens=output_tokens))
            if self.trace is not None:
                self.trace.end(status, error)
        finally:
            serving.ended(self, self.completion.kind, status, now, relayed_bytes)
