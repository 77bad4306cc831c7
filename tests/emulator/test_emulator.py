"""Emulated engines over real sockets: vLLM's HTTP API, KV transfer, KV events, faults, and the timing of the
simulator."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
import uvloop
import zmq
import zmq.asyncio

from kvroute import llm, topology
from kvroute.control import ControlSpec
from kvroute.emulator import EmulatedCluster, EmulatedClusterSpec
from kvroute.emulator.api.completion import EmulatedCompletion
from kvroute.prefix import block_hashes
from kvroute.sim.run import simulate
from kvroute.sim.settings import SimSpec
from kvroute.sim.workload import Trace
from kvroute.sim.workload.trace import TracedRequest
from kvroute.topology import Cluster
from kvroute.types import DecodeSpec, Endpoint, InputError, LinearPrefill, TimingSpec

EXAMPLE = Path(__file__).parents[2] / "examples" / "small.yaml"
SMALL = topology.load(EXAMPLE)
QUICK = TimingSpec(
    prefill=LinearPrefill(per_token_s=1e-6, base_s=1e-4), decode=DecodeSpec(base_s=1e-3, per_request_s=1e-5)
)
MODEL = "llama-3-70b"
PROMPT = "The quick brown fox jumps over the lazy dog. " * 20
BODY: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 6}
PREFILL = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None}}
POLLS = 2000


@dataclass
class Client:
    """An emulated cluster and a session to send requests to it."""

    fleet: EmulatedCluster
    session: aiohttp.ClientSession

    def endpoint(self, name: str) -> Endpoint:
        return self.fleet.ready().instances[name]

    async def post(self, name: str, path: str, body: Any) -> tuple[int, bytes]:
        async with self.session.post(self.endpoint(name).url + path, json=body) as response:
            return response.status, await response.read()

    async def post_json(self, name: str, body: Any, path: str = "/v1/completions") -> Any:
        status, data = await self.post(name, path, body)
        assert status == 200, data
        return msgspec.json.decode(data)

    async def get(self, name: str, path: str) -> str:
        async with self.session.get(self.endpoint(name).url + path) as response:
            assert response.status == 200
            return await response.text()

    async def metric(self, name: str, sample: str) -> float:
        page = await self.get(name, "/metrics")
        return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(sample))

    async def becomes_idle(self, name: str) -> bool:
        """Return whether, within the time limit, nothing runs, waits or is pinned."""
        for _ in range(POLLS):
            samples = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
            if not any([await self.metric(name, sample) for sample in samples]):
                return True
        return False

    async def prefilled(self, **more: Any) -> dict[str, Any]:
        """Run the prefill leg; return the body of the decode leg."""
        answer = await self.post_json("prefill0", BODY | PREFILL | {"max_tokens": 1})
        return BODY | {"kv_transfer_params": answer["kv_transfer_params"]} | more


def quick(cluster: Cluster = SMALL) -> Cluster:
    return replace(cluster, timing=dict.fromkeys(cluster.timing, QUICK))


def on_fleet(
    check: Callable[[Client], Awaitable[None]],
    cluster: Cluster | None = None,
    settings: EmulatedClusterSpec | None = None,
) -> None:
    async def main() -> None:
        async with (
            EmulatedCluster(cluster or quick(), settings or EmulatedClusterSpec()) as fleet,
            aiohttp.ClientSession() as session,
        ):
            await check(Client(fleet, session))

    uvloop.run(main())


def stream_text(data: bytes) -> str:
    events = [line[6:] for line in data.split(b"\n\n") if line.startswith(b"data: {")]
    choices = [choice for event in events for choice in msgspec.json.decode(event)["choices"]]
    return "".join(choice.get("text", choice.get("delta", {}).get("content", "")) for choice in choices)


def test_two_legs_give_the_response_of_a_single_instance() -> None:
    """Streamed or not, the tokens follow from the prompt; transferred bytes are counted once and unscaled."""

    async def check(client: Client) -> None:
        alone = await client.post_json("decode0", BODY)
        text = alone["choices"][0]["text"]
        assert len(text.split()) == 6
        assert alone["usage"]["prompt_tokens"] == len(PROMPT) / 4
        computed = client.fleet.servers["decode0"].engine.counters
        assert (computed.prompt_tokens, sum(computed.prefill_s.counts)) == (len(PROMPT) / 4, 0), "beside its batch"
        handed = await client.post_json("decode1", await client.prefilled())
        assert handed["choices"][0]["text"] == text
        status, data = await client.post("decode1", "/v1/completions", await client.prefilled(stream=True))
        assert (status, stream_text(data)) == (200, text)
        assert data.endswith(b"data: [DONE]\n\n")
        kv_bytes = llm.model(MODEL).kv_bytes(len(PROMPT) // 4) + llm.model(MODEL).kv_bytes(225 % 16)
        source = '{source="prefill0",engine="0"}'
        assert await client.metric("decode1", f"kvroute:kv_transfer_bytes_total{source}") == kv_bytes
        assert await client.metric("decode1", f"kvroute:kv_transfers_total{source}") == 2
        assert await client.metric("decode1", f"kvroute:kv_transfer_seconds_total{source}") > 0
        for name in ("prefill0", "decode0", "decode1"):
            assert await client.becomes_idle(name)

    on_fleet(check)


def test_kv_is_fetched_once() -> None:
    """A second fetch fails: status 500, or an error event if the stream has started."""

    async def check(client: Client) -> None:
        body = await client.prefilled()
        await client.post_json("decode0", body)
        status, data = await client.post("decode0", "/v1/completions", body)
        assert (status, msgspec.json.decode(data)["error"]["type"]) == (500, "InternalServerError")
        status, data = await client.post("decode0", "/v1/completions", body | {"stream": True})
        assert status == 200
        assert b'"code":500' in data
        assert stream_text(data.replace(b'{"error"', b'{"choices":[],"error"')) == ""
        assert await client.becomes_idle("decode0")

    on_fleet(check)


def test_mooncake_and_sglang_legs_share_the_kv_port() -> None:
    """The router generates the key. SGLang's two legs start at once, in any order, with one room per choice."""

    async def check(client: Client) -> None:
        text = (await client.post_json("decode0", BODY))["choices"][0]["text"]
        bootstrap = client.endpoint("prefill1").bootstrap
        async with client.session.get(f"http://{bootstrap}/query") as response:
            engine = msgspec.json.decode(await response.read())["0"]["engine_id"]
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t1"}
        await client.post_json("prefill1", BODY | {"max_tokens": 1, "kv_transfer_params": params})
        params = {"do_remote_prefill": True, "transfer_id": "t1", "remote_engine_id": engine}
        body = BODY | {"kv_transfer_params": params | {"remote_bootstrap_addr": f"http://{bootstrap}"}}
        assert (await client.post_json("decode0", body))["choices"][0]["text"] == text
        host, _, port = bootstrap.rpartition(":")
        rooms = {"bootstrap_host": [host] * 2, "bootstrap_port": [int(port)] * 2, "bootstrap_room": [2**62, 2**62 + 1]}
        both = BODY | rooms | {"n": 2}
        answers = await asyncio.gather(client.post_json("decode1", both), client.post_json("prefill1", both))
        texts = [choice["text"] for choice in answers[0]["choices"]]
        assert (texts[0], len(texts)) == (text, 2)
        assert texts[1] != text
        assert await client.becomes_idle("prefill1")

    on_fleet(check)


def test_the_openai_client_library_works() -> None:
    """Chat, streaming with usage, several choices, models and embeddings."""
    import openai

    async def check(client: Client) -> None:
        base_url = client.endpoint("decode0").url + "/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as api:
            messages: Any = [{"role": "user", "content": "Hello, you there?"}]
            whole = await api.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=9, n=2)
            assert whole.usage is not None
            assert (len(whole.choices), whole.usage.completion_tokens) == (2, 18)
            stream = await api.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=9, stream=True, stream_options={"include_usage": True}
            )
            pieces = [piece async for piece in stream]
            text = "".join(choice.delta.content or "" for piece in pieces for choice in piece.choices)
            assert text == whole.choices[0].message.content
            assert pieces[-1].usage is not None
            assert pieces[-2].choices[0].finish_reason == "length"
            assert [model.id async for model in await api.models.list()] == [MODEL]
            vectors = await api.embeddings.create(model=MODEL, input=["a", "b", "a"], encoding_format="float")
            assert vectors.data[0].embedding == vectors.data[2].embedding != vectors.data[1].embedding
        tokens = (await client.post_json("decode0", {"prompt": "12345678"}, "/tokenize"))["tokens"]
        assert [token.to_bytes(4, "little") for token in tokens] == [b"1234", b"5678"]

    on_fleet(check)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        pytest.param({"prompt": ""}, 400, "prompt", id="empty"),
        pytest.param({"prompt": 3}, 400, "prompt", id="number"),
        pytest.param({"prompt": [1, "a"]}, 400, "prompt", id="mixed"),
        pytest.param({"prompt": "a", "max_tokens": 0}, 400, "max_tokens", id="no-tokens"),
        pytest.param({"prompt": "a", "n": 1000}, 400, "n", id="many"),
        pytest.param({"prompt": "a", "model": "other"}, 404, "model", id="model"),
        pytest.param({"prompt": "a", "max_tokens": 10**7}, 400, None, id="too-long"),
        pytest.param(PREFILL | {"prompt": "a", "n": 2}, 400, "n", id="two-legs-two-answers"),
        pytest.param(
            {"prompt": "a", "kv_transfer_params": {"do_remote_prefill": True}},
            400,
            "kv_transfer_params",
            id="no-source",
        ),
    ],
)
def test_invalid_requests_get_openai_error_json(body: dict[str, Any], status: int, param: str | None) -> None:
    """The error names the field, and nothing of the request remains in the engine."""

    async def check(client: Client) -> None:
        got, data = await client.post("decode0", "/v1/completions", body)
        error = msgspec.json.decode(data)["error"]
        assert (got, error["code"], error["param"]) == (status, status, param)
        assert error["message"]
        assert await client.becomes_idle("decode0")

    on_fleet(check, settings=EmulatedClusterSpec(kv_events=False))


def test_kv_events_and_their_replay_follow_vllms_format() -> None:
    """Hashes form the same chain as kvroute's; after a reset everything is removed; a replay returns missed events."""
    tokens = list(range(50))

    async def check(client: Client) -> None:
        endpoint = client.endpoint("decode0")
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as sub, context.socket(zmq.DEALER) as dealer:
            sub.subscribe(b"")
            sub.connect(endpoint.kv_events)
            dealer.connect(endpoint.kv_replay)
            for number in range(POLLS):  # until the subscription is active
                await client.post_json("decode0", {"prompt": [*tokens, number], "max_tokens": 1})
                if await sub.poll(1):
                    topic, seq, payload = await sub.recv_multipart()
                    if b"BlockStored" in payload:
                        break
                assert await client.becomes_idle("decode0")
                status, _ = await client.post("decode0", "/reset_prefix_cache", {})
                assert status == 200
            assert topic == b"kv@decode0"
            _, (stored,), rank = msgspec.msgpack.decode(payload)
            hashes = list(block_hashes(tokens, 16))
            assert (stored["type"], rank) == ("BlockStored", 0)
            assert (stored["block_hashes"], stored["parent_block_hash"]) == (hashes, None)
            assert (stored["token_ids"], stored["block_size"], stored["medium"]) == (tokens[:48], 16, "GPU")
            assert await client.becomes_idle("decode0")
            await client.post("decode0", "/reset_prefix_cache", {})
            await dealer.send_multipart([b"", seq])
            replayed = [await dealer.recv_multipart()]
            while replayed[-1] != [b"", b"", b"\xff" * 8, b""]:
                replayed.append(await dealer.recv_multipart())
            assert replayed[0] == [b"", topic, seq, payload]
            assert msgspec.msgpack.decode(replayed[-2][3])[1] == [{"type": "AllBlocksCleared"}]

    on_fleet(check)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("after_tokens", [0, 3], ids=["at-once", "later"])
@pytest.mark.parametrize("status", [503, "reset"])
def test_faults_occur_as_configured_and_no_more(status: int | str, after_tokens: int, stream: bool) -> None:
    """The first two decode legs fail, the third one succeeds, and nothing remains of the failed ones."""
    order = {"fail_next": 2, "status": status, "leg": "decode", "after_tokens": after_tokens}

    async def check(client: Client) -> None:
        await client.post_json("decode0", order, "/emulator/fault")
        body = BODY | {"stream": stream}
        for _ in range(2):
            if status == "reset":
                with pytest.raises(aiohttp.ClientError):
                    await client.post("decode0", "/v1/completions", body)
            else:
                got, data = await client.post("decode0", "/v1/completions", body)
                late = stream and after_tokens
                assert got == (200 if late else 503)
                assert b'"code":503' in data
        got, data = await client.post("decode0", "/v1/completions", body)
        assert (got, b"error" in data) == (200, False)
        assert await client.becomes_idle("decode0")

    on_fleet(check, settings=EmulatedClusterSpec(kv_events=False))


def test_a_fault_occurs_although_the_event_loop_finds_all_tokens_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that stops for a moment."""
    start = EmulatedCompletion._start

    async def late_start(response: EmulatedCompletion) -> None:
        await start(response)
        await response.notifier.until(response._answered)

    monkeypatch.setattr(EmulatedCompletion, "_start", late_start)

    async def check(client: Client) -> None:
        order = {"fail_next": 1, "status": 503, "leg": "decode", "after_tokens": 3}
        await client.post_json("decode0", order, "/emulator/fault")
        assert (await client.post("decode0", "/v1/completions", BODY))[0] == 503

    on_fleet(check, settings=EmulatedClusterSpec(kv_events=False))


def test_a_configured_share_of_prefills_fails_and_no_decode() -> None:
    """30 % of 100 requests fail, with a seed; the decode leg never fails."""

    async def check(client: Client) -> None:
        await client.post_json("prefill0", {"share": 0.3, "leg": "prefill"}, "/emulator/fault")
        codes = [(await client.post("prefill0", "/v1/completions", BODY | PREFILL))[0] for _ in range(100)]
        assert 15 <= codes.count(500) <= 45
        assert codes.count(500) + codes.count(200) == 100
        await client.post_json("prefill0", BODY)

    on_fleet(check)


def test_a_poison_request_always_fails_and_others_do_not() -> None:
    """The fault is bound to the marker in the prompt; a newer order removes it."""

    async def check(client: Client) -> None:
        poison = BODY | {"prompt": "say POISON now"}
        await client.post_json("prefill0", {"prompt_contains": "POISON", "status": 503}, "/emulator/fault")
        for _ in range(3):
            assert (await client.post("prefill0", "/v1/completions", poison))[0] == 503
            assert (await client.post("prefill0", "/v1/completions", BODY))[0] == 200
        await client.post_json("prefill0", {}, "/emulator/fault")
        assert (await client.post("prefill0", "/v1/completions", poison))[0] == 200

    on_fleet(check)


def test_a_failed_transfer_leaves_the_kv_at_its_source() -> None:
    """The decode leg fails; another instance fetches the same KV."""

    async def check(client: Client) -> None:
        await client.post_json("prefill0", {"fail_next": 1, "leg": "transfer"}, "/emulator/fault")
        body = await client.prefilled()
        status, data = await client.post("decode0", "/v1/completions", body)
        assert (status, b" ended with" in data) == (500, True)
        await client.post_json("decode1", body)
        assert await client.metric("decode0", "vllm:nixl_num_failed_transfers_total") == 1
        for name in ("prefill0", "decode0", "decode1"):
            assert await client.becomes_idle(name)

    on_fleet(check)


def test_a_client_that_disconnects_frees_its_resources() -> None:
    """The client leaves at the head of a long stream, in a request that hangs, and in the queue behind a long
    prompt."""
    slow = replace(SMALL, timing={"default": replace_prefill(0.05)})

    async def check(client: Client) -> None:
        url = client.endpoint("decode0").url + "/v1/completions"
        async with client.session.post(
            url, json=BODY | {"stream": True, "max_tokens": 100_000, "ignore_eos": True}
        ) as response:
            assert await response.content.readany()
        tasks = [asyncio.create_task(client.post("decode0", "/v1/completions", BODY)) for _ in range(3)]
        await client.post_json("decode1", {"fail_next": 1, "status": "hang"}, "/emulator/fault")
        tasks.append(asyncio.create_task(client.post("decode1", "/v1/completions", BODY)))
        assert await client.get("decode1", "/health") == ""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(task.cancelled() for task in tasks)
        assert await client.becomes_idle("decode0")
        assert await client.becomes_idle("decode1")

    on_fleet(check, slow)


def replace_prefill(base_s: float) -> TimingSpec:
    return TimingSpec(prefill=LinearPrefill(per_token_s=0.0, base_s=base_s), decode=QUICK.decode)


def test_a_restarted_instance_is_empty_and_keeps_its_ports() -> None:
    """Streams break, KV and counters are gone, the process start time is later, and event numbers start at 0."""

    async def check(client: Client) -> None:
        body = await client.prefilled()
        await client.post_json("decode0", BODY)
        born = await client.metric("prefill0", "process_start_time_seconds")
        url = client.endpoint("prefill0").url + "/v1/completions"
        async with client.session.post(
            url, json=BODY | {"stream": True, "max_tokens": 10**6 // 4, "ignore_eos": True}
        ) as response:
            assert await response.content.readany()
            await client.post_json("prefill0", {"down_s": 0.05}, "/emulator/restart")
            with pytest.raises(aiohttp.ClientError):
                await response.read()
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.get("prefill0", "/health")
        for _ in range(POLLS):
            try:
                reborn = await client.metric("prefill0", "process_start_time_seconds")
                break
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0)
        assert reborn > born
        assert await client.metric("prefill0", "vllm:prompt_tokens_total") == 0
        status, data = await client.post("decode0", "/v1/completions", body)
        assert (status, b"holds no KV" in data) == (500, True)
        await client.post_json("decode0", await client.prefilled())

    on_fleet(check)


def test_no_request_is_faster_than_in_the_simulator() -> None:
    """With the same routing and lengths, prefill queue, transfer and batch take at least the time that the model
    predicts."""
    generator = np.random.default_rng(5)
    at_s = np.sort(generator.uniform(0, 1.5, 24))
    lengths = generator.integers(200, 3000, 24).tolist()
    requests = tuple(TracedRequest(float(at), n, 5, (), 16) for at, n in zip(at_s, lengths, strict=True))
    spec = ControlSpec(decode="round-robin", prefill="round-robin")
    outcomes = simulate(SMALL, Trace("t", requests), spec, SimSpec()).outcomes
    predicted_s = outcomes.first_token_s - outcomes.arrived_s
    names = [instance.name for instance in SMALL.instances]
    measured_s = [0.0] * len(requests)

    async def send_request(client: Client, start: float, number: int) -> None:
        loop, request = asyncio.get_running_loop(), requests[number]
        fields = {"prompt": [number, *range(request.input_tokens - 1)], "max_tokens": 5, "stream": True}
        source, target = (names[side[number]] for side in (outcomes.source, outcomes.target))
        due = start + request.at_s
        await asyncio.sleep(max(due - loop.time(), 0.0))
        began = loop.time()
        first = await client.post_json(source, fields | PREFILL | {"stream": False, "max_tokens": 1})
        body = fields | {"kv_transfer_params": first["kv_transfer_params"]}
        async with client.session.post(client.endpoint(target).url + "/v1/completions", json=body) as response:
            assert b"data: " in await response.content.readany()
            measured_s[number] = loop.time() - min(began, due)
            await response.read()

    async def check(client: Client) -> None:
        start = asyncio.get_running_loop().time()
        await asyncio.gather(*(send_request(client, start, number) for number in range(len(requests))))

    on_fleet(check, SMALL)
    lone_s = [0.02 + 90e-6 * n + 0.0126 for n in lengths]
    assert all(measured >= lone - 0.002 for measured, lone in zip(measured_s, lone_s, strict=True))
    # A request that the test sends late may find a shorter queue, but the sum of all waits hardly becomes smaller.
    assert sum(measured_s) >= float(predicted_s.sum()) - 0.002 * len(requests)


def test_invalid_settings_and_addresses_are_named() -> None:
    """Each wrong value is named in the error message."""
    with pytest.raises(InputError, match="kv_scale"):
        EmulatedClusterSpec(kv_scale=2)
    with pytest.raises(InputError, match="background"):
        EmulatedClusterSpec(background=(0.0, 1.0, 0.0, 0.0, 0.0))
    with pytest.raises(InputError, match="no instance 'unknown'"):
        EmulatedCluster(SMALL, EmulatedClusterSpec(), ["unknown"])

    async def open_from_file() -> None:
        async with EmulatedCluster(SMALL, EmulatedClusterSpec(endpoints_from_file=True)):
            pass

    with pytest.raises(InputError, match="has no endpoint"):
        uvloop.run(open_from_file())


def test_the_command_prints_its_addresses_and_ends_on_sigterm() -> None:
    """The command prints one line of JSON on stdout, runs only the requested instance and exits with code 0."""
    code = "import typer; from kvroute.cli.trial.emulate import emulate; typer.run(emulate)"
    command = [sys.executable, "-c", code, str(EXAMPLE), "--instance", "decode1", "--no-kv-events"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        try:
            ready = msgspec.json.decode(process.stdout.readline())
        finally:
            process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
    assert (process.returncode, rest) == (0, b"")
    assert list(ready["instances"]) == ["decode1"]
    assert ready["instances"]["decode1"]["url"].startswith("http://127.0.0.1:")


def test_engines_accept_the_model_names_that_the_gateway_gives_clients() -> None:
    """As vLLM with several names in --served-model-name: each one is listed, accepted and returned; others get 404."""
    text = EXAMPLE.read_text(encoding="utf-8") + f"\ngateway: {{models: {{big: {MODEL}, big-latest: {MODEL}}}}}\n"

    async def check(client: Client) -> None:
        listed = msgspec.json.decode(await client.get("prefill0", "/v1/models"))["data"]
        assert [card["id"] for card in listed] == [MODEL, "big", "big-latest"]
        assert {card["root"] for card in listed} == {MODEL}
        for name in (MODEL, "big", "big-latest"):
            answer = await client.post_json("decode0", BODY | {"model": name})
            assert answer["model"] == name
        status, data = await client.post("decode0", "/v1/completions", BODY | {"model": "bigger"})
        assert status == 404
        assert b"big-latest" in data

    on_fleet(check, quick(topology.parse(text)))
