"""The leg that precedes a prefill with a copied prefix: the instance that has the prefix cached is to offer it.

That instance computes one token only, and the prefill instance fetches the prefix from it. A failure costs only time:
the prompt is then computed without the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from kvroute.serve.engines.pd_protocol import ProtocolError
from kvroute.serve.proxy.legs.leg import Leg, LegOwner
from kvroute.serve.proxy.retry import LegFailure

if TYPE_CHECKING:
    from msgspec import Raw

    from kvroute.serve.api.requests import Completion
    from kvroute.serve.proxy.expected_transfers import ExpectedEnd
    from kvroute.serve.proxy.request_state import RequestState
    from kvroute.types import Prefill

Outcome: TypeAlias = Literal["landed", "missed", "failed", "given_up", "left_out"]
"""Result of a copy. "landed" and "missed": the prefix was or was not cached at the prefill instance when the prompt was
computed. "failed": the instance that has the prefix did not offer it. "given_up": the prefill was aborted or failed.
"left_out": the copy was not requested, because the gateway has no token ids of the prompt or an earlier attempt with a
copy failed."""
_PATH = b"/v1/completions"
_KEPT = ("model", "cache_salt")
"""Request fields that are part of an engine's cache key."""


class PrefixCopyLeg(Leg):
    """The request to the instance that has the prefix, and the result of the copy, which the prefill leg reports."""

    __slots__ = ("_expected_end", "_on_end", "_over", "_sent", "decision", "prefix_tokens")
    kind = "copy"
    state: RequestState

    def __init__(
        self,
        state: RequestState,
        owner: LegOwner,
        decision: Prefill,
        now: float,
        on_end: Callable[[Raw | None, float], None],
    ) -> None:
        """Args: `on_end` receives the transfer parameters for the prefill leg, or None if there will be no copy."""
        super().__init__(state, owner, state.runtime.engines[decision.copy_from], now)
        self.decision = decision
        self._expected_end: ExpectedEnd | None = None
        self.prefix_tokens = 0
        """Number of tokens to copy: whole blocks."""
        self._on_end: Callable[[Raw | None, float], None] | None = on_end
        """None once it has been called or the copy is over, to break the reference cycle with the prefill leg."""
        self._over = False
        """The outcome is counted."""
        self._sent = False
        """The prefill instance fetches the prefix, or is about to."""

    def begin(self, ids: Sequence[int] | None, now: float) -> None:
        """Send the leg. Args: `ids` are the prompt's tokens; None: the prefix is not copied."""
        request, offload = self.state.request, self.state.runtime.settings.offload
        assert request is not None
        self.prefix_tokens = self.decision.cached_tokens // request.block_tokens * request.block_tokens
        if ids is None or offload is None or not self.prefix_tokens:
            self._without("left_out", now)
            return
        self.send(copy_body(self.state.completion, ids[: self.prefix_tokens]), offload.copy_s, now, _PATH)

    def on_response(self, now: float) -> None:
        """See `Leg`: the blocks are ready to be fetched."""
        try:
            prefix = self.engine.protocol.transfer_params(self.body())
        except ProtocolError as odd:
            self.on_failed(LegFailure("malformed", f"{self.who} {odd}", 502, sent=False))
            return
        super().on_response(now)
        self._parts.clear()
        self.state.runtime.metrics.copy_answered(now - self.sent_at)
        self._fetched(now)
        self._answer(prefix, now)

    def continue_without(self, now: float) -> None:
        """After a failure of the leg, let the prompt be computed without the copy."""
        self._without("failed", now)

    def abort(self, now: float) -> None:
        """See Leg: the copy is not needed any more. The event for the failed prefill or the request's end reports this
        to the core."""
        super().abort(now)
        self._on_end = None
        self._end("given_up", now)

    @property
    def who(self) -> str:
        """See `Leg`."""
        return f"prefix copy: instance {self.engine.name}"

    # The result of the copy

    def _without(self, outcome: Outcome, now: float) -> None:
        self._report(now, landed=False)
        self._end(outcome, now)
        self._answer(None, now)

    def _answer(self, prefix: Raw | None, now: float) -> None:
        """Call the prefill leg's callback, once."""
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(prefix, now)

    def _fetched(self, now: float) -> None:
        """Record the start of the transfer, just before the prefill leg is sent, and schedule its expected end."""
        runtime, decision = self.state.runtime, self.decision
        self._sent = True
        offload = decision.offload
        expected_s = offload.terms.get(f"{offload.site}.copy_s", 0.0) if offload is not None else 0.0
        tier = self._tier()
        runtime.metrics.transfer_started(tier)
        runtime.state.copy_started(decision, tier, now, expected_s)
        due_at = max(
            self.sent_at + expected_s, now + runtime.expected_transfers.uncontended_s(tier, decision.copy_bytes)
        )
        self._expected_end = runtime.expected_transfers.expect(due_at, self._transfer_due, now)

    def _transfer_due(self, now: float) -> None:
        """Report the transfer as complete at its expected end, so that later decisions count the link as free."""
        try:
            self._report(now, landed=True)
        except Exception as error:
            self.owner.internal_error(error)

    def computed(self, cached_tokens: int | None, now: float) -> None:
        """Record that the prompt is computed. Args: `cached_tokens` of it, None if the engine does not report them."""
        if self._sent:
            landed = cached_tokens is None or cached_tokens > self.decision.cached_tokens - self.decision.copy_tokens
            self._report(now, landed=landed)
            self._end("landed" if landed else "missed", now)

    def _report(self, now: float, *, landed: bool) -> None:
        """Report the end to the core, which itself ends the copy when the prefill ends."""
        runtime = self.state.runtime
        if runtime.control.copying(self.decision.copy_id):
            runtime.report.copy_finished(self.decision, now, landed=landed)

    def _end(self, outcome: Outcome, now: float) -> None:
        if not self._over:
            self._over = True
            if self._expected_end is not None:
                self._expected_end.cancel()
            runtime, decision, landed = self.state.runtime, self.decision, outcome == "landed"
            tier = self._tier()
            runtime.metrics.copied(outcome, tier, decision.copy_bytes)
            if self._sent:
                runtime.metrics.transfer_ended(tier, decision.copy_bytes, landed)
                runtime.state.transfer_ended(-decision.copy_id, now, landed=landed)

    def _tier(self) -> int:
        cluster = self.state.runtime.cluster
        return int(cluster.tier[cluster.index(self.decision.copy_from), cluster.index(self.decision.instance)])


def copy_body(completion: Completion, tokens: Sequence[int]) -> bytes:
    """Return the body of a completion of one token, whose prompt is `tokens` (ids) and whose KV cache is kept for
    another engine."""
    kept = {name: completion.fields[name] for name in _KEPT if name in completion.fields}
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    added = {"prompt": list(tokens), "stream": False, "max_tokens": 1, "min_tokens": 1, "kv_transfer_params": params}
    return msgspec.json.encode({**kept, **added})
