"""Load and disturbances of a cluster in processes: clients, pods that come and go, cut watches, a killed API server."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from tests.live.kubernetes_rig import GATEWAY_USER, MODEL, SLOTS, Rig
from tests.waiting import until

CHURN_S, CHANGE_S = 90.0, 3.0
"""Duration of the load, and time between two changes: 20 a minute."""
LATEST_S = 2.0
"""Time after which no request may reach an engine whose pod is being deleted."""
CLIENTS, TOKENS = 6, 8
PROMPT = "the quick brown fox " * 40


@dataclass(slots=True)
class Load:
    """Clients that ask without a pause, and what they got."""

    rig: Rig
    over: asyncio.Event = field(default_factory=asyncio.Event)
    answers: int = 0
    faults: list[str] = field(default_factory=list)

    async def run(self, number: int) -> None:
        """Ask until it is over; every answer must be whole."""
        for turn in itertools.count():
            if self.over.is_set():
                return
            body: dict[str, Any] = {"model": MODEL, "prompt": f"{number} {turn} {PROMPT}", "max_tokens": TOKENS}
            body["stream"] = bool(turn % 2)
            async with self.rig.session.post(f"{self.rig.url}/v1/completions", json=body) as response:
                text = await response.text()
            if response.status != 200 or _tokens(text, streamed=body["stream"]) != TOKENS:
                self.faults.append(f"{response.status}: {text[:300]}")
            self.answers += 1


def _tokens(text: str, *, streamed: bool) -> int:
    """Return the number of tokens of an answer; 0 if it is not whole."""
    if not streamed:
        return int(json.loads(text)["usage"]["completion_tokens"])
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return len(events) - 1 if events[-1:] == ["[DONE]"] and "error" not in text else 0


@dataclass(slots=True)
class Lag:
    """The longest time by which this machine has delayed this process."""

    longest_s: float = 0.0

    async def run(self) -> None:
        """Measure for ever."""
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(0.05)
            self.longest_s = max(self.longest_s, time.monotonic() - began_s - 0.05)


@dataclass(slots=True)
class Disturbances:
    """Watches that were cut, and when the gateway was connected again by the server's own records."""

    rig: Rig
    cuts: list[tuple[float, str]] = field(default_factory=list)
    """Time of each cut, and the verb of the gateway's request that ends it."""
    audit: list[dict[str, Any]] = field(default_factory=list)
    """Requests of servers that have been killed."""

    async def drop(self) -> None:
        """Cut all watches; they are resumed."""
        self.cuts.append((time.time(), "watch"))
        await self.rig.client.must("POST", "/_control/drop-watches", {})

    async def compact(self) -> None:
        """Cut all watches after the history is lost, so that they get 410 and all objects are listed."""
        await self.rig.client.must("POST", "/_control/compact", {})
        self.cuts.append((time.time(), "list"))
        await self.rig.client.must("POST", "/_control/drop-watches", {})

    async def outage(self) -> None:
        """Kill the API server, serve without it for a while, and start it again."""
        self.audit += await self._requests()
        self.cuts.append((time.time(), "list"))
        self.rig.api.kill()
        before = sum(len(slot.arrivals) for slot in self.rig.slots)
        await until(lambda: sum(len(slot.arrivals) for slot in self.rig.slots) > before + 50)
        await self.rig.api.start()

    async def _requests(self) -> list[dict[str, Any]]:
        found = await self.rig.client.must("GET", "/_control/audit")
        return [
            request
            for request in found["requests"]
            if request["user"] == GATEWAY_USER and request["resource"] == "pods"
        ]

    async def finish(self) -> None:
        """Take the records of the last server."""
        self.audit += await self._requests()

    def connected_s(self, at_s: float) -> float:
        """Return from when on the gateway could know what had happened at a time."""
        cut = max((cut for cut in self.cuts if cut[0] <= at_s + LATEST_S), default=None)
        if cut is None:
            return at_s
        back = [float(call["time_s"]) for call in self.audit if call["time_s"] >= cut[0] and call["verb"] == cut[1]]
        assert back, "the gateway did not come back after a cut"
        return max(at_s, min(back))


async def churn(rig: Rig, disturbances: Disturbances) -> int:
    """Let pods join and leave at a steady rate, with a disturbance from time to time; return the number of changes."""
    draw, changes, began_s = random.Random(7), 0, time.monotonic()
    plan = {5: disturbances.drop, 10: disturbances.compact, 16: disturbances.outage, 24: disturbances.drop}
    while plan or time.monotonic() - began_s < CHURN_S:
        if changes in plan:
            await plan.pop(changes)()
        role = draw.choice(("prefill", "decode"))
        names = sorted(name for name in rig.pods if name.startswith(role))
        with suppress(aiohttp.ClientConnectionError):
            if len(names) < 3 or (len(names) < SLOTS - 2 and draw.random() < 0.5):
                await rig.join(role)
            else:
                await rig.leave(draw.choice(names))
            changes += 1
        await asyncio.sleep(max(0.0, began_s + changes * CHANGE_S - time.monotonic()))
    return changes


async def ready(rig: Rig) -> None:
    """Wait until the gateway serves."""

    async def is_ready() -> bool:
        async with rig.session.get(f"{rig.admin}/ready") as response:
            return response.status == 200

    while not await is_ready():
        await asyncio.sleep(0.05)


async def equal(rig: Rig) -> None:
    """Wait until the gateway has exactly the pods of the server."""
    while await rig.seen() != await rig.expected():
        await asyncio.sleep(0.1)


def too_late(rig: Rig, disturbances: Disturbances, lag_s: float) -> list[str]:
    """Return the requests that reached an engine too long after its pod was deleted."""
    return [
        f"{slot.address}: {arrived_s - deleted_s:.3f} s after the deletion, {arrived_s - known_s:.3f} s after its news"
        for slot in rig.slots
        for arrived_s, owner in slot.arrivals
        if (deleted_s := rig.deleted_s.get(owner)) is not None
        and arrived_s > (known_s := disturbances.connected_s(deleted_s)) + LATEST_S + lag_s
    ]
