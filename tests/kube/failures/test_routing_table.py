"""The proposal's table of runtime routing, with real requests: from labels of nodes to the engines that served."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.kube.event_loop import scenario
from tests.kube.failures.chain_rig import Chain, chain
from tests.kube.resources.router_examples import Manifest, constrained, router, topology
from tests.serve.rig import GatewayResponse, RunningGateway
from tests.waiting import until

RACKS = {"n1": "r1", "n2": "r2", "n3": "r3", "n4": ""}
REQUESTS = 12


async def served(made: Chain, spec: Manifest, unlabelled: str = "", **engines: str) -> RunningGateway:
    """Start engines, and a gateway that has found all of them.

    Args:
        spec: the KvRouter.
        unlabelled: an engine that starts before the KvRouter exists, and therefore without topology files.
        engines: node of each engine, whose name begins with its role.
    """
    await made.nodes(**RACKS)
    names = {name.replace("_", "-"): on for name, on in engines.items()}
    if unlabelled:
        await made.start(unlabelled, _role(unlabelled), names.pop(unlabelled))
        await made.engines(unlabelled)
    # With the default policy one instance serves a request alone, and no transfer leaves a domain.
    await made.route({**spec, "spec": {**spec["spec"], "policy": "foresight"}})
    for name, on in names.items():
        await made.start(name, _role(name), on)
    await made.engines(*names)
    gateway = await made.gateway()
    await until(lambda: _up(gateway) == {f"serving.{name}" for name in made.machines})
    return gateway


def _role(name: str) -> str:
    return name.rstrip("0123456789-")


def _up(gateway: RunningGateway) -> set[str]:
    engines = gateway.gateway.runtime.engines
    return {name for name, engine in engines.items() if engine.availability.up}


async def asked(gateway: RunningGateway) -> list[GatewayResponse]:
    """Send requests with different prompts, all at once, so that load would spread them."""
    prompts = [f"{number} What is a KV cache? " * 20 for number in range(REQUESTS)]
    return list(await asyncio.gather(*(gateway.ask(prompt) for prompt in prompts)))


def users(made: Chain) -> dict[str, int]:
    """Return the number of requests that each engine has served."""
    return {name: len(machine.engine.received) for name, machine in made.machines.items() if machine.engine}


def pairs(made: Chain) -> set[str]:
    """Return the engines that have served."""
    return {name for name, count in users(made).items() if count}


REFUSAL = "there is no decode instance in the prefill instance's rack, and the constraint rack:required allows no other"


@pytest.mark.parametrize(
    ("policy", "status"),
    [
        (None, 503),
        pytest.param("required", 503, marks=pytest.mark.slow),
        ("fallback", 200),
        pytest.param("preferred", 200, marks=pytest.mark.slow),
    ],
)
def test_row_no_decode_in_the_domain(policy: str | None, status: int, tmp_path: Path) -> None:
    """`fail`, the default: an error to the client. `fallback`: a warning, and any decode engine."""

    async def run() -> None:
        async with chain(tmp_path) as made:
            spec = constrained(mismatchPolicy=policy)
            gateway = await served(made, spec, prefill_0="n1", decode_0="n2", decode_1="n3")
            responses = await asked(gateway)
            assert [response.status for response in responses] == [status] * REQUESTS
            if status == 503:
                assert REFUSAL in responses[0].body.decode()
                assert pairs(made) <= {"prefill-0"}
            else:
                assert users(made)["prefill-0"] == REQUESTS
                assert pairs(made) & {"decode-0", "decode-1"}

    scenario(run())


def test_a_fallback_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The warning of the row above, with the number of decisions that left the domain."""

    async def run() -> None:
        async with chain(tmp_path) as made:
            spec = constrained(mismatchPolicy="fallback")
            gateway = await served(made, spec, prefill_0="n1", decode_0="n2")
            assert [response.status for response in await asked(gateway)] == [200] * REQUESTS

    scenario(run())
    assert "constraint_fallback" in caplog.text


@pytest.mark.parametrize("policy", ["fail", pytest.param("fallback", marks=pytest.mark.slow)])
def test_row_a_worker_without_its_level(policy: str, tmp_path: Path) -> None:
    """It is excluded while the domain has an engine, whatever its load is."""

    async def run() -> None:
        async with chain(tmp_path) as made:
            spec = constrained(mismatchPolicy=policy)
            gateway = await served(made, spec, "decode-9", prefill_0="n1", decode_0="n1", **{"decode-9": "n4"})
            assert [response.status for response in await asked(gateway)] == [200] * REQUESTS
            assert pairs(made) == {"prefill-0", "decode-0"}

    scenario(run())


@pytest.mark.parametrize(("policy", "status"), [("fail", 503), ("fallback", 200)])
def test_row_only_a_worker_without_its_level(policy: str, status: int, tmp_path: Path) -> None:
    """It is eligible as a fallback when nothing else is there, and never under `fail`."""

    async def run() -> None:
        async with chain(tmp_path) as made:
            spec = constrained(mismatchPolicy=policy)
            gateway = await served(made, spec, "decode-9", prefill_0="n1", **{"decode-9": "n4"})
            responses = await asked(gateway)
            assert [response.status for response in responses] == [status] * REQUESTS
            assert pairs(made) - {"prefill-0"} == ({"decode-9"} if status == 200 else set())

    scenario(run())


def test_row_no_level(tmp_path: Path) -> None:
    """Without a constraint nothing is filtered and nothing is injected."""

    async def run() -> None:
        async with chain(tmp_path) as made:
            gateway = await served(made, router(), prefill_0="n1", decode_0="n2")
            assert [response.status for response in await asked(gateway)] == [200] * REQUESTS
            assert pairs(made) == {"prefill-0", "decode-0"}
            pod = await made.rig.get("Pod", "decode-0") or {}
            assert "initContainers" not in pod["spec"]
            assert not any(key.startswith("kvroute.io/topology.") for key in pod["metadata"]["labels"])

    scenario(run())


@pytest.mark.parametrize("policy", ["fail", pytest.param("fallback", marks=pytest.mark.slow)])
def test_row_prefill_engines_with_a_decode_engine_in_their_domain_come_first(policy: str, tmp_path: Path) -> None:
    """A prefill engine whose domain has no decode engine gets nothing, whatever the load of the other one is."""

    async def run() -> None:
        async with chain(tmp_path) as made:
            spec = constrained(mismatchPolicy=policy)
            gateway = await served(made, spec, prefill_0="n1", prefill_1="n2", decode_0="n2", decode_1="n3")
            assert [response.status for response in await asked(gateway)] == [200] * REQUESTS
            assert pairs(made) == {"prefill-1", "decode-0"}

    scenario(run())


def test_row_a_decode_engine_that_joins_ends_the_window(tmp_path: Path) -> None:
    """With no decode engine in any domain requests fail; they succeed as soon as one has joined, and fail again when it
    has gone."""

    async def run() -> None:
        async with chain(tmp_path) as made:
            gateway = await served(made, constrained(), prefill_0="n1", decode_0="n2")
            assert (await gateway.ask()).status == 503
            await made.start("decode-1", "decode", "n1")
            await made.engines("decode-1")
            await made.rig.until(lambda: _serves(gateway))
            assert pairs(made) == {"prefill-0", "decode-1"}
            await made.rig.delete("Pod", "decode-1")
            await made.rig.until(lambda: _refuses(gateway))

    async def _serves(gateway: RunningGateway) -> bool:
        return (await gateway.ask()).status == 200

    async def _refuses(gateway: RunningGateway) -> bool:
        response = await gateway.ask()
        return response.status == 503 and "rack:required allows no other" in response.body.decode()

    scenario(run())


def test_labels_of_pods_decide_where_nodes_cannot_be_read(tmp_path: Path) -> None:
    """The copies that the operator has made are enough for a gateway without rights on nodes."""

    async def run() -> None:
        async with chain(tmp_path) as made:
            await made.rig.delete("ClusterRole", "kvroute-gateway-nodes", "")
            gateway = await served(made, constrained(), prefill_0="n1", decode_0="n1", decode_1="n2")
            assert [response.status for response in await asked(gateway)] == [200] * REQUESTS
            assert pairs(made) == {"prefill-0", "decode-0"}

    scenario(run())


def test_zones_are_domains_as_well(tmp_path: Path) -> None:
    """Engines of several zones join, and a constraint on the zone keeps transfers inside."""

    async def run() -> None:
        async with chain(tmp_path, levels=topology(zone="example.com/rack")) as made:
            spec = constrained("zone", mismatchPolicy="fallback")
            gateway = await served(made, spec, prefill_0="n1", decode_0="n1", decode_1="n2", decode_2="n3")
            assert [response.status for response in await asked(gateway)] == [200] * REQUESTS
            assert pairs(made) == {"prefill-0", "decode-0"}
            await made.rig.delete("Pod", "decode-0")
            await made.rig.until(lambda: _elsewhere(made, gateway))

    async def _elsewhere(made: Chain, gateway: RunningGateway) -> bool:
        return (await gateway.ask()).status == 200 and bool(pairs(made) & {"decode-1", "decode-2"})

    scenario(run())
