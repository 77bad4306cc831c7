"""The rules of docs/structure.md on folders and modules: how large they are, and what is too small to be one."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {
    "kvroute": ROOT / "src/kvroute",
    "kvroute_engine": ROOT / "engine/src/kvroute_engine",
    "kvroute_studies": ROOT / "studies/src/kvroute_studies",
}
MOST_FILES, MOST_LINES, LEAST_LINES = 20, 400, 60
GENERATED = ("agents_pb2.py", "envoy_pb2.py")
OWN_MODULES = {
    "kvroute_engine.all_reduce.plugin": "vLLM loads it by name",
    "kvroute_engine.block_store.redis_backend": "it is imported by name, if the extra is installed",
    "kvroute.serve.lifecycle.compilation": "`python -m` runs it in a process of its own",
    "kvroute.control.features": "the one place that orders the features of a decision",
}
"""Small modules beside their importer, with the reason."""


@cache
def modules() -> dict[str, Path]:
    """Return the file of each module that is not generated, by its dotted name."""
    found = {}
    for package, folder in SOURCES.items():
        for path in sorted(folder.rglob("*.py")):
            if path.name not in GENERATED:
                name = f"{package}.{'.'.join(path.relative_to(folder).with_suffix('').parts)}"
                found[name.removesuffix(".__init__")] = path
    return found


def lines(path: Path) -> int:
    """Return the number of lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


@cache
def importers() -> dict[str, set[str]]:
    """Return the modules that import each module."""
    known = modules()
    found: dict[str, set[str]] = defaultdict(set)
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    found[whole if whole in known else node.module].add(name)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    found[alias.name].add(name)
    return found


def test_no_folder_has_more_than_twenty_modules() -> None:
    sizes = Counter(path.parent for path in modules().values())
    assert len(sizes) > 60
    assert {str(folder.relative_to(ROOT)): n for folder, n in sizes.items() if n > MOST_FILES} == {}


def test_no_module_has_more_than_four_hundred_lines() -> None:
    assert {name: n for name, path in modules().items() if (n := lines(path)) > MOST_LINES} == {}


def test_a_small_module_with_one_importer_beside_it_is_part_of_that() -> None:
    """Unless the importer would become too long. What a package's own `__init__` exports may have a module."""
    known, small = modules(), {}
    for name, path in known.items():
        if path.name == "__init__.py" or name in OWN_MODULES or lines(path) >= LEAST_LINES:
            continue
        users = importers()[name]
        if len(users) == 1:
            (user,) = users
            beside = name.rpartition(".")[0] == user.rpartition(".")[0] and known[user].name != "__init__.py"
            if beside and lines(known[user]) + lines(path) <= MOST_LINES:
                small[name] = user
    assert small == {}
