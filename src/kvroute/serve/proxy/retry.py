"""Decides what a failure means: what follows, whether it counts against an instance, and what the client receives.

Pure functions of the failure, the status of the engine's response among it, and of the request's progress. No other
code judges the status of a response to a client's request. docs/serve.md lists the cases. Statuses are of three groups:

| Status | Next | Counts against the instance | Response if no retry is left |
|---|---|---|---|
| 4xx but 429, and 501 | nothing: the client gets the response (`PassOn`) | no | as it is |
| 429, 503 (`FULL`): the engine has not begun | a retry; the KV cache stays as it is | 503 does | 503, Retry-After |
| any other 5xx | a retry; a decode engine may have fetched the KV cache | yes | 502 |

The retry budget is not part of the decision. It is spent when a `Retry` is carried out; without it the request fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from kvroute.serve.api.responses import error_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvroute.http.headers import Headers
    from kvroute.serve.engines.breaker import Cause

LegKind: TypeAlias = Literal["copy", "prefill", "decode", "passthrough"]
Step: TypeAlias = LegKind | Literal["write"]
"""What can fail: a leg, or with NIXL push the write of the KV cache, which a prefill engine ends after its leg."""

UPSTREAM = "upstream_error"
UNAVAILABLE = "service_unavailable"
FULL = frozenset((429, 503))
"""Statuses of an engine that is full or starts up; it has not touched the KV cache. With them as the status of a
response, the client may try again later (Retry-After)."""
_VERBS = {
    "refused": "refused the connection",
    "reset": "closed the connection",
    "timeout": "did not respond in time",
    "malformed": "sent an invalid HTTP response",
}
RETRY_AFTER_MAX_S = 60
SKIPPED = 503
"""What counts as the response of an endpoint after which Envoy has tried the next one. Envoy does not say whether it
has refused the connection or was full, and this status counts less than a refused connection."""
_FAILURE_STATUS = {"timeout": 504, "out_of_files": 503}
"""Status of the response by kind of failure; others: 502."""
_UNCERTAIN: Mapping[str, Cause] = {"status": "error", "reset": "no_answer", "malformed": "no_answer"}
"""Kinds of failures that the request may have caused, and as what they count if another attempt succeeds."""


def passes_on(status: int) -> bool:
    """Whether an error of an engine is for the client, because another engine would respond with it too: a 4xx but 429,
    and 501, which reports a missing feature."""
    return (400 <= status < 500 and status != 429) or status == 501


def free_of_charge(status: int) -> bool:
    """Whether a request with this response does not count against the rates of its key: the gateway or the engines have
    failed it."""
    return status == 429 or status >= 500


def retry_after(status: int, seconds: int = 1) -> Headers:
    """Return the Retry-After header of a response of the gateway, if it has one. Args: `seconds`: its value."""
    return [(b"retry-after", b"%d" % seconds)] if status in FULL else []


@dataclass(frozen=True, slots=True)
class LegFailure:
    """How a leg, or the write of the KV cache, failed."""

    kind: str
    """One word: refused, reset, timeout, malformed, status or out_of_files, for metrics and logs; or process_ended, of
    a write; or not_sent, if a proxy between the gateway and the engine has responded."""
    reason: str
    """One sentence for the client and the log."""
    status: int
    """HTTP status for the client if the request ends with this failure."""
    sent: bool
    """Whether the engine may have acted on the call: a decode engine may have fetched the KV cache, after which the
    prefill engine no longer holds it."""
    detail: str = ""
    """What the engine says, for the client alone: it may quote the prompt, which is never logged."""
    engine_status: int = 0
    """Status of the engine's response, for the kind "status"."""
    passed_on: bool = False
    """Whether the client gets the engine's own response."""
    retry_after_s: int = 1
    """Time after which the client may try again, if the status of its response allows that."""

    @property
    def message(self) -> str:
        """The message for the client."""
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


def status_failure(
    leg: LegKind,
    who: str,
    status: int,
    body: bytes,
    headers: Sequence[tuple[bytes, bytes]] = (),
    *,
    in_stream: bool = False,
) -> LegFailure:
    """Return the failure that an engine's error response is.

    Args:
        leg: kind of the leg. A copy is a request of the gateway's own, so that its error is not for the client.
        who: the instance, for the reason.
        status: of the response, 400 or more; 0: an error event does not say it.
        body: of the response.
        headers: of the response, whose Retry-After the client gets if it is a number of seconds.
        in_stream: whether a stream with status 200 begins with the error: its engine may have fetched the KV cache.
    """
    full = status in FULL
    why = f"{who} failed before the first token" if in_stream else f"{who} returned status {status}"
    if passes_on(status) and leg != "copy":
        return LegFailure("status", why, status, False, error_text(body), status, passed_on=True)
    response, sent = 503 if full else 502, in_stream or not full
    return LegFailure("status", why, response, sent, error_text(body), status, retry_after_s=_wait_s(headers))


def _wait_s(headers: Sequence[tuple[bytes, bytes]]) -> int:
    text = next((value for name, value in headers if name == b"retry-after"), b"")
    digits = text if text.isdigit() and len(text) < 16 else b"1"
    return min(max(int(digits), 1), RETRY_AFTER_MAX_S)


def call_failure(who: str, kind: str, *, sent: bool, text: str = "") -> LegFailure:
    """Return the failure of a call without a whole response.

    Args:
        who: the instance, for the reason.
        kind: see `LegFailure`.
        sent: see `LegFailure`.
        text: what is invalid about the response, for the kind "malformed".
    """
    if kind == "out_of_files":
        reason = f"the gateway has no file descriptor left to connect to {who}"
    else:
        reason = f"{who} {_VERBS[kind]}" + (f": {text}" if kind == "malformed" else "")
    return LegFailure(kind, reason, _FAILURE_STATUS.get(kind, 502), sent)


def proxy_failure(who: str, status: int) -> LegFailure:
    """Return the failure that an error response of Envoy itself is, to a call that no engine has received.

    Args:
        who: the instance to which the call was to go, for the reason.
        status: of the response, 400 or more. A filter of Envoy, or a path that its routes lack, is no engine's fault.
    """
    if passes_on(status) or status == 429:
        return LegFailure("not_sent", f"Envoy returned status {status}", status, sent=False, passed_on=True)
    return LegFailure("refused", f"Envoy reached no endpoint of {who}", status, sent=False)


@dataclass(frozen=True, slots=True)
class Blame:
    """What counts the failure of a leg, which ends its attempt."""

    verdict: Literal["answered", "nothing", "instance", "path"]
    """"answered": the instance has responded, which is a success. "nothing": neither a success nor a failure.
    "instance": a failure of the instance. "path": one of the path between datacenters."""
    uncertain: bool = False
    """Whether the request may have caused the failure (see `FaultAttribution`)."""
    proven: Cause = "no_answer"
    """The cause as which the failure counts once another attempt succeeds."""


def record_failure(leg: LegKind, failure: LegFailure, *, over_path: bool = False) -> Blame:
    """Return what counts the failure of a leg.

    Args:
        leg: kind of the leg.
        failure: how it failed.
        over_path: whether the KV cache is on its way from another datacenter.
    """
    kind, status = failure.kind, failure.engine_status
    if kind in ("out_of_files", "not_sent"):
        return Blame("nothing")
    if leg == "copy" and (kind == "timeout" or passes_on(status)):
        return Blame("nothing")  # the queue is too long for a copy, or the engine does not support copies
    if kind == "status" and (failure.passed_on or status == 429):
        return Blame("answered")
    cause = _UNCERTAIN.get(kind)
    if over_path and leg == "decode" and (kind == "timeout" or (kind == "status" and status not in FULL)):
        # A reachable decode engine does not respond: the KV cache has most likely not arrived.
        return Blame("path", kind == "status")
    return Blame("instance", cause is not None, cause or "no_answer")


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
    decode_not_resendable: bool = False
    """A decode or passthrough leg was sent, and no other one can be."""


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
class PassOn:
    """Send the engine's error response to the client."""


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


Action: TypeAlias = Ignore | PrefillWithoutCopy | DecodeWithoutPrefill | EndStream | PassOn | Retry | Fail


def decide(step: Step, failure: LegFailure, progress: Progress) -> Action:
    """Return what follows when `step` fails."""
    out_of_files = failure.kind == "out_of_files"
    if step == "copy" and not out_of_files:
        return PrefillWithoutCopy()
    if progress.over or (step == "prefill" and progress.prefill_done):
        return Ignore()
    if out_of_files:
        return Fail(UNAVAILABLE)
    if failure.passed_on and not progress.response_started:
        return PassOn()
    if step == "write":
        return Ignore() if progress.decode_not_resendable else Retry("decode", kv_lost=failure.sent)
    if step == "prefill":
        if progress.decode_waits and not progress.other_prefill:
            return DecodeWithoutPrefill()
        return Fail(UPSTREAM) if progress.decode_not_resendable else Retry("prefill")
    if progress.response_started:
        return EndStream()
    if progress.decode_not_resendable:
        return Fail(UPSTREAM)
    if step == "passthrough":
        return Retry("passthrough")
    kv_lost = failure.sent and not (failure.kind == "reset" and progress.kv_refetchable)
    abort_prefill = not progress.prefill_done and (kv_lost or not progress.decode_waits)
    return Retry("decode", kv_lost, abort_prefill)
