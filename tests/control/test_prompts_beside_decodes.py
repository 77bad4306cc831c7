"""Prompts on a prefill instance that decodes are priced and booked with the steps beside their chunks, as on a decode
instance."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.control import Control, ControlSpec
from kvroute.topology import parse
from kvroute.types import Admitted, Arrived, Decode, InstanceDown, Prefill, PrefillFinished, Request

CLUSTER = """
name: alike
timing:
  default:
    prefill: {kind: linear, per_token: 0.1 ms, base: 20 ms}
    decode: {base: 12 ms, per_request: 1 ms}
network: {latency: {node: 1 us, rack: 3 us, pod: 8 us, datacenter: 15 us}}
racks: [{name: rack0}]
nodes:
  - {name: node0, rack: rack0, gpus: 8, nics: {compute: {count: 8, capacity: 100 Gbps}}}
defaults: {model: llama-3-70b, tp: 4, batch_max: 64, chunk_tokens: 1001, timing: default}
instances:
  - {name: p0, role: prefill, gpus: "node0:0-3", kv_capacity: 180 GB}
  - {name: d0, role: decode, gpus: "node0:4-7", kv_capacity: DECODE}
"""
ROOM, NO_ROOM = "180 GB", "1 MB"


def control_of(*, on: str, running: int) -> Control:
    """Return a cluster in which only the instance `on` serves requests, with `running` of them in its batch."""
    control = ControlSpec().build(parse(CLUSTER.replace("DECODE", ROOM if on == "d0" else NO_ROOM)))
    if on == "d0":
        control.handle(InstanceDown(0.0, "p0"))
    for number in range(1, running + 1):
        decisions = control.handle(Arrived(0.0, Request(id=number, input_tokens=100, max_output_tokens=200)))
        assert isinstance(decisions[-1], Decode)
        assert decisions[-1].target == on
        if isinstance(decisions[0], Prefill):
            control.handle(PrefillFinished(0.0, number, 0))
        control.handle(Admitted(0.0, number))
    return control


def arrived(control: Control, number: int, tokens: int) -> dict[str, float]:
    """Return the terms of the instance that gets a request at 0 s."""
    decisions = control.handle(Arrived(0.0, Request(id=number, input_tokens=tokens, max_output_tokens=200)))
    assert isinstance(decisions[-1], Decode)
    terms = decisions[0].terms
    assert terms is not None
    index = int(np.where(terms.feasible, terms.cost, np.inf).argmin())
    return {name: float(part[index]) for name, part in terms.parts.items()}


def test_a_prompt_beside_a_batch_takes_a_step_with_each_chunk() -> None:
    """Beside one request, 2,500 tokens take three chunks (1,000, 1,000, 500) and three steps of 13 ms; the base of the
    prefill is in the steps. The next prompt waits for all of it."""
    control = control_of(on="p0", running=1)
    first = arrived(control, 10, 2_500)
    assert first["prefill_s"] == pytest.approx(0.25)
    assert first["steps_s"] == pytest.approx(3 * 0.013)
    assert arrived(control, 11, 100)["wait_s"] == pytest.approx(0.25 + 3 * 0.013)


def test_a_prompt_alone_takes_its_time() -> None:
    control = control_of(on="p0", running=0)
    first = arrived(control, 10, 2_500)
    assert first["prefill_s"] == pytest.approx(0.27)
    assert first["steps_s"] == 0.0
    assert arrived(control, 11, 100)["wait_s"] == pytest.approx(0.27)


@given(running=st.integers(0, 30), tokens=st.integers(1, 20_000), later=st.integers(1, 5_000))
def test_both_roles_have_one_price(running: int, tokens: int, later: int) -> None:
    """A prefill and a decode instance with the same requests predict the same time for a prompt, and for the next."""
    of_role = [control_of(on=name, running=running) for name in ("p0", "d0")]
    for number, size in ((100, tokens), (101, later)):
        kept, decoding = (arrived(control, number, size) for control in of_role)
        for name in ("wait_s", "prefill_s", "steps_s", "batch_s", "slot_s"):
            assert kept[name] == pytest.approx(decoding[name], rel=1e-9, abs=1e-12)
