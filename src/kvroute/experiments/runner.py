"""Runs cells on all cores or on Ray and writes one JSON line per cell; a later call runs only the missing cells.

Results of other code versions count as missing. They stay in the file, before the results that replace them.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import lru_cache
from importlib.util import find_spec
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec

from kvroute.experiments.cells import Cell, Record
from kvroute.experiments.provenance import code_of
from kvroute.types import InputError

RunCell = Callable[[Cell], Record]
encode = msgspec.json.Encoder().encode
_DECODER = msgspec.json.Decoder(Record)
_LOG = logging.getLogger(__name__)


def finished(path: Path) -> dict[str, Record]:
    """Return the records of earlier runs by key. Records of other code versions are left out with a warning. A line
    truncated by a kill is removed from the file. A record without a digest counts as one of this code."""
    records: dict[str, Record] = {}
    other: set[str] = set()
    try:
        lines = path.open("rb")
    except FileNotFoundError:
        return records
    except OSError as error:
        hint = "choose another folder"
        raise InputError(f"cannot be read ({error.strerror})", where=str(path), hint=hint) from None
    whole, length = 0, path.stat().st_size
    with lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = _DECODER.decode(line)
            except msgspec.DecodeError as error:
                if line.endswith(b"\n"):  # a complete line: do not remove it
                    hint = "delete that line or choose another folder"
                    raise InputError(
                        f"the line is not a valid result ({error})", where=f"{path}:{number}", hint=hint
                    ) from None
                break
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            if record.code in ("", code_of(record.cell.policy)):
                records[record.key] = record
            else:
                other.add(record.key)
    if whole < length:
        os.truncate(path, whole)
    if count := len(other - records.keys()):
        _say(f"{path}: ignoring {count:,} results of a different code version; requested cells are run again")
    return records


@lru_cache(maxsize=64)
def _say(sentence: str) -> None:
    """Log a sentence once, because a file is read several times."""
    _LOG.warning(sentence)


def run_cells(
    cells: Sequence[Cell],
    run_cell: RunCell,
    path: Path,
    config: Mapping[str, Any] | None = None,
    *,
    on: str = "local",
    workers: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Record]:
    """Run the cells that are missing in `path`; return the records of `cells` in their order.

    Args:
        cells: the sweep.
        run_cell: a picklable function from cell to record.
        path: JSON lines file; appended to, flushed after every cell.
        config: values that every record's config must have; they exclude results of another study.
        on: "local" (processes) or "ray".
        workers: number of processes; None: one per core.
        progress: called with (finished, all) after every cell.

    Raises:
        InputError: `on` is unknown, Ray is not installed, or `path` holds other results.
    """
    check_where(on)
    records = finished(path)
    for record in records.values():
        for name, value in (config or {}).items():
            if record.config.get(name) != value:
                hint = "choose another --out or delete that file"
                raise InputError(f"the file has results of another {name}", where=str(path), hint=hint)
    missing = [cell for cell in cells if cell.key not in records]
    codes = {policy: code_of(policy) for policy in {cell.policy for cell in missing}}  # before the source can change
    progress(len(cells) - len(missing), len(cells))
    if missing:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as out:
            for done, unsigned in enumerate(stream(missing, run_cell, on, workers), start=1):
                record = msgspec.structs.replace(unsigned, code=codes[unsigned.cell.policy])
                out.write(encode(record) + b"\n")
                out.flush()
                records[record.key] = record
                progress(len(cells) - len(missing) + done, len(cells))
    return [records[cell.key] for cell in cells]


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
        _say("no temporary folder is writable, so all runs share one process; set TMPDIR to a writable folder")
        return False
    return True


def _on_processes(cells: Sequence[Cell], run_cell: RunCell, workers: int) -> Iterator[Record]:
    """Run cells on worker processes. Only a few cells per worker are queued ahead, so an interruption loses little."""
    waiting = iter(cells)
    context = get_context("forkserver")
    context.set_forkserver_preload(["kvroute.sim.run"])  # imported once instead of by every worker
    with ProcessPoolExecutor(workers, context, _end_with_parent) as pool:
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
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _end_with_parent() -> None:
    """End a worker when its parent is killed; otherwise it would wait for work forever."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
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
            yield from (_DECODER.decode(record) for record in ray.get(done))
    finally:
        if started:
            ray.shutdown()


def _encoded(run_cell: RunCell, cell: Cell) -> bytes:
    return encode(run_cell(cell))
