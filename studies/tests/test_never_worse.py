"""The matrix as data, its cells as runs, and the descent with knowledge of the future."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from kvroute.cli.app import app
from kvroute.control import ControlSpec, LogHeader
from kvroute.control.log import EventLog, read_log
from kvroute.planner.comparison.cells import Cell, encode
from kvroute.sim.run import Run, simulate
from kvroute.sim.settings import Background, SimSpec
from kvroute.sim.workload import Trace, TracedRequest
from kvroute.topology import InstanceCounts, build, fat_tree
from kvroute.types import CongestionMeasured, InputError
from kvroute_studies.netkv.readings import reading
from kvroute_studies.netkv.setup import Weights, cluster_of, requests_of
from kvroute_studies.never_worse.cases import CASES, Case
from kvroute_studies.never_worse.clairvoyant import Play, ScriptedSpec, descend
from kvroute_studies.never_worse.run import (
    RATIOS,
    Runner,
    Traces,
    results_of,
    settings_of,
    study_of,
    tune,
)
from kvroute_studies.never_worse.verdicts import (
    ABLATION,
    EXPERIMENTS,
    FORESEEN,
    MATRIX,
    POLICIES,
    RIVALS,
    VARIANTS,
)
from kvroute_studies.shared.cells import cells

NAMES = list(CASES)
NEAR = "paper/load=0.5"


def cell(case: str, policy: str, seed: int = 0, experiment: str = MATRIX.name) -> Cell:
    return Cell(experiment=experiment, reading="", profile=case, settings={}, policy=policy, seed=seed)


def test_the_matrix_covers_all_required_cases() -> None:
    """There are at least 75 cells; every reading and axis; all kinds of oracle; small and large; names that `--cell`
    accepts."""
    generated = [case for case in CASES.values() if case.trace == "generated"]
    assert len(generated) >= 75
    assert {case.axis for case in CASES.values()} == {
        "load", "oversubscription", "background", "lies", "bursts", "prefill", "placement", "slots", "slope", "memory",
        "size", "profile", "trace",
    }  # fmt: skip
    assert {case.reading for case in CASES.values()} == {"paper", "literal", "realistic"}
    assert {case.oracle for case in CASES.values()} == {"truthful", "silent", "lying"}
    assert {case.settings.get("gpus", 64) for case in CASES.values()} == {64, 128, 256, 512, 1024}
    assert {case.slots for case in CASES.values()} >= {4, 8, 16, 64}
    assert {0.5, 2.0} <= {case.settings.get("load") for case in CASES.values()}
    assert not any("," in name for name in CASES)
    assert all((case.reported is not None) <= (case.oracle == "lying") for case in CASES.values())


def test_sweeps_use_known_cells_and_policies() -> None:
    for experiment in EXPERIMENTS.values():
        assert set(experiment.profiles) <= set(CASES)
    assert set(RIVALS) <= set(POLICIES)
    assert len(ABLATION.profiles) >= 15
    for name, parameters in VARIANTS.values():
        ControlSpec(decode=name, parameters=parameters).check()
    keys = [
        cell.key for experiment in EXPERIMENTS.values() for cell in cells(experiment, "", experiment.profiles, (0, 1))
    ]
    assert len(set(keys)) == len(keys)


def test_every_cell_can_be_set_up() -> None:
    """The setup has the cell's reading, engines and telemetry of the router; every seed has another window of
    requests."""
    traces = Traces((("generated", ""), ("mooncake", ""), ("coding-agent", "")))
    for name, case in CASES.items():
        study = study_of(case, traces, cell(name, "cla"))
        settings = settings_of(case, study)
        assert (name, study.engine.batch_max) == (name, case.slots)
        assert (name, settings.telemetry == "none") == (name, case.oracle == "silent")
        assert (name, reading(case.reading, case.changes).request_set) == (name, "shifted")
        assert settings.warmup_s + (settings.measure_s or 0) <= (240 if case.trace == "coding-agent" else 60)


@pytest.mark.parametrize("name", ["paper/slots=4 load=1", "paper/30 GB load=1", "nic100-flow/node load=1"])
def test_policies_of_a_seed_get_the_same_requests(name: str) -> None:
    """Another seed has other requests, and so does the tuning."""
    case, traces = CASES[name], Traces()
    requests = [
        requests_of(
            study_of(case, traces, played_cell, tuning=tuning),
            msgspec.structs.replace(played_cell, profile=case.profile),
        )
        for played_cell, tuning in (
            (cell(name, "cla"), False),
            (cell(name, "foresight"), False),
            (cell(name, "cla", 1), False),
            (cell(name, "cla"), True),
        )
    ]
    assert requests[0] == requests[1]
    assert requests[2] != requests[0] != requests[3]


def test_a_cell_gives_the_same_record_in_every_run() -> None:
    """The record contains all of the case, the policy's name in the sweep, and CLA*'s ratio."""
    runner = Runner(Traces(), ((NEAR, Weights(cache=2.0)),))
    first, again = (runner(cell(NEAR, "no uplinks", experiment=ABLATION.name)) for _ in range(2))
    unclocked = {"wall_s": 0.0, "cpu_s": 0.0, "decision_s": 0.0}
    assert msgspec.structs.replace(first.summary, **unclocked) == msgspec.structs.replace(again.summary, **unclocked)
    assert (first.summary.policy, first.config["cla_ratio"]) == ("no uplinks", None)
    assert first.config["case"]["name"] == NEAR
    assert first.config["variant"] == ["foresight", {"uplink_factor": 0.0}]
    assert first.config["trace"] == "generated, seed 2025"
    assert runner(cell(NEAR, "cla")).config["cla_ratio"] == 2.0


def test_a_falsified_oracle_reports_the_configured_values(tmp_path: Path) -> None:
    """The real background stays the same."""
    cluster = build(fat_tree(pods=1, racks_per_pod=1, nodes_per_rack=2, instances=InstanceCounts(prefill=1, decode=1)))
    trace = Trace("one", (TracedRequest(at_s=0.5, input_tokens=20_000, output_tokens=2, blocks=(), block_tokens=16),))
    falsified, transfer_s = (0.0, 0.25, 0.0, 0.5, 0.0), []
    for number, reported in enumerate((None, falsified)):
        path, spec = tmp_path / f"{number}.log", ControlSpec()
        settings = SimSpec(background=Background.uniform(0.4), reported=reported)
        with EventLog(path, LogHeader(cluster="", spec=spec)) as log:
            transfer_s.append(simulate(cluster, trace, spec, settings, log=log).summary.transfer_s.mean)
        received = [logged.event for logged in read_log(path)[1] if isinstance(logged.event, CongestionMeasured)]
        assert received
        assert {request.per_tier for request in received} == {reported or (0.0, 0.4, 0.4, 0.4, 0.4)}
    assert transfer_s[0] == transfer_s[1]
    with pytest.raises(InputError, match="reported"):
        SimSpec(reported=(0.5,))


def test_missing_traces_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces are found below the folder, by option or environment; without them their cells are left out and named."""
    monkeypatch.delenv("KVROUTE_TRACES", raising=False)
    recorded = [name for name, case in CASES.items() if case.trace != "generated"]
    missing = Traces.of(None).missing(MATRIX.profiles)
    assert list(missing) == recorded
    assert all("--trace-dir" in why for why in missing.values())
    (tmp_path / "deep").mkdir()
    with pytest.raises(InputError, match=r"has none .* the folder of conversation_trace.jsonl or traces_rle.jsonl"):
        Traces.of(tmp_path)
    (tmp_path / "deep" / "conversation_trace.jsonl").write_text("")
    traces = Traces.of(tmp_path)
    assert traces.path(CASES[recorded[0]]) == str(tmp_path / "deep" / "conversation_trace.jsonl")
    assert {CASES[name].trace for name in traces.missing(NAMES)} == {"coding-agent"}
    monkeypatch.setenv("KVROUTE_TRACES", str(tmp_path))
    assert Traces.of(None) == traces
    with pytest.raises(InputError, match="the folder does not exist"):
        Traces.of(tmp_path / "nowhere")


def test_results_of_another_definition_are_not_used(tmp_path: Path) -> None:
    """A redefined cell is not used for the new one; a removed cell is left out."""
    path = tmp_path / "results.jsonl"
    record = Runner(Traces())(cell(NEAR, "round-robin"))
    removed = msgspec.structs.replace(record, cell=cell("paper/load=0.123", "round-robin"), key="removed")
    path.write_bytes(encode(record) + b"\n" + encode(removed) + b"\n")
    assert [stored.key for stored in results_of(path)] == [record.key]
    changed = record.config | {"case": record.config["case"] | {"slots": 3}}
    path.write_bytes(encode(msgspec.structs.replace(record, config=changed)) + b"\n")
    with pytest.raises(InputError, match="another cell"):
        results_of(path)
    priced = record.config | {"variant": ["foresight", {"slot_weight": 2.0}]}
    path.write_bytes(encode(msgspec.structs.replace(record, config=priced)) + b"\n")
    with pytest.raises(InputError, match="another 'round-robin'"):
        results_of(path)
    without_variant = {name: value for name, value in record.config.items() if name != "variant"}
    unsigned = msgspec.structs.replace(record, cell=cell(NEAR, "no uplinks"), config=without_variant)
    path.write_bytes(encode(unsigned) + b"\n")
    assert len(results_of(path)) == 1


def test_cla_uses_its_best_ratio(tmp_path: Path) -> None:
    """The tuning is stored as records: the chosen ratio has the lowest mean over its seeds."""
    path = tmp_path / "tuning.jsonl"
    ((name, weights),) = tune([NEAR], Traces(), path, workers=1)
    assert name == NEAR
    means: dict[float, list[float]] = {}
    for record in results_of(path):
        means.setdefault(record.cell.settings["cache_weight"], []).append(record.summary.ttft_s.mean or np.inf)
    assert set(means) == set(RATIOS)
    assert np.mean(means[weights.cache]) == min(np.mean(some) for some in means.values())
    assert tune([NEAR], Traces(), path, workers=1) == ((name, weights),)


def small() -> tuple[list[int], Play]:
    """Return six prompts on a tree where near and far differ, and a function that runs them."""
    cluster = build(
        fat_tree(
            pods=2,
            racks_per_pod=1,
            nodes_per_rack=2,
            oversubscription=(2.0, 4.0),
            instances=InstanceCounts(prefill=1, decode=3, placement="spread"),
        )
    )
    requests = tuple(
        TracedRequest(at_s=0.02 * n, input_tokens=6_000, output_tokens=3, blocks=(), block_tokens=16) for n in range(6)
    )

    def simulate_spec(spec: ControlSpec) -> Run:
        return simulate(cluster, Trace("six", requests), spec, SimSpec(prefill_queueing=False))

    return [index for index, instance in enumerate(cluster.instances) if instance.role == "decode"], simulate_spec


def test_the_descent_ends_if_no_single_request_can_improve() -> None:
    """The descent's mean TTFT is not above any of its start policies; every other target of every request is tried
    again here."""
    places, simulate_spec = small()
    starts = [ControlSpec(decode=name) for name in ("round-robin", "netkv", "foresight")]
    best = descend(simulate_spec, starts, places)

    def mean_s(targets: list[int]) -> float:
        script = tuple(places.index(index) for index in targets)
        run = simulate_spec(ScriptedSpec(prefill="least-loaded", script=script))
        assert run.outcomes.target.tolist() == targets
        assert run.summary.ttft_s.mean is not None
        return float(run.summary.ttft_s.mean)

    least = mean_s(best.outcomes.target.tolist())
    assert least == best.summary.ttft_s.mean
    began = [simulate_spec(spec).summary.ttft_s.mean or np.inf for spec in starts]
    assert least <= min(began)
    assert least < began[0]
    for request in range(6):
        for place in places:
            moved = best.outcomes.target.tolist()
            moved[request] = place
            assert mean_s(moved) >= least


def test_the_descent_without_rounds_is_the_run_of_its_start_policy() -> None:
    places, simulate_spec = small()
    start = ControlSpec(decode="cla")
    assert descend(simulate_spec, [start], places, rounds_max=0).summary.ttft_s == simulate_spec(start).summary.ttft_s


def test_a_single_cell_runs_by_command(tmp_path: Path) -> None:
    """A single cell of a policy without weights needs no tuning; its record is printed and stays in the folder."""
    arguments = [
        "experiment",
        MATRIX.name,
        "--cell",
        f"{NEAR},foresight",
        "--seed",
        "2",
        "--out",
        str(tmp_path),
        "--json",
    ]
    outcome = CliRunner().invoke(app, arguments)
    assert outcome.exit_code == 0, outcome.output
    (record,) = json.loads(outcome.stdout)["records"]
    assert (record["cell"]["profile"], record["cell"]["seed"]) == (NEAR, 2)
    assert len(results_of(tmp_path / "never-worse" / f"{MATRIX.name}.jsonl")) == 1
    table = CliRunner().invoke(app, arguments[:-1])
    assert table.exit_code == 0, table.output
    assert "foresight" in table.stdout
    assert "One seed." in table.stdout
    assert f"{record['summary']['ttft_s']['mean'] * 1e3:,.0f}"[:3] in table.stdout


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--reading", "literal"], "--reading"),
        (["--trace", "x.jsonl"], "--trace"),
        (["--cell", "nowhere,foresight"], "has no cell"),
        (["--cell", "realistic/mooncake load=1,foresight"], "conversation_trace"),
    ],
    ids=["reading", "trace", "unknown cell", "missing trace"],
)
def test_invalid_options_are_rejected_before_any_run(
    more: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVROUTE_TRACES", raising=False)
    outcome = CliRunner().invoke(app, ["experiment", MATRIX.name, *more, "--out", str(tmp_path)])
    assert isinstance(outcome.exception, InputError)
    assert message in str(outcome.exception)


def test_clairvoyant_cells_are_few_and_short() -> None:
    """Each step of the descent is a run."""
    for name in FORESEEN.profiles:
        study = study_of(CASES[name], Traces(), cell(name, "cla", experiment=FORESEEN.name))
        inner = msgspec.structs.replace(cell(name, "cla"), profile=CASES[name].profile, settings=CASES[name].settings)
        assert len(requests_of(study, inner).requests) < 250
        assert len(cluster_of(study.reading, inner, study.engine).instances) == 16
    assert isinstance(CASES[NEAR], Case)
