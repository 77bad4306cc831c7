"""`kvroute simulate --scenario`: the form of the file, its effect on a run, and its error messages."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import EXAMPLES
from typer.testing import CliRunner

from kvroute.cli.app import app
from kvroute.cli.simulate.scenario import read_scenario
from kvroute.control import ControlSpec
from kvroute.planner.comparison.question import ComparisonSpec
from kvroute.planner.comparison.requests import Workload
from kvroute.sim.settings import CapacityChange, Fluctuation, SimSpec
from kvroute.topology import load
from kvroute.types import InputError, InputErrors

runner = CliRunner()
SITES = str(EXAMPLES / "two-datacenters.yaml")


def of(tmp_path: Path, text: str) -> Path:
    """Write a scenario file with this text."""
    path = tmp_path / "scenario.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    scenario = read_scenario(of(tmp_path, "{}"))
    assert scenario.settings(SimSpec()) == SimSpec()
    assert scenario.offload_spec() is None
    assert scenario.copy_spec() is None
    assert not scenario.prefix_pool


@given(
    st.lists(st.tuples(st.integers(0, 10_000), st.floats(0, 1)), max_size=5), st.sampled_from(["serial", "layerwise"])
)
def test_every_setting_of_the_file_is_simulated(changes: list[tuple[int, float]], transfer: str) -> None:
    entries = [f"  - {{at: {at_s} s, link: wan, share: {share:.9f}}}" for at_s, share in changes]
    text = "\n".join([f"transfer: {transfer}", "changes:" + ("" if entries else " []"), *entries])
    with tempfile.TemporaryDirectory() as folder:
        settings = read_scenario(of(Path(folder), text)).settings(SimSpec())
    assert settings.transfer == transfer
    assert [(change.at_s, change.share) for change in settings.changes] == [
        (at_s, round(change, 9)) for at_s, change in changes
    ]


def test_the_offload_example_loses_no_request(tmp_path: Path) -> None:
    """In a run with a cut every request ends once; long prompts are offloaded, and the log replays."""
    log = tmp_path / "run.log"
    arguments = ["--requests", "300", "--rate", "1.5", "--seeds", "1", "--policy", "netkv", "--json", "--log", str(log)]
    scenario = str(EXAMPLES / "scenarios" / "wan-cut.yaml")
    out = runner.invoke(app, ["simulate", SITES, "--scenario", scenario, *arguments])
    assert out.exit_code == 0, out.output
    (run,) = json.loads(out.stdout)["runs"]
    counts = run["requests"]
    assert counts["arrived"] == counts["finished"] + counts["rejected"] == 300
    assert run["tier_share"]["4"] > 0
    again = runner.invoke(app, ["replay", str(log)])
    assert "bit for bit" in again.stdout


def test_the_prefix_copy_example_loses_no_request(tmp_path: Path) -> None:
    """The log shows which instance fetched which prefix, and it replays."""
    log = tmp_path / "run.log"
    arguments = ["--requests", "300", "--rate", "2", "--seeds", "1", "--policy", "netkv", "--json", "--log", str(log)]
    arguments += ["--prefill-policy", "cache-aware"]
    scenario = str(EXAMPLES / "scenarios" / "hot-prefixes.yaml")
    out = runner.invoke(app, ["simulate", SITES, "--scenario", scenario, *arguments])
    assert out.exit_code == 0, out.output
    (run,) = json.loads(out.stdout)["runs"]
    assert run["requests"]["finished"] == 300
    assert run["copied_prefixes"]["transfers"] > 0
    assert '"copy_id"' in log.read_text()
    again = runner.invoke(app, ["replay", str(log)])
    assert "bit for bit" in again.stdout
    waited = next(line for line in log.read_text().splitlines() if '"copy_from"' in line)
    request = str(json.loads(waited)["event"]["request"]["id"])
    explained = runner.invoke(app, ["explain", str(log), request])
    assert " cached tokens from " in explained.stdout


def test_copies_are_reviewed_at_the_shorter_interval(tmp_path: Path) -> None:
    """With an offload section too, the review interval is the shorter of both."""
    alone = read_scenario(of(tmp_path, "copies: {review: 7 s, budget: 2 s, reads_min: 5, across: false}"))
    spec = alone.copy_spec()
    assert spec is not None
    assert (spec.review_s, spec.budget_s, spec.hotspots.reads_min, spec.across) == (7.0, 2.0, 5, False)
    assert alone.settings(SimSpec()).review_s == 7.0
    both = read_scenario(of(tmp_path, "copies: {review: 7 s}\noffload: {check_interval: 3 s}"))
    assert both.settings(SimSpec()).review_s == 3.0


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("foo: 1", ":1: foo: the key 'foo' is unknown; known: changes"),
        ("changes:\n  - {at: 3, link: wan, share: 0}", ":2: changes[0].at: 3 is not a duration"),
        ("changes:\n  - {at: 3 s, link: wan, share: 1.5}", ":2: changes[0].share"),
        ("offload: {threshold: -4}", "offload.threshold"),
        ("offload: {short_term: {utilisation_low: 0.9, utilisation_high: 0.5}}", "leave no gap between them"),
        ("wan: {loss: 1}", "wan.loss is 1"),
        ("copies: {review: 0 s}", "copies.review_s: 0.0 s; give finite seconds above 0"),
        ("copies: {factor: 1}", ":1: copies.factor"),
        ("- 1", "begin with `changes:`"),
    ],
)
def test_the_error_for_an_invalid_file_names_its_field(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        read_scenario(of(tmp_path, text))
    assert sentence in str(caught.value)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_scenario(tmp_path / "nothing.yaml")


def test_an_unknown_link_is_named_before_any_file_is_written(tmp_path: Path) -> None:
    """Each unknown link is named with its line; an older log is not overwritten and no folder is created."""
    text = (
        "changes:\n  - {at: 3 s, link: wan, share: 0}\n  - {at: 4 s, link: wn, share: 1}\n"
        "fluctuations:\n  - {link: wann, every: 2 s, share_min: 0.5}\n"
    )
    scenario, log, out = of(tmp_path, text), tmp_path / "run.log", tmp_path / "out"
    line = [
        "simulate",
        SITES,
        "--policy",
        "netkv",
        "--seeds",
        "1",
        "--workers",
        "1",
        "--requests",
        "5",
        "--log",
        str(log),
    ]
    assert runner.invoke(app, line).exit_code == 0
    before = log.read_bytes()
    ended = runner.invoke(app, [*line, "--out", str(out), "--scenario", str(scenario)])
    assert isinstance(ended.exception, InputError)
    hint = "use the name of a link or one of wan, prefill-site to local-site, local-site to prefill-site"
    assert str(ended.exception).splitlines() == [
        f"{scenario}:3: changes[1].link: two-datacenters has no link 'wn'; {hint}",
        f"{scenario}:5: fluctuations[0].link: two-datacenters has no link 'wann'; {hint}",
    ]
    assert (log.read_bytes(), out.exists()) == (before, False)


@pytest.mark.parametrize(
    "settings",
    [
        SimSpec(changes=(CapacityChange(at_s=1.0, link="wn", share=0.0),)),
        SimSpec(fluctuations=(Fluctuation(link="wn", every_s=1.0, share_min=0.5, share_max=1.0),)),
    ],
    ids=["changes", "fluctuations"],
)
def test_a_run_with_an_unknown_link_does_not_start(settings: SimSpec) -> None:
    """The check before any run finds it for every caller."""
    comparison = ComparisonSpec(SITES, Workload(generated_requests=1), settings, ControlSpec())
    with pytest.raises(InputError, match="has no link 'wn'"):
        comparison.check(["netkv"], 0)


def test_offloading_needs_a_second_site(tmp_path: Path) -> None:
    scenario = str(of(tmp_path, "offload: {}"))
    out = runner.invoke(app, ["simulate", str(EXAMPLES / "small.yaml"), "--scenario", scenario, "--seeds", "1"])
    assert "no datacenter has prefill instances only" in str(out.exception)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (["{at: 3 s, link: wan, share: 0}"], 2),
        (["{at: 9 s, link: wan, share: 0}", "{at: 3 s, link: wan, share: 1}"], 2),
        (["{at: 3 s, link: wan, share: 0}", "{at: 9 s, link: prefill-site to local-site, share: 1}"], 2),
        (["{at: 3 s, link: wan, share: 0}", "{at: 9 s, link: wan, share: 0.1}"], None),
    ],
)
def test_a_cut_that_never_ends_is_found_before_any_run(tmp_path: Path, changes: list[str], line: int | None) -> None:
    """The error names the line of the cut; changes count in order of time, for every link that a name covers."""
    path = of(tmp_path, "\n  - ".join(["changes:", *changes]))
    if line is None:
        assert len(read_scenario(path, load(SITES)).changes) == 2
        return
    with pytest.raises(InputErrors) as caught:
        read_scenario(path, load(SITES))
    (problem,) = caught.value.problems
    assert str(problem).startswith(f"{path}:{line}: changes[0].share: 'wan' is cut permanently")
