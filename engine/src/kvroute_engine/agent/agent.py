"""The agent of a server or switch: reports counters to the scheduler, and keeps the table that it gets."""

from __future__ import annotations

import asyncio
import math
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from prometheus_client.parser import text_string_to_metric_families

from kvroute_engine import __version__
from kvroute_engine.agent.agents_pb2 import FromAgent, FromScheduler
from kvroute_engine.agent.counters import PortCounters
from kvroute_engine.agent.files import TABLE, TableFile, read_file, replace_file, traffic_files
from kvroute_engine.agent.messages import METHOD, hello_message, report_message, table_of
from kvroute_engine.agent.reports import AgentName, AgentTable, CounterReport
from kvroute_engine.agent.security import Tls, metadata_of
from kvroute_engine.errors import InputError
from kvroute_engine.switch.status import read_status

_BACKOFF_FIRST_S = 0.1
_BACKOFF_MAX_S = 5.0
_SILENT_PERIODS = 3
_SILENT_LEAST_S = 5.0
"""A scheduler without a message for this time, or three periods, is given up."""
_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.use_local_subchannel_pool", 1),  # a new connection has no memory of failed ones
)
_WRONG = ("UNAUTHENTICATED", "NOT_FOUND", "FAILED_PRECONDITION", "INVALID_ARGUMENT")
"""Status codes of settings that do not fit the scheduler."""
_WRITE_S = 1.0
"""Least time between two writes of the table that only refresh its age."""


_NVLINK_OUT, _NVLINK_IN = "DCGM_FI_PROF_NVLINK_TX_BYTES", "DCGM_FI_PROF_NVLINK_RX_BYTES"
"""Bytes per second of each GPU on the page of dcgm-exporter (DCGM fields 1011 and 1012)."""
_DCGM_TIMEOUT_S = 2.0
_DCGM_PAGE_MAX = 4 * 2**20


class HeldTable:
    """The last table of the scheduler, and its age. It stays in its file when scheduler and agent are away."""

    def __init__(self, folder: Path) -> None:
        """Begin with the table in the folder, if there is one."""
        self._path = folder / TABLE
        self._table = read_file(self._path, TableFile)
        self._written_unix_s = self._table.received_unix_s if self._table is not None else 0.0

    @property
    def version(self) -> int:
        """Version of the table; 0: there is none."""
        return self._table.version if self._table is not None else 0

    def age_s(self, now_unix_s: float) -> float | None:
        """Return the time since the scheduler last said that the table is current; None without a table."""
        return None if self._table is None else max(now_unix_s - self._table.received_unix_s, 0.0)

    def receive(self, table: AgentTable, now_unix_s: float) -> None:
        """Take a table and write it.

        Raises:
            OSError: the file cannot be written.
        """
        self._table = TableFile(table.version, now_unix_s, table.groups)
        self._write(now_unix_s)

    def heartbeat(self, version: int, now_unix_s: float) -> None:
        """Take a heartbeat; it refreshes the age if it is that of the table.

        Raises:
            OSError: the file cannot be written.
        """
        if self._table is None or self._table.version != version:
            return
        self._table = TableFile(version, now_unix_s, self._table.groups)
        if abs(now_unix_s - self._written_unix_s) >= _WRITE_S:
            self._write(now_unix_s)

    def _write(self, now_unix_s: float) -> None:
        assert self._table is not None
        replace_file(self._path, self._table)
        self._written_unix_s = now_unix_s


def nvlink_rates(page: str) -> dict[int, tuple[float, float]]:
    """Return the bytes per second out and in of each GPU that dcgm-exporter's page has both of."""
    found: dict[str, dict[int, float]] = {_NVLINK_OUT: {}, _NVLINK_IN: {}}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            gpu = sample.labels.get("gpu", "")
            name = sample.name.removesuffix("_total")  # the parser's names of counters
            if name in found and gpu.isdecimal() and math.isfinite(sample.value) and sample.value >= 0:
                found[name][int(gpu)] = sample.value
    sent, received = found[_NVLINK_OUT], found[_NVLINK_IN]
    return {gpu: (sent[gpu], received[gpu]) for gpu in sorted(sent.keys() & received.keys())}


def fetch_rates(url: str) -> dict[int, tuple[float, float]] | None:
    """Return the rates on the page at a URL; None if it cannot be fetched or read."""
    try:
        with urllib.request.urlopen(url, timeout=_DCGM_TIMEOUT_S) as answer:
            return nvlink_rates(answer.read(_DCGM_PAGE_MAX).decode())
    except (OSError, ValueError, urllib.error.URLError):
        return None


@dataclass(frozen=True, slots=True)
class Sources:
    """What an agent reads."""

    ports: PortCounters
    folder: Path
    """Folder of the ranks' files."""
    dcgm_url: str = ""
    """Page of dcgm-exporter; empty: none."""
    switch_status: Path | None = None
    """Status file of the switch on this machine."""
    incarnation: int = 0

    def read(self) -> CounterReport:
        """Return all counters; takes up to two seconds if dcgm-exporter does not answer."""
        nvlinks = fetch_rates(self.dcgm_url) if self.dcgm_url else None
        status = read_status(self.switch_status, time.time()) if self.switch_status is not None else None
        return CounterReport(
            clock_s=time.monotonic(),
            incarnation=self.incarnation,
            ports=self.ports.read(),
            nvlinks=nvlinks or {},
            traffic=tuple(traffic_files(self.folder)),
            slots=None if status is None else (status.slots, status.free_slots),
        )


class Lost(Exception):
    """The connection to the scheduler has ended; the message says why."""

    def __init__(self, why: str, wrong: bool = False) -> None:
        super().__init__(why)
        self.wrong = wrong
        """Whether the settings do not fit the scheduler, so that another attempt would fail as well."""


class Agent:
    """One agent and its connection, which it makes again when it is lost."""

    def __init__(
        self,
        name: AgentName,
        scheduler: str,
        sources: Sources,
        say: Callable[[str], None],
        token: str = "",
        tls: Tls | None = None,
    ) -> None:
        """Args:

        name: its node or switch.
        scheduler: "host:port".
        sources: what it reports; the folder also gets the table.
        say: takes one line when the scheduler is lost, and when it is back.
        token: that of the scheduler.
        tls: None: no encryption.
        """
        self.name, self.held = name, HeldTable(sources.folder)
        self.connected = False
        self._scheduler, self._sources, self._say = scheduler, sources, say
        self._token, self._tls = token, tls
        self._welcomed = False
        """Whether the scheduler has ever accepted this agent."""
        self._attempts = 0
        """Since the last connection."""
        self._unread: set[Path] = set()
        self._reason = ""
        """Why the connection was lost, as said."""

    def age_s(self) -> float | None:
        """Return the age of the table in seconds; None without a table."""
        return self.held.age_s(time.time())

    async def run(self) -> None:
        """Connect, and connect again whenever the connection is lost, until cancelled.

        Raises:
            InputError: the scheduler does not accept this agent at the first connection.
        """
        draw = random.Random()
        while True:
            try:
                await self._session()
            except Lost as lost:
                if lost.wrong and not self._welcomed:
                    raise InputError(str(lost), where=f"scheduler {self._scheduler}") from None
                self._lost(str(lost), lost.wrong)
            backoff_s = min(_BACKOFF_FIRST_S * 2.0 ** min(self._attempts, 10), _BACKOFF_MAX_S)
            self._attempts += 1
            await asyncio.sleep(backoff_s * draw.uniform(0.5, 1.0))

    def _lost(self, why: str, wrong: bool) -> None:
        """Say once that the scheduler is lost, and how old the table is; again only if it is there and refuses."""
        self.connected = False
        if self._reason and (not wrong or why == self._reason):
            return
        self._reason = why
        age_s = self.age_s()
        kept = "; there is no table yet" if age_s is None else f"; table {self.held.version} stays, {age_s:.1f} s old"
        self._say(f"no scheduler at {self._scheduler} ({why}){kept if self.name.kind == 'server' else ''}")

    async def _session(self) -> None:
        """Serve one connection; raises Lost at its end."""
        try:
            async with self._channel() as channel:
                call = channel.stream_stream(METHOD, FromAgent.SerializeToString, FromScheduler.FromString)(
                    metadata=metadata_of(self._token)
                )
                await call.write(hello_message(self.name, self.held.version, __version__))
                await self._serve(call)
        except grpc.aio.AioRpcError as error:
            raise _lost(error.code(), error.details()) from None
        except (asyncio.InvalidStateError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and _ending():
                raise
            raise Lost("the connection has ended") from None

    def _channel(self) -> Any:
        if self._tls is None:
            return grpc.aio.insecure_channel(self._scheduler, _OPTIONS)
        return grpc.aio.secure_channel(self._scheduler, self._tls.channel_credentials(), _OPTIONS)

    async def _serve(self, call: Any) -> None:
        """Read the scheduler's messages, and send reports from the first one on."""
        silent_s, reports = _SILENT_LEAST_S, None
        try:
            while True:
                try:
                    async with asyncio.timeout(silent_s):  # not `wait_for`: Python 3.11's may lose a cancellation
                        message = await call.read()
                except TimeoutError:
                    raise Lost("it is silent") from None
                if message is grpc.aio.EOF:
                    raise _lost(await call.code(), await call.details())
                if reports is None:
                    period_s = message.welcome.period_s or 1.0
                    silent_s = max(_SILENT_PERIODS * period_s, _SILENT_LEAST_S)
                    reports = asyncio.ensure_future(self._report(call, period_s))
                    self._back()
                else:
                    self._take(message)
        finally:
            if reports is not None:
                reports.cancel()

    def _back(self) -> None:
        self.connected = self._welcomed = True
        self._attempts = 0
        if self._reason:
            age_s = self.age_s()
            old = "" if age_s is None else f"; table {self.held.version} is {age_s:.1f} s old"
            self._say(f"the scheduler at {self._scheduler} is back{old}")
        self._reason = ""

    def _take(self, message: FromScheduler) -> None:
        """Take a table or a heartbeat."""
        try:
            if message.HasField("table"):
                self.held.receive(table_of(message.table), time.time())
            elif message.HasField("heartbeat"):
                self.held.heartbeat(message.heartbeat.version, time.time())
        except OSError as error:
            raise Lost(f"the table cannot be written: {error.strerror}") from None
        except InputError as error:
            raise Lost(str(error)) from None

    def _say_unread(self, failed: set[Path]) -> None:
        """Say which counters cannot be read, whenever that changes."""
        if failed != self._unread:
            what = f"counters that cannot be read: {', '.join(sorted(map(str, failed)))}" if failed else ""
            self._say(what or "all counters can be read again")
        self._unread = failed

    async def _report(self, call: Any, period_s: float) -> None:
        """Send the counters once per period, until the stream ends; the reader then says why it has ended."""
        try:
            while True:
                report = await asyncio.to_thread(self._sources.read)
                self._say_unread(self._sources.ports.failed)
                await call.write(report_message(report))
                await asyncio.sleep(period_s)
        except (grpc.RpcError, asyncio.InvalidStateError):
            return


def _lost(code: Any, details: str | None) -> Lost:
    """Return the reason for the end of a call."""
    if code.name == "OK":
        return Lost("it has ended the connection")
    return Lost(_detail(details or code.name), wrong=code.name in _WRONG)


def _detail(text: str) -> str:
    """Return gRPC's text on one line, of several causes the last one."""
    return " ".join(text.rpartition("last error: ")[2].split())


def _ending() -> bool:
    """Return whether this task was asked to end; grpc also raises CancelledError for a call that has ended."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
