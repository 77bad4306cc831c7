"""Counts what a stream has brought to its client: events, tokens, and whether it is complete."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvroute.serve.api.streams import DONE_CHUNK, USAGE_MARK, StreamFormat, reported

if TYPE_CHECKING:
    from kvroute.http.forwarding.stream_forwarder import Forwarded
    from kvroute.serve.api.responses import TokenUsage

_EVENT_DATA = b"\ndata:"


class StreamOutput:
    """The output of one stream. An engine that reports its tokens is believed; otherwise each event with a token counts
    as `tokens_per_event`."""

    __slots__ = (
        "_events_before",
        "_format",
        "_hidden",
        "_reports",
        "_several",
        "complete",
        "events",
        "number",
        "usage",
    )

    def __init__(self, format: StreamFormat, *, hidden: bool, several: bool) -> None:
        """Args:

        format: of its events.
        hidden: whether the client has not asked for the usage that its events report.
        several: whether the stream has several choices, of each of which a usage within the stream may report.
        """
        self._format, self._hidden, self._several = format, hidden, several
        self.events = self.number = 0
        """`events`: with a token; `number`: of the next event, in the format that has numbers."""
        self.usage: TokenUsage | None = None
        """The last usage that was reported."""
        self.complete = False
        """The event that ends a complete stream has been relayed."""
        self._reports = self._events_before = 0
        """Number of reports, and of events before the last one."""

    @property
    def continuous(self) -> bool:
        """Whether each event reports the usage."""
        return self._reports > 1

    def relayed(self, data: bytes, first: int = 0) -> bytes:
        """Count whole events and return them as the client gets them. Args: `first`: where the first event with a token
        begins, or one after it."""
        self.events += self._format.tokens(data[first:] if first else data)
        if USAGE_MARK in data:
            usage, data = reported(data, hidden=self._hidden)
            if usage is not None:
                self.usage, self._events_before = usage, self.events
                self._reports += 1
        if self._format.preamble:
            self.number += data.count(_EVENT_DATA)
        if not self.complete:
            self.complete = self._format.ended(data)
        return data

    def count_chunk(self, chunk: bytes) -> None:
        """Count a chunk of whole events without `USAGE_MARK`, with its framing."""
        if self._format.preamble:
            tokens = self._format.token_lines(chunk)
            self.number += chunk.count(_EVENT_DATA)
            self.complete = self.complete or (not tokens and self._format.ended(chunk))
            self.events += tokens
        elif chunk.endswith(DONE_CHUNK):
            self.complete = True
            self.events += chunk.count(_EVENT_DATA) - 1
        else:
            self.events += chunk.count(_EVENT_DATA)

    def count_forwarded(self, result: Forwarded) -> None:
        """Count the chunks that a thread has forwarded."""
        if self._format.preamble:
            self.events += result.token_lines
            self.number += result.data_lines
        else:
            self.events += result.data_lines - result.done
            self.complete = self.complete or result.done > 0

    def tokens(self, tokens_per_event: float) -> int:
        """Return the number of output tokens so far. What a complete stream reports is exact."""
        usage = self.usage
        if usage is None or usage.output_tokens is None:
            return round(self.events * tokens_per_event)
        if self.complete:
            return usage.output_tokens
        if self._several:
            return max(usage.output_tokens, self.events)
        return usage.output_tokens + round((self.events - self._events_before) * tokens_per_event)
