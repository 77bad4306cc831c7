"""What the commands that run a gateway share: the process from its start to its end, its signals, emulated engines."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import typer

from kvroute.cli.output import console, remarks, write_whole
from kvroute.types import Endpoint, InputError
from kvroute_engine.addresses import host_port

if TYPE_CHECKING:
    from kvroute.serve.assembly import Gateway
    from kvroute.serve.config.worker import WorkerSpec
    from kvroute.serve.lifecycle.deployment import Deployment
    from kvroute.serve.lifecycle.peers import SharedByWorkers
    from kvroute.serve.proxy.frontend import Frontend

_READY_S = 300.0


class Serving(Protocol):
    """A gateway, or the parent process of several."""

    port: int
    admin_port: int

    async def drain(self) -> None:
        """Finish the requests in flight."""
        ...

    async def reload(self, read: Callable[[], Deployment]) -> bool:
        """Serve what `read` returns from now on; return False if it cannot."""
        ...


async def run_gateway(
    read: Callable[[], Deployment],
    ready_file: Path | None,
    seed: int | None,
    until_eof: bool,
    *,
    frontend: Frontend | None = None,
    announce: Callable[[Gateway, Deployment], None] | None = None,
    worker: WorkerSpec | None = None,
) -> None:
    """Run a gateway until a signal ends it.

    Args:
        read: returns the deployment of the cluster file.
        ready_file: gets the addresses as JSON; None: no file.
        seed: see `Gateway`.
        until_eof: whether the end of standard input ends the gateway.
        frontend: see `Gateway`.
        announce: prints where the gateway listens; None: the default text, and the ready file.
        worker: input of a worker process; None: this gateway is no worker. The parent process of workers checks the
            addresses and prints them.
    """
    from kvroute.compiled import release_compiler
    from kvroute.http.open_files import raise_limit
    from kvroute.serve.assembly import Gateway
    from kvroute.serve.config.preflight import check_places
    from kvroute.serve.observe.logs import Logs

    signals = Signals(until_eof)
    deployment = read()
    settings = deployment.settings
    await asyncio.to_thread(check_discovery, deployment)
    if worker is None:
        check_places(settings)  # only a gateway that can listen rotates an older log
    logs = Logs(settings.log.format, settings.log.level, access=settings.log.access)
    raise_limit()
    if worker is None:
        check_files(deployment)
    gateway = Gateway(
        deployment,
        seed=seed,
        logs=logs,
        frontend=frontend,
        shared=shared_by_workers(worker) if worker is not None else None,
    )

    def read_again() -> Deployment:
        again = read()
        check_discovery(again)
        check_files(again)
        return again

    try:
        await gateway.start()
        release_compiler()
        # Existing objects live as long as the gateway: exclude them from collection, and collect new ones less often.
        gc.freeze()
        gc.set_threshold(50_000, 20, 100)
        if announce is not None:
            announce(gateway, deployment)
        elif worker is not None:
            write_ready(gateway, deployment, ready_file)
        else:
            announce_gateway(gateway, deployment, ready_file)
        await until_signalled(gateway, read_again, signals)
    finally:
        await gateway.close()
        logs.close()


def shared_by_workers(worker: WorkerSpec) -> SharedByWorkers:
    """Return what a worker shares with the others."""
    from kvroute.serve.lifecycle.peers import SharedByWorkers
    from kvroute.serve.proxy.other_workers import OtherWorkers
    from kvroute.serve.replication.local_stream import LocalStream

    counts = OtherWorkers(Path(worker.counts_file), worker.number, worker.workers)
    group = f"{socket.gethostname()}:{worker.counts_file}"
    return SharedByWorkers(worker.salt_secret, group, counts, lambda: LocalStream(Path(worker.stream_socket)))


def check_discovery(deployment: Deployment) -> None:
    """Check that the discovery source of the file can be used."""
    from kvroute.serve.discovery.sources import check_source

    section = deployment.cluster.file.discovery
    if section is not None:
        check_source(section, deployment.folder)


def check_files(deployment: Deployment) -> None:
    """Warn if the settings need more open files than the system allows."""
    from kvroute.serve.observe.file_descriptors import warn_if_too_low

    warn_if_too_low(deployment.settings.limits.connections, len(deployment.cluster.instances))


def announce_gateway(serving: Serving, deployment: Deployment, ready_file: Path | None) -> None:
    """Print where the gateway listens and what is open to others, and write the ready file."""
    warn_of_exposures(deployment)
    url, admin = _urls(serving, deployment)
    out = console()
    out.print(f"kvroute serves {len(deployment.cluster.instances)} instances of {deployment.cluster.name}: {url}/v1")
    out.print(f"dashboard and metrics: {admin}")
    write_ready(serving, deployment, ready_file)


def warn_of_exposures(deployment: Deployment) -> None:
    """Print what is open to other machines."""
    from kvroute.serve.lifecycle.exposure import exposures

    for exposure in exposures(deployment.settings):
        remarks().print(f"warning: {exposure}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def admin_url(serving: Serving, deployment: Deployment) -> str:
    """Return the URL of the admin port."""
    admin = deployment.settings.admin
    return f"{'https' if admin.tls else 'http'}://{host_port(admin.host, serving.admin_port)}"


def write_ready(serving: Serving, deployment: Deployment, ready_file: Path | None) -> None:
    """Write the addresses to the ready file, if there is one."""
    if ready_file is not None:
        url, admin = _urls(serving, deployment)
        write_whole(ready_file, msgspec.json.encode({"url": url, "admin": admin}).decode(), "--ready-file")


def _urls(serving: Serving, deployment: Deployment) -> tuple[str, str]:
    listen = deployment.settings.listen
    url = f"{'https' if listen.tls else 'http'}://{host_port(listen.host, serving.port)}"
    return url, admin_url(serving, deployment)


class Signals:
    """Signals received by the process; handlers are installed before the gateway starts, so no signal is lost."""

    def __init__(self, until_eof: bool) -> None:
        self.reload, self.end, self.end_now = asyncio.Event(), asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_end_signal)
        loop.add_signal_handler(signal.SIGHUP, self.reload.set)
        if until_eof:
            loop.add_reader(sys.stdin.fileno(), self._listen)

    def _on_end_signal(self) -> None:
        (self.end_now if self.end.is_set() else self.end).set()

    def _listen(self) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            self.end.set()
            self.end_now.set()


async def until_signalled(serving: Serving, read: Callable[[], Deployment], signals: Signals) -> None:
    """Serve until SIGTERM or SIGINT and until all requests are finished. A second signal ends at once. The end of
    standard input, if enabled, also ends at once, because the parent process is gone."""

    async def reload() -> None:
        while True:
            await signals.reload.wait()
            signals.reload.clear()
            await serving.reload(read)

    loop = asyncio.get_running_loop()
    reloads = loop.create_task(reload())
    await signals.end.wait()
    waits = [loop.create_task(serving.drain()), loop.create_task(signals.end_now.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for task in (*waits, reloads):
        task.cancel()
    await asyncio.gather(*waits, reloads, return_exceptions=True)


@contextlib.contextmanager
def emulated_engines(
    cluster: Path, kv_scale: float, background: str, seed: int | None
) -> Iterator[dict[str, Endpoint]]:
    """Run emulated engines in a separate process, which ends with this one."""
    try:
        temporary = tempfile.TemporaryDirectory(prefix="kvroute-")
    except OSError as error:
        hint = "set TMPDIR to a writable folder"
        raise InputError(f"no temporary folder is writable ({error.strerror})", where="--embedded", hint=hint) from None
    with temporary as folder:
        ready = Path(folder, "ready.json")
        command = [sys.executable, "-m", "kvroute.cli.app", "emulate", str(cluster), "--ready-file", str(ready)]
        command += ["--kv-scale", str(kv_scale), "--background", background, "--seed", str(seed or 0)]
        # The new session keeps Ctrl-C from the engines: the gateway finishes its requests before the engines stop.
        command.append("--until-eof")
        process = subprocess.Popen(command, start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        try:
            # This process imports its modules while the other one starts.
            import kvroute.serve.assembly  # noqa: F401

            yield _wait_for(process, ready)
        finally:
            process.terminate()
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for(process: subprocess.Popen[bytes], ready: Path) -> dict[str, Endpoint]:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            # The process has already printed the error.
            raise typer.Exit(process.returncode or 1)
        if ready.exists() and (text := ready.read_bytes()).endswith(b"\n"):
            return msgspec.json.decode(text, type=dict[str, dict[str, Endpoint]])["instances"]
        time.sleep(0.02)
    raise InputError(f"the emulated engines were not ready within {_READY_S:g} s", hint="try a smaller cluster")
