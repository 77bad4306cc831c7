"""Live: LoRA adapters on real vLLM servers, one for prefill and one for decode with kvroute's connector.

An adapter's tokens are those of the server that has it. Its prompts match the KV events of the adapter only, and the
gateway learns from the engines' metrics which adapters they use.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.live.services import missing
from tests.live.vllm.conftest import BIN, MODEL, Pair, make_model, start_member, wait_ready
from tests.live.vllm.gateway_rig import Gateway, all_up, cluster_file, prompt, running, token_ids, until

from kvroute.prefix import block_hashes, prompt_seed

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]
ADAPTERS = ("poet", "sql")
RANK, HIDDEN, LAYERS, HEADS, HEAD = 4, 256, 4, {"q_proj": 4, "v_proj": 2}, 64
ANSWER_TOKENS = 8
PROMPT_TOKENS = 300


def save_adapter(folder: Path, seed: int) -> Path:
    """Write a LoRA adapter of the tiny model with random weights in PEFT's format; return its folder."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": [*HEADS], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    draw, header, data = np.random.default_rng(seed), dict[str, Any](), b""
    for layer in range(LAYERS):
        for module, heads in HEADS.items():
            for part, shape in (("A", (RANK, HIDDEN)), ("B", (heads * HEAD, RANK))):
                weights = draw.normal(0.0, 0.5, shape).astype("<f4").tobytes()
                name = f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_{part}.weight"
                header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(weights)]}
                data += weights
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A prefill server with both adapters and room for two, and a decode server."""
    if not (BIN / "vllm").exists():
        missing("vLLM is not installed: run tests/live/vllm/install.sh")
    folder = tmp_path_factory.mktemp("adapters")
    model = make_model(folder)
    modules = [f"{name}={save_adapter(folder / name, seed)}" for seed, name in enumerate(ADAPTERS)]
    options = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules", *modules]
    prefill = start_member("kv_producer", "prefill0", model, folder, options=options)
    decode = start_member("kv_consumer", "decode0", model, folder, options=options)
    pair = Pair(model, folder, prefill, decode, decode, prefill)
    try:
        wait_ready([prefill, decode])
        yield pair
    finally:
        prefill.kill()
        decode.kill()


@pytest.fixture(scope="module")
def gateway(servers: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    model = str(servers.model / "config.json")
    more = {"adapters": {name: {"model": model, "load": "1 s"} for name in ADAPTERS}, "scrape": {"interval": "50 ms"}}
    text = cluster_file(servers, more, [servers.prefill, servers.decode])
    with running("serve", text, folder, "--port", "0") as (process, addresses):
        gateway = Gateway(process, addresses["url"], addresses["admin"], folder / "events.log", 0.0)
        all_up(gateway, servers, [servers.prefill, servers.decode])
        yield gateway


def body_of(model: str, tokens: list[int]) -> dict[str, Any]:
    return {
        **{"model": model, "prompt": tokens, "temperature": 0, "max_tokens": ANSWER_TOKENS},
        **{"return_token_ids": True, "ignore_eos": True},
    }


def answered(gateway: Gateway, model: str, tokens: list[int]) -> list[int]:
    """The tokens of an answer that comes through the gateway."""
    body = body_of(model, tokens)
    extra = {name: body.pop(name) for name in ("return_token_ids", "ignore_eos")}
    return token_ids(gateway.client().completions.create(**body, extra_body=extra).choices[0])


def test_adapters_are_served_and_never_mixed_with_the_base_model(servers: Pair, gateway: Gateway) -> None:
    tokens = prompt(PROMPT_TOKENS, 11)
    models = (MODEL, *ADAPTERS)
    # One server alone computes the whole request, with another prompt first so that nothing is cached across models.
    expected = {
        model: servers.prefill.post("/v1/completions", body_of(model, tokens))["choices"][0]["token_ids"]
        for model in models
    }
    assert len({tuple(ids) for ids in expected.values()}) == len(models), "the adapters change the tokens"

    seeds = {model: prompt_seed("", model if model in ADAPTERS else "") for model in models}
    chains = {model: block_hashes(tokens, 32, seed) for model, seed in seeds.items()}
    assert len({chain[0] for chain in chains.values()}) == len(models)
    # The prefill server's KV events of all three prompts have arrived: three chains of as many blocks.
    until(lambda: {len(event["blocks"]) for event in stored(gateway, "prefill0")} >= {PROMPT_TOKENS // 32})
    until(lambda: len({event["blocks"][0] for event in stored(gateway, "prefill0")}) == len(models))

    hits = gateway.metric("kvroute_prefix_hit_tokens_total")
    for model in models:
        before = gateway.metric("kvroute_prefix_hit_tokens_total")
        assert answered(gateway, model, tokens) == expected[model], model
        assert gateway.metric("kvroute_prefix_hit_tokens_total") > before, f"{model}: its own prefix is known"
    other = prompt(PROMPT_TOKENS, 12)
    hits = gateway.metric("kvroute_prefix_hit_tokens_total")
    answers = {model: answered(gateway, model, other) for model in models}
    assert gateway.metric("kvroute_prefix_hit_tokens_total") == hits, "each model is the first with this prompt"
    assert len({tuple(ids) for ids in answers.values()}) == len(models)
    measured = gateway.events("adapters_measured")
    assert {event["slots"] for event in measured} == {2}
    assert {event["instance"] for event in measured} == {"prefill0", "decode0"}
    arrived = [event["request"]["adapter"] for event in gateway.events("arrived")]
    assert arrived == ["", *ADAPTERS] * 2


def stored(gateway: Gateway, instance: str) -> list[dict[str, Any]]:
    return [event for event in gateway.events("kv_stored") if event["instance"] == instance]
