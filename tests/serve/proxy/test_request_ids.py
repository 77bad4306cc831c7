"""No engine gets one X-Request-Id twice at the same time; clients always get back their own."""

from __future__ import annotations

import asyncio
import re

import pytest
from tests.serve.rig import CHAT, COMPLETIONS
from tests.serve.stub_engines import (
    Gate,
    completion,
    engines_of,
    failing,
    run,
    stub_rig,
    tokens,
)
from tests.waiting import becomes_true

from kvroute.http.headers import request_id_of
from kvroute.serve.proxy.request_ids import RequestIds

OTHER = re.compile(r"mine-[0-9a-f]{16}")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/embeddings"])
@pytest.mark.parametrize("protocol", ["vllm", "sglang"])
def test_requests_with_one_id_at_the_same_time_have_different_ones_for_engines(path: str, protocol: str) -> None:
    """The first one has the client's id, and so has a later one."""

    async def main() -> None:
        gate = Gate()
        prefill, decode = engines_of("sglang" if protocol == "sglang" else "vllm")
        for engine in prefill + decode:
            engine.serve = gate.before(tokens)
        async with stub_rig(prefill + decode) as front:

            async def ask() -> str:
                body = completion(messages=[{"role": "user", "content": "hi"}])
                return (await front.post(body, path, {"X-Request-Id": "mine"})).headers["x-request-id"]

            def ids() -> list[list[str]]:
                return [[request.headers["x-request-id"] for request in engine.received] for engine in prefill + decode]

            asked = [asyncio.create_task(ask()) for _ in range(3)]
            assert await becomes_true(lambda: sum(map(len, ids())) >= 3)
            gate.open.set()
            assert await asyncio.gather(*asked) == ["mine"] * 3
            assert all(len(set(names)) == len(names) for names in ids())
            names = {name for names_of_engine in ids() for name in names_of_engine}
            assert len(names) == 3
            assert len([name for name in names if OTHER.fullmatch(name)]) == 2
            assert await front.becomes_idle(), front.held_resources()
            for engine in prefill + decode:
                engine.received.clear()
            assert await ask() == "mine"
            assert {name for names_of_engine in ids() for name in names_of_engine} == {"mine"}

    run(main())


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/embeddings"])
def test_each_attempt_has_its_own_id(path: str) -> None:
    """An engine may not have noticed yet that the attempt before was aborted."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        for engine in prefill:
            engine.serve = failing(500, times=1)
        async with stub_rig(prefill + decode) as front:
            response = await front.post(completion(), path, {"X-Request-Id": "mine"})
            assert (response.status, response.headers["x-request-id"]) == (200, "mine")
            names = [request.headers["x-request-id"] for engine in prefill for request in engine.received]
            names += [request.headers["x-request-id"] for engine in decode for request in engine.received]
            assert names.count("mine") == 1
            assert all(name == "mine" or OTHER.fullmatch(name) for name in names)
            assert await front.becomes_idle(), front.held_resources()

    run(main())


class StubExchange:
    """A request, as far as its id is concerned."""

    def __init__(self, given: bytes) -> None:
        self.headers = [(b"x-request-id", given)] if given else []
        self.request_id = request_id_of(self.headers)

    def header(self, name: bytes) -> bytes | None:
        return dict(self.headers).get(name)


def test_gateways_that_share_engines_send_no_id_of_a_client_alone() -> None:
    """What the others have in progress is not known. An id that the gateway has drawn is unique anyway."""
    ids = RequestIds(lambda: 7, shared=True)
    drawn = StubExchange(b"")
    assert ids.enter(drawn) == drawn.request_id  # type: ignore[arg-type]
    assert ids.enter(StubExchange(b"mine")) == b"mine-0000000000000007"  # type: ignore[arg-type]
    own = RequestIds(lambda: 7)
    assert own.enter(StubExchange(b"mine")) == b"mine"  # type: ignore[arg-type]
    assert own.enter(StubExchange(b"mine")) == b"mine-0000000000000007"  # type: ignore[arg-type]
    own.leave(b"mine-0000000000000007")
    own.leave(b"mine")
    assert own.enter(StubExchange(b"mine")) == b"mine"  # type: ignore[arg-type]
