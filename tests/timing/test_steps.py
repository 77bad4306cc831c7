"""Times of steps: linear, by operations and bytes, of a timing, and from tables of layers."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.timing.fit import fit_profile
from kvroute.timing.layers import AllReduceLink, ExpertShape, LayerSteps, LayerTables
from kvroute.timing.steps import (
    GpuRates,
    LinearSteps,
    ModelCosts,
    RooflineSteps,
    ScaledSteps,
    StepWork,
    timing_steps,
)
from kvroute.types import DecodeSpec, InputError, LinearPrefill, TimingSpec

WORK = StepWork(((0, 100), (50, 20)), 8, 4000)
works = st.builds(
    StepWork,
    st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 900)), max_size=3).map(tuple),
    st.integers(0, 64),
    st.integers(64, 90_000),
).map(lambda work: work if work.decoding else work._replace(context_tokens=0))


def test_linear_steps() -> None:
    assert LinearSteps(1.0, 0.5, 0.25, 0.125)(WORK) == 1.0 + 0.5 * 120 + 0.25 * 8 + 0.125 * 4000
    assert ScaledSteps(LinearSteps(1.0, 0.5, 0.25, 0.125), 2.0)(WORK) == 2 * (1.0 + 60 + 2 + 500)
    assert WORK.tokens == 128


def test_steps_of_a_timing_add_prompts_to_the_batch() -> None:
    """Prompts beside a batch take their tokens' time; without a batch the base of the prefill is paid once."""
    timing = TimingSpec(
        prefill=LinearPrefill(base_s=3.0, per_token_s=0.5),
        decode=DecodeSpec(base_s=2.0, per_request_s=0.25, per_context_token_s=0.125),
    )
    steps = timing_steps(timing)
    assert steps(WORK) == 2.0 + 0.25 * 8 + 0.125 * 4000 + 0.5 * 120
    assert steps(StepWork(((0, 100), (50, 20)))) == 3.0 + 0.5 * 120
    assert steps(StepWork((), 8, 4000)) == 2.0 + 2.0 + 500.0


MODEL = ModelCosts(layers=2, hidden=8, kv_heads=1, parameters=1000.0, active_parameters=1000.0, head_dim=4)
GPU = GpuRates(
    flop_per_s=1000.0,
    bytes_per_s=100.0,
    compute_share=1.0,
    memory_share=1.0,
    attention_share=1.0,
    all_reduce_s=3.0,
    wire_bytes_per_s=10.0,
    step_s=1.0,
)


def test_a_step_by_operations_and_bytes() -> None:
    """One token: 2,000 bytes of weights take 20 s, its 2,000 operations 2 s. 20 tokens are bound by operations."""
    steps = RooflineSteps(MODEL, GPU)
    assert steps(StepWork((), 1, 0)) == 20.0 + 1.0
    assert steps(StepWork((), 1, 50)) == 20.0 + 1.0 + 32 * 50 / 100
    attention_s = 4 * 2 * 8 * 20 * (10 + 10) / 1000
    assert steps(StepWork(((10, 20),))) == pytest.approx(40.0 + 1.0 + attention_s)


def test_ranks_divide_a_step_and_exchange_its_tokens() -> None:
    """Two ranks: half of each term, and four all-reduces of 3 s and of the bytes of 20 tokens at 10 bytes a second."""
    alone, both = RooflineSteps(MODEL, GPU), RooflineSteps(MODEL, GPU, tp=2)
    work = StepWork(((10, 20),), 5, 100)
    tokens = 25
    exchange_s = 2 * 2 * (3.0 + 4 * tokens * 8 * 0.5 / 10.0)
    assert both(work) == pytest.approx(1.0 + (alone(work) - 1.0) / 2 + exchange_s)


def test_experts_that_no_token_uses_are_not_read() -> None:
    """Four experts of 200, one a token, beside 200 parameters: one token reads 400, many tokens read all 1,000."""
    model = ModelCosts(2, 8, 1, parameters=1000.0, active_parameters=400.0, experts=4, experts_per_token=1)
    assert model.read_bytes(1) == pytest.approx(2 * 400)
    assert model.read_bytes(2) == pytest.approx(2 * (200 + 800 * (1 - 0.75**2)))
    assert model.read_bytes(1000) == pytest.approx(2 * 1000)


TABLES = {
    "tp1_dense.csv": "layer,tokens,time_us\nembedding,1,5\nembedding,11,15\nlayernorm,1,1\nlayernorm,11,11\n"
    "mlp,1,10\nmlp,11,30\n",
    "tp1_per_sequence.csv": "layer,sequences,time_us\nlm_head,1,100\nlm_head,11,200\n",
    "tp1_moe.csv": "tokens,activated_experts,time_us\n1,1,10\n11,1,20\n1,2,30\n11,2,60\n",
}


def written(folder: Path, **other: str) -> Path:
    """Write the tables: attention takes chunk + before / 8 + 10 per request + mean / 4, in microseconds."""
    points = [
        (c, b, n, m)
        for c in (0, 16, 32)
        for b in (0, 16)
        for n in (0, 1, 2)
        for m in (0, 16, 32)
        if (c or n) and (c or not b)
    ]
    lines = ["prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"]
    lines += [
        f"{c},{b},{n},{m},{c + b / 8 + 10 * n + m / 4}"
        for c, b, n, m in points
        if bool(n) == bool(m) and (c, n) != (32, 2)
    ]
    (folder / "tp1_attention.csv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    for name, text in (TABLES | other).items():
        (folder / name).write_text(text)
    return folder


def test_steps_are_sums_over_layers(tmp_path: Path) -> None:
    """Five prompt tokens after 8 beside one request with 24 tokens: six tokens, two sequences, three layers."""
    steps = LayerSteps(LayerTables.read(written(tmp_path), 1), layers=3, step_s=1.0)
    dense_us = 10 + 3 * (2 * 6 + 20)
    attention_us = 5 + 0 / 8 + 10 + 24 / 4  # 8 computed tokens are rounded to 0
    assert steps(StepWork(((8, 5),), 1, 24)) == pytest.approx(1.0 + 1e-6 * (dense_us + 3 * attention_us + 110))


def test_a_batch_beside_a_prompt_that_was_not_measured_is_extrapolated(tmp_path: Path) -> None:
    """Two requests beside a chunk of 32 are twice one beside it, less the chunk."""
    steps = LayerSteps(LayerTables.read(written(tmp_path), 1), layers=1)
    times_us = [1e6 * steps(StepWork(((0, 32),), n, 16 * n)) for n in (1, 2)]
    others_us = [(32 + n + 4) + 2 * (32 + n) + (2 * (32 + n) + 8) + 90 + 10 * (n + 1) for n in (1, 2)]
    attention_us = [32 + n * (10 + 4) for n in (1, 2)]
    assert times_us == pytest.approx([a + b for a, b in zip(others_us, attention_us, strict=True)])


def test_ranks_wait_for_the_slowest_and_share_the_experts(tmp_path: Path) -> None:
    """Two experts on two ranks, each token uses one: with 4 tokens 1 - 1/16 of an expert per rank, so the table's first
    column. The exchange is that of the rank with three tokens."""
    tables, link = LayerTables.read(written(tmp_path), 1), AllReduceLink(100.0, 2.0, 10.0)
    steps = LayerSteps(tables, layers=2, experts=ExpertShape(2, 1, 2), link=link)
    ranks = [StepWork(((0, 3),)), StepWork((), 1, 16)]
    alone = LayerSteps(tables, layers=2)
    experts_us = 10 + 10 * (2 - 1) / 10
    exchange_s = 2 * 2 * (2.0 + 3 * 10.0 / 100.0)
    slowest_s = max(map(alone, ranks))
    assert steps.together(ranks) == pytest.approx(slowest_s + 2e-6 * experts_us + exchange_s)


def test_a_profile_of_the_tables_is_fitted(tmp_path: Path) -> None:
    prefill, decode = fit_profile(LayerSteps(LayerTables.read(written(tmp_path), 1), layers=3).profile("tables"))
    assert prefill is not None
    assert decode is not None
    assert (prefill.error.n, decode.error.n) == (2, 4)
    assert decode.error.max_abs_relative < 0.03


@given(works)
def test_times_are_positive_and_grow_with_the_work(work: StepWork) -> None:
    steps = RooflineSteps(ModelCosts(32, 4096, 8, 7e9, 7e9), GPU, tp=2)
    more = StepWork((*work.prompts, (0, 5)), work.decoding + 1, work.context_tokens + 9)
    assert 0 < steps(work) < steps(more)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("tp1_dense.csv", "layer,tokens\nmlp,1\n", "the column time_us is missing"),
        ("tp1_dense.csv", "layer,tokens,time_us\nmlp,1,fast\n", "line 2 has no number in one of tokens, time_us"),
        ("tp1_per_sequence.csv", "layer,sequences,time_us\nlm_head,1\n", "line 2 has no number in one of sequences"),
    ],
)
def test_faults_of_a_table_name_the_place(tmp_path: Path, name: str, text: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem) as raised:
        LayerTables.read(written(tmp_path, **{name: text}), 1)
    assert raised.value.where == str(tmp_path / name)


def test_a_missing_degree_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no table tp2_dense\.csv"):
        LayerTables.read(written(tmp_path), 2)
