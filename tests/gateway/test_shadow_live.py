"""A gateway with a policy in the shadow: it counts, says and records what that one would have done."""

from __future__ import annotations

from pathlib import Path

import pytest
import uvloop
from prometheus_client.parser import text_string_to_metric_families
from tests.gateway.rig import CLUSTER, rig

from kvroute.control import read_log, replay, same
from kvroute.topology import parse
from kvroute.types import Decode

ASKED = 6


@pytest.mark.parametrize(("shadow", "differ"), [("round-robin", ASKED // 2), ("netkv", 0)])
def test_a_shadow_is_counted_and_not_obeyed(tmp_path: Path, shadow: str, differ: int) -> None:
    """One request after another from one prompt: NetKV stays in the rack, round-robin would not."""
    log = tmp_path / "events.log"

    async def run() -> None:
        section = f"  policy: netkv\n  shadow: {shadow}\n  measure: engine\n  log: {{events: {log}}}\n"
        async with rig(section) as gate:
            for _ in range(ASKED):
                assert (await gate.ask("The same prompt. " * 100)).status == 200
            said = gate.gateway.state.snapshot(gate.gateway.now()).tick.shadow
            assert said is not None
            assert (said.policy, said.decisions, said.differ, said.refused) == (shadow, ASKED, differ, 0)
            page = (await gate.get("/metrics")).body.decode()
        samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
        counted = {s.labels["verdict"]: s.value for s in samples if s.name == "kvroute_shadow_decisions_total"}
        assert counted == {verdict: n for verdict, n in (("same", ASKED - differ), ("differs", differ)) if n}
        seconds = {s.labels["by"]: s.value for s in samples if s.name == "kvroute_shadow_seconds_total"}
        assert seconds == ({"acting": pytest.approx(said.loss_s)} if differ else {})

    uvloop.run(run())
    header, records = read_log(log)
    told = list(records)
    decodes = [decision for record in told for decision in record.decisions if isinstance(decision, Decode)]
    assert len({decision.target for decision in decodes}) == 1
    assert sum(d.shadow is not None and d.shadow.target != d.target for d in decodes) == differ
    assert all(same(record.decisions, again) for record, again in replay(header.spec.build(parse(CLUSTER)), told))
