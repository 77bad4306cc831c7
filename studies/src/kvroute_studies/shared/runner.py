"""Runs cells on all cores or on Ray and writes one JSON line per cell; a later call runs only the missing cells.

Results of other code versions count as missing. They stay in the file, before the results that replace them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvroute.planner.comparison.cells import Cell, Record, decode_record, encode
from kvroute.planner.comparison.parallel import RunCell, check_where, stream, warn_once
from kvroute.types import InputError
from kvroute_studies.shared.provenance import code_of


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
                record = decode_record(line)
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
        warn_once(f"{path}: ignoring {count:,} results of a different code version; requested cells are run again")
    return records


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
