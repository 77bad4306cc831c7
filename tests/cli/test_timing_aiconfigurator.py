"""`kvroute timing from aiconfigurator`: with the real library, and faults in one sentence without it."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import pytest
from tests.cli.cli_rig import Kvroute, document

COMMAND = ("timing", "from", "aiconfigurator", "--system", "h200_sxm", "--backend", "vllm", "--model")
INSTALLED = pytest.mark.skipif(
    not os.environ.get("KVROUTE_REQUIRE_LIVE") and find_spec("aiconfigurator_core") is None,
    reason="not installed: uv pip install -r requirements/live.txt",
)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("Qwen3-32B", "--speculative", "3"), "--speculative and --acceptance belong together"),
        (("Qwen3-32B", "--acceptance", "0.5"), "--speculative and --acceptance belong together"),
        (("Qwen3-32B", "--name", "1"), "'1' is not a valid name"),
    ],
)
def test_options_that_do_not_fit_are_one_sentence(kvroute: Kvroute, options: tuple[str, ...], problem: str) -> None:
    ended = kvroute(*COMMAND, *options)
    assert (ended.code, problem in ended.err, ended.err.count("\n")) == (2, True, 1), ended.err


def test_without_the_library_the_extra_is_named(kvroute: Kvroute, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk", None)
    ended = kvroute(*COMMAND, "Qwen3-32B")
    assert (ended.code, "pip install 'kvroute[aiconfigurator]'" in ended.err) == (2, True), ended.err


@pytest.mark.live
@INSTALLED
def test_the_library_has_a_real_engine(kvroute: Kvroute) -> None:
    """Qwen3-32B on four H200: a decode step reads 16 GB of weights per GPU, 3.4 ms at 4.8 TB/s."""
    found = document(kvroute(*COMMAND, "Qwen3-32B", "--tp", "4", "--json"))
    assert 3.4e-3 < found["decode"]["spec"]["base_s"] < 15e-3
    assert found["decode"]["error"]["mean_abs_relative"] < 0.1
    assert found["range"] == {"prompt_tokens": [128, 8192], "batch": [1, 128], "context_tokens_mean": [512, 8192]}


@pytest.mark.live
@INSTALLED
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("Qwen3-32B", "--system", "h300"), "aiconfigurator has no system 'h300'; choose one of "),
        (("llama-2-7b",), "aiconfigurator does not know the model 'llama-2-7b'; choose one of meta-llama/"),
        (("x/y",), "does not know the model 'x/y'; give a folder with the model's config.json"),
        (("Qwen3-32B", "--tp", "3"), "has no times for this engine (num_heads 64 should be divisible by tp_size 3)"),
        (("Qwen3-32B", "--tp", "4", "--ep", "3"), "--ep: 3 expert-parallel ranks do not divide tp * dp = 4 GPUs"),
        (("DeepSeek-R1", "--tp", "8", "--backend", "trtllm"), "give --attention bfloat16, or another backend"),
    ],
)
def test_engines_that_the_library_lacks_are_one_sentence(
    kvroute: Kvroute, options: tuple[str, ...], problem: str
) -> None:
    ended = kvroute(*COMMAND, *options)
    assert (ended.code, problem in ended.err, ended.err.count("\n")) == (2, True, 1), ended.err
