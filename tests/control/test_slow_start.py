"""Slow start: the share of a returned instance rises over the window, no request is rejected for it, and a log
replays."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.control import Control, ControlSpec
from kvroute.control.state.slow_start import LEAST, SlowStart
from kvroute.topology import parse
from kvroute.types import (
    Arrived,
    Decode,
    DecodeFailed,
    Event,
    InstanceDown,
    InstanceUp,
    Prefill,
    PrefillFinished,
    Request,
)

WINDOW_S = 10.0
TEXT = """
name: slow
racks: [{name: rack0}]
nodes: [{name: node0, rack: rack0, gpus: 16, nics: {compute: {count: 8, capacity: 100 Gbps}}}]
timing:
  default: {prefill: {kind: linear, per_token: 1 us, base: 1 ms}, decode: {base: 2 ms, per_request: 10 us}}
defaults: {model: llama-3-70b, tp: 2, kv_capacity: 600 GB}
instances:
  - {name: prefill0, role: prefill, gpus: "node0:0-1"}
  - {name: prefill1, role: prefill, gpus: "node0:2-3"}
  - {name: decode0, role: decode, gpus: "node0:4-5"}
  - {name: decode1, role: decode, gpus: "node0:6-7"}
  - {name: decode2, role: decode, gpus: "node0:8-9"}
"""


def core(policy: str = "load-aware", window_s: float = WINDOW_S) -> Control:
    return ControlSpec(decode=policy, overcommit=True, slow_start_s=window_s).build(parse(TEXT))


def place(control: Control, number: int, at: float) -> tuple[str, str]:
    """Return the prefill and the decode instance of a new request, which does not end."""
    (prefill,) = control.handle(Arrived(at, Request(id=number, input_tokens=100, max_output_tokens=16)))
    assert isinstance(prefill, Prefill)
    (decode,) = control.handle(PrefillFinished(at, number))
    assert isinstance(decode, Decode)
    return prefill.instance, decode.target


@given(st.integers(2, 8), st.lists(st.floats(0.001, 1), min_size=1, max_size=200))
def test_a_returned_instance_gets_at_most_its_rising_share(instances: int, gaps_s: list[float]) -> None:
    """For any policy, the instance gets one request at once, then the sum of factor / n, and any share after the
    window."""
    slow = SlowStart(WINDOW_S)
    slow.returned(0, 0.0)
    usable, sites = np.ones(instances, dtype=np.bool_), ("here",) * instances
    now, taken, earned = 0.0, 0, 1.0
    for gap_s in gaps_s:
        now += gap_s
        rest = slow.without_limited(usable, sites, now)
        chosen = 0 if rest is None or rest[0] else 1
        if now >= WINDOW_S:
            assert chosen == 0
        else:
            factor = max(now / WINDOW_S, LEAST)
            assert slow.factor(0, now) == pytest.approx(factor)
            earned += factor / instances
            taken += chosen == 0
            assert taken <= earned + 1e-9
        slow.booked(chosen, now, instances)
    assert slow.factor(1, now) == 1.0


@given(
    st.lists(st.booleans(), min_size=2, max_size=6),
    st.sets(st.integers(0, 5)),
    st.lists(st.sampled_from(["a", "b"]), min_size=6, max_size=6),
)
def test_slow_start_keeps_one_usable_instance_in_each_datacenter(
    up: list[bool], back: set[int], sites: list[str]
) -> None:
    """In each datacenter with a usable instance, one remains usable; none is added."""
    slow, usable = SlowStart(WINDOW_S), np.array(up, dtype=np.bool_)
    for position in sorted(place for place in back if place < len(up)):
        slow.returned(position, 0.0)
        slow.booked(position, 0.0, len(up))
    rest = slow.without_limited(usable, tuple(sites[: len(up)]), 1.0)
    if rest is not None:
        assert not (rest & ~usable).any()
        for site in ("a", "b"):
            here = np.array([place == site for place in sites[: len(up)]])
            assert (rest & here).any() == (usable & here).any()


@pytest.mark.parametrize(("kind", "name"), [("prefill", "prefill0"), ("decode", "decode0")])
def test_an_idle_instance_that_returns_does_not_get_all_requests(kind: str, name: str) -> None:
    """The other instances have 60 requests. Without a window the returned instance takes all of the next ones, with a
    window its share."""
    shares = {}
    for window_s in (0.0, WINDOW_S):
        control = core(window_s=window_s)
        control.handle(InstanceDown(0.0, name))
        for number in range(60):
            place(control, number, 0.0)
        control.handle(InstanceUp(1.0, name, returned=True))
        placed = [place(control, 100 + number, 1.0 + number * 0.05) for number in range(20)]
        shares[window_s] = sum(name in pair for pair in placed)
    if kind == "decode":
        assert shares[0.0] == 20
    assert shares[WINDOW_S] <= 2
    assert shares[WINDOW_S] >= 1, "the first one at once"


def test_slow_start_rejects_no_request() -> None:
    """All instances have just returned, or the only other one has failed the request."""
    control = core()
    for name in ("decode0", "decode1", "decode2", "prefill0", "prefill1"):
        control.handle(InstanceDown(0.0, name))
        control.handle(InstanceUp(1.0, name, returned=True))
    for number in range(20):
        place(control, number, 1.0)
    control.handle(InstanceDown(2.0, "decode2"))
    control.handle(InstanceDown(2.0, "decode1"))
    control.handle(InstanceUp(2.0, "decode1", returned=True))
    prefill, target = place(control, 50, 2.0)
    (again,) = control.handle(DecodeFailed(2.0, 50))
    assert isinstance(again, Decode)
    assert again.target != target, "another one first, slow start or not"
    assert prefill


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_slow_start_is_deterministic_and_old_logs_replay(data: st.DataObject) -> None:
    """The core uses no clock and no random numbers; without `returned`, or without a window, nothing changes."""
    events: list[Event] = []
    now = 0.0
    for number in range(data.draw(st.integers(1, 25))):
        now += data.draw(st.floats(0, 3))
        name = f"decode{data.draw(st.integers(0, 1))}"
        match data.draw(st.sampled_from(["arrive", "arrive", "arrive", "down", "up"])):
            case "arrive":
                events += [Arrived(now, Request(id=number, input_tokens=100)), PrefillFinished(now, number)]
            case "down":
                events.append(InstanceDown(now, name))
            case "up":
                events.append(InstanceUp(now, name, returned=True))
    old = [msgspec.structs.replace(e, returned=False) if isinstance(e, InstanceUp) else e for e in events]

    def decided(control: Control, some: list[Event]) -> bytes:
        encode = msgspec.json.Encoder(enc_hook=lambda value: value.tolist()).encode
        return b"".join(encode(control.handle(event)) for event in some)

    assert decided(core(), events) == decided(core(), events)
    plain = decided(core(window_s=0.0), old)
    assert plain == decided(core(), old)
    assert plain == decided(core(window_s=0.0), events)


TWO_RACKS = """
name: apart
racks:
  - {name: rack0, uplinks: {count: 8, capacity: 100 Gbps}}
  - {name: rack1, uplinks: {count: 8, capacity: 100 Gbps}}
nodes:
  - {name: node0, rack: rack0, gpus: 16, nics: {compute: {count: 8, capacity: 100 Gbps}}}
  - {name: node1, rack: rack1, gpus: 16, nics: {compute: {count: 8, capacity: 100 Gbps}}}
timing:
  default: {prefill: {kind: linear, per_token: 1 us, base: 1 ms}, decode: {base: 2 ms, per_request: 10 us}}
defaults: {model: llama-3-70b, tp: 2, kv_capacity: 600 GB}
instances:
  - {name: prefill0, role: prefill, gpus: "node0:0-1"}
  - {name: decode0, role: decode, gpus: "node0:4-5"}
  - {name: decode1, role: decode, gpus: "node1:6-7"}
"""


@pytest.mark.parametrize(
    ("constraint", "stays"), [("rack:fallback", True), ("rack:required", True), ("rack:preferred", False)]
)
def test_slow_start_is_no_reason_to_leave_the_domain(constraint: str, stays: bool) -> None:
    """Under `fallback` a request leaves the domain only if nothing inside has room; a weighted preference is a cost."""
    spec = ControlSpec(decode="load-aware", overcommit=True, slow_start_s=WINDOW_S, constraint=constraint)
    control = spec.build(parse(TWO_RACKS))
    control.handle(InstanceDown(0.0, "decode0"))
    control.handle(InstanceUp(1.0, "decode0", returned=True))
    targets = {place(control, number, 1.0 + number / 1000)[1] for number in range(20)}
    assert (targets == {"decode0"}) is stays
    if constraint == "rack:fallback":
        control.handle(InstanceDown(1.5, "decode0"))
        assert place(control, 99, 1.6)[1] == "decode1"
