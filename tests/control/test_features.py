"""The order of the dispatcher's features: terms, and what a rejected request leaves behind."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.control.live_rig import BLOCK_TOKENS, TOKEN_BYTES, cluster_of, request

from kvroute.control import Control, ControlSpec
from kvroute.control.learning.observed_delays import ObservedDelays
from kvroute.types import (
    AdaptersMeasured,
    Arrived,
    Decode,
    InstanceDown,
    KvStored,
    Prefill,
    PrefillFailed,
    PrefillFinished,
    Reject,
)

CHAIN = tuple(range(1, 101))
SPEC = ControlSpec(
    decode="netkv", prefill="cache-aware", adapters={"sql": 0.5}, prefix_pool=True, session_bonus_s=0.1, predicts=True
)


def core() -> Control:
    """Return a core that knows of one chain: vp0 has it in GPU memory, vp1 its first half, in host memory."""
    control = SPEC.build(cluster_of("vp0", "vp1", "vd2"))
    control.handle(KvStored(0.0, "vp0", CHAIN, BLOCK_TOKENS))
    control.handle(KvStored(0.0, "vp1", CHAIN[:50], BLOCK_TOKENS, "cpu"))
    return control


def arrived(number: int, ttft_max_s: float | None = None) -> Arrived:
    """Return the arrival of a request with all features: a cached prefix, an adapter, a session, and a limit."""
    tokens = len(CHAIN) * BLOCK_TOKENS + 1
    return Arrived(0.0, request(number, tokens, blocks=CHAIN, adapter="sql", session=7), ttft_max_s=ttft_max_s)


def test_each_feature_builds_on_those_before_it_and_adds_its_terms_in_the_opposite_order() -> None:
    """vp1 would load the first half of the prefix from host memory, at 50 GB/s; it is faster to fetch all of it from
    vp0. To this comes the adapter, which vp0 has loaded for the first request. Recorded logs have the terms in this
    order."""
    control = core()
    control.handle(arrived(1))
    prefill = control.handle(arrived(2))[0]
    assert isinstance(prefill, Prefill)
    assert prefill.terms is not None
    parts = {name: values.tolist() for name, values in prefill.terms.parts.items()}
    assert list(parts) == ["pending_s", "prefill_s", "hit_tokens", "session_s", "adapter_s", "fetch_s", "load_s"]
    assert parts["load_s"] == [0.0, pytest.approx(50 * BLOCK_TOKENS * TOKEN_BYTES / 50e9)]
    assert (parts["adapter_s"], parts["session_s"]) == ([0.0, 0.5], [-0.1, 0.0])
    one_token_s, fetch_s = 0.0101, parts["fetch_s"][1]
    assert fetch_s > parts["load_s"][1]
    assert parts["prefill_s"] == pytest.approx([one_token_s, one_token_s + fetch_s + 0.5])


def test_terms_are_those_of_the_instances_that_were_compared_with_their_decode_instances() -> None:
    """If both legs are chosen at once, the few cheapest prefill instances are compared, the cheapest first."""
    control = replace(SPEC, prefill="cache-aware").build(cluster_of(*(f"vp0{letter}" for letter in "abcdef"), "vd2"))
    control.handle(KvStored(0.0, "vp0f", CHAIN, BLOCK_TOKENS))
    control.handle(KvStored(0.0, "vp0e", CHAIN[:50], BLOCK_TOKENS, "cpu"))
    control.handle(AdaptersMeasured(0.0, "vp0f", ("sql",)))
    prefill = control.handle(replace(arrived(1), both_on_arrival=True))[0]
    assert isinstance(prefill, Prefill)
    assert prefill.terms is not None
    names, parts = prefill.terms.names, prefill.terms.parts
    assert (names[0], len(names)) == ("vp0f", 4)
    assert parts["adapter_s"].tolist() == [0.5 * (name != "vp0f") for name in names]
    assert [bool(seconds) for seconds in parts["load_s"]] == [name == "vp0e" for name in names]
    assert [bool(seconds) for seconds in parts["fetch_s"]] == [name != "vp0f" for name in names]


def test_a_request_that_is_rejected_as_late_leaves_nothing_behind() -> None:
    """The forecast is attached first: no adapter, session, copy or load is recorded for such a request."""
    control, other = core(), core()
    (late,) = control.handle(arrived(1, ttft_max_s=0.1))
    assert isinstance(late, Reject)
    assert late.ttft_s is not None
    assert (control.adapters, list(control.sessions(0.0))) == ({}, [])
    assert control.loads(0.0) == other.loads(0.0)
    assert not control.copying(1)


def test_a_request_that_starts_again_does_not_keep_the_predictions_of_its_first_try() -> None:
    """Its pair would have waited for another prompt. Then one instance serves it, and its wait was not predicted."""
    control = ControlSpec().build(cluster_of("vp0", "vp1", "vd2"))
    lengths = (200, 200, 4_000, 1_000, 4_000, 4_000, 1_000)
    decisions = [
        control.handle(Arrived(0.01 * number, request(number, tokens))) for number, tokens in enumerate(lengths)
    ]
    (pair,) = decisions[-1]
    assert isinstance(pair, Prefill)
    assert pair.terms is not None
    assert pair.terms.parts["start_s"].min() > 0.4, "a prefill of 0.11 s and a wait"
    control.handle(InstanceDown(0.07, "vd2"))
    alone, decode = control.handle(PrefillFailed(0.08, 6))
    assert isinstance(alone, Prefill)
    assert isinstance(decode, Decode)
    assert decode.target == alone.instance
    control.handle(PrefillFinished(90.0, 6))
    assert control.parts.view.prefill["llama-3-70b"].waits == ObservedDelays(least=0.0, most=1.5)
