"""docs/structure.md: it names each module of the gateway once, and only files that exist."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src" / "kvroute"
PAGE = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
WALK = PAGE.partition("### One request, file by file")[2].partition("In the core,")[0]


def test_the_walk_names_each_module_of_the_gateway_once() -> None:
    """A new module needs a place in the walk; a module that is named twice has two jobs, or the walk goes back."""
    gateway = SOURCES / "gateway"
    modules = {str(path.relative_to(gateway)) for path in gateway.rglob("*.py") if path.name != "__init__.py"}
    named = Counter(name for name in re.findall(r"`([\w/]+\.py)`", WALK) if not name.startswith("control/"))
    assert modules - set(named) == set(), "not in the walk"
    assert {name for name, times in named.items() if times > 1} == set(), "more than once in the walk"
    assert set(named) - modules == set(), "in the walk, but not in src/kvroute/gateway"


def test_every_file_and_folder_that_the_page_names_exists() -> None:
    """Paths are relative to the repository, the package, or the package of the gateway."""
    named = re.findall(r"`([\w./]+(?:/|\.(?:py|md|yml)))`", PAGE)
    assert len(named) > 100
    places = (ROOT, SOURCES, SOURCES / "gateway", ROOT / "docs")
    assert [name for name in named if not any((place / name).exists() for place in places)] == []
