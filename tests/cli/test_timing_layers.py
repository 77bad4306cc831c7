"""`kvroute timing from layers`: a timing from tables of layers, its error and its range."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.cli_rig import Kvroute, document
from tests.timing.test_steps import written

MODEL = ("--model", "llama-2-7b", "--experts", "2")


def test_a_timing_is_printed_with_its_error_and_range(kvroute: Kvroute, tmp_path: Path) -> None:
    ended = kvroute("timing", "from", "layers", str(written(tmp_path)), *MODEL, "--name", "layers")
    limits = "prompts of 16 to 32 tokens, batches of 1 to 2 requests with a mean of 16 to 32 tokens"
    assert ended.out.startswith(f"timing:\n  layers:\n    # fitted on {limits}\n    prefill: {{kind: linear, ")
    assert "decode: 4 measurements, mean error" in ended.err
    assert f"range: {limits}; beyond it" in ended.err


def test_json_has_the_range_and_options_change_the_times(kvroute: Kvroute, tmp_path: Path) -> None:
    """Half a millisecond in each step goes into both bases."""
    folder = str(written(tmp_path))
    plain, slower = (
        document(kvroute("timing", "from", "layers", folder, *MODEL, *more, "--json"))
        for more in ((), ("--step", "500us"))
    )
    assert plain["range"] == {"prompt_tokens": [16, 32], "batch": [1, 2], "context_tokens_mean": [16, 32]}
    for part in ("prefill", "decode"):
        assert slower[part]["spec"]["base_s"] - plain[part]["spec"]["base_s"] == pytest.approx(5e-4, rel=0.2)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--model", "llama-2-7b"), "llama-2-7b is a mixture of experts"),
        (("--model", "llama-2-7b", "--experts", "2", "--experts-per-token", "3"), "a token uses 3 of 2 experts"),
        ((*MODEL, "--link", "16 GBytes"), "--link"),
        ((*MODEL, "--tp", "4"), r"there is no table tp4_dense\.csv"),
        ((), "there is no meta.yaml that names the model"),
    ],
)
def test_faults_are_one_sentence(kvroute: Kvroute, tmp_path: Path, options: tuple[str, ...], problem: str) -> None:
    ended = kvroute("timing", "from", "layers", str(written(tmp_path)), *options)
    assert ended.code == 2
    assert problem.replace("\\", "") in ended.err
    assert ended.err.count("\n") == 1


def test_a_folder_that_does_not_exist_is_named(kvroute: Kvroute, tmp_path: Path) -> None:
    ended = kvroute("timing", "from", "layers", str(tmp_path / "gone"))
    assert (ended.code, "gone: the folder does not exist" in " ".join(ended.err.split())) == (2, True)
