"""Queues of prefill instances with pipeline stages."""

from __future__ import annotations

import pytest

from kvroute.control.state.pool import PrefillPool
from kvroute.timing import prefill_time
from kvroute.types import Instance, LinearPrefill


def instance(pp: int) -> Instance:
    return Instance(
        name=f"pp{pp}", role="prefill", model="m", node="n", rack="", pod="", datacenter="d", gpus=("n/0",), pp=pp
    )


def test_a_pipeline_can_begin_the_next_prompt_after_one_stage() -> None:
    """A booked prompt of 1 s occupies the first of four stages for 0.25 s."""
    times = {"default": prefill_time(LinearPrefill(per_token_s=1e-3))}
    pool = PrefillPool.of([(0, instance(1)), (1, instance(4))], times)
    for position in (0, 1):
        pool.book(position, 10.0, 1.0)
        pool.book(position, 10.0, 1.0)
    assert pool.pending_s(10.0).tolist() == pytest.approx([2.0, 0.5])
    for position in (0, 1):
        pool.release(position, 10.0, unfinished_s=1.0)
    assert pool.pending_s(10.0).tolist() == pytest.approx([1.0, 0.25])
