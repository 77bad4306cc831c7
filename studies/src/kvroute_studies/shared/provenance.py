"""Identifies the code behind a result: a digest of the modules that decide and simulate, without comments, layout and
names of local variables.

Version numbers are not used: between two releases a policy changes more often than the version.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path

import xxhash

import kvroute
import kvroute_engine
import kvroute_studies
from kvroute.policies import DECODE_POLICIES, FORESIGHT_POLICIES
from kvroute_studies.shared.heroserve_baselines import BASELINES, RETRY_S
from kvroute_studies.shared.local_names import number_local_names

MODULES = (
    "kvroute/compiled.py",
    "kvroute/slots.py",
    "kvroute/files/compressed_lines.py",
    "kvroute/types",
    "kvroute/llm",
    "kvroute/topology",
    "kvroute/flows",
    "kvroute/timing",
    "kvroute/oracle",
    "kvroute/prefix",
    "kvroute/policies",
    "kvroute/control",
    "kvroute/sim",
    "kvroute/collectives",
    "kvroute/planner/placement",
    "kvroute/planner/throughput",
    "kvroute_engine/arrays.py",
    "kvroute/files/units_in_structs.py",
    "kvroute_engine/agent/files.py",
    "kvroute_engine/agent/rates.py",
    "kvroute_engine/agent/schemes.py",
    "kvroute_engine/files",
    "kvroute_engine/switch",
    "kvroute_studies/netkv/setup.py",
    "kvroute_studies/netkv/readings.py",
    "kvroute_studies/dualpath/setup.py",
    "kvroute_studies/never_worse/clairvoyant.py",
    "kvroute_studies/heroserve/run.py",
    "kvroute_studies/heroserve/serving.py",
    "kvroute_studies/heroserve/setup.py",
    "kvroute_studies/heroserve/throughput.py",
    "kvroute_studies/shared/heroserve_baselines.py",
)
"""Folders and files of the packages. Further settings of a family of experiments are in the config of its records."""
UNCOUNTED = (
    "kvroute/files/json_schema.py",
    "kvroute/plausibility.py",
    "kvroute/planner/comparison/cells.py",
    "kvroute_engine/addresses.py",
    "kvroute_engine/agent/agents_pb2.py",
    "kvroute_engine/agent/messages.py",
    "kvroute_engine/agent/reports.py",
    "kvroute_engine/agent/security.py",
    "kvroute_engine/errors.py",
    "kvroute_engine/renamed.py",
    "kvroute_studies/shared/cells.py",
)
"""Modules that `MODULES` import and that cannot change a number: messages of errors, old names, warnings, the form of
records, and what agents of real servers send."""
FORESIGHT = (
    "kvroute/policies/foresight/*",
    "kvroute/control/choice/aggregated_offers.py",
    "kvroute/control/learning/learned_capacity.py",
    "kvroute/control/choice/pairing.py",
    "kvroute/control/state/transfer_table.py",
    "kvroute/control/state/transfer_tracker.py",
)
"""Modules without effect on the decisions of other policies than foresight's."""
PLACEMENT = (
    "kvroute/collectives/*",
    "kvroute/files/units_in_structs.py",
    "kvroute_engine/agent/files.py",
    "kvroute_engine/agent/rates.py",
    "kvroute_engine/switch/*",
    "kvroute/planner/placement/*",
    "kvroute_studies/heroserve/*",
    "kvroute_studies/shared/heroserve_baselines.py",
)
"""Modules with an effect on HeroServe's experiments alone."""
PACKAGES = {
    package.__name__: Path(str(package.__file__)).parent for package in (kvroute, kvroute_engine, kvroute_studies)
}
"""Folder of each package."""
_PLACED = BASELINES.keys() | RETRY_S.keys()
_BASELINES = DECODE_POLICIES.keys() - FORESIGHT_POLICIES.keys()


@lru_cache(maxsize=256)
def code_of(policy: str) -> str:
    """Return the digest of the code behind a cell of that policy, 16 hexadecimal digits; computed once per process."""
    without = FORESIGHT if policy in _BASELINES else ()
    return digest(_here(), without if policy in _PLACED else (*without, *PLACEMENT))


@lru_cache(maxsize=1)
def _here() -> dict[str, str]:
    return meanings(PACKAGES)


def meanings(packages: Mapping[str, Path], entries: Sequence[str] = MODULES) -> dict[str, str]:
    """Return the digest of each module of the folders and files, by its path from the parent of its package.

    Args:
        packages: the folder of each package.
        entries: folders and files of the packages.
    """
    found = {}
    for entry in entries:
        package = packages[entry.partition("/")[0]]
        place = package.parent / entry
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            found[path.relative_to(package.parent).as_posix()] = _meaning_digest(path.read_text(encoding="utf-8"))
    return found


@lru_cache(maxsize=1024)
def _meaning_digest(source: str) -> str:
    """Return the digest of a module's text; most modules are behind several results."""
    return xxhash.xxh64_hexdigest(meaning(source).encode())


def digest(modules: Mapping[str, str], without: Sequence[str] = ()) -> str:
    """Return one digest of all modules by name and digest, without those that match a pattern."""
    parts = (f"{name} {of}\n" for name, of in modules.items() if not any(fnmatch(name, pattern) for pattern in without))
    return xxhash.xxh64_hexdigest("".join(parts).encode())


def meaning(source: str) -> str:
    """Return a module's syntax tree as text, without comments, layout, standalone constants (docstrings) and the names
    of local variables."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            body[:] = [statement for statement in body if not _is_docstring(statement)]
    number_local_names(tree)
    return ast.dump(tree)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
