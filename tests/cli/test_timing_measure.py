"""`kvroute timing measure` on emulated engines, whose times are known."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.cli.cli_rig import Kvroute, document
from tests.serve.rig import CLUSTER

from kvroute import topology
from kvroute.emulator import EmulatedCluster, EmulatedClusterSpec
from kvroute.timing import IterationTime, prefill_time
from kvroute.types import DecodeSpec, LinearPrefill

PREFILL = LinearPrefill(per_token_s=500e-6, base_s=20e-3)
DECODE = DecodeSpec(base_s=50e-3, per_request_s=5e-3, per_context_token_s=20e-6)
PREFILL_TEXT = "prefill: {kind: linear, per_token: 500 us, base: 20 ms}"
TEXT = (
    CLUSTER.replace("prefill: {kind: linear, per_token: 1 us, base: 1 ms}", PREFILL_TEXT)
    .replace("base: 2 ms, per_request: 10 us", "base: 50 ms, per_request: 5 ms, per_context_token: 20 us")
    .replace("timing:\n", f"timing:\n  prompts: {{{PREFILL_TEXT}, decode: {{base: 100 us, per_request: 1 us}}}}\n")
    .replace('gpus: "node0:0-1"', 'gpus: "node0:0-1", timing: prompts')
)
"""An emulated engine's first token comes after the prefill and one decode step, which is short on `prefill0`."""
SMALL = ("--max-prompt-tokens", "512", "--max-batch", "6", "--output-tokens", "24", "--repeats", "1")


class InThread:
    """Runs an asynchronous context in a thread of its own, as commands have their own event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60.0)

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture
def thread() -> Iterator[InThread]:
    """A thread with an event loop."""
    found = InThread()
    yield found
    found.end()


@pytest.fixture
def engines(thread: InThread) -> Iterator[dict[str, str]]:
    """URLs of emulated engines, by name."""

    async def started() -> EmulatedCluster:
        return await EmulatedCluster(topology.parse(TEXT), EmulatedClusterSpec()).__aenter__()

    cluster = thread.run(started())
    yield {name: str(endpoint.url) for name, endpoint in cluster.ready().instances.items()}
    thread.run(cluster.__aexit__(None, None, None))


@pytest.mark.slow
def test_the_times_of_an_engine_are_found(engines: dict[str, str], kvroute: Kvroute, tmp_path: Path) -> None:
    """Prompts on one engine and decode steps on another one; the files give the same fit again."""
    found = document(
        kvroute(
            *("timing", "measure", engines["prefill0"], "--decode", engines["decode0"]),
            *(*SMALL, "--json", "--out", str(tmp_path / "profile")),
        )
    )
    spec = found["prefill"]["spec"]
    prefill = prefill_time(LinearPrefill(per_token_s=spec["per_token_s"], base_s=spec["base_s"]))
    for tokens in (100, 400):
        assert prefill.seconds(tokens) == pytest.approx(prefill_time(PREFILL).seconds(tokens), rel=0.3)
    assert [check["tokens"] for check in found["prefixes"]] == [64, 128, 256, 512]
    assert all(0 < check["cached_tokens"] <= check["tokens"] // 2 for check in found["prefixes"])
    spec = found["decode"]["spec"]
    fitted = IterationTime.of(DecodeSpec(**{name: value for name, value in spec.items() if name.endswith("_s")}))
    for batch, context in ((1, 50), (5, 1000)):
        assert fitted.seconds(batch, context) == pytest.approx(
            IterationTime.of(DECODE).seconds(batch, context), rel=0.3
        )
    files = [str(tmp_path / "profile" / name) for name in ("prefill.csv", "decode.csv")]
    again = document(kvroute("timing", "fit", *files, "--json"))
    for part in ("prefill", "decode"):
        for name, value in found[part]["spec"].items():
            assert again[part]["spec"][name] == (pytest.approx(value, rel=1e-6) if name.endswith("_s") else value)


def test_it_prints_a_block_of_a_cluster_file(engines: dict[str, str], kvroute: Kvroute) -> None:
    """The whole command on one engine; progress and errors of the fit are on stderr."""
    ended = kvroute("timing", "measure", engines["decode0"] + "/v1", *SMALL, "--name", "a100")
    assert ended.code == 0, ended.err
    cluster = topology.parse(TEXT.replace("timing:\n", ended.out).replace("defaults: {", "defaults: {timing: a100, "))
    assert set(cluster.timing) == {"prompts", "default", "a100"}
    assert "prefill: 4 measurements, mean error " in ended.err
    assert "of them cached: " in ended.err


async def _serving(handler: Any) -> tuple[web.ServerRunner, str]:
    runner = web.ServerRunner(web.Server(handler))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


MODELS = {"data": [{"id": "m", "max_model_len": 4096}]}
WRONG: dict[str, tuple[Any, str]] = {
    "needs a key": (lambda path: (401, {}), "answers 401: {}; name the variable with its key (--key-env)"),
    "no API": (lambda path: (200, {"hello": 1}), "lists no models; give the URL of an engine"),
    "no model": (lambda path: (200, {"data": []}), "serves no model; wait until it is ready"),
    "fails": (lambda path: (200, MODELS) if path == "/v1/models" else (500, {"e": "x"}), 'answers 500: {"e": "x"}'),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_engine_that_answers_otherwise(case: str, thread: InThread, kvroute: Kvroute) -> None:
    """One sentence, exit code 2."""
    answer, sentence = WRONG[case]

    async def handler(request: web.BaseRequest) -> web.Response:
        status, body = answer(request.path)
        return web.Response(status=status, text=json.dumps(body))

    runner, url = thread.run(_serving(handler))
    ended = kvroute("timing", "measure", url)
    thread.run(runner.cleanup())
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert sentence in ended.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("localhost:1",), "URL: 'localhost:1' is not an address; give http://host:port"),
        (("http://127.0.0.1:1",), "does not answer"),
        (("http://127.0.0.1:1", "--kind", "cubic"), "invalid value for '--kind'"),
        (("http://127.0.0.1:1", "--name", "a b"), "--name: 'a b' is not a valid name"),
        (("http://127.0.0.1:1", "--key-env", "KVROUTE_NO_SUCH"), "--key-env: the variable KVROUTE_NO_SUCH is empty"),
        (("http://127.0.0.1:1", "--out", "/dev/null"), "/dev/null: is not a folder"),
    ],
)
def test_wrong_input(words: tuple[str, ...], sentence: str, kvroute: Kvroute) -> None:
    ended = kvroute("timing", "measure", *words)
    assert (ended.code, ended.out) == (2, "")
    assert sentence in ended.err
