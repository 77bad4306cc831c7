"""The file of a plan: every error has its line, field and fix; every form of a curve or a mix is accepted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvroute.llm import model
from kvroute.planner.throughput.problem import Problem, read_problem
from kvroute.planner.throughput.search import deployment, find
from kvroute.sim.workload import generate, write
from kvroute.types import InputError

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "prfaas-case-study.yaml"
TEXT = EXAMPLE.read_text(encoding="utf-8")
LENGTHS = "{kind: log-normal, mu: 9.90, sigma: 1.00, least: 128, most: 131072}"
H200 = "{kind: piecewise, tokens: [1024, 8192, 32768, 131072], times: [0.44 s, 0.72 s, 1.84 s, 7.40 s]}"
KV = "{kind: measured, tokens: [1024, 8192, 32768, 131072], sizes: [190.8 MiB, 308.9 MiB, 701.3 MiB, 2316.3 MiB]}"


def changed(folder: Path, *changes: tuple[str, str]) -> Path:
    """Return the example with texts replaced; each one must occur."""
    text = TEXT
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    path = folder / "plan.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def problem(folder: Path, *changes: tuple[str, str]) -> Problem:
    return read_problem(changed(folder, *changes))


FAULTS = {
    "unknown-key": ("gpus_per_instance: 8", "gpus_per_instanc: 8", "did you mean 'gpus_per_instance'"),
    "no-unit": ("egress: 100 Gbps", "egress: 100", "it has no unit"),
    "no-egress": (", egress: 100 Gbps", "", "prfaas has no egress; add `egress: 100 Gbps`"),
    "zero-egress": ("100 Gbps}", "0 Gbps}", "between 1 Kbps and 100 Tbps"),
    "egress-of-pd": ("gpus: 64}", "gpus: 64, egress: 1 Gbps}", "sends no KV cache"),
    "part-of-an-instance": ("gpus: 32,", "gpus: 33,", "33 GPUs cannot be divided into instances of 8"),
    "no-hardware": ("hardware: h200,", "hardware: h201,", "there is no hardware 'h201'; did you mean 'h20"),
    "no-decode": ("    decode: {batch_max: 20, iteration: 25 ms}\n", "", "the hardware h20 has no decode times"),
    "too-slow-decode": ("iteration: 25 ms", "iteration: 30 ms", "33.3 tokens/s; the SLO requires 40"),
    "instant-decode": ("iteration: 25 ms", "iteration: 0 ms", "the iteration time is not above 0"),
    "no-prefill-cluster": ("role: prefill", "role: pd", "a pd cluster|no decode times"),
    "two-names": ("name: local", "name: prfaas", "two clusters are named 'prfaas'"),
    "no-mass": ("mu: 9.90", "mu: 20", "have 128 to 131072 tokens"),
    "no-range": ("least: 128", "least: 131072", "is not above `least`"),
    "no-variance": ("sigma: 1.00", "sigma: 0", "does not fit"),
    "unknown-lengths": ("kind: log-normal", "kind: normal", "'normal' is an unknown kind"),
    "times-fall": ("7.40 s]", "1.40 s]", "a longer prompt takes less time"),
    "times-missing": (", 7.40 s]", "]", "4 token counts but 3 times are given"),
    "sizes-fall": (
        "sizes: [190.8 MiB, 308.9 MiB,",
        "sizes: [308.9 MiB, 190.8 MiB,",
        "a longer prompt has a smaller KV",
    ),
    "sizes-unsorted": ("sizes: [190.8", "sizes: [1.0 MiB, 190.8", "4 and 5 values are given"),
    "no-time-at-all": (
        "[0.44 s, 0.72 s, 1.84 s, 7.40 s]",
        "[0 s, 0 s, 1.84 s, 7.40 s]",
        "prefill time of some prompts is not above 0",
    ),
    "unknown-model": (KV, "{kind: model, model: prfaas-1t-hybrd}", "did you mean prfaas-1t-hybrid"),
    "no-trace": (LENGTHS, "{kind: trace, file: none.jsonl}", "none.jsonl"),
    "no-profile": (H200, "{kind: profile, file: none.csv}", "cannot be read"),
}


@pytest.mark.parametrize(("old", "new", "what"), FAULTS.values(), ids=FAULTS)
def test_an_error_is_one_sentence_with_its_place(old: str, new: str, what: str, tmp_path: Path) -> None:
    path = changed(tmp_path, (old, new))
    with pytest.raises(InputError, match=what) as caught:
        read_problem(path)
    assert "plan.yaml" in str(caught.value) or "none.jsonl" in str(caught.value)


@pytest.mark.parametrize("name", ["two-names", "too-slow-decode", "part-of-an-instance", "times-fall", "no-mass"])
def test_an_error_names_its_line(name: str, tmp_path: Path) -> None:
    old, new, _ = FAULTS[name]
    path = changed(tmp_path, (old, new))
    line = next(number for number, text in enumerate(TEXT.splitlines(), 1) if old in text)
    with pytest.raises(InputError) as caught:
        read_problem(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")


def test_a_plan_needs_both_roles(tmp_path: Path) -> None:
    local = "  - {name: local, role: pd, hardware: h20, gpus: 64}\n"
    remote = "  - {name: prfaas, role: prefill, hardware: h200, gpus: 32, egress: 100 Gbps}\n"
    with pytest.raises(InputError, match="no cluster decodes"):
        problem(tmp_path, (local, ""))
    with pytest.raises(InputError, match="no cluster prefills for other"):
        problem(tmp_path, (remote, ""))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_problem(tmp_path / "none.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(InputError, match="is not UTF-8 text"):
        read_problem(tmp_path / "bytes.yaml")


def test_curves_may_be_given_fitted_or_profiled(tmp_path: Path) -> None:
    """The same four points are given as CSV, fitted and piecewise; the plan reports the form and its error."""
    (tmp_path / "h200.csv").write_text("tokens,seconds\n1024,0.44\n8192,0.72\n32768,1.84\n131072,7.40\n")
    given = problem(tmp_path)
    points = problem(tmp_path, (H200, "{kind: profile, file: h200.csv, form: piecewise}"))
    fitted = problem(tmp_path, (H200, "{kind: profile, file: h200.csv}"))
    inline = problem(tmp_path, (H200, H200.replace("piecewise", "measured")))
    tokens = np.array([500.0, 20_000.0, 131_072.0])
    seconds = [system.prfaas[0].hardware.prefill_s(tokens).tolist() for system in (given, points, fitted, inline)]
    assert seconds[0] == pytest.approx(seconds[1])
    assert seconds[2] == pytest.approx(seconds[3])
    assert seconds[2] != pytest.approx(seconds[0], rel=1e-4)
    assert "prefill on h200: linear interpolation between 4 measured points" in "\n".join(points.choices)
    assert "prefill on h200: quadratic fit of 4 measured points, mean error" in "\n".join(fitted.choices)
    linear = problem(tmp_path, (H200, "{kind: linear, per_token: 50 us, base: 0.1 s}"))
    assert linear.prfaas[0].hardware.prefill_s(tokens)[1] == pytest.approx(1.1)


def test_kv_sizes_may_be_measured_fitted_or_of_a_model(tmp_path: Path) -> None:
    """The sizes in Table 5 are nearly a constant plus bytes per token: all three forms agree within 2 %."""
    tokens = np.array([1_024.0, 20_000.0, 131_072.0])
    preset = problem(tmp_path, (KV, "{kind: model, model: prfaas-1t-hybrid}"))
    fitted = problem(tmp_path, (KV, KV.replace("}", ", form: linear}")))
    measured = problem(tmp_path)
    exact = model("prfaas-1t-hybrid").kv_bytes(tokens.astype(np.int64))
    assert preset.kv_bytes(tokens).tolist() == exact.tolist()
    for form in (fitted, measured):
        assert form.kv_bytes(tokens) == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize(
    ("tokens", "unmeasured"), [(1_000, ["h200", "h20"]), (100_000, ["h20"])], ids=["short", "long"]
)
def test_a_plan_reports_prompts_outside_the_measured_lengths(
    tokens: int, unmeasured: list[str], tmp_path: Path
) -> None:
    """A quarter of the prompts is outside. H20 was measured from 10,200 to 62,400 tokens, H200 from 1,024 to
    131,072."""
    table = f"{{kind: table, tokens: [20000, {tokens}], shares: [3, 1]}}"
    reported = [
        line for line in problem(tmp_path, (LENGTHS, table)).choices if "25.0% of the requests lie outside" in line
    ]
    assert [line.split(":")[0] for line in reported] == [f"prefill on {name}" for name in unmeasured]


def test_lengths_may_be_constant_or_a_table(tmp_path: Path) -> None:
    """Without variance the threshold selects all prompts or none, and the time to first token is one prefill."""
    constant = problem(tmp_path, (LENGTHS, "{kind: constant, tokens: 32768}"))
    assert constant.lengths.thresholds.tolist() == [32_700, 32_768]
    result = deployment(find(constant))
    assert (result.offloaded_share, result.threshold_tokens) == (1.0, 32_700)
    assert (result.ttft_s.mean, result.ttft_s.p90) == pytest.approx((1.84, 1.84))
    table = problem(tmp_path, (LENGTHS, "{kind: table, tokens: [30000, 1000], shares: [1, 3]}"))
    assert table.lengths.mix.mean_tokens == pytest.approx(8_250)
    unpaired = (LENGTHS, "{kind: table, tokens: [30000, 1000], shares: [1]}")
    with pytest.raises(InputError, match="2 lengths but 1 weights are given"):
        problem(tmp_path, unpaired)


def test_lengths_of_a_trace_exclude_cached_tokens(tmp_path: Path) -> None:
    """A larger cache leaves less to compute; the path of the trace is relative to the plan."""
    trace = generate(300, seed=5)
    write(trace, tmp_path / "requests.jsonl")
    entry = "{{kind: trace, file: requests.jsonl, cache: {}}}"
    means = [
        problem(tmp_path, (LENGTHS, entry.format(cache))).lengths.mix.mean_tokens
        for cache in ("infinite", "200000", "none")
    ]
    assert means[0] < means[1] < means[2]
    assert means[2] == pytest.approx(np.mean([request.input_tokens for request in trace.requests]))
    choices = "\n".join(problem(tmp_path, (LENGTHS, entry.format("infinite"))).choices)
    assert "300 requests of requests," in choices
    assert "cache: infinite" in choices


def test_the_default_alternative_has_the_same_number_of_gpus(tmp_path: Path) -> None:
    plan = problem(tmp_path, ("homogeneous: {hardware: h20, gpus: 96}\n", ""))
    assert (plan.homogeneous.gpus, plan.homogeneous.instances) == (96, 12)
    assert plan.homogeneous.hardware.name == "h20"


def test_two_halves_of_a_prefill_cluster_give_the_same_plan(tmp_path: Path) -> None:
    """The halves are two entries of the file with half of the GPUs and of the bandwidth each."""
    whole = "  - {name: prfaas, role: prefill, hardware: h200, gpus: 32, egress: 100 Gbps}\n"
    half = whole.replace("32", "16").replace("100", "50")
    parts = problem(tmp_path, (whole, half + half.replace("name: prfaas", "name: other")))
    assert deployment(find(parts)).lambda_max_per_s == pytest.approx(
        deployment(find(read_problem(EXAMPLE))).lambda_max_per_s
    )


def test_the_example_of_the_docs_page_can_be_planned(tmp_path: Path) -> None:
    """The file of docs/plan.md is used unchanged, with a profile in the same folder."""
    page = (EXAMPLE.parents[1] / "docs" / "plan.md").read_text(encoding="utf-8")
    (tmp_path / "plan.yaml").write_text(page.split("```yaml\n")[1].split("```")[0], encoding="utf-8")
    (tmp_path / "fast.csv").write_text("tokens,seconds\n1024,0.3\n8192,0.5\n32768,1.3\n131072,6.0\n")
    plan = read_problem(tmp_path / "plan.yaml")
    assert (plan.prfaas[0].price, plan.pd[0].price) == pytest.approx((32 * 3.5, 64 * 1.2))
    assert deployment(find(plan)).lambda_max_per_s > deployment(find(plan, "homogeneous")).lambda_max_per_s
