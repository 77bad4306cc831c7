"""The leg that computes the KV cache: waits for the transfer parameters, exchanges them with the decode leg, and
processes the engine's short response."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvroute.gateway.engines.protocols import DialectError, Meeting
from kvroute.gateway.openai_api.responses import cached_tokens
from kvroute.gateway.proxy.leg import Leg
from kvroute.gateway.proxy.prefix_copy_leg import CopyLeg
from kvroute.types import PrefillFailed

if TYPE_CHECKING:
    from msgspec import Raw

    from kvroute.gateway.proxy.request import Journey
    from kvroute.types import Prefill


class PrefillLeg(Leg):
    """Collects the short response of a prefill engine; after its end it still identifies the KV cache's location."""

    __slots__ = ("_early", "copy", "handover", "meeting")

    def __init__(self, journey: Journey, decision: Prefill, now: float, *, early: bool) -> None:
        """Args: `early`: the decode leg is sent at the same time."""
        super().__init__(journey, journey.serving.stations[decision.instance], now)
        self._early = early
        self.copy = CopyLeg(journey, decision, now, self._copied) if decision.copy_from else None
        """Leg that copies a cached prefix before this leg is sent; None: no copy."""
        self.meeting: Meeting | None = None
        self.handover: Raw | None = None
        """Part of the response that is sent to the decode engine."""

    def begin(self, now: float) -> bool:
        """Send the leg, now or when the transfer parameters are known; return False if it has already failed."""
        station = self.station
        meeting = self.meeting = station.meeting(self.journey.serving.draw, early=self._early)
        if meeting is None:
            station.meet(self._met)
            return True
        if self.copy is not None:
            self.copy.begin(self.journey.ids_once(), now)
            return True
        return self._send(meeting, now)

    def _copied(self, prefix: Raw | None, now: float) -> None:
        """Send the leg after the instance that has the prefix offers it or (None) does not."""
        meeting = self.meeting
        assert meeting is not None
        if self.journey.prefill is self and not self.journey.over:
            self._send(meeting, now, prefix)

    def _met(self) -> None:
        """Continue after the response or the failure of the bootstrap server."""
        journey, station = self.journey, self.station
        if journey.prefill is not self or journey.over:
            return
        try:
            now = journey.serving.now()
            meeting = self.meeting = station.meeting(journey.serving.draw)
            if meeting is None and station.out_of_files:
                self.not_sent(now)
                self.out_of_files()
            elif meeting is None:
                self.not_sent(now)
                why = f"the bootstrap server of prefill instance {station.name} does not answer"
                self.lost("refused", why, 502, sent=False)
            else:
                self._send(meeting, now)
        except Exception as error:
            journey.broke(error)

    def _send(self, meeting: Meeting, now: float, prefix: Raw | None = None) -> bool:
        try:
            body = self.station.dialect.prefill_body(self.journey.completion, meeting, prefix)
        except DialectError as error:
            self.not_sent(now)
            self.lost("malformed", f"prefill instance {self.station.name} {error}", 502, sent=False)
            return False
        self.sent_at = now
        self.send(body, self.journey.serving.timeouts.prefill_s, now)
        return True

    def on_body(self, data: bytes) -> None:
        """See `Sink`. SGLang's stream, which duplicates that of the decode engine, is discarded."""
        if self.station.dialect.joint and self.status < 400:
            return
        try:
            if not self.keep(data):
                self.endless()
        except Exception as error:
            self.journey.broke(error)

    def on_end(self) -> None:
        """See `Sink`: the KV cache is complete, unless the response has an error."""
        journey, station = self.journey, self.station
        try:
            if self.status >= 400:
                self.refused()
                return
            body, now = self.body(), journey.serving.now()
            try:
                self.handover = None if station.dialect.joint else station.dialect.handover(body)
            except DialectError as odd:
                self.lost("malformed", f"prefill instance {station.name} {odd}", 502, sent=True)
                return
            self.succeeded(now)
            self.close()
            self._parts.clear()
            if self.copy is not None and not journey.computed:
                self.copy.computed(cached_tokens(body), now)
            journey.serving.metrics.prefill_answered(now - self.sent_at)
            if not (journey.computed or journey.over):  # otherwise the first token of the decode leg came earlier
                journey.compute(station, now)
        except Exception as error:
            journey.broke(error)

    def abort(self, now: float) -> None:
        """See `Leg`."""
        if self.copy is not None:
            self.copy.abort(now)
        super().abort(now)

    def lost(self, kind: str, why: str, status: int, *, sent: bool) -> None:
        """See `Leg`: retry on another prefill instance, if the budget allows. A decode engine that already has the
        early transfer parameters may compute the prompt itself: it continues if no other prefill instance is up."""
        journey = self.journey
        now = journey.serving.now()
        self.station.forget()
        self.failed(kind, why, now)
        if self.copy is not None:
            self.copy.abort(now)
        if journey.computed or journey.over:
            return  # its result is not needed any more
        journey.prefill = None
        alone = self.meeting is not None and self.meeting.early and journey.answer is not None
        if alone and not journey.serving.prefills_elsewhere(self.station):
            journey.uncomputed(now)
            return
        journey.drop_answer(now)
        if journey.may_retry("prefill", now):
            journey.act(journey.serving.decide(PrefillFailed(now, journey.number)), now)
        else:
            journey.fail(status, why, now)
