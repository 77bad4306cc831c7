"""`kvroute serve --workers N`: the parent process, and each of the workers that it starts."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvroute.types import Endpoint, InputError

if TYPE_CHECKING:
    from kvroute.serve.config.worker import WorkerSpec
    from kvroute.serve.lifecycle.deployment import Deployment


def read_spec(path: Path) -> WorkerSpec:
    """Return what the parent process has written for a worker.

    Raises:
        InputError: the file is not readable or not of this version.
    """
    from kvroute.serve.config.worker import WorkerSpec

    try:
        return msgspec.json.decode(path.read_bytes(), type=WorkerSpec)
    except (OSError, msgspec.DecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        hint = "use --workers; it starts the workers itself"
        raise InputError(f"this is not a file for a worker ({why})", where=str(path), hint=hint) from None


async def run_worker(read: Callable[[], Deployment], spec: WorkerSpec, seed: int | None) -> None:
    """Run one worker until its parent process ends it or has ended."""
    from kvroute.cli.serve.process import run_gateway
    from kvroute.serve.proxy.frontend import HttpFrontend

    # A process group of its own keeps Ctrl-C from the worker, which would be a second signal beside the parent's.
    os.setpgid(0, 0)
    ready_file = Path(spec.ready_file)
    own_seed = None if seed is None else seed + spec.number
    await run_gateway(read, ready_file, own_seed, True, frontend=HttpFrontend(shares_port=True), worker=spec)


async def run_workers(
    read: Callable[[], Deployment],
    arguments: Sequence[str],
    workers: int,
    endpoints: Mapping[str, Endpoint] | None,
    ready_file: Path | None,
    seed: int | None,
    until_eof: bool,
) -> None:
    """Run workers until a signal ends all of them.

    Args:
        read: returns the deployment of the cluster file.
        arguments: arguments of `kvroute serve` for every worker.
        workers: number of workers.
        endpoints: endpoints of emulated engines; None: those in the cluster file.
        ready_file: gets the addresses as JSON; None: no file.
        seed: random seed; None: the system's randomness.
        until_eof: whether the end of standard input ends all workers.
    """
    from kvroute.cli.serve.process import (
        Signals,
        announce_gateway,
        check_discovery,
        check_files,
        until_signalled,
    )
    from kvroute.compiled import release_compiler
    from kvroute.serve.config.preflight import check_places
    from kvroute.serve.observe.logs import Logs
    from kvroute.serve.workers.supervisor import Supervisor

    signals = Signals(until_eof)
    deployment = read()
    settings = deployment.settings
    await asyncio.to_thread(check_discovery, deployment)
    if settings.listen.metrics:
        hint = "read the sum of all workers from the admin port, and remove gateway.listen.metrics"
        raise InputError("with --workers the port for clients would show the metrics of one worker", hint=hint)
    check_places(settings)
    check_files(deployment)
    logs = Logs(settings.log.format, settings.log.level, access=settings.log.access)
    seeded = [] if seed is None else [f"--seed={seed}"]

    def command(spec: Path) -> list[str]:
        return ["serve", *arguments, *seeded, f"--worker={spec}"]

    def read_again() -> Deployment:
        again = read()
        check_discovery(again)
        return again

    with tempfile.TemporaryDirectory(prefix="kvroute-") as folder:
        supervisor = Supervisor(deployment, command, Path(folder), workers=workers, endpoints=endpoints, logs=logs)
        try:
            await supervisor.start()
            release_compiler()
            announce_gateway(supervisor, deployment, ready_file)
            await until_signalled(supervisor, read_again, signals)
        finally:
            await supervisor.close()
            logs.close()
