"""Result files: what the pages quote of a study, in `results/NAME.json` of its folder, with the code that made it.

A file has tables and single figures as the pages print them, the command that makes them, its date and its seeds, and
a digest for each folder or file of code that they depend on. No digests: the code was not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from kvroute.planner.comparison.cells import Record
from kvroute.report.grid import Grid, GridEntry
from kvroute.types import InputError
from kvroute_studies.shared.provenance import MODULES, PACKAGES, PLACEMENT, meanings

ROUTING = tuple(
    entry
    for entry in MODULES
    if not {entry, f"{entry}/*"} & {*PLACEMENT, "kvroute/planner/throughput"}
    and not entry.startswith("kvroute_studies/")
)
"""Code behind studies of routing, without that of the study."""


class ResultTable(msgspec.Struct, frozen=True):
    """Texts of a table; the cells are Markdown."""

    columns: list[str]
    rows: list[list[str]]


class ResultFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a file."""

    command: str
    """Makes the results again."""
    date: str
    """Day of the run, YYYY-MM-DD."""
    seeds: int = 0
    """Number of seeds, from 0; a bench has none."""
    machine: str = ""
    """Where a bench ran; results of a simulation do not depend on it."""
    code: dict[str, str]
    """Digest by folder or file, as in `provenance.MODULES`."""
    tables: dict[str, ResultTable] = {}
    figures: dict[str, str] = {}
    """Single numbers by name; no table has the same one."""

    def __post_init__(self) -> None:
        if both := self.tables.keys() & self.figures.keys():
            raise ValueError(f"{', '.join(sorted(both))}: a table and a figure")

    def changed(self) -> list[str]:
        """Return the folders and files of code that are not as they were; without digests ["code not recorded"]."""
        if not self.code:
            return ["code not recorded"]
        return [entry for entry, digest in code_digests(self.code).items() if digest != self.code[entry]]


@dataclass(frozen=True, slots=True)
class Quoted:
    """What the pages quote of some experiments of a family, and the options of the run behind it."""

    experiments: tuple[str, ...]
    seeds: int
    code: tuple[str, ...]
    """Folders and files of the packages."""
    tables: Callable[[Sequence[Record]], Mapping[str, ResultTable]] = lambda records: {}
    figures: Callable[[Sequence[Record]], Mapping[str, str]] = lambda records: {}
    profiles: tuple[str, ...] = ()
    """Names or patterns; empty for all."""
    reading: str = "paper"
    changes: tuple[str, ...] = ()
    """Changed assumptions, NAME=VALUE."""
    traces: tuple[str, ...] = ()
    """Recorded traces that the run needs, by the name that never-worse's cases use."""

    def command(self, given: Sequence[str] = ()) -> str:
        """Return the command that runs the experiments.

        Args:
            given: the options that name the recorded traces.
        """
        parts = ["kvroute experiment", *self.experiments]
        parts += [f"--profile '{name}'" for name in self.profiles]
        parts += [] if self.reading == "paper" else [f"--reading {self.reading}"]
        parts += [f"--set {change}" for change in self.changes]
        return " ".join((*parts, *given, f"--seeds {self.seeds}"))


def code_digests(entries: Iterable[str]) -> dict[str, str]:
    """Return the digest of each folder or file, 16 hexadecimal digits; "" for one that does not exist any more."""
    digests = {}
    for entry in entries:
        exists = (PACKAGES[entry.partition("/")[0]].parent / entry).exists()
        modules = meanings(PACKAGES, (entry,)) if exists else {}
        lines = "".join(f"{name} {digest}\n" for name, digest in modules.items())
        digests[entry] = xxhash.xxh64_hexdigest(lines.encode()) if exists else ""
    return digests


def result_paths(folder: Path = PACKAGES["kvroute_studies"]) -> dict[str, Path]:
    """Return the result files of all studies by name. Raises InputError if two have one name."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*/results/*.json")):
        if path.stem in found:
            raise InputError(f"{found[path.stem]} has the same name", where=str(path), hint="rename one of them")
        found[path.stem] = path
    return found


def read_result(path: Path) -> ResultFile:
    """Read a file. Raises InputError for one that is not a result."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ResultFile)
    except msgspec.DecodeError as error:
        hint = f"make it again: make results NAME={path.stem}"
        raise InputError(f"this is not a result file ({error})", where=str(path), hint=hint) from None


def read_results() -> dict[str, ResultFile]:
    """Return all results by name. Raises InputError for a file that is none."""
    return {name: read_result(path) for name, path in result_paths().items()}


def write_result(path: Path, result: ResultFile) -> None:
    """Write a file that can be compared line by line."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


def table_of(grid: Grid) -> ResultTable:
    """Return a grid as a table, each detail after its text."""
    return ResultTable(
        [heading.title for heading in grid.headings], [[_text(entry) for entry in row] for row in grid.rows]
    )


def _text(entry: GridEntry) -> str:
    text = f"{entry.text} {entry.detail}".strip()
    return f"**{text}**" if entry.best else text
