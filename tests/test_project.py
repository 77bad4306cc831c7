"""The files around the code say what is there: make targets, workflow, hooks, citation, issue forms."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _targets() -> set[str]:
    """Every target of the Makefile that a person calls."""
    names = re.findall(r"^([a-z][a-z-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(names) == len(set(names))
    return set(names)


def test_make_help_explains_every_target_and_is_what_make_alone_does() -> None:
    """A target without a `##` text is missing in the list."""
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    listed = dict(re.findall(r"^  make ([a-z-]+) +(\S.*)$", shown, re.MULTILINE))
    assert set(listed) == _targets()
    assert subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout == shown


def test_every_target_is_phony() -> None:
    """A file of that name must not make `make` do nothing."""
    [phony] = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(phony.split()) == _targets()


def test_the_readme_and_the_docs_name_only_targets_that_exist() -> None:
    """`make test` in a page is a target of the Makefile."""
    pages = [ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md"), *ROOT.glob("CONTRIBUTING.md")]
    for page in pages:
        named = re.findall(r"(?:^    |`)make ([a-z][a-z-]*)\b", page.read_text(), re.MULTILINE)
        assert set(named) <= _targets(), page.name


def test_metadata_names_the_home_and_the_python_that_is_tested() -> None:
    """Where a package index sends people, and what it says that they need."""
    assert METADATA["urls"]["Homepage"] == "https://github.com/kvroute/kvroute"
    assert all(url.startswith(METADATA["urls"]["Homepage"]) for url in METADATA["urls"].values())
    lowest = METADATA["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {lowest}" in METADATA["classifiers"]
