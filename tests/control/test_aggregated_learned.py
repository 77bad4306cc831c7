"""What recent requests teach about the price of a pair: late transfers, waits for prefill, busy links, and prompts that
decode instances compute."""

from __future__ import annotations

from typing import Any

import pytest

from kvroute.control import Control, ControlSpec
from kvroute.topology import parse
from kvroute.topology.drafts.draft import draft
from kvroute.types import (
    Admitted,
    Arrived,
    Decode,
    Finished,
    Prefill,
    PrefillFinished,
    Request,
    Terms,
    TransferFinished,
)

NIC = 1e9
TOKENS = 1_000
KV_BYTES = TOKENS * 327_680.0
PREFILL_S = 0.020 + TOKENS * 360e-6


def core(decode: int = 1, **parameters: float) -> Control:
    text = draft(
        "small",
        ["http://p0:8000"],
        [f"http://d{index}:8000" for index in range(decode)],
        model="llama-3-70b",
        nic_bytes_per_s=NIC,
    )
    return ControlSpec(parameters=parameters).build(parse(text))


def request(number: int, tokens: int = TOKENS, **more: Any) -> Request:
    return Request(id=number, input_tokens=tokens, max_output_tokens=10, **more)


def pair(control: Control, at: float, number: int) -> float:
    """Let a request arrive that only a pair may serve; return the time at which its prefill should end."""
    (prefill,) = control.handle(Arrived(at, request(number, adapter="any")))
    assert isinstance(prefill, Prefill)
    return at + PREFILL_S


def compared(control: Control, at: float, number: int) -> tuple[float, Terms]:
    """Return the terms of the instances alone for a request that arrives, whose last column is the pair; and the
    predicted transfer of the pair as given. The request leaves again."""
    decisions = control.handle(Arrived(at, request(number)))
    control.handle(Finished(at, number))
    terms = decisions[0].terms
    assert terms is not None
    assert terms.names[-1] == "prefill0 and decode0", "an instance alone is cheaper in these tests"
    return KV_BYTES / NIC, terms


def test_a_pair_is_priced_with_the_transfers_that_were_observed() -> None:
    """Each transfer should take 0.33 s and takes 4 s."""
    control = core()
    as_given_s, terms = compared(control, 0.0, 0)
    assert terms.parts["transfer_s"][-1] == pytest.approx(as_given_s, rel=0.01)
    at = 0.0
    for number in range(1, 40):
        at = pair(control, at, number)
        control.handle(PrefillFinished(at, number))
        at += 4.0
        control.handle(TransferFinished(at, number))
        control.handle(Admitted(at, number))
        control.handle(Finished(at, number))
    _, terms = compared(control, at, 0)
    assert terms.parts["transfer_s"][-1] == pytest.approx(4.0, rel=0.2)


def test_waits_for_prefill_that_do_not_occur_are_not_expected() -> None:
    """Every prompt ends at the time of its prefill, however many there are: an engine that computes them at once."""
    control = core()
    for burst in range(30):
        at, numbers = 10.0 * burst, [1 + 4 * burst + index for index in range(4)]
        for number in numbers:
            pair(control, at, number)
        if burst == 0:
            _, terms = compared(control, at, 0)
            assert terms.parts["wait_s"][-1] == pytest.approx(4 * PREFILL_S, rel=0.01)
            first_s = terms.parts["delay_s"][-1]
        for number in numbers:
            control.handle(PrefillFinished(at + PREFILL_S, number))
            control.handle(TransferFinished(at + PREFILL_S + KV_BYTES / NIC, number))
            control.handle(Finished(at + PREFILL_S + 1.0, number))
    for number in range(1_000, 1_004):
        pair(control, 300.0, number)
    _, terms = compared(control, 300.0, 0)
    assert terms.parts["wait_s"][-1] < 0.2 * 4 * PREFILL_S
    assert terms.parts["delay_s"][-1] < 0.2 * first_s


def test_links_in_use_have_a_price_for_later_transfers() -> None:
    """Transfers take a third of the time of the link. When it is idle again, a pair still pays for the transfers that
    are likely to meet its own one."""
    control, at = core(), 0.0
    _, terms = compared(control, at, 0)
    idle_s = terms.parts["later_s"][-1]
    for number in range(1, 60):
        end_s = pair(control, at, number)
        control.handle(PrefillFinished(end_s, number))
        control.handle(TransferFinished(end_s + KV_BYTES / NIC, number))
        control.handle(Finished(end_s + KV_BYTES / NIC, number))
        at += 1.0
    share = KV_BYTES / NIC / 1.0
    transfer_s, terms = compared(control, at, 0)
    assert idle_s == 0.0
    assert terms.parts["later_s"][-1] == pytest.approx(transfer_s * share**2 / (1 - share**2), rel=0.3)


def test_a_decode_instance_that_computes_a_long_prompt_is_avoided() -> None:
    """A pair's KV cache is complete while decode0 computes a prompt of 7 s: its first token would wait for it."""
    control = core(decode=2)
    (aggregated,) = control.handle(Arrived(0.0, request(1, tokens=20_000), only=("decode0",)))
    assert isinstance(aggregated, Decode)
    ready_s = pair(control, 0.0, 2)
    (decode,) = control.handle(PrefillFinished(ready_s, 2))
    assert isinstance(decode, Decode)
    assert decode.target == "decode1"
    assert decode.terms is not None
    left_s = 0.020 + 20_000 * 360e-6 - ready_s - KV_BYTES / NIC
    assert decode.terms.parts["prompts_s"].tolist() == pytest.approx([left_s, 0.0], rel=0.1)
    control.handle(Admitted(ready_s + 8.0, 1))
    pair(control, ready_s + 8.0, 3)
    (decode,) = control.handle(PrefillFinished(ready_s + 9.0, 3))
    assert decode.terms is not None
    assert "prompts_s" not in decode.terms.parts
