"""The load generator: prompts share prefixes exactly as their traces do, and responses are classified on arrival."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from kvroute.load import (
    VOCABULARY,
    EventStreamParser,
    ReplayedResponse,
    TimedRequest,
    prompt_tokens,
    replay_trace,
    timed_requests,
)
from kvroute.prefix import block_hashes
from kvroute.sim.workload import TracedRequest
from kvroute.types import InputError

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN, DONE, ERROR = b'data: {"choices":[]}\n\n', b"data: [DONE]\n\n", b'data: {"error":{"message":"gone"}}\n\n'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def streamed(*events: bytes) -> bytes:
    return STREAM + b"".join(map(chunk, events)) + b"0\r\n\r\n"


def traced(blocks: tuple[int, ...], input_tokens: int, block_tokens: int = 8) -> TracedRequest:
    return TracedRequest(0.0, input_tokens, 3, blocks, block_tokens)


@given(st.lists(st.integers(0, 2**63), max_size=6), st.lists(st.integers(0, 2**63), max_size=6), st.integers(5, 20))
def test_prompts_share_exactly_the_blocks_of_their_traces(one: list[int], two: list[int], size: int) -> None:
    """The block hashes of two prompts are equal exactly as far as the IDs in their traces are."""
    prompts = [prompt_tokens(traced(tuple(ids), len(ids) * size + 7, size), n) for n, ids in enumerate((one, two))]
    first, second = (block_hashes(prompt[:-7], size) for prompt in prompts)
    shared = next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    assert first[:shared] == second[:shared]
    assert set(first[shared:]).isdisjoint(second[shared:])
    for prompt, ids in zip(prompts, (one, two), strict=True):
        assert len(prompt) == len(ids) * size + 7
        assert all(0 <= token < VOCABULARY for token in prompt)


def test_tokens_beyond_the_shared_blocks_are_unique() -> None:
    prompts = {tuple(prompt_tokens(traced((), 12), number)) for number in range(100)}
    assert len(prompts) == 100


@given(st.integers(0, 5), st.sampled_from([DONE, ERROR, b""]), st.data())
def test_parsed_events_do_not_depend_on_chunk_boundaries(tokens: int, end: bytes, data: st.DataObject) -> None:
    content, pieces = TOKEN * tokens + end, []
    while content:
        size = data.draw(st.integers(1, len(content)))
        pieces.append(content[:size])
        content = content[size:]
    answer = ReplayedResponse(due_s=0.0)
    events = EventStreamParser(answer, 0.0)
    for piece in pieces:
        events.feed(piece)
    assert len(answer.token_s) == tokens
    assert bool(answer.error) == (end == ERROR)
    assert bool(events.verdict(200)) == (end != DONE)


def test_requests_without_output_tokens_are_not_sent() -> None:
    requests = [traced((1,), 8), msgspec.structs.replace(traced((2,), 8), output_tokens=0)]
    (only,) = timed_requests(requests, "m")
    body = msgspec.json.decode(only.body)
    assert body["max_tokens"] == 3
    assert body["prompt"] == prompt_tokens(requests[0], 0)
    assert body["stream"] is True


def replayed(replies: list[bytes], timeout_s: float = 30.0) -> list[ReplayedResponse]:
    """Play one request for each reply, in order; an empty reply is never sent."""

    async def scenario() -> list[ReplayedResponse]:
        quiet = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while head := await reader.readuntil(b"\r\n\r\n"):
                    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                    number = int(await reader.readexactly(length))
                    reply = replies[number]
                    if not reply:
                        await quiet.wait()
                    writer.write(reply)
                    if not reply.endswith(b"0\r\n\r\n") and b"content-length" not in reply:
                        break
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        requests = [TimedRequest(0.0, b"%d" % number) for number in range(len(replies))]
        answers = await replay_trace(f"http://127.0.0.1:{port}", requests, timeout_s=timeout_s)
        quiet.set()
        server.close()
        await server.wait_closed()
        return answers

    return uvloop.run(scenario())


def test_every_request_gets_its_own_response_in_order() -> None:
    replies = [streamed(*[TOKEN] * count, DONE) for count in (1, 4, 2)]
    answers = replayed(replies)
    assert [len(answer.token_s) for answer in answers] == [1, 4, 2]
    assert all(answer.ok for answer in answers)
    for answer in answers:
        assert answer.sent_s is not None
        assert answer.ttft_s is not None
        assert answer.finished_s is not None
        assert answer.sent_s <= answer.token_s[0] <= answer.finished_s


@pytest.mark.parametrize(
    ("reply", "reason", "tokens"),
    [
        pytest.param(streamed(TOKEN, ERROR), "gone", 1, id="error event"),
        pytest.param(streamed(TOKEN), "without [DONE]", 1, id="no done"),
        pytest.param(STREAM + chunk(TOKEN), "connection broke", 1, id="broken off"),
        pytest.param(b"HTTP/1.1 503 No\r\ncontent-length: 4\r\n\r\nfull", "status 503: full", 0, id="status"),
        pytest.param(b"nonsense\r\n\r\n", "malformed", 0, id="malformed"),
    ],
)
def test_a_failed_response_has_a_reason(reply: bytes, reason: str, tokens: int) -> None:
    (answer,) = replayed([reply])
    assert not answer.ok
    assert reason in answer.error
    assert len(answer.token_s) == tokens


def test_a_silent_server_times_out() -> None:
    (silent,) = replayed([b""], timeout_s=0.05)
    assert not silent.ok
    assert "no complete response within" in silent.error


def test_only_plain_http_is_supported() -> None:
    with pytest.raises(InputError, match="give http://host:port"):
        asyncio.run(replay_trace("https://127.0.0.1:1", []))


def test_a_closed_port_is_reported() -> None:
    async def scenario() -> list[ReplayedResponse]:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        return await replay_trace(f"http://127.0.0.1:{port}", [TimedRequest(0.0, b"0")])

    (answer,) = asyncio.run(scenario())
    assert not answer.ok
    assert answer.error
