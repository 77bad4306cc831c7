"""docs/structure.md: its map has each folder of the three packages, and it names only files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "kvroute_engine": ROOT / "engine/src/kvroute_engine",
    "kvroute": ROOT / "src/kvroute",
    "kvroute_studies": ROOT / "studies/src/kvroute_studies",
}
PAGE = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")


def folders(package: Path) -> set[str]:
    """Return the names of the packages in a package."""
    return {path.parent.name for path in package.glob("*/__init__.py")}


@pytest.mark.parametrize("name", ["kvroute_engine", "kvroute"])
def test_the_map_has_each_folder_once(name: str) -> None:
    part = PAGE.partition(f"### {name}\n")[2].partition("\n#")[0]
    listed = re.findall(r"^\| `([a-z_]+)/` \|", part, re.MULTILINE)
    assert sorted(listed) == sorted(folders(PACKAGES[name]))


def test_each_study_is_named() -> None:
    part = PAGE.partition("### kvroute_studies\n")[2].partition("\n#")[0]
    assert set(re.findall(r"`([a-z_]+)/`", part)) == folders(PACKAGES["kvroute_studies"])


def test_a_request_has_ten_stops() -> None:
    """They are numbered in order."""
    walk = PAGE.partition("## One request through ten stops")[2]
    assert [int(number) for number in re.findall(r"^(\d+)\. ", walk, re.MULTILINE)] == list(range(1, 11))


def test_every_file_and_folder_that_the_page_names_exists() -> None:
    """Paths are relative to the repository or to one of the packages, or to a folder of the map."""
    named = re.findall(r"`([\w./]+(?:/|\.(?:py|md|yml)))`", PAGE)
    assert len(named) > 80
    places = [ROOT, ROOT / "docs", *PACKAGES.values()]
    places += [folder.parent for package in PACKAGES.values() for folder in package.glob("*/__init__.py")]
    assert [name for name in named if not any((place / name).exists() for place in places)] == []
