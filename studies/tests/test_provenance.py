"""A digest changes with the behaviour of code and not with its text; foresight's own code does not affect other
policies."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvroute_studies.never_worse.verdicts import BASELINES, CLAIRVOYANT, VARIANTS
from kvroute_studies.shared.provenance import (
    FORESIGHT,
    MODULES,
    PACKAGES,
    PLACEMENT,
    code_of,
    digest,
    meaning,
    meanings,
)

MODULE = '''"""What it is."""

LIMIT = 3
"""Of something."""


def least(values):
    """The least."""
    # As it always was.
    return min(values, LIMIT)
'''


@given(st.text(st.characters(codec="ascii", categories=["L", "N", "Zs", "P"])))
def test_comments_and_docstrings_do_not_change_the_digest(text: str) -> None:
    """Comments, docstrings and empty lines have no effect; only statements and names count."""
    for old, new in (
        ("# As it always was.", f"# {text}"),
        ('"""The least."""', repr(text)),
        ("LIMIT = 3", "LIMIT=3"),
    ):
        assert meaning(MODULE.replace(old, new)) == meaning(MODULE)
    assert meaning(MODULE.replace('"""What it is."""', "")) == meaning(MODULE)


@pytest.mark.parametrize(
    ("old", "new"),
    [("= 3", "= 4"), ("min(", "max("), ("least(", "lowest("), ("return min", "min")],
    ids=["number", "call", "name", "statement"],
)
def test_code_changes_the_digest(old: str, new: str) -> None:
    """A string that is used counts too."""
    assert meaning(MODULE.replace(old, new)) != meaning(MODULE)
    assert meaning("a = 'b'") != meaning("a = 'c'")


NAMES = ("total", "place", "value", "priced", "file", "error", "each")
LOCALS = """
def first_above(values, weights=()):
    {0} = 0
    for {1}, {2} in enumerate(values):
        if ({3} := {2} * LIMIT) > {0}:
            {0} += {3} - {1}
    try:
        with open("weights") as {4}:
            {0} += len({4}.read())
    except OSError as {5}:
        raise KeyError({0}) from {5}
    return lambda key: [{6} + {0} for {6} in sorted(values, key=key)]
"""
TAKEN = {"values", "weights", "LIMIT", "enumerate", "open", "len", "OSError", "KeyError", "sorted"}


@given(st.tuples(*[st.sampled_from([*NAMES, *sorted(TAKEN), "key", "fresh", "another", "zz"])] * len(NAMES)))
@example(("another", "zz", "value", "priced", "file", "error", "values"))
@example(("key", "place", "value", "priced", "file", "error", "each"))
def test_a_rename_of_local_variables_keeps_the_digest(names: tuple[str, ...]) -> None:
    """A name that means something else in the function changes what the function does."""
    *of_function, of_comprehension = names
    same = (
        len(set(of_function)) == len(of_function)
        and not TAKEN.intersection(of_function)
        and names[0] not in ("key", of_comprehension)
    )
    assert (meaning(LOCALS.format(*names)) == meaning(LOCALS.format(*NAMES))) == same


SCOPES = """
class Store:
    size = 1

    def grow(self, by):
        import math
        more = math.ceil(by)

        def add():
            nonlocal count
            count += more
            return count

        count = 0
        least = [size for size in self.sizes if size > more]
        return add, least, {more: count}, self.grow(by=more), f"{count=}"
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("more", "further"),
        ("[size for size in self.sizes if size", "[one for one in self.sizes if one"),
        ("least", "x"),
    ],
    ids=["used in a nested function", "comprehension", "list"],
)
def test_a_rename_of_one_local_variable_keeps_the_digest(old: str, new: str) -> None:
    assert meaning(SCOPES.replace(old, new)) == meaning(SCOPES)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("size = 1", "length = 1"),
        ("grow", "extend"),
        ("(self, by)", "(self, more)"),
        ("by", "much"),
        ("by=", "much="),
        ("math", "cmath"),
        ("add", "plus"),
        ("count", "number"),
        ("sizes", "lengths"),
        ("size > more", "size > count"),
        ("{more: count}", "{count: more}"),
        ("least = ", "more = "),
        ("            nonlocal count\n", ""),
        ("size for size", "more for size"),
    ],
)
def test_what_is_no_rename_of_a_local_variable_changes_the_digest(old: str, new: str) -> None:
    """Attributes, parameters, imports, functions, shared variables, and other variables in the same place."""
    assert meaning(SCOPES.replace(old, new)) != meaning(SCOPES)


def test_shared_names_count() -> None:
    """Values of two global variables that are exchanged are no rename."""
    both = "def f():\n    global a, b\n    {0} = 1\n    {1} = 2"
    assert meaning(both.format("a", "b")) != meaning(both.format("b", "a"))


def test_names_that_code_can_see_count() -> None:
    one = "def f():\n    {0} = 1\n    return locals()"
    assert meaning(one.format("a")) != meaning(one.format("b"))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A copy of the counted modules with one line each; tests restore what they change."""
    copy = tmp_path_factory.mktemp("package")
    for name in meanings(PACKAGES):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text("A = 1\n", encoding="utf-8")
    return {name: copy / name for name in PACKAGES}


@pytest.mark.parametrize(
    ("changed", "matters_to_others"),
    [
        ("kvroute/policies/foresight/policy.py", False),
        ("kvroute/policies/foresight/pricing.py", False),
        ("kvroute/control/state/transfer_tracker.py", False),
        ("kvroute/policies/decode.py", True),
        ("kvroute/control/core.py", True),
        ("kvroute/sim/run.py", True),
        ("kvroute/flows/kernels.py", True),
        ("kvroute_studies/netkv/setup.py", True),
    ],
)
def test_a_change_affects_only_the_policies_that_use_the_module(
    package: dict[str, Path], changed: str, matters_to_others: bool
) -> None:
    """All code counts for foresight; for the others all except foresight's own."""
    before = meanings(package)
    (package["kvroute"].parent / changed).write_text("A = 2\n", encoding="utf-8")
    after = meanings(package)
    (package["kvroute"].parent / changed).write_text("A = 1\n", encoding="utf-8")
    assert digest(before) != digest(after)
    assert (digest(before, FORESIGHT) != digest(after, FORESIGHT)) == matters_to_others


def test_a_renamed_module_changes_the_digest(package: dict[str, Path]) -> None:
    """A renamed module changes the digest although its content is the same."""
    before = meanings(package)
    (package["kvroute"] / "sim/run.py").rename(package["kvroute"] / "sim/zzz.py")
    after = meanings(package)
    (package["kvroute"] / "sim/zzz.py").rename(package["kvroute"] / "sim/run.py")
    assert digest(after) != digest(before) == digest(meanings(package))


def test_baselines_share_one_digest_and_all_others_another() -> None:
    """All counted modules exist, also those that are left out for baselines: a moved module leaves no outdated name."""
    assert all((PACKAGES[name.partition("/")[0]].parent / name).exists() for name in MODULES)
    counted = meanings(PACKAGES)
    assert all(any(fnmatch(name, pattern) for name in counted) for pattern in (*FORESIGHT, *PLACEMENT))
    ours = {code_of(name) for name in (*VARIANTS, CLAIRVOYANT, "foresight-joint", "whatever an experiment calls it")}
    others = {code_of(name) for name in BASELINES}
    assert (len(ours), len(others), ours & others) == (1, 1, set())


def test_code_of_placements_counts_for_their_experiments_only(package: dict[str, Path]) -> None:
    before = meanings(package)
    (package["kvroute"] / "planner/placement/search.py").write_text("A = 2\n", encoding="utf-8")
    after = meanings(package)
    (package["kvroute"] / "planner/placement/search.py").write_text("A = 1\n", encoding="utf-8")
    assert digest(before) != digest(after)
    assert digest(before, PLACEMENT) == digest(after, PLACEMENT)
    assert code_of("heroserve") == code_of("retry-1ms") != code_of("netkv")
