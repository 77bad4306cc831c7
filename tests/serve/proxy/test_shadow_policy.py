"""A gateway with a shadow policy: it counts, shows and records the decisions that this policy would have made."""

from __future__ import annotations

from pathlib import Path

import pytest
import uvloop
from prometheus_client.parser import text_string_to_metric_families
from tests.serve.rig import CLUSTER, rig

from kvroute.control import decisions_equal, replay
from kvroute.control.log import read_log
from kvroute.topology import parse
from kvroute.types import SAME_DATACENTER, Decode

REQUESTS = 6


@pytest.mark.parametrize(
    ("policy", "shadow", "learns"),
    [("foresight", "", "foresight"), ("netkv", "foresight-closed", "foresight-closed"), ("netkv", "cla", "")],
)
def test_learned_values_of_foresight_are_shown(policy: str, shadow: str, learns: str) -> None:
    """Dashboard and Prometheus show the tier between the cluster's two racks; without foresight they show nothing."""

    async def run() -> None:
        async with rig(f"  policy: {policy}\n  shadow: {shadow}\n" if shadow else f"  policy: {policy}\n") as gate:
            assert (await gate.ask()).status == 200
            foresight = gate.gateway.state.snapshot(gate.gateway.now()).tick.load.foresight
            page = (await gate.get("/metrics")).body.decode()
        samples = {
            (sample.name, sample.labels["policy"], sample.labels["tier"]): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name.startswith("kvroute_foresight_")
        }
        if not learns:
            assert (foresight, samples) == (None, {})
            return
        assert foresight is not None
        assert foresight.policy == learns
        far = foresight.tiers[SAME_DATACENTER]
        assert samples == {
            ("kvroute_foresight_learned_ratio", learns, "datacenter"): far.factor,
            ("kvroute_foresight_bytes_per_second", learns, "datacenter"): far.bytes_per_s,
            ("kvroute_foresight_learned_transfers", learns, "datacenter"): pytest.approx(far.weight, abs=1e-6),
        }

    uvloop.run(run())


@pytest.mark.parametrize(("shadow", "differ"), [("round-robin", REQUESTS // 2), ("netkv", 0)])
def test_decisions_of_a_shadow_policy_are_counted_and_not_applied(tmp_path: Path, shadow: str, differ: int) -> None:
    """The requests come one after the other with the same prompt: NetKV stays in the rack, round-robin would not."""
    log = tmp_path / "events.log"

    async def run() -> None:
        section = f"  policy: netkv\n  shadow: {shadow}\n  measure: engine\n  log: {{events: {log}}}\n"
        async with rig(section) as gate:
            for _ in range(REQUESTS):
                assert (await gate.ask("The same prompt. " * 100)).status == 200
            view = gate.gateway.state.snapshot(gate.gateway.now()).tick.shadow
            assert view is not None
            assert (view.policy, view.decisions, view.differ, view.refused) == (shadow, REQUESTS, differ, 0)
            page = (await gate.get("/metrics")).body.decode()
        samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
        counted = {s.labels["verdict"]: s.value for s in samples if s.name == "kvroute_shadow_decisions_total"}
        assert counted == {verdict: n for verdict, n in (("same", REQUESTS - differ), ("differs", differ)) if n}
        seconds = {s.labels["by"]: s.value for s in samples if s.name == "kvroute_shadow_seconds_total"}
        assert seconds == ({"acting": pytest.approx(view.loss_s)} if differ else {})

    uvloop.run(run())
    header, records = read_log(log)
    logged = list(records)
    decodes = [decision for record in logged for decision in record.decisions if isinstance(decision, Decode)]
    assert len({decision.target for decision in decodes}) == 1
    assert sum(d.shadow is not None and d.shadow.target != d.target for d in decodes) == differ
    assert all(
        decisions_equal(record.decisions, again) for record, again in replay(header.spec.build(parse(CLUSTER)), logged)
    )
