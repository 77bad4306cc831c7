"""Starts the workers of one machine, restarts those that end, and shows them as one gateway on the admin port."""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import aiohttp
import msgspec

from kvroute import __version__
from kvroute.serve.config.settings import GatewaySettings
from kvroute.serve.config.worker import WorkerSpec
from kvroute.serve.lifecycle.certificates import PortCertificate, context_of, follow, port_certificate
from kvroute.serve.lifecycle.deployment import Deployment
from kvroute.serve.observe.admin.server import TICK_S, Admin, AdminParts
from kvroute.serve.observe.logs import Logs, log_event
from kvroute.serve.observe.view import DashboardUpdate, Snapshot
from kvroute.serve.proxy.other_workers import OtherWorkers, release_worker
from kvroute.serve.workers.merged_metrics import Page, counts, merged, read, text
from kvroute.serve.workers.merged_state import merged_snapshot, merged_tick
from kvroute.serve.workers.process import WorkerProcess
from kvroute.serve.workers.stream_server import StreamServer
from kvroute.types import Endpoint, InputError, cannot_listen
from kvroute_engine.addresses import bound, host_port

WORKERS_MOST = 256
_WATCH_S = 1.0
"""Interval between two reads of the workers' states while no dashboard is open, in seconds."""
_RESTART_MIN_S, _RESTART_MAX_S = 0.1, 5.0
"""Shortest and longest wait before a worker is started again; it doubles while workers end soon after their start."""
_UNANSWERED_MAX = 3
"""A worker that leaves so many requests in succession unanswered, each for five seconds, is killed and replaced: it is
stopped, or its event loop hangs, while the kernel still gives it its share of new connections."""
_END_S = 10.0
"""Time after which a worker that ignores a signal to end at once is killed, in seconds."""
_STABLE_S = 30.0
"""A worker that has served for this time is started again after the shortest wait."""


class Supervisor:
    """The parent process of several workers: `start` it, then `drain` or `close` it."""

    def __init__(
        self,
        deployment: Deployment,
        command: Callable[[Path], Sequence[str]],
        folder: Path,
        *,
        workers: int,
        endpoints: Mapping[str, Endpoint] | None = None,
        logs: Logs | None = None,
    ) -> None:
        """
        Args:
            deployment: the cluster and settings to serve.
            command: returns the command line of a worker, for the path of its `WorkerSpec`.
            folder: private to this user, for files of the workers.
            workers: number of workers.
            endpoints: endpoints of emulated engines; None: those in the cluster file.
            logs: log outputs, which a reload changes with the settings.
        """
        self._first = self._deployment = deployment
        self._command, self._folder, self._count, self._logs = command, folder, workers, logs
        self._endpoints = dict(endpoints) if endpoints is not None else None
        self._counts_file = folder / "counts"
        self._salt_secret, self._admin_token = secrets.token_bytes(32), secrets.token_hex(32)
        self._workers: list[WorkerProcess] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._held: socket.socket | None = None
        self._admin: Admin | None = None
        self._certificate: PortCertificate | None = None
        self._session: aiohttp.ClientSession | None = None
        self._stream = StreamServer()
        self._ended: Page = ()
        self._pages: dict[int, Page] = {}
        self._draining = False
        self.state = WorkersState()
        self.restarts = 0
        """Number of workers that were started again."""
        self.port = self.admin_port = 0

    # Start and end

    async def start(self) -> None:
        """Start the workers and wait until all serve; sets `port` and `admin_port`.

        Raises:
            InputError: an address cannot be used, or a worker has ended at its start.
        """
        settings = self._deployment.settings
        self.port = self._reserve(settings)
        self._session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {self._admin_token}"})
        OtherWorkers.create(self._counts_file, self._count)
        await self._stream.start(self._folder / "stream")
        self._workers = [WorkerProcess(self._spec(k), self._command, self._folder) for k in range(1, self._count + 1)]
        await asyncio.gather(*(worker.start() for worker in self._workers))
        if not all(await asyncio.gather(*(worker.ready() for worker in self._workers))):
            raise InputError("a worker has ended at its start", hint="see its message above")
        await self._read_states()
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._keep(worker)) for worker in self._workers]
        self._tasks.append(loop.create_task(self._follow()))
        self._admin = Admin(self._admin_parts(settings))
        certificate = self._certificate = port_certificate(settings.admin.tls, "gateway.admin.tls")
        context = context_of(certificate)
        self.admin_port = await self._admin.start(settings.admin.host, settings.admin.port, context)
        self._tasks.append(loop.create_task(follow(certificate)))
        log_event("info", "workers_serving", count=self._count, address=host_port(settings.listen.host, self.port))

    async def drain(self) -> None:
        """Let all workers finish their requests, and wait for their end."""
        self._draining = True
        log_event("info", "draining")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._end(signal.SIGTERM)

    async def close(self) -> None:
        """End all workers at once. Requests that are still in flight are aborted."""
        self._draining = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self._workers:
            worker.send(signal.SIGTERM)  # the first signal may have been sent before; a second one ends at once
        try:
            async with asyncio.timeout(_END_S):
                await self._end(signal.SIGTERM)
        except TimeoutError:
            await self._end(signal.SIGKILL)
        if self._admin is not None:
            await self._admin.close()
        await self._stream.close()
        if self._session is not None:
            await self._session.close()
        if self._held is not None:
            self._held.close()

    async def reload(self, read_deployment: Callable[[], Deployment]) -> bool:
        """Reload the cluster file in all workers; return False, and change nothing, if it has errors."""
        try:
            deployment = await asyncio.to_thread(read_deployment)
            if self._certificate is not None and (tls := deployment.settings.admin.tls) is not None:
                self._certificate.change(tls)
        except InputError as error:
            log_event("error", "reload_refused", reason=str(error))
            return False
        self._deployment = deployment
        for worker in self._workers:
            worker.send(signal.SIGHUP)
        assert self._admin is not None
        self._admin.change(self._admin_parts(deployment.settings))
        settings = deployment.settings
        if self._logs is not None:
            self._logs.change(settings.log.format, settings.log.level, access=settings.log.access)
        for field in deployment.needs_restart(self._first):
            log_event("warning", "reload_needs_restart", field=f"gateway.{field}")
        return True

    def _reserve(self, settings: GatewaySettings) -> int:
        """Hold the port for clients while no worker listens; return it."""
        host, port = settings.listen.host, settings.listen.port
        try:
            self._held = bound(host, port, shared=True)
        except OSError as error:
            why = error.strerror or str(error)
            raise cannot_listen(host_port(host, port), error.errno, why, where="gateway.listen") from None
        if self._held is not None:
            return int(self._held.getsockname()[1])
        if port == 0:
            hint = "use an IP address in gateway.listen.host, or a port other than 0"
            raise InputError(f"workers cannot share any free port of the host name {host}", hint=hint)
        return port

    def _spec(self, number: int) -> WorkerSpec:
        return WorkerSpec(
            number=number,
            workers=self._count,
            counts_file=str(self._counts_file),
            stream_socket=str(self._folder / "stream"),
            port=self.port,
            ready_file=str(self._folder / f"ready-{number}.json"),
            salt_secret=self._salt_secret,
            admin_token=self._admin_token,
            endpoints=self._endpoints,
        )

    async def _end(self, number: signal.Signals) -> None:
        for worker in self._workers:
            worker.send(number)
        await asyncio.gather(*(worker.ended() for worker in self._workers if worker.started))

    # While it runs

    async def _keep(self, worker: WorkerProcess) -> None:
        """Start a worker again whenever it has ended."""
        loop = asyncio.get_running_loop()
        wait_s, since = _RESTART_MIN_S, loop.time()
        while True:
            status = await worker.ended()
            if self._draining:
                return
            await asyncio.to_thread(release_worker, self._counts_file, worker.number, self._count)
            self._ended = merged([counts(self._pages.pop(worker.number, ()))], self._ended)
            if loop.time() - since >= _STABLE_S:
                wait_s = _RESTART_MIN_S
            log_event("error", "worker_ended", number=worker.number, reason=_reason(status))
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _RESTART_MAX_S)
            self.restarts += 1
            await worker.start()
            since = loop.time()
            if await worker.ready():
                log_event("info", "worker_serving", number=worker.number)

    async def _follow(self) -> None:
        """Read the workers' states, often while a dashboard is open."""
        while True:
            watched = self._admin is not None and self._admin.watchers > 0
            await asyncio.sleep(TICK_S if watched else _WATCH_S)
            await self._read_states()

    async def _read_states(self) -> None:
        """Read the workers' states, and kill workers that have not answered for long; `_keep` starts others."""
        states = await self._ask("/state")
        for worker in self._workers:
            if worker.serves and worker.unanswered >= _UNANSWERED_MAX:
                log_event("error", "worker_hangs", number=worker.number, unanswered=worker.unanswered)
                worker.send(signal.SIGKILL)
        if states:
            self.state.snapshots = [msgspec.json.decode(body, type=Snapshot) for body in states.values()]

    async def _ask(self, path: str, accept: str = "") -> dict[int, bytes]:
        """Return a page of each worker that serves, by its number."""
        assert self._session is not None
        serving = [worker for worker in self._workers if worker.serves]
        pages = await asyncio.gather(*(worker.get(self._session, path, accept) for worker in serving))
        return {worker.number: page for worker, page in zip(serving, pages, strict=True) if page is not None}

    # The admin port

    def _admin_parts(self, settings: GatewaySettings) -> AdminParts:
        return AdminParts(
            state=self.state,
            page=self._page,
            now=asyncio.get_running_loop().time,
            ready=self.ready,
            version=__version__,
            config=lambda: settings,
            push=self._push if settings.oracle.source == "push" else None,
            token=settings.admin.push_token or "",
            read_token=settings.admin.read_token or "",
            host_names=frozenset(settings.admin.hosts),
        )

    def ready(self) -> str:
        """Return why requests are not accepted; empty if all workers accept them."""
        if self._draining:
            return "the gateway is draining"
        serving = sum(worker.serves for worker in self._workers)
        if serving < self._count:
            return f"{serving} of {self._count} workers serve"
        ready = sum(snapshot.tick.load.ready for snapshot in self.state.snapshots)
        return "" if ready == self._count else f"{ready} of {self._count} workers are ready"

    async def _page(self, accept: str) -> tuple[str, Iterable[str]]:
        openmetrics = "application/openmetrics-text" in accept
        bodies = await self._ask("/metrics", accept)
        self._pages |= {number: read(body.decode(), openmetrics=openmetrics) for number, body in bodies.items()}
        return text(merged([self._pages[number] for number in bodies], self._ended), openmetrics=openmetrics)

    async def _push(self, body: bytes) -> None:
        assert self._session is not None
        session = self._session
        await asyncio.gather(*(worker.push(session, body) for worker in self._workers if worker.serves))


class WorkersState:
    """A `DashboardSource` of all workers, as they were when they were last read."""

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []
        """One for each worker that answers; the last ones known while none does."""

    @property
    def layout_id(self) -> int:
        """Id of the layout of the first worker."""
        return self.snapshots[0].layout.id if self.snapshots else 0

    @property
    def policy(self) -> str:
        """The decode policy of the first worker."""
        return self.snapshots[0].tick.policy if self.snapshots else ""

    def snapshot(self, at: float) -> Snapshot:
        """See DashboardSource. `at` is not used: times are those of the first worker."""
        return merged_snapshot(self.snapshots)

    def tick(self, at: float) -> DashboardUpdate:
        """See DashboardSource."""
        return merged_tick(self.snapshots)


def _reason(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"
