"""Prefixes in other tiers than GPU memory, from an engine's KV events to the decision: they cost their load time."""

from __future__ import annotations

from pathlib import Path

import pytest
import uvloop
from tests.serve.rig import CLUSTER, MODEL, rig
from tests.serve.test_chaos import check_replay
from tests.waiting import becomes_true

from kvroute import llm
from kvroute.control.log import read_log
from kvroute.emulator.kv.kv_events import BlockStored
from kvroute.prefix import block_hashes
from kvroute.types import Prefill

BLOCKS = 400
TOKENS = [*range(16 * BLOCKS)]
SLOW = CLUSTER.replace("per_token: 1 us", "per_token: 100 us")


@pytest.mark.parametrize(("medium", "tier", "rate"), [("CPU", "cpu", 50e9), ("STORAGE", "disk", 5e9)])
def test_a_prefix_that_an_engine_reports_is_a_hit_that_takes_its_load_time(
    medium: str, tier: str, rate: float, tmp_path: Path
) -> None:
    """Loading 2 GB takes 0.04 or 0.4 s, computing 6,400 tokens 0.64 s."""
    log = tmp_path / "log.jsonl"

    async def main() -> None:
        section = f"  prompt: {{without_tokenizer: engine}}\n  log: {{events: {log}}}\n"
        async with rig(section, SLOW) as gate:
            control, chain = gate.gateway.runtime.control, block_hashes(TOKENS, 16)
            publisher, index = gate.fleet.servers["prefill1"].publisher, control.cluster.index("prefill1")
            assert publisher is not None

            def known() -> bool:
                """Publish again, because the gateway may not have subscribed yet."""
                publisher.publish([BlockStored([*range(BLOCKS)], None, TOKENS, 16, medium=medium)])
                return [*control.caches.chains(index)] == [(tier, chain)]

            assert await becomes_true(known)
            body = {"model": MODEL, "prompt": TOKENS, "max_tokens": 1}
            assert (await gate.post(body)).status == 200

    uvloop.run(main())
    [prefill] = [
        decision for record in read_log(log)[1] for decision in record.decisions if isinstance(decision, Prefill)
    ]
    assert (prefill.instance, prefill.cached_tokens) == ("prefill1", 16 * (BLOCKS - 1))
    assert prefill.terms is not None
    load_s = float(llm.model(MODEL).kv_bytes(16 * (BLOCKS - 1))) / rate
    assert prefill.terms.parts["load_s"].tolist() == pytest.approx([0.0, load_s])
    check_replay(log)
