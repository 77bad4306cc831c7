"""Decides what follows when a step of a request fails: a pure function from the failure and the request's progress to
an action. docs/serve.md lists its cases.

The retry budget is not part of the decision. It is spent when a `Retry` is carried out; without it the request fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

LegKind: TypeAlias = Literal["copy", "prefill", "decode", "passthrough"]
Step: TypeAlias = LegKind | Literal["write"]
"""What can fail: a leg, or with NIXL push the write of the KV cache, which a prefill engine ends after its leg."""

UPSTREAM = "upstream_error"
UNAVAILABLE = "service_unavailable"


@dataclass(frozen=True, slots=True)
class LegFailure:
    """How a leg, or the write of the KV cache, failed."""

    kind: str
    """One word: refused, reset, timeout, malformed, status or out_of_files, for metrics and logs; or process_ended, of
    a write."""
    reason: str
    """One sentence for the client and the log."""
    status: int
    """HTTP status for the client if the request ends with this failure."""
    sent: bool
    """Whether the engine may have acted on the call: a decode engine may have fetched the KV cache, after which the
    prefill engine no longer holds it."""
    detail: str = ""
    """What the engine says, for the client alone: it may quote the prompt, which is never logged."""

    @property
    def message(self) -> str:
        """The message for the client."""
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a request is when one of its steps fails."""

    over: bool = False
    """The client has its response."""
    response_started: bool = False
    """The client has received bytes of the response."""
    prefill_done: bool = False
    """The KV cache is complete."""
    decode_waits: bool = False
    """A decode leg was sent before the KV cache is complete, and its engine may compute the prompt itself."""
    other_prefill: bool = True
    """Another instance that is up can prefill."""
    kv_refetchable: bool = False
    """Another decode engine may fetch the same KV cache once more."""
    decode_final: bool = False
    """A decode leg was sent, and no other one can be."""


@dataclass(frozen=True, slots=True)
class Ignore:
    """There is nothing to do: nothing depends on the step any more, or no other leg can be sent."""


@dataclass(frozen=True, slots=True)
class PrefillWithoutCopy:
    """Compute the whole prompt instead of copying its prefix."""


@dataclass(frozen=True, slots=True)
class DecodeWithoutPrefill:
    """Let the decode engine, which has the request already, compute the prompt."""


@dataclass(frozen=True, slots=True)
class EndStream:
    """End the response with an error event: it has begun, so nothing can be sent again."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Send a leg again, if attempts and retry budget allow; otherwise the request fails with the leg's failure."""

    leg: Literal["prefill", "decode", "passthrough"]
    kv_lost: bool = False
    """The KV cache must be computed again."""
    abort_prefill: bool = False
    """The prefill in progress is of no use to another decode engine."""


@dataclass(frozen=True, slots=True)
class Fail:
    """End the request with an error response."""

    error_kind: str
    """`type` of the error object."""


Action: TypeAlias = Ignore | PrefillWithoutCopy | DecodeWithoutPrefill | EndStream | Retry | Fail


def decide(step: Step, failure: LegFailure, progress: Progress) -> Action:
    """Return what follows when `step` fails."""
    out_of_files = failure.kind == "out_of_files"
    if step == "copy" and not out_of_files:
        return PrefillWithoutCopy()
    if progress.over or (step == "prefill" and progress.prefill_done):
        return Ignore()
    if out_of_files:
        return Fail(UNAVAILABLE)
    if step == "write":
        return Ignore() if progress.decode_final else Retry("decode", kv_lost=failure.sent)
    if step == "prefill":
        if progress.decode_waits and not progress.other_prefill:
            return DecodeWithoutPrefill()
        return Fail(UPSTREAM) if progress.decode_final else Retry("prefill")
    if progress.response_started:
        return EndStream()
    if step == "passthrough":
        return Retry("passthrough")
    if progress.decode_final:
        return Fail(UPSTREAM)
    kv_lost = failure.sent and not (failure.kind == "reset" and progress.kv_refetchable)
    abort_prefill = not progress.prefill_done and (kv_lost or not progress.decode_waits)
    return Retry("decode", kv_lost, abort_prefill)
