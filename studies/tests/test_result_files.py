"""Result files know the code that made them, and one command makes them again."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import msgspec
import pytest

from kvroute.types import InputError
from kvroute_studies.aggregated.quoted import QUOTED as AGGREGATED
from kvroute_studies.results import STUDIES, make, result_of, states
from kvroute_studies.shared.provenance import MODULES, PACKAGES, PLACEMENT, UNCOUNTED, meanings
from kvroute_studies.shared.result_files import (
    ResultFile,
    ResultTable,
    code_digests,
    read_result,
    read_results,
    result_paths,
    write_result,
)

RESULT = ResultFile(
    command="kvroute experiment some",
    date="2026-01-31",
    seeds=2,
    code=code_digests(["kvroute/flows", "kvroute/compiled.py"]),
    tables={"gains": ResultTable(["System"], [["`basic`"]])},
    figures={"gain": "1.88"},
)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_result(tmp_path / "results" / "some.json", RESULT)
    assert read_result(tmp_path / "results" / "some.json") == RESULT


def test_a_file_that_is_no_result_is_named(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    path.write_text('{"command": "x"}')
    with pytest.raises(InputError, match=r"some\.json.*not a result file"):
        read_result(path)


def test_a_table_and_a_figure_of_one_name_are_refused(tmp_path: Path) -> None:
    """A page names only one of them."""
    path = tmp_path / "some.json"
    path.write_bytes(msgspec.json.encode(RESULT).replace(b'"gain":', b'"gains":'))
    with pytest.raises(InputError, match="gains: a table and a figure"):
        read_result(path)


def test_two_results_of_one_name_are_refused(tmp_path: Path) -> None:
    """Pages name a result without its study."""
    for study in ("one", "two"):
        (tmp_path / study).mkdir()
        write_result(tmp_path / study / "results" / "some.json", RESULT)
    with pytest.raises(InputError, match="has the same name"):
        result_paths(tmp_path)


def test_changed_code_is_named() -> None:
    """A folder that was changed, one that does not exist any more, and code that was not recorded."""
    assert RESULT.changed() == []
    other = RESULT.code | {"kvroute/flows": "0" * 16, "kvroute/no_such_folder": "1" * 16}
    assert msgspec.structs.replace(RESULT, code=other).changed() == ["kvroute/flows", "kvroute/no_such_folder"]
    assert msgspec.structs.replace(RESULT, code={}).changed() == ["code not recorded"]


@pytest.mark.parametrize(("study", "name"), [(study, name) for study, some in STUDIES.items() for name in some])
def test_all_code_of_a_result_exists(study: str, name: str) -> None:
    """Its digest would be "" otherwise, today and after every change."""
    assert all(code_digests(STUDIES[study][name].code).values())


def imported(entries: Sequence[str]) -> set[str]:
    """Return the modules of the packages that code imports without being part of it, except for annotations."""
    counted, found = meanings(PACKAGES, entries), set[str]()
    for name in counted:
        tree = ast.parse((PACKAGES[name.partition("/")[0]].parent / name).read_text(encoding="utf-8"))
        tree.body = [each for each in tree.body if not (isinstance(each, ast.If) and "TYPE_CHECKING" in ast.dump(each))]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PACKAGES:
                found |= {module_file(f"{node.module}.{alias.name}") for alias in node.names}
    return found - counted.keys()


def module_file(name: str) -> str:
    """Return the file of a module, or of the module that has a name."""
    path = name.replace(".", "/")
    parent = PACKAGES[name.partition(".")[0]].parent
    return next(
        file
        for file in (
            f"{path}.py",
            f"{path}/__init__.py",
            *(f"{path.rpartition('/')[0]}{end}" for end in (".py", "/__init__.py")),
        )
        if (parent / file).is_file()
    )


NOT_CALLED = {
    "default-policy": ("kvroute_studies/never_worse/clairvoyant.py", "kvroute_studies/shared/runner.py"),
    "dualpath": (
        "kvroute/flows/*",  # the slower mode of all compute NICs
        "kvroute/policies/decode.py",  # storage reads of the gateway
        "kvroute/sim/workload/*",  # recorded sessions
        "kvroute/sim/metrics.py",  # an empty summary
        "kvroute/types/*",
    ),
    "heroserve-online": (
        "kvroute/sim/*",  # the iterations of engines
        "kvroute/timing/*",
        "kvroute/topology/*",  # flows of a cluster file's groups
        "kvroute/types/*",
        "kvroute_engine/*",
        "kvroute_studies/heroserve/setup.py",  # an empty summary
    ),
}
"""Imports that a result's run does not need, by the beginning of its name."""


@pytest.mark.parametrize(("study", "name"), [(study, name) for study, some in STUDIES.items() for name in some])
def test_the_code_of_a_result_is_complete(study: str, name: str) -> None:
    """What it imports is part of it, or cannot change a number. Groups of engines are HeroServe's alone."""
    not_called = [each for start, some in NOT_CALLED.items() if name.startswith(start) for each in some]
    groups = () if study == "heroserve" else PLACEMENT
    allowed = (*UNCOUNTED, *not_called, *groups)
    code = STUDIES[study][name].code
    assert [one for one in sorted(imported(code)) if not any(fnmatch(one, each) for each in allowed)] == []


def test_what_counted_code_imports_is_counted() -> None:
    """What is left out is imported somewhere, so that no outdated name stays."""
    assert imported(MODULES) == set(UNCOUNTED)


def test_a_result_is_made_from_its_cells(tmp_path: Path) -> None:
    """A second call runs no cell again."""
    one = AGGREGATED["default-policy"]
    quoted = type(one)(one.experiment, 1, one.code, one.tables, one.figures, ("queue/realistic/load=0.25",))
    made = result_of(quoted, tmp_path, workers=1)
    assert made.command == "kvroute experiment aggregated --profile 'queue/realistic/load=0.25' --seeds 1"
    assert [row[:2] for row in made.tables["verdicts"].rows] == [
        ["queue", policy] for policy in ("foresight-joint", "disaggregated", "aggregated", "bounded")
    ]
    assert made.figures["cells"] == "1"
    assert made.changed() == []
    [cells] = tmp_path.rglob("*.jsonl")
    before = cells.read_bytes()
    assert len(before.splitlines()) == 4
    again = result_of(quoted, tmp_path, workers=1)
    assert (again.tables, again.figures) == (made.tables, made.figures)
    assert cells.read_bytes() == before


def test_every_result_is_listed_with_its_state() -> None:
    """Results that no command of this package makes say so."""
    lines = states()
    assert [line.partition(" ")[0] for line in lines] == list(read_results())
    known = {name for some in STUDIES.values() for name in some}
    for line in lines:
        assert line.endswith(": current") or "stale" in line
        assert ("by hand" in line) == ("stale" in line and line.partition(" ")[0] not in known)


def test_a_result_without_a_run_cannot_be_made() -> None:
    with pytest.raises(InputError, match="no run is known for 'some'"):
        make("some")
