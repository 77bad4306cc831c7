"""Engines and their roles: drained, switched, and no request lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.sim.fleet import Fleet
from kvroute.topology import parse
from kvroute.types import InputError, Role

TEXT = """
name: fleet
racks: [{name: rack0}]
nodes:
  - {name: node0, rack: rack0, gpus: 8, nics: {compute: {count: 8, capacity: 100 Gbps}}}
timing: {default: {prefill: {kind: linear, per_token: 90 us}, decode: {base: 12 ms}}}
defaults: {model: prfaas-1t-hybrid, tp: 4, kv_capacity: 2 GB}
instances:
  - {name: a, role: prefill, gpus: "node0:0-3"}
  - {name: b, role: decode, gpus: "node0:4-7"}
"""


def fleet(text: str = TEXT) -> Fleet:
    """Return idle engines."""
    return Fleet(parse(text), block_tokens=512, prefill_queueing=True)


@given(st.lists(st.sampled_from(["take", "give back", "prefill", "decode", "switch_role"]), max_size=40))
def test_an_instance_switches_its_role_only_when_drained(steps: list[str]) -> None:
    """The end of draining is reported exactly once, for any roles requested during it; the last one applies."""
    engines, busy, due = fleet(), 0, False
    wanted: Role | None = None
    for step in steps:
        over = False
        if step == "take" and wanted is None:
            engines.take(0)
            busy += 1
        elif step == "give back" and busy:
            busy -= 1
            over = engines.release(0)
        elif step in ("prefill", "decode"):
            wanted = "prefill" if step == "prefill" else "decode"
            over = engines.drain(0, wanted)
        elif step == "switch_role" and due:
            assert engines.switch_role(0) == wanted
            wanted, due = None, False
        assert over == (wanted is not None and not busy and not due)
        due = due or over


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_instance_starts_each_role_with_an_empty_cache(role: Role) -> None:
    """The role changes in either direction and back; the memory is complete again."""
    engines = fleet()
    back: Role = "decode" if role == "prefill" else "prefill"
    index = 1 if role == "prefill" else 0
    engines.memory.index.store(index, (1, 2, 3))
    assert engines.free_bytes(index) == engines.memory.capacity_blocks[index] * engines.block_bytes[index]
    assert engines.drain(index, role)
    assert engines.switch_role(index) == role
    assert engines.memory.index.used_blocks(index) == 0
    assert index in engines.prefill
    assert index in engines.decode
    before = engines.prefill[index], engines.decode[index]
    assert engines.drain(index, back)
    assert engines.switch_role(index) == back
    assert (engines.prefill[index], engines.decode[index]) == before
    assert engines.role_switches == 2


def test_layers_and_blocks_are_those_of_the_model() -> None:
    """There are 60 layers; a block is 512 tokens of the 15 layers that keep every token."""
    engines = fleet()
    assert engines.layers == [60, 60]
    assert engines.block_bytes == [512 * 15 * 576 * 2.0] * 2


def test_a_fleet_has_one_model() -> None:
    with pytest.raises(InputError, match="serves llama-3-8b, prfaas-1t-hybrid"):
        fleet(TEXT.replace("{name: a,", "{name: a, model: llama-3-8b,"))
