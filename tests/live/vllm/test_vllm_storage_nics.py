"""Live: real vLLM reads cached KV through storage NICs of limited bandwidth, in network namespaces."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from bench.wan.network import Unavailable
from tests.live.services import missing
from tests.live.vllm.conftest import Pair
from tests.live.vllm.gateway_rig import all_up, alone, prompt, serving, until
from tests.live.vllm.storage_nics import (
    ANSWER_TOKENS,
    APPENDED_TOKENS,
    CONTEXT_TOKENS,
    Stored,
    contexts,
    fill,
    measured,
    stored_behind_nics,
)
from tests.live.vllm.test_vllm_storage import BLOCK_BYTES, ask

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]
AGENTS = 9
BALANCE_MAX = 1.2
"""Maximum bytes of a storage NIC divided by their mean, for a read path that uses all of them."""


@pytest.fixture(scope="module")
def stored(cluster: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    """The servers behind storage NICs."""
    try:
        with stored_behind_nics(cluster.model, tmp_path_factory.mktemp("nics"), cluster.alone) as found:
            yield found
    except Unavailable as error:
        missing(str(error))


@pytest.mark.parametrize("reads", ["prefill", "shorter", "split"])
def test_every_read_path_gives_the_tokens_of_one_server(stored: Stored, tmp_path: Path, reads: str) -> None:
    """The store's bytes cross the NICs of the read path: one, or all three alike."""
    outcome = measured(stored, tmp_path / "run", reads, AGENTS, seed=100 * len(reads))
    assert outcome.answers == [alone(stored.cluster.pair, turn, ANSWER_TOKENS) for turn in outcome.turns]
    assert outcome.failed == 0
    payload = AGENTS * CONTEXT_TOKENS // 32 * BLOCK_BYTES
    assert payload < sum(outcome.read_bytes) < 1.2 * payload
    if reads == "prefill":
        assert outcome.read_bytes[0] > 0.99 * sum(outcome.read_bytes)
    else:
        assert outcome.balance <= BALANCE_MAX


def test_a_node_that_dies_while_it_reads_costs_only_time(stored: Stored, tmp_path: Path) -> None:
    """The decode server and the buffer server of the node are killed; the request is computed and decoded elsewhere."""
    with serving(stored.cluster.pair, tmp_path, text=stored.file("alternating")) as gateway:
        all_up(gateway, stored.cluster.pair)
        prompts = contexts(2, seed=7000)
        fill(stored, gateway, prompts)
        turns = [[*tokens, *prompt(APPENDED_TOKENS, seed=at)] for at, tokens in enumerate(prompts)]
        assert ask(gateway, turns[0], ANSWER_TOKENS) == alone(
            stored.cluster.pair, turns[0], ANSWER_TOKENS
        )  # the prefill node reads
        before = stored.network.received_bytes()
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(ask, gateway, turns[1], ANSWER_TOKENS)
            readers = {1: "decode0", 2: "decode1"}
            until(lambda: any(reading(stored, before, number) for number in readers))
            (number,) = [number for number in readers if reading(stored, before, number)]
            server = {1: stored.cluster.pair.decode, 2: stored.cluster.pair.other}[number]
            stored.cluster.buffers[readers[number]].kill()
            server.kill()
            assert asked.result() == alone(stored.cluster.pair, turns[1], ANSWER_TOKENS)
        failed = gateway.metric("kvroute_storage_reads_total", side="decode", outcome="failed")
    assert failed == 1


def reading(stored: Stored, before: list[int], number: int) -> bool:
    """Return whether a node has read some of its blocks."""
    return stored.network.received_bytes()[number] > before[number] + BLOCK_BYTES
