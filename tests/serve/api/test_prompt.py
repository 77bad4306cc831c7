"""Prompts: equal prefixes have equal blocks; with a tokenizer the blocks equal those in the engines' KV events."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from kvroute.prefix import block_hashes
from kvroute.serve.api.chat_template import ChatTemplate
from kvroute.serve.api.json_fields import RequestError
from kvroute.serve.api.prompt import Prompts
from kvroute.serve.api.prompt_queue import QueueFull
from kvroute.serve.api.prompt_reader import MEDIA_TOKENS, Prompt
from kvroute.serve.api.requests import CONVERSATIONS, Completion, read_completion
from kvroute.types import InputError

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEMPLATE_FIELDS = CONVERSATIONS["chat"].template_fields
WORDS = "the network moves blocks of the cache; "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a byte-level tokenizer that puts <s> before a plain prompt and truncates at 8 tokens, as
    some files do."""
    folder = tmp_path_factory.mktemp("tokenizer")
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([WORDS * 5], trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    bpe.enable_truncation(8)
    bpe.save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def exact(folder: Path) -> Iterator[Prompts]:
    prompts = Prompts(folder, block_tokens=4)
    yield prompts
    prompts.close()


@pytest.fixture(scope="module")
def rough() -> Iterator[Prompts]:
    prompts = Prompts(block_tokens=4, bytes_per_token=2)
    yield prompts
    prompts.close()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> tokenizers.Tokenizer:
    loaded = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    loaded.no_truncation()
    return loaded


def test_each_model_has_its_own_tokenizer(folder: Path, tokenizer: tokenizers.Tokenizer, tmp_path: Path) -> None:
    """Its tokens, its template and its context; other models have the common one, or none."""
    other = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]"))
    other.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    other.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 8}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    own = {"byte": folder, "word": tmp_path / "tokenizer.json"}
    for prompts in (Prompts(tokenizers=own, block_tokens=2), Prompts(folder, tokenizers=own, block_tokens=2)):
        completion, rest = plain("a b a"), prompts.exact("another")
        byte = prompts.blocks_now(completion, "byte")
        assert byte is not None
        assert byte.ids == tokenizer.encode("a b a").ids
        for asked in (completion, chat("a b a")):
            word = prompts.blocks_now(asked, "word")
            assert word is not None
            assert (word.ids, word.blocks) == ([0, 1, 0], block_hashes([0, 1], 2))
        unknown = prompts.blocks_now(completion, "another")
        assert unknown is not None
        assert unknown.ids == (byte.ids if rest else None)
        assert [prompts.exact(model) for model in ("byte", "word")] == [True, True]
        assert not prompts.asks_engine(completion, "another")
        with pytest.raises(RequestError, match="context length is 8"):
            prompts.blocks_now(plain("a " * 9), "word")
        assert prompts.blocks_now(plain("a " * 9), "byte") is not None
        large = asyncio.run(prompts.blocks(plain("b " * 5, truncate_prompt_tokens=1), "word"))
        assert large.ids == [1] * 5
        prompts.close()


def test_an_engine_is_asked_for_single_texts_of_models_without_a_tokenizer(folder: Path) -> None:
    prompts = Prompts(tokenizers={"byte": folder}, ask_engines=True)
    picture = [{"type": "image_url", "image_url": {"url": "data:"}}]
    asked = {"text": plain("a"), "chat": chat("a")}
    others = {"ids": plain([1, 2]), "several": plain(["a", "b"]), "picture": chat(picture)}
    others["response"] = read_completion(b"/v1/responses", b'{"input": "a"}')
    assert all(prompts.asks_engine(completion, "another") for completion in asked.values())
    assert not any(prompts.asks_engine(completion, "another") for completion in others.values())
    assert not any(prompts.asks_engine(completion, "byte") for completion in asked.values())
    assert prompts.exact("another")
    assert not Prompts(tokenizers={"byte": folder}).asks_engine(plain("a"), "another")
    prompts.close()


def plain(prompt: object, **fields: Any) -> Completion:
    return read_completion(b"/v1/completions", json.dumps({"prompt": prompt} | fields).encode())


def chat(*contents: object, **fields: Any) -> Completion:
    messages = [{"role": "user", "content": content} for content in contents]
    return read_completion(b"/v1/chat/completions", json.dumps({"messages": messages} | fields).encode())


def read(prompts: Prompts, completion: Completion) -> Prompt:
    prompt = prompts.blocks_now(completion)
    assert prompt is not None
    return prompt


def blocks_of(tokenizer: tokenizers.Tokenizer, text: str, special: bool) -> Prompt:
    ids = tokenizer.encode(text, add_special_tokens=special).ids
    return Prompt(len(ids), block_hashes(ids, 4), 4)


@given(prompt=st.text())
def test_plain_prompts_are_tokenized_as_by_vllm(prompt: str, exact: Prompts, tokenizer: tokenizers.Tokenizer) -> None:
    assert read(exact, plain(prompt)) == blocks_of(tokenizer, prompt, special=True)
    without = read(exact, plain(prompt, add_special_tokens=False))
    assert without.blocks == blocks_of(tokenizer, prompt, special=False).blocks


@given(contents=st.lists(st.text(), min_size=1, max_size=3))
def test_chats_are_rendered_with_the_template(
    contents: list[str], exact: Prompts, tokenizer: tokenizers.Tokenizer
) -> None:
    text = "<s>" + "".join(f"<user>{content}\n" for content in contents) + "<assistant>"
    assert read(exact, chat(*contents)) == blocks_of(tokenizer, text, special=False)


@given(ids=st.lists(st.integers(0, 2**63 - 1), min_size=1), with_tokenizer=st.booleans())
def test_token_ids_are_used_unchanged(ids: list[int], with_tokenizer: bool, exact: Prompts, rough: Prompts) -> None:
    prompts = exact if with_tokenizer else rough
    assert read(prompts, plain(ids)) == Prompt(len(ids), block_hashes(ids, 4), 4)


@given(one=st.text(), other=st.text())
def test_equal_text_prefixes_have_equal_blocks(one: str, other: str, rough: Prompts) -> None:
    texts = [f"{WORDS}{one}".encode(), f"{WORDS}{other}".encode()]
    first, second = (read(rough, plain(text.decode())) for text in texts)
    assert first.input_tokens == -(-len(texts[0]) // 2)
    assert len(first.blocks) == len(texts[0]) // 8
    for index, (first_hash, second_hash) in enumerate(zip(first.blocks, second.blocks, strict=False)):
        end = 8 * (index + 1)
        assert (first_hash == second_hash) == (texts[0][:end] == texts[1][:end])


@given(text=st.text())
def test_a_block_hash_covers_all_earlier_blocks(text: str, rough: Prompts) -> None:
    one, other = (read(rough, plain(head + WORDS + text)) for head in ("head one", "head two"))
    assert not set(one.blocks) & set(other.blocks)


@given(first=st.text(min_size=20), reply=st.text())
def test_the_next_turn_contains_the_blocks_of_the_previous_one(first: str, reply: str, rough: Prompts) -> None:
    earlier, later = read(rough, chat(WORDS, first)), read(rough, chat(WORDS, first, reply))
    assert earlier.blocks == later.blocks[: len(earlier.blocks)]
    assert earlier.blocks


def test_different_salts_give_different_blocks(rough: Prompts, exact: Prompts) -> None:
    for prompts in (rough, exact):
        bare, salted, other = (
            read(prompts, plain(WORDS, **salt)) for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"})
        )
        assert bare.input_tokens == salted.input_tokens
        assert not set(bare.blocks) & set(salted.blocks)
        assert not set(other.blocks) & set(salted.blocks)
        assert read(prompts, plain(WORDS, cache_salt="a")) == salted


def test_lengths_of_several_prompts_are_added(rough: Prompts, exact: Prompts, tokenizer: tokenizers.Tokenizer) -> None:
    several = read(rough, plain(["a" * 9, "b" * 4]))
    assert several == Prompt(7, read(rough, plain("a" * 9)).blocks, 4)
    assert read(exact, plain([[1, 2, 3], [4]])).input_tokens == 4
    lengths = [blocks_of(tokenizer, text, special=True).input_tokens for text in ("one", "two two")]
    assert read(exact, plain(["one", "two two"])).input_tokens == sum(lengths)


def test_an_empty_prompt_counts_as_one_token(rough: Prompts) -> None:
    assert read(rough, plain("")) == Prompt(1, (), 4)
    assert read(rough, plain(None, prompt_embeds="AAAA")) == Prompt(1, (), 4)


def test_large_prompts_are_read_in_a_thread(folder: Path) -> None:
    for prompts in (Prompts(folder, inline_bytes=64), Prompts(inline_bytes=64)):
        for small, large in (
            (plain("a" * 64), plain("a" * 65)),
            (plain(["a" * 32] * 2), plain(["a" * 32] * 3)),
        ):
            assert prompts.blocks_now(large) is None
            now, later = prompts.blocks_now(small), asyncio.run(prompts.blocks(small))
            assert now == later
            assert asyncio.run(prompts.blocks(large)).input_tokens > later.input_tokens
        prompts.close()


@pytest.mark.parametrize("name", [name for name in TEMPLATE_FIELDS if name != "messages"])
def test_every_field_that_the_template_reads_counts_as_work(folder: Path, name: str) -> None:
    """A short chat with one large field is read in a thread, whatever the name of the field."""
    prompts = Prompts(folder, inline_bytes=1000)
    value: Any = {"preamble": "a" * 1000} if name == "chat_template_kwargs" else "a" * 1000
    assert prompts.blocks_now(chat("a" * 100)) is not None
    assert prompts.blocks_now(chat("a" * 100, **{name: value})) is None
    prompts.close()


def test_no_other_field_reaches_the_template(tmp_path: Path) -> None:
    """A template cannot see fields outside `TEMPLATE_FIELDS`, so they do not count as work."""
    names = ("metadata", "chat_template", "user", "x", "documents")
    shown = "".join(f"{{{{ {name} is defined }}}}" for name in names)
    text = rendered(tmp_path, shown, [{"role": "user", "content": "hi"}], **dict.fromkeys(names, "seen"))
    assert text == "FalseFalseFalseFalseTrue"
    assert "documents" in TEMPLATE_FIELDS


def slow_prompts(folder: Path, tmp_path: Path, wait_max_s: float) -> tuple[Prompts, threading.Event]:
    """Return a reader whose large chats take until the event is set, because their template calls a blocking clock."""
    released = threading.Event()

    def clock() -> datetime:
        assert released.wait(60)
        return datetime(2024, 7, 26)

    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    template = (
        "{% if messages[0].content | length > 70000 %}{{ strftime_now('%Y') }}{% endif %}{{ messages[0].content }}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    return Prompts(tmp_path, wait_max_s=wait_max_s, clock=clock), released


def test_small_prompts_do_not_wait_for_large_ones(folder: Path, tmp_path: Path) -> None:
    prompts, released = slow_prompts(folder, tmp_path, 60)

    async def main() -> None:
        larges = [asyncio.ensure_future(prompts.blocks(chat("a" * 100_000))) for _ in range(6)]
        async with asyncio.timeout(60):
            for _ in range(5):
                assert (await prompts.blocks(chat("b" * 5_000))).input_tokens
            assert not any(large.done() for large in larges)
            released.set()
            assert len({prompt.blocks for prompt in await asyncio.gather(*larges)}) == 1

    asyncio.run(main())
    prompts.close()


def test_close_does_not_wait_for_a_prompt_in_progress(folder: Path, tmp_path: Path) -> None:
    """After a reload the event loop closes the previous reader; the thread continues although its client has left."""
    prompts, released = slow_prompts(folder, tmp_path, 60)

    async def main() -> None:
        large = asyncio.ensure_future(prompts.blocks(chat("a" * 100_000)))
        await asyncio.sleep(0)
        in_time = threading.Timer(10, released.set)  # `close` must return before
        in_time.start()
        prompts.close()
        in_time.cancel()
        assert not released.is_set()
        released.set()
        assert (await large).input_tokens

    asyncio.run(main())


def test_a_cancelled_prompt_leaves_the_queue(folder: Path, tmp_path: Path) -> None:
    """A waiting prompt leaves at once, so that its bytes are freed; a thread that works on one gets no other prompt
    meanwhile."""
    prompts, released = slow_prompts(folder, tmp_path, 0.001)
    large = chat("a" * 100_000)

    async def main() -> None:
        async with asyncio.timeout(60):
            busy = [asyncio.ensure_future(prompts.blocks(large)) for _ in range(2)]
            await asyncio.sleep(0)
            waiting = asyncio.ensure_future(prompts.blocks(large))
            await asyncio.sleep(0)
            with pytest.raises(QueueFull):
                await prompts.blocks(large)
            waiting.cancel()
            busy[0].cancel()
            await asyncio.wait([waiting, busy[0]])
            waiting = asyncio.ensure_future(prompts.blocks(large))
            await asyncio.sleep(0)
            assert not waiting.done(), "the place in the queue is free, the thread is busy"
            released.set()
            assert (await waiting) == (await busy[1])

    asyncio.run(main())
    prompts.close()


def test_images_are_counted_as_images_and_have_blocks_of_their_own(rough: Prompts, exact: Prompts) -> None:
    def picture(data: str) -> Completion:
        url = f"data:image/png;base64,{data}"
        return chat([{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url}}])

    for prompts in (rough, exact):
        short, long = read(prompts, picture("AAAA")), asyncio.run(prompts.blocks(picture("A" * 90_000)))
        assert short.input_tokens == long.input_tokens
        assert MEDIA_TOKENS < short.input_tokens < MEDIA_TOKENS + 100
        assert read(prompts, picture("B" * 99)).blocks[-1] != read(prompts, picture("A" * 99)).blocks[-1]


def test_a_chat_that_cannot_be_rendered_is_used_as_text(exact: Prompts, folder: Path, tmp_path: Path) -> None:
    """A client's own template, a template that raises, or no template: there are blocks, but they may differ from the
    engine's."""
    own = read(exact, chat(WORDS, chat_template="{% for a in range(99999) %}{% endfor %}"))
    assert own.blocks
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    bare = Prompts(tmp_path / "tokenizer.json", block_tokens=4)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    refusing = Prompts(tmp_path, block_tokens=4)
    rough = Prompts(block_tokens=4)
    for prompts in (bare, refusing):
        assert read(prompts, chat(WORDS, "a")) == read(rough, chat(WORDS, "a"))
        prompts.close()
    rough.close()


def rendered(folder: Path, template: str, messages: object, **fields: Any) -> str | None:
    (folder / "chat_template.jinja").write_text(template)
    loaded = ChatTemplate.load(folder, lambda: datetime(2024, 7, 26))
    assert loaded is not None
    body = json.dumps({"messages": messages} | fields).encode()
    return loaded.render(read_completion(b"/v1/chat/completions", body).fields, CONVERSATIONS["chat"])


@pytest.mark.parametrize(
    ("template", "fields", "expected"),
    [
        ("{{ strftime_now('%d %b %Y') }}", {}, "26 Jul 2024"),
        ("{{ tools | tojson }}", {"tools": [{"name": "\u00e4"}]}, '[{"name": "\u00e4"}]'),
        ("{{ tools is none }}", {}, "True"),
        ("{{ add_generation_prompt }}", {"add_generation_prompt": None}, "True"),
        ("{% generation %}a{% endgeneration %}b", {}, "ab"),
        ("{% for m in messages %}{% break %}{% endfor %}x", {}, "x"),
        ("  {% if add_generation_prompt %}\ny{% endif %}", {}, "y"),
        ("{{ add_generation_prompt }}", {"add_generation_prompt": False}, "False"),
        ("{{ enable_thinking }}", {"chat_template_kwargs": {"enable_thinking": False}}, "False"),
        ("{{ x }}", {"chat_template_kwargs": [1]}, None),
        ("{{ ''.__class__.__mro__ }}", {}, None),
        ("{{ messages.append(1) }}", {}, None),
    ],
    ids=range(12),
)
def test_templates_render_as_by_transformers(
    tmp_path: Path, template: str, fields: dict[str, Any], expected: str | None
) -> None:
    assert rendered(tmp_path, template, [{"role": "user", "content": "hi"}], **fields) == expected


def test_content_parts_are_joined_unless_the_template_iterates_over_them(tmp_path: Path) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]
    assert rendered(tmp_path, "{{ messages[0].content }}", parts) == "a\nb"
    iterating = (
        "{% for message in messages %}{% for part in message['content'] %}[{{ part.text }}]{% endfor %}{% endfor %}"
    )
    assert rendered(tmp_path, iterating, parts) == "[a][b]"


def test_tool_call_arguments_reach_the_template_as_objects(tmp_path: Path) -> None:
    calls = [{"function": {"name": "f", "arguments": text}} for text in ('{"city": "Ulm"}', "")]
    messages = [{"role": "assistant", "content": None, "tool_calls": calls}]
    shown = "{{ call.function.arguments is mapping }}{{ call.function.arguments.city }};"
    template = "{% for call in messages[0].tool_calls %}" + shown + "{% endfor %}"
    assert rendered(tmp_path, template, messages) == "TrueUlm;True;"


def test_a_tokenizer_config_may_contain_several_templates(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "{{ eos_token }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named, "eos_token": "</s>"}))
    loaded = ChatTemplate.load(tmp_path)
    assert loaded is not None
    assert loaded.render(chat("a").fields, CONVERSATIONS["chat"]) == "</s>"


@pytest.mark.parametrize("named", [[{"template": "a"}], [{"name": "default"}], ["a"], 7, {"a": "b"}], ids=str)
def test_a_tokenizer_config_with_invalid_templates_is_rejected(tmp_path: Path, named: object) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    with pytest.raises(InputError, match="chat_template"):
        ChatTemplate.load(tmp_path)


def test_a_template_that_is_not_text_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"chat_template\.jinja"):
        ChatTemplate.load(tmp_path)


def test_files_that_are_not_a_tokenizer_are_rejected(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(InputError, match="tokenizer file does not exist"):
        Prompts(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="not a valid tokenizer"):
        Prompts(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("a\n{% if %}")
    with pytest.raises(InputError, match="line 2"):
        Prompts(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(InputError, match="tokenizer_config"):
        Prompts(tmp_path)
