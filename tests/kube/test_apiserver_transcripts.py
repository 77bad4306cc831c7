"""The API server of the tests against the recorded answers of a real one: which cases match, and which do not."""

from __future__ import annotations

import asyncio
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tests.kube.replay import Replay
from tests.kube.scenario import Scenario
from tests.kube.scenarios.all import SCENARIOS
from tests.kube.transcripts import FOLDER, Bindings, Mismatch, files, read

HERE = Path(__file__).resolve().parent
COVERAGE = HERE / "apiserver" / "coverage.toml"
README = HERE / "apiserver" / "README.md"
NAMES = tuple(tomllib.loads(COVERAGE.read_text(encoding="utf-8")))
LONG = ("08-watch",)
"""Files with waits of seconds."""
recorded = pytest.mark.skipif(
    not FOLDER.exists() and not os.environ.get("KVROUTE_REQUIRE_LIVE"), reason="the transcripts are not here"
)


def groups(name: str) -> Mapping[str, Sequence[str]]:
    """Return the cases of a file that are not covered, by reason."""
    found: Mapping[str, Sequence[str]] = tomllib.loads(COVERAGE.read_text(encoding="utf-8"))[name]
    return found


def listed(name: str) -> set[str]:
    """Return the cases of a file that the replay does not cover."""
    return {f"{name}/{case}" for cases in groups(name).values() for case in cases}


async def differences(name: str) -> dict[str, str]:
    """Replay a file; return how the answers differ, by case."""
    replay = Replay(SCENARIOS.get(name, Scenario()))
    await replay.start()
    found: dict[str, str] = {}
    try:
        for case in read(name):
            await replay.prepare(case)
            try:
                if case.request is not None:
                    await replay.run(case)
                elif not await replay.observe(case):
                    found[case.name] = "no observation"
            except Mismatch as mismatch:
                found[case.name] = str(mismatch)
    finally:
        await replay.stop()
    return found


@recorded
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in NAMES]
)
def test_recorded_requests_get_the_recorded_answers(name: str) -> None:
    """Every case matches, but those that coverage.toml lists; and those do not match, so that the list stays true."""
    found = asyncio.run(differences(name))
    unexpected = {case: text[:1500] for case, text in found.items() if case not in listed(name)}
    assert unexpected == {}
    assert listed(name) - found.keys() == set(), "listed as uncovered, but the answers match"


@recorded
def test_coverage_lists_recorded_cases_once() -> None:
    """Each file is in the list, and each listed case exists."""
    assert set(NAMES) == set(files())
    for name in NAMES:
        cases = [case for found in groups(name).values() for case in found]
        assert len(cases) == len(set(cases)), f"listed twice in {name}"
        names = {case.name for case in read(name)}
        assert listed(name) <= names


@recorded
def test_the_table_of_the_readme_is_the_list() -> None:
    """The README's numbers of cases and of covered cases follow from coverage.toml."""
    rows = re.findall(r"^\| (\d\d-\w+|all) \| (\d+) \| (\d+) \|$", README.read_text(encoding="utf-8"), re.MULTILINE)
    counts = [(name, len(read(name)), len(read(name)) - len(listed(name))) for name in files()]
    counts.append(("all", sum(cases for _, cases, _ in counts), sum(equal for _, _, equal in counts)))
    wanted = [(name, str(cases), str(equal)) for name, cases, equal in counts]
    assert rows == wanted


def test_equal_placeholders_are_equal_values_and_others_are_not() -> None:
    """A number stands for one value, and a value has one number; anything else is a mismatch."""
    bindings = Bindings()
    bindings.compare({"a": "<rv1>", "b": "<rv1>", "c": "x<rv2>"}, {"a": "7", "b": "7", "c": "x8"})
    with pytest.raises(Mismatch, match="instead of"):
        bindings.compare("<rv1>", "9")
    with pytest.raises(Mismatch, match="are both 7"):
        bindings.compare("<rv3>", "7")


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"a": 1}, {"a": 1, "b": 2}), ({"a": 1, "b": 2}, {"a": 1}), ([1, 2], [2, 1]), ([1], [1, 2]), (1, True),
        ("a", None), ("<time>", "yesterday"), ("<2 omitted>", [{}]), (None, ""), ({"a": None}, {}),
    ],
)  # fmt: skip
def test_the_comparison_forgives_nothing(wanted: object, found: object) -> None:
    """Fields that are too many or too few, another order, another type or another form are mismatches."""
    with pytest.raises(Mismatch):
        Bindings().compare(wanted, found)
