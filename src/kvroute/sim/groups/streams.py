"""Layer-wise transfers of prompts whose all-reduces share links, so that the end of their prefill is not known before.

A transfer sends at the rate of production on an idle network, and pauses at the bytes of the slice in progress.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvroute.sim.agenda import Agenda
from kvroute.sim.delivery import Delivery


@dataclass(slots=True, eq=False)
class _Stream:
    """A transfer that streams, or will after the first layer. Shares are of the prompt's KV cache."""

    bytes_per_s: float
    seconds: float
    part: float
    """Share of one slice of one stage."""
    layer: float
    """Share of the last layer, which is sent after the prefill."""
    computed: float = 0.0
    """Slices that have ended."""
    sent: float = 0.0
    """Most that it can have sent until `since_s`."""
    since_s: float = 0.0
    sends: bool = False
    """False while it is paused."""

    @property
    def allowed(self) -> float:
        """Most that it may have sent before the current slice ends."""
        return max(self.computed + self.part - self.layer, 0.0)


@dataclass(slots=True)
class Streams:
    """Transfers of prompts in prefill, by request."""

    agenda: Agenda
    delivery: Delivery
    advance: Callable[[], None]
    watch_stalls: Callable[[], None]
    _streams: dict[int, _Stream] = field(default_factory=dict)

    def plan(self, request: int, kv_bytes: float, seconds: float, layers: int, slices: int) -> None:
        """Plan the stream of a prompt that begins now: it starts at the end of the first layer on an idle network.

        Args:
            request: number of the request.
            kv_bytes: size of the transfer.
            seconds: time of the prefill on an idle network.
            layers: layers of the model.
            slices: slices of the prefill, over all stages.
        """
        if layers > 1 and seconds > 0 and kv_bytes > 0:
            self._streams[request] = _Stream(kv_bytes / seconds, seconds, 1 / slices, 1 / layers)
            self.agenda.at(self.agenda.now + seconds / layers, self._start, request)

    def progressed(self, request: int, computed: float) -> None:
        """Continue a transfer: this share of the prompt is computed."""
        stream = self._streams.get(request)
        if stream is None:
            return
        self._update(stream)
        stream.computed = computed
        if request in self.delivery.streaming:
            self._send_on(request, stream)

    def end(self, request: int) -> None:
        """Forget a transfer whose prefill has ended."""
        self._streams.pop(request, None)

    def _start(self, request: int, _: int) -> None:
        stream = self._streams.get(request)
        if stream is None:
            return
        self.advance()
        self.delivery.send(request, produced_bytes_per_s=stream.bytes_per_s)
        stream.since_s = self.agenda.now
        self._send_on(request, stream)
        self.watch_stalls()

    def _update(self, stream: _Stream) -> None:
        """Count the most that the stream can have sent until now."""
        now = self.agenda.now
        if stream.sends:
            stream.sent = min(stream.sent + (now - stream.since_s) / stream.seconds, stream.allowed)
        stream.since_s = now

    def _send_on(self, request: int, stream: _Stream) -> None:
        """Send up to the bytes of the current slice."""
        left_s = (stream.allowed - stream.sent) * stream.seconds
        stream.sends = left_s > 0
        self._limit(request, stream.bytes_per_s if stream.sends else 0.0)
        if stream.sends:
            self.agenda.at(self.agenda.now + left_s, self._pause, request, round(stream.computed / stream.part))

    def _pause(self, request: int, slices: int) -> None:
        """Pause at the end of what the slice produces, unless that slice has ended."""
        stream = self._streams.get(request)
        if stream is not None and round(stream.computed / stream.part) == slices:
            self._update(stream)
            stream.sends = False
            self._limit(request, 0.0)

    def _limit(self, request: int, bytes_per_s: float) -> None:
        self.advance()
        self.delivery.limit(request, bytes_per_s)
