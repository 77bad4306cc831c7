"""The order of the dispatcher's features: terms, and what a rejected request leaves behind."""

from __future__ import annotations

import pytest
from tests.control.live_rig import BLOCK_TOKENS, TOKEN_BYTES, cluster_of, request

from kvroute.control import Control, ControlSpec
from kvroute.types import Arrived, KvStored, Prefill, Reject

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


def test_a_request_that_is_rejected_as_late_leaves_nothing_behind() -> None:
    """The forecast is attached first: no adapter, session, copy or load is recorded for such a request."""
    control, other = core(), core()
    (late,) = control.handle(arrived(1, ttft_max_s=0.1))
    assert isinstance(late, Reject)
    assert late.ttft_s is not None
    assert (control.adapters, list(control.sessions(0.0))) == ({}, [])
    assert control.loads(0.0) == other.loads(0.0)
    assert not control.copying(1)
