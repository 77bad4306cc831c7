"""Scheduler and agents over gRPC on loopback, in one event loop."""

from __future__ import annotations

import asyncio
import gc
import re
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.collectives.scheduler.agent_clusters import cluster_of
from tests.waiting import HANGS_S, until

from kvroute.collectives.scheduler.metrics import scheduler_metrics
from kvroute.collectives.scheduler.service import SchedulerService
from kvroute.collectives.scheduler.tables import Tables
from kvroute.types import InputError
from kvroute_engine.agent.agent import Agent, Sources
from kvroute_engine.agent.agents_pb2 import FromAgent, FromScheduler, Hello
from kvroute_engine.agent.counters import PortCounters, WatchedNic
from kvroute_engine.agent.files import (
    TABLE,
    GroupTraffic,
    TableFile,
    read_file,
    replace_file,
    traffic_path,
)
from kvroute_engine.agent.messages import METHOD, PROTOCOL, hello_message, report_message
from kvroute_engine.agent.metrics import MetricsServer, agent_metrics
from kvroute_engine.agent.reports import AgentName, CounterReport
from kvroute_engine.agent.security import Tls, metadata_of
from kvroute_engine.switch.status import SwitchStatus, write_status

PERIOD_S = 0.05
TOKEN = "0123456789abcdef"
A0, SWITCH = AgentName("server", "a0"), AgentName("switch", "access")


@dataclass
class Rig:
    """A scheduler and what it and the agents have said."""

    folder: Path
    service: SchedulerService
    said: list[str] = field(default_factory=list)

    @property
    def address(self) -> str:
        return self.service.address

    def agent(
        self,
        name: AgentName = A0,
        token: str = "",
        tls: Tls | None = None,
        nics: tuple[WatchedNic, ...] = (),
        switch_status: Path | None = None,
    ) -> Agent:
        folder = self.folder / name.name
        folder.mkdir(exist_ok=True)
        sources = Sources(PortCounters(self.folder, nics), folder, "", switch_status, 1)
        return Agent(name, self.address, sources, self.said.append, token, tls)


@asynccontextmanager
async def scheduler(
    folder: Path,
    address: str = "127.0.0.1:0",
    token: str = "",
    tls: Tls | None = None,
    slots: int = 512,
    first_version: int = 1000,
) -> AsyncIterator[Rig]:
    said: list[str] = []
    tables = Tables(cluster_of(slots=slots), first_version, PERIOD_S)
    service = SchedulerService(tables, said.append, token, settle_s=PERIOD_S)
    try:
        await service.start(address, tls)
        async with running(service.run()):
            yield Rig(folder, service, said)
    finally:
        await service.stop()


@asynccontextmanager
async def running(work: Any) -> AsyncIterator[asyncio.Task[None]]:
    """Run beside the block, and cancel at its end; an error of the work is one of the block."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def within_limit(scenario: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(HANGS_S) as limit:
            await scenario()
        assert not limit.expired(), "the scenario hung"

    try:
        asyncio.run(limited())
    finally:
        gc.collect()  # ends gRPC's threads, without which later tests can fork


def held(folder: Path, name: str = "a0") -> TableFile | None:
    return read_file(folder / name / TABLE, TableFile)


def schemes(table: TableFile | None) -> set[str]:
    return {rule.scheme for rule in table.groups["decode-0"].rules} if table is not None else set()


def status(folder: Path, slots: int, free: int) -> Path:
    path = folder / "switch.json"
    write_status(path, SwitchStatus(time.time(), "127.0.0.1:7300", "python", slots, free, 0, 0))
    return path


def test_an_agent_gets_a_table_and_reports_arrive(tmp_path: Path) -> None:
    """The version that rank 0 uses is known to the scheduler."""

    async def scenario() -> None:
        async with scheduler(tmp_path) as rig:
            agent = rig.agent()
            replace_file(traffic_path(tmp_path / "a0", "decode-0"), GroupTraffic("decode-0", 1, 77, {}, {}))
            async with running(agent.run()):
                await until(lambda: agent.connected and held(tmp_path) is not None)
                await until(lambda: rig.service.tables.versions_in_use() == {"decode-0": 77})
                table = held(tmp_path)
                assert table is not None
                assert table.groups == rig.service.tables.entries
                assert table.version == 1001
                first_s = table.received_unix_s
                await until(lambda: (now := held(tmp_path)) is not None and now.received_unix_s > first_s)
            await until(lambda: not rig.service.agents)
            assert rig.said[-1] == "server a0 is gone"

    within_limit(scenario)


def test_a_switch_without_slots_gives_rings_and_one_with_slots_aggregation(tmp_path: Path) -> None:
    """512 slots are enough for flat aggregation; a smaller switch in its place gives rings again."""

    async def scenario() -> None:
        path = status(tmp_path, 512, 0)
        async with scheduler(tmp_path) as rig:
            agents = rig.agent(), rig.agent(SWITCH, switch_status=path)
            async with running(agents[0].run()), running(agents[1].run()):
                await until(lambda: bool(schemes(held(tmp_path))))
                assert schemes(held(tmp_path)) <= {"ring", "hierarchical-ring"}
                await until(lambda: bool(status(tmp_path, 512, 512)) and "ina" in schemes(held(tmp_path)))
                before = held(tmp_path)
                await until(lambda: bool(status(tmp_path, 256, 256)) and "ina" not in schemes(held(tmp_path)))
                after = held(tmp_path)
                assert before is not None
                assert after is not None
                assert after.version > before.version

    within_limit(scenario)


def test_a_table_stays_and_ages_without_the_scheduler_and_comes_back_newer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scheduler(tmp_path) as rig:
            agent, address = rig.agent(), rig.address
            said = rig.said
            task = asyncio.ensure_future(agent.run())
            await until(lambda: held(tmp_path) is not None)
        await until(lambda: not agent.connected)
        lost = held(tmp_path)
        assert lost is not None
        age_s = agent.age_s()
        assert age_s is not None
        await until(lambda: (agent.age_s() or 0.0) > age_s + 0.5)
        assert held(tmp_path) == lost
        async with scheduler(tmp_path, address, first_version=2000):
            await until(lambda: agent.held.version == 2001)
            now = held(tmp_path)
            assert now is not None
            assert now.version > lost.version
            assert now.received_unix_s > lost.received_unix_s
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        about = [line for line in said if "scheduler" in line]
        assert len(about) == 2
        assert about[0].startswith(f"no scheduler at {address} (")
        assert "table 1001 stays, " in about[0]
        assert about[1].startswith(f"the scheduler at {address} is back; table 1001 is ")

    within_limit(scenario)


def test_a_scheduler_whose_clock_went_back_still_gives_a_higher_version(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scheduler(tmp_path, first_version=5000) as rig, running(rig.agent().run()):
            await until(lambda: held(tmp_path) is not None)
        async with scheduler(tmp_path, first_version=10) as rig:
            agent = rig.agent()
            assert agent.held.version == 5001
            async with running(agent.run()):
                await until(lambda: agent.held.version > 5001)

    within_limit(scenario)


async def refusal(agent: Agent) -> str:
    with pytest.raises(InputError) as caught:
        await agent.run()
    return str(caught.value)


def test_agents_that_the_scheduler_does_not_know_end_with_a_sentence(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scheduler(tmp_path, token=TOKEN) as rig:
            where = f"scheduler {rig.address}: "
            what = "the token is missing or wrong; give the agent the token of the scheduler with --token-file"
            assert await refusal(rig.agent()) == where + what
            assert await refusal(rig.agent(token="x" * 16)) == where + what
            told = await refusal(rig.agent(AgentName("server", "b7"), TOKEN))
            assert told == where + "rack-of-3 has no node 'b7'; use one of: a0, a1, a2"
            told = await refusal(rig.agent(AgentName("switch", "a0"), TOKEN))
            assert told == where + "rack-of-3 has no rack, pod or datacenter 'a0'; use one of: access, dc0"
            assert not rig.said
            agent = rig.agent(token=TOKEN)
            async with running(agent.run()):
                await until(lambda: agent.connected)

    within_limit(scenario)


class ScriptedCall:
    """A call whose messages the test sends."""

    def __init__(self) -> None:
        self.message: asyncio.Future[FromScheduler] = asyncio.get_running_loop().create_future()

    def read(self) -> asyncio.Future[FromScheduler]:
        """Return the next message."""
        return self.message

    async def write(self, message: FromAgent) -> None:
        """Drop a report."""


def test_an_agent_ends_although_a_message_arrives_at_the_same_time(tmp_path: Path) -> None:
    """Python 3.11's `wait_for` loses a cancellation in this case."""

    async def scenario() -> None:
        call = ScriptedCall()
        agent = Agent(A0, "127.0.0.1:1", Sources(PortCounters(tmp_path, ()), tmp_path, "", None, 1), print)
        serving = asyncio.ensure_future(agent._serve(call))
        await asyncio.sleep(0)
        arrived, call.message = call.message, asyncio.get_running_loop().create_future()
        arrived.set_result(FromScheduler())
        serving.cancel()
        await asyncio.wait({serving}, timeout=HANGS_S / 4)
        assert serving.cancelled()

    within_limit(scenario)


def test_a_second_agent_of_a_node_waits_until_the_first_one_is_gone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scheduler(tmp_path) as rig:
            first, second = rig.agent(), rig.agent()
            async with running(second.run()) as waiting:
                async with running(first.run()):
                    await until(lambda: first.connected or second.connected)
                    other = second if first.connected else first
                    await until(lambda: any("an agent for server a0 is connected from" in line for line in rig.said))
                    assert not other.connected
                await until(lambda: second.connected)
                assert not waiting.done()

    within_limit(scenario)


async def told(address: str, *messages: FromAgent, token: str = "") -> tuple[str, str]:
    """Return status and text with which the scheduler ends a call with these messages."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream(METHOD, FromAgent.SerializeToString, FromScheduler.FromString)(
            metadata=metadata_of(token)
        )
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for message in messages:
                await call.write(message)
            if not messages:
                await call.done_writing()
            while await call.read() is not grpc.aio.EOF:
                pass
        return (await call.code()).name, await call.details()


def test_wrong_messages_end_the_call_with_a_status(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scheduler(tmp_path) as rig:
            old = FromAgent(hello=Hello(protocol=PROTOCOL + 1, release="9.9", kind="SERVER", name="a0"))
            assert await told(rig.address, old) == (
                "FAILED_PRECONDITION",
                "the agent (kvroute 9.9) has protocol 2, the scheduler 1; install the same version of kvroute",
            )
            hello, report = hello_message(A0, 0, "1"), report_message(CounterReport(1.0, {9: (1, 1)}))
            assert (await told(rig.address, report))[0] == "FAILED_PRECONDITION"
            assert await told(rig.address) == ("INVALID_ARGUMENT", "an agent begins with Hello")
            assert await told(rig.address, hello, report) == (
                "INVALID_ARGUMENT",
                "server a0: port 9 is not in the cluster file; it has 4; change --nic",
            )
            unnamed = FromAgent(hello=Hello(protocol=PROTOCOL, name="a0"))
            assert (await told(rig.address, unnamed))[0] == "NOT_FOUND"

    within_limit(scenario)


def test_an_agent_says_which_counters_it_cannot_read(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = tmp_path / "class/net/eth0/statistics"
        folder.mkdir(parents=True)
        for name in ("tx_bytes", "rx_bytes"):
            (folder / name).write_text("1\n")
        async with scheduler(tmp_path) as rig:
            agent = rig.agent(nics=(WatchedNic("eth0", 0),))
            async with running(agent.run()):
                await until(lambda: agent.connected)
                (folder / "rx_bytes").rename(folder / "gone")
                await until(lambda: f"counters that cannot be read: {folder / 'rx_bytes'}" in rig.said)
                (folder / "gone").rename(folder / "rx_bytes")
                await until(lambda: "all counters can be read again" in rig.said)

    within_limit(scenario)


def test_a_port_that_is_taken_is_an_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scheduler(tmp_path) as rig:
            with pytest.raises(InputError, match=r"--listen: 127.0.0.1:[0-9]+ cannot be bound"):
                async with scheduler(tmp_path, rig.address):
                    pass

    within_limit(scenario)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority `ca`, certificates `server` and `client` that it signs, and `other`, which it does not."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    for name in ("ca", "other"):
        openssl("req", "-x509", *curve, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    for name in ("server", "client"):
        openssl("req", *curve[:-2], "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
            *("-days", "2", "-extfile", "names", "-out", f"{name}.pem"),
        )
    return folder


def files(folder: Path, name: str, authority: str | None) -> Tls | None:
    certificate, key = (folder / f"{name}.pem", folder / f"{name}.key") if name else (None, None)
    return Tls.read(certificate, key, folder / f"{authority}.pem" if authority else None, "--ca")


def test_tls_with_and_without_certificates_of_agents(tmp_path: Path, certificates: Path) -> None:
    async def scenario() -> None:
        async with scheduler(tmp_path, tls=files(certificates, "server", None), token=TOKEN) as rig:
            agent, wrong = (
                rig.agent(tls=files(certificates, "", "ca"), token=TOKEN),
                rig.agent(AgentName("server", "a1"), tls=files(certificates, "", "other"), token=TOKEN),
            )
            plain = rig.agent(AgentName("server", "a2"), token=TOKEN)
            async with running(agent.run()), running(wrong.run()), running(plain.run()):
                await until(lambda: agent.connected)
                await until(lambda: sum("no scheduler at" in line for line in rig.said) == 2)
                assert set(rig.service.agents) == {A0}
        async with scheduler(tmp_path, tls=files(certificates, "server", "ca")) as rig:
            agent = rig.agent(tls=files(certificates, "client", "ca"))
            unknown = rig.agent(AgentName("server", "a1"), tls=files(certificates, "", "ca"))
            async with running(agent.run()), running(unknown.run()):
                await until(lambda: agent.connected)
                await until(lambda: any("no scheduler at" in line for line in rig.said))
                assert set(rig.service.agents) == {A0}

    within_limit(scenario)


def test_metrics_of_both_sides(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scheduler(tmp_path) as rig:
            agent = rig.agent()
            before = {metric.name: metric.samples[0].value for metric in agent_metrics(agent)}
            assert before["kvroute_agent_connected"] == 0
            assert before["kvroute_agent_table_age_seconds"] != before["kvroute_agent_table_age_seconds"]
            async with running(agent.run()):
                await until(lambda: agent.connected and agent.held.version > 0)
                ours = {metric.name: metric.samples[0].value for metric in agent_metrics(agent)}
                assert ours["kvroute_agent_connected"] == 1
                assert ours["kvroute_agent_table_version"] == agent.held.version
                assert 0 <= ours["kvroute_agent_table_age_seconds"] < 60
                page = MetricsServer.start("127.0.0.1", 0, lambda: scheduler_metrics(rig.service))
                with pytest.raises(InputError, match=r"--metrics-port: 127.0.0.1:[0-9]+ cannot be bound"):
                    MetricsServer.start("127.0.0.1", int(page.address.rpartition(":")[2]), lambda: iter(()))
                text = await asyncio.to_thread(_fetch, f"http://{page.address}/metrics")
                page.close()
        assert 'kvroute_scheduler_agent_connected{agent="a0",kind="server"} 1.0' in text
        assert 'kvroute_scheduler_entry_version{group="decode-0"} 1001.0' in text
        assert (
            'kvroute_scheduler_entry_rule{group="decode-0",scheme="hierarchical-ring",up_to_bytes="+Inf"} 1.0' in text
        )

    within_limit(scenario)


def _fetch(url: str) -> str:
    from urllib.request import urlopen

    with urlopen(url, timeout=60) as answer:
        text: str = answer.read().decode()
        return text


def test_the_docs_page_lists_every_metric(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scheduler(tmp_path) as rig:
            names = [metric.name for metric in (*agent_metrics(rig.agent()), *scheduler_metrics(rig.service))]
            page = (Path(__file__).resolve().parents[3] / "docs/agents.md").read_text()
            assert re.findall(r"^\| `(kvroute_\w+)`", page, re.MULTILINE) == names

    within_limit(scenario)
