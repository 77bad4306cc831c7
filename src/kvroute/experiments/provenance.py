"""Which code a result comes from: a digest of the modules that decide and simulate, blind to comments and layout.

It refuses to tell versions apart by number: between two releases a policy changes more often than a number does.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path

import xxhash

from kvroute.policies import DECODE_POLICIES, FORESIGHT_POLICIES

ROOMS = (
    "compiled.py",
    "types",
    "llm",
    "topology",
    "flows",
    "timing",
    "oracle",
    "prefix",
    "cachepool",
    "policies",
    "control",
    "sim",
    "experiments/setup.py",
    "experiments/readings.py",
    "experiments/clairvoyant.py",
)
"""Folders and files of the package; what a family of experiments sets besides is in its records' config."""
FORESIGHT = ("policies/foresight*.py", "control/flight.py", "control/pairing.py")
"""Of no consequence where a policy that is not foresight's decides."""
_BASELINES = DECODE_POLICIES.keys() - FORESIGHT_POLICIES.keys()


@lru_cache(maxsize=256)
def code_of(policy: str) -> str:
    """Digest of the code behind a cell of that policy, 16 hexadecimal digits; read once in the life of a process."""
    return digest(_here(), FORESIGHT if policy in _BASELINES else ())


@lru_cache(maxsize=1)
def _here() -> dict[str, str]:
    return meanings(Path(__file__).parents[1])


def meanings(package: Path) -> dict[str, str]:
    """Digest of each module of `ROOMS` in a folder, by its path below it."""
    found = {}
    for room in ROOMS:
        place = package / room
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            text = meaning(path.read_text(encoding="utf-8"))
            found[path.relative_to(package).as_posix()] = xxhash.xxh64_hexdigest(text.encode())
    return found


def digest(modules: Mapping[str, str], without: Sequence[str] = ()) -> str:
    """Of all modules by name and meaning, less those of some patterns."""
    parts = (f"{name} {of}\n" for name, of in modules.items() if not any(fnmatch(name, each) for each in without))
    return xxhash.xxh64_hexdigest("".join(parts).encode())


def meaning(source: str) -> str:
    """A module without what does nothing: comments, layout, and constants that stand alone."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            body[:] = [each for each in body if not _is_word(each)]
    return ast.dump(tree)


def _is_word(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
