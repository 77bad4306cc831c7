"""Reads measured runs: inference-perf's in one JSON file, LLMServingSim's in a folder for each."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvroute.types import InputError
from kvroute_studies.accuracy.cases import COSTS, GPUS

PERF_FILE, LAYERS_FOLDER = "vllm_h100_inference_perf.json", "llmservingsim"
DATA_VARIABLE = "KVROUTE_TRACES"
_HINT = f"give the folder of {PERF_FILE} with --trace-dir or {DATA_VARIABLE}"


class MeasuredSpread(msgspec.Struct, frozen=True):
    """Statistics of a measured quantity."""

    mean: float
    median: float | None = None
    p90: float | None = None
    p99: float | None = None


class MeasuredRate(msgspec.Struct, frozen=True):
    """Throughput of a stage."""

    requests_per_sec: float


class MeasuredStage(msgspec.Struct, frozen=True):
    """What the load generator has measured in a stage; `tpot_s` divides by twice the tokens and one."""

    ttft_s: MeasuredSpread
    tpot_s: MeasuredSpread
    request_latency_s: MeasuredSpread
    throughput: MeasuredRate | None = None


class PerfStage(msgspec.Struct, frozen=True):
    """A stage of a run."""

    failures: int | None = None
    prompt_tokens: MeasuredSpread | None = None
    measured: MeasuredStage | None = None


class PerfRate(msgspec.Struct, frozen=True):
    """Requests per second for some seconds."""

    duration: float
    rate: float


class SharedPrefix(msgspec.Struct, frozen=True):
    """inference-perf's generator of prompts with shared prefixes."""

    system_prompt_len: int
    question_len: int
    output_len: int


class PerfWorkload(msgspec.Struct, frozen=True):
    """Prompts and rates."""

    shared_prefix: SharedPrefix
    stages: list[PerfRate]


class PerfRun(msgspec.Struct, frozen=True):
    """A run of vLLM under inference-perf; without results it is a case to predict."""

    id: str
    model: str
    hardware: str
    tensor_parallel: int
    workload: PerfWorkload
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    stages: list[PerfStage] = []

    @property
    def preset(self) -> str:
        """Name of the model among those whose sizes are known; of another one, as it is given."""
        return next((name for name in COSTS if name in self.model.lower().replace("-v0.1", "")), self.model)

    @property
    def measured(self) -> bool:
        """Whether its results are given."""
        return bool(self.stages) and all(stage.measured is not None for stage in self.stages)


class LayersRequest(msgspec.Struct, frozen=True):
    """A request of LLMServingSim's runs; without results only its arrival and lengths are given."""

    input_toks: int
    output_toks: int
    arrival_time: float
    queued_ts: float | None = None
    first_token_ts: float | None = None
    last_token_ts: float | None = None


@dataclass(frozen=True, slots=True)
class LayersRun:
    """A run of LLMServingSim's examples."""

    name: str
    requests: tuple[LayersRequest, ...]
    step_tokens: int
    requests_max: int
    blocks: int | None
    """None: to be computed from the memory."""
    hardware: str
    link_bytes_per_s: float
    link_latency_s: float
    profile: Path
    """Folder of the tables of its layers."""

    @property
    def measured(self) -> bool:
        """Whether the times of its requests are given."""
        return self.requests[0].first_token_ts is not None


def data_folder(given: Path | None) -> Path:
    """Return the folder of measured runs: the one that is given, or that of the environment variable.

    Raises:
        InputError: there is none.
    """
    text = str(given) if given is not None else os.environ.get(DATA_VARIABLE, "")
    if not text:
        raise InputError("the folder of measured runs is not given", where="--trace-dir", hint=_HINT)
    for folder in (Path(text), Path(text) / "measured"):
        if (folder / PERF_FILE).is_file():
            return folder
    raise InputError(f"the folder has no {PERF_FILE}", where=text, hint=_HINT)


def read_perf(path: Path) -> list[PerfRun]:
    """Read runs of inference-perf, or cases without results.

    Raises:
        InputError: the file cannot be read, is not of this form, or has a model or GPU whose sizes are not known.
    """
    try:
        runs = msgspec.json.decode(path.read_bytes(), type=list[PerfRun])
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", where=str(path), hint="give another file") from None
    except msgspec.DecodeError as error:
        hint = f"give a list of runs in the form of {PERF_FILE}"
        raise InputError(f"this is no file of cases ({error})", where=str(path), hint=hint) from None
    for run in runs:
        for what, name, known in (("model", run.preset, COSTS), ("GPU", run.hardware, GPUS)):
            if name not in known:
                hint = f"known are {', '.join(known)}; their sizes are in accuracy/cases.py"
                raise InputError(
                    f"the sizes of the {what} {name!r} of {run.id} are not known", where=str(path), hint=hint
                )
        _check_stages(run, path)
    return runs


def _check_stages(run: PerfRun, path: Path) -> None:
    stages = run.workload.stages
    if not stages or any(stage.rate <= 0 or stage.duration <= 0 or stage.rate * stage.duration < 1 for stage in stages):
        hint = "give rates and durations above 0 with one request or more in each stage"
        raise InputError(f"{run.id} has no stage, or one without requests", where=str(path), hint=hint)
    if run.stages and len(run.stages) != len(stages):
        what = f"{run.id} has {len(stages)} stages of load and {len(run.stages)} of results"
        raise InputError(what, where=str(path), hint="give one for each, or none")
    prefix = run.workload.shared_prefix
    if min(prefix.output_len, prefix.question_len + prefix.system_prompt_len) < 1 or run.tensor_parallel < 1:
        hint = "give lengths and a tensor-parallel degree of 1 or more"
        raise InputError(f"{run.id} has a length or a degree below 1", where=str(path), hint=hint)


def read_layers(folder: Path, name: str) -> LayersRun:
    """Read a run of LLMServingSim's examples. Raises InputError for a file that is missing or of another form."""
    place = folder / name
    results, arrivals = place / "requests.jsonl", place / "arrivals.jsonl"
    path = results if results.is_file() else arrivals
    try:
        decode = msgspec.json.Decoder(LayersRequest).decode
        requests = tuple(decode(line) for line in path.read_bytes().splitlines() if line.strip())
        meta: dict[str, Any] = msgspec.json.decode((place / "meta.json").read_bytes())
        config: dict[str, Any] = msgspec.json.decode((place / "config.json").read_bytes())
        engine, instance = meta["engine_kwargs"], config["nodes"][0]["instances"][0]
        return LayersRun(
            name=name,
            requests=requests,
            step_tokens=engine["max_num_batched_tokens"],
            requests_max=engine["max_num_seqs"],
            blocks=meta.get("kv_cache", {}).get("num_gpu_blocks"),
            hardware=instance["hardware"],
            link_bytes_per_s=config["link_bw"] * 1e9,
            link_latency_s=config["link_latency"] * 1e-9,
            profile=folder / f"profile_{name}",
        )
    except (OSError, msgspec.DecodeError, KeyError, IndexError) as error:
        hint = "give LLMServingSim's bench/examples with requests.jsonl or arrivals.jsonl, meta.json and config.json"
        raise InputError(f"this is no run of LLMServingSim ({error})", where=str(place), hint=hint) from None
