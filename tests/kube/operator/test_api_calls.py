"""The operator's connections: a cancellation at any moment leaves none open."""

from __future__ import annotations

import asyncio
import contextlib

import httpx2
from tests.kube.apiserver.faults import Fault
from tests.kube.event_loop import scenario
from tests.kube.operator.operator_rig import installed
from tests.waiting import until

from kvroute.kube.operator.api_calls import ApiCalls
from kvroute.kube.operator.rights import OWNED, PODS

TICKS = 20
"""Rounds of the event loop in which a client with as many connections is closed."""


def test_a_cancellation_while_connections_are_closed_leaves_none_open() -> None:
    """Parallel reads have opened eight connections, and the failure of a write closes all of them."""

    async def run() -> None:
        async with installed() as rig:
            for ticks in range(TICKS):
                calls = ApiCalls(rig.connect_as("operator"))
                await asyncio.gather(*(calls.get(OWNED[0], "serving", f"absent-{index}") for index in range(8)))
                fault = Fault(verbs=["patch"], drop=True)
                rig.server.faults.waiting.append(fault)
                writing = asyncio.create_task(calls.patch(PODS, "serving", "absent", {}))
                await until(lambda: not fault.count)  # noqa: B023
                for _ in range(ticks):
                    await asyncio.sleep(0)
                writing.cancel()
                with contextlib.suppress(asyncio.CancelledError, httpx2.HTTPError):
                    await writing
                await calls.close()

    scenario(run())
