"""Everything that the documentation offers as a start runs: example clusters, example scenarios, the Python snippet."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from tests.commands import kvroute_command
from tests.examples import CLUSTERS, NETWORKS

from kvroute.control import ControlSpec
from kvroute.planner.placement.problem import Objective, read_placement
from kvroute.sim.run import simulate
from kvroute.sim.settings import SimSpec
from kvroute.sim.workload import generate
from kvroute.topology import load

ROOT = Path(__file__).resolve().parents[1]
SCENARIOS = sorted((ROOT / "examples").glob("flows-*.json"))


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_an_example_cluster_serves_requests(path: Path) -> None:
    """Thirty requests of a Mooncake-like trace all end; most are answered."""
    run = simulate(load(path), generate(30, seed=1), ControlSpec(), SimSpec())
    counts = run.summary.requests
    assert counts.arrived == counts.finished + counts.rejected == 30
    assert counts.finished >= 15


@pytest.mark.parametrize("path", NETWORKS, ids=lambda path: path.stem)
def test_an_example_network_is_read(path: Path) -> None:
    """A file without instances has free GPUs of every kind that it describes."""
    problem = read_placement(path, "opt-66b", Objective(4.0, 0.2))
    assert sum(len(kind.gpus) for kind in problem.kinds) == sum(node.gpus for node in problem.cluster.places.nodes)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_an_example_scenario_runs(path: Path) -> None:
    """The command prints one JSON document with a time for every flow."""
    command = kvroute_command("flows", str(path), "--json")
    out = subprocess.run(command, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    times = json.loads(out.stdout)["completion_times_s"]
    assert len(times) == len(json.loads(path.read_text())["flows"])
    assert all(time > 0 for time in times)


def test_the_readme_shows_a_complete_example() -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown == (ROOT / "examples" / "two-pods.yaml").read_text()


def test_examples_exist() -> None:
    """The globs above match files."""
    assert {path.stem for path in CLUSTERS} >= {"fat-tree-64gpu", "small", "superpod", "two-datacenters"}
    assert SCENARIOS


@pytest.mark.parametrize(("page", "prints"), [("simulate.md", "Spread("), ("collectives.md", "")])
def test_the_python_of_the_docs_page_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], page: str, prints: str
) -> None:
    """The snippets of the page run unchanged."""
    monkeypatch.chdir(ROOT)
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    assert snippets
    for snippet in snippets:
        exec(snippet, {})
    assert prints in capsys.readouterr().out


def test_links_between_pages_are_valid() -> None:
    """Every relative link of the README and the docs names an existing file."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").glob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
