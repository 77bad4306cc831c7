"""The leg that answers: relayed event by event from its first token on, or collected whole, to be tried again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvroute.gateway.answers import error_event, sse_events, usage_tokens
from kvroute.gateway.dialects import DialectError
from kvroute.gateway.headers import answered
from kvroute.gateway.landing import NEVER_S
from kvroute.gateway.legs import FULL, Leg
from kvroute.gateway.view import Ttft
from kvroute.types import Admitted, Decode, DecodeFailed, KvStored, TransferFinished, TransferMeasured

if TYPE_CHECKING:
    from kvroute.gateway.journey import Journey
    from kvroute.gateway.prefill_leg import PrefillLeg

UPSTREAM = "upstream_error"
_MEASURABLE_BYTES = 1 << 20
"""Smaller transfers say more about latency and scheduling than about bandwidth."""
_ERROR_START = (b'data: {"error"', b'data: {"object":"error"')
"""How engines begin a stream that has failed before its first token."""
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_HELD_BYTES_MAX = 1 << 20
"""An event that is longer goes on in pieces."""


class AnswerLeg(Leg):
    """One decode engine's answer, and what the core is told of the way there: the transfer, and that it decodes."""

    __slots__ = (
        "_held",
        "_torn",
        "admitted",
        "alone",
        "crossing",
        "crossing_at",
        "decision",
        "early",
        "events",
        "expected",
        "first",
        "lands_at",
        "streams",
    )
    kind = "decode"

    def __init__(self, journey: Journey, decision: Decode, now: float) -> None:
        super().__init__(journey, journey.serving.stations[decision.target], now)
        self.decision = decision
        self.alone = decision.source == decision.target
        """The same instance computes the prompt, and nothing crosses the network."""
        self.streams = journey.completion.stream
        self.expected = journey.serving.landings.expected(decision)
        self.first = True
        self.early = False
        """Sent before the KV cache is computed, by a protocol that can also wait for that."""
        self.crossing = self.admitted = self._torn = False
        """`crossing`: the core counts its transfer; `admitted`: to a decode batch, as far as the core knows; `_torn`: a
        piece of an event has gone to the client without its end."""
        self.crossing_at = now
        self.lands_at = NEVER_S
        self.events = 0
        self._held = b""
        """The beginning of an event whose end has not come yet."""

    def begin(self, now: float) -> None:
        """Send the leg."""
        journey, dialect = self.journey, self.station.dialect
        completion, timeouts = journey.completion, journey.serving.timeouts
        if self.alone:
            body = dialect.alone_body(completion)
        else:
            prefill = journey.prefill
            assert prefill is not None
            assert prefill.meeting is not None
            self.early = prefill.meeting.early and not journey.computed
            if journey.computed or self.early:
                self.cross(now)
            try:
                body = dialect.decode_body(completion, prefill.meeting, prefill.handover)
            except DialectError as error:
                journey.fail(502, f"prefill instance {self.decision.source} {error}", now)
                return
        wait_s = timeouts.first_token_s if self.streams else timeouts.answer_s
        self.send(body, wait_s + timeouts.prefill_s if self.early else wait_s, now)
        if journey.computed or self.alone:
            self.expect_landing(now)

    # The transfer

    def cross(self, now: float) -> None:
        """The KV cache is there to be fetched, and the engine fetches it; or, once more, what had to be computed for
        that is complete now."""
        self.crossing_at = now
        if not self.crossing:
            self.crossing = True
            self.journey.serving.transfer_started(self.decision, now, self.expected.transfer_s)

    def expect_landing(self, now: float) -> None:
        """Where the answer comes whole, nothing but time tells when the KV cache has landed: never before it is
        computed, lest a decode engine wait for what has failed."""
        if not self.streams and not self.admitted:
            self.lands_at = now + sum(self.expected)
            self.journey.serving.landings.expect(self.lands_at, self.journey.number, now)

    def land(self, now: float, seconds: float | None = None) -> None:
        """Tell the core that transfer and wait are over: seen in a stream (after so many seconds), expected where the
        answer comes whole."""
        if self.admitted:
            return
        self.admitted = True  # first: what follows looks for landings that are due
        journey, decision = self.journey, self.decision
        serving, request = journey.serving, journey.request
        assert request is not None
        if not journey.computed and not request.one_leg:
            journey.compute(serving.stations[decision.source], now)
        self.stop_crossing(now, True, seconds)
        serving.tell(Admitted(now, journey.number))
        if self.station.approximate and request.blocks and (request.one_leg or not self.alone):
            serving.tell(KvStored(now, decision.target, request.blocks, request.block_tokens))

    def stop_crossing(self, now: float, landed: bool, seconds: float | None = None) -> None:
        """The transfer has landed or come to nothing; the core is told of the first alone, for the second comes with
        the failure or the end of the request."""
        if self.crossing:
            self.crossing = False
            self.journey.serving.transfer_ended(self.decision, now, landed, seconds)
            if landed:
                self.journey.serving.tell(TransferFinished(now, self.journey.number))

    def abort(self, now: float) -> None:
        """See Leg."""
        try:
            super().abort(now)
        finally:
            self.stop_crossing(now, False)

    # The answer

    def on_body(self, data: bytes) -> None:
        """See Sink."""
        journey = self.journey
        try:
            if not self.streams or self.status >= 400:
                if not self.keep(data):
                    self.endless()
                return
            if self._held or not data.endswith(_EVENT_ENDS):
                data = self._whole_events(data)
                if not data:
                    return
            if self.first and not self._first_token(data):
                return
            self.events += sse_events(data)
            self.size += len(data)
            journey.exchange.write(data)
        except Exception as error:
            journey.broke(error)

    def _whole_events(self, data: bytes) -> bytes:
        """`data` without the event at its end that is not whole: should the engine die within it, the error event that
        ends the stream would be part of it."""
        data = self._held + data
        end = max(_after(data, b"\n\n"), _after(data, b"\r\n\r\n"))
        if len(data) - end > _HELD_BYTES_MAX:
            self._torn, self._held = True, b""
            return data
        self._held = data[end:]
        return data[:end]

    def _first_token(self, data: bytes) -> bool:
        """The first event: the transfer is over and the request decodes; False where it is an error."""
        journey, exchange = self.journey, self.journey.exchange
        if data.startswith(_ERROR_START):
            if self.call is not None:
                self.call.abort()
            why = f"decode instance {self.station.name} failed before the first token"
            self.lost("status", why, 502, sent=True)
            return False
        self.first = False
        now = journey.serving.now()
        self._answered(now)
        decode_s = now - self.sent_at
        step_s = min(self.expected.step_s, decode_s)
        shows = self.crossing and journey.computed  # else all of it has gone beside the prefill
        crossed_s = max(0.0, now - self.crossing_at - step_s) if shows else None
        self._measure(now)
        self.land(now, crossed_s)
        queue_s = (self.sent_at if journey.prefill is None else journey.prefill.sent_at) - journey.received_at
        transfer_s = crossed_s or 0.0
        prefill_s = max(0.0, now - journey.received_at - queue_s - transfer_s - step_s)
        journey.first_token(self, Ttft(queue_s, prefill_s, transfer_s, step_s), decode_s, now)
        exchange.on_pause, exchange.on_resume = self.pause, self.resume
        content_type, headers = answered(self.headers, journey.request_id)
        exchange.start(self.status, [(b"content-type", content_type), *headers], None)
        return True

    def _answered(self, now: float) -> None:
        """The first token or the whole answer is here."""
        self.succeeded(now)
        journey = self.journey
        if journey.passage is not None:
            journey.passage.arrived(now)
        if journey.suspicion is not None:
            journey.suspicion.answered("decode", now)

    def _measure(self, now: float) -> None:
        """What the transfer took, where nobody else measures it and no queue stood in its way."""
        decision, station = self.decision, self.station
        if not station.measures or not self.crossing or decision.kv_bytes < _MEASURABLE_BYTES:
            return
        seconds = now - self.sent_at - self.expected.step_s
        joint = station.dialect.joint or self.early  # then the prefill's seconds are in it
        if self.expected.queue_s == 0.0 and seconds > 0.0 and not joint:
            measured = TransferMeasured(now, decision.source, decision.target, decision.kv_bytes, seconds)
            self.journey.serving.tell(measured)

    def on_end(self) -> None:
        """See Sink."""
        journey = self.journey
        try:
            if self.status >= 400:
                self.refused()
            elif self.streams:
                self._stream_ended()
            else:
                serving, exchange = journey.serving, journey.exchange
                now = serving.now()
                self._answered(now)
                self.land(now)
                serving.whole_answer(self.decision, now)
                content_type, headers = answered(self.headers, journey.request_id)
                body = self.body()
                self.close()
                exchange.respond(self.status, body, content_type, headers)
                journey.end(self.status, now, usage_tokens(body), relayed_bytes=self.size)
        except Exception as error:
            journey.broke(error)

    def _stream_ended(self) -> None:
        journey = self.journey
        rest, self._held = self._held, b""
        if self.first and not rest:
            why = f"decode instance {self.station.name} ended the stream before its first token"
            self.lost("malformed", why, 502, sent=True)
            return
        if self.first and not self._first_token(rest):
            return
        if rest:
            self.events += sse_events(rest)
            self.size += len(rest)
            journey.exchange.write(rest)
        self.close()
        journey.exchange.end()
        journey.end(self.status, journey.serving.now(), self.events, relayed_bytes=self.size)

    def lost(self, kind: str, why: str, status: int, *, sent: bool) -> None:
        """See Leg: before the first token it is tried again, after it the stream says so."""
        journey = self.journey
        serving = journey.serving
        now = serving.now()
        if sent:
            serving.stations[self.decision.source].forget()
        self.failed(kind, why, now)
        if journey.exchange.started:
            serving.metrics.stream_failed()
            serving.state.stream_failed(now)
            self.break_off(why)
            journey.drop_legs(now)
            journey.end(200, now, self.events, relayed_bytes=self.size, error=why)
            return
        computed, prefill = journey.computed, journey.prefill
        journey.answer = None
        kv_lost = sent and not (kind == "reset" and self._refetches(prefill, computed))
        if not computed and prefill is not None and (kv_lost or not self.early):
            prefill.abort(now)
        self.stop_crossing(now, False)
        if not journey.may_retry("decode", now):
            journey.fail(status, why, now)
            return
        journey.act(serving.decide(DecodeFailed(now, journey.number, kv_lost=kv_lost)), now)

    def _refetches(self, prefill: PrefillLeg | None, computed: bool) -> bool:
        """Whether another decode engine may be sent for the same KV cache."""
        if prefill is None or not computed:
            return self.early and prefill is not None
        return self.station.dialect.refetches(prefill.handover)

    def blame(self, kind: str, now: float) -> None:
        """See Leg. If the KV cache comes from another datacenter and a reachable engine does not answer, the KV cache
        has most likely not arrived. The failure then counts against the way, or against nothing if the prompt is not
        computed yet. The request may also cause an error, so it is tried again without the way (see `Suspicion`)."""
        passage = self.journey.passage
        silent = kind == "timeout" or (kind == "status" and self.status not in FULL)
        if passage is None or not passage.open or not silent:
            super().blame(kind, now)
            return
        self.station.guard.cancelled(self.attempt, now)
        if self.journey.computed:
            passage.lost(self.journey.suspect(), now, error=kind == "status")
        else:
            passage.given_up(now)

    def break_off(self, why: str, kind: str = UPSTREAM) -> None:
        """End the stream with an event that says why; what has come of the event under way is left out."""
        exchange = self.journey.exchange
        exchange.write((b"\n\n" if self._torn else b"") + error_event(why, kind))
        exchange.end()

    def pause(self) -> None:
        """The client is slow: read no more from the engine."""
        if self.call is not None and self.open:
            self.call.pause()

    def resume(self) -> None:
        """The client has caught up."""
        if self.call is not None and self.open:
            self.call.resume()


def _after(data: bytes, end: bytes) -> int:
    """Position behind the last `end`; 0: there is none."""
    found = data.rfind(end)
    return found + len(end) if found >= 0 else 0
