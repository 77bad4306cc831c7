"""docs/development.md: every file that it names exists, and has the names that the page gives for it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "development.md").read_text(encoding="utf-8")


def test_every_answer_names_code_that_exists() -> None:
    """`package/file.py`: `name`, `name` are in src/kvroute, and each name is a word of that file."""
    answers = re.findall(r"`([\w/]+\.py)`:\s+(`\w+`(?:, `\w+`)*)", PAGE)
    assert len(answers) > 15
    for path, names in answers:
        source = (ROOT / "src" / "kvroute" / path).read_text(encoding="utf-8")
        for name in re.findall(r"\w+", names):
            assert re.search(rf"^(?: {{4}})?(?:def|class) {name}\b|^{name}\b.* =", source, re.MULTILINE), (path, name)


def test_every_test_that_it_names_exists() -> None:
    """Files and folders below tests/."""
    named = re.findall(r"`(tests/[\w/.]+)`", PAGE)
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_there_are_ten_tasks_in_order() -> None:
    """Measurements of readers refer to the numbers."""
    assert [int(number) for number in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)] == list(range(1, 11))
