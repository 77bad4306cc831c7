"""All source pages of the site in one folder, with the links between files of the repository pointing inside it."""

from __future__ import annotations

import posixpath
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from docs.generate.cli_page import cli_markdown
from docs.generate.fields_page import fields_markdown, schema_text
from docs.generate.http_page import http_markdown, openapi_text
from docs.generate.results import all_results, with_dates

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
    "bench/README.md": "measurements.md",
    "tests/fuzz/README.md": "fuzzing.md",
    "tests/kube/apiserver/README.md": "kubernetes-tests.md",
}
"""Pages outside docs/: file of the repository to page of the site."""
PLACES = PAGES | {"README.md": "index.md", "examples": "examples.md"}
"""What links lead to outside docs/: file or folder of the repository to page of the site."""
FRAGMENTS: dict[str, Callable[[], str]] = {
    "cli": cli_markdown,
    "cluster-fields": fields_markdown,
    "http-api": http_markdown,
}
"""What replaces the line `<!-- generate: NAME -->` of a page."""
_MARK = re.compile(r"^<!-- generate: ([\w-]+) -->$", re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()([^)#\s]+)(?=[)#])")
_CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def write_pages(folder: Path) -> None:
    """Replace the content of `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    ignored = shutil.ignore_patterns("generate", "__pycache__")
    shutil.copytree(ROOT / "docs", folder, ignore=ignored)
    shutil.copytree(ROOT / "examples", folder / "examples")
    sources = [(f"docs/{page.relative_to(folder)}", page) for page in sorted(folder.rglob("*.md"))]
    sources += [(source, folder / target) for source, target in PAGES.items()]
    results = all_results()
    for source, page in sources:
        text = with_dates((ROOT / source).read_text(encoding="utf-8"), results)
        page.write_text(page_markdown(text, source, page.relative_to(folder).as_posix()), encoding="utf-8")
    (folder / "examples.md").write_text(examples_markdown(), encoding="utf-8")
    (folder / "cluster.schema.json").write_text(schema_text(), encoding="utf-8")
    (folder / "openapi.json").write_text(openapi_text(), encoding="utf-8")


def page_markdown(text: str, source: str, target: str) -> str:
    """The text of file `source` of the repository, as page `target` of the site."""
    filled = _MARK.sub(lambda match: FRAGMENTS[match[1]](), text)
    prose_and_code = _CODE.split(filled)
    prose_and_code[::2] = [_LINK.sub(lambda m: _link(m[1], source, target), prose) for prose in prose_and_code[::2]]
    return "".join(prose_and_code)


def _link(link: str, source: str, target: str) -> str:
    """A link of file `source` as page `target` has it; one that leads nowhere stays, and fails the build."""
    if ":" in link:
        return link
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if path in PLACES:
        path = PLACES[path]
    elif path.startswith("docs/"):
        path = path.removeprefix("docs/")
    elif not path.startswith("examples/"):
        return link
    return posixpath.relpath(path, posixpath.dirname(target) or ".")


def examples_markdown() -> str:
    """A page that lists the example files, each with the comment that it begins with."""
    lines = ["# Example files", "", "Copy one and change what differs. Tests load every one of them.", ""]
    lines += [f"- [{path}]({path}){_purpose(ROOT / path)}" for path in _examples()]
    return "\n".join(lines) + "\n"


def _examples() -> Iterator[str]:
    for path in sorted((ROOT / "examples").rglob("*")):
        if path.is_file():
            yield path.relative_to(ROOT).as_posix()


def _purpose(path: Path) -> str:
    comments = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comments.append(line.lstrip("# "))
    return f": {' '.join(comments)}" if comments else ""
