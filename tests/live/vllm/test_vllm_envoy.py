"""Live: real vLLM behind Envoy and `kvroute epp`, one server for prefill and one for decode; equal tokens, KV that is
transferred only with the right parameters, and clients that leave."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.live.envoy import picker_is_healthy, start_envoy
from tests.live.services import extent
from tests.live.vllm.conftest import BLOCK_TOKENS, LAYER_BYTES, free_ports
from tests.live.vllm.gateway_rig import (
    GREEDY,
    TOKENS,
    Gateway,
    all_up,
    alone,
    cluster_file,
    measured_bytes,
    openai_client,
    prompt,
    pulled_bytes,
    running,
    token_ids,
    until,
)
from tests.live.vllm.leaving_clients import leave_at_any_time
from tests.live.vllm.test_vllm_abandoned import EXPIRED, nothing_has_expired
from tests.live.vllm.test_vllm_pair import complete, params_for, pulled

if TYPE_CHECKING:
    from tests.live.vllm.conftest import Pair, Server

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]
BLOCK_BYTES = 4 * LAYER_BYTES
ABORTED = extent(300, short=60)
"""Number of requests whose clients leave."""
CONTEXT_TOKENS = 4_000
"""Length of a request that leaves early, in tokens with its output: a short prompt decodes for many seconds."""


def servers(pair: Pair) -> list[Server]:
    """Return the servers behind Envoy."""
    return [pair.prefill, pair.decode]


@pytest.fixture(scope="module")
def process(cluster: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """One picker and one Envoy for all tests of the module."""
    folder = tmp_path_factory.mktemp("picker")
    cluster.restart_dead_servers()
    before, config = pulled_bytes(cluster), folder / "envoy.json"
    listen, admin = (f"127.0.0.1:{port}" for port in free_ports(2))
    options = ["--port", "0", "--prefill-by", "picker", "--envoy-config", str(config)]
    options += ["--envoy-listen", listen, "--envoy-admin", admin]
    text = cluster_file(cluster, {}, servers(cluster))
    with (
        running("epp", text, folder, *options) as (picker, addresses),
        envoy(config, f"http://{admin}/clusters", picker_is_healthy),
    ):
        yield Gateway(picker, f"http://{listen}", addresses["admin"], folder / "events.log", before)


@contextmanager
def envoy(config: Path, page: str, is_ready: Callable[[str], bool]) -> Iterator[None]:
    """Run Envoy. Args: `is_ready` takes the text of `page`, a URL of its admin interface."""
    errors = config.with_suffix(".log")
    process = start_envoy(config, errors)

    def ready() -> bool:
        assert process.poll() is None, errors.read_text(encoding="utf-8")
        try:
            with urllib.request.urlopen(page, timeout=10.0) as answer:
                return is_ready(answer.read().decode())
        except OSError:
            return False

    try:
        until(ready)
        yield
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture
def front(process: Gateway, pair: Pair) -> Gateway:
    """Envoy with its picker, once that reports both servers as up."""
    all_up(process, pair, servers(pair))
    return process


@pytest.fixture(scope="module")
def without_picker(cluster: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an Envoy whose picker does not run: it fails open, so the decode server gets each body as the client
    has sent it."""
    folder = tmp_path_factory.mktemp("no-picker")
    file, config = folder / "cluster.yaml", folder / "envoy.json"
    file.write_text(cluster_file(cluster, {}, servers(cluster)), encoding="utf-8")
    listen, admin, nothing = free_ports(3)
    options = ["--port", str(nothing), "--fail", "open", "--envoy-listen", f"127.0.0.1:{listen}"]
    options += ["--envoy-admin", f"127.0.0.1:{admin}", "--print-envoy-config"]
    command = [sys.executable, "-m", "kvroute.cli.app", "epp", str(file), *options]
    config.write_text(subprocess.run(command, check=True, capture_output=True, text=True).stdout, encoding="utf-8")
    with envoy(config, f"http://127.0.0.1:{admin}/ready", lambda page: page.strip() == "LIVE"):
        yield f"http://127.0.0.1:{listen}"


def whole(url: str, tokens: list[int], **more: Any) -> list[int]:
    """Return the tokens of a response that is not streamed."""
    with openai_client(url) as client:
        reply = client.completions.create(model="tiny", prompt=tokens, extra_body=TOKENS | more, **GREEDY)
    return token_ids(reply.choices[0])


def streamed(url: str, tokens: list[int]) -> list[int]:
    """Return the tokens of a stream, which must end with the reason for its end."""
    with openai_client(url) as client:
        chunks = list(client.completions.create(model="tiny", prompt=tokens, stream=True, extra_body=TOKENS, **GREEDY))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert choices[-1].finish_reason == "length"
    return [token for choice in choices for token in token_ids(choice)]


def transferred_tokens(server: Server) -> float:
    """Return the prompt tokens that vLLM has not computed because their KV came from another server."""
    return server.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")


@pytest.mark.parametrize("tokens", [20, 300, 2100, 3500])
def test_tokens_through_envoy_equal_those_of_one_server(pair: Pair, front: Gateway, tokens: int) -> None:
    """Streamed or not, each with a separate prompt. The decode server has pulled every block of both from the prefill
    server, and has not computed their tokens; the picker knows these bytes from the counters."""
    prompts = prompt(tokens, seed=60_000 + tokens), prompt(tokens, seed=70_000 + tokens)
    before, loaded = pulled(pair.decode), transferred_tokens(pair.decode)
    prefills = front.metric("kvroute_decisions_total", kind="prefill", engine="prefill0")
    got = whole(front.url, prompts[0]), streamed(front.url, prompts[1])
    blocks = -(-tokens // BLOCK_TOKENS)
    transfers, nbytes, failures = (now - then for now, then in zip(pulled(pair.decode), before, strict=True))
    assert (transfers, nbytes, failures) == (2, 2 * blocks * BLOCK_BYTES, 0)
    assert transferred_tokens(pair.decode) - loaded >= 2 * (tokens - 1)
    assert front.metric("kvroute_decisions_total", kind="prefill", engine="prefill0") == prefills + 2
    assert got == (alone(pair, prompts[0]), alone(pair, prompts[1]))
    until(lambda: measured_bytes(front) == pulled_bytes(pair) - front.pulled_before)
    until(lambda: booked(front) == 0)


def test_concurrent_transfers_are_not_mixed(pair: Pair, front: Gateway) -> None:
    """Each prompt gets its own KV. A client cannot name other KV: the picker replaces its parameters."""
    prompts = [prompt(40 + 90 * number, seed=80_000 + number) for number in range(8)]
    wrong = {"kv_transfer_params": params_for(pair, prompt(100, seed=80_100))}
    before = pulled(pair.decode)
    with ThreadPoolExecutor(4) as threads:
        got = list(threads.map(lambda tokens: whole(front.url, tokens, max_tokens=3, **wrong), prompts))
    assert got == [alone(pair, tokens, 3) for tokens in prompts]
    transfers, _, failures = (now - then for now, then in zip(pulled(pair.decode), before, strict=True))
    assert (transfers, failures) == (len(prompts), 0)
    until(lambda: booked(front) == 0)


def another_prompt(pair: Pair, tokens: list[int]) -> dict[str, Any]:
    """Return the transfer parameters of another prompt of this length."""
    return params_for(pair, prompt(len(tokens), seed=90_001))


def another_request(pair: Pair, tokens: list[int]) -> dict[str, Any]:
    """Return transfer parameters that name a request which the prefill server does not know."""
    return params_for(pair, tokens) | {"remote_request_id": "a request that no server knows"}


def none(pair: Pair, tokens: list[int]) -> dict[str, Any]:
    """Return no transfer parameters, although the prefill server has the KV."""
    params_for(pair, tokens)
    return {}


@pytest.mark.parametrize(
    ("make", "loads", "fails"),
    [(params_for, 1, 0), (none, 0, 0), (another_request, 0, 1), (another_prompt, 0, 0)],
    ids=["right", "none", "unknown request", "another prompt"],
)
def test_only_the_right_parameters_load_kv(
    pair: Pair,
    without_picker: str,
    make: Callable[[Pair, list[int]], dict[str, Any]],
    loads: int,
    fails: int,
) -> None:
    """The control of the test above, with the same Envoy and no picker: the counters tell a transfer from a prompt that
    the decode server computes, whose tokens are the same."""
    tokens = prompt(300, seed=91_000 + len(make.__name__))
    params = make(pair, tokens)
    before, loaded = pulled(pair.decode), transferred_tokens(pair.decode)
    got = whole(without_picker, tokens, **({"kv_transfer_params": params} if params else {}))
    transfers, nbytes, failures = (now - then for now, then in zip(pulled(pair.decode), before, strict=True))
    assert (transfers, nbytes, failures) == (loads, loads * -(-300 // BLOCK_TOKENS) * BLOCK_BYTES, fails)
    assert (transferred_tokens(pair.decode) > loaded) == bool(loads)
    assert got == alone(pair, tokens)


@pytest.mark.parametrize("when", ["after the choice", "in the stream"])
def test_a_client_that_leaves_frees_the_picker_and_the_engines(pair: Pair, front: Gateway, when: str) -> None:
    """Nothing stays booked, running or held, no engine is blamed, and the next request is served."""
    tokens = prompt(2_000 if when == "after the choice" else 300, seed=95_000 + len(when))
    most = CONTEXT_TOKENS - len(tokens)
    left, failures = (front.metric(f"kvroute_{name}_total") for name in ("client_disconnects", "leg_failures"))
    finished = pair.decode.metric("vllm:request_generation_tokens_sum")
    with closing(http.client.HTTPConnection(front.url.removeprefix("http://"), timeout=300)) as connection:
        decided = front.metric("kvroute_decisions_total", kind="prefill")
        body = {"model": "tiny", "prompt": tokens, "stream": True, "temperature": 0, "max_tokens": most, **TOKENS}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        if when == "after the choice":  # the prefill server computes the prompt
            until(lambda: front.metric("kvroute_decisions_total", kind="prefill") > decided)
        else:
            read_events(connection, 5)
            assert not is_idle(pair.decode)
        assert booked(front) > 0
    until(lambda: booked(front) == 0)
    until(lambda: front.metric("kvroute_client_disconnects_total") == left + 1)
    for server in servers(pair):
        until(partial(is_idle, server))
    assert pair.decode.metric("vllm:request_generation_tokens_sum") - finished < most, "the response was complete"
    assert front.metric("kvroute_leg_failures_total") == failures
    follows, before = prompt(200, seed=96_000 + len(when)), pulled(pair.decode)
    assert streamed(front.url, follows) == alone(pair, follows)
    assert pulled(pair.decode)[0] == before[0] + 1


def test_many_clients_that_leave_strand_no_kv(pair: Pair, front: Gateway) -> None:
    """They leave during the prefill, the transfer or the response."""
    expired = pair.prefill.metric(EXPIRED)
    assert leave_at_any_time(front, ABORTED, seed=5) > ABORTED / 4
    until(lambda: booked(front) == 0)
    nothing_has_expired(pair, expired)


def booked(front: Gateway) -> float:
    """Return the sum of what the picker counts for requests in progress: 0 if it counts nothing."""
    names = ("requests_in_flight", "requests_queued", "client_connections", "instance_requests", "transfers_in_flight")
    return sum(front.metric(f"kvroute_{name}") for name in (*names, "prefill_pending_seconds"))


def read_events(connection: http.client.HTTPConnection, count: int) -> None:
    """Read this number of events of the response."""
    response = connection.getresponse()
    assert response.status == 200
    while count:
        line = response.readline()
        assert line, "the response ended early"
        count -= line.startswith(b"data: {")


def is_idle(server: Server) -> bool:
    """Return whether the server runs and holds nothing. An engine without work does not report, so that it computes a
    short prompt first."""
    complete(server, prompt(8, seed=97_000), 2)
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    return not any(server.metric(name) for name in names)
