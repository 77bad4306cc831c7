"""Streams that break off are continued by another engine, if the settings and the request allow it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import uvloop
from tests.serve.rig import CHAT, MODEL, GatewayResponse, Rig, rig

from kvroute.control import decisions_equal, replay
from kvroute.control.log import read_log
from kvroute.emulator.prompt import OUTPUT_ID
from kvroute.topology import parse

ON = "  retries: {continue_streams: true, attempts: 4}\n"
PROMPT = "What is a KV cache? " * 20
TOKENS = 24
COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
DECODES = ("decode0", "decode1")
MESSAGES = [{"role": "user", "content": PROMPT}]


async def break_streams(gate: Rig, tokens: int, *, times: int = 1) -> None:
    """Let the next decodes of each decode engine break off after this number of tokens."""
    for name in DECODES:
        await gate.command(name, fail_next=times, status="reset", leg="decode", after_tokens=tokens)


async def ask(gate: Rig, kind: str = "completions", **more: Any) -> GatewayResponse:
    """Request a stream."""
    body: dict[str, Any] = {"model": MODEL, "max_tokens": TOKENS, "stream": True, **more}
    if kind == "chat":
        return await gate.post({"messages": MESSAGES, **body}, path=CHAT)
    return await gate.post({"prompt": PROMPT, **body})


def content(event: dict[str, Any]) -> list[tuple[Any, Any, Any]]:
    """Return what a client reads in an event."""
    return [(choice.get("text"), choice.get("delta"), choice["finish_reason"]) for choice in event["choices"]]


def counted(gate: Rig, sample: str) -> float:
    """Return a sample of the gateway's metrics."""
    lines = "".join(gate.gateway.metrics.page()[1]).splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{sample} "))


@pytest.mark.parametrize("kind", ["completions", "chat"])
@pytest.mark.parametrize("usage", [False, True], ids=["plain", "usage"])
def test_a_stream_that_breaks_off_has_the_events_of_a_whole_one(kind: str, usage: bool) -> None:
    """Each decode engine breaks off once, so the response has parts of three engines. Its id and its counts are those
    of one response, and the client sees no token ids."""
    more = {"stream_options": {"include_usage": True}} if usage else {}

    async def run() -> None:
        async with rig(ON) as gate:
            whole = await ask(gate, kind, **more)
            await break_streams(gate, 5)
            broken = await ask(gate, kind, **more)
            assert broken.status == whole.status == 200
            assert broken.body.endswith(b"data: [DONE]\n\n")
            assert [content(event) for event in broken.events] == [content(event) for event in whole.events]
            assert len({(event["id"], event["object"], event["created"]) for event in broken.events}) == 1
            for event in broken.events:
                for holder in (event, *event["choices"]):
                    assert holder.get("token_ids") is None
                    assert holder.get("prompt_token_ids") is None
            if usage:
                assert [broken.events[-1]["usage"][name] for name in COUNTS] == [
                    whole.events[-1]["usage"][name] for name in COUNTS
                ]
            assert counted(gate, "kvroute_continued_streams_total") == 2
            assert counted(gate, "kvroute_stream_errors_total") == 0
            assert counted(gate, f'kvroute_requests_total{{endpoint="{kind}",code="200"}}') == 2
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(run())


def test_the_log_of_continued_streams_replays(tmp_path: Path) -> None:
    """A continuation is a failed decode whose KV cache is lost, and new legs."""
    log = tmp_path / "events.log"

    async def run() -> None:
        async with rig(f"{ON}  log: {{events: {log}}}\n") as gate:
            for number in range(3):
                await break_streams(gate, 5)
                assert (await ask(gate, prompt=f"{number} {PROMPT}")).events[-1]["choices"][0]["finish_reason"]
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(run())
    header, records = read_log(log)
    control = header.spec.build(parse(header.cluster))
    for record, again in replay(control, records):
        assert decisions_equal(record.decisions, again)
    assert control.in_flight == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": 1},
        {"stop": ["x"]},
        {"logprobs": 1},
        {"frequency_penalty": 0.5},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a{60}"}},
        {"return_token_ids": True},
        {"unknown": 1},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_request_whose_next_token_depends_on_more_than_tokens_is_not_continued(fields: dict[str, Any]) -> None:
    """Its stream ends with an error event, as without the setting."""

    async def run() -> None:
        async with rig(ON) as gate:
            await break_streams(gate, 5)
            broken = await ask(gate, **fields)
            assert broken.events[-1]["error"]["type"] == "upstream_error"
            assert counted(gate, "kvroute_continued_streams_total") == 0

    uvloop.run(run())


@pytest.mark.parametrize(
    ("retries", "continued"), [("{attempts: 4}", 0), ("{continue_streams: true, attempts: 3}", 2)], ids=["off", "limit"]
)
def test_a_stream_that_may_not_be_continued_ends_with_an_error_event(retries: str, continued: int) -> None:
    """It is off by default, and continuations count as attempts."""

    async def run() -> None:
        async with rig(f"  retries: {retries}\n") as gate:
            await break_streams(gate, 5, times=3)
            broken = await ask(gate)
            *tokens, last = broken.events
            assert last["error"]["type"] == "upstream_error"
            assert 1 <= len(tokens) <= 5 * (continued + 1)
            assert counted(gate, "kvroute_continued_streams_total") == continued
            assert counted(gate, "kvroute_stream_errors_total") == 1
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(run())


def test_a_continuation_that_finds_no_engine_ends_with_an_error_event() -> None:
    """The prefill of the rest fails on all instances."""

    async def run() -> None:
        async with rig(ON) as gate:
            await break_streams(gate, 5)
            for name in ("prefill0", "prefill1"):  # prompts with output tokens fail
                await gate.command(name, status=500, leg="prefill", prompt_contains=str(OUTPUT_ID)[:4])
            broken = await ask(gate)
            assert broken.events[-1]["error"]["type"] == "upstream_error"
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(run())
