"""Live: `kvroute serve --kubernetes` while pods come and go, watches break, and the API server dies and returns."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tests.live.kubernetes_churn import (
    CHANGE_S,
    CHURN_S,
    CLIENTS,
    Disturbances,
    Lag,
    Load,
    churn,
    equal,
    ready,
    too_late,
)
from tests.live.kubernetes_rig import NODES, Gateway, serving
from tests.waiting import until

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


def test_without_a_cluster_file(tmp_path: Path) -> None:
    """Two selected pods are enough; the zone of a third one is connected, too."""

    async def main() -> None:
        async with serving(tmp_path, Gateway(with_file=False)) as rig:
            node = {"metadata": {"name": "far", "labels": {"topology.kubernetes.io/zone": "other"}}}
            await rig.client.must("POST", NODES, node)
            for role in ("prefill", "decode", "decode", "decode", "decode", "decode"):
                await rig.join(role)  # the kubelets use the five nodes in turn
            await ready(rig)
            await equal(rig)
            load = Load(rig)
            client = asyncio.create_task(load.run(0))
            await until(lambda: load.answers > 5)
            load.over.set()
            await client
            assert not load.faults
            async with rig.session.get(f"{rig.admin}/state") as response:
                layout = (await response.json())["layout"]
            assert [site["name"] for site in layout["sites"]] == ["other", "z"]
            assert len(layout["wan"]) == 1

    asyncio.run(asyncio.wait_for(main(), 300))


def test_pods_come_and_go_under_load(tmp_path: Path) -> None:
    """Every request is answered once and whole; no engine gets requests long after its pod was deleted; at the end the
    gateway has exactly the server's pods."""

    async def main() -> None:
        async with serving(tmp_path) as rig:
            for role in ("prefill", "decode") * 3:
                await rig.join(role)
            await ready(rig)
            await equal(rig)
            load, disturbances, lag = Load(rig), Disturbances(rig), Lag()
            clients = [asyncio.create_task(load.run(number)) for number in range(CLIENTS)]
            ticker = asyncio.create_task(lag.run())
            changes = await churn(rig, disturbances)
            await until(lambda: not rig.ending)
            load.over.set()
            await asyncio.gather(*clients)
            ticker.cancel()
            await equal(rig)
            await disturbances.finish()
            assert not load.faults
            assert changes >= CHURN_S / CHANGE_S / 2
            assert not too_late(rig, disturbances, lag.longest_s)
            reused = [slot for slot in rig.slots if len({owner for _, owner in slot.arrivals}) > 1]
            assert reused, "no address was used by two pods"

    asyncio.run(asyncio.wait_for(main(), 800))
    lines = [json.loads(line) for line in (tmp_path / "gateway.log").read_text().splitlines() if line.startswith("{")]
    events = [line.get("event") for line in lines]
    assert "discovery_failing" in events
    assert "discovery_recovered" in events
    assert not {"cluster_change_failed", "discovery_failed", "check_failed"} & set(events)
