"""Names in the code: public classes have names of their own, and names that were given up do not come back."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from kvroute_engine import renamed

ROOT = Path(__file__).resolve().parents[1]
# fmt: off
GIVEN_UP = frozenset((
    "_mourn", "acquitted", "_acquitted", "blame", "_weigh", "_broke", "Begins", "Elsewhere", "Nowhere",
    "turn_away", "pump", "strands_kv", "_torn", "_NOBODY", "Entitlement", "_hopeless", "_met", "_go",
    "_stay", "_leaves_early", "joint", "_joint", "bar_others", "rehearse", "specimen", "Sight", "sight",
    "played", "_played", "_excerpt", "crowd", "_crowd", "set_off", "_hold_out", "give_back", "Way", "ways",
    "honest", "ladder", "Question", "octets", "write_octets", "doubts", "alone_share", "serves_alone",
))
# fmt: on
"""Identifiers that said nothing to a new reader, or that had several meanings."""
ATTRIBUTES_GIVEN_UP = frozenset({"alone", "word", "final", "numbers", "stays"})
"""Words that are good names of a local variable, but not of a field of the modules that had them."""
FIELDS_OF = frozenset(
    {"admission_queue", "decode_leg", "decisions", "foresight_pricing", "foresight_spec", "pairing", "tenancy"}
)
PAGES = ("README.md", "docs/**/*.md", "bench/README.md")


@cache
def sources() -> tuple[Path, ...]:
    """Return the modules of the packages; generated ones have names of their own format."""
    found = [*ROOT.glob("src/**/*.py"), *ROOT.glob("*/src/**/*.py")]
    return tuple(sorted(file for file in found if not file.name.endswith("_pb2.py")))


@cache
def checks() -> tuple[Path, ...]:
    """Return the modules of tests and measurements."""
    return tuple(sorted(file for part in ("tests", "*/tests", "bench") for file in ROOT.glob(f"{part}/**/*.py")))


_BINDS = re.compile(r"\b(?:for\s[\s\w,()*]*?\b(?:each|one)\b[\s\w,()*]*?\sin\s|lambda\b[^:\n]*\b(?:each|one)\b)")
"""What a module has that binds one of the two names; its comments may have it, too."""


def classes(file: Path) -> list[tuple[str, int]]:
    """Return name and line of each class of a module."""
    lines = enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
    return [(match[1], line) for line, text in lines if (match := re.match(r"\s*class (\w+)[(:]", text))]


def bases(file: Path, name: str) -> set[str]:
    """Return the bases of a class of a module."""
    nodes = ast.walk(ast.parse(file.read_bytes()))
    (found,) = (node for node in nodes if isinstance(node, ast.ClassDef) and node.name == name)
    return {ast.unparse(base) for base in found.bases}


def loop_variables(file: Path) -> Iterator[tuple[str, int]]:
    """Yield name and line of each name that loops, comprehensions and lambdas of a module bind."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            yield from ((name.id, name.lineno) for name in ast.walk(node.target) if isinstance(name, ast.Name))
        elif isinstance(node, ast.Lambda):
            yield from ((name.arg, name.lineno) for name in node.args.args)


def test_public_class_names_are_unique() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for file in sources():
        for name, line in classes(file):
            if not name.startswith("_"):
                places[name].append(f"{file.relative_to(ROOT)}:{line}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_settings_are_what_users_write_into_files() -> None:
    """They are Structs, which report faults by line; configuration that code makes ends in `Spec`."""
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in sources()
        for name, line in classes(file)
        if name.endswith("Settings") and not bases(file, name) & {"Entry", "msgspec.Struct"}
    ]
    assert wrong == []


def identifiers(file: Path) -> Iterator[tuple[str, int, str]]:
    """Yield name, line and the token before it, without the module paths of imports."""
    before, in_path = "", False
    for token in tokenize.tokenize(io.BytesIO(file.read_bytes()).readline):
        if token.type == tokenize.NAME:
            in_path = token.string == "from" or (in_path and token.string != "import")
            if not in_path:
                yield token.string, token.start[0], before
        elif token.type in (tokenize.NEWLINE, tokenize.COMMENT):
            in_path = False
        before = token.string


def test_no_identifier_has_a_name_that_was_given_up() -> None:
    words = re.compile(rf"\b({'|'.join(sorted(GIVEN_UP))})\b")
    found = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in (*sources(), *ROOT.glob("bench/**/*.py"), *ROOT.glob("tests/**/*.py"))
        if file.stem in FIELDS_OF or words.search(file.read_text(encoding="utf-8"))
        for name, line, before in identifiers(file)
        if name in GIVEN_UP or (name in ATTRIBUTES_GIVEN_UP and before in (".", "def") and file.stem in FIELDS_OF)
    ]
    assert found == []


def test_loop_variables_are_named_for_what_they_hold() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in (*sources(), *checks())
        if _BINDS.search(file.read_text(encoding="utf-8"))
        for name, line in loop_variables(file)
        if name in ("each", "one")
    ]
    assert found == []


def test_only_the_table_of_renamed_keys_has_the_old_ones() -> None:
    """The packages have none as a literal, and the pages none in code, but where they say that one is deprecated."""
    old = {path[-1] for table in (renamed.CLUSTER_FILE, renamed.LOG_HEADER, renamed.LOG_RECORD) for path in table}
    old |= set(renamed.EXPERIMENTS) | set(renamed.REPLICATION_STATES)
    literal = re.compile(rf"""(["'])({"|".join(sorted(old))})\1""")
    found = [
        f"{file.relative_to(ROOT)}: {match[0]}"
        for file in sources()
        if file.name != "renamed.py"
        for match in literal.finditer(file.read_text(encoding="utf-8"))
    ]
    key = re.compile(rf"(?<![\w-])({'|'.join(sorted(old))})(?=$|: [0-9]|\"\}}| %)")
    for page in (page for pattern in PAGES for page in ROOT.glob(pattern)):
        for line in page.read_text(encoding="utf-8").splitlines():
            spans = line.split("`")[1::2] if "eprecated" not in line else []
            found += [f"{page.relative_to(ROOT)}: `{span}`" for span in spans if key.search(span)]
    assert found == []
