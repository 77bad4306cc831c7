"""The decode leg. A stream is relayed event by event from its first token on; other responses are collected whole.

A leg can be retried until its response begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvroute.gateway.engines.protocols import ProtocolError
from kvroute.gateway.http.deadlines import NEVER_S
from kvroute.gateway.http.headers import answered
from kvroute.gateway.observe.view import Ttft
from kvroute.gateway.openai_api.responses import error_event, sse_events, usage_tokens
from kvroute.gateway.proxy.leg import FULL, Leg
from kvroute.gateway.proxy.retry import UPSTREAM, LegFailure, Progress
from kvroute.types import Admitted, Decode, KvStored, TransferFinished, TransferMeasured

if TYPE_CHECKING:
    from kvroute.gateway.proxy.prefill_leg import PrefillLeg
    from kvroute.gateway.proxy.request import ProxiedRequest

_MEASURABLE_BYTES = 1 << 20
"""Smallest transfer whose time is reported; smaller ones measure latency and scheduling more than bandwidth."""
_ERROR_START = (b'data: {"error"', b'data: {"object":"error"')
"""First bytes of an engine's stream that has failed before its first token."""
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_HELD_BYTES_MAX = 1 << 20
"""Longest part of an event that is held back; a longer event is relayed in pieces."""


class DecodeLeg(Leg):
    """One request to a decode engine. It reports the KV transfer and the start of decoding to the control core."""

    __slots__ = (
        "_held",
        "_torn",
        "admitted",
        "aggregated",
        "decision",
        "early",
        "events",
        "expected",
        "first",
        "streams",
        "transfer_due_at",
        "transfer_started_at",
        "transferring",
    )
    kind = "decode"

    def __init__(self, proxied: ProxiedRequest, decision: Decode, now: float) -> None:
        super().__init__(proxied, proxied.runtime.engines[decision.target], now)
        self.decision = decision
        self.aggregated = decision.source == decision.target
        """The same instance computes the prompt, so there is no KV transfer."""
        self.streams = proxied.completion.stream
        self.expected = proxied.runtime.expected_transfers.expected(decision)
        self.first = True
        self.early = False
        """The leg is sent before the KV cache is computed, although the protocol does not require it."""
        self.transferring = self.admitted = self._torn = False
        """`transferring`: the control core counts the transfer as in flight; `admitted`: the control core counts the
        request as part of the decode batch; `_torn`: the client has received part of an event without its end."""
        self.transfer_started_at = now
        self.transfer_due_at = NEVER_S
        self.events = 0
        self._held = b""
        """Beginning of an event whose end has not arrived yet."""

    def begin(self, now: float) -> None:
        """Send the leg."""
        proxied, protocol = self.owner, self.engine.protocol
        completion, timeouts = proxied.completion, proxied.runtime.timeouts
        if self.aggregated:
            body = protocol.aggregated_body(completion)
        else:
            prefill = proxied.prefill
            assert prefill is not None
            assert prefill.handshake is not None
            self.early = prefill.handshake.early and not proxied.computed
            if proxied.computed or self.early:
                self.transfer_started(now)
            try:
                body = protocol.decode_body(completion, prefill.handshake, prefill.transfer_params)
            except ProtocolError as error:
                proxied.fail(502, f"prefill instance {self.decision.source} {error}", now)
                return
        wait_s = timeouts.first_token_s if self.streams else timeouts.answer_s
        self.send(body, wait_s + timeouts.prefill_s if self.early else wait_s, now)
        if proxied.computed or self.aggregated:
            self.expect_transfer(now)

    # The transfer

    def transfer_started(self, now: float) -> None:
        """Record the start of the KV transfer. A second call, when an early leg's prefill is complete, only resets the
        time from which the transfer is measured."""
        self.transfer_started_at = now
        if not self.transferring:
            self.transferring = True
            self.owner.runtime.transfer_started(self.decision, now, self.expected.transfer_s)

    def expect_transfer(self, now: float) -> None:
        """Schedule the expected end of the transfer for a response that comes whole and does not show it.

        Call it only once the KV cache is computed: an expected end marks the prefill as done, and if that prefill
        failed later, the decode engine would wait in vain.
        """
        if not self.streams and not self.admitted:
            self.transfer_due_at = now + sum(self.expected)
            self.owner.runtime.expected_transfers.expect(self.transfer_due_at, self.owner.number, now)

    def transfer_done(self, now: float, seconds: float | None = None) -> None:
        """Report to the control core that the transfer and the wait for a slot are over.

        Args: `seconds` that the transfer took, measured on a stream; None: the end is expected, not observed.
        """
        if self.admitted:
            return
        self.admitted = True  # set first: the calls below process the transfers that are due
        proxied, decision = self.owner, self.decision
        runtime, request = proxied.runtime, proxied.request
        assert request is not None
        if not proxied.computed and not request.one_leg:
            proxied.on_prefill_done(runtime.engines[decision.source], now)
        self.end_transfer(now, True, seconds)
        runtime.notify(Admitted(now, proxied.number))
        if self.engine.approximate and request.blocks and (request.one_leg or not self.aggregated):
            runtime.notify(KvStored(now, decision.target, request.blocks, request.block_tokens))

    def end_transfer(self, now: float, landed: bool, seconds: float | None = None) -> None:
        """Record that the transfer has ended. Only a completed one is reported to the control core here; the event for
        the failure or the end of the request covers the other case."""
        if self.transferring:
            self.transferring = False
            self.owner.runtime.transfer_ended(self.decision, now, landed, seconds)
            if landed:
                self.owner.runtime.notify(TransferFinished(now, self.owner.number))

    def abort(self, now: float) -> None:
        """See Leg."""
        try:
            super().abort(now)
        finally:
            self.end_transfer(now, False)

    # The response

    def on_body(self, data: bytes) -> None:
        """See ResponseHandler."""
        proxied = self.owner
        try:
            if not self.streams or self.status >= 400:
                if not self.keep(data):
                    self.response_too_large()
                return
            if self._held or not data.endswith(_EVENT_ENDS):
                data = self._whole_events(data)
                if not data:
                    return
            if self.first and not self._first_token(data):
                return
            self.events += sse_events(data)
            self.size += len(data)
            proxied.exchange.write(data)
        except Exception as error:
            proxied.internal_error(error)

    def _whole_events(self, data: bytes) -> bytes:
        """Return the whole events of `data` and hold back the rest. If the engine failed within a relayed event, the
        error event that ends the stream would become part of that event."""
        data = self._held + data
        end = max(_after(data, b"\n\n"), _after(data, b"\r\n\r\n"))
        if len(data) - end > _HELD_BYTES_MAX:
            self._torn, self._held = True, b""
            return data
        self._held = data[end:]
        return data[:end]

    def _first_token(self, data: bytes) -> bool:
        """Handle the first event: the transfer is over and decoding has begun. Return False if it is an error."""
        proxied, exchange = self.owner, self.owner.exchange
        if data.startswith(_ERROR_START):
            if self.call is not None:
                self.call.abort()
            why = f"decode instance {self.engine.name} failed before the first token"
            self.on_failed(LegFailure("status", why, 502, sent=True))
            return False
        self.first = False
        now = proxied.runtime.now()
        self._answered(now)
        decode_s = now - self.sent_at
        step_s = min(self.expected.step_s, decode_s)
        shows = self.transferring and proxied.computed  # otherwise the whole transfer ran during the prefill
        crossed_s = max(0.0, now - self.transfer_started_at - step_s) if shows else None
        self._measure(now)
        self.transfer_done(now, crossed_s)
        queue_s = (self.sent_at if proxied.prefill is None else proxied.prefill.sent_at) - proxied.received_at
        transfer_s = crossed_s or 0.0
        prefill_s = max(0.0, now - proxied.received_at - queue_s - transfer_s - step_s)
        proxied.first_token(self, Ttft(queue_s, prefill_s, transfer_s, step_s), decode_s, now)
        exchange.on_pause, exchange.on_resume = self.pause, self.resume
        content_type, headers = answered(self.headers, proxied.request_id)
        exchange.start(self.status, [(b"content-type", content_type), *headers], None)
        return True

    def _answered(self, now: float) -> None:
        """Report success after the first token or the whole response."""
        self.succeeded(now)
        proxied = self.owner
        if proxied.path_attempt is not None:
            proxied.path_attempt.arrived(now)
        if proxied.faults is not None:
            proxied.faults.answered("decode", now)

    def _measure(self, now: float) -> None:
        """Report the transfer time, unless the engine measures it itself or the request waited in a queue."""
        decision, engine = self.decision, self.engine
        if not engine.measures or not self.transferring or decision.kv_bytes < _MEASURABLE_BYTES:
            return
        seconds = now - self.sent_at - self.expected.step_s
        joint = engine.protocol.concurrent_legs or self.early  # then `seconds` includes the prefill
        if self.expected.queue_s == 0.0 and seconds > 0.0 and not joint:
            measured = TransferMeasured(now, decision.source, decision.target, decision.kv_bytes, seconds)
            self.owner.runtime.notify(measured)

    def on_end(self) -> None:
        """See ResponseHandler."""
        proxied = self.owner
        try:
            if self.status >= 400:
                self.on_error_status()
            elif self.streams:
                self._stream_ended()
            else:
                runtime, exchange = proxied.runtime, proxied.exchange
                now = runtime.now()
                self._answered(now)
                self.transfer_done(now)
                runtime.whole_answer(self.decision, now)
                content_type, headers = answered(self.headers, proxied.request_id)
                body = self.body()
                self.close()
                exchange.respond(self.status, body, content_type, headers)
                proxied.end(self.status, now, usage_tokens(body), relayed_bytes=self.size)
        except Exception as error:
            proxied.internal_error(error)

    def _stream_ended(self) -> None:
        proxied = self.owner
        rest, self._held = self._held, b""
        if self.first and not rest:
            why = f"decode instance {self.engine.name} ended the stream before its first token"
            self.on_failed(LegFailure("malformed", why, 502, sent=True))
            return
        if self.first and not self._first_token(rest):
            return
        if rest:
            self.events += sse_events(rest)
            self.size += len(rest)
            proxied.exchange.write(rest)
        self.close()
        proxied.exchange.end()
        proxied.end(self.status, proxied.runtime.now(), self.events, relayed_bytes=self.size)

    def failed(self, failure: LegFailure, now: float) -> None:
        """See Leg. If the decode engine cannot pull the KV cache, the prefill engine may have restarted."""
        if failure.sent:
            self.owner.runtime.engines[self.decision.source].forget_engine_id()
        super().failed(failure, now)

    def progress(self) -> Progress:
        """See Leg."""
        owner = self.owner
        refetchable = self._refetches(owner.prefill, owner.computed)
        started = owner.exchange.started
        return Progress(owner.over, started, owner.computed, decode_waits=self.early, kv_refetchable=refetchable)

    def _refetches(self, prefill: PrefillLeg | None, computed: bool) -> bool:
        """Whether another decode engine may fetch the same KV cache."""
        if prefill is None or not computed:
            return self.early and prefill is not None
        return self.engine.protocol.allows_refetch(prefill.transfer_params)

    def blame(self, kind: str, now: float) -> None:
        """See Leg. If the KV cache comes from another datacenter and a reachable engine does not respond, the KV cache
        has most likely not arrived. The failure then counts against the WAN path, or against nothing if the prompt is
        not computed yet. The request itself may also cause an error, so it is retried without the WAN path (see
        `FaultAttribution`)."""
        path_attempt = self.owner.path_attempt
        silent = kind == "timeout" or (kind == "status" and self.status not in FULL)
        if path_attempt is None or not path_attempt.open or not silent:
            super().blame(kind, now)
            return
        self.engine.availability.cancelled(self.attempt, now)
        if self.owner.computed:
            path_attempt.lost(self.owner.fault_attribution(), now, error=kind == "status")
        else:
            path_attempt.cancelled(now)

    def abort_stream(self, why: str, kind: str = UPSTREAM) -> None:
        """End the stream with an error event that gives the reason. The held-back part of an event is dropped."""
        exchange = self.owner.exchange
        exchange.write((b"\n\n" if self._torn else b"") + error_event(why, kind))
        exchange.end()

    def pause(self) -> None:
        """Stop reading from the engine while the client is slow."""
        if self.call is not None and self.open:
            self.call.pause()

    def resume(self) -> None:
        """Read from the engine again, because the client has caught up."""
        if self.call is not None and self.open:
            self.call.resume()


def _after(data: bytes, end: bytes) -> int:
    """Return the position after the last `end`; 0 if there is none."""
    found = data.rfind(end)
    return found + len(end) if found >= 0 else 0
