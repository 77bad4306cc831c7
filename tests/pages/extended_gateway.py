"""What a gateway does with the examples of docs/extending.md, which `test_extending` adds to a copy of the sources.

Usage: python -m tests.pages.extended_gateway RESULT, with the copy in PYTHONPATH; it writes JSON.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
from tests.epp.envoy_rig import completion_body, picker
from tests.serve.rig import COMPLETIONS, MODEL, RunningGateway
from tests.serve.stub_engines import HEAD, completion, deployment, engines_of, failing, listening, serving, stub_rig

LEGS = ("prefill", "decode", "passed on", "picker")


async def statuses_of_full_engines() -> dict[str, int]:
    """Return the status for the client when the engines of one leg respond with 429, by leg."""
    found = {}
    for leg in LEGS:
        prefill, decode = engines_of("vllm")
        for engine in decode if leg == "decode" else prefill:
            engine.serve = failing(429)
        if leg == "picker":
            async with picker(prefill + decode) as rig:
                found[leg] = (await rig.stream().ask(completion_body())).status
            continue
        if leg == "passed on":
            for engine in decode:
                engine.serve = failing(429)
        async with stub_rig(prefill + decode) as front:
            embeds = leg == "passed on"
            body = {"model": MODEL, "input": "hello"} if embeds else completion()
            found[leg] = (await front.post(body, "/v1/embeddings" if embeds else COMPLETIONS)).status
    return found


async def bodies_of_a_protocol() -> list[str]:
    """Return what the engines of the new protocol receive."""
    prefill, decode = engines_of("shared-store")  # type: ignore[arg-type]
    async with stub_rig([*prefill, *decode]) as front:
        response = await front.post(completion(prompt="hello", max_tokens=9))
        assert response.status == 200, response.body
    return [received.body.decode() for engine in (*prefill, *decode) for received in engine.received]


async def _values_of(front: RunningGateway) -> dict[str, Any]:
    """Return what pages show of a request for the new endpoint."""
    moderated = await front.post({"model": MODEL, "input": "hello"}, path="/v1/moderations")
    described, metrics = await front.get("/openapi.json"), await front.metrics()
    async with front.session.get(f"{front.admin}/state") as response:
        state = await response.read()
    return {
        "status": moderated.status,
        "described": "/v1/moderations" in msgspec.json.decode(described.body)["paths"],
        "families": sorted(set(re.findall(r"^# TYPE (kvroute_\w+)", metrics, re.MULTILINE))),
        "bytes": re.findall(
            r'^kvroute_request_bytes_total\{endpoint="(\w+)"\} (\d+)', await front.metrics(), re.MULTILINE
        ),
        "shown": b'"body_bytes_per_s"' in state,
        "kv_bytes": [instance.kv_capacity_bytes for instance in front.gateway.runtime.cluster.instances],
    }


async def pages_of_a_gateway(kv_share: float) -> dict[str, Any]:
    """Return what the pages of a gateway show whose instances have the new key."""
    prefill, decode = engines_of("vllm")
    async with listening(prefill + decode):
        made = deployment(prefill + decode, head=HEAD)
        text = made.text.replace(", role: prefill", f", kv_share: {kv_share}, role: prefill")
        async with serving(type(made).of(text, "stub.yaml")) as front:
            return await _values_of(front)


async def main() -> dict[str, Any]:
    """Return the results of all examples that a gateway runs."""
    return {
        "statuses": await statuses_of_full_engines(),
        "bodies": await bodies_of_a_protocol(),
        "pages": await pages_of_a_gateway(0.5),
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(asyncio.run(main())), encoding="utf-8")
