"""Result files know the code that made them, and one command makes them again."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import msgspec
import pytest

from kvroute.types import InputError
from kvroute_studies import results
from kvroute_studies.aggregated.quoted import QUOTED as AGGREGATED
from kvroute_studies.command import families
from kvroute_studies.never_worse.run import TRACES_VARIABLE, Traces
from kvroute_studies.results import STUDIES, cells_folder, make, result_of, run_options, states
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
    counted = meanings(PACKAGES, entries).keys()
    return {module for name in counted for module in imports_of(name)} - counted


@cache
def imports_of(file: str) -> frozenset[str]:
    """Return the modules of the packages that a module imports, except for annotations."""
    tree = ast.parse((PACKAGES[file.partition("/")[0]].parent / file).read_text(encoding="utf-8"))
    tree.body = [part for part in tree.body if not (isinstance(part, ast.If) and "TYPE_CHECKING" in ast.dump(part))]
    return frozenset(
        module_file(f"{node.module}.{alias.name}")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PACKAGES
        for alias in node.names
    )


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
    "accuracy": (
        "kvroute/sim/metrics.py",  # the summary of a record
        "kvroute/timing/formulas.py",  # the times of cluster files, and profiles that are fitted
        "kvroute/timing/profile.py",
        "kvroute/types/*",
        "kvroute/compiled.py",  # arrays of lengths
        "kvroute_engine/*",
    ),
    "default-policy": ("kvroute_studies/never_worse/clairvoyant.py", "kvroute_studies/shared/runner.py"),
    "dualpath": (
        "kvroute/flows/*",  # the slower mode of all compute NICs
        "kvroute/policies/decode.py",  # storage reads of the gateway
        "kvroute/sim/workload/*",  # recorded sessions
        "kvroute/sim/metrics.py",  # an empty summary
        "kvroute/types/*",
    ),
    "heroserve-ina": (
        "kvroute/sim/*",  # the iterations of engines
        "kvroute/timing/*",
        "kvroute/types/*",
        "kvroute/llm/*",
        "kvroute/compiled.py",
        "kvroute_engine/*",
        "kvroute_studies/heroserve/setup.py",  # an empty summary
    ),
    "netkv": ("kvroute_studies/shared/runner.py",),
    "never-worse": ("kvroute_studies/shared/runner.py",),
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
    not_called = [path for start, some in NOT_CALLED.items() if name.startswith(start) for path in some]
    groups = () if study == "heroserve" else PLACEMENT
    allowed = (*UNCOUNTED, *not_called, *groups)
    code = STUDIES[study][name].code
    assert [path for path in sorted(imported(code)) if not any(fnmatch(path, part) for part in allowed)] == []


def test_what_counted_code_imports_is_counted() -> None:
    """What is left out is imported somewhere, so that no outdated name stays."""
    assert imported(MODULES) == set(UNCOUNTED)


def test_a_result_is_made_from_its_cells(tmp_path: Path) -> None:
    """A second call runs no cell again."""
    quoted = replace(AGGREGATED["default-policy"], seeds=1, profiles=("queue/realistic/load=0.25",))
    made = result_of(quoted, tmp_path, Traces(), workers=1)
    assert made.command == "kvroute experiment aggregated --profile 'queue/realistic/load=0.25' --seeds 1"
    assert [row[:2] for row in made.tables["verdicts"].rows] == [
        ["queue", policy] for policy in ("foresight-joint", "disaggregated", "aggregated", "bounded")
    ]
    assert made.figures["cells"] == "1"
    assert made.changed() == []
    [cells] = tmp_path.rglob("*.jsonl")
    before = cells.read_bytes()
    assert len(before.splitlines()) == 4
    again = result_of(quoted, tmp_path, Traces(), workers=1)
    assert (again.tables, again.figures) == (made.tables, made.figures)
    assert cells.read_bytes() == before


def test_every_result_file_has_a_command_that_makes_it() -> None:
    assert read_results().keys() == {name for quoted in STUDIES.values() for name in quoted}
    assert [line.partition(" ")[0] for line in states()] == list(read_results())


def test_experiments_of_all_results_exist() -> None:
    """Those of one result are of one family, with the seeds, profiles and policies of the experiment."""
    for quoted in (quoted for study in STUDIES.values() for quoted in study.values()):
        experiments = next(
            family.experiments for family in families().values() if quoted.experiments[0] in family.experiments
        )
        assert experiments.keys() >= set(quoted.experiments)
        assert all(set(quoted.profiles) <= set(experiments[name].profiles) for name in quoted.experiments)


def test_code_of_cells_is_counted_by_their_records_or_by_their_folder() -> None:
    """Finished cells of other code are not used: a record has the digest of MODULES, a folder that of the study."""
    counted = meanings(PACKAGES).keys()
    for study, name in ((study, name) for study, some in STUDIES.items() for name in some):
        quoted = STUDIES[study][name]
        packages = [entry for entry in quoted.code if not entry.startswith("kvroute_studies/")]
        assert meanings(PACKAGES, packages).keys() <= counted
        changed = replace(quoted, code=tuple(entry for entry in quoted.code if entry in packages))
        if changed.code != quoted.code:
            assert cells_folder(study, changed) != cells_folder(study, quoted)


def test_recorded_traces_are_options_of_the_command(tmp_path: Path) -> None:
    """A missing one is an error that says where to get it."""
    (tmp_path / "conversation_trace.jsonl.zst").touch()
    traces = Traces.of(tmp_path)
    options, given = run_options(STUDIES["netkv"]["netkv-literal"], tmp_path / "out", traces)
    assert options.trace == tmp_path / "conversation_trace.jsonl.zst"
    assert (
        STUDIES["netkv"]["netkv-literal"]
        .command(given)
        .endswith("netkv-ablation --reading literal --trace conversation_trace.jsonl.zst --seeds 1")
    )
    with pytest.raises(InputError, match=r"traces_rle\.jsonl or .*missing.*kv-cache-tester.*--traces"):
        run_options(STUDIES["never_worse"]["never-worse"], tmp_path / "out", traces)
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "traces_rle.jsonl").touch()
    options, given = run_options(STUDIES["never_worse"]["never-worse"], tmp_path / "out", Traces.of(tmp_path))
    assert (options.trace, options.trace_dir, given) == (None, tmp_path, ["--trace-dir traces"])


def test_results_without_their_trace_are_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By name they are an error."""
    monkeypatch.delenv(TRACES_VARIABLE, raising=False)
    monkeypatch.setattr(results, "stale", lambda: ["prfaas-mooncake"])
    assert results.main([]) == 0
    assert "prfaas-mooncake is not made: conversation_trace.jsonl or" in capsys.readouterr().err
    assert results.main(["prfaas-mooncake"]) == 2
    assert results.main(["--traces", str(tmp_path / "nowhere")]) == 2
    assert "the folder does not exist" in capsys.readouterr().err


def test_an_unknown_result_cannot_be_made() -> None:
    with pytest.raises(InputError, match="there is no result 'some'"):
        make("some", Traces())
