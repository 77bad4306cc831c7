"""The leg that computes the KV cache: waits for the transfer parameters, exchanges them with the decode leg, and
processes the engine's short response."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvroute.serve.api.requests import LATER_SPLIT
from kvroute.serve.api.responses import cached_tokens
from kvroute.serve.engines.pd_protocol import KvHandshake, NoTransferParams, ProtocolError
from kvroute.serve.proxy.legs.leg import Leg, LegOwner
from kvroute.serve.proxy.legs.prefix_copy_leg import PrefixCopyLeg
from kvroute.serve.proxy.legs.storage_read import StorageRead
from kvroute.serve.proxy.retry import LegFailure, call_failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from msgspec import Raw

    from kvroute.serve.engines.client import EngineClient
    from kvroute.serve.proxy.request_state import RequestState
    from kvroute.types import Prefill, ReadKv


class PrefillOwner(LegOwner, Protocol):
    """Receives the outcome of a prefill."""

    def on_prefill_done(self, engine: EngineClient, now: float) -> None:
        """Record that the KV cache is complete on `engine`."""

    def on_no_transfer_params(self, leg: PrefillLeg) -> None:
        """Record that the response contains no transfer parameters, so that the decode instance computes the prompt;
        `on_prefill_done` follows."""


class PrefillLeg(Leg):
    """Collects the short response of a prefill engine; after its end it still identifies the KV cache's location."""

    __slots__ = ("_early", "copy", "handshake", "owner", "storage_read", "transfer_params")
    owner: PrefillOwner
    state: RequestState

    def __init__(
        self,
        state: RequestState,
        owner: PrefillOwner,
        decision: Prefill,
        now: float,
        *,
        early: bool,
        read: ReadKv | None = None,
    ) -> None:
        """Args: `early`: the decode leg is sent at the same time. `read`: blocks to read from the store before."""
        super().__init__(state, owner, state.runtime.engines[decision.instance], now)
        self._early = early
        self.copy = PrefixCopyLeg(state, owner, decision, now, self._copied) if decision.copy_from else None
        """Leg that copies a cached prefix before this leg is sent; None: no copy."""
        self.storage_read = StorageRead(state, read, self._staged) if read is not None else None
        """Read of cached KV from the store before this leg is sent; None: nothing is read."""
        self.handshake: KvHandshake | None = None
        self.transfer_params: Raw | None = None
        """Part of the response that is sent to the decode engine."""

    def begin(self, ids: Sequence[int] | None, now: float) -> bool:
        """Send the leg, now or when the transfer parameters are known; return False if it has already failed.

        Args:
            ids: the prompt's tokens; None: its prefix is neither copied nor read from the store.
            now: time, gateway clock.
        """
        engine = self.engine
        handshake = self.handshake = engine.handshake(self.state.runtime.draw, early=self._early)
        if handshake is None:
            engine.resolve_engine_id(self._bootstrap_done)
            return True
        if self.copy is not None:
            self.copy.begin(ids, now)
            return True
        if self.storage_read is not None:
            self.storage_read.begin(ids, now)
            return True
        return self._send(handshake, now)

    def _copied(self, prefix: Raw | None, now: float) -> None:
        """Send the leg after the instance that has the prefix offers it or (None) does not."""
        handshake = self.handshake
        assert handshake is not None
        if not (self.dropped or self.state.over):
            self._send(handshake, now, prefix)

    def _staged(self, storage: Raw | None, now: float) -> None:
        """Send the leg after the blocks are in buffers, or (None) cannot be read."""
        try:
            assert self.handshake is not None
            if not (self.dropped or self.state.over):
                self._send(self.handshake, now, storage=storage)
        except Exception as error:
            self.owner.internal_error(error)

    def _bootstrap_done(self) -> None:
        """Continue after the response or the failure of the bootstrap server."""
        runtime, engine = self.state.runtime, self.engine
        if self.dropped or self.state.over:
            return
        try:
            now = runtime.now()
            handshake = self.handshake = engine.handshake(runtime.draw)
            if handshake is None and engine.out_of_files:
                self.not_sent(now)
                self.on_failed(call_failure(self.who, "out_of_files", sent=False))
            elif handshake is None:
                self.not_sent(now)
                why = f"the bootstrap server of prefill instance {engine.name} does not respond"
                self.on_failed(LegFailure("refused", why, 502, sent=False))
            else:
                self._send(handshake, now)
        except Exception as error:
            self.owner.internal_error(error)

    def _send(self, handshake: KvHandshake, now: float, prefix: Raw | None = None, storage: Raw | None = None) -> bool:
        try:
            body = self.engine.protocol.prefill_body(self.state.completion, handshake, prefix, storage)
        except ProtocolError as error:
            self.not_sent(now)
            self.on_failed(LegFailure("malformed", f"{self.who} {error}", 502, sent=False))
            return False
        self.sent_at = now
        self.send(body, self.state.runtime.settings.timeouts.prefill_s, now)
        return True

    def head(self) -> bytes:
        """See `Leg`."""
        return self.state.head_of(self.handshake)

    def on_body(self, data: bytes) -> None:
        """See `ResponseHandler`. SGLang's stream, which duplicates that of the decode engine, is discarded."""
        protocol = self.engine.protocol
        if protocol.returns_params or not protocol.concurrent_legs or self.status >= 400:
            super().on_body(data)

    def on_response(self, now: float) -> None:
        """See `Leg`: the KV cache is complete."""
        state, body = self.state, self.body()
        try:
            self.transfer_params = self._params_of(body)
        except NoTransferParams as odd:
            # If the decode leg was sent early, its engine already waits for the KV cache.
            if self._early or state.prefill_done or state.completion.kind not in LATER_SPLIT:
                self.on_failed(LegFailure("malformed", f"{self.who} {odd}", 502, sent=True))
                return
            self.owner.on_no_transfer_params(self)
        except ProtocolError as odd:
            self.on_failed(LegFailure("malformed", f"{self.who} {odd}", 502, sent=True))
            return
        if self.storage_read is not None:
            self.storage_read.prefilled(self.transfer_params)
        super().on_response(now)
        self._parts.clear()
        if self.copy is not None and not state.prefill_done:
            self.copy.computed(cached_tokens(body), now)
        state.runtime.metrics.prefill_answered(now - self.sent_at)
        if not (state.prefill_done or state.over):  # otherwise the first token of the decode leg came earlier
            self.owner.on_prefill_done(self.engine, now)

    def _params_of(self, body: bytes) -> Raw | None:
        """Return the transfer parameters of the response; its engine client learns how the engine is reached.

        Raises:
            NoTransferParams: the response is valid, but has none.
            ProtocolError: the response is invalid, or the decode engine has registered with a process that is gone.
        """
        engine, handshake = self.engine, self.handshake
        protocol = engine.protocol
        if not protocol.returns_params:
            return None
        params = protocol.transfer_params(body)
        engine.peer = protocol.peer(params)
        assert handshake is not None
        if handshake.peer is not None and handshake.peer != engine.peer:
            raise ProtocolError("has restarted or has several engines, so the decode engine waits for another engine")
        return params

    def abort(self, now: float) -> None:
        """See `Leg`."""
        self._abort_preparation(now)
        super().abort(now)

    def _abort_preparation(self, now: float) -> None:
        """End the copy or the read that precedes the leg, and release what it holds."""
        if self.copy is not None:
            self.copy.abort(now)
        if self.storage_read is not None:
            self.storage_read.abort(now)

    def failed(self, failure: LegFailure, now: float) -> None:
        """See Leg. The engine may have restarted, so its id is requested again."""
        if not (failure.passed_on or failure.kind == "out_of_files"):
            self.engine.forget_engine_id()
        super().failed(failure, now)
        self._abort_preparation(now)
