"""Laws of prefill and iteration times and of their fits, and published profiles."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from typer.testing import CliRunner

from kvroute.cli.timing.command import app
from kvroute.timing import (
    IterationTime,
    fit_decode,
    fit_prefill,
    fit_profile,
    prefill_each_s,
    prefill_time,
    read_profile,
    step_base_s,
    tokens_of_step_s,
)
from kvroute.topology import H100_LLAMA_70B_TP4
from kvroute.types import (
    DecodeSpec,
    InputError,
    LinearPrefill,
    PiecewisePrefill,
    PrefillSpec,
    QuadraticPrefill,
    SchedulerSpec,
    TimingSpec,
)
from kvroute_engine.files.units import duration_s

DATA = Path(__file__).resolve().parents[2] / ".." / "shared" / "data"
SPLITWISE = DATA / "splitwise_sim" / "perf_model.csv"
DISTSERVE = DATA / "distserve" / "profiler-a100-80g.distserve.json"
VLLM = DATA / "distserve" / "profiler-a100-80g.vllm.json"

small_s = st.floats(0, 1e-3)
iterations = st.builds(
    IterationTime,
    base_s=st.floats(1e-4, 1.0),
    per_request_s=small_s,
    per_context_token_s=st.one_of(st.just(0.0), st.floats(1e-12, 1e-5)),
)
points = st.lists(st.tuples(st.integers(1, 500), st.floats(0, 1.0)), min_size=2, max_size=6).map(
    lambda steps: PiecewisePrefill(
        tokens=tuple(int(n) for n in np.cumsum([gap for gap, _ in steps])),
        seconds=tuple(float(s) for s in np.cumsum([gap for _, gap in steps])),
    )
)
specs: st.SearchStrategy[PrefillSpec] = st.one_of(
    st.builds(LinearPrefill, per_token_s=small_s, base_s=st.floats(0, 1)),
    st.builds(QuadraticPrefill, base_s=st.floats(0, 1), per_token_s=small_s, per_token2_s=st.floats(0, 1e-6)),
    points,
)
token_counts = st.integers(0, 100_000)


def given_file(path: Path) -> Path:
    if not path.exists():
        assert os.environ.get("KVROUTE_REQUIRE_LIVE") != "1", f"{path} is missing"
        pytest.skip(f"{path.name} is not here")
    return path


@settings(deadline=None)
@given(specs, token_counts, token_counts, token_counts)
def test_prefill_time_grows_with_the_prompt_and_shrinks_with_the_cache(
    spec: PrefillSpec, tokens: int, more: int, cached: int
) -> None:
    time = prefill_time(spec)
    seconds = time.seconds(tokens, cached)
    rounding = 1e-9 * (1 + time.seconds(tokens + more) + time.seconds(cached + more))
    assert seconds >= 0
    assert time.seconds(tokens + more, cached) >= seconds - rounding
    assert time.seconds(tokens, cached + more) <= seconds + rounding


@settings(deadline=None)
@given(specs, st.lists(st.integers(1, 5_000), min_size=1, max_size=5), token_counts)
def test_a_step_of_several_prompts_takes_as_long_as_one_prompt_of_their_tokens(
    spec: PrefillSpec, sizes: list[int], computed: int
) -> None:
    """A prompt after computed tokens costs what it would alone."""
    time, rounding = prefill_time(spec), 1e-9
    whole_s = time.seconds(sum(sizes)) - time.seconds(0)
    assert tokens_of_step_s(time, [(0, tokens) for tokens in sizes]) == pytest.approx(max(whole_s, 0.0), abs=rounding)
    after_s = time.seconds(computed + sizes[0], computed) - time.seconds(0)
    assert tokens_of_step_s(time, [(computed, sizes[0])]) == pytest.approx(max(after_s, 0.0), rel=1e-6, abs=1e-6)


def test_a_prompt_after_computed_tokens_makes_a_shared_step_longer() -> None:
    """100 tokens cost 1e-8 * (1100^2 - 1000^2 - 100^2) s more after 1,000 others."""
    time = prefill_time(QuadraticPrefill(base_s=0.01, per_token_s=1e-4, per_token2_s=1e-8))
    fresh_s = tokens_of_step_s(time, [(0, 100), (0, 300)])
    assert fresh_s == pytest.approx(400 * 1e-4 + 400**2 * 1e-8)
    assert tokens_of_step_s(time, [(1_000, 100), (0, 300)]) == pytest.approx(fresh_s + 2e-3)


def test_the_base_of_a_step_is_the_prefill_s_base_but_for_the_time_of_a_request() -> None:
    """With `step_tokens` the scheduler's `step_s` is that part."""
    timing = TimingSpec(
        prefill=LinearPrefill(per_token_s=1e-4, base_s=0.02), decode=DecodeSpec(base_s=0.01, per_request_s=0.0)
    )
    assert step_base_s(timing) == 0.02
    assert step_base_s(replace(timing, scheduler=SchedulerSpec(step_tokens=2048, step_s=0.015))) == 0.015


@settings(deadline=None)
@given(specs, token_counts)
def test_a_fully_cached_prompt_costs_the_base_and_an_uncached_one_the_curve(spec: PrefillSpec, tokens: int) -> None:
    time = prefill_time(spec)
    assert time.seconds(tokens, tokens) == pytest.approx(time.seconds(0), rel=1e-9, abs=1e-9)
    assert time.seconds(tokens, tokens + 5) == time.seconds(tokens, tokens)


@settings(deadline=None)
@given(specs, token_counts, st.lists(token_counts, min_size=1, max_size=6))
def test_a_batch_of_cache_lengths_equals_single_calls(spec: PrefillSpec, tokens: int, cached: list[int]) -> None:
    """Equal to the last bit, because a log must replay alike with either function."""
    time = prefill_time(spec)
    each = prefill_each_s(time, tokens, np.array(cached)).tolist()
    assert each == [time.seconds(tokens, count) for count in cached]


@settings(deadline=None)
@given(points)
def test_a_piecewise_curve_passes_through_its_points(spec: PiecewisePrefill) -> None:
    time = prefill_time(spec)
    for tokens, seconds in zip(spec.tokens, spec.seconds, strict=True):
        assert time.seconds(tokens) == pytest.approx(seconds, rel=1e-9, abs=1e-12)


def test_new_tokens_at_the_end_of_a_long_prompt_cost_more() -> None:
    quadratic = prefill_time(QuadraticPrefill(base_s=1.0, per_token_s=0.1, per_token2_s=0.01))
    assert quadratic.seconds(10) == pytest.approx(1 + 1 + 1)
    assert quadratic.seconds(10, 8) == pytest.approx(1 + 0.2 + 0.01 * (100 - 64))
    piecewise = prefill_time(PiecewisePrefill(tokens=(10, 20, 30), seconds=(2.0, 3.0, 5.0)))
    assert [piecewise.seconds(n) for n in (0, 15, 25, 40)] == pytest.approx([1.0, 2.5, 4.0, 7.0])
    assert piecewise.seconds(30, 20) == pytest.approx(1.0 + 2.0)
    assert prefill_time(LinearPrefill(per_token_s=0.1, base_s=1.0)).seconds(10, 8) == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        (LinearPrefill(per_token_s=-1.0), "per_token is -1.0"),
        (LinearPrefill(per_token_s=1.0, base_s=float("nan")), "base is nan"),
        (QuadraticPrefill(base_s=0.0, per_token_s=0.0, per_token2_s=float("inf")), "per_token2 is inf"),
        (PiecewisePrefill(tokens=(1,), seconds=(1.0,)), "two or more points"),
        (PiecewisePrefill(tokens=(1, 2), seconds=(1.0,)), "2 token counts but 1 times"),
        (PiecewisePrefill(tokens=(2, 2), seconds=(1.0, 1.0)), "do not ascend"),
        (PiecewisePrefill(tokens=(1, 2), seconds=(2.0, 1.0)), "longer prompt takes less"),
    ],
)
def test_invalid_prefill_times_are_rejected(spec: PrefillSpec, what: str) -> None:
    with pytest.raises(InputError, match=what):
        prefill_time(spec)


@settings(deadline=None)
@given(iterations, st.integers(0, 300), st.integers(1, 64), st.integers(0, 10**6))
def test_a_span_is_the_sum_of_its_iterations(time: IterationTime, steps: int, batch: int, context: int) -> None:
    by_hand = sum(time.seconds(batch, context + step * batch) for step in range(steps))
    assert time.span_s(steps, batch, context) == pytest.approx(by_hand, rel=1e-9)


@settings(deadline=None)
@given(iterations, st.floats(-1, 1e5), st.integers(1, 512), st.integers(0, 10**7))
def test_steps_until_is_the_smallest_sufficient_number(
    time: IterationTime, elapsed: float, batch: int, context: int
) -> None:
    steps = time.steps_until(elapsed, batch, context)
    assert time.span_s(steps, batch, context) >= elapsed
    assert steps == 0 or time.span_s(steps - 1, batch, context) < elapsed


@settings(deadline=None)
@given(iterations, st.integers(0, 10**5), st.integers(1, 512), st.integers(0, 10**7))
def test_steps_until_inverts_span_exactly(time: IterationTime, steps: int, batch: int, context: int) -> None:
    span_s = time.span_s(steps, batch, context)
    assert time.steps_until(span_s, batch, context) == steps
    assert time.steps_until(math.nextafter(span_s, math.inf), batch, context) == steps + 1


@settings(deadline=None)
@given(iterations, st.floats(0, 1e4), st.floats(0, 1e4), st.integers(1, 64))
def test_more_time_never_has_fewer_iterations(time: IterationTime, elapsed: float, more: float, batch: int) -> None:
    assert time.steps_until(elapsed, batch, 0) <= time.steps_until(elapsed + more, batch, 0)


def test_the_default_is_in_netkvs_range() -> None:
    spec = H100_LLAMA_70B_TP4.spec()
    assert prefill_time(spec.prefill).seconds(10_000) == pytest.approx(0.92)
    time = IterationTime.of(spec.decode)
    assert time.seconds(64) == pytest.approx(0.0189)
    assert time.steps_until(1.0, 64, 0) == 53


def test_an_iteration_without_duration_is_rejected() -> None:
    with pytest.raises(InputError, match="takes no time"):
        IterationTime.of(DecodeSpec(base_s=0.0, per_request_s=0.0))
    with pytest.raises(InputError, match="per_request is -1"):
        IterationTime.of(DecodeSpec(base_s=1.0, per_request_s=-1.0))


LENGTHS = np.array([128, 256, 512, 1024, 2048, 4096, 8192])


@settings(deadline=None)
@given(specs.filter(lambda spec: prefill_time(spec).seconds(128) > 1e-6))
def test_a_prefill_fit_recovers_its_coefficients(spec: PrefillSpec) -> None:
    times = [prefill_time(spec).seconds(int(tokens)) for tokens in LENGTHS]
    kind: Any = {LinearPrefill: "linear", QuadraticPrefill: "quadratic", PiecewisePrefill: "piecewise"}[type(spec)]
    fit = fit_prefill(LENGTHS, times, kind)
    assert fit.error.max_abs_relative < 1e-6
    assert fit.error.r2 > 1 - 1e-6
    assert fit.error.n == 7


@settings(deadline=None)
@given(st.floats(1e-3, 1), small_s, st.floats(0, 1e-6))
def test_a_decode_fit_recovers_its_coefficients(base: float, request: float, context: float) -> None:
    batch = np.array([1, 2, 4, 8, 16, 1, 1])
    contexts = batch * np.array([500, 700, 100, 300, 900, 4000, 8000])
    fit = fit_decode(batch, base + request * batch + context * contexts, contexts)
    assert fit.spec.base_s == pytest.approx(base, rel=1e-6)
    assert fit.spec.per_request_s == pytest.approx(request, rel=1e-6, abs=1e-9)
    assert fit.spec.per_context_token_s == pytest.approx(context, rel=1e-6, abs=1e-12)


@settings(deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=7, max_size=7))
def test_fits_of_any_measurements_are_valid(seconds: list[float]) -> None:
    """For any measurements, no coefficient is below 0, no time decreases, and there is no NaN."""
    for kind in ("linear", "quadratic", "piecewise"):
        fit = fit_prefill(LENGTHS, seconds, kind)
        assert prefill_time(fit.spec).seconds(100_000) >= 0
        assert np.isfinite([fit.error.mean_abs_relative, fit.error.max_abs_relative, fit.error.r2]).all()
    assert IterationTime.of(fit_decode(LENGTHS, seconds).spec).seconds(1) > 0


def test_a_decreasing_measurement_is_clamped_and_reported() -> None:
    linear = fit_prefill([100, 200, 300], [3.0, 2.0, 1.0])
    assert isinstance(linear.spec, LinearPrefill)
    assert linear.spec.per_token_s == 0
    assert linear.spec.base_s == pytest.approx(66 / 49)  # sum(1/s) / sum(1/s^2): the least relative errors
    assert linear.remarks == ("per_token would be negative and is set to 0",)
    pooled = fit_prefill([100, 200, 300], [1.0, 3.0, 2.0], "piecewise")
    assert pooled.spec == PiecewisePrefill(tokens=(100, 200, 300), seconds=(1.0, 2.5, 2.5))
    assert len(pooled.remarks) == 1


def test_a_context_proportional_to_the_batch_is_left_out_and_reported() -> None:
    fit = fit_decode([1, 2, 4], [1.1, 1.2, 1.4], [512, 1024, 2048])
    assert fit.spec.per_context_token_s == 0
    assert fit.spec.per_request_s == pytest.approx(0.1)
    assert "stays 0" in fit.remarks[0]


@pytest.mark.parametrize(
    ("tokens", "seconds", "kind", "what"),
    [
        ([1], [1.0], "linear", "1 different token counts"),
        ([1, 2], [1.0, 2.0], "quadratic", "measure 3"),
        ([1, 2], [1.0], "linear", "2 and 1 values are given"),
        ([1, 2], [1.0, 0.0], "linear", "seconds is 0.0"),
        ([1, float("nan")], [1.0, 1.0], "linear", "tokens is nan"),
        ([1, "x"], [1.0, 1.0], "linear", "not a number"),
    ],
)
def test_measurements_that_determine_nothing_are_rejected(tokens: Any, seconds: Any, kind: Any, what: str) -> None:
    with pytest.raises(InputError, match=what):
        fit_prefill(tokens, seconds, kind)


def test_plain_profiles_are_read(tmp_path: Path) -> None:
    prompts, steps = tmp_path / "prompts.csv", tmp_path / "steps.csv"
    prompts.write_text("tokens, seconds, note\n100, 0.11, a\n200, 0.12, b\n")
    steps.write_text("batch,context_tokens,seconds\n1,0,0.011\n2,0,0.012\n2,1000,0.013\n")
    prefill, none = fit_profile(read_profile(prompts))
    assert none is None
    assert prefill is not None
    assert isinstance(prefill.spec, LinearPrefill)
    assert (prefill.spec.per_token_s, prefill.spec.base_s) == pytest.approx((1e-4, 0.1))
    _, decode = fit_profile(read_profile(steps))
    assert decode is not None
    assert decode.spec.per_context_token_s == pytest.approx(1e-6)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("tokens,second\n1,2\n", "line 1: the column seconds is missing; it has tokens, second"),
        ("size,seconds\n1,2\n", "line 1: the column tokens or batch is missing"),
        ("tokens,seconds\n1,2\n2,x\n", "line 3 column seconds: 'x' is not a number"),
        ("tokens,seconds\n1,2\n-2,2\n", "line 3 column tokens: -2 is not valid"),
        ("tokens,seconds\n1,inf\n", "line 2 column seconds: inf is not valid"),
        ("tokens,seconds\n1,nan\n", "line 2 column seconds: nan is not valid"),
        ("tokens,seconds\n1\n", "line 2 column seconds: a number is missing"),
        ("batch,context_tokens,seconds\n1,-1,1\n", "line 2 column context_tokens: -1 is not valid"),
        ("tokens,seconds\n", "has no measurements"),
        ("", "has no measurements"),
        ("model,prompt_time\nx,1\n", "the column hardware, "),
        ("{}", "has no models"),
        ("{", "is not JSON"),
        ('{"m": {"1": {"prefill": [1, 2]}}}', r"prefill is \[1, 2\]"),
        ('{"m": {"1": 3}}', "no object under its tp"),
    ],
)
def test_errors_in_a_profile_are_named_with_their_place(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "profile"
    path.write_text(text)
    with pytest.raises(InputError, match=what):
        read_profile(path)


def test_unreadable_files_and_unneeded_options_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_profile(tmp_path / "none.csv")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(InputError, match="is not UTF-8 text"):
        read_profile(tmp_path / "binary")
    (tmp_path / "plain.csv").write_text("tokens,seconds\n1,2\n")
    with pytest.raises(InputError, match="remove --model"):
        read_profile(tmp_path / "plain.csv", model="x")


def test_splitwise_is_one_model_on_one_hardware() -> None:
    path = given_file(SPLITWISE)
    with pytest.raises(InputError, match="several values of model: bloom-176b, llama2-70b; choose with --model"):
        read_profile(path)
    with pytest.raises(InputError, match="no measurements for hardware b200; choose one of a100-80gb"):
        read_profile(path, model="llama2-70b", hardware="b200")
    profile = read_profile(path, model="llama2-70b", hardware="h100-80gb", tp=4)
    prefill, decode = fit_profile(profile, "piecewise")
    assert prefill is not None
    assert decode is not None
    assert profile.context_tokens is not None
    assert profile.context_tokens[0] / profile.batch[0] == 512 + 128 / 2  # the mean context while 128 tokens follow 512
    assert (len(profile.tokens), prefill.error.n, decode.error.n) == (75, 75, 105)
    assert prefill.error.mean_abs_relative < 0.03
    assert decode.error.mean_abs_relative < 0.03
    linear, _ = fit_profile(profile)
    assert linear is not None
    assert isinstance(linear.spec, LinearPrefill)
    assert linear.spec.per_token_s == pytest.approx(90e-6, rel=0.1)  # NetKV VI-A: about 0.09 ms and 20 ms
    assert linear.spec.base_s == pytest.approx(20e-3, rel=0.1)


def test_distserve_coefficients_are_recovered() -> None:
    path = given_file(DISTSERVE)
    first = json.loads(path.read_text())["facebook/opt-66b"]["4"]
    prefill, decode = fit_profile(read_profile(path, model="opt-66b", tp=4), "quadratic")
    assert prefill is not None
    assert decode is not None
    assert isinstance(prefill.spec, QuadraticPrefill)
    coefficients = (prefill.spec.base_s, prefill.spec.per_token_s, prefill.spec.per_token2_s)
    assert coefficients == pytest.approx([1e-3 * value for value in first["prefill"]], rel=1e-6)
    step = (decode.spec.base_s, decode.spec.per_context_token_s, decode.spec.per_request_s)
    assert step == pytest.approx([1e-3 * value for value in first["decoding_smallbs"]], rel=1e-6)


def test_a_negative_published_coefficient_is_clamped_to_0() -> None:
    prefill, _ = fit_profile(read_profile(given_file(VLLM), model="facebook/opt-66b", tp=2), "quadratic")
    assert prefill is not None
    assert isinstance(prefill.spec, QuadraticPrefill)
    assert prefill.spec.per_token2_s == 0
    assert "per_token2 would be negative and is set to 0" in prefill.remarks
    assert prefill.error.max_abs_relative < 0.02


@pytest.mark.parametrize("kind", ["linear", "quadratic", "piecewise"])
def test_the_command_prints_equivalent_yaml(tmp_path: Path, kind: str) -> None:
    prompts, steps = tmp_path / "prompts.csv", tmp_path / "steps.csv"
    prompts.write_text("tokens,seconds\n100,0.03\n200,0.04\n400,0.06\n")
    steps.write_text("batch,seconds\n1,0.0126\n2,0.0127\n")
    runner, arguments = CliRunner(), ["fit", str(prompts), str(steps), "--kind", kind]
    printed = runner.invoke(app, arguments)
    assert printed.exit_code == 0
    block = yaml.safe_load(printed.stdout)["timing"]["default"]
    document = json.loads(runner.invoke(app, [*arguments, "--json"]).stdout)
    assert block["prefill"]["kind"] == kind == document["prefill"]["spec"]["type"]
    if kind == "piecewise":
        assert block["prefill"]["tokens"] == [100, 200, 400]
        assert [duration_s(text) for text in block["prefill"]["times"]] == [0.03, 0.04, 0.06]
    else:
        assert duration_s(block["prefill"]["per_token"]) == pytest.approx(1e-4, rel=1e-5)
        assert duration_s(block["prefill"]["base"]) == pytest.approx(0.02, rel=1e-5)
    assert duration_s(block["decode"]["base"]) == pytest.approx(12.5e-3, rel=1e-5)
    assert duration_s(block["decode"]["per_request"]) == pytest.approx(1e-4, rel=1e-5)
    assert document["decode"]["spec"]["base_s"] == pytest.approx(12.5e-3)


def test_the_command_reports_missing_and_conflicting_options(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.csv"
    prompts.write_text("tokens,seconds\n100,0.03\n200,0.04\n")
    runner = CliRunner()
    alone = runner.invoke(app, ["fit", str(prompts)])
    assert "# decode: not measured" in alone.stdout
    doubled = runner.invoke(app, ["fit", str(prompts), str(prompts)]).exception
    assert isinstance(doubled, InputError)
    assert "a second time" in str(doubled)
    assert "--name" in str(runner.invoke(app, ["fit", str(prompts), "--name", "a: b"]).exception)
