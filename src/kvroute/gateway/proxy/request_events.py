"""Reports the steps of requests to the control core. No other code creates these events."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from kvroute.types import (
    Admitted,
    Arrived,
    CopyFinished,
    Decision,
    Decode,
    DecodeFailed,
    Event,
    Finished,
    KvStored,
    Prefill,
    PrefillFailed,
    PrefillFinished,
    Request,
    TransferFinished,
    TransferMeasured,
)

Decisions: TypeAlias = tuple[Decision, ...]


class RequestEvents:
    """One method for each step of a request. Methods that return decisions require one; they come in the order in which
    they are to be carried out."""

    __slots__ = ("_decide", "_notify")

    def __init__(self, decide: Callable[[Event], Decisions], notify: Callable[[Event], None]) -> None:
        """Args: `decide` passes an event that requires a decision to the core; `notify` passes any other event."""
        self._decide, self._notify = decide, notify

    def arrived(self, request: Request, now: float) -> Decisions:
        """Report a new request."""
        return self._decide(Arrived(now, request))

    def prefill_finished(self, number: int, now: float) -> Decisions:
        """Report that the KV cache is complete, or that no prefill instance computes it any more."""
        return self._decide(PrefillFinished(now, number))

    def prefill_failed(self, number: int, now: float) -> Decisions:
        """Report that the prefill is to be repeated on another instance."""
        return self._decide(PrefillFailed(now, number))

    def decode_failed(self, number: int, now: float, *, kv_lost: bool) -> Decisions:
        """Report that the decode is to be repeated on another instance. Args: see `retry.Retry`."""
        return self._decide(DecodeFailed(now, number, kv_lost=kv_lost))

    def copy_finished(self, decision: Prefill, now: float, *, landed: bool) -> None:
        """Report the end of the prefix copy of this decision."""
        self._notify(CopyFinished(now, decision.copy_id, landed))

    def transfer_finished(self, number: int, now: float) -> None:
        """Report that the KV cache has reached the decode instance."""
        self._notify(TransferFinished(now, number))

    def transfer_measured(self, decision: Decode, seconds: float, now: float) -> None:
        """Report how long the KV transfer of this decision took."""
        self._notify(TransferMeasured(now, decision.source, decision.target, decision.kv_bytes, seconds))

    def admitted(self, number: int, now: float) -> None:
        """Report that the decode instance has begun to decode the request."""
        self._notify(Admitted(now, number))

    def prefix_stored(self, instance: str, request: Request, now: float) -> None:
        """Report that an instance without KV cache events now has the prompt's prefix in its cache."""
        self._notify(KvStored(now, instance, request.blocks, request.block_tokens))

    def finished(self, number: int, output_tokens: int | None, now: float) -> None:
        """Report the end of a request."""
        self._notify(Finished(now, number, output_tokens=output_tokens))
