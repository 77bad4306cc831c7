"""The documentation site: it builds without a warning, loads nothing from elsewhere, and has what the code has."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from docs.generate.pages import page_markdown, write_pages

from kvroute import __version__
from kvroute.cli.app import COMMANDS
from kvroute.gateway.openapi import document

ROOT = Path(__file__).resolve().parents[1]
_LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "link": "href"}


class _Loads(HTMLParser):
    """What a browser fetches when it shows a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address = dict(attrs).get(_LOADED.get(tag, ""))
        if address:
            self.addresses.append(address)


def _build(folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the pages in `folder/pages` as `make docs` does."""
    settings = folder / "mkdocs.yml"
    settings.write_text(f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: pages\nsite_dir: site\n")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(settings)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("docs")
    write_pages(folder / "pages")
    out = _build(folder)
    assert out.returncode == 0, out.stderr
    return folder / "site"


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    """Readers' addresses reach nobody but the server of the site; it can be read without the Internet."""
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        text = page.read_text()
        reader = _Loads()
        reader.feed(text)
        assert reader.addresses, page
        assert [address for address in reader.addresses if re.match(r"(https?:)?//", address)] == [], page
        assert 'class="mermaid"' not in text, "the theme fetches its program from elsewhere"
    for sheet in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)]*", sheet.read_text()) == [], sheet


def test_every_page_in_the_repository_is_in_the_site(site: Path) -> None:
    """Each Markdown file of docs/ and each example file."""
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix(".html")
        assert (site / (name.with_name("index.html") if name.name == "README.html" else name)).exists(), page
    for example in (ROOT / "examples").rglob("*.yaml"):
        assert (site / example.relative_to(ROOT)).exists(), example


def test_every_command_and_path_has_its_place(site: Path) -> None:
    """The generated pages hold what the code offers."""
    commands = (site / "cli.html").read_text()
    for name in COMMANDS:
        assert re.search(rf"<h2[^>]*><code>kvroute {name}</code>", commands), name
    paths = (site / "http-api.html").read_text()
    for path in document(__version__)["paths"]:
        assert f" {path}</code>" in paths, path
    assert "generate:" not in commands + paths


@pytest.mark.parametrize(
    "fault", ["[text](no-such-page.md)", "[text](install.md#no-such-heading)", "[text](../no/such/file.py)"]
)
def test_a_link_that_leads_nowhere_fails_the_build(fault: str, tmp_path: Path) -> None:
    """Warnings are errors."""
    write_pages(tmp_path / "pages")
    with (tmp_path / "pages" / "install.md").open("a") as page:
        page.write(f"\n{fault}\n")
    out = _build(tmp_path)
    assert out.returncode != 0
    assert "install.md" in out.stderr


def test_links_between_files_of_the_repository_become_links_between_pages() -> None:
    """From a page of docs/ to files elsewhere, from elsewhere to docs/, and no further."""
    there = page_markdown("[a](../bench/README.md#x) [b](../examples/small.yaml) [c](serve.md)", "docs/a.md", "a.md")
    assert there == "[a](measurements.md#x) [b](examples/small.yaml) [c](serve.md)"
    back = page_markdown("[a](../docs/serve.md) [b](https://a.example/b.md)", "bench/README.md", "measurements.md")
    assert back == "[a](serve.md) [b](https://a.example/b.md)"
    deep = page_markdown("[a](../cluster-file.md) [b](#here)", "docs/decisions/0001.md", "decisions/0001.md")
    assert deep == "[a](../cluster-file.md) [b](#here)"
    code = "```yaml\na: [b](../bench/README.md)\n```"
    assert page_markdown(code, "docs/a.md", "a.md") == code
