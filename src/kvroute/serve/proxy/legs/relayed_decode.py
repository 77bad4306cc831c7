"""The decode leg that the gateway sends itself. A stream is relayed event by event from its first token on; other
responses are collected whole.

A leg can be retried until its response begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvroute.http.headers import answered
from kvroute.serve.api.responses import TokenUsage, error_status, usage_of
from kvroute.serve.api.stream_record import UnexpectedEvent
from kvroute.serve.api.streams import STREAMS, USAGE_MARK, event_data, with_usage
from kvroute.serve.observe.view import TtftBreakdown
from kvroute.serve.proxy.legs.decode_leg import NOT_OBSERVED, DecodeLeg, DecodeOwner, TransferTimes
from kvroute.serve.proxy.retry import UPSTREAM, LegFailure, status_failure
from kvroute.serve.proxy.stream_output import StreamOutput

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvroute.http.client_exchange import ResponseWriter
    from kvroute.http.forwarding.stream_forwarder import Forwarded, ForwardedStream
    from kvroute.serve.api.requests import Completion
    from kvroute.serve.api.stream_record import StreamRecord
    from kvroute.serve.proxy.legs.prefill_leg import PrefillLeg
    from kvroute.serve.proxy.request_state import RequestState
    from kvroute.types import Decode

_MEASURABLE_BYTES = 1 << 20
"""Smallest transfer whose time is reported; smaller ones measure latency and scheduling more than bandwidth."""
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_HELD_BYTES_MAX = 1 << 20
"""Longest part of an event that is held back; a longer event is relayed in pieces."""
_PREAMBLE_BYTES_MAX, _PREAMBLE_EVENTS_MAX = 4 << 20, 1 << 14
"""Most bytes before the first token, and most pieces in which they arrive."""

_NOTHING = StreamOutput(STREAMS["completions"], hidden=False, several=False)
"""The output of a leg without a stream, or before its stream; nothing is counted in it."""


class RelayedDecodeLeg(DecodeLeg):
    """See `DecodeLeg`. The engine's response goes to the client's `ResponseWriter`."""

    __slots__ = (
        "_format",
        "_held",
        "_mid_event",
        "_preamble",
        "_preamble_bytes",
        "_preamble_events",
        "_writer",
        "first",
        "output",
    )
    _writer: ResponseWriter
    """Not set if another proxy sends responses: then the client has left, and nothing is written."""

    def __init__(
        self, state: RequestState, owner: DecodeOwner, decision: Decode, prefill: PrefillLeg | None, now: float
    ) -> None:
        super().__init__(state, owner, decision, prefill, now)
        if (writer := state.exchange.writer) is not None:
            self._writer = writer
        self.streams = state.completion.stream
        self.first = True
        self._mid_event = False
        """The client has received part of an event without its end."""
        self._format = STREAMS[state.completion.kind]
        self.output = _NOTHING
        self._held = b""
        """Beginning of an event whose end has not arrived yet."""
        self._preamble: list[bytes] = []
        """Events before the first token."""
        self._preamble_bytes = self._preamble_events = 0

    def engine_request(self) -> Completion:
        """See `DecodeLeg`. The stream also reports its tokens."""
        state, completion = self.state, self.state.completion
        if state.record is not None:
            completion = state.record.with_ids(completion)
        if self.streams:
            several = completion.n * completion.prompts > 1
            completion, hidden = with_usage(completion)
            self.output = StreamOutput(self._format, hidden=hidden, several=several)
        return completion

    def begin(self, now: float) -> None:
        """See `DecodeLeg`."""
        super().begin(now)
        if self.streams and self.call is not None:
            self.call.events = self.call.waits = True

    def on_body(self, data: bytes) -> None:
        """See ResponseHandler."""
        if not self.streams or self.status >= 400:
            super().on_body(data)
            return
        try:
            if self._held or not data.endswith(_EVENT_ENDS):
                data = self._whole_events(data)
                if not data:
                    return
            self._relay(data)
        except Exception as error:
            self.owner.internal_error(error)

    def _relay(self, data: bytes) -> None:
        """Relay whole events, from the first one with a token on; the events before are relayed together with it, so
        that the leg can be retried until then."""
        start = 0
        if self.first:
            if self._waits_too_long(data):
                return
            start, role = self._format.first(data)
            self._preamble.append(data)
            if role == "preamble":
                return
            start += self._preamble_bytes - len(data)
            data = b"".join(self._preamble)
            self._preamble.clear()
            if not self._first_token(event_data(data[start:]) if role == "error" else None):
                return
        if self.state.record is not None:
            data, start = self._recorded(data, self.state.record), 0
            if not self.open:
                return
        data = self.output.relayed(data, start)
        self.size += len(data)
        self._writer.write(data)

    def _waits_too_long(self, data: bytes) -> bool:
        """Fail the leg if it sends too much before its first token; each event costs time. Return whether it does."""
        self._preamble_bytes += len(data)
        self._preamble_events += data.count(b"\n\n") + data.count(b"\n\r\n")
        if self._preamble_bytes <= _PREAMBLE_BYTES_MAX and self._preamble_events <= _PREAMBLE_EVENTS_MAX:
            return False
        self._abandon_stream("malformed", "sent too much before its first token")
        return True

    def _abandon_stream(self, kind: str, why: str) -> None:
        """End the call and report its failure."""
        if self.call is not None:
            self.call.abort()
        self.on_failed(LegFailure(kind, f"{self.who} {why}", 502, sent=True))

    def _recorded(self, data: bytes, record: StreamRecord) -> bytes:
        """Return whole events as the client gets them; the leg fails if they do not fit into the client's stream."""
        try:
            return record.relayed(data)
        except UnexpectedEvent:
            self._abandon_stream("malformed", "cannot continue the stream: its events have another format")
            return b""

    def on_chunk(self, chunk: bytes, data_bytes: int) -> None:
        """See `ChunkHandler`: relay a chunk of whole events as it was received."""
        if self._held or USAGE_MARK in chunk:
            self.on_body(chunk[-2 - data_bytes : -2])
            return
        try:
            self.output.count_chunk(chunk)
            self.size += data_bytes
            self._writer.write_chunk(chunk, data_bytes)
        except Exception as error:
            self.owner.internal_error(error)

    def forward(self, source: int, returned: Callable[[Forwarded], None]) -> ForwardedStream | None:
        """See `ChunkHandler`."""
        sink = self._writer.stream_socket()
        if sink is None or self._held or self.output.continuous:
            return None
        return self.state.runtime.forwarder.begin(source, sink, self._format.token_line, returned)

    def on_forwarded(self, result: Forwarded) -> None:
        """See `ChunkHandler`."""
        try:
            self.output.count_forwarded(result)
            self.size += result.data_bytes
            if result.unsent:
                self._writer.write_framed(result.unsent)
        except Exception as error:
            self.owner.internal_error(error)

    def _whole_events(self, data: bytes) -> bytes:
        """Return the whole events of `data` and hold back the rest. If the engine failed within a relayed event, the
        error event that ends the stream would become part of that event."""
        seen = max(len(self._held) - 3, 0)
        data = self._held + data
        end = max(_after(data, b"\n\n", seen), _after(data, b"\r\n\r\n", seen))
        if len(data) - end > _HELD_BYTES_MAX:
            self._mid_event, self._held = True, b""
            self.state.record = None  # it records whole events
            return data
        self._held = data[end:]
        return data[:end]

    def _first_token(self, error: bytes | None) -> bool:
        """Handle the first event that is no preamble: the transfer is over and decoding has begun. Return False if
        nothing is relayed. Args: `error`: data of the event if it reports an error."""
        state = self.state
        if error is not None:
            if self.call is not None:
                self.call.abort()
            self._failed_at_once(error)
            return False
        self.first = False
        now = state.runtime.now()
        self._answered(now)
        decode_s = now - self.sent_at
        step_s = min(self.expected.step_s, decode_s)
        shows = self.transferring and state.prefill_done  # otherwise the whole transfer ran during the prefill
        crossed_s = max(0.0, now - self.transfer_started_at - step_s) if shows else None
        self._transfer_done(TransferTimes(crossed_s, self._measured_s(now)), now)
        if state.over:  # the client has left
            return False
        writer = self._writer
        writer.on_pause, writer.on_resume = self.pause, self.resume
        if state.exchange.started:  # this leg continues the stream of another one
            self.owner.release_body()
            if self.call is not None:
                self.call.waits = False
            if writer.paused:
                self.pause()
            return True
        queue_s = (self.sent_at if self._prefill is None else self._prefill.sent_at) - state.received_at
        transfer_s = crossed_s or 0.0
        prefill_s = max(0.0, now - state.received_at - queue_s - transfer_s - step_s)
        self.owner.on_first_token(self, TtftBreakdown(queue_s, prefill_s, transfer_s, step_s), decode_s, now)
        if self.call is not None:
            self.call.waits = False
            self.call.chunks = self if state.record is None else None
        content_type, headers = answered(self.headers)
        headers += state.response_headers
        writer.start(self.status, [(b"content-type", content_type), *headers], None)
        return True

    def _failed_at_once(self, error: bytes) -> None:
        """End the leg because its stream is an error, which may blame the client's request. Args: `error`: as JSON."""
        self.status, self._parts = error_status(error), [error]
        self.headers = [(b"content-type", b"application/json")]
        self.on_failed(status_failure(self.kind, self.who, self.status, error, in_stream=True))

    def _measured_s(self, now: float) -> float | None:
        """Return the transfer time; None if the engine measures it itself or the request waited in a queue."""
        engine = self.engine
        if not engine.measures or not self.transferring or self.decision.kv_bytes < _MEASURABLE_BYTES:
            return None
        seconds = now - self.sent_at - self.expected.step_s
        with_prefill = engine.protocol.concurrent_legs or self.early
        return seconds if self.expected.queue_s == 0.0 and seconds > 0.0 and not with_prefill else None

    def on_response(self, now: float) -> None:
        """See `Leg`."""
        if self.streams:
            self._stream_ended()
        else:
            self._collected(now)

    def _collected(self, now: float) -> None:
        runtime, exchange = self.state.runtime, self.state.exchange
        self._answered(now)
        self._transfer_done(NOT_OBSERVED, now)
        runtime.reports.whole_answer(self.decision, now)
        content_type, headers = answered(self.headers)
        headers += self.state.response_headers
        body = self.body()
        self.close()
        exchange.respond(self.status, body, content_type, headers)
        self.owner.on_response_end(self, usage_of(body), now)

    def _stream_ended(self) -> None:
        rest, self._held = self._held, b""
        if rest:
            self._relay(rest)
            if not self.open:
                return  # the rest was an error
        if self.first:
            self._abandon_stream("malformed", "ended the stream before its first token")
            return
        self.close()
        self._writer.end()
        self.owner.on_response_end(self, self.usage(), self.state.runtime.now())

    def usage(self) -> TokenUsage:
        """Return the tokens of the stream so far: reported by the engine, or else estimated."""
        output, record, engine = self.output, self.state.record, self.engine
        usage = output.usage
        if usage is None and record is not None and record.tokens:
            return TokenUsage(None, record.tokens)
        tokens = output.tokens(engine.tokens_per_event)
        if usage is not None and output.complete:
            engine.learn_tokens_per_event(tokens, output.events)
        return TokenUsage(usage.prompt_tokens if usage is not None else None, tokens)

    @property
    def complete(self) -> bool:
        """See `DecodeLeg`."""
        return self.output.complete and not self._writer.paused

    def abort_stream(self, why: str, kind: str = UPSTREAM) -> None:
        """End the stream with an error event that gives the reason. The held-back part of an event is dropped."""
        writer = self._writer
        writer.write((b"\n\n" if self._mid_event else b"") + self._format.error(why, kind, self.output.number))
        writer.end()

    def settle(self) -> None:
        """Count what a thread has forwarded until now, and process what it has read: it may be the end."""
        call = self.call
        if call is not None and call.chunks is not None and not call.paused:
            call.pause()
            call.resume()

    def pause(self) -> None:
        """Stop reading from the engine while the client is slow."""
        if self.call is not None and self.open:
            self.call.pause()

    def resume(self) -> None:
        """Read from the engine again, because the client has caught up."""
        if self.call is not None and self.open:
            self.call.resume()


def _after(data: bytes, end: bytes, start: int) -> int:
    """Return the position after the last `end` from `start` on; 0 if there is none."""
    found = data.rfind(end, start)
    return found + len(end) if found >= 0 else 0
