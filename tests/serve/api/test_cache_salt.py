"""Cache salts: each key or tenant has a separate prefix cache on the engines and in the gateway's own index."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

import msgspec
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from tests.serve.rig import (
    CHAT,
    CLUSTER,
    COMPLETIONS,
    MODEL,
    GatewayResponse,
    Rig,
    rig,
)

from kvroute.prefix import block_hashes, salt_seed
from kvroute.serve.api.api_keys import KeySettings, hash_text
from kvroute.serve.api.cache_salt import CacheSalts
from kvroute.serve.api.passthrough_body import passthrough_with_salt, read_passthrough
from kvroute.serve.api.requests import read_completion, with_salt
from kvroute.serve.lifecycle.deployment import Deployment
from kvroute.serve.telemetry.engine_blocks import EngineBlocks
from kvroute.serve.telemetry.kv_batch import read_batch

SECRET = b"a secret of the tests"
PROMPT = "The account of Alice Miller ends in 4711. " * 20
BLOCKS_TOKENS = len(PROMPT) // 4 // 16 * 16
NAMES = ("alice", "bob", "carol")
HASHES = ", ".join(f"{name}: '{hash_text(name)}'" for name in NAMES)
PER_KEY = f"  keys: {{known: {{{HASHES}}}}}\n  cache_salt: per-key\n"
PER_TENANT = (
    f"  keys: {{known: {{{HASHES}}}, tenants: {{alice: acme, bob: acme, carol: bob}}}}\n  cache_salt: per-tenant\n"
)
OFF = f"  keys: {{known: {{{HASHES}}}}}\n"
names = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=8)


@given(keys=st.lists(names, min_size=1, max_size=5, unique=True), own=st.lists(st.text(), max_size=3), data=st.data())
def test_two_requests_share_a_salt_if_and_only_if_owner_and_own_salt_are_equal(
    keys: list[str], own: list[str], data: st.DataObject
) -> None:
    """Tenants named like keys and client salts that look like a tenant's salt are included."""
    owner = st.sampled_from(keys)
    tenants = data.draw(st.dictionaries(owner, owner))
    salts = CacheSalts(tenants, SECRET)
    own = ["", *own, *(f"tenant:{key}" for key in keys)]
    requests = [(key, text) for key in keys for text in own]
    for (key, text), (other, other_text) in combinations(requests * 2, 2):
        owners = [("tenant", tenants[name]) if name in tenants else ("key", name) for name in (key, other)]
        same = owners[0] == owners[1] and text == other_text
        assert (salts.salt(key, text) == salts.salt(other, other_text)) is same
    assert all(salts.salt(*request) != CacheSalts(tenants, b"another").salt(*request) for request in requests)


def test_salts_are_accepted_by_engines() -> None:
    """vLLM accepts 1 to 128 characters without `@/\\` and NUL."""
    salt = CacheSalts({}, SECRET).salt("alice", "@/\\\0" * 100)
    assert len(salt) == 64
    assert set(salt) <= set("0123456789abcdef")


def test_without_the_option_client_salts_are_unchanged() -> None:
    assert CacheSalts.of("none", KeySettings(tenants={"a": "b"}), SECRET) is None
    by_key = CacheSalts.of("per-key", KeySettings(tenants={"alice": "acme", "bob": "acme"}), SECRET)
    assert by_key is not None
    assert by_key.salt("alice", "") != by_key.salt("bob", "")


@given(st.none() | st.text(min_size=1))
def test_the_salt_replaces_the_salt_of_the_client(own: str | None) -> None:
    body = json.dumps({"model": "m", "prompt": "hi", "cache_salt": own}).encode()
    salted = with_salt(read_completion(COMPLETIONS.encode(), body), "ours")
    assert salted.salt == "ours"
    assert json.loads(bytes(salted.fields["cache_salt"])) == "ours"
    seen: list[str] = []

    def salt(text: str) -> str:
        seen.append(text)
        return "ours"

    read = read_passthrough(b"/v1/embeddings", body)
    passthrough = passthrough_with_salt(read._replace(body=b"not read again"), salt)
    assert json.loads(passthrough.body) == {"model": "m", "prompt": "hi", "cache_salt": "ours"}
    assert seen == ["" if own is None else json.dumps(own)]


async def cached_tokens(gate: Rig, name: str, prompt: str = PROMPT, path: str = COMPLETIONS, **more: Any) -> int:
    """Request a completion and return the number of cached tokens reported to the client."""
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 2, **more}
    body |= {"prompt": prompt} if path == COMPLETIONS else {"messages": [{"role": "user", "content": prompt}]}
    response: GatewayResponse = await gate.post(body, path, {"authorization": f"Bearer {name}"})
    assert response.status == 200, response.body
    return int(response.json["usage"]["prompt_tokens_details"]["cached_tokens"])


async def hits(gate: Rig) -> float:
    """Return the number of tokens that the gateway expected to be cached on the instances that it chose."""
    async with gate.session.get(gate.admin + "/metrics") as response:
        page = await response.text()
    assert response.status == 200
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if "prefix_hit_tokens_total{" in line)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_key_gets_no_prefix_hits_from_prompts_of_another_key(path: str) -> None:
    async def main() -> None:
        async with rig(PER_KEY) as gate:
            assert await cached_tokens(gate, "alice", path=path) == 0
            assert await hits(gate) == 0
            assert await cached_tokens(gate, "bob", path=path) == 0, "the right guess looks like a wrong one"
            assert await hits(gate) == 0, "the gateway does not expect it to be cached either"
            assert await cached_tokens(gate, "alice", path=path) >= BLOCKS_TOKENS - 16
            assert await hits(gate) > 0
            assert await cached_tokens(gate, "alice", path=path, cache_salt="mine") == 0
            assert await cached_tokens(gate, "bob", path=path, cache_salt="mine") == 0
            assert await cached_tokens(gate, "alice", path=path, cache_salt="mine") >= BLOCKS_TOKENS - 16

    uvloop.run(main())


def test_keys_of_a_tenant_share_cached_prefixes() -> None:
    async def main() -> None:
        async with rig(PER_TENANT) as gate:
            assert await cached_tokens(gate, "alice") == 0
            assert await cached_tokens(gate, "carol") == 0, "its tenant has the name of another key"
            assert await cached_tokens(gate, "bob") >= BLOCKS_TOKENS - 16

    uvloop.run(main())


def test_without_the_option_prefixes_are_shared_unless_clients_send_salts() -> None:
    """The emulated engines also apply the clients' own salts."""

    async def main() -> None:
        async with rig(OFF) as gate:
            assert await cached_tokens(gate, "alice") == 0
            assert await cached_tokens(gate, "bob") >= BLOCKS_TOKENS - 16
            assert await cached_tokens(gate, "bob", cache_salt="mine") == 0
            assert await cached_tokens(gate, "bob", cache_salt="mine") >= BLOCKS_TOKENS - 16
            for wrong in ("", "a" * 129, "a@b", "a/b", "a\0"):
                body = {"model": MODEL, "prompt": PROMPT, "cache_salt": wrong}
                response = await gate.post(body, headers={"authorization": "Bearer alice"})
                assert response.status == 400
                assert response.json["error"]["param"] == "cache_salt"

    uvloop.run(main())


def test_salts_stay_the_same_after_a_reload() -> None:
    async def main() -> None:
        async with rig(PER_KEY) as gate:
            assert await cached_tokens(gate, "alice") == 0
            engines = gate.fleet.ready().instances
            text = CLUSTER + PER_KEY + "  retries: {attempts: 2}\n"
            assert await gate.gateway.reload(lambda: Deployment.of(text, "test.yaml", endpoints=engines))
            assert gate.gateway.runtime.settings.retries.attempts == 2
            assert await cached_tokens(gate, "bob") == 0
            assert await cached_tokens(gate, "alice") >= BLOCKS_TOKENS - 16

    uvloop.run(main())


def test_embeddings_are_salted_too() -> None:
    """The engine's response shows it: emulated engines reject a salt with a slash, and none reaches them here."""

    async def main() -> None:
        async with rig(PER_KEY) as gate:
            body = {"model": MODEL, "input": "hi", "cache_salt": {"odd": "a/b"}}
            response = await gate.post(body, "/v1/embeddings", {"authorization": "Bearer alice"})
            assert response.status == 200

    uvloop.run(main())


@given(salt=st.text(min_size=1, max_size=200), tokens=st.lists(st.integers(0, 1000), min_size=4, max_size=12))
def test_kv_events_of_salted_prompts_give_the_hashes_of_their_requests(salt: str, tokens: list[int]) -> None:
    """Prefix matches from KV events therefore stay correct for each salt."""
    whole = tokens[: len(tokens) // 2 * 2]
    names = list(range(1, len(whole) // 2 + 1))
    keys = [[salt], *[None] * (len(names) - 1)]
    event: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": None,
        "token_ids": whole,
    }
    event |= {"block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": keys}
    blocks = EngineBlocks("p0", 2)
    for stored_event in read_batch(msgspec.msgpack.encode([0.0, [event], 0])).events:
        blocks.apply(stored_event)
    (stored,) = blocks.changes(0.0)
    assert stored.blocks == block_hashes(whole, 2, salt_seed(salt))  # type: ignore[union-attr]
    assert blocks.counts.foreign == 0
    assert not set(stored.blocks) & set(block_hashes(whole, 2))  # type: ignore[union-attr]
