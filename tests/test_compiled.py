"""Compiled kernels: the cache detects changes in called kernels, an unwritable folder stops no run, only the user's own
folder is trusted."""

from __future__ import annotations

import ast
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvroute
from kvroute.compiled import temporary_folder

CALLEE = """
from kvroute.compiled import compiled
FACTOR = {factor}

@compiled
def scaled(x):
    return {term} * FACTOR
"""
CALLER = """
from kvroute.compiled import compiled
import {callee}
from {callee} import FACTOR, scaled
from kvroute.types import TIER_COUNT

@compiled
def combined(x):
    return {callee}.scaled(x) + scaled(x) + FACTOR * 1000

print(combined(1), sum(combined.stats.cache_hits.values()))
"""
OUTER = """
from kvroute.compiled import compiled
from of_inner import combined

@compiled
def doubled(x):
    return 2 * combined(x)

print(doubled(1), sum(doubled.stats.cache_hits.values()))
"""

RECORD = """
from typing import NamedTuple
from kvroute.compiled import compiled

class {name}(NamedTuple):
    x: int

@compiled
def read(record):
    return record.x + 2

print(read({name}(1)), sum(read.stats.cache_hits.values()))
"""


def run_script(folder: Path, *callees: str, limit: int = resource.RLIM_INFINITY) -> tuple[list[str], str]:
    """Run the caller of each of `callees` in a new process that can write files of at most `limit` bytes; return the
    lines of stdout, and stderr."""
    # Not measured by `make coverage`, because its data file would be limited too.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    environment |= {"NUMBA_CACHE_DIR": str(folder / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", f"import {', '.join(f'of_{callee}' for callee in callees)}"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY)),
    )
    return done.stdout.splitlines(), done.stderr


def written(folder: Path, callee: str, factor: int = 2, term: str = "x") -> None:
    """Write a file with a kernel, and one with a kernel that calls it."""
    (folder / f"{callee}.py").write_text(CALLEE.format(factor=factor, term=term), encoding="utf-8")
    caller = folder / f"of_{callee}.py"
    if not caller.exists():  # the caller is never rewritten: only its callee changes
        caller.write_text(CALLER.format(callee=callee), encoding="utf-8")


def test_a_cached_kernel_is_used_until_a_callee_changes(tmp_path: Path) -> None:
    """A changed kernel or a changed constant in another file invalidates its caller and no other kernel."""
    for callee in ("first", "second"):
        written(tmp_path, callee)
    assert run_script(tmp_path, "first", "second")[0] == ["2004 0", "2004 0"]
    written(tmp_path, "first", term="3 * x")
    assert run_script(tmp_path, "first", "second")[0] == ["2012 0", "2004 1"]
    written(tmp_path, "second", factor=5)
    assert run_script(tmp_path, "first", "second")[0] == ["2012 1", "5010 0"]


@pytest.mark.slow
def test_a_change_reaches_callers_of_callers(tmp_path: Path) -> None:
    """The innermost of three modules changes: both others are compiled again. Without a change, all come from the
    cache."""
    written(tmp_path, "inner")
    (tmp_path / "of_of_inner.py").write_text(OUTER, encoding="utf-8")
    assert run_script(tmp_path, "of_inner")[0] == ["2004 0", "4008 0"]
    assert run_script(tmp_path, "of_inner")[0] == ["2004 1", "4008 1"]
    written(tmp_path, "inner", term="3 * x")
    assert run_script(tmp_path, "of_inner")[0] == ["2012 0", "4024 0"]


@pytest.mark.slow
def test_a_cache_of_another_version_is_not_an_error(tmp_path: Path) -> None:
    """The cached index names a class that the new version of the module does not have any more."""
    module = tmp_path / "of_record.py"
    module.write_text(RECORD.format(name="Old"), encoding="utf-8")
    assert run_script(tmp_path, "record") == (["3 0"], "")
    assert run_script(tmp_path, "record") == (["3 1"], "")
    module.write_text(RECORD.format(name="New"), encoding="utf-8")
    assert run_script(tmp_path, "record") == (["3 0"], "")


@pytest.mark.slow
def test_a_damaged_cache_is_compiled_again(tmp_path: Path) -> None:
    """The index is cut off, or holds bytes that are no index; both are replaced without a message."""
    (tmp_path / "of_record.py").write_text(RECORD.format(name="Own"), encoding="utf-8")
    assert run_script(tmp_path, "record") == (["3 0"], "")
    [index] = (tmp_path / "cache").rglob("*.nbi")
    for damaged in (index.read_bytes()[:-20], b"", b"no index at all"):
        index.write_bytes(damaged)
        assert run_script(tmp_path, "record") == (["3 0"], "")
        assert run_script(tmp_path, "record") == (["3 1"], "")


def test_a_read_only_cache_causes_one_warning(tmp_path: Path) -> None:
    """The folder exists but takes no data, as on a full disk."""
    written(tmp_path, "callee")
    out, warning = run_script(tmp_path, "callee", limit=0)
    assert out == ["2004 0"]
    assert warning.count("\n") == 1
    assert "compiled kernels cannot be cached" in warning
    assert "NUMBA_CACHE_DIR" in warning


STEPS = """
import sys
from of_callee import scaled
from kvroute.compiled import NotCached, only_cached, release_compiler

try:
    with only_cached():
        scaled(2.0)
except NotCached as missing:
    print("not cached")
release_compiler()
print("numba.np.linalg" in sys.modules, scaled(2.0), scaled(1), scaled.stats.cache_misses != {})
"""


@pytest.mark.slow
def test_a_cached_kernel_loads_no_compiler(tmp_path: Path) -> None:
    """Within `only_cached` a kernel without machine code is not compiled. A process that compiled nothing has not
    loaded what compiling needs, and can still compile, also after LLVM's pages went back to the system."""
    written(tmp_path, "callee")
    (tmp_path / "of_steps.py").write_text(STEPS, encoding="utf-8")
    assert run_script(tmp_path, "steps")[0] == ["2004 0", "not cached", "True 4.0 2 True"]
    assert run_script(tmp_path, "steps")[0] == ["2004 1", "False 4.0 2 False"]
    (tmp_path / "of_more.py").write_text(f"{STEPS}\nprint(scaled(1j))", encoding="utf-8")
    assert run_script(tmp_path, "more")[0] == ["2004 1", "False 4.0 2 False", "2j"]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The path of the fallback folder; the system's temporary folder is replaced by one of the test meanwhile."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    temporary_folder.cache_clear()
    yield tmp_path / f"kvroute-kernels-{os.geteuid()}"
    temporary_folder.cache_clear()


def test_the_fallback_folder_is_private_to_the_user(temporary: Path) -> None:
    """The folder is created with mode 0700 and found again."""
    assert temporary_folder() == str(temporary)
    assert temporary.stat().st_mode & 0o777 == 0o700
    temporary_folder.cache_clear()
    assert temporary_folder() == str(temporary)


@pytest.mark.parametrize("trap", ["link", "file", "open to all"])
def test_a_folder_that_another_user_could_fill_is_not_used(temporary: Path, trap: str) -> None:
    """Loading a cached kernel executes code."""
    elsewhere = temporary.with_name("elsewhere")
    elsewhere.mkdir(mode=0o700)
    if trap == "link":
        temporary.symlink_to(elsewhere)
    elif trap == "file":
        temporary.touch(mode=0o600)
    else:
        temporary.mkdir()
        temporary.chmod(0o777)
    assert temporary_folder() is None


def test_every_kernel_is_compiled_by_the_module_that_chooses_the_cache() -> None:
    """A kernel compiled elsewhere would end in a traceback if its folder cannot be written."""
    package = Path(kvroute.__file__).parent
    users = {
        path.relative_to(package).as_posix() for path in package.rglob("*.py") if "import numba" in path.read_text()
    }
    assert users == {"compiled.py"}


def test_kernels_pass_each_other_named_tuples() -> None:
    """Only a kernel that Python calls has more than twelve parameters."""
    kernels = [
        node
        for file in Path(kvroute.__file__).parent.rglob("*.py")
        for node in ast.parse(file.read_bytes()).body
        if isinstance(node, ast.FunctionDef) and any("compiled" in ast.unparse(mark) for mark in node.decorator_list)
    ]
    wide = {kernel.name for kernel in kernels if len(kernel.args.args) > 12}
    called = {
        f"{kernel.name} calls {node.func.id}"
        for kernel in kernels
        for node in ast.walk(kernel)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in wide
    }
    assert wide
    assert called == set()
