"""The operator when something fails at each of its writes: an error before it, an error after it, or its own end."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.commands import kvroute_command
from tests.kube.apiserver.faults import Fault
from tests.kube.event_loop import scenario
from tests.kube.kubeconfigs import kubeconfig
from tests.kube.operator.cluster_examples import gateway_pod, node, pod
from tests.kube.operator.operator_rig import Rig, installed, plain
from tests.kube.resources.router_examples import Manifest, constrained, topology

from kvroute.kube.operator.driver import OperatorDriver
from kvroute.kube.operator.role_switch import TARGET_ROLE

WRITES = ["create", "patch", "delete"]
"""All writes but those of the Lease, which is updated all the time."""
FAULTS: dict[str, dict[str, Any]] = {
    "error before the write": {"code": 500},
    "error after the write": {"code": 500, "after": True},
    "conflict": {"code": 409},
    "connection closed before the write": {"drop": True},
    "connection closed after the write": {"drop": True, "after": True},
}
LABELS = {"kvroute.io/topology.zone": "z1", "kvroute.io/topology.rack": "r1"}
KINDS = ("ConfigMap", "ServiceAccount", "RoleBinding", "Service", "NetworkPolicy", "Deployment", "PodDisruptionBudget")


@dataclass
class Attempt:
    """One KvRouter with three engines, and what has been seen of their labels."""

    rig: Rig
    name: str
    seen: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """Values of each topology label and of the role, by pod and label, each time they change."""

    def pods(self) -> tuple[str, ...]:
        """Return the names of the engine pods."""
        return tuple(f"{self.name}-{role}" for role in ("prefill-0", "prefill-1", "decode-0"))

    async def create(self) -> None:
        """Create the KvRouter and its engines."""
        labels = {"app": self.name}
        for name in self.pods():
            role = name.rpartition("-")[0].rpartition("-")[2]
            await self.rig.schedule(plain(pod(name, role, labels=labels)), "n1")
        obj = constrained()
        spec = obj["spec"] | {"engines": {"selector": {"matchLabels": labels}}, "drainSeconds": 1}
        await self.rig.make(plain(obj) | {"metadata": {"name": self.name, "namespace": "serving"}, "spec": spec})

    async def look(self) -> list[Manifest]:
        """Read the engine pods, and note labels that have changed."""
        found = [await self.rig.get("Pod", name) for name in self.pods()]
        for known in filter(None, found):
            for key in (*LABELS, "kvroute.io/role"):
                history = self.seen.setdefault((known["metadata"]["name"], key), [])
                value = known["metadata"]["labels"].get(key, "")
                if not history or history[-1] != value:
                    history.append(value)
        return [pod for pod in found if pod]

    async def serves(self) -> bool:
        """Return whether everything is as it should be; starts a gateway when its Deployment exists."""
        made = gateway_pod(self.name)
        if await self.rig.get("Deployment", self.name) and not await self.rig.get("Pod", made["metadata"]["name"]):
            await self.rig.schedule(plain(made), "n1")
        labelled = all(LABELS.items() <= pod["metadata"]["labels"].items() for pod in await self.look())
        found = await self.rig.get("KvRouter", self.name) or {}
        conditions = (found.get("status") or {}).get("conditions") or ()
        return labelled and ("Ready", "True") in [(condition["type"], condition["status"]) for condition in conditions]

    async def switched(self) -> bool:
        """Return whether the first prefill engine has become a decode engine, and everything is in order."""
        serves = await self.serves()
        [first, *_] = await self.look()
        labels, notes = first["metadata"]["labels"], first["metadata"].get("annotations") or {}
        kept = [key for key in notes if key.startswith("kvroute.io/") and key != "kvroute.io/topology-labels"]
        return serves and labels["kvroute.io/role"] == "decode" and TARGET_ROLE not in labels and not kept

    async def check(self) -> None:
        """Assert that nothing exists twice, and that no label has changed back and forth."""
        for kind in KINDS:
            names = [obj["metadata"]["name"] for obj in await self.rig.list(kind) if self._owns(obj)]
            assert len(names) == 1, (kind, names)
        events = [event for event in await self.rig.list("Event") if self.name in event["involvedObject"]["name"]]
        texts = [(event["involvedObject"]["name"], event["reason"], event["message"]) for event in events]
        assert len(texts) == len(set(texts)), texts
        for (name, key), history in self.seen.items():
            switched = key == "kvroute.io/role" and name.endswith("prefill-0")
            assert len(history) == len(set(history)) <= (3 if switched else 2), (name, key, history)

    async def remove(self) -> None:
        """Delete everything that a user has made, and wait until the operator has let it go."""
        await self.rig.delete("KvRouter", self.name)
        await self.rig.until(self._gone)
        for name in self.pods():
            await self.rig.admin.delete(f"api/v1/namespaces/serving/pods/{name}?gracePeriodSeconds=0")

    async def _gone(self) -> bool:
        return await self.rig.get("KvRouter", self.name) is None

    def _owns(self, obj: Manifest) -> bool:
        owners = obj["metadata"].get("ownerReferences") or []
        return any((owner["kind"], owner["name"]) == ("KvRouter", self.name) for owner in owners)


@contextlib.asynccontextmanager
async def cluster() -> AsyncIterator[tuple[Rig, Attempt]]:
    """Run an API server with a topology and a node."""
    async with installed() as rig:
        await rig.make(plain(topology()))
        await rig.make(plain(node("n1", zone="z1", rack="r1")))
        yield rig, Attempt(rig, "chat")


async def lives(made: Attempt) -> None:
    """Create a KvRouter and its engines, switch the role of one, check, and delete the KvRouter."""
    await made.create()
    await made.rig.until(made.serves)
    await made.rig.patch("Pod", made.pods()[0], {"metadata": {"labels": {TARGET_ROLE: "decode"}}})
    await made.rig.until(made.switched)
    await made.check()
    await made.remove()


async def leads(operator: OperatorDriver) -> bool:
    """Return whether an operator leads."""
    return operator.leads


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FAULTS)
def test_every_third_write_fails(name: str, seed: int) -> None:
    """On average, in an order that no retry follows; the operator goes on by itself."""

    async def run() -> None:
        async with cluster() as (rig, made), rig.operator(retry_max_s=0.1) as operator:
            await rig.until(partial(leads, operator))
            chance = random.Random(seed)
            fault = partial(Fault, verbs=WRITES, user_agent="operator", **FAULTS[name])
            waiting = rig.server.faults.waiting
            waiting += [fault(skip=chance.randint(0, 4)) for _ in range(100)]
            await lives(made)
            assert sum(not task.count for task in waiting) > 6

    scenario(run())


def test_a_new_pod_does_not_wait_because_another_object_is_refused() -> None:
    """The next attempt after a failure is due in an hour; a change comes first."""

    async def run() -> None:
        hour_s = 3600.0
        operated = partial(Rig.operator, retry_first_s=hour_s, retry_max_s=hour_s, retry_changed_s=0.05)
        async with cluster() as (rig, made), operated(rig) as operator:
            await rig.until(partial(leads, operator))
            refused = Fault(count=1000, verbs=WRITES, resource="networkpolicies", user_agent="operator", code=403)
            rig.server.faults.waiting.append(refused)
            await made.create()

            async def tried() -> bool:
                return refused.count < 1000

            await rig.until(tried)
            await rig.schedule(plain(pod("late", "decode", labels={"app": made.name})), "n1")

            async def labelled() -> bool:
                found = await rig.get("Pod", "late")
                return found is not None and LABELS.items() <= found["metadata"]["labels"].items()

            await rig.until(labelled)
            rig.server.faults.clear()
            await rig.patch("Pod", "late", {"metadata": {"labels": {"any": "change"}}})
            await rig.until(made.serves)

    scenario(run())


@pytest.mark.parametrize("after", [False, True])
def test_an_operator_ends_at_every_write(after: bool) -> None:
    """Each operator ends with one of its first writes, before or after it is carried out; the next one finds everything
    in the objects."""

    async def run() -> None:
        async with cluster() as (rig, made):
            ends, chance = 0, random.Random(3)

            async def operators() -> None:
                nonlocal ends
                while True:
                    async with rig.operator(f"number-{ends}", retry_max_s=0.1) as operator:
                        await rig.until(partial(leads, operator))
                        fault = Fault(
                            verbs=WRITES, user_agent="operator", skip=chance.randint(0, 8), code=500, after=after
                        )
                        rig.server.faults.waiting[:] = [fault]
                        while fault.count:
                            await asyncio.sleep(0.002)
                    ends += 1

            running = asyncio.create_task(operators())
            try:
                await made.create()
                await rig.until(made.serves)
                await made.check()
            finally:
                running.cancel()
                await asyncio.wait([running])
            assert ends > 2

    scenario(run())


@pytest.mark.parametrize("writes", [2, pytest.param(9, marks=pytest.mark.slow)])
def test_a_killed_process_leaves_its_work_to_the_next_one(writes: int, tmp_path: Path) -> None:
    """`kvroute kube operator`, killed after a write; the next process has the same name in the Lease."""

    async def run() -> None:
        async with cluster() as (rig, made):
            access = kubeconfig(tmp_path, rig.server.url, {"token": "operator"})
            fault = Fault(verbs=WRITES, path="fieldManager", skip=writes, drop=True, after=True)
            rig.server.faults.waiting.append(fault)
            await made.create()
            async with process(access) as first:
                while fault.count:
                    await asyncio.sleep(0.002)
                first.kill()
            async with process(access):
                await rig.until(made.serves)
                await made.check()

    scenario(run())


@contextlib.asynccontextmanager
async def process(access: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run an operator as a process; kill it at the end."""
    options = ["--image", "x", "--no-webhook", "--identity", "me", "--kubeconfig", str(access)]
    started = await asyncio.create_subprocess_exec(*kvroute_command("kube", "operator", *options))
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            started.kill()
        await started.wait()
