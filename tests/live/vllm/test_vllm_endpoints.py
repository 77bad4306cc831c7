"""Live: the SDKs of OpenAI and Anthropic, the gateway, and real vLLM: responses and messages with a KV transfer, and
several choices, log-probabilities, formats and tools as one server gives them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.live.vllm.gateway_rig import (
    ANSWER_TOKENS,
    GREEDY,
    TOKENS,
    Gateway,
    all_up,
    anthropic_client,
    cluster_file,
    openai_client,
    prompt,
    pulled,
    serving,
    token_ids,
    until,
    wait_until_idle,
)

from kvroute.serve.api.prompt import Prompts
from kvroute.serve.api.requests import read_completion

if TYPE_CHECKING:
    from tests.live.vllm.conftest import Pair

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

CITIES = "network aware control plane for prefill decode disaggregated inference. "
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["fox", "dog"]}},
    "required": ["a"],
    "additionalProperties": False,
}
FUNCTION = {"name": "jump", "description": "jump over", "parameters": SCHEMA}
CHAT_TOOL: Any = {"type": "function", "function": FUNCTION}
RESPONSES_TOOL: Any = {"type": "function", "strict": False, **FUNCTION}
MESSAGES_TOOL: Any = {"name": "jump", "description": "jump over", "input_schema": SCHEMA}
COLD: dict[str, Any] = {"temperature": 0}
"""Sent beside the fields that Anthropic's SDK knows."""
LONG_ENOUGH = 64
"""Output tokens that are enough for a whole tool call or object."""
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])


@pytest.fixture(scope="module")
def process(cluster: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """One gateway for all tests of the module."""
    with serving(cluster, tmp_path_factory.mktemp("gateway")) as gateway:
        yield gateway


@pytest.fixture
def gateway(process: Gateway, pair: Pair) -> Gateway:
    """The gateway, once it reports that all servers are up."""
    all_up(process, pair)
    return process


def words(seed: int, count: int = 60) -> str:
    """Return text that no other test uses, so that no server has it cached."""
    return f"{CITIES} {' '.join(map(str, prompt(count, seed)))}"


def conversation(seed: int) -> list[dict[str, Any]]:
    """Return chat messages of several parts."""
    parts = [{"type": "text", "text": words(seed)}, {"type": "text", "text": "What is that?"}]
    return [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "A fox."},
        {"role": "user", "content": "Which?"},
    ]


def as_input(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the same conversation as the input of a response."""
    first, *rest = messages
    return [first | {"content": [part | {"type": "input_text"} for part in first["content"]]}, *rest]


def moved(pair: Pair, before: float, count: int = 1) -> None:
    """Check that so many KV caches have been pulled since `before`, by the decode servers' own counters."""
    until(lambda: pulled(pair) == before + count)


def prompt_tokens(gateway: Gateway) -> int:
    """Return the number of prompt tokens that the gateway has computed for all requests."""
    return int(gateway.metric("kvroute_prompt_tokens_total"))


# Responses


@STREAMED
def test_responses_equal_those_of_one_server(pair: Pair, gateway: Gateway, streamed: bool) -> None:
    """The KV is transferred; the gateway's count of prompt tokens is the engine's."""
    before, computed = pulled(pair), prompt_tokens(gateway)
    body: dict[str, Any] = {
        "model": "tiny",
        "input": as_input(conversation(1 + streamed)),
        "instructions": "be brief",
        "max_output_tokens": ANSWER_TOKENS,
        "temperature": 0,
    }
    extra = {"ignore_eos": True, "enable_response_messages": True}
    expected = pair.alone.post("/v1/responses", body | extra)
    with gateway.client() as client:
        reply: Any = client.responses.create(**body, stream=streamed, extra_body=extra)
        if streamed:
            events = list(reply)
            text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
            assert [event.sequence_number for event in events] == list(range(len(events)))
            assert events[0].type == "response.created"
            assert events[-1].type == "response.completed"
            reply = events[-1].response
            assert text == reply.output_text
    moved(pair, before)
    assert reply.output_text == expected["output"][0]["content"][0]["text"]
    for name in ("input_messages", "output_messages"):
        assert [part["tokens"] for part in reply.model_extra[name]] == [part["tokens"] for part in expected[name]]
    assert len(reply.model_extra["output_messages"][0]["tokens"]) == reply.usage.output_tokens == ANSWER_TOKENS
    assert prompt_tokens(gateway) - computed == reply.usage.input_tokens
    wait_until_idle(gateway)


def test_the_output_of_a_response_has_log_probabilities(pair: Pair, gateway: Gateway) -> None:
    """Those of the decode instance equal those of one server up to rounding."""
    before = pulled(pair)
    body: dict[str, Any] = {
        "model": "tiny",
        "input": words(10),
        "max_output_tokens": 5,
        "temperature": 0,
        "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
    }
    expected = pair.alone.post("/v1/responses", body)["output"][0]["content"][0]["logprobs"]
    with gateway.client() as client:
        reply: Any = client.responses.create(**body)
    moved(pair, before)
    got = reply.output[0].content[0].logprobs
    assert [token.token for token in got] == [token["token"] for token in expected]
    assert [token.logprob for token in got] == pytest.approx([token["logprob"] for token in expected], abs=1e-3)
    assert [len(token.top_logprobs) for token in got] == [2] * len(expected)


def test_a_response_follows_a_schema_or_calls_a_tool(pair: Pair, gateway: Gateway) -> None:
    before = pulled(pair)
    text = {"format": {"type": "json_schema", "name": "animal", "schema": SCHEMA}}
    body: dict[str, Any] = {"model": "tiny", "max_output_tokens": LONG_ENOUGH, "temperature": 0}
    wanted: list[dict[str, Any]] = [
        {"input": words(11), "text": text},
        {"input": words(12), "tools": [RESPONSES_TOOL], "tool_choice": "required"},
        {"input": words(13), "tools": [RESPONSES_TOOL], "tool_choice": {"type": "function", "name": "jump"}},
    ]
    expected = [pair.alone.post("/v1/responses", body | options)["output"] for options in wanted]
    with gateway.client() as client:
        replies: list[Any] = [client.responses.create(**body, **options) for options in wanted]
    moved(pair, before, 3)
    assert replies[0].output_text == expected[0][0]["content"][0]["text"]
    for reply, other in zip(replies, expected, strict=True):
        assert outputs_of([item.model_dump() for item in reply.output]) == outputs_of(other)


def outputs_of(output: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return the texts and tool calls in the output of a response, whose ids are random."""
    texts = [[part["text"] for part in item.get("content") or ()] for item in output]
    return [
        (part["type"], text, part.get("name"), part.get("arguments")) for part, text in zip(output, texts, strict=True)
    ]


# Messages


@STREAMED
def test_messages_equal_those_of_one_server(pair: Pair, gateway: Gateway, streamed: bool) -> None:
    """The KV is transferred; the gateway's count of prompt tokens is the engine's, and `count_tokens` says the same."""
    before, computed = pulled(pair), prompt_tokens(gateway)
    prompt_fields: dict[str, Any] = {
        "model": "tiny",
        "system": [{"type": "text", "text": "be brief"}],
        "messages": conversation(20 + streamed),
    }
    body = prompt_fields | {"max_tokens": ANSWER_TOKENS}
    expected = pair.alone.post("/v1/messages", body | COLD)
    client = anthropic_client(gateway.url)
    with client:
        if streamed:
            with client.messages.stream(**body, extra_body=COLD) as stream:
                text = "".join(stream.text_stream)
                reply = stream.get_final_message()
            assert text == reply.content[0].text
        else:
            reply = client.messages.create(**body, extra_body=COLD)
        counted = client.messages.count_tokens(**prompt_fields).input_tokens
    moved(pair, before)
    assert [block.text for block in reply.content if block.type == "text"] == [
        block["text"] for block in expected["content"]
    ]
    assert (reply.stop_reason, reply.usage.output_tokens) == (
        expected["stop_reason"],
        expected["usage"]["output_tokens"],
    )
    cached = reply.usage.cache_read_input_tokens or 0
    assert prompt_tokens(gateway) - computed == reply.usage.input_tokens + cached == counted
    wait_until_idle(gateway)


def test_a_message_calls_a_tool(pair: Pair, gateway: Gateway) -> None:
    """Any tool, or a named one: vLLM parses the output of a named tool as JSON, which the one token of a prefill leg is
    not. The output of this model is not complete, so that only streams show it."""
    before = pulled(pair)
    body: dict[str, Any] = {"model": "tiny", "max_tokens": LONG_ENOUGH, "tools": [MESSAGES_TOOL]}
    choices: list[Any] = [{"type": "any"}, {"type": "tool", "name": "jump"}]
    wanted = [{"messages": conversation(30 + index), "tool_choice": choice} for index, choice in enumerate(choices)]
    with anthropic_client(gateway.url) as client, anthropic_client(pair.alone.url) as other:
        expected = [
            parts_of(other.messages.create(**body, **options, stream=True, extra_body=COLD)) for options in wanted
        ]
        got = [parts_of(client.messages.create(**body, **options, stream=True, extra_body=COLD)) for options in wanted]
    moved(pair, before, 2)
    assert got == expected
    assert got[1][0] == "jump"


def parts_of(stream: Any) -> list[str]:
    """Return the names of tools and the pieces of text and arguments in a stream."""
    parts: list[str] = []
    for event in stream:
        if event.type == "content_block_start" and event.content_block.type == "tool_use":
            parts.append(event.content_block.name)
        elif event.type == "content_block_delta":
            parts.append(str(getattr(event.delta, "partial_json", None) or getattr(event.delta, "text", "")))
    return parts


@pytest.mark.parametrize("api", ["responses", "messages"])
def test_a_corrupted_block_changes_the_text(pair: Pair, gateway: Gateway, api: str) -> None:
    """The negative control of the tests above: the decode instance computes with the KV that it has pulled."""
    before = pulled(pair)
    messages = conversation(40 + len(api))
    limit = "max_output_tokens" if api == "responses" else "max_tokens"
    body: dict[str, Any] = {"model": "tiny", limit: ANSWER_TOKENS}
    body |= {"input": as_input(messages)} if api == "responses" else {"messages": messages}
    expected = pair.alone.post(f"/v1/{api}", body | COLD)
    pair.prefill.fault_file.write_text("corrupt-layer-2-block-1", encoding="utf-8")
    if api == "responses":
        with gateway.client() as client:
            text = client.responses.create(**body, extra_body=COLD).output_text
        right = expected["output"][0]["content"][0]["text"]
    else:
        with anthropic_client(gateway.url) as other:
            text = "".join(
                block.text for block in other.messages.create(**body, extra_body=COLD).content if block.type == "text"
            )
        right = expected["content"][0]["text"]
    moved(pair, before)
    assert text != right


def test_errors_are_those_of_the_sdk(gateway: Gateway) -> None:
    """An engine rejects a field, or the gateway a prompt that is too long for the model."""
    import openai

    with gateway.client() as client, pytest.raises(openai.BadRequestError, match="context length"):
        client.responses.create(model="tiny", input="a b " * 9000)
    with anthropic_client(gateway.url) as other:
        import anthropic

        with pytest.raises(anthropic.BadRequestError) as caught:
            other.messages.create(model="tiny", max_tokens=3, messages=[{"role": "user", "content": "a b " * 9000}])
        assert caught.value.type == "invalid_request_error"
        with pytest.raises(anthropic.BadRequestError):
            other.messages.create(model="tiny", max_tokens=3, messages=[{"role": "tool", "content": "a"}])


# Prompts

TURNS: list[dict[str, Any]] = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "Which animal jumps?"}, {"type": "text", "text": "Be quick."}],
    },
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "the fox", "signature": "a"},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "c1", "name": "jump", "input": {"a": "fox"}},
            {"type": "tool_use", "id": "c2", "name": "jump", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "And now?"},
            {"type": "tool_result", "tool_use_id": "c1", "content": "high"},
            {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "low"}]},
        ],
    },
    {"role": "system", "content": "Answer in one word."},
]
ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "input_text", "text": "Which animal jumps?"}]},
    {"type": "reasoning", "id": "r1", "summary": [], "content": [{"type": "reasoning_text", "text": "the fox"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
    {"type": "function_call", "call_id": "c1", "name": "jump", "arguments": '{"a": "fox"}'},
    {"type": "function_call", "call_id": "c2", "name": "jump", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "high"},
    {"type": "function_call_output", "call_id": "c2", "output": "low"},
    {"role": "assistant", "content": "Both."},
    {"role": "developer", "content": "Answer in one word."},
]
CHAT_TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "x-anthropic-billing-header: cch=1\nbe brief"},
    {"role": "user", "content": "Which animal jumps?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "jump", "arguments": '{"a": "fox"}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "high"}]},
]
RENDERED: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", {"messages": CHAT_TURNS}),
    ("chat/completions", {"messages": CHAT_TURNS, "tools": [CHAT_TOOL], "tool_choice": "required"}),
    ("chat/completions", {"messages": CHAT_TURNS, "reasoning_effort": "low"}),
    ("responses", {"input": "Which animal jumps?"}),
    ("responses", {"input": ITEMS, "instructions": "be brief"}),
    ("responses", {"input": ITEMS, "tools": [RESPONSES_TOOL], "tool_choice": "required"}),
    ("responses", {"input": ITEMS, "tools": [RESPONSES_TOOL, {"type": "web_search"}], "reasoning": {"effort": "high"}}),
    ("messages", {"messages": [{"role": "user", "content": "Which animal jumps?"}], "max_tokens": 3}),
    ("messages", {"messages": TURNS, "system": "be brief", "max_tokens": 3}),
    ("messages", {"messages": TURNS, "tools": [MESSAGES_TOOL], "tool_choice": {"type": "any"}, "max_tokens": 3}),
    (
        "messages",
        {
            "messages": TURNS,
            "system": [{"type": "text", "text": "x-anthropic-billing-header: a"}, {"type": "text", "text": "be brief"}],
            "thinking": {"type": "disabled"},
            "max_tokens": 3,
        },
    ),
    ("messages", {"messages": TURNS, "output_config": {"effort": "max"}, "max_tokens": 3}),
]


def test_prompts_are_those_that_vllm_renders(pair: Pair) -> None:
    """Token by token, for every part of a conversation that the gateway reads."""
    prompts = Prompts(pair.model, block_tokens=32)
    for path, fields in RENDERED:
        body = {"model": "tiny", **fields}
        expected = pair.alone.post(f"/v1/{path}/render", body)["token_ids"]
        completion = read_completion(f"/v1/{path}".encode(), json.dumps(body).encode())
        found = prompts.blocks_now(completion)
        assert found is not None
        if any(tool.get("type") == "web_search" for tool in fields.get("tools", ())):
            assert completion.one_leg
            assert found.ids is None
        else:
            assert found.ids == expected, (path, fields)
    prompts.close()


@pytest.mark.parametrize("api", ["responses", "messages"])
def test_a_second_turn_is_routed_to_its_cached_prefix(pair: Pair, gateway: Gateway, api: str) -> None:
    """The hashes of the gateway are those in the engines' KV events."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": words(50 + len(api), 200)}]
    limit = "max_output_tokens" if api == "responses" else "max_tokens"
    name = "input" if api == "responses" else "messages"

    def send() -> int:
        """Send the conversation and return how many of its tokens the chosen prefill instance had."""
        before = gateway.metric("kvroute_prefix_hit_tokens_total", leg="prefill")
        body: dict[str, Any] = {"model": "tiny", name: messages, limit: 2, "extra_body": COLD}
        if api == "responses":
            with gateway.client() as client:
                client.responses.create(**body)
        else:
            with anthropic_client(gateway.url) as other:
                other.messages.create(**body)
        return int(gateway.metric("kvroute_prefix_hit_tokens_total", leg="prefill") - before)

    def cached() -> bool:
        """Return whether the blocks of the first turn are in the engines' KV events; the log is flushed from time to
        time."""
        stored = {block for event in gateway.events("kv_stored") for block in event["blocks"]}
        requests = [event["request"] for event in gateway.events("arrived")]
        return any(set(request["blocks"]) <= stored for request in requests if request["input_tokens"] == first)

    computed = prompt_tokens(gateway)
    assert send() == 0
    first = prompt_tokens(gateway) - computed
    until(cached)
    messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And?"}]
    assert send() >= first - 64
    wait_until_idle(gateway)


# Chat completions


def test_several_choices_and_log_probabilities_of_the_prompt_need_one_instance(pair: Pair, gateway: Gateway) -> None:
    """They are those of one server; no KV is transferred."""
    before = pulled(pair)
    messages: list[Any] = [{"role": "user", "content": words(60)}]
    body: dict[str, Any] = {"model": "tiny", "messages": messages, **GREEDY}
    several: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 7}
    with gateway.client() as client:
        reply = client.chat.completions.create(**body | several, extra_body=TOKENS)
        scored: Any = client.chat.completions.create(**body, extra_body=TOKENS | {"prompt_logprobs": 1})
    expected = pair.alone.post("/v1/chat/completions", body | several | TOKENS)["choices"]
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert [token_ids(choice) for choice in reply.choices] == [choice["token_ids"] for choice in expected]
    right = pair.alone.post("/v1/chat/completions", body | TOKENS | {"prompt_logprobs": 1})
    got = scored.model_extra["prompt_logprobs"]
    assert len(got) == scored.usage.prompt_tokens == len(right["prompt_logprobs"])
    for mine, other in zip(got[1:], right["prompt_logprobs"][1:], strict=True):
        assert set(mine) == set(other)
    assert token_ids(scored.choices[0]) == right["choices"][0]["token_ids"]
    wait_until_idle(gateway)
    assert pulled(pair) == before


@STREAMED
def test_formats_tools_and_parts_are_split_like_other_chats(pair: Pair, gateway: Gateway, streamed: bool) -> None:
    """Log-probabilities of the output, a schema, tools by any choice, and several text parts."""
    before = pulled(pair)
    schema = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}
    named = {"type": "function", "function": {"name": "jump"}}
    wanted: list[dict[str, Any]] = [
        {"logprobs": True, "top_logprobs": 2},
        {"response_format": schema},
        {"response_format": {"type": "json_object"}},
        {"tools": [CHAT_TOOL], "tool_choice": "required"},
        {"tools": [CHAT_TOOL], "tool_choice": named},
        {"tools": [CHAT_TOOL], "tool_choice": "auto"},
        {"tools": [CHAT_TOOL], "tool_choice": "none"},
    ]
    bodies = [
        {
            "model": "tiny",
            "messages": conversation(70 + 10 * streamed + index),
            "max_tokens": LONG_ENOUGH,
            "temperature": 0,
        }
        | fields
        for index, fields in enumerate(wanted)
    ]
    got, expected = (
        [message_of(client.chat.completions.create(**body, stream=streamed), streamed) for body in bodies]  # type: ignore[call-overload]
        for client in (gateway.client(), openai_client(pair.alone.url))
    )
    moved(pair, before, len(wanted))
    assert got == expected
    assert [name for name, _ in got[4][1]] == ["jump"]


def message_of(answer: Any, streamed: bool) -> tuple[str, list[tuple[str, str]]]:
    """Return text and tool calls of a chat completion."""
    if not streamed:
        message = answer.choices[0].message
        return message.content or "", [
            (call.function.name, call.function.arguments) for call in message.tool_calls or ()
        ]
    text, names, arguments = "", list[str](), list[str]()
    for chunk in answer:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                if call.index == len(names):
                    names.append(call.function.name)
                    arguments.append("")
                arguments[call.index] += call.function.arguments or ""
    return text, list(zip(names, arguments, strict=True))


# Engines that return no transfer parameters


@pytest.mark.parametrize("api", ["responses", "messages"])
def test_a_prefill_server_without_a_connector_is_left_out(pair: Pair, tmp_path: Path, api: str) -> None:
    """Its response has no transfer parameters. The decode instance computes the prompt, and the prefill server gets no
    second request of this kind."""
    plain = replace(pair.alone, name="prefill0", ports=[*pair.alone.ports, 1])
    servers = [plain, pair.decode]
    body: dict[str, Any] = {"model": "tiny"}
    body |= {"input": words(90)} if api == "responses" else {"messages": conversation(91)}
    body["max_output_tokens" if api == "responses" else "max_tokens"] = ANSWER_TOKENS
    expected = pair.alone.post(f"/v1/{api}", body | COLD)
    with serving(pair, tmp_path, cluster_file(pair, {}, servers)) as gateway:
        all_up(gateway, pair, servers)
        before = plain.metric("vllm:request_success_total"), pulled(pair)
        for _ in range(2):
            if api == "responses":
                with gateway.client() as client:
                    reply: Any = client.responses.create(**body, extra_body=COLD)
                assert reply.output_text == expected["output"][0]["content"][0]["text"]
            else:
                with anthropic_client(gateway.url) as other:
                    message: Any = other.messages.create(**body, extra_body=COLD)
                assert message.content[0].text == expected["content"][0]["text"]
        wait_until_idle(gateway)
        assert plain.metric("vllm:request_success_total") - before[0] == 1
        assert pulled(pair) == before[1]
