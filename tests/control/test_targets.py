"""Targets for TPOT and TTFT: choices that are predicted to keep them are preferred, whatever they cost."""

from __future__ import annotations

import pytest

from kvroute.control import Control, ControlSpec
from kvroute.control.learning.learned_capacity import Answers
from kvroute.policies.foresight.spec import ForesightSpec
from kvroute.topology import parse
from kvroute.topology.drafts.draft import draft
from kvroute.types import Admitted, Arrived, Decision, Decode, Finished, Prefill, PrefillFinished, Request

TOKENS = 2_000
"""A prompt of 0.74 s: beside a response of 25 tokens it adds 30 ms to each token; a step takes 50 ms."""


def core(nic_gbps: float, **parameters: float) -> Control:
    """Return two prefill and two decode instances."""
    decode = [f"http://d{index}:8000" for index in range(2)]
    text = draft(
        "slo", ["http://p0:8000", "http://p1:8000"], decode, model="llama-3-70b", nic_bytes_per_s=nic_gbps * 1e9 / 8
    )
    return ControlSpec(parameters={"aggregated": 1} | parameters).build(parse(text))


def running(control: Control, *names: str) -> Control:
    for number, name in enumerate(names, start=1_000):
        request = Request(id=number, input_tokens=1, max_output_tokens=10, one_leg=True)
        control.handle(Arrived(0.0, request, only=(name,)))
        control.handle(Admitted(0.0, number))
    return control


def arrive(control: Control) -> tuple[Decision, ...]:
    return control.handle(Arrived(0.1, Request(id=1, input_tokens=TOKENS, max_output_tokens=10)))


@pytest.mark.parametrize(
    ("parameters", "first"),
    [
        ({}, Decode),
        ({"tpot": 0.06}, Prefill),
        ({"tpot": 0.1}, Decode),
        ({"tpot": 0.04}, Decode),
        ({"ttft": 1.5}, Decode),
        ({"tpot": 0.06, "ttft": 1.5}, Decode),
    ],
)
def test_a_target_decides_which_choice_is_preferred(parameters: dict[str, float], first: type[Decision]) -> None:
    """Behind NICs of 2 Gbps a pair takes 3.4 s to its first token, one instance alone 0.8 s, which delays responses:
    with a target of 60 ms per token the pair is chosen. A target that both keep, or that both miss, changes nothing,
    and neither do two of which each choice misses one: the cost decides."""
    (decision, *_) = arrive(running(core(2.0, **parameters), "decode0", "decode1"))
    assert isinstance(decision, first)
    terms = decision.terms
    assert terms is not None
    assert ("misses" in terms.parts or "aggregated_s" in terms.parts) or not parameters


@pytest.mark.parametrize("ttft", [0.0, 1.5])
def test_an_idle_instance_misses_the_target_too(ttft: float) -> None:
    """One of two decode instances has a response in progress. The other one would compute the prompt while responses
    come to it; with a target for TTFT, which the pair misses, few are expected to come."""
    (decision, *_) = arrive(running(core(2.0, tpot=0.06, ttft=ttft), "decode0"))
    if ttft:
        assert isinstance(decision, Decode)
        assert decision.target == decision.source == "decode1"
        assert decision.terms is not None
        assert decision.terms.parts["misses"].tolist() == [1.0, 0.0, 1.0]
    else:
        assert isinstance(decision, Prefill)


@pytest.mark.parametrize(("tpot", "expected"), [(0.0, "decode0"), (0.0503, "decode1"), (0.040, "decode0")])
def test_decodes_prefer_instances_whose_steps_keep_the_target(tpot: float, expected: str) -> None:
    """A long transfer to decode1 is in flight, so decode0 costs less. It runs eight requests: its steps take 50.9 ms,
    those of decode1 50.2 ms. A target that both miss changes nothing."""
    control = running(core(2.0, tpot=tpot, aggregated=0), *["decode0"] * 8)
    control.handle(Arrived(0.0, Request(id=5, input_tokens=20_000, max_output_tokens=10), only=("prefill1", "decode1")))
    (sent,) = control.handle(PrefillFinished(0.05, 5))
    assert isinstance(sent, Decode)
    assert sent.target == "decode1"
    assert isinstance(arrive(control)[0], Prefill)
    (decode,) = control.handle(PrefillFinished(1.0, 1))
    assert isinstance(decode, Decode)
    assert decode.target == expected


def test_short_responses_are_those_that_99_of_100_exceed() -> None:
    """Before any response has ended, a tenth of the prior counts."""
    answers = Answers(ForesightSpec(output_tokens=256.0, output_window=200))
    assert answers.short_tokens == pytest.approx(25.6)
    answers.finished(7)
    assert answers.short_tokens == 7.0
    for tokens in range(1_000, 1_200):
        answers.finished(tokens)
    assert answers.short_tokens == 1_002.0


def test_the_length_of_short_responses_is_learned() -> None:
    """After many responses of 4,000 tokens, a prompt adds little to each token."""
    control = running(core(2.0, tpot=0.06), "decode0", "decode1")
    for number in range(2, 210):
        request = Request(id=number, input_tokens=1, max_output_tokens=10, one_leg=True)
        control.handle(Arrived(0.0, request, only=("decode0",)))
        control.handle(Admitted(0.0, number))
        control.handle(Finished(0.0, number, output_tokens=4_000))
    assert isinstance(arrive(control)[0], Decode)
