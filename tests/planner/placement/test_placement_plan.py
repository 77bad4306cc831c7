"""A plan from the command line to the cluster file that the simulator takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.planner.placement_files import TESTBED, cluster_text, problem_of
from typer.testing import CliRunner

from kvroute.cli.app import app
from kvroute.planner.placement.output import cluster_file, launch_commands, named
from kvroute.planner.placement.plan import Planned, plan_placement
from kvroute.planner.placement.problem import PlacementProblem
from kvroute.topology import load, parse
from kvroute.topology.place import gpu_list
from kvroute.types import InputError

COMMAND = ["plan", "placement", str(TESTBED), "--model", "opt-66b", "--ttft", "2.5s", "--tpot", "0.15s"]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    problem = problem_of(tmp_path_factory.mktemp("plan"), TESTBED.read_text(), "opt-66b", 2.5, 0.15)
    return plan_placement(problem, literal=True)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_json_has_the_documented_keys(tmp_path: Path) -> None:
    """The document has groups, schemes and servers of every instance, and a simulation."""
    result = run(*COMMAND, "--json", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {"plan_s", "phases", "rate_per_gpu", "binding", "slo_attainment", "simulated"} <= found.keys()
    for phase in ("prefill", "decode"):
        plan = found["phases"][phase]
        assert len(plan["groups"]) == len(plan["schemes"]) == len(plan["servers_spanned"]) > 0
        for group, servers in zip(plan["groups"], plan["servers_spanned"], strict=True):
            assert len(group) == len(set(group)) == plan["tp"] * plan["pp"]
            assert len({gpu.split("/")[0] for gpu in group}) == servers
    gpus = sum(len(group) for plan in found["phases"].values() for group in plan["groups"])
    assert found["rate_per_gpu"] == pytest.approx(found["rate_per_s"] / gpus)
    assert {path.name for path in tmp_path.iterdir()} == {
        "report.html",
        "plan.json",
        "cluster.yaml",
        "launch.sh",
        "figures",
    }
    assert json.loads((tmp_path / "plan.json").read_text())["rate_per_s"] == found["rate_per_s"]
    assert len(load(tmp_path / "cluster.yaml").instances) == len(found["phases"]["prefill"]["groups"]) + len(
        found["phases"]["decode"]["groups"]
    )


def test_the_terminal_shows_groups_constraints_and_commands() -> None:
    result = run(*COMMAND, "--no-simulation", "--equations", "literal")
    assert result.exit_code == 0, result.output
    for text in (
        "requests/s",
        "hierarchical-ring",
        "Alternatives",
        "vllm serve opt-66b",
        "The published equations choose",
    ):
        assert text in result.output


def test_a_plan_without_hierarchical_rings_is_not_better(planned: Planned, tmp_path: Path) -> None:
    """On the testbed the best placement uses a hierarchical ring; with plain rings only, it sustains a lower rate."""
    text = TESTBED.read_text(encoding="utf-8").replace("collectives:", "collectives:\n  schemes: [multi-rail-ring]")
    rings = plan_placement(problem_of(tmp_path, text, "opt-66b", 2.5, 0.15), simulates=False).report
    assert {scheme for phase in rings.phases.values() for scheme in phase.schemes} <= {"ring", "multi-rail-ring", "-"}
    assert "hierarchical-ring" in planned.report.phases["decode"].schemes
    assert rings.rate_per_s < 0.95 * planned.report.rate_per_s


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--grouping", "random"], "'random' is not known"),
        (["--equations", "exact"], "'exact' is not known"),
        (["--ttft", "0s"], "the limit is not above 0"),
        (["--model", "opt-67b"], "there is no model 'opt-67b'"),
    ],
)
def test_wrong_options_are_one_sentence(arguments: list[str], what: str) -> None:
    result = run(*COMMAND, *arguments)
    assert result.exit_code != 0
    assert what in str(result.exception) or what in result.output


def test_the_simulation_confirms_the_prediction(planned: Planned) -> None:
    """At the predicted rate the simulated share of good requests is near the required one, or above."""
    found = planned.report.simulated
    assert found is not None
    assert found.slo_attainment is not None
    assert found.slo_attainment >= planned.report.slo_attainment - 0.05
    assert found.tpot_s.p50 == pytest.approx(planned.report.phases["decode"].iteration_s, rel=0.1)
    assert found.transfer_s.mean == pytest.approx(planned.report.transfer_s, rel=0.5)


def test_a_large_placement_is_simulated_in_part(tmp_path: Path) -> None:
    """Of 40 instances at TP 1, 16 of a phase are simulated at most, at their share of the rate."""
    text = cluster_text(racks=5, servers=2, gpus=4).replace("traffic:", "tp_max: 1\n  pp_max: 1\n  traffic:")
    problem = problem_of(tmp_path, text, ttft_s=0.3, tpot_s=0.05)
    plan = plan_placement(problem).report
    found = plan.simulated
    assert found is not None
    assert max(found.prefill_instances, found.decode_instances) <= 16
    whole = sum(len(phase.groups) for phase in plan.phases.values())
    assert found.prefill_instances + found.decode_instances < whole
    assert found.rate_per_s < plan.rate_per_s
    assert found.slo_attainment is not None
    assert found.slo_attainment > 0.85


def test_the_cluster_file_is_read_back(planned: Planned) -> None:
    """GPUs, parallelism, memory and times of every instance survive the file."""
    cluster = parse(cluster_file(planned.problem, planned.instances).to_yaml())
    for planned_instance in planned.instances:
        instance = cluster.instances[cluster.index(planned_instance.name)]
        nodes = [node.name for node in planned.problem.cluster.places.nodes]
        assert instance.gpus == tuple(f"{nodes[node]}/{gpu}" for node, gpu in planned_instance.instance.gpus)
        assert (instance.tp, instance.pp) == (planned_instance.instance.split.tp, planned_instance.instance.split.pp)
        tokens = instance.kv_capacity_bytes / planned.problem.model.kv_bytes_per_token
        assert tokens == pytest.approx(planned_instance.instance.roofline.kv_tokens())
        assert cluster.timing[instance.timing].decode.base_s == pytest.approx(
            planned_instance.instance.times().decode.base_s
        )


def test_names_of_the_file_are_not_used_again(planned: Planned, tmp_path: Path) -> None:
    text = TESTBED.read_text() + (
        "timing: {default: {prefill: {kind: linear, per_token: 1 ms}, decode: {base: 10 ms}}}\n"
        "instances: [{name: prefill-0, role: prefill, gpus: 'a0:0', model: opt-13b, kv_capacity: 4 GB},\n"
        "            {name: d, role: decode, gpus: 'a0:1', model: opt-13b, kv_capacity: 4 GB}]\n"
    )
    problem = problem_of(tmp_path, text, "opt-66b", 2.5, 0.15)
    names = [placed.name for placed in named(problem, planned.placement.prefill, planned.placement.decode)]
    assert names == ["prefill-1", "decode-0"]


def test_a_group_over_two_servers_has_a_command_for_each(planned: Planned) -> None:
    """Both name the first server as master; only the first one serves HTTP."""
    each = next(instance for instance in planned.instances if instance.instance.servers == 2)
    first, second = launch_commands(planned.problem, each)
    nodes = [planned.problem.cluster.places.nodes[node].name for node, _ in each.instance.gpus]
    for command in (first, second):
        assert f"--master-addr {nodes[0]}" in command
        assert "--nnodes 2" in command
        assert f"--tensor-parallel-size {each.instance.split.tp}" in command
    assert "--node-rank 0" in first
    assert "--headless" not in first
    assert "--node-rank 1" in second
    assert "--headless" in second


def test_gpu_ranges_are_those_of_the_instance(planned: Planned) -> None:
    entries = cluster_file(planned.problem, planned.instances).instances
    assert isinstance(entries, list)
    for entry, planned_instance in zip(entries, planned.instances, strict=True):
        assert len(gpu_list(entry.gpus)) == len(planned_instance.instance.gpus)
        assert entry.gpus.count(",") + 1 <= planned_instance.instance.servers


def test_a_plan_without_simulation_has_none(tmp_path: Path) -> None:
    problem: PlacementProblem = problem_of(tmp_path, cluster_text())
    report = plan_placement(problem, simulates=False).report
    assert report.simulated is None
    assert report.literal is None


def test_the_simulation_uses_the_policies_of_the_files_gateway(tmp_path: Path) -> None:
    """A section that a gateway would refuse is an error, and another price gives other times."""
    file = tmp_path / "mine.yaml"
    command = ["plan", "placement", str(file), *COMMAND[3:], "--json"]
    file.write_text(TESTBED.read_text() + "gateway: {policy: {token_delay_price: 0}}\n")
    plain, own = (json.loads(run(*arguments).stdout) for arguments in ([*COMMAND, "--json"], command))
    assert own["phases"] == plain["phases"]
    assert own["simulated"]["ttft_s"] != plain["simulated"]["ttft_s"]
    file.write_text(TESTBED.read_text() + "gateway: {policy: netcv}\n")
    refused = run(*command)
    assert refused.exit_code != 0
    assert "gateway.policy: unknown decode policy 'netcv'" in str(refused.exception)


@pytest.mark.parametrize(("option", "value"), [("--equations", "literal"), ("--grouping", "paper")])
def test_what_heroserve_published_needs_kvroute_studies(
    option: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the package the command says how to install it."""
    monkeypatch.setattr("kvroute.planner.placement.published_choices.entry_points", lambda **_: ())
    result = run(*COMMAND, "--no-simulation", option, value)
    assert isinstance(result.exception, InputError)
    assert "pip install kvroute-studies" in str(result.exception)
