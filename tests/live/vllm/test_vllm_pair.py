"""Live: prompts prefilled by one vLLM server and decoded by another give the tokens of one server alone."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.live.vllm.conftest import Pair, Server

pytestmark = [pytest.mark.live, pytest.mark.timeout(400)]
HERE = Path(__file__).parent
ANSWER_TOKENS = 32
BLOCK_TOKENS = 32
ASK = {"do_remote_decode": True, "do_remote_prefill": False}
LAYER_BYTES = 2 * 2 * 64 * BLOCK_TOKENS * 2
"""Of one block: keys and values, 2 heads of 64 numbers, in bfloat16."""


def prompt(tokens: int, seed: int) -> list[int]:
    """Random token ids, none of them special."""
    draw = random.Random(seed)
    return [draw.randrange(3, 420) for _ in range(tokens)]


def complete(server: Server, tokens: list[int], count: int, params: dict[str, Any] | None = None) -> dict[str, Any]:
    """Greedy."""
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": tokens,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return server.post("/v1/completions", body | ({"kv_transfer_params": params} if params else {}))


def answer(reply: dict[str, Any]) -> list[int]:
    """The tokens of a completion."""
    tokens: list[int] = reply["choices"][0]["token_ids"]
    return tokens


def handover(pair: Pair, tokens: list[int]) -> dict[str, Any]:
    """What the prefill server says after computing the prompt."""
    params: dict[str, Any] = complete(pair.prefill, tokens, 1, ASK)["kv_transfer_params"]
    return params


def alone(pair: Pair, tokens: list[int]) -> list[int]:
    """What one server answers that computes everything itself: the prefill server, its cache emptied."""
    # Blocks that are still held keep vLLM from emptying its cache; they are let go a step after the transfer.
    for _ in range(50):
        pair.prefill.post("/reset_prefix_cache", {})
        reply = complete(pair.prefill, tokens, ANSWER_TOKENS)
        if not reply["usage"]["prompt_tokens_details"]["cached_tokens"]:
            return answer(reply)
    raise AssertionError("the prefill server's cache cannot be emptied: it still holds blocks")


def pulled(server: Server) -> tuple[float, float, float]:
    """Transfers, bytes and failures so far. vLLM reports them a step later than it answers."""
    names = ("kvroute:kv_transfers_total", "kvroute:kv_transfer_bytes_total", "kvroute:kv_transfer_failures_total")
    transfers, nbytes, failures = (server.metric(name, engine="0") for name in names)
    return transfers, nbytes, failures


@pytest.mark.parametrize("tokens", [20, 32, 45, 200, 1000, 2100, 3500])
def test_tokens_equal_those_of_one_server(pair: Pair, tokens: int) -> None:
    """Any length: part of a block, whole blocks, and more than one chunk of prefill (2,048 tokens)."""
    asked = prompt(tokens, seed=tokens)
    before = pulled(pair.decode)
    reply = complete(pair.decode, asked, ANSWER_TOKENS, handover(pair, asked))
    blocks = -(-tokens // BLOCK_TOKENS)
    transfers, nbytes, failures = (now - then for now, then in zip(pulled(pair.decode), before, strict=True))
    assert (transfers, nbytes, failures) == (1, 4 * blocks * LAYER_BYTES, 0)
    assert answer(reply) == alone(pair, asked)


def test_only_what_is_missing_is_pulled(pair: Pair) -> None:
    """A prompt that begins with one the decode server knows: its whole blocks stay where they are."""
    first = prompt(320, seed=1)
    complete(pair.decode, first, 1, handover(pair, first))
    longer = first + prompt(100, seed=2)
    before = pulled(pair.decode)
    reply = complete(pair.decode, longer, ANSWER_TOKENS, handover(pair, longer))
    nbytes = pulled(pair.decode)[1] - before[1]
    assert nbytes == 4 * 4 * LAYER_BYTES
    assert answer(reply) == alone(pair, longer)


def test_a_damaged_layer_changes_the_tokens_and_a_checksum_heals_it(pair: Pair) -> None:
    """The control: equality above is no accident. With checksums vLLM computes the prompt again."""
    bare, checked = prompt(300, seed=3), prompt(300, seed=4)
    pair.prefill.fault_file.write_text("corrupt-layer-2", encoding="utf-8")
    try:
        damaged = answer(complete(pair.decode, bare, ANSWER_TOKENS, handover(pair, bare) | {"checksum": False}))
        failed = pair.decode.metric("kvroute:kv_transfer_failures_total", reason="checksum")
        healed = answer(complete(pair.decode, checked, ANSWER_TOKENS, handover(pair, checked)))
    finally:
        pair.prefill.fault_file.unlink()
    assert pair.decode.metric("kvroute:kv_transfer_failures_total", reason="checksum") == failed + 1
    assert damaged != alone(pair, bare)
    assert healed == alone(pair, checked)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"remote_request_id": "nobody"}, "unknown", id="unknown-request"),
        pytest.param({"remote_port": 1}, "refused", id="nobody-listens"),
    ],
)
def test_what_cannot_be_pulled_is_computed(pair: Pair, change: dict[str, Any], reason: str) -> None:
    """A wrong handover costs time, not the answer."""
    asked = prompt(150, seed=5 + len(reason))
    failed = pair.decode.metric("kvroute:kv_transfer_failures_total", reason=reason)
    told = handover(pair, asked)
    reply = complete(pair.decode, asked, ANSWER_TOKENS, told | change)
    assert pair.decode.metric("kvroute:kv_transfer_failures_total", reason=reason) == failed + 1
    complete(pair.decode, asked, 1, told)  # has it all by now, and says so to the prefill server
    assert answer(reply) == alone(pair, asked)


def test_another_prompts_blocks_are_not_taken(pair: Pair) -> None:
    """A handover that belongs to other tokens is noticed before a byte is pulled."""
    asked, other = prompt(100, seed=20), prompt(100, seed=21)
    before = pulled(pair.decode)
    reply = complete(pair.decode, asked, ANSWER_TOKENS, handover(pair, other))
    assert pulled(pair.decode) == before
    assert answer(reply) == alone(pair, asked)


def test_cache_tensors_of_every_layout_become_regions(pair: Pair) -> None:
    """Six layouts, each straight from memory and through a host buffer, and two that are refused."""
    told = subprocess.run(
        [pair.python, HERE / "check_regions.py"], env=pair.environment(), capture_output=True, text=True
    )
    assert told.stdout.strip() == "14", told.stderr
