"""The central scheduler as a gRPC server on one event loop.

There is one stream for each agent. With one thread the state needs no locks, and a scheduler has few messages: one
report and one heartbeat per agent and period.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from kvroute.collectives.scheduler.tables import Tables
from kvroute.types import InputError
from kvroute_engine.agent.agents_pb2 import FromAgent, FromScheduler
from kvroute_engine.agent.messages import (
    METHOD,
    PROTOCOL,
    agent_of,
    heartbeat_message,
    report_of,
    table_message,
    welcome_message,
)
from kvroute_engine.agent.reports import AgentName
from kvroute_engine.agent.security import Tls, has_token

_HELLO_S = 10.0
"""Time for the first message of a connection."""
_GRACE_S = 1.0
"""Time in which streams end by themselves when the scheduler stops."""
_STREAMS_MAX = 4096
_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a second scheduler on the same port is an error
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)


class SchedulerService:
    """Streams of agents, and the loop that computes the tables once per period."""

    def __init__(self, tables: Tables, say: Callable[[str], None], token: str = "", settle_s: float = 3.0) -> None:
        """Args:

        tables: the state.
        say: takes one line for each agent that comes or goes.
        token: agents must send it; empty: none.
        settle_s: time after the start in which agents connect and report, before the first table.
        """
        self.tables = tables
        self.agents: dict[AgentName, str] = {}
        """Address of each connected agent."""
        self.address = ""
        self._say, self._token, self._settle_s = say, token, settle_s
        self._changed = asyncio.Event()
        self._stopping = False
        self._server: Any = None

    async def start(self, address: str, tls: Tls | None = None) -> None:
        """Listen on "host:port"; port 0 takes a free one.

        Raises:
            InputError: the address cannot be bound, or the certificate is wrong.
        """
        self._server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=_STREAMS_MAX)
        service, _, method = METHOD[1:].partition("/")
        handler = grpc.stream_stream_rpc_method_handler(
            self._connect, FromAgent.FromString, FromScheduler.SerializeToString
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        try:
            if tls is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, tls.server_credentials())
        except RuntimeError:
            await self._server.start()  # gRPC can only stop a server that was started
            await self._server.stop(None)
            hint = "choose an address of this machine and a free port, and a certificate with its key"
            raise InputError(f"{address} cannot be bound", where="--listen", hint=hint) from None
        self.address = f"{address.rpartition(':')[0]}:{port}"
        await self._server.start()

    async def run(self) -> None:
        """Compute tables once per period, until cancelled."""
        await asyncio.sleep(self._settle_s)
        while True:
            if self.tables.derive(time.monotonic()):
                self._changed.set()
                self._changed = asyncio.Event()
            await asyncio.sleep(self.tables.period_s)

    async def stop(self) -> None:
        """End all streams, and close the port."""
        self._stopping = True
        self._changed.set()
        if self._server is not None:
            await self._server.stop(_GRACE_S)

    async def _connect(self, messages: AsyncIterator[FromAgent], context: Any) -> AsyncIterator[FromScheduler]:
        """Serve one agent: read its reports, send tables and heartbeats."""
        if self._token and not has_token(context.invocation_metadata() or (), self._token):
            what = "the token is missing or wrong; give the agent the token of the scheduler with --token-file"
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, what)
        agent = await self._admit(messages, context)
        self.agents[agent] = context.peer()
        self._say(f"{agent} is connected from {context.peer()}")
        reader = asyncio.ensure_future(self._read(messages, agent))
        try:
            yield welcome_message(self.tables.period_s)
            sent = 0
            while not (reader.done() or self._stopping):
                changed = asyncio.ensure_future(self._changed.wait())
                table = self.tables.table(agent)
                if table.version != sent:
                    yield table_message(table)
                    sent = table.version
                else:
                    yield heartbeat_message(sent)
                await asyncio.wait({reader, changed}, timeout=self.tables.period_s, return_when="FIRST_COMPLETED")
                changed.cancel()
            if reader.done():
                reader.result()
        except InputError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            reader.cancel()
            del self.agents[agent]
            self._say(f"{agent} is gone")

    async def _admit(self, messages: AsyncIterator[FromAgent], context: Any) -> AgentName:
        """Return the agent that says hello; abort the call if it may not connect."""
        try:
            async with asyncio.timeout(_HELLO_S):
                first = await anext(messages)
        except (TimeoutError, StopAsyncIteration):
            return await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "an agent begins with Hello")
        hello = first.hello
        if not first.HasField("hello") or hello.protocol != PROTOCOL:
            what = f"the agent (kvroute {hello.release}) has protocol {hello.protocol}, the scheduler {PROTOCOL}"
            what += "; install the same version of kvroute"
            return await _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, what)
        try:
            agent = agent_of(hello)
            self.tables.check(agent)
        except InputError as error:
            return await _refuse(context, grpc.StatusCode.NOT_FOUND, str(error))
        if agent in self.agents:
            what = f"an agent for {agent} is connected from {self.agents[agent]}; stop one of them"
            return await _refuse(context, grpc.StatusCode.ALREADY_EXISTS, what)
        self.tables.hello(hello.table_version)
        return agent

    async def _read(self, messages: AsyncIterator[FromAgent], agent: AgentName) -> None:
        """Take reports until the stream ends; raises InputError for one that cannot be."""
        async for message in messages:
            if message.HasField("report"):
                self.tables.report(time.monotonic(), agent, report_of(message.report))


async def _refuse(context: Any, status: Any, what: str) -> AgentName:
    await context.abort(status, what)
    raise AssertionError("abort raises")
