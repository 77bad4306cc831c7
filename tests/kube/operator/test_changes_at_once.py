"""What the operator sees without a resync, how rarely it looks for kinds that are absent, and what it logs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from tests.commands import kvroute_command
from tests.kube.apiserver.faults import Fault
from tests.kube.event_loop import scenario
from tests.kube.kubeconfigs import kubeconfig
from tests.kube.operator.cluster_examples import engines, gateway_pod, node
from tests.kube.operator.operator_rig import NAMESPACE, Rig, installed, plain
from tests.kube.resources.router_examples import Manifest, router, topology

from kvroute.kube.operator.driver import OperatorDriver
from kvroute.kube.operator.rights import GROVE

HOUR_S = 3600.0


async def status(rig: Rig) -> Manifest:
    """Return the status of the KvRouter."""
    found: Manifest = (await rig.get("KvRouter", "chat") or {}).get("status") or {}
    return found


async def ready(rig: Rig, reason: str, replicas: int) -> bool:
    """Return whether the condition `Ready` and the number of gateways are these."""
    found = await status(rig)
    reasons = [condition["reason"] for condition in found.get("conditions", []) if condition["type"] == "Ready"]
    return (reasons, found.get("readyReplicas")) == ([reason], replicas)


async def leads(operator: OperatorDriver, expected: bool = True) -> bool:
    """Return whether an operator leads, or does not."""
    return operator.leads is expected


async def started(rig: Rig) -> None:
    """Create a KvRouter with engines that are ready."""
    await rig.make(plain(topology()))
    await rig.make(plain(node("n1", zone="z1", rack="r1")))
    for engine in engines(""):
        await rig.schedule(plain(engine), "n1")
    await rig.make(plain(router()))


@pytest.mark.parametrize("controllers", [False, True])
def test_a_gateway_that_becomes_ready_or_ends_is_seen_at_once(controllers: bool) -> None:
    """The next resync is in an hour. A controller of Deployments that counts otherwise, or nothing, has no effect."""

    async def run() -> None:
        async with installed(controllers=controllers, cleanup_s=0.2) as rig, rig.operator(resync_s=HOUR_S) as operator:
            await rig.until(partial(leads, operator))
            await started(rig)
            await rig.until(partial(ready, rig, "NoGateway", 0))
            await rig.patch("Deployment", "chat", {"status": {"readyReplicas": 3, "replicas": 3}}, "status")
            for count, name in enumerate(("one", "two"), start=1):
                await rig.schedule(plain(gateway_pod("chat", name)), "n1")
                await rig.until(partial(ready, rig, "Serving", count))
            for count, name in ((1, "one"), (0, "two")):
                await rig.admin.delete(f"api/v1/namespaces/serving/pods/{name}?gracePeriodSeconds=0")
                await rig.until(partial(ready, rig, "Serving" if count else "NoGateway", count))

    scenario(run())


def test_the_server_of_the_tests_overwrites_the_status_of_deployments() -> None:
    """As a controller-manager does: a number that no pod stands for is gone again."""

    async def run() -> None:
        async with installed(controllers=True) as rig, rig.operator():
            await started(rig)

            async def counted() -> bool:
                found = (await rig.get("Deployment", "chat") or {}).get("status") or {}
                return "observedGeneration" in found and "readyReplicas" not in found

            await rig.until(counted)
            await rig.patch("Deployment", "chat", {"status": {"readyReplicas": 3, "replicas": 3}}, "status")
            await rig.until(counted)

    scenario(run())


def test_absent_kinds_are_looked_for_rarely() -> None:
    """Neither Grove nor ServiceMonitors are installed. The pauses grow; those after an error do not."""

    async def run() -> None:
        async with installed() as rig, rig.operator(absent_s=HOUR_S) as operator:
            await rig.until(partial(leads, operator))
            await started(rig)

            async def asked(path: str, count: int) -> bool:
                return Counter(rig.sent)[path] >= count

            lease = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/kvroute-operator"
            await rig.until(partial(asked, lease, 200))
            times = Counter(rig.sent)
            assert [1 < times[f"/{kind.path()}"] <= 20 for kind in GROVE] == [True, True], times
            assert times["/apis/monitoring.coreos.com/v1"] == 1
            assert times["/api/v1/namespaces/serving/configmaps/chat-cluster"] > 1

    scenario(run())


def test_a_leader_that_cannot_renew_its_lease_says_once_that_it_leads_no_more(caplog: pytest.LogCaptureFixture) -> None:
    """It stops to act when the time is over, between two attempts."""
    caplog.set_level(logging.INFO, logger="kvroute.operator")

    def lines() -> list[str]:
        return [record.message for record in caplog.records if record.message.startswith("this operator")]

    async def run() -> None:
        async with installed() as rig, rig.operator(give_up_s=0.3) as operator:
            await rig.until(partial(leads, operator))
            rig.server.faults.waiting.append(Fault(count=10_000, verbs=["update"], resource="leases", code=500))
            await rig.until(partial(leads, operator, False))
            rig.sent.clear()

            async def tried() -> bool:
                return sum("leases" in path for path in rig.sent) > 10

            await rig.until(tried)
            assert lines() == ["this operator leads", "this operator does not lead any more"]
            rig.server.faults.clear()
            await rig.until(partial(leads, operator))
            await rig.until(partial(_logged, 3))
            assert lines()[2:] == ["this operator leads"]

    async def _logged(count: int) -> bool:
        return len(lines()) >= count

    scenario(run())


def test_options_of_the_command(tmp_path: Path) -> None:
    """At the level `debug` no library prints its traces of every read of a socket. Gateways get the pull secrets."""

    async def run() -> None:
        async with installed() as rig:
            await started(rig)
            access = kubeconfig(tmp_path, rig.server.url, {"token": "operator"})
            options = ["--image", "x", "--no-webhook", "--kubeconfig", str(access), "--log-level", "debug"]
            options += ["--image-pull-secret", "first", "--image-pull-secret", "second"]
            process = await asyncio.create_subprocess_exec(
                *kvroute_command("kube", "operator", *options), stderr=asyncio.subprocess.PIPE
            )
            try:
                await rig.until(partial(rig.get, "Deployment", "chat"))
                made = await rig.get("Deployment", "chat") or {}
                secrets = made["spec"]["template"]["spec"]["imagePullSecrets"]
                assert secrets == [{"name": "first"}, {"name": "second"}]
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
                _, written = await process.communicate()
            loggers = {line.split()[3].rstrip(":") for line in written.decode().splitlines()}
            assert loggers == {"kvroute.operator"}

    scenario(run())
