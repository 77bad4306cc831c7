"""The legs of one completion: sends those that the core decides on, and releases what they hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias

from msgspec import structs

from kvroute.serve.api.requests import without_body
from kvroute.serve.engines.pd_protocol import ProtocolError
from kvroute.serve.proxy.legs.abandoned import waits_for_write
from kvroute.serve.proxy.legs.decode_leg import DecodeLeg, DecodeOwner
from kvroute.serve.proxy.legs.prefill_leg import PrefillLeg, PrefillOwner
from kvroute.serve.proxy.legs.relayed_decode import RelayedDecodeLeg
from kvroute.serve.proxy.request_state import RequestState
from kvroute.serve.proxy.retry import Progress
from kvroute.types import Decision, Decode, Prefill, ReadKv, Reject

if TYPE_CHECKING:
    from kvroute.serve.proxy.legs.leg import Leg

MakeDecodeLeg: TypeAlias = Callable[[RequestState, DecodeOwner, Decode, PrefillLeg | None, float], DecodeLeg]
"""Makes the decode leg of a decision; the arguments are those of `DecodeLeg`."""


class LegsOwner(PrefillOwner, DecodeOwner, Protocol):
    """Receives the reports of the legs, and the reasons why there is none."""

    def on_reject(self, reject: Reject, now: float) -> None:
        """Handle a request that no instance can serve."""

    def on_unsendable(self, why: str, now: float) -> None:
        """Handle a decode leg that cannot be sent."""

    def on_nothing_to_fetch(self, now: float) -> None:
        """Handle an abandoned request without a KV cache."""


class RequestLegs:
    """At most one leg for prefill and one for decode at a time."""

    __slots__ = ("_both_on_arrival", "_make", "_owner", "decode", "generated_tokens", "ids", "prefill", "state")
    _owner: LegsOwner

    def __init__(self, state: RequestState, owner: LegsOwner, make: MakeDecodeLeg, *, both_on_arrival: bool) -> None:
        """Args:

        state: facts of the request.
        owner: receives reports until `close`.
        make: makes the leg that decodes.
        both_on_arrival: whether the decode instance orders the prefill, so that there is no prefill leg.
        """
        self.state, self._owner, self._make, self._both_on_arrival = state, owner, make, both_on_arrival
        self.prefill: PrefillLeg | None = None
        """The leg that computes the KV cache, or has computed it."""
        self.decode: DecodeLeg | None = None
        self.ids: list[int] | None = None
        """The prompt's tokens, if its prefix may be copied from another instance or read from the store."""
        self.generated_tokens = 0
        """Output tokens that legs have relayed before they were dropped."""

    @property
    def relayed(self) -> bool:
        """Whether responses are relayed here."""
        return self._make is RelayedDecodeLeg

    def carry_out(self, decisions: tuple[Decision, ...], now: float) -> None:
        """Send the legs that the core has decided on."""
        if not decisions:
            return
        first, last = decisions[0], decisions[-1]
        if self._both_on_arrival and type(first) is Prefill:
            self.state.runtime.state.decided(first, now)
            first = last
        if type(first) is Prefill and type(last) is ReadKv:
            self._send_prefill(first, now, early=False, read=last)
        elif type(first) is Prefill and (first is last or (type(last) is Decode and last.source != last.target)):
            # If sending fails at once, the retry has already started or the request is over.
            if self._send_prefill(first, now, early=first is not last) and type(last) is Decode:
                self._send_decode(last, now)
        elif type(last) is Decode:
            self._send_decode(last, now)
        elif type(last) is Reject:
            self._owner.on_reject(last, now)

    def _send_prefill(self, decision: Prefill, now: float, *, early: bool, read: ReadKv | None = None) -> bool:
        dashboard = self.state.runtime.state
        dashboard.decided(decision, now)
        if read is not None:
            dashboard.decided(read, now)
        self._start_path_attempt(decision, now)
        self.state.aggregated = False
        leg = self.prefill = PrefillLeg(self.state, self._owner, decision, now, early=early, read=read)
        # If an attempt with a prefix copy or with blocks from the store fails, the retry uses neither.
        prepared = decision.copy_from or read is not None
        ids, self.ids = (self.ids, None) if prepared else (None, self.ids)
        return leg.begin(ids, now)

    def _start_path_attempt(self, decision: Prefill, now: float) -> None:
        """Begin a new path attempt if the prefill is in another datacenter; an unfinished attempt does not count."""
        state = self.state
        if state.path_attempt is not None:
            state.path_attempt.cancelled(now)
        wan_paths, counted = state.runtime.wan_paths, state.faults is None
        state.path_attempt = wan_paths.start_attempt(decision, now, counted=counted) if wan_paths is not None else None

    def _send_decode(self, decision: Decode, now: float) -> None:
        state = self.state
        if state.aggregated and state.abandoned:
            self._owner.on_nothing_to_fetch(now)
            return
        if state.aggregated:
            decision = structs.replace(decision, source=decision.target, tier=0, kv_bytes=0.0)
        state.runtime.state.decided(decision, now)
        make = RelayedDecodeLeg if state.abandoned else self._make
        leg = self.decode = make(state, self._owner, decision, self.prefill, now)
        if leg.aggregated:
            self.prefill = None
        if not leg.waits:
            self.begin_decode(leg, now)

    def begin_decode(self, leg: DecodeLeg, now: float) -> None:
        """Send a decode leg whose KV cache can be reached."""
        try:
            leg.begin(now)
        except ProtocolError as error:
            self._owner.on_unsendable(f"prefill instance {leg.decision.source} {error}", now)

    def replace_decode(self, now: float) -> None:
        """Replace a decode leg that is not sent yet by one that needs no more than the KV cache."""
        if self.decode is not None:
            self.decode = RelayedDecodeLeg(self.state, self._owner, self.decode.decision, self.prefill, now)

    # What they hold

    def drop(self, now: float) -> None:
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
            self.generated_tokens += leg.usage().output_tokens or 0

    def release_kept(self) -> None:
        """Release the KV in the buffer of a decode node whose decode instance does not need it any more."""
        if self.prefill is not None and self.prefill.storage_read is not None:
            self.prefill.storage_read.release_kept()

    def release_body(self) -> None:
        """Release the request's body and its copies: nothing is sent again."""
        self.state.completion = without_body(self.state.completion)
        for leg in (self.prefill, self.decode):
            if leg is not None and leg.call is not None:
                leg.call.forget_request()
        self.state.exchange.release_body()

    def close(self) -> None:
        """Forget the legs, which have ended, and the owner, to break the reference cycle with it."""
        self.release_kept()
        self.prefill = self.decode = None
        del self._owner

    # What depends on them

    def progress(self, leg: Leg) -> Progress:
        """Return how far the request is, as far as the consequences of this leg's failure depend on it."""
        state, decode = self.state, self.decode
        waits, elsewhere, refetchable = False, True, False
        final = decode is not None and decode.not_resendable
        if leg is self.prefill:
            waits = decode is not None and decode.early
            elsewhere = not waits or state.runtime.prefills_elsewhere(leg.engine)
        elif decode is not None and leg is decode:
            waits, refetchable = decode.early, decode.kv_refetchable()
        return Progress(state.over, state.exchange.started, state.prefill_done, waits, elsewhere, refetchable, final)

    def use(self, name: str) -> bool:
        """Return whether a leg is in progress on an instance, or needs the KV cache that it holds."""
        prefill, decode = self.prefill, self.decode
        if decode is not None and decode.engine.name == name:
            return True
        if prefill is None or prefill.engine.name != name:
            return False
        return decode is None or not self.state.runtime.control.admitted(self.state.number)

    def transfer(self, source: str, target: str) -> bool:
        """Return whether the KV cache crosses from one instance to the other."""
        leg = self.decode
        return leg is not None and leg.transferring and (leg.decision.source, leg.decision.target) == (source, target)

    def waiting_for_write_of(self, name: str) -> DecodeLeg | None:
        """Return the decode leg whose engine waits for what this prefill instance writes; None: none does.

        If the prefill is in progress, its leg fails by itself. A response that comes whole does not show whether the
        KV cache has arrived, so it is taken as not arrived."""
        state, prefill, decode = self.state, self.prefill, self.decode
        if prefill is None or decode is None or prefill.engine.name != name:
            return None
        if not (state.prefill_done and waits_for_write(prefill, decode)):
            return None
        return None if decode.streams and state.runtime.control.admitted(state.number) else decode
