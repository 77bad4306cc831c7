"""Live: Envoy and `kvroute epp --kubernetes --pool` while pods, the pool and the API server come and go."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from tests.live.kubernetes_churn import (
    CHANGE_S,
    CHURN_S,
    CLIENTS,
    PROMPT,
    Disturbances,
    Lag,
    Load,
    churn,
    equal,
    ready,
    too_late,
)
from tests.live.kubernetes_rig import MODEL, Rig, serving
from tests.live.pool_rig import PoolFront, change_pool, create_pool, delete_pool
from tests.waiting import until

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]
ENGINES = {"app": "engine"}
COUNTS = (
    *("requests_in_flight", "requests_queued", "client_connections", "instance_requests"),
    *("transfers_in_flight", "prefill_pending_seconds"),
)
"""Metrics of what the picker counts for requests in progress, without the prefix of all."""


def log_lines(folder: Path) -> list[dict[str, Any]]:
    """Return the log lines of the picker."""
    return [json.loads(line) for line in (folder / "gateway.log").read_text().splitlines() if line.startswith("{")]


def decodes(rig: Rig) -> int:
    """Return the number of requests that decode engines have received."""
    return sum(len(slot.arrivals) for slot in rig.slots if slot.role == "decode")


async def booked(rig: Rig) -> dict[str, float]:
    """Return what the picker counts for requests in progress, by sample; all are zero without one."""
    async with rig.session.get(f"{rig.admin}/metrics") as response:
        lines = (await response.text()).splitlines()
    samples = {sample: float(value) for sample, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}
    found = {sample: value for sample, value in samples.items() if sample.removeprefix("kvroute_").startswith(COUNTS)}
    assert {sample.partition("{")[0] for sample in found} == {f"kvroute_{name}" for name in COUNTS}
    return found


async def ask(rig: Rig, text: str) -> tuple[int, str]:
    """Send one request; return status and body."""
    body = {"model": MODEL, "prompt": f"{text} {PROMPT}", "max_tokens": 4}
    async with rig.session.post(f"{rig.url}/v1/completions", json=body) as response:
        return response.status, await response.text()


def test_a_changed_selector_moves_all_requests(tmp_path: Path) -> None:
    """Every request is answered while the new pods take over; then those that are not selected any more get nothing,
    although they serve on."""

    async def main() -> None:
        front = PoolFront({"group": "blue"})
        async with serving(tmp_path, front) as rig:
            for group in ("blue", "green"):
                for role in ("prefill", "decode", "decode"):
                    await rig.join(role, group=group)
            names = sorted(rig.pods)
            blue = {f"llm.{name}" for name in names if name[-1] in "012"}
            green = {f"llm.{name}" for name in names} - blue
            await ready(rig)
            await until_members(rig, blue)
            await front.serves(rig)
            load, lag = Load(rig), Lag()
            clients = [asyncio.create_task(load.run(number)) for number in range(CLIENTS)]
            ticker = asyncio.create_task(lag.run())
            await until(lambda: load.answers > 50)
            began_s = time.time()
            await change_pool(rig, selector={"matchLabels": {"group": "green"}})
            await until_members(rig, green)
            moved_s = time.time()
            answers = load.answers
            await until(lambda: load.answers > answers + 100)
            load.over.set()
            await asyncio.gather(*clients)
            ticker.cancel()
            assert not load.faults
            assert decodes(rig) == load.answers
            of_group = {f"llm.{name}": slot for name, slot in rig.pods.items()}
            assert not [at for name in blue for at, _ in of_group[name].arrivals if at > moved_s + lag.longest_s]
            assert not [at for name in green for at, _ in of_group[name].arrivals if at < began_s]
            assert all(of_group[name].arrivals for name in green if "decode" in name)

    asyncio.run(asyncio.wait_for(main(), 400))
    assert "cluster_change_failed" not in {line.get("event") for line in log_lines(tmp_path)}


async def until_members(rig: Rig, names: set[str]) -> None:
    """Wait until the picker has exactly these engines."""
    while set(await rig.seen()) != names:
        await asyncio.sleep(0.05)


def test_pods_of_a_pool_come_and_go_under_load(tmp_path: Path) -> None:
    """Every request is answered once and whole, and no two decode engines have had it; no engine gets requests long
    after its pod was deleted; at the end the picker has exactly the server's pods, and nothing is booked on them."""

    async def main() -> None:
        front = PoolFront(ENGINES)
        async with serving(tmp_path, front) as rig:
            for role in ("prefill", "decode") * 3:
                await rig.join(role)
            await ready(rig)
            await equal(rig)
            await front.serves(rig)
            load, disturbances, lag = Load(rig), Disturbances(rig), Lag()
            clients = [asyncio.create_task(load.run(number)) for number in range(CLIENTS)]
            ticker = asyncio.create_task(lag.run())
            changes = await churn(rig, disturbances)
            await until(lambda: not rig.ending)
            while not any((await booked(rig)).values()):
                await asyncio.sleep(0.05)
            load.over.set()
            await asyncio.gather(*clients)
            ticker.cancel()
            await equal(rig)
            await disturbances.finish()
            assert not load.faults
            assert decodes(rig) == load.answers
            assert changes >= CHURN_S / CHANGE_S / 2
            assert not too_late(rig, disturbances, lag.longest_s)
            reused = [slot for slot in rig.slots if len({owner for _, owner in slot.arrivals}) > 1]
            assert reused, "no address was used by two pods"
            while any((await booked(rig)).values()):
                await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(main(), 800))
    events = {line.get("event") for line in log_lines(tmp_path)}
    assert {"discovery_failing", "discovery_recovered"} <= events
    assert not {"cluster_change_failed", "discovery_failed", "check_failed", "picker_bypassed"} & events


def test_a_deleted_pool_is_503_until_it_is_back(tmp_path: Path) -> None:
    """The picker answers with one sentence, and Envoy goes on to ask it."""

    async def main() -> None:
        front = PoolFront(ENGINES)
        async with serving(tmp_path, front) as rig:
            for role in ("prefill", "decode"):
                await rig.join(role)
            await ready(rig)
            await front.serves(rig)
            assert (await ask(rig, "before"))[0] == 200
            await delete_pool(rig)
            await until_members(rig, set())
            for _ in range(2):
                status, answer = await ask(rig, "deleted")
                assert (status, json.loads(answer)["error"]["type"]) == (503, "service_unavailable")
            await create_pool(rig, ENGINES)
            await equal(rig)
            await ready(rig)
            await front.serves(rig)
            assert (await ask(rig, "after"))[0] == 200

    asyncio.run(asyncio.wait_for(main(), 400))
    reasons = [line["reason"] for line in log_lines(tmp_path) if line.get("kind") == "left out"]
    assert reasons == ["InferencePool llm/engines: metadata.name: it does not exist; create it"]
