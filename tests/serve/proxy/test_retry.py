"""The retry table: what follows from each failure, and that docs/serve.md lists the same cases."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.serve.proxy.retry import (
    UNAVAILABLE,
    UPSTREAM,
    Action,
    Blame,
    DecodeWithoutPrefill,
    EndStream,
    Fail,
    Ignore,
    LegFailure,
    LegKind,
    PassOn,
    PrefillWithoutCopy,
    Progress,
    Retry,
    Step,
    call_failure,
    decide,
    free_of_charge,
    proxy_failure,
    record_failure,
    retry_after,
    status_failure,
)

SERVE = (Path(__file__).resolve().parents[3] / "docs" / "serve.md").read_text(encoding="utf-8")
KINDS = ("refused", "reset", "timeout", "malformed", "status", "out_of_files", "process_ended")


def failure(kind: str = "reset", *, sent: bool = True) -> LegFailure:
    return LegFailure(kind, "it failed", 502, sent)


def answer(status: int, leg: LegKind = "decode", *, in_stream: bool = False) -> LegFailure:
    """Return the failure of a leg whose engine has responded with an error."""
    return status_failure(leg, "decode0", status, b"no", in_stream=in_stream)


CASES: dict[str, tuple[Step, LegFailure, Progress, Action]] = {
    "no file descriptor": ("decode", failure("out_of_files", sent=False), Progress(), Fail(UNAVAILABLE)),
    "no file descriptor, the KV cache is complete": (
        "prefill", failure("out_of_files", sent=False), Progress(prefill_done=True), Ignore(),
    ),
    "client's error": ("prefill", answer(404), Progress(), PassOn()),
    "client's error, the response has begun": (
        "decode", answer(404), Progress(response_started=True), EndStream(),
    ),
    "copy leg": ("copy", failure(), Progress(), PrefillWithoutCopy()),
    "prefill leg": ("prefill", failure(), Progress(), Retry("prefill")),
    "prefill leg, the KV cache is complete": ("prefill", failure(), Progress(prefill_done=True), Ignore()),
    "prefill leg, the response has ended": ("prefill", failure(), Progress(over=True), Ignore()),
    "prefill leg, a decode engine waits": ("prefill", failure(), Progress(decode_waits=True), Retry("prefill")),
    "prefill leg, a decode engine waits, no other instance can prefill": (
        "prefill", failure(), Progress(decode_waits=True, other_prefill=False), DecodeWithoutPrefill(),
    ),
    "prefill leg, a decode leg is sent and no other one can be": (
        "prefill", failure(), Progress(decode_waits=True, decode_not_resendable=True), Fail(UPSTREAM),
    ),
    "write of the KV cache, the prefill engine's process has ended": (
        "write", failure("process_ended"), Progress(prefill_done=True), Retry("decode", kv_lost=True),
    ),
    "write of the KV cache for the rest of a stream": (
        "write", failure("process_ended"), Progress(prefill_done=True, response_started=True),
        Retry("decode", kv_lost=True),
    ),
    "write of the KV cache, no other decode leg can be sent": (
        "write", failure("process_ended"), Progress(prefill_done=True, decode_not_resendable=True), Ignore(),
    ),
    "decode leg, one is sent and no other one can be": (
        "decode", failure(), Progress(decode_not_resendable=True), Fail(UPSTREAM),
    ),
    "decode leg, not sent": (
        "decode", failure("refused", sent=False), Progress(prefill_done=True), Retry("decode"),
    ),
    "decode leg, sent": (
        "decode", failure("timeout"), Progress(prefill_done=True), Retry("decode", kv_lost=True),
    ),
    "decode leg, sent, connection reset, the KV cache can be fetched again": (
        "decode", failure(), Progress(prefill_done=True, kv_refetchable=True), Retry("decode"),
    ),
    "decode leg before the KV cache is complete, not sent": (
        "decode", failure("refused", sent=False), Progress(decode_waits=True), Retry("decode"),
    ),
    "decode leg before the KV cache is complete, sent": (
        "decode", failure("timeout"), Progress(decode_waits=True), Retry("decode", kv_lost=True, abort_prefill=True),
    ),
    "decode leg of a protocol with concurrent legs": (
        "decode", failure("refused", sent=False), Progress(), Retry("decode", abort_prefill=True),
    ),
    "decode leg, the response has begun": ("decode", failure(), Progress(response_started=True), EndStream()),
    "passthrough": ("passthrough", failure(), Progress(), Retry("passthrough")),
    "passthrough, the response has begun": ("passthrough", failure(), Progress(response_started=True), EndStream()),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_case_of_the_table(case: str) -> None:
    step, failed, progress, action = CASES[case]
    assert decide(step, failed, progress) == action


def test_the_documented_table_is_this_one() -> None:
    text = SERVE.partition("### What is retried")[2].partition("\n#")[0]
    rows = dict(re.findall(r"^\| ([^|]+?) \| `(\w+)[^`]*`", text, re.M))
    assert rows == {case: type(action).__name__ for case, (_, _, _, action) in CASES.items()}


@given(
    step=st.sampled_from((*get_args(LegKind), "write")),
    kind=st.sampled_from(KINDS),
    sent=st.booleans(),
    flags=st.lists(st.booleans(), min_size=len(fields(Progress)), max_size=len(fields(Progress))),
)
def test_laws_of_the_table(step: Step, kind: str, sent: bool, flags: list[bool]) -> None:
    """Nothing is sent again once the client has bytes, unless another engine goes on with the stream, once it has its
    response, or without a file descriptor; the KV cache is lost only if the engine may have fetched it."""
    progress = Progress(*flags)
    action = decide(step, failure(kind, sent=sent), progress)
    if isinstance(action, Retry):
        assert not progress.over
        assert kind != "out_of_files"
        assert step in ("prefill", "write") or not progress.response_started
        assert sent or not action.kv_lost
        assert not (action.abort_prefill and progress.prefill_done)
        assert action.leg == ("decode" if step == "write" else step)
        assert step == "passthrough" or not progress.decode_not_resendable


ANSWERED, NOTHING = Blame("answered"), Blame("nothing")
ERROR, LOST = Blame("instance", uncertain=True, proven="error"), Blame("instance")
STATUSES: dict[int, tuple[bool, int, bool, Blame]] = {
    # of an engine: whether the client gets it; else the status of the response and whether the engine may have acted;
    # and what it counts
    400: (True, 400, False, ANSWERED),
    404: (True, 404, False, ANSWERED),
    429: (False, 503, False, ANSWERED),
    500: (False, 502, True, ERROR),
    501: (True, 501, False, ANSWERED),
    502: (False, 502, True, ERROR),
    503: (False, 503, False, ERROR),
    599: (False, 502, True, ERROR),
}


@pytest.mark.parametrize("leg", get_args(LegKind))
@pytest.mark.parametrize("status", STATUSES)
def test_each_status_of_an_engine_means_the_same_for_every_leg(status: int, leg: LegKind) -> None:
    """But for a copy, which is a request of the gateway's own: its error is not for the client, and a client's error of
    it says that the engine supports no copies. The first event of a stream may give the status, too."""
    passed_on, response, _, counts = STATUSES[status]
    failed = answer(status, leg)
    if leg == "copy" and passed_on:
        assert (failed.passed_on, failed.status, record_failure(leg, failed)) == (False, 502, NOTHING)
        return
    assert (failed.passed_on, failed.status, failed.sent, record_failure(leg, failed)) == STATUSES[status]
    event = answer(status, leg, in_stream=True)
    assert (event.passed_on, event.status, event.sent) == (passed_on, response, not passed_on)
    assert record_failure(leg, event) == counts
    assert retry_after(failed.status, 7) == ([(b"retry-after", b"7")] if status in (429, 503) else [])
    assert free_of_charge(failed.status) is (status >= 429)


@pytest.mark.parametrize(
    ("failed", "counts"),
    [
        (call_failure("x", "refused", sent=False), LOST),
        (call_failure("x", "timeout", sent=True), LOST),
        (call_failure("x", "reset", sent=True), Blame("instance", uncertain=True)),
        (call_failure("x", "malformed", sent=True), Blame("instance", uncertain=True)),
        (call_failure("x", "out_of_files", sent=False), NOTHING),
        (answer(0, in_stream=True), ERROR),
        (proxy_failure("x", 503), LOST),
        (proxy_failure("x", 404), NOTHING),
        (proxy_failure("x", 429), NOTHING),
    ],
)
def test_what_each_failure_counts(failed: LegFailure, counts: Blame) -> None:
    assert record_failure("decode", failed) == counts
    assert record_failure("prefill", failed, over_path=True) == counts


@pytest.mark.parametrize(
    ("failed", "counts"),
    [
        (answer(500), Blame("path", uncertain=True)),
        (answer(503), ERROR),
        (answer(429), ANSWERED),
        (answer(400), ANSWERED),
        (call_failure("x", "timeout", sent=True), Blame("path")),
        (call_failure("x", "refused", sent=False), LOST),
    ],
)
def test_a_decode_engine_that_waits_for_another_datacenter_is_not_blamed(failed: LegFailure, counts: Blame) -> None:
    """The path between the datacenters is, unless the engine cannot be reached or is full."""
    assert record_failure("decode", failed, over_path=True) == counts


def test_a_copy_that_waits_too_long_counts_against_nothing() -> None:
    assert record_failure("copy", call_failure("x", "timeout", sent=True)) == NOTHING
    assert record_failure("copy", call_failure("x", "refused", sent=False)) == LOST
