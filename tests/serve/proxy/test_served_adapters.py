"""LoRA adapters: their prompts share no prefix with the base model, and their requests go where they are loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import uvloop
from tests.serve.rig import CHAT, CLUSTER, COMPLETIONS, MODEL, Rig, rig, with_section
from tests.serve.test_chaos import check_replay
from tests.waiting import becomes_true

from kvroute.prefix import block_hashes, prompt_seed
from kvroute.serve.api.json_fields import RequestError
from kvroute.serve.api.requests import read_completion
from kvroute.serve.config.preflight import settings_of
from kvroute.serve.lifecycle.deployment import Deployment
from kvroute.serve.proxy.served_models import ServedModels
from kvroute.topology import parse

ADAPTERS = "  adapters: {sql: {load: 20 ms}, chat: {load: 20 ms}}\n"
TEXT = CLUSTER + ADAPTERS
PROMPT = "select the account of Alice " * 30
TOKENS = [*range(1, 161)]
MANY = """
name: many
nodes: [{name: node0}]
timing: {default: {prefill: {kind: linear, per_token: 90 us}, decode: {base: 10 ms}}}
defaults: {tp: 2, kv_capacity: 80 GB}
instances:
  - {name: a, role: both, model: llama-3-70b, gpus: "node0:0-1"}
  - {name: b, role: both, model: llama-3-8b, gpus: "node0:2-3"}
gateway: {models: {large: llama-3-70b}, adapters: {sql: {model: llama-3-8b}}}
"""


async def cached(gate: Rig, model: str, prompt: Any = PROMPT, path: str = "") -> int:
    """Request a completion; return how many tokens of the prompt the engine had cached."""
    body: dict[str, Any] = {"model": model, "max_tokens": 2}
    body |= {"messages": [{"role": "user", "content": prompt}]} if path else {"prompt": prompt}
    response = await gate.post(body, path or COMPLETIONS)
    assert response.status == 200, response.body
    assert response.json["model"] == model
    return int(response.json["usage"]["prompt_tokens_details"]["cached_tokens"])


async def expected_hits(gate: Rig) -> float:
    """Return the tokens that the gateway has expected to be cached."""
    lines = [line for line in (await gate.metrics()).splitlines() if "prefix_hit_tokens_total{" in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def loads(gate: Rig) -> dict[str, int]:
    """Return how often each engine has loaded an adapter."""
    return {name: server.engine.adapters.loads for name, server in gate.fleet.servers.items()}


def test_prompts_of_an_adapter_share_no_prefix_with_others() -> None:
    """Neither in the engines nor in the gateway's view of them; a second prompt of the same model does."""

    async def main() -> None:
        async with rig(text=TEXT) as gate:
            for path in ("", CHAT):
                hits = await expected_hits(gate)
                for model in (MODEL, "sql", "chat"):
                    assert await cached(gate, model, path=path) == 0, (path, model)
                assert await expected_hits(gate) == hits
                for model in (MODEL, "sql", "chat"):
                    assert await cached(gate, model, path=path) > 100, (path, model)
                assert await expected_hits(gate) > hits
            assert await gate.becomes_idle()

    uvloop.run(main())


def test_requests_follow_the_loaded_adapter_and_the_log_replays(tmp_path: Path) -> None:
    """Of ten requests at once for an adapter none goes to an instance that would have to load it."""
    log = tmp_path / "log.jsonl"

    async def main() -> None:
        section = f"  policy: load-aware\n  health: {{slow_start: 0 s}}\n  log: {{events: {log}}}\n"
        async with rig(section, TEXT) as gate:
            for model in ("sql", "chat"):
                await cached(gate, model)
            bodies = [(model, f"{turn} {model} " * 40) for turn in range(10) for model in ("sql", "chat")]
            await asyncio.gather(*(cached(gate, *body) for body in bodies))
            counts = loads(gate)
            assert sum(count for name, count in counts.items() if name.startswith("prefill")) == 2
            assert sum(count for name, count in counts.items() if name.startswith("decode")) == 2
            known = gate.gateway.runtime.control.adapters
            assert {adapter for adapters, _ in known.values() for adapter in adapters} == {"sql", "chat"}
            assert await becomes_true(
                lambda: {slots for _, slots in gate.gateway.runtime.control.adapters.values()} == {4}
            )

    uvloop.run(main())
    assert check_replay(log)["AdaptersMeasured"] >= 2


def test_an_adapter_in_use_at_an_engine_is_preferred() -> None:
    """The engine reports a request of another router. Without the report the first names would be chosen."""

    async def main() -> None:
        async with rig("  policy: load-aware\n  scrape: {interval: 10 ms}\n", TEXT) as gate:
            engine = gate.fleet.ready().instances["decode1"]
            body = {"model": "sql", "prompt": "hello", "max_tokens": 20_000, "ignore_eos": True, "stream": True}

            def known() -> Mapping[str, tuple[tuple[str, ...], int]]:
                return {"decode1": ((), 0)} | dict(gate.gateway.runtime.control.adapters)

            async with gate.session.post(engine.url + "/v1/completions", json=body):
                assert await becomes_true(lambda: "sql" in known()["decode1"][0])
            assert await cached(gate, "sql", "something else " * 20) == 0
            assert loads(gate) == {"prefill0": 1, "prefill1": 0, "decode0": 0, "decode1": 1}

    uvloop.run(main())


def test_kv_events_of_an_adapter_match_its_prompts_only(tmp_path: Path) -> None:
    """With a tokenizer, the gateway knows from an engine's events which prefixes it has for which adapter."""
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a")).save(str(path))

    async def main() -> None:
        async with rig(f"  prompt: {{tokenizer: {path}}}\n", TEXT) as gate:
            engine = gate.fleet.ready().instances["prefill1"]
            body = {"model": "sql", "prompt": TOKENS, "max_tokens": 1}
            async with gate.session.post(engine.url + "/v1/completions", json=body) as response:
                assert response.status == 200
            control, chain = gate.gateway.runtime.control, block_hashes(TOKENS, 16, prompt_seed("", "sql"))
            index = control.cluster.index("prefill1")
            assert await becomes_true(lambda: control.prefix.match(chain)[index] == len(chain))
            assert control.prefix.match(block_hashes(TOKENS, 16)).max() == 0
            assert await cached(gate, "sql", TOKENS) > 100
            assert gate.fleet.servers["prefill1"].engine.counters.hits > 0

    uvloop.run(main())


def test_a_reload_keeps_what_is_loaded() -> None:
    async def main() -> None:
        async with rig("  policy: load-aware\n", TEXT) as gate:
            await cached(gate, "sql")
            before = gate.gateway.runtime.control.adapters
            text = with_section("  policy: load-aware\n  retries: {attempts: 2}\n", TEXT)
            engines = gate.fleet.ready().instances
            assert await gate.gateway.reload(lambda: Deployment.of(text, "test.yaml", endpoints=engines))
            after = gate.gateway.runtime.control.adapters
            assert {name for name, (adapters, _) in before.items() if adapters} == {"prefill0", "decode0"}
            assert {name: adapters for name, (adapters, _) in after.items()} == {
                name: adapters for name, (adapters, _) in before.items()
            }

    uvloop.run(main())


def test_a_restarted_engine_loads_the_adapter_again() -> None:
    async def main() -> None:
        async with rig("  scrape: {interval: 10 ms}\n", TEXT) as gate:
            await cached(gate, "sql")
            assert "sql" in gate.gateway.runtime.control.adapters["prefill0"][0]
            await gate.command("prefill0", "restart")
            assert await becomes_true(lambda: not gate.gateway.runtime.control.adapters.get("prefill0", ((), 0))[0])

    uvloop.run(main())


def test_models_and_adapters_are_listed() -> None:
    """By the engines if there is one model without an alias, else by the gateway; an unknown name is an error."""

    async def main() -> None:
        async with rig(text=TEXT) as gate:
            listed = (await gate.get("/v1/models")).json["data"]
            assert [card["id"] for card in listed] == [MODEL, "chat", "sql"]
            response = await gate.post({"model": "poet", "prompt": "a", "max_tokens": 1})
            assert response.status == 404
        async with rig(text=CLUSTER + f"  models: {{large: {MODEL}}}\n" + ADAPTERS) as gate:
            listed = (await gate.get("/v1/models")).json["data"]
            assert [card["id"] for card in listed] == ["large", "chat", "sql"]
            assert await cached(gate, "sql") == 0

    uvloop.run(main())


def test_an_adapter_selects_its_base_model() -> None:
    cluster = parse(MANY)
    settings = settings_of(MANY, "f")
    models = ServedModels(cluster, settings.models, settings.adapters)
    assert [models.name(served) for served in ("large", "llama-3-8b", "sql")] == [MODEL, "llama-3-8b", "llama-3-8b"]
    assert [models.adapter(served) for served in ("large", "llama-3-8b", "sql")] == ["", "", "sql"]
    assert models.names() == ["large", "sql"]
    completion = read_completion(b"/v1/responses", b'{"model": "sql", "input": "a"}')
    assert models.splits(completion)
    with pytest.raises(RequestError, match="poet"):
        models.name("poet")
