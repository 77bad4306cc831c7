"""A request whose client has left goes on until a decode engine has fetched its KV cache, or for a limited time.

A prefill engine keeps the KV cache of a prompt from the end of the prefill until a decode engine has fetched it.
Without a decode leg it would stay until it expires on the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvroute.serve.proxy.legs.decode_leg import DecodeLeg
    from kvroute.serve.proxy.legs.prefill_leg import PrefillLeg
    from kvroute.serve.proxy.request_state import RequestState

SETTLE_S = 1.0
"""Time, in seconds, after which an abandoned decode without streaming is aborted. It runs from the client's disconnect
or from the predicted end of the transfer, whichever is later: such a response does not show when the transfer ends."""


def leaves_unfetched_kv(state: RequestState, prefill: PrefillLeg | None, decode: DecodeLeg | None, now: float) -> bool:
    """Return whether a KV cache would stay on the prefill engine until it expires if all legs were aborted now.

    It is False while the prefill is expected to take longer than `timeouts.abandoned`: then it is aborted, unless a
    decode engine waits for what it writes.
    """
    runtime = state.runtime
    most_s = runtime.settings.timeouts.abandoned_s
    if prefill is None or not most_s:
        return False
    if prefill.engine.protocol.concurrent_legs and not prefill.engine.instance.traits.writes_kv:
        return False  # its engines release the KV cache themselves
    if not state.prefill_done:
        if decode is not None and waits_for_write(prefill, decode):
            return prefill.call is not None
        return prefill.call is not None and runtime.control.prefill_left_s(state.number, now) <= most_s
    return decode is not None and decode.call is not None and (decode.transferring or not decode.streams)


def waits_for_write(prefill: PrefillLeg, decode: DecodeLeg) -> bool:
    """Return whether a decode engine holds blocks that only a write of the prefill engine releases, as with NIXL push.

    It is only meaningful until the KV cache has arrived.
    """
    return prefill.engine.instance.traits.writes_kv and decode.open


class AbandonedLimit:
    """Ends an abandoned request at the earliest of the times that it was given."""

    __slots__ = ("_end", "_timer")

    def __init__(self, end: Callable[[], None]) -> None:
        """`end` is called once, on the event loop; it raises no exception."""
        self._end = end
        self._timer: asyncio.TimerHandle | None = None

    def end_after(self, seconds: float) -> None:
        """End the request after this time, or at the time of an earlier call if that is sooner."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + seconds
        if self._timer is not None and self._timer.when() <= due_s:
            return
        self.cancel()
        self._timer = loop.call_at(due_s, self._end)

    def cancel(self) -> None:
        """Forget the limit."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
