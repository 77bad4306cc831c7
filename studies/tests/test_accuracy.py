"""`accuracy`: measured runs are read and predicted, and its tables judge the predictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvroute.planner.comparison.cells import Cell, Record
from kvroute.types import InputError
from kvroute_studies.accuracy.cases import CALIBRATED, COSTS, LAYERS, LAYERS_CASES, UNCALIBRATED, kv_blocks
from kvroute_studies.accuracy.command import FAMILY, print_predictions
from kvroute_studies.accuracy.inputs import PERF_FILE, data_folder, read_layers, read_perf
from kvroute_studies.accuracy.predictions import calibrated, predict_perf, uncalibrated
from kvroute_studies.accuracy.run import EXPERIMENT, applies, predicted_cases, run_cell
from kvroute_studies.accuracy.tables import layers_grid, predictions_grid, stages_grid, stages_of, summary_grid
from kvroute_studies.shared.family import run_family
from kvroute_studies.shared.sweeps import RunOptions

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "measured"
"""The measured runs, which are not part of the repository."""
CODEGEN, GENERAL = "20260217-155451-llama-2-7b-tp1-codegen", "20260217-231439-llama-2-7b-tp1-general"


def run_of(name: str, rates: tuple[float, ...], output: int = 40, seconds: float = 20.0, **more: Any) -> dict[str, Any]:
    """Return a case of Llama-2-7B."""
    prefix = {"system_prompt_len": 100, "question_len": 200, "output_len": output}
    workload = {"shared_prefix": prefix, "stages": [{"duration": seconds, "rate": rate} for rate in rates]}
    of = {"id": name, "model": "meta-llama/Llama-2-7b-hf", "hardware": "h100_sxm", "tensor_parallel": 1}
    return of | {"workload": workload} | more


def measured(case: dict[str, Any], factor: float = 1.0) -> dict[str, Any]:
    """Return the case with the results of an engine whose steps take `factor` times those of the data sheet, as
    inference-perf writes them."""
    path = Path(case["id"])
    run = read_perf_text(json.dumps([case]), path)
    output = run.workload.shared_prefix.output_len
    stages = []
    for stage in predict_perf(run, uncalibrated(run), 3, factor):
        times = {name: dict(stage.spreads[name]) for name in ("ttft", "tpot", "e2e")}
        tpot = {name: value * (output - 1) / (2 * output + 1) for name, value in times["tpot"].items()}
        found = {"ttft_s": times["ttft"], "tpot_s": tpot, "request_latency_s": times["e2e"]}
        rate = {"requests_per_sec": stage.rate_per_s}
        stages.append({"failures": 0, "prompt_tokens": {"mean": 314.4}, "measured": found | {"throughput": rate}})
    return case | {"stages": stages}


def read_perf_text(text: str, name: Path) -> Any:
    """Read one case from a text."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name.name
        path.write_text(text)
        return read_perf(path)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a calibrating run, a run to compare with and one without results; steps take 1.2 times as long.

    The runs are long, because a calibration takes the median TTFT as that of a prompt in the cache.
    """
    place = tmp_path_factory.mktemp("measured")
    runs = [
        measured(run_of(CODEGEN, (5, 10), seconds=200.0), 1.2),
        measured(run_of(GENERAL, (8,), output=60, seconds=200.0), 1.2),
        run_of("20260217-162547-llama-2-7b-tp1-roleplay", (6,)),
    ]
    (place / PERF_FILE).write_text(json.dumps(runs))
    return place


def record(folder: Path, profile: str, policy: str) -> Record:
    cell = Cell(experiment=EXPERIMENT.name, reading="measured", profile=profile, settings={}, policy=policy, seed=0)
    return run_cell(folder, cell)


def test_a_calibrated_engine_predicts_another_workload(folder: Path) -> None:
    """Steps that are 20 % slower than the data sheet says: calibrated by one run, the other is within 5 %; without it
    the time per token is about 20 % too short."""
    (stage,) = stages_of([record(folder, GENERAL, CALIBRATED)], CALIBRATED)
    for name in ("ttft.median", "ttft.p90", "tpot.mean", "e2e.mean"):
        error = stage.error(name)
        assert error is not None
        assert abs(error) < 0.05, name
    (other,) = stages_of([record(folder, GENERAL, UNCALIBRATED)], UNCALIBRATED)
    assert other.error("tpot.mean") == pytest.approx(1 / 1.2 - 1, abs=0.03)
    assert stage.regime == "normal"


def test_the_terms_of_a_calibrated_step(folder: Path) -> None:
    """The base is 20 % more than the time to read the weights and the constant. The overhead is less exact, because a
    cached prompt takes less than two and a half steps."""
    costs = calibrated(read_perf(folder / PERF_FILE)[0])
    (stage,) = stages_of([record(folder, GENERAL, CALIBRATED)], CALIBRATED)
    weights_s = 2 * 6.74e9 / (3.35e12 * 0.8)
    assert stage.figures["calibration.base_s"] == pytest.approx(1.2 * (weights_s + 0.5e-3), rel=0.05)
    assert costs.request_s == pytest.approx(6.5e-3, abs=2e-3)


def test_a_case_without_a_calibrating_run_has_no_calibrated_prediction(tmp_path: Path) -> None:
    (tmp_path / PERF_FILE).write_text(json.dumps([run_of(GENERAL, (8,))]))
    assert record(tmp_path, GENERAL, CALIBRATED).figures == {}
    assert record(tmp_path, GENERAL, UNCALIBRATED).figures["0.ttft.mean"] > 0


def test_cases_of_a_file_are_predicted_stage_by_stage(folder: Path, tmp_path: Path) -> None:
    """The prediction does not need the results of the case, and says which protocol it is of."""
    path = tmp_path / "cases.json"
    path.write_text(json.dumps([run_of("some", (8, 4)), run_of("other", (2,), tensor_parallel=2)]))
    found = predicted_cases(path, folder)
    assert [(stage["id"], stage["stage"], stage["protocol"]) for stage in found] == [
        ("some", 0, CALIBRATED),
        ("some", 1, CALIBRATED),
        ("other", 0, UNCALIBRATED),
    ]
    assert found[0]["e2e_s"]["mean"] > found[1]["e2e_s"]["mean"] > 0
    assert found[0]["output_tput_per_gpu"] == pytest.approx(8 * 40, rel=0.1)
    assert found[0]["tput_per_gpu"] == pytest.approx(8 * (40 + 314), rel=0.1)
    assert {"mean", "median", "p90", "p99"} == set(found[0]["ttft_s"])


def test_an_engine_at_capacity_has_a_range(tmp_path: Path) -> None:
    """Slots for 16 requests at a rate that uses more than that: steps that take 10 % more make a longer queue."""
    path = tmp_path / "cases.json"
    path.write_text(json.dumps([run_of("full", (80,), max_num_seqs=16)]))
    (found,) = predicted_cases(path, None)
    assert found["at_capacity"]
    ranges = found["with_step_times"]
    means = [ranges["0.9"]["ttft_s"]["mean"], found["ttft_s"]["mean"], ranges["1.1"]["ttft_s"]["mean"]]
    assert means == sorted(means)
    assert means[0] < means[2]


def test_predictions_are_printed(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cases.json"
    path.write_text(json.dumps([run_of("some", (8,))]))
    print_predictions(path, folder, None, True)
    assert [stage["id"] for stage in json.loads(capsys.readouterr().out)] == ["some"]
    print_predictions(path, folder, None, False)
    assert "calibrated" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"model": "some/unknown-3b"}, "the sizes of the model 'some/unknown-3b' of some are not known"),
        ({"hardware": "b300"}, "the sizes of the GPU 'b300' of some are not known"),
        ({"tensor_parallel": "two"}, "no file of cases"),
        ({"tensor_parallel": 0}, "a length or a degree below 1"),
        ({"stages": [{}, {}]}, "1 stages of load and 2 of results"),
        ({"workload": {"shared_prefix": {"system_prompt_len": 9, "question_len": 9, "output_len": 9}, "stages": []}},
         "has no stage"),
    ],
)  # fmt: skip
def test_faults_of_a_file_of_cases_are_one_sentence(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    path = tmp_path / "cases.json"
    path.write_text(json.dumps([run_of("some", (8,)) | change]))
    with pytest.raises(InputError, match=problem):
        read_perf(path)


def test_a_folder_without_runs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=f"the folder has no {PERF_FILE}"):
        data_folder(tmp_path)
    monkeypatch.delenv("KVROUTE_TRACES", raising=False)
    with pytest.raises(InputError, match="the folder of measured runs is not given"):
        data_folder(None)
    with pytest.raises(InputError, match="this is no run of LLMServingSim"):
        read_layers(tmp_path, "rtxpro6000_qwen3-32b")


def test_layers_predict_the_runs_that_have_tables() -> None:
    assert {name for name in EXPERIMENT.profiles if applies(LAYERS, name)} == set(LAYERS_CASES)
    assert all(applies(CALIBRATED, name) != (name in LAYERS_CASES) for name in EXPERIMENT.profiles)


def test_blocks_fit_into_the_memory_that_weights_leave() -> None:
    """Llama-2-7B on 85 GB: 76.5 GB less 2.5 and 13.5 GB, at 524,288 bytes a token."""
    assert kv_blocks(COSTS["llama-2-7b"], 1, 85e9) == int((76.5e9 - 2.5e9 - 13.48e9) / 524_288 / 16)


def test_the_experiment_runs_and_prints_its_tables(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = RunOptions(
        "paper", (), (GENERAL, CODEGEN), None, None, (0,), "local", 1, tmp_path, as_json=False, trace_dir=folder
    )
    run_family(FAMILY, [EXPERIMENT], options)
    assert "vLLM on H100 under inference-perf" in capsys.readouterr().out
    records = [record(folder, name, policy) for name in (CODEGEN, GENERAL) for policy in (CALIBRATED, UNCALIBRATED)]
    assert [[entry.text for entry in row[:3]] for row in summary_grid(records).rows] == [
        [CALIBRATED, "normal", "3"],
        [UNCALIBRATED, "normal", "3"],
    ]
    assert [row[0].text for row in stages_grid(records, CALIBRATED).rows] == ["llama-2-7b-tp1-codegen"] * 2 + [
        "llama-2-7b-tp1-general"
    ]
    left_out = record(folder, "20260217-162547-llama-2-7b-tp1-roleplay", UNCALIBRATED)
    assert [row[0].text for row in predictions_grid([*records, left_out]).rows] == ["llama-2-7b-tp1-roleplay"]


@pytest.mark.skipif(not DATA.is_dir(), reason="the measured runs are not here")
def test_tables_of_layers_predict_the_given_runs() -> None:
    """The targets: 5 % of TTFT and 3 % of TPOT."""
    records = [record(DATA, name, LAYERS) for name in ("rtxpro6000_llama-3.1-8b", "rtxpro6000_qwen3-32b")]
    for stage in stages_of(records, LAYERS):
        ttft, tpot = stage.error("ttft.mean"), stage.error("tpot.mean")
        assert ttft is not None
        assert tpot is not None
        assert abs(ttft) < 0.05
        assert abs(tpot) < 0.03
    assert len(layers_grid(records).rows) == 2
