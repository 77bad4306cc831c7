"""Runs cells on worker processes, one per core, or on Ray."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import lru_cache
from importlib.util import find_spec
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from threading import Thread

from kvroute.planner.comparison.cells import Cell, Record, decode_record, encode
from kvroute.types import InputError

RunCell = Callable[[Cell], Record]
_LOG = logging.getLogger(__name__)


def check_where(on: str) -> None:
    """Raise InputError if `on` is neither "local" nor "ray", or if Ray is not installed."""
    if on not in ("local", "ray"):
        raise InputError(f"cannot run on {on!r}", where="--on", hint="choose local or ray")
    if on == "ray" and find_spec("ray") is None:
        raise InputError("Ray is not installed", where="--on ray", hint="pip install 'kvroute[ray]'")


def stream(cells: Sequence[Cell], run_cell: RunCell, on: str = "local", workers: int | None = None) -> Iterator[Record]:
    """Yield the records of `cells` as they finish, in no fixed order; arguments as for `run_cells`."""
    check_where(on)
    if on == "ray":
        return _on_ray(cells, run_cell)
    workers = workers or len(os.sched_getaffinity(0))
    if workers == 1 or len(cells) == 1 or not _can_start_workers():
        return map(run_cell, cells)
    return _on_processes(cells, run_cell, workers)


def _can_start_workers() -> bool:
    """Return whether a temporary folder is available: worker processes are reached through a socket in it."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        warn_once("no temporary folder is writable, so all runs share one process; set TMPDIR to a writable folder")
        return False
    return True


def _on_processes(cells: Sequence[Cell], run_cell: RunCell, workers: int) -> Iterator[Record]:
    """Run cells on worker processes. Only a few cells per worker are queued ahead, so an interruption loses little: it
    ends the workers at once."""
    waiting = iter(cells)
    context = get_context("forkserver")
    context.set_forkserver_preload(["kvroute.sim.run"])  # imported once instead of by every worker
    reader, writer = context.Pipe(duplex=False)
    with reader, writer, ProcessPoolExecutor(workers, context, _end_with_parent, (reader,)) as pool:
        futures: set[Future[Record]] = set()
        try:
            for cell in waiting:
                futures.add(pool.submit(run_cell, cell))
                if len(futures) >= 3 * workers:
                    done, futures = wait(futures, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            while futures:
                done, futures = wait(futures, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        except BaseException:
            writer.close()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _end_with_parent(writer_closed: Connection) -> None:
    """End a worker when its parent is killed or interrupted; otherwise it would wait for work, or finish its cell.
    Ctrl-C reaches the whole process group, and the parent answers it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel, writer_closed])
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def _on_ray(cells: Sequence[Cell], run_cell: RunCell) -> Iterator[Record]:
    """Run cells on the cluster in RAY_ADDRESS, or on a local Ray that is stopped at the end."""
    import ray

    started = not ray.is_initialized()
    if started:
        ray.init(log_to_driver=False, include_dashboard=False)
    try:
        remote = ray.remote(num_cpus=1)(_encoded)
        shared = ray.put(run_cell)
        waiting = [remote.remote(shared, cell) for cell in cells]
        while waiting:
            done, waiting = ray.wait(waiting)
            yield from (decode_record(record) for record in ray.get(done))
    finally:
        if started:
            ray.shutdown()


def _encoded(run_cell: RunCell, cell: Cell) -> bytes:
    return encode(run_cell(cell))


@lru_cache(maxsize=64)
def warn_once(sentence: str) -> None:
    """Log a sentence once, because a file is read several times."""
    _LOG.warning(sentence)
