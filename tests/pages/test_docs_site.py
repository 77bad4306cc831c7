"""The documentation site: it builds without a warning, loads nothing from other servers, and matches the code."""

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
from kvroute.planner.placement.schema import PlacementEntry
from kvroute.planner.qos.schema import QosEntry
from kvroute.serve.api.openapi import document
from kvroute.serve.config.settings import GatewaySettings
from kvroute.topology.json_schema import cluster_json_schema

ROOT = Path(__file__).resolve().parents[2]
_LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "link": "href"}


class _Loads(HTMLParser):
    """Collects the addresses that a browser loads when it shows a page."""

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
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("docs")
    write_pages(folder / "pages")
    out = _build(folder)
    assert out.returncode == 0, out.stderr
    return folder / "site"


@pytest.mark.slow
def test_no_page_loads_external_assets(site: Path) -> None:
    """No other server receives the readers' addresses, and the site can be read without the Internet."""
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


@pytest.mark.slow
def test_every_page_in_the_repository_is_in_the_site(site: Path) -> None:
    """The site has each Markdown file of docs/ and each example file."""
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix(".html")
        assert (site / (name.with_name("index.html") if name.name == "README.html" else name)).exists(), page
    for example in (ROOT / "examples").rglob("*.yaml"):
        assert (site / example.relative_to(ROOT)).exists(), example


@pytest.mark.slow
def test_every_command_and_api_path_is_documented(site: Path) -> None:
    """The generated pages contain every command and every path of the API."""
    commands = (site / "cli.html").read_text()
    for name in COMMANDS:
        assert re.search(rf"<h2[^>]*><code>kvroute {name}</code>", commands), name
    summaries = re.findall(r'<li><a href="#[^"]+"><code>kvroute [^<]+</code></a>: (.+)', commands)
    assert len(summaries) >= len(COMMANDS)
    assert [summary for summary in summaries if not summary.removesuffix("</li>").endswith(".")] == []
    paths = (site / "http-api.html").read_text()
    for path in document(__version__)["paths"]:
        assert f" {path}</code>" in paths, path
    assert "generate:" not in commands + paths


@pytest.mark.slow
def test_every_key_of_a_cluster_file_has_a_row(site: Path) -> None:
    """Each mapping of the schema is a section with its keys."""
    schema = cluster_json_schema({"qos": QosEntry, "placement": PlacementEntry, "gateway": GatewaySettings})
    page = (site / "cluster-fields.html").read_text()
    sections = dict(re.findall(r'<h2 id="(?:mapping-)?([\w-]+)">(.*?)(?=<h2|</article>)', page, re.DOTALL))
    assert len(sections) == len(schema["$defs"]) + 1
    for name, mapping in [("top-level", schema), *schema["$defs"].items()]:
        rows = re.findall(r"<tr>\s*<td><code>(\w+)</code>", sections[name.lower()])
        assert rows == list(mapping["properties"]), name


@pytest.mark.slow
def test_broken_links_fail_the_build(tmp_path: Path) -> None:
    """Warnings are errors, and each names its page."""
    write_pages(tmp_path / "pages")
    with (tmp_path / "pages" / "install.md").open("a") as page:
        page.write("\n[1](no-such-page.md) [2](install.md#no-such-heading) [3](../no/such/file.py)\n")
    out = _build(tmp_path)
    assert out.returncode != 0
    warned = [line for line in out.stderr.splitlines() if line.startswith("WARNING") and "install.md" in line]
    for target in ("no-such-page.md", "no-such-heading", "no/such/file.py"):
        assert [line for line in warned if target in line], out.stderr


def test_links_between_repository_files_become_links_between_pages() -> None:
    """Links from docs/ to other files and the reverse are converted; other links are unchanged."""
    there = page_markdown("[a](../bench/README.md#x) [b](../examples/small.yaml) [c](serve.md)", "docs/a.md", "a.md")
    assert there == "[a](measurements.md#x) [b](examples/small.yaml) [c](serve.md)"
    back = page_markdown("[a](../docs/serve.md) [b](https://a.example/b.md)", "bench/README.md", "measurements.md")
    assert back == "[a](serve.md) [b](https://a.example/b.md)"
    deep = page_markdown("[a](../cluster-file.md) [b](#here)", "docs/decisions/0001.md", "decisions/0001.md")
    assert deep == "[a](../cluster-file.md) [b](#here)"
    code = "```yaml\na: [b](../bench/README.md)\n```"
    assert page_markdown(code, "docs/a.md", "a.md") == code


def test_the_glossary_is_in_alphabetical_order() -> None:
    """Each row has a cell for each system."""
    rows = [line for line in (ROOT / "docs" / "glossary.md").read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    terms = [re.sub(r"[^a-z ]", "", row[0].lower()) for row in cells[1:]]
    assert len(terms) > 40
    assert terms == sorted(terms)
    assert {len(row) for row in cells} == {6}
    assert all(all(row) for row in cells)


def test_every_rfc_that_the_code_names_is_in_the_references() -> None:
    """The docstrings and pages name them."""
    listed = (ROOT / "docs" / "references.md").read_text()
    code = [path for folder in ("src", "engine/src", "studies/src") for path in (ROOT / folder).rglob("*.py")]
    sources = [*code, *(ROOT / "docs").rglob("*.md")]
    named = {number for path in sources for number in re.findall(r"RFC (\d{3,5})", path.read_text())}
    assert len(named) > 5
    assert [number for number in sorted(named) if f"[RFC {number}]" not in listed] == []
