"""Live: two servers in bfloat16, as most models run: the first step of one is a decode, and probabilities agree."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.live.vllm.conftest import BLOCK_TOKENS, LAYER_BYTES, MODEL, start_member, wait_ready
from tests.live.vllm.test_vllm_pair import REMOTE_DECODE, prompt, pulled

from kvroute_engine.connector.amx import CPUINFO, cpu_flags, request_permission

if TYPE_CHECKING:
    from tests.live.vllm.conftest import Pair, Server

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]
HERE = Path(__file__).parent
LAYERS = 4
ANSWER_TOKENS = 16
TOLERANCE = 0.5
"""Tolerance of a natural logarithm. Logits here are about ten to a hundred, of which bfloat16 keeps eight bits."""


@dataclass(frozen=True)
class Half:
    """One prefill and one decode server."""

    prefill: Server
    decode: Server


@pytest.fixture(scope="module")
def half(cluster: Pair) -> Iterator[Half]:
    """New servers that have computed nothing."""
    servers = Half(
        start_member("kv_producer", "prefill16", cluster.model, cluster.folder, dtype="bfloat16"),
        start_member("kv_consumer", "decode16", cluster.model, cluster.folder, dtype="bfloat16"),
    )
    try:
        wait_ready([servers.prefill, servers.decode])
        yield servers
    finally:
        servers.prefill.kill()
        servers.decode.kill()


@dataclass(frozen=True)
class Scored:
    """The tokens of a response, the logarithm of each token's probability, and those of the most likely
    alternatives."""

    tokens: list[str]
    scores: list[float]
    likely: list[dict[str, float]]


def answer(server: Server, tokens: list[int], params: dict[str, Any] | None = None) -> Scored:
    """Request a greedy completion."""
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": tokens,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 5,
        "return_tokens_as_token_ids": True,
    }
    reply = server.post("/v1/completions", body | ({"kv_transfer_params": params} if params else {}))
    logprobs = reply["choices"][0]["logprobs"]
    return Scored(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"])


def fetched(half: Half, tokens: list[int]) -> Scored:
    """Return a response that was prefilled by one server and decoded by the other."""
    body = {"model": MODEL, "prompt": tokens, "max_tokens": 1, "kv_transfer_params": REMOTE_DECODE}
    params = half.prefill.post("/v1/completions", body)["kv_transfer_params"]
    return answer(half.decode, tokens, params)


def alone(half: Half, tokens: list[int]) -> Scored:
    """Return the response of one server that has no part of the prompt cached."""
    half.prefill.post("/reset_prefix_cache", {})
    return answer(half.prefill, tokens)


def distance(one: Scored, other: Scored) -> float:
    """Return the largest difference of scores up to and including the first different token."""
    largest = 0.0
    for k, (token, expected) in enumerate(zip(one.tokens, other.tokens, strict=True)):
        largest = max(largest, abs(one.scores[k] - other.likely[k].get(token, float("-inf"))))
        if token != expected:
            break  # the following tokens have different prefixes
    return largest


def test_the_first_step_of_a_process_may_be_a_decode(half: Half) -> None:
    """The whole prompt is fetched, so that no prefill comes first; on a CPU with AMX the server would end if its worker
    had not requested AMX, and the worker warns only if the kernel refuses."""
    assert half.decode.metric("vllm:request_success_total") == 0
    tokens = prompt(300, seed=90_000)
    got = fetched(half, tokens)
    assert half.decode.alive
    blocks = -(-300 // BLOCK_TOKENS)
    assert pulled(half.decode) == (1, LAYERS * blocks * LAYER_BYTES / 2, 0)
    assert distance(got, alone(half, tokens)) < TOLERANCE
    refused = "amx_tile" in cpu_flags(CPUINFO.read_text(encoding="utf-8")) and request_permission() != ""
    assert ("AMX tiles" in half.decode.log.read_text(encoding="utf-8", errors="replace")) == refused


@pytest.mark.parametrize("tokens", [45, 1000, 2100])
def test_probabilities_agree_with_those_of_one_server(half: Half, tokens: int) -> None:
    """Tokens may differ where two are almost equally likely."""
    prompt_ids = prompt(tokens, seed=91_000 + tokens)
    assert distance(fetched(half, prompt_ids), alone(half, prompt_ids)) < TOLERANCE


def test_a_damaged_block_changes_the_probabilities(half: Half) -> None:
    """The negative control of the tests above."""
    prompt_ids = prompt(300, seed=92_000)
    half.prefill.fault_file.write_text("corrupt-layer-2", encoding="utf-8")
    damaged = fetched(half, prompt_ids)
    half.prefill.fault_file.unlink()
    assert distance(damaged, alone(half, prompt_ids)) > TOLERANCE


def test_a_worker_requests_amx_before_its_first_step(pair: Pair, tmp_path: Path) -> None:
    """The worker requests AMX when its KV cache is registered, if the CPU has it, and reports the kernel's answer; a
    refusal has no other effect."""
    files = [tmp_path / "none", tmp_path / "amx"]
    for file, flags in zip(files, ("fpu avx2", "fpu amx_tile avx2"), strict=True):
        file.write_text(f"flags\t: {flags}\n", encoding="utf-8")
    command = [pair.python, HERE / "check_amx.py", *files]
    done = subprocess.run(command, env=pair.environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    _, without, with_amx = done.stdout.split("registering")
    assert "AMX tiles" not in without
    answer_of_kernel = "does not let this process use" if request_permission() else "this process may use"
    assert f"{answer_of_kernel} the CPU's AMX tiles" in with_amx
