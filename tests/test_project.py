"""Project files match each other: make targets, workflow, hooks, citation, issue forms."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml

from kvroute import __version__

ROOT = Path(__file__).resolve().parents[1]
METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _targets() -> set[str]:
    """Return every target of the Makefile for direct use."""
    names = re.findall(r"^([a-z][a-z-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(names) == len(set(names))
    return set(names)


def test_make_help_explains_every_target_and_is_the_default() -> None:
    """A target without a `##` text is missing from the list."""
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    listed = dict(re.findall(r"^  make ([a-z-]+) +(\S.*)$", shown, re.MULTILINE))
    assert set(listed) == _targets()
    assert subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout == shown


def test_every_target_is_phony() -> None:
    """A file of the same name must not disable a target."""
    [phony] = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(phony.split()) == _targets()


def test_the_readme_and_the_docs_name_only_targets_that_exist() -> None:
    """Each `make NAME` in a page is a target of the Makefile."""
    pages = [ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md"), *ROOT.glob("CONTRIBUTING.md")]
    for page in pages:
        named = re.findall(r"(?:^    |`)make ([a-z][a-z-]*)\b", page.read_text(), re.MULTILINE)
        assert set(named) <= _targets(), page.name


def test_metadata_names_the_repository_and_the_tested_python_version() -> None:
    """The links of the package index, and the Python version that it requires."""
    assert METADATA["urls"]["Homepage"] == "https://github.com/kvroute/kvroute"
    assert all(url.startswith(METADATA["urls"]["Homepage"]) for url in METADATA["urls"].values())
    lowest = METADATA["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {lowest}" in METADATA["classifiers"]


def test_the_workflow_runs_the_ci_script_with_least_privilege() -> None:
    """The workflow calls the script, may only read the repository, and pins each action."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert "cancel-in-progress" in workflow["concurrency"]
    [job] = workflow["jobs"].values()
    scripts = [step["run"] for step in job["steps"] if "run" in step]
    assert scripts[-1] == ".ci/run"
    assert os.access(ROOT / ".ci/run", os.X_OK)
    actions = [step["uses"] for step in job["steps"] if "uses" in step]
    assert actions
    assert all(re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", action) for action in actions)
    assert job["timeout-minutes"]


def test_ci_run_calls_only_targets_and_files_that_exist() -> None:
    """The workflow runs all of these through the script."""
    script = (ROOT / ".ci/run").read_text()
    lists = re.findall(r"\bmake ([a-z ]+)|^for target in ([a-z -]+);", re.sub(r"#.*", "", script), re.MULTILINE)
    named = {target for targets in lists for target in " ".join(targets).split()}
    assert {"test", "test-slow", "lint", "types", "layers", "live"} <= named <= _targets()
    assert all((ROOT / file).exists() for file in re.findall(r"python3 (\S+\.py)", script))


def test_every_hook_runs_an_installed_tool() -> None:
    """`language: system` fetches nothing. This environment has the program of each entry."""
    [repository] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    hooks = repository["hooks"]
    assert {hook["language"] for hook in hooks} == {"system"}
    programs = [Path(hook["entry"].split()[0]) for hook in hooks]
    assert {program.parent for program in programs} == {Path(".venv/bin")}
    assert all(Path(sys.executable).with_name(program.name).exists() for program in programs)


def test_version_is_the_same_everywhere() -> None:
    """In the package, in its metadata, and in the top section of the change log, which has the date or `unreleased`."""
    [top, *_] = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert re.fullmatch(rf"{re.escape(METADATA['version'])} \((unreleased|\d{{4}}-\d{{2}}-\d{{2}})\)", top)
    assert __version__ == METADATA["version"]


def test_change_log_has_each_section_and_each_line_once() -> None:
    """The order of the sections is that of Keep a Changelog, and Renamed follows Changed."""
    for version in re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]:
        sections = re.findall(r"^### (.*)$", version, re.MULTILINE)
        assert sections == [name for name in ("Added", "Changed", "Renamed", "Fixed") if name in sections]
        entries = [" ".join(entry.split()) for entry in re.findall(r"^- (.*(?:\n  .*)*)", version, re.MULTILINE)]
        assert len(entries) > 10
        assert len(entries) == len(set(entries))


def test_the_citation_names_this_version() -> None:
    """The other fields of the citation match those of the package."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == METADATA["version"]
    assert citation["license"] == METADATA["license"]
    assert citation["repository-code"] == METADATA["urls"]["Source"]
    assert [author["name"] for author in citation["authors"]] == [
        maintainer["name"] for maintainer in METADATA["maintainers"]
    ]


def test_paths_and_links_of_the_pages_for_contributors_exist() -> None:
    """Checked are paths in backquotes and relative links in the top-level pages and in the pull-request template."""
    for page in ("CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md", ".github/PULL_REQUEST_TEMPLATE.md"):
        text = (ROOT / page).read_text()
        named = re.findall(r"`((?:src|tests|docs|bench|deploy|\.github|\.ci|examples)/[^`\s]*)`", text)
        linked = [link for link in re.findall(r"\]\(([^)#\s]+)\)", text) if "://" not in link]
        assert [path for path in named + linked if not (ROOT / path).exists()] == [], page


def test_issue_forms_have_fields_with_distinct_names_and_parts_that_exist() -> None:
    """GitHub does not show a form with two fields of the same ID."""
    for form in ("bug.yml", "feature.yml"):
        fields = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE" / form).read_text())["body"]
        names = [field["id"] for field in fields if field["type"] != "markdown"]
        assert names
        assert len(names) == len(set(names))
        assert any(field.get("validations", {}).get("required") for field in fields)


def _imported(folder: Path, own: str) -> dict[str, Path]:
    """Return the top-level name of each import of a package from outside, with a module that has it."""
    found: dict[str, Path] = {}
    for path in sorted((folder / "src" / own).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                names = [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            for name in names:
                found.setdefault(name.partition(".")[0], path)
    return {name: path for name, path in found.items() if name not in {*sys.stdlib_module_names, own}}


def _named(groups: Iterable[list[str]]) -> set[str]:
    return {re.split(r"[<>=\[ ;~]", line, maxsplit=1)[0].lower() for group in groups for line in group}


@pytest.mark.parametrize(
    ("folder", "own", "least"),
    [("engine", "kvroute_engine", 10), (".", "kvroute", 20), ("studies", "kvroute_studies", 5)],
)
def test_every_imported_package_is_declared(folder: str, own: str, least: int) -> None:
    """A package that only another one brings along can disappear with that one's next version. Packages that this
    environment lacks are those of vLLM and of extras without tests here; they count by their own name."""
    metadata = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    declared = _named([metadata["dependencies"], *metadata["optional-dependencies"].values()])
    engine = tomllib.loads((ROOT / "engine/pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in (line for lines in metadata["optional-dependencies"].values() for line in lines):
        if match := re.fullmatch(r"kvroute-engine\[(\w+)\]", extra):
            declared |= _named([engine[match[1]]])
    distributions = packages_distributions()
    imported = _imported(ROOT / folder, own)
    assert len(imported) >= least
    for name, path in imported.items():
        names = {distribution.lower().replace("_", "-") for distribution in distributions.get(name, [name])}
        assert names & (declared | _BESIDE_AN_ENGINE), f"{path.relative_to(ROOT)} imports {name}"


def test_the_members_of_the_workspace_have_one_version() -> None:
    for folder in ("engine", "studies"):
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        assert project["version"] == METADATA["version"]
        assert (ROOT / folder / project["readme"]).read_text().startswith("# ")


_BESIDE_AN_ENGINE = {"nixl", "torch", "uvloop", "vllm"}
"""Packages of the engine's environment, in which the connector runs."""
