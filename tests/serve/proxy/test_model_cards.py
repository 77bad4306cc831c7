"""Models that the gateway lists have the context length of their engines; single models are found in engines' lists."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from tests.serve.rig import MODEL, rig
from tests.serve.stub_engines import Engine, ReceivedRequest, Serve, engines_of, run, stub_rig

ALIASES = f"  models: {{org/some model: {MODEL}, small: {MODEL}}}\n"


def listing(*cards: dict[str, Any], status: int = 200, body: bytes | None = None) -> Serve:
    """Return a handler that lists models, and that has no path for single ones, as vLLM."""

    async def serve(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
        if request.path != "/v1/models":
            return web.json_response({"detail": "Not Found"}, status=404)
        if body is not None:
            return web.Response(body=body)
        return web.json_response({"object": "list", "data": list(cards)}, status=status)

    return serve


def test_aliases_have_the_context_length_of_emulated_engines() -> None:
    async def main() -> None:
        async with rig(ALIASES) as gate:
            async with gate.session.get(gate.fleet.ready().instances["decode0"].url + "/v1/models") as response:
                tokens = (await response.json())["data"][0]["max_model_len"]
            listed = (await gate.get("/v1/models")).json["data"]
            assert [(card["id"], card["max_model_len"]) for card in listed] == [
                ("org/some model", tokens),
                ("small", tokens),
            ]
            for card in listed:
                assert (await gate.get(f"/v1/models/{card['id']}")).json == card
            assert (await gate.get(f"/v1/models/{MODEL}")).status == 404

    run(main())


@pytest.mark.parametrize("path", [MODEL, "org%2Fmodel", "org/model", "caf%C3%A9"])
def test_a_single_model_is_found_in_the_list_of_an_engine(path: str) -> None:
    """Without names in the settings. What no list has is the engine's to answer."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        names = (MODEL, "org/model", "café")
        cards = [
            {"id": name, "object": "model", "created": 1, "owned_by": "vllm", "max_model_len": 9} for name in names
        ]
        for engine in prefill + decode:
            engine.serve = listing(*cards)
        async with stub_rig(prefill + decode) as front:
            found = await front.get(f"/v1/models/{path}")
            assert found.status == 200
            assert found.json in cards
            assert found.json["max_model_len"] == 9
            missing = await front.get("/v1/models/none")
            assert (missing.status, missing.json) == (404, {"detail": "Not Found"})
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@pytest.mark.parametrize(
    "serve",
    [
        listing(status=500),
        listing(body=b"{"),
        listing(body=b'{"data":[' + b" " * (1 << 21) + b"]}"),
        listing(),
        listing({"id": 7}),
        listing({"id": MODEL, "max_model_len": "long"}),
    ],
    ids=["error", "no JSON", "large", "empty", "no name", "no number"],
)
def test_without_a_list_of_an_engine_the_length_is_left_out(serve: Serve) -> None:
    async def main() -> None:
        prefill, decode = engines_of("vllm")
        for engine in prefill + decode:
            engine.serve = serve
        async with stub_rig(prefill + decode, ALIASES) as front:
            for path in ("/v1/models/small", "/v1/models/small"):
                found = await front.get(path)
                assert found.status == 200
                assert set(found.json) == {"id", "object", "created", "owned_by"}

    run(main())


def test_the_list_of_an_engine_is_requested_once_in_a_while() -> None:
    """It gets the client's key, and one request for all names of a model."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        for engine in prefill + decode:
            engine.serve = listing({"id": "other", "max_model_len": 5}, {"id": MODEL, "max_model_len": 7})
        async with stub_rig(prefill + decode, ALIASES) as front:
            headers = {"Authorization": "Bearer mine"}
            for _ in range(3):
                async with front.session.get(f"{front.url}/v1/models", headers=headers) as response:
                    assert [card["max_model_len"] for card in (await response.json())["data"]] == [7, 7]
            [received] = [request for engine in prefill + decode for request in engine.received]
            assert received.headers["authorization"] == "Bearer mine"

    run(main())
