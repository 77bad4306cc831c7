"""Identifies the code behind a result: a digest of the modules that decide and simulate, without comments and layout.

Version numbers are not used: between two releases a policy changes more often than the version.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path

import xxhash

from kvroute.experiments.heroserve_baselines import BASELINES, RETRY_S
from kvroute.policies import DECODE_POLICIES, FORESIGHT_POLICIES

MODULES = (
    "compiled.py",
    "types",
    "llm",
    "topology",
    "flows",
    "timing",
    "oracle",
    "prefix",
    "policies",
    "control",
    "sim",
    "experiments/setup.py",
    "experiments/dualpath_setup.py",
    "experiments/readings.py",
    "experiments/clairvoyant.py",
    "collectives",
    "switch",
    "planner/placement",
    "experiments/heroserve.py",
    "experiments/heroserve_baselines.py",
    "experiments/heroserve_serving.py",
    "experiments/heroserve_setup.py",
    "experiments/heroserve_throughput.py",
)
"""Folders and files of the package. Further settings of a family of experiments are in the config of its records."""
FORESIGHT = (
    "policies/foresight*.py",
    "control/alone_offers.py",
    "control/learned_capacity.py",
    "control/pairing.py",
    "control/transfer_table.py",
    "control/transfer_tracker.py",
)
"""Modules without effect on the decisions of other policies than foresight's."""
PLACEMENT = ("collectives/*", "switch/*", "planner/placement/*", "experiments/heroserve*.py")
"""Modules with an effect on HeroServe's experiments alone."""
_PLACED = BASELINES.keys() | RETRY_S.keys()
_BASELINES = DECODE_POLICIES.keys() - FORESIGHT_POLICIES.keys()


@lru_cache(maxsize=256)
def code_of(policy: str) -> str:
    """Return the digest of the code behind a cell of that policy, 16 hexadecimal digits; computed once per process."""
    without = FORESIGHT if policy in _BASELINES else ()
    return digest(_here(), without if policy in _PLACED else (*without, *PLACEMENT))


@lru_cache(maxsize=1)
def _here() -> dict[str, str]:
    return meanings(Path(__file__).parents[1])


def meanings(package: Path) -> dict[str, str]:
    """Return the digest of each module of `MODULES` in a folder, by its relative path."""
    found = {}
    for entry in MODULES:
        place = package / entry
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            text = meaning(path.read_text(encoding="utf-8"))
            found[path.relative_to(package).as_posix()] = xxhash.xxh64_hexdigest(text.encode())
    return found


def digest(modules: Mapping[str, str], without: Sequence[str] = ()) -> str:
    """Return one digest of all modules by name and digest, without those that match a pattern."""
    parts = (f"{name} {of}\n" for name, of in modules.items() if not any(fnmatch(name, each) for each in without))
    return xxhash.xxh64_hexdigest("".join(parts).encode())


def meaning(source: str) -> str:
    """Return a module's syntax tree as text, without comments, layout and standalone constants (docstrings)."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            body[:] = [each for each in body if not _is_docstring(each)]
    return ast.dump(tree)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
