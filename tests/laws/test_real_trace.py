"""The whole Mooncake conversation trace on NetKV's cluster in one run: the laws at full size."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from kvroute.control import ControlSpec
from kvroute.sim.metrics import FINISHED
from kvroute.sim.run import simulate
from kvroute.sim.settings import SimSpec
from kvroute.sim.workload import read
from kvroute.topology import load

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT.parent / "shared" / "data" / "mooncake" / "conversation_trace.jsonl.zst"


@pytest.mark.slow
@pytest.mark.skipif(
    not TRACE.exists() and not os.environ.get("KVROUTE_REQUIRE_LIVE"), reason="the Mooncake trace is not here"
)
def test_all_12031_requests_are_answered_and_nothing_is_lost() -> None:
    """On four prefill and twelve decode instances with shared links, all requests finish and every byte is accounted
    for."""
    cluster = load(ROOT / "examples" / "fat-tree-64gpu.yaml")
    run = simulate(cluster, read(TRACE), ControlSpec(decode="netkv"), SimSpec())
    counts, rows = run.summary.requests, run.outcomes
    assert (counts.arrived, counts.finished, counts.rejected, counts.in_flight) == (12_031, 12_031, 0, 0)
    assert (rows.state == FINISHED).all()
    order = (
        rows.arrived_s, rows.prefill_started_s, rows.prefill_finished_s,
        rows.landed_s, rows.admitted_s, rows.first_token_s, rows.finished_s,
    )  # fmt: skip
    assert (np.diff(np.stack(order), axis=0) >= -1e-9).all()
    hops = np.array([len(cluster.hops(int(a), int(b), 0)) for a, b in zip(rows.source, rows.target, strict=True)])
    assert run.network_bytes == pytest.approx(float((rows.kv_bytes * hops).sum()), rel=1e-9)
    assert (run.link_bytes <= cluster.capacity_bytes_per_s * run.end_s).all()
    assert rows.kv_bytes == pytest.approx((rows.input_tokens - rows.hit_tokens) * 327_680.0)
