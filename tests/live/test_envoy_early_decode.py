"""A prefill that fails after Envoy has sent the decode leg: what the client, the decode engine and the picker see."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.live.envoy import envoy_rig, released
from tests.serve.rig import MODEL
from tests.serve.stub_engines import Gate, engines_of, failing, run, tokens

pytestmark = pytest.mark.live
BODY = {"model": MODEL, "prompt": "What is a KV cache? " * 20, "max_tokens": 3}


@pytest.mark.parametrize("fail_open", [False, True], ids=["closed", "open"])
@pytest.mark.parametrize("buffered", [False, True], ids=["streamed", "buffered"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_decode_leg_is_withdrawn_and_the_client_gets_the_reason(
    tmp_path: Path, fail_open: bool, buffered: bool, stream: bool
) -> None:
    """Whatever Envoy does with requests of a picker that fails: this one does not."""

    async def main() -> None:
        prefill, decode = engines_of("sglang")
        failed, waits = Gate(), Gate()
        for engine in prefill:
            engine.serve = failed.before(failing(500))
        for engine in decode:
            engine.serve = waits.before(tokens)
        async with envoy_rig(prefill + decode, tmp_path, fail_open=fail_open, buffered=buffered) as rig:
            asking = asyncio.ensure_future(rig.post(BODY | {"stream": stream}))
            await failed.entered.wait()
            await waits.entered.wait()
            failed.open.set()
            response = await asking
            assert (response.status, response.json["error"]["type"]) == (502, "upstream_error")
            assert "returned status 500" in response.json["error"]["message"]
            await waits.left.wait()
            assert waits.cancelled
            assert sum(len(engine.received) for engine in prefill) == 1
            assert sum(len(engine.received) for engine in decode) == 1
            assert await released(rig), rig.picker.held_resources()

    run(main())
