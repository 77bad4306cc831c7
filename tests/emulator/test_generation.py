"""What emulated engines say: answers end by themselves, hold to stop strings and schemas, and call tools, as vLLM's."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.emulator.test_emulator import MODEL, PREFILL, PROMPT, Client, on_fleet
from tests.emulator.virtual_engine import prompt_of

from kvroute.emulator import EmulatedClusterSpec
from kvroute.emulator.generation.answer import LONGEST_TOKENS, SHORTEST_TOKENS, Sampling, answer_to
from kvroute.emulator.generation.words import pieces, token_bytes

COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
TEXT: dict[str, Any] = {"model": MODEL, "prompt": PROMPT}
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "degrees": {"type": "integer", "minimum": -9}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}
FUNCTIONS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("weather", "clock")
]
QUIET = EmulatedClusterSpec(kv_events=False)


def chat(**fields: Any) -> dict[str, Any]:
    """Return the body of a chat."""
    return {"model": MODEL, "messages": ASKED, **fields}


def logprob_of(entry: dict[str, Any]) -> float:
    """Return a log-probability."""
    return float(entry["logprob"])


def valid(text: str) -> dict[str, Any]:
    """Return the value of a JSON text, which is valid under SCHEMA."""
    value: dict[str, Any] = msgspec.json.decode(text)
    jsonschema_rs.validate(SCHEMA, value)
    return value


async def events_of(client: Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a stream."""
    status, data = await client.post("decode0", path, body | {"stream": True})
    assert status == 200, data
    lines = [line for line in data.split(b"\n") if line.startswith(b"data: {")]
    return [msgspec.json.decode(line[6:]) for line in lines]


def room(wanted: int) -> int:
    return min(wanted, 1000)


STOPS = st.lists(st.sampled_from(["a", "e", " b", "ab", "i", " d", "zz zz", "ba k"]), min_size=1, max_size=3)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 3), STOPS, st.integers(0, 40), st.booleans())
def test_an_answer_ends_at_the_first_stop_string(
    tokens: list[int], number: int, stops: list[str], least: int, include: bool
) -> None:
    """The text is the beginning of the free text up to the stop string that ends first, and has no earlier one beyond
    the first `least` tokens."""
    prompt = prompt_of(*tokens)
    free = answer_to(prompt, number, Sampling(limit=None, ignore_eos=True), room)
    sampling = Sampling(None, ignore_eos=True, min_tokens=least, stop=tuple(stops), include_stop=include)
    answer = answer_to(prompt, number, sampling, room)
    assert free.text().startswith(answer.text())
    assert list(free.ids())[: answer.tokens] == list(answer.ids())
    assert len(list(answer.texts())) == answer.tokens
    unchecked = len(b"".join(list(free.texts())[:least]))
    if answer.reason == "stop":
        assert answer.stop_reason in stops
        assert answer.tokens > least
        end = len(answer.text()) + (0 if include else len(str(answer.stop_reason)))
        assert free.text()[:end].endswith(str(answer.stop_reason))
        assert not any(stop in free.text()[unchecked : end - 1] for stop in stops)
    else:
        assert (answer.tokens, answer.text()) == (1000, free.text())
        assert not any(stop in free.text()[unchecked:] for stop in stops)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 3), st.integers(1, 120), st.integers(0, 120))
def test_an_answer_ends_by_itself_or_at_its_limit(tokens: list[int], number: int, limit: int, least: int) -> None:
    """The length follows from the prompt; no limit changes it, and `min_tokens` makes it longer."""
    prompt = prompt_of(*tokens)
    natural = answer_to(prompt, number, Sampling(limit=None), room)
    assert SHORTEST_TOKENS <= natural.tokens <= LONGEST_TOKENS
    assert (natural.reason, natural.stop_reason) == ("stop", None)
    bounded = answer_to(prompt, number, Sampling(limit, min_tokens=min(least, limit)), room)
    wanted = max(natural.tokens, min(least, limit))
    assert (bounded.tokens, bounded.reason) == (min(wanted, limit), "stop" if wanted <= limit else "length")
    endless = answer_to(prompt, number, Sampling(limit, ignore_eos=True), room)
    assert (endless.tokens, endless.reason) == (limit, "length")


def test_the_rest_of_an_answer_ends_where_the_answer_does() -> None:
    """A prompt that ends with the first tokens of its answer gets the others."""
    prompt = prompt_of(1, 2, 3)
    whole = answer_to(prompt, 0, Sampling(limit=None), room)
    ids = list(whole.ids())
    for count in (1, 10, len(ids) - 1):
        rest = answer_to(prompt_of(1, 2, 3, *ids[:count]), 0, Sampling(limit=None), room)
        assert (list(rest.ids()), rest.reason) == (ids[count:], "stop")


@given(st.text())
def test_a_given_text_is_that_of_its_tokens(text: str) -> None:
    parts = pieces(text.encode("utf-8", "replace"))
    assert b"".join(part for part, _ in parts) == text.encode("utf-8", "replace")
    if "\0" not in text:
        assert b"".join(token_bytes(token) for _, token in parts) == text.encode("utf-8", "replace")


def test_answers_stop_by_themselves() -> None:
    """In every API, whole and streamed, also in two legs; the reason is the API's own."""
    bodies: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        (COMPLETIONS, TEXT, {"max_tokens": 500}),
        (CHAT, chat(), {}),
        (RESPONSES, {"model": MODEL, "input": "Hello"}, {}),
        (MESSAGES, chat(), {"max_tokens": 500}),
    ]

    async def check(client: Client) -> None:
        for path, body, limit in bodies:
            document = await client.post_json("decode0", body | limit, path)
            tokens = document["usage"].get("completion_tokens", document["usage"].get("output_tokens"))
            assert SHORTEST_TOKENS <= tokens <= LONGEST_TOKENS
            events = await events_of(client, path, body | limit)
            if path in (COMPLETIONS, CHAT):
                assert document["choices"][0]["finish_reason"] == "stop"
                reasons = [event["choices"][0]["finish_reason"] for event in events]
                assert [reason for reason in reasons if reason] == ["stop"]
            elif path == RESPONSES:
                assert (document["status"], document["incomplete_details"]) == ("completed", None)
                assert events[-1]["response"]["status"] == "completed"
            else:
                assert document["stop_reason"] == "end_turn"
                assert events[-2]["delta"]["stop_reason"] == "end_turn"
        body = await client.prefilled(max_tokens=500)
        two_legs = await client.post_json("decode1", body)
        alone = await client.post_json("decode0", TEXT | {"max_tokens": 500})
        assert two_legs["choices"][0]["text"] == alone["choices"][0]["text"]
        assert two_legs["choices"][0]["finish_reason"] == "stop"

    on_fleet(check, settings=QUIET)


def test_the_limit_is_named_where_it_ends_an_answer() -> None:
    async def check(client: Client) -> None:
        body = {"model": MODEL, "input": "Hello", "max_output_tokens": 5}
        for document in (
            await client.post_json("decode0", body, RESPONSES),
            (await events_of(client, RESPONSES, body))[-1]["response"],
        ):
            assert (document["status"], document["incomplete_details"]) == (
                "incomplete",
                {"reason": "max_output_tokens"},
            )
        document = await client.post_json("decode0", chat(max_tokens=5), MESSAGES)
        assert document["stop_reason"] == "max_tokens"
        endless = await client.post_json("decode0", chat(max_tokens=300, ignore_eos=True), CHAT)
        assert (endless["usage"]["completion_tokens"], endless["choices"][0]["finish_reason"]) == (300, "length")
        longer = await client.post_json("decode0", chat(min_tokens=200), CHAT)
        assert (longer["usage"]["completion_tokens"], longer["choices"][0]["finish_reason"]) == (200, "stop")

    on_fleet(check, settings=QUIET)


def test_stop_strings_end_the_text_of_every_api() -> None:
    async def check(client: Client) -> None:
        free = (await client.post_json("decode0", TEXT | {"max_tokens": 20}))["choices"][0]["text"]
        stop = free.split()[3][:2]
        before = free[: free.index(stop)]
        document = await client.post_json("decode0", TEXT | {"max_tokens": 20, "stop": stop})
        choice = document["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (before, "stop", stop)
        events = await events_of(client, COMPLETIONS, TEXT | {"max_tokens": 20, "stop": [stop]})
        assert "".join(event["choices"][0]["text"] for event in events) == before
        assert events[-1]["choices"][0]["stop_reason"] == stop
        said = (await client.post_json("decode0", chat(max_tokens=20), MESSAGES))["content"][0]["text"]
        word = said.split()[2]
        document = await client.post_json("decode0", chat(max_tokens=20, stop_sequences=[word]), MESSAGES)
        assert (document["stop_reason"], document["stop_sequence"]) == ("stop_sequence", word)
        assert said.startswith(document["content"][0]["text"])
        ids = await events_of(client, COMPLETIONS, TEXT | {"max_tokens": 20, "return_token_ids": True})
        third = ids[2]["choices"][0]["token_ids"][0]
        document = await client.post_json("decode0", TEXT | {"max_tokens": 20, "stop_token_ids": [third]})
        assert (document["choices"][0]["stop_reason"], len(document["choices"][0]["text"].split())) == (third, 2)

    on_fleet(check, settings=QUIET)


STRUCTURED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}})),
    "chat, earlier field": (CHAT, chat(guided_json=SCHEMA)),
    "chat, text of a schema": (CHAT, chat(structured_outputs={"json": msgspec.json.encode(SCHEMA).decode()})),
    "completion": (COMPLETIONS, TEXT | {"max_tokens": 200, "structured_outputs": {"json": SCHEMA}}),
    "response": (
        RESPONSES,
        {"model": MODEL, "input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
    ),
    "message": (
        MESSAGES,
        chat(max_tokens=200, output_config={"format": {"type": "json_schema", "schema": SCHEMA}}),
    ),
}


def text_of(document: dict[str, Any]) -> str:
    """Return the text of a whole response of any API."""
    if "choices" in document:
        choice = document["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    parts = document["output"][0]["content"] if "output" in document else document["content"]
    return str(parts[0]["text"])


def pieces_of(events: list[dict[str, Any]]) -> str:
    """Return the text of a stream of any API."""
    found = []
    for event in events:
        for choice in event.get("choices", ()):
            found += [choice["text"] if "text" in choice else choice["delta"]["content"]]
        if event.get("type") in ("response.output_text.delta", "content_block_delta"):
            found.append(event["delta"] if isinstance(event["delta"], str) else event["delta"]["text"])
    return "".join(found)


def test_text_follows_the_schema_of_the_request() -> None:
    async def check(client: Client) -> None:
        for name, (path, body) in STRUCTURED.items():
            text = text_of(await client.post_json("decode0", body, path))
            assert valid(text), name
            assert pieces_of(await events_of(client, path, body)) == text, name
        document = await client.post_json("decode0", chat(response_format={"type": "json_object"}), CHAT)
        assert isinstance(msgspec.json.decode(text_of(document)), dict)
        for fields, texts in (({"choice": ["yes", "né"]}, {"yes", "né"}), ({"regex": "a{3}"}, {"aaa"})):
            document = await client.post_json("decode0", chat(structured_outputs=fields), CHAT)
            assert text_of(document) in texts
        cut = await client.post_json("decode0", STRUCTURED["chat"][1] | {"max_tokens": 2}, CHAT)
        assert (cut["choices"][0]["finish_reason"], len(text_of(cut))) == ("length", 6)
        assert (await client.post_json("decode0", chat(response_format={"type": "text"}), CHAT))["choices"]

    on_fleet(check, settings=QUIET)


def test_tools_are_called_as_the_request_chooses() -> None:
    """`auto` answers a turn of the user with a call, and a tool's result with text."""

    async def check(client: Client) -> None:
        async def said(**fields: Any) -> Any:
            return (await client.post_json("decode0", chat(tools=FUNCTIONS, **fields), CHAT))["choices"][0]

        first = await said()
        (call,) = first["message"]["tool_calls"]
        assert (first["finish_reason"], first["message"]["content"], call["function"]["name"]) == (
            "tool_calls",
            None,
            "weather",
        )
        assert valid(call["function"]["arguments"])
        turns = [*ASKED, first["message"], {"role": "tool", "tool_call_id": call["id"], "content": "rain"}]
        assert (await said(messages=turns))["message"]["content"]
        second = await said(messages=turns, tool_choice="required")
        assert second["message"]["tool_calls"][0]["function"]["name"] == "clock"
        none = await said(tool_choice="none")
        assert (none["finish_reason"], "tool_calls" in none["message"]) == ("stop", False)
        named = await said(tool_choice={"type": "function", "function": {"name": "clock"}})
        assert (named["finish_reason"], named["message"]["tool_calls"][0]["function"]["name"]) == ("stop", "clock")
        cut = await said(tool_choice="required", max_tokens=3)
        assert (cut["finish_reason"], "tool_calls" in cut["message"]) == ("length", False)

    on_fleet(check, settings=QUIET)


def test_the_deltas_of_a_call_are_those_of_the_whole_response() -> None:
    import openai

    async def check(client: Client) -> None:
        async with openai.AsyncOpenAI(base_url=client.endpoint("decode0").url + "/v1", api_key="none") as api:
            tools: Any = FUNCTIONS
            whole = await api.chat.completions.create(model=MODEL, messages=ASKED, tools=tools)  # type: ignore[arg-type]
            async with api.chat.completions.stream(model=MODEL, messages=ASKED, tools=tools) as stream:  # type: ignore[arg-type]
                async for _ in stream:
                    pass
                final = await stream.get_final_completion()
            calls = [reply.choices[0].message.tool_calls or () for reply in (whole, final)]
            one_call, other_call = (
                [(call.id, call.function.name, call.function.arguments) for call in made if call.type == "function"]
                for made in calls
            )
            assert one_call == other_call
            assert len(one_call) == 1
            assert final.choices[0].finish_reason == "tool_calls"
            flat: Any = [{"type": "function", **tool["function"], "strict": True} for tool in FUNCTIONS]
            response = await api.responses.create(model=MODEL, input="Hello", tools=flat)
            async with api.responses.stream(model=MODEL, input="Hello", tools=flat) as events:
                async for _ in events:
                    pass
                streamed = await events.get_final_response()
            one, other = response.output[0], streamed.output[0]
            assert one.type == other.type == "function_call"
            assert (one.name, one.arguments) == (other.name, other.arguments)
            assert valid(one.arguments)
            assert (response.status, response.tools[0].type, response.parallel_tool_calls) == (
                "completed",
                "function",
                True,
            )

    on_fleet(check, settings=QUIET)


def test_messages_call_tools() -> None:
    tools = [{"name": "weather", "input_schema": SCHEMA}]

    async def check(client: Client) -> None:
        body = chat(max_tokens=300, tools=tools, tool_choice={"type": "any"})
        document = await client.post_json("decode0", body, MESSAGES)
        (block,) = document["content"]
        assert (document["stop_reason"], block["type"], block["name"]) == ("tool_use", "tool_use", "weather")
        jsonschema_rs.validate(SCHEMA, block["input"])
        events = await events_of(client, MESSAGES, body)
        (begun,) = [event["content_block"] for event in events if event["type"] == "content_block_start"]
        assert (begun["type"], begun["name"], begun["input"]) == ("tool_use", "weather", {})
        parts = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
        assert msgspec.json.decode("".join(parts)) == block["input"]
        assert events[-2]["delta"]["stop_reason"] == "tool_use"
        result = {"type": "tool_result", "tool_use_id": block["id"], "content": "rain"}
        turns = [*ASKED, {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
        document = await client.post_json("decode0", chat(max_tokens=300, tools=tools, messages=turns), MESSAGES)
        assert (document["stop_reason"], document["content"][0]["type"]) == ("end_turn", "text")

    on_fleet(check, settings=QUIET)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        (CHAT, {"min_tokens": -1}, "min_tokens"),
        (CHAT, {"stop": [""]}, "stop"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tools": FUNCTIONS, "tool_choice": "sometimes"}, "tool_choice"),
        (CHAT, {"tools": FUNCTIONS, "tool_choice": {"type": "function", "function": {"name": "z"}}}, "tool_choice"),
        (CHAT, {"tools": [3]}, "tools"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format"),
        (CHAT, {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        (CHAT, {"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs"),
        (CHAT, {"structured_outputs": {"json": "{"}}, "structured_outputs"),
        (CHAT, {"structured_outputs": {"choice": [1]}}, "structured_outputs"),
        (CHAT, {"structured_outputs": {"regex": "("}}, "pattern"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        (COMPLETIONS, {"prompt": "a", "logprobs": -2}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ],
)
def test_other_values_are_refused(path: str, fields: dict[str, Any], param: str) -> None:
    """Also on a prefill leg, which says the same."""

    async def check(client: Client) -> None:
        for name, leg in (("decode0", {}), ("prefill0", PREFILL)):
            status, data = await client.post(name, path, chat(**fields) | leg)
            assert (status, msgspec.json.decode(data)["error"]["param"]) == (400, param), name

    on_fleet(check, settings=QUIET)


def test_log_probabilities_are_those_of_vllm() -> None:
    """Log-probabilities are the same in whole and streamed responses, in chats and through SDKs."""

    async def check(client: Client) -> None:
        body = TEXT | {"prompt": "ab cd ef", "max_tokens": 4}
        document = await client.post_json("decode0", body | {"logprobs": 2, "prompt_logprobs": 1})
        found = document["choices"][0]["logprobs"]
        assert "".join(found["tokens"]) == document["choices"][0]["text"]
        assert found["text_offset"] == [0, 4, 8, 12]
        assert [len(likely) for likely in found["top_logprobs"]] == [2] * 4
        for token, value, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
            assert max(top.values()) == top[token] == value <= 0
        events = await events_of(client, COMPLETIONS, body | {"logprobs": 2})
        for name, values in found.items():
            assert [choice for event in events for choice in event["choices"][0]["logprobs"][name]] == values
        of_prompt = document["choices"][0]["prompt_logprobs"]
        tokens = (await client.post_json("decode0", {"prompt": "ab cd ef"}, "/tokenize"))["tokens"]
        assert of_prompt[0] is None
        assert of_prompt[1][str(tokens[1])]["decoded_token"] == "d ef"
        longer = await client.post_json("decode0", TEXT | {"max_tokens": 1, "prompt_logprobs": 2})
        tokens = (await client.post_json("decode0", {"prompt": PROMPT}, "/tokenize"))["tokens"]
        ranked = list(zip(tokens, longer["choices"][0]["prompt_logprobs"], strict=True))[1:]
        first = [
            (of[str(token)]["rank"] == 1, max(of.values(), key=logprob_of) == of[str(token)]) for token, of in ranked
        ]
        assert {own == other for own, other in first} == {True}
        assert {first_of_pair for first_of_pair, _ in first} == {True, False}
        said = await client.post_json("decode0", chat(max_tokens=3, logprobs=True, top_logprobs=2), CHAT)
        content = said["choices"][0]["logprobs"]["content"]
        assert "".join(entry["token"] for entry in content) == said["choices"][0]["message"]["content"]
        assert [bytes(entry["bytes"]).decode() for entry in content] == [entry["token"] for entry in content]
        assert all(entry["top_logprobs"][0]["logprob"] == entry["logprob"] for entry in content)
        events = await events_of(client, CHAT, chat(max_tokens=3, logprobs=True, top_logprobs=2))
        assert [choice for event in events[1:] for choice in event["choices"][0]["logprobs"]["content"]] == content
        include = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 3}
        response = await client.post_json("decode0", {"model": MODEL, "input": "x", **include}, RESPONSES)
        assert [len(entry["top_logprobs"]) for entry in response["output"][0]["content"][0]["logprobs"]] == [2] * 3

    on_fleet(check, settings=QUIET)


def test_an_echo_begins_with_the_prompt() -> None:
    async def check(client: Client) -> None:
        body = TEXT | {"prompt": "ab cd ef", "max_tokens": 2, "echo": True, "logprobs": 1}
        document = await client.post_json("decode0", body)
        choice = document["choices"][0]
        assert choice["text"].startswith("ab cd ef ")
        assert (choice["logprobs"]["tokens"][:2], choice["logprobs"]["token_logprobs"][0]) == (["ab c", "d ef"], None)
        assert len(choice["logprobs"]["tokens"]) == 4
        events = await events_of(client, COMPLETIONS, body)
        assert pieces_of(events) == choice["text"]
        assert [offset for event in events for offset in event["choices"][0]["logprobs"]["text_offset"]] == [
            0,
            4,
            8,
            12,
        ]
        alone = await client.post_json("decode0", body | {"max_tokens": 0})
        assert alone["choices"][0]["text"] == "ab cd ef"
        assert alone["choices"][0]["logprobs"]["tokens"] == ["ab c", "d ef"]
        longer = await client.post_json("decode0", body | {"prompt": "ab cd ef gh"})
        assert longer["choices"][0]["logprobs"]["token_logprobs"][1] == choice["logprobs"]["token_logprobs"][1]
        turns = [*ASKED, {"role": "assistant", "content": "It is"}]
        said = await client.post_json("decode0", chat(messages=turns, echo=True), CHAT)
        assert said["choices"][0]["message"]["content"].startswith("It is ")

    on_fleet(check, settings=QUIET)


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_differ_in_length_and_text(stream: bool) -> None:
    async def check(client: Client) -> None:
        if stream:
            events = await events_of(client, CHAT, chat(n=3))
            texts = [
                pieces_of([event for event in events if event["choices"][0]["index"] == number]) for number in range(3)
            ]
        else:
            document = await client.post_json("decode0", chat(n=3), CHAT)
            texts = [choice["message"]["content"] for choice in document["choices"]]
            assert document["usage"]["completion_tokens"] == sum(len(text.split()) for text in texts)
        assert len(set(texts)) == 3
        assert len({len(text.split()) for text in texts}) > 1

    on_fleet(check, settings=QUIET)
